"""The working context: the same from any way of feeding it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure.errors import CorruptRecordError
from perdure.memory.context import RetractionPayload, Snapshot, WorkingContext
from perdure.records.json import encode
from perdure.records.records import CONTEXT, MESSAGE, RETRACT, TOOL_CALL, TOOL_RESULT, TURN

ROLES = {MESSAGE: "user", TOOL_CALL: "assistant", TOOL_RESULT: "tool"}


def message(kind: str, size: int, role: str | None = None) -> bytes:
    return msgspec.json.encode({"role": role or ROLES[kind], "content": "x" * size})


def rebuilt(contents: list[str], epoch_id: int) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return msgspec.json.encode({"messages": messages, "epoch_id": epoch_id})


records = st.lists(
    st.one_of(
        st.builds(
            lambda kind, size: (kind, message(kind, size)),
            st.sampled_from([MESSAGE, TOOL_CALL, TOOL_RESULT]),
            st.integers(0, 60),
        ),
        st.builds(lambda size: (MESSAGE, message(MESSAGE, size, "system")), st.integers(0, 20)),
        st.builds(
            lambda contents, epoch: (CONTEXT, rebuilt(contents, epoch)),
            st.lists(st.text("ab", max_size=5), max_size=4),
            st.integers(1, 9),
        ),
        st.builds(lambda after: (RETRACT, encode(RetractionPayload(after))), st.integers(0, 40)),
        st.builds(
            lambda spans: (RETRACT, encode(RetractionPayload(of=("a", 1), spans=tuple(spans)))),
            st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
        ),
        st.just((TURN, b"{}")),
        st.just(("from_a_newer_release", b"{}")),
    ),
    max_size=40,
)


def fed(entries: list[tuple[str, bytes]], limit: int, first: int = 1) -> WorkingContext:
    context = WorkingContext(limit)
    for seq, (kind, payload) in enumerate(entries, first):
        context.feed(seq, kind, payload)
    return context


@given(records, st.integers(1, 600), st.data())
def test_snapshot_and_later_records_give_the_live_context(
    entries: list[tuple[str, bytes]], limit: int, data: st.DataObject
) -> None:
    """S0-1, S0-2: the snapshot is a cache of a pure function of the log."""
    live = fed(entries, limit)
    cut = data.draw(st.integers(0, len(entries)))
    stored = fed(entries[:cut], limit).snapshot("a", "s")
    restored = WorkingContext.of_snapshot(msgspec.json.decode(stored, type=Snapshot), limit)
    for seq, (kind, payload) in enumerate(entries[cut:], cut + 1):
        restored.feed(seq, kind, payload)
    assert restored.snapshot("a", "s") == live.snapshot("a", "s")
    assert list(restored.messages()) == list(live.messages())


@given(records, st.integers(1, 600), st.sets(st.integers(0, 39)))
def test_messages_that_are_added_together_give_the_same_context(
    entries: list[tuple[str, bytes]], limit: int, ends: set[int]
) -> None:
    context = WorkingContext(limit)
    for at, (kind, payload) in enumerate(entries):
        add = context.add if kind in ROLES else context.feed
        add(at + 1, kind, payload)
        if at in ends:
            context.trim()
    context.trim()
    assert context.snapshot("a", "s") == fed(entries, limit).snapshot("a", "s")


@given(records, st.integers(1, 600))
def test_context_is_bounded_by_its_limit_or_one_atom(
    entries: list[tuple[str, bytes]], limit: int
) -> None:
    context = fed(entries, limit)
    stored = msgspec.json.decode(context.snapshot("a", "s"), type=Snapshot)
    assert context.size <= limit or len(stored.atoms) == 1


def test_media_in_messages_count_apart_however_they_came() -> None:
    text, image = message(MESSAGE, 2_000), "data:image/png;base64," + "A" * 4_000
    media = msgspec.json.encode({"role": "user", "content": "", "image_urls": [image]})
    live = fed([(MESSAGE, text), (MESSAGE, media)] * 3, limit=30_000)
    stored = msgspec.json.decode(live.snapshot("a", "s"), type=Snapshot)
    restored = WorkingContext.of_snapshot(stored, 30_000)
    sizes = 3 * (len(text) + len(media) - 4_000)
    assert (live.size, live.inline) == (restored.size, restored.inline) == (sizes, 12_000)
    for context in (live, WorkingContext.of_snapshot(stored, 30_000)):
        for seq in range(7, 9):  # with their media they would be too many
            context.feed(seq, MESSAGE, message(MESSAGE, 6_000))
        assert len(list(context.messages())) == 8
        assert context.size == sizes + 2 * len(message(MESSAGE, 6_000))


def test_tool_results_leave_with_their_call() -> None:
    """S0-2, and the reverse orphan of a tail that is loaded by count."""
    entries = [
        (MESSAGE, message(MESSAGE, 10)),
        (TOOL_CALL, message(TOOL_CALL, 10)),
        (TOOL_RESULT, message(TOOL_RESULT, 10)),
        (TOOL_RESULT, message(TOOL_RESULT, 10)),
        (MESSAGE, message(MESSAGE, 100)),
    ]
    context = fed(entries, limit=200)
    roles = [msgspec.json.decode(one)["role"] for one in context.messages()]
    assert "tool" not in roles


def test_system_message_stays_when_its_place_is_cut_off() -> None:
    entries = [(MESSAGE, message(MESSAGE, 10, "system"))]
    entries += [(MESSAGE, message(MESSAGE, 50)) for _ in range(10)]
    context = fed(entries, limit=200)
    assert next(context.messages()) == entries[0][1]


def test_cut_context_begins_with_a_user_message() -> None:
    assistant = message(MESSAGE, 10, "assistant")
    entries = [(MESSAGE, message(MESSAGE, 10)), (MESSAGE, assistant)] * 10
    context = fed(entries, limit=len(assistant) * 4)
    assert msgspec.json.decode(next(context.messages()))["role"] == "user"


def test_snapshot_whose_atoms_do_not_add_up_is_refused() -> None:
    snapshot = Snapshot(schema_version=1, agent_id="a", messages=(msgspec.Raw(b"{}"),), atoms=(2,))
    with pytest.raises(CorruptRecordError, match="atoms"):
        WorkingContext.of_snapshot(snapshot, 100)


def test_snapshot_of_another_writer_is_grouped_by_roles() -> None:
    """S0-27: the seed's format has no atoms and no seqs."""
    bodies = [{"role": "user", "content": "hi"}, {"role": "assistant"}, {"role": "tool"}]
    messages = tuple(msgspec.Raw(msgspec.json.encode(body)) for body in bodies)
    snapshot = Snapshot(schema_version=1, agent_id="a", seq=7, messages=messages)
    context = WorkingContext.of_snapshot(snapshot, 1000)
    assert [bytes(raw) for raw in messages] == list(context.messages())
    assert msgspec.json.decode(context.snapshot("a", "s"), type=Snapshot).atoms == (1, 2)


def test_a_snapshot_is_a_function_of_what_it_holds() -> None:
    context = WorkingContext(1000)
    context.feed(1, "message", b'{"role":"user","content":"a"}')
    made = b"default".decode()  # equal to the default, and another object
    assert context.snapshot("ada", made) == context.snapshot("ada", "default")


def test_a_snapshot_that_was_rebuilt_in_the_future_was_rebuilt_by_its_last_record() -> None:
    """Else whoever asks what came since would wait for that record forever."""
    context = WorkingContext(1_000)
    context.feed(3, MESSAGE, message(MESSAGE, 1))
    snapshot = msgspec.json.decode(context.snapshot("ada", "default"), type=Snapshot)
    snapshot.rebuilt_at = 10**9
    again = WorkingContext.of_snapshot(snapshot, 1_000)
    assert again.rebuilt_at == 3
    assert again.since(3) == []
    assert again.since(2) is None


def test_a_snapshot_brings_the_system_message_and_the_last_compaction_back() -> None:
    """S0-2: a restart loses neither what the agent is told first, nor when it compacted."""
    system = message(MESSAGE, 10, "system")
    compacted = {"messages": [], "epoch_id": 1, "last_compaction_ts": 7.5}
    context = fed([(CONTEXT, msgspec.json.encode(compacted)), (MESSAGE, system)], limit=200)
    for seq in range(3, 13):
        context.feed(seq, MESSAGE, message(MESSAGE, 50))
    stored = msgspec.json.decode(context.snapshot("a", "s"), type=Snapshot)
    assert stored.pinned  # its place in the conversation is cut off
    restored = WorkingContext.of_snapshot(stored, 200)
    assert restored.last_compaction_ts == 7.5
    restored.feed(13, MESSAGE, message(MESSAGE, 60))
    assert next(restored.messages()) == system


@pytest.mark.parametrize("payload", [b"{}", b'{"of":["a",1]}', b'{"after":1,"spans":[[1,2]]}'])
def test_a_retraction_that_says_not_what_it_takes_back_is_damage(payload: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="either `after` or `spans`"):
        fed([(MESSAGE, message(MESSAGE, 1)), (RETRACT, payload)], 100)


def test_a_tool_s_result_whose_call_was_taken_back_begins_an_atom() -> None:
    taken = encode(RetractionPayload(of=("a", 1), spans=((1, 1),)))
    entries = [(TOOL_CALL, message(TOOL_CALL, 1)), (TOOL_RESULT, message(TOOL_RESULT, 1))]
    live = fed([*entries, (MESSAGE, message(MESSAGE, 2)), (RETRACT, taken)], 1_000)
    stored = msgspec.json.decode(live.snapshot("a", "s"), type=Snapshot)
    assert stored.atoms == (1, 1)
    assert list(WorkingContext.of_snapshot(stored, 1_000).messages()) == list(live.messages())
