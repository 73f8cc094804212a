"""The ledger's fold: what has ended is dropped, and folding in parts is folding at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from perdure.memory.documents import names_of
from perdure.memory.ledger import (
    LEDGER,
    LEDGER_KINDS,
    MOST,
    OVER,
    Ledger,
    change_entry,
    fold_ledger,
)
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.messages import RESERVED_KINDS
from perdure.records.records import ADMITTED, APPROVAL, BASE, EFFECT, MESSAGE, Record

OPENING: dict[str, dict[str, Any]] = {
    ADMITTED: {"message": {"role": "user", "content": "x"}, "at": 1.0},
    EFFECT: {"turn": "t", "call": "c", "tool": "mail", "policy": "ask", "at": 1.0},
    APPROVAL: {"turn": "t", "call": "c", "tool": "mail", "at": 1.0},
}
CHANGES: dict[str, dict[str, Any]] = {
    ADMITTED: {"turn": "turn_0001", "attempts": 1},
    EFFECT: {"state": "begun"},
    APPROVAL: {"answer": "denied", "why": "no"},
}


def record(seq: int, kind: str, id: str, fields: dict[str, Any]) -> Record:
    return Record(seq, 1, kind, change_entry(kind, id, **fields).payload, True)


def histories() -> st.SearchStrategy[list[Record]]:
    step = st.tuples(
        st.sampled_from(sorted(OPENING)),
        st.sampled_from("abc"),
        st.sampled_from(["open", "change", "over"]),
    )

    def made(steps: list[tuple[str, str, str]]) -> list[Record]:
        fields = {"open": OPENING, "change": CHANGES}
        return [
            record(seq, kind, id, {"state": OVER} if what == "over" else fields[what][kind])
            for seq, (kind, id, what) in enumerate(steps, 1)
        ]

    return st.lists(step, max_size=30).map(made)


@given(histories(), st.integers(0, 30))
def test_folding_in_parts_is_folding_at_once(records: list[Record], cut: int) -> None:
    once = fold_ledger(None, records)
    assert fold_ledger(fold_ledger(None, records[:cut]), records[cut:]) == once
    live = Ledger()
    for one in records:
        live.feed(one.kind, one.payload)
    assert live.document() == once


@given(histories())
def test_it_holds_what_was_opened_and_not_ended(records: list[Record]) -> None:
    ledger = Ledger(fold_ledger(None, records))
    found = {
        ADMITTED: [one.id for one in ledger.messages()],
        EFFECT: [one.id for one in ledger.effects()],
        APPROVAL: [one.id for one in ledger.approvals()],
    }
    for kind in OPENING:
        wanted: list[str] = []
        for one in records:
            change = json.loads(one.payload)
            if one.kind != kind:
                continue
            if change.get("state") == OVER:
                wanted = [id for id in wanted if id != change["id"]]
            elif "at" in change and change["id"] not in wanted:
                wanted.append(change["id"])
        assert found[kind] == wanted


def test_a_change_keeps_the_rest_and_what_is_not_known_here() -> None:
    first = record(1, ADMITTED, "m", {**OPENING[ADMITTED], "of_a_newer_release": [1, 2]})
    folded = fold_ledger(None, [first, record(2, ADMITTED, "m", CHANGES[ADMITTED])])
    assert folded is not None
    entry = json.loads(folded)["messages"]["m"]
    assert entry["of_a_newer_release"] == [1, 2]
    (one,) = Ledger(folded).messages()
    assert (one.turn, one.attempts, one.error) == ("turn_0001", 1, None)


def test_the_oldest_go_when_there_are_very_many() -> None:
    ledger = Ledger()
    for number in range(MOST + 5):
        entry = change_entry(ADMITTED, str(number), **OPENING[ADMITTED])
        ledger.feed(entry.kind, entry.payload)
    assert [ledger.messages()[0].id, ledger.messages()[-1].id] == ["5", str(MOST + 4)]
    late = change_entry(ADMITTED, "0", **CHANGES[ADMITTED])
    ledger.feed(late.kind, late.payload)  # of one that went
    assert len(ledger.messages()) == MOST


def test_nothing_under_way_is_no_document() -> None:
    records = [record(1, EFFECT, "k", OPENING[EFFECT]), record(2, EFFECT, "k", {"state": OVER})]
    assert fold_ledger(None, records) is None
    assert fold_ledger(fold_ledger(None, records[:1]), records[1:]) is None


@pytest.mark.parametrize(
    ("base", "forgets"),
    [
        (Origin(at=7, parent=SessionKey("a"), epoch=1), True),  # a fork
        (Origin(at=7, epoch=1, kept="x"), False),  # a copy, or a fork whose parent goes
        (Origin(at=7, epoch=1, kept="x", moved=SessionKey("a")), False),
        (Origin(at=7, cut=9, folded="x"), False),  # pruned
    ],
    ids=["fork", "copy", "moved", "pruned"],
)
def test_what_is_under_way_stays_with_the_origin_of_a_fork(base: Origin, forgets: bool) -> None:
    records = [
        record(1, EFFECT, "theirs", OPENING[EFFECT]),
        Record(2, 1, BASE, encode(base), True),
        record(3, EFFECT, "ours", OPENING[EFFECT]),
    ]
    kept = [one.id for one in Ledger(fold_ledger(None, records)).effects()]
    assert kept == (["ours"] if forgets else ["theirs", "ours"])


@pytest.mark.parametrize("kind", sorted(LEDGER_KINDS))
def test_its_kinds_are_perdures_own_and_change_this_document(kind: str) -> None:
    assert kind in RESERVED_KINDS
    assert names_of(Record(1, 1, kind, b"{}", True)) == (LEDGER,)
    assert names_of(Record(1, 1, MESSAGE, b"{}", True)) == ()
