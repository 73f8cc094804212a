"""The judge of the crash tests sees each kind of damage."""

from __future__ import annotations

import json

import pytest

from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import EPOCH, MESSAGE, Record
from perdure.store import Document, Documents
from tests.crash.oracle import Ledger, judge_documents, judge_log

pytestmark = pytest.mark.deep


def ledger() -> Ledger:
    """Two epochs: two groups acknowledged and one in flight, then one acknowledged."""
    told = Ledger()
    told.add(
        [
            ["granted", "a", 1, 1, []],
            ["sent", "a", 1, ["x", "y"]],
            ["ok", "a", 1, 1],
            ["sent", "a", 1, ["z"]],
            ["granted", "a", 2, 4, ["x", "y"]],
            ["sent", "a", 2, ["new"]],
            ["ok", "a", 2, 1],
            ["folded", "a", 3],
        ]
    )
    return told


def log(*records: tuple[int, str | None]) -> list[Record]:
    """Make a log of (epoch, text), None for an epoch record."""
    return [
        Record(seq, epoch, MESSAGE if text else EPOCH, json.dumps(text).encode(), text != "x")
        for seq, (epoch, text) in enumerate(records, 1)
    ]


GOOD = ((1, None), (1, "x"), (1, "y"), (2, None), (2, "new"))


def test_a_log_with_all_that_was_promised_is_good() -> None:
    assert judge_log(ledger(), "a", log(*GOOD)) == []


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (GOOD[:4], "lost an acknowledged group"),
        ((), "lost an acknowledged group"),
        ((*GOOD[:2], *GOOD[3:]), "no prefix of what was sent"),
        ((*GOOD[:3], (1, "y"), *GOOD[3:]), "no prefix of what was sent"),
        ((*GOOD[:3], (1, "z"), *GOOD[3:]), "changed behind the seal"),
        ((*GOOD, (1, "z")), "epochs go back"),
        ((*GOOD[:3], GOOD[4]), "have no record in the log"),
        ((*GOOD, (2, "x")), "ends within a group"),
    ],
)
def test_a_log_that_breaks_a_promise_is_not(
    records: tuple[tuple[int, str | None], ...], problem: str
) -> None:
    assert problem in "; ".join(judge_log(ledger(), "a", log(*records)))


def test_an_epoch_that_is_granted_twice_is_seen() -> None:
    told = ledger()
    told.add([["granted", "a", 2, 9, []]])
    assert told.problems == ["a: epoch 2 was granted twice"]


def documents(text: list[str], as_of: int, *damaged: str) -> Documents:
    manifest = Manifest(key=SessionKey("a"), epoch=2, as_of_seq=as_of)
    found = {"session.json": Document(json.dumps(text).encode(), as_of)}
    return Documents(manifest, found, damaged)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (documents(["x", "y"], 3), ""),
        (documents(["x", "y", "new"], 5), ""),
        (documents(["x"], 3), "is not the log"),
        (documents(["x", "y", "z"], 5), "is not the log"),
        (documents([], 1), "the fold of 3 is lost"),
        (documents(["x", "y"], 3, "memory.json"), "memory.json is damaged"),
    ],
)
def test_a_document_is_held_to_the_log(found: Documents, problem: str) -> None:
    problems = judge_documents(ledger(), "a", log(*GOOD), found)
    assert problem in "; ".join(problems)
    assert bool(problem) == bool(problems)
