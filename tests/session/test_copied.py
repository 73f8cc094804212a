"""What a session's records become in a copy: it folds, resumes and verifies as its source does."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from perdure.checkpoints.chain import LogDigest
from perdure.memory.documents import TurnPayload
from perdure.memory.ledger import LEDGER, OVER, change_entry
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import ForkNote, Origin, epoch_payload, origin_in
from perdure.records.records import (
    ADMITTED,
    APPROVAL,
    BASE,
    EFFECT,
    ENDING,
    EPOCH,
    FORK,
    GAP,
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE,
    META,
    RETRACT,
    STATE,
    TURN,
    Entry,
    Record,
    begins_epoch,
)
from perdure.session.copied import OWN_KINDS, Progress, as_copied, renamed
from perdure.session.options import Limits
from perdure.session.rebuild import fold_afresh

OLD, NEW = SessionKey("old"), SessionKey("new", "other")


def turned(phase: str, number: int) -> Entry:
    return Entry(
        TURN, encode(TurnPayload(turn=f"t{number}", number=number, phase=phase, given=True))
    )


NUMBERS = st.integers(1, 4)
OPENED = st.builds(
    lambda kind, id: change_entry(kind, id, at=1.0),
    st.sampled_from((ADMITTED, EFFECT, APPROVAL)),
    st.sampled_from("ab"),
)
ENTRIES = st.one_of(
    st.builds(lambda n: Entry(MESSAGE, encode({"role": "user", "content": f"m{n}"})), NUMBERS),
    st.builds(turned, st.sampled_from(("begin", "end", "interrupted")), NUMBERS),
    st.builds(
        lambda n: Entry(MEMORY_SET, encode({"key": f"k{n}", "value": "v" * n * 500})), NUMBERS
    ),
    st.builds(lambda n: Entry(MEMORY_DROP, encode({"key": f"k{n}"})), NUMBERS),
    st.builds(lambda n: Entry(STATE, encode({"name": f"state/s{n}.json", "value": n})), NUMBERS),
    st.builds(lambda n: Entry(ITEM, encode({"memory": "semantic", "item": {"id": n}})), NUMBERS),
    st.builds(lambda n: Entry(META, encode({"title": f"title {n}"})), NUMBERS),
    st.builds(lambda n: Entry(RETRACT, encode({"after": n})), NUMBERS),
    OPENED,
    st.builds(
        lambda kind, id: change_entry(kind, id, state=OVER),
        st.sampled_from((ADMITTED, EFFECT, APPROVAL)),
        st.sampled_from("ab"),
    ),
    st.just(Entry(FORK, encode(ForkNote(SessionKey("child"))))),
    st.just(Entry(ENDING, b"{}")),
    st.builds(lambda n: Entry(BASE, encode(Origin(cut=n))), NUMBERS),
    st.just(Entry(BASE, encode(Origin(at=1, parent=SessionKey("parent"), epoch=1)))),
    st.just(Entry(EPOCH, b"")),
)


def log_of(entries: Sequence[Entry], *, after: int = 0) -> list[Record]:
    """Return a log that begins with an epoch, and in which others begin where an entry says so."""
    records: list[Record] = []
    epoch = 0
    for seq, entry in enumerate([Entry(EPOCH, b""), *entries], after + 1):
        epoch += entry.kind == EPOCH
        payload = epoch_payload(f"owner {epoch}", None) if entry.kind == EPOCH else entry.payload
        records.append(Record(seq, epoch, entry.kind, payload, end=True))
    return records


def copy_of(source: list[Record], *, cut: int = 0) -> list[Record]:
    """Return the log of a copy, under one epoch."""
    first = cut or 1
    own = Record(first, 7, EPOCH, epoch_payload("me", Origin(cut=cut)), end=True)
    rest = [Record(one.seq, 7, *as_copied(one)) for one in source if one.seq > first]
    return [own, *rest]


def folded(key: SessionKey, records: list[Record]) -> dict[str, bytes]:
    return fold_afresh(key, records, limits=Limits())


HISTORIES = st.lists(ENTRIES, max_size=60).map(log_of)


@given(source=HISTORIES, data=st.data())
def test_a_copy_folds_to_what_its_source_was_there(
    source: list[Record], data: st.DataObject
) -> None:
    up_to = data.draw(st.integers(1, len(source)))
    there, copy = source[:up_to], copy_of(source[:up_to])
    assert folded(NEW, copy) == {
        name: renamed(name, document, NEW) for name, document in folded(OLD, there).items()
    }


@given(source=HISTORIES)
def test_records_keep_their_numbers_and_nothing_of_another_log_stays(source: list[Record]) -> None:
    copy = copy_of(source)
    assert [one.seq for one in copy] == [one.seq for one in source]
    assert all(one.kind not in OWN_KINDS for one in copy[1:])
    for theirs, ours in zip(source, copy, strict=True):
        if theirs.kind not in OWN_KINDS:
            assert (ours.kind, ours.payload, ours.end) == (theirs.kind, theirs.payload, theirs.end)


@given(source=HISTORIES)
def test_attempts_end_in_a_copy_where_they_end_in_its_source(source: list[Record]) -> None:
    ends = [one.seq for one in source if begins_epoch(one)]
    assert [one.seq for one in copy_of(source) if begins_epoch(one)] == ends


@given(source=HISTORIES, data=st.data())
def test_a_checkpoints_digest_holds_in_a_copy(source: list[Record], data: st.DataObject) -> None:
    since = data.draw(st.integers(0, len(source) - 1))
    digests = []
    for log in (source, copy_of(source)):
        digest = LogDigest(since)
        for one in log:
            digest.feed(one.seq, one.kind, one.payload)
        digests.append((digest.seq, digest.value))
    assert digests[0] == digests[1]


@given(source=HISTORIES)
def test_a_copy_of_a_copy_is_the_same_copy(source: list[Record]) -> None:
    copy = copy_of(source)
    assert copy_of(copy)[1:] == copy[1:]


@given(source=st.lists(ENTRIES, max_size=30), cut=st.integers(1, 500))
def test_a_copy_of_a_pruned_session_begins_where_that_was_cut(
    source: list[Entry], cut: int
) -> None:
    records = log_of(source, after=cut)
    copy = copy_of(records, cut=cut)
    assert [one.seq for one in copy] == [cut, *(one.seq for one in records)]
    assert origin_in(copy[0]) == Origin(cut=cut)
    assert all(origin_in(one) is None for one in copy[1:])


@pytest.mark.parametrize("restarts", [1, 100])
def test_a_turn_that_was_cut_in_each_life_stays_cut(restarts: int) -> None:
    entries: list[Entry] = []
    for number in range(restarts):
        entries += [
            Entry(EPOCH, b""),
            turned("begin", number),
            Entry(FORK, b'{"child":["","c","d"]}'),
        ]
        entries.append(Entry(MESSAGE, encode({"role": "user", "content": str(number)})))
    source = log_of(entries)
    copy = copy_of(source)
    assert sum(map(begins_epoch, copy)) == restarts + 1
    assert sum(one.kind == GAP for one in copy) == 2 * restarts
    assert [one for one in copy if one.kind == TURN] == [
        msgspec.structs.replace(one, epoch=7) for one in source if one.kind == TURN
    ]


@settings(max_examples=200)
@given(source=HISTORIES, data=st.data())
def test_a_forks_endings_end_all_that_is_in_progress(
    source: list[Record], data: st.DataObject
) -> None:
    folded_at = data.draw(st.integers(0, len(source)))
    turns = [one.payload for one in source[:folded_at] if one.kind == TURN]
    ledger = folded(OLD, source[:folded_at]).get(LEDGER) if folded_at else None
    progress = Progress(ledger, turns[-1] if turns else None)
    for one in source[folded_at:]:
        progress.feed(Entry(one.kind, one.payload))
    endings = progress.endings(5.0)
    assert [one.end for one in endings] == [False] * (len(endings) - 1) + [True] * bool(endings)
    copy = copy_of(source)
    copy += [Record(copy[-1].seq + at, 7, *entry) for at, entry in enumerate(endings, 1)]
    assert LEDGER not in folded(NEW, copy)
    phases = [decode(one.payload, TurnPayload) for one in copy if one.kind == TURN]
    assert not phases or phases[-1].phase != "begin"
    if endings and endings[-1].kind == TURN:
        assert (phases[-1].turn, phases[-1].number) == (phases[-2].turn, phases[-2].number)


def test_nothing_in_progress_takes_no_record() -> None:
    assert Progress().endings(1.0) == ()
