"""Documents are functions of the log: folding in steps or at once is the same."""

from __future__ import annotations

import msgspec
from hypothesis import given, strategies as st

from perdure.memory.documents import (
    SessionDocument,
    StateSet,
    TurnPayload,
    fold_items,
    fold_session,
    fold_state,
    names_of,
    typed,
)
from perdure.memory.index import DroppedPayload, MemoryDocument, MemoryEntry, split_memory
from perdure.records.keys import SessionKey
from perdure.records.records import (
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE,
    META,
    STATE,
    TURN,
    Record,
)

KEY = SessionKey("a")


def record(seq: int, kind: str, value: object) -> Record:
    return Record(seq, 1, kind, msgspec.json.encode(value), True)


keys = st.sampled_from(["k1", "k2", "k3"])
changes = st.lists(
    st.one_of(
        st.builds(
            lambda key, size: (
                MEMORY_SET,
                MemoryEntry(key=key, value=msgspec.Raw(b"1" * size), size_bytes=size),
            ),
            keys,
            st.integers(1, 9),
        ),
        st.builds(lambda key: (MEMORY_DROP, DroppedPayload(key)), keys),
    ),
    max_size=20,
)


@given(changes, st.data())
def test_memory_folded_in_two_steps_is_memory_folded_at_once(
    entries: list[tuple[str, object]], data: st.DataObject
) -> None:
    log = [record(seq, *entry) for seq, entry in enumerate(entries, 1)]
    cut = data.draw(st.integers(0, len(log)))
    data, _ = split_memory(None, log)
    at_once = msgspec.json.decode(data, type=MemoryDocument)
    in_steps = msgspec.json.decode(
        split_memory(split_memory(None, log[:cut])[0], log[cut:])[0], type=MemoryDocument
    )
    by_key = {entry.key: entry for entry in at_once.entries}
    assert by_key == {entry.key: entry for entry in in_steps.entries}
    assert msgspec.json.decode(data)["stats"] == {
        "totalEntries": len(at_once.entries),
        "totalSizeBytes": sum(one.size_bytes for one in at_once.entries),
    }


def test_memory_entry_has_the_seeds_field_names() -> None:
    """S2-18."""
    log = [record(1, MEMORY_SET, MemoryEntry(key="k", value=msgspec.Raw(b"1")))]
    document = msgspec.json.decode(split_memory(None, log)[0])
    assert {
        "key",
        "description",
        "value",
        "scope",
        "sizeBytes",
        "basePriority",
        "pinned",
        "createdAt",
        "lastAccessedAt",
    } <= document["entries"][0].keys()
    assert document["stats"] == {"totalEntries": 1, "totalSizeBytes": 0}


def test_session_document_counts_and_points_to_the_log() -> None:
    """S2-17, C4: the history is in the log once, and session.json says where."""
    turned = TurnPayload(turn="turn_0001", number=1, phase="end", at=1.0)
    log = [
        record(1, TURN, turned),
        record(2, MESSAGE, {"role": "user"}),
        record(3, META, {"title": "t", "tags": ["x"], "metadata": {"k": 1}, "at": 2.0}),
    ]
    document = msgspec.json.decode(fold_session(None, KEY, log), type=SessionDocument)
    assert (document.turns, document.messages) == (1, 1)
    assert document.metadata.title == "t"
    assert document.metadata.tags == ("x",)
    assert bytes(document.metadata.extra["k"]) == b"1"
    assert document.context.core.history == ()
    assert document.context.core.history_source.as_of_seq == 3
    assert document.created_at < document.last_active_at


def test_json_state_lies_bare_and_indented() -> None:
    """S4-13: {key}.json is the bare value."""
    log = [record(1, STATE, StateSet("state/k.json", msgspec.Raw(b'{"a":[1]}')))]
    data = fold_state("state/k.json", None, log)
    assert data is not None
    assert msgspec.json.decode(data) == {"a": [1]}
    assert b"\n  " in data


def test_state_with_types_lies_beside_and_never_in_both_places() -> None:
    name = "state/k.json"
    plain = record(1, STATE, StateSet(name, msgspec.Raw(b"1")))
    tagged = record(2, STATE, StateSet(name, msgspec.Raw(b'"AA=="'), {"": "bytes"}))
    again = record(3, STATE, StateSet(name, msgspec.Raw(b"null")))
    gone = record(4, STATE, StateSet(name, dropped=True))
    assert names_of(plain) == (name, typed(name))
    there = [
        (fold_state(name, None, log) is not None, fold_state(typed(name), None, log) is not None)
        for log in ([plain], [plain, tagged], [plain, tagged, again], [plain, tagged, again, gone])
    ]
    assert there == [(True, False), (False, True), (True, False), (False, False)]


def test_items_are_appended_a_line_each() -> None:
    episodic = record(1, ITEM, {"memory": "episodic", "item": {"id": "ep_1"}})
    semantic = record(2, ITEM, {"memory": "semantic", "item": {"id": "sem_1"}})
    assert names_of(episodic) == ("episodic.jsonl",)
    assert names_of(semantic) == ("semantic.jsonl",)
    assert fold_items(b'{"id":"ep_0"}\n', [episodic]) == b'{"id":"ep_0"}\n{"id":"ep_1"}\n'
