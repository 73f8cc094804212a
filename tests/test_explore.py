"""The command that looks for new examples and orders: what it draws, and what it says."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from perdure.store import LogChunk, Record, Store
from perdure.stores.delegate import DelegatingStore
from tests import explore
from tests.schedules import places
from tests.schedules.episode import Episode, Plan, run, unchanged
from tests.schedules.journal import DOUBT, HAPPENED, REFUSED, Journal
from tests.schedules.oracle import Found, Line, judge

FAILS = """
import random

import trio
from hypothesis import given, strategies as st


@given(st.integers())
def test_drawn(number: int) -> None:
    assert number < 5
"""


@pytest.mark.deep
def test_a_failure_is_told_with_its_seed_and_fails_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the tests' own set-up, and one test that some examples fail."""
    (tmp_path / "tests").mkdir()
    shutil.copy(explore.ROOT / "pyproject.toml", tmp_path)
    conftest = (explore.ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    conftest = conftest.replace("Path(__file__).parents[1]", f"Path({str(explore.ROOT)!r})")
    (tmp_path / "tests" / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "tests" / "test_drawn.py").write_text(FAILS, encoding="utf-8")
    monkeypatch.setattr(explore, "ROOT", tmp_path)
    words = explore.command("tests/test_drawn.py", 11, has_examples=True)
    for _ in range(2):
        done = explore.run(words, 120)
        assert done is not None
        assert done[0] == 1, done[1]
        assert "assert number < 5" in done[1]
    ran: list[list[str]] = []

    def once(words: list[str], seconds: float) -> tuple[int, str] | None:
        ran.append(words)
        return (1, "it has failed") if len(ran) == 1 else None

    monkeypatch.setattr(explore, "run", once)
    monkeypatch.setattr(explore, "drawable", lambda: [("tests/test_drawn.py", True)])
    assert explore.main(["--minutes", "5"]) == 1
    told = capsys.readouterr().out
    assert "run again what has failed" in told
    assert told.count(shlex.join(ran[0])) == 2
    monkeypatch.setattr(explore, "run", lambda words, seconds: None)
    assert explore.main(["--minutes", "5", "--seed", "3"]) == 0
    assert "--seed 3" in capsys.readouterr().out


def test_it_draws_what_has_examples_or_an_order() -> None:
    among = dict(explore.drawable())
    assert among["tests/properties/test_autosave.py"]
    assert among["tests/session/test_session.py"] is False
    assert not [name for name in among if "postgres" in name or "crash" in name]


def test_the_time_is_kept() -> None:
    assert explore.run(["python", "-c", "import time; time.sleep(100)"], 0.5) is None
    with pytest.raises(SystemExit):
        explore.main(["--minutes", "0"])


def played(kind: str, seed: int, theme: str, tamper: Any = unchanged, **changes: Any) -> Episode:
    plan = Plan.of(seed, [theme], shared=False)
    return run(dataclasses.replace(plan, **changes), places.fresh(kind, ""), tamper=tamper)


@pytest.mark.parametrize("kind", ["memory", "file", "sqlite"])
def test_schedules_of_turns_and_scopes_keep_every_promise(kind: str) -> None:
    for seed, theme in enumerate(["turns", "turns", "scopes", "turns"], 1):
        done = played(kind, seed, theme)
        assert done.failures == []
        assert len(done.journal.acts) > 3


class Tampered(DelegatingStore):
    """A store whose logs are read in another way than they were written."""

    def __init__(self, store: Store, how: Any) -> None:
        super().__init__(store)
        self._how = how

    async def read_log(
        self, key: Any, *, reverse: bool = False, **options: Any
    ) -> AsyncGenerator[LogChunk, None]:
        records: list[Record] = []
        async with aclosing(self.inner.read_log(key)) as log:
            async for chunk in log:
                records += chunk.records
        after, before = options.get("after", 0), options.get("before")
        read = [
            one
            for one in self._how(records)
            if one.seq > after and (before is None or one.seq < before)
        ]
        read = read[::-1] if reverse else read
        if read:
            yield LogChunk(tuple(read[: options.get("limit")]))


def messages(records: list[Record]) -> list[int]:
    return [at for at, one in enumerate(records) if one.kind == "message"]


def loses_the_end(records: list[Record]) -> list[Record]:
    """As after an acknowledged group that never was durable."""
    newest = messages(records)[-1:]
    if not newest:
        return records
    cut = max([at + 1 for at, one in enumerate(records[: newest[0]]) if one.end], default=0)
    return records[:cut]


def doubles(records: list[Record]) -> list[Record]:
    """As after an append that was sent again."""
    again = [records[at] for at in messages(records)[-1:] if records[-1].end]
    last = records[-1].seq if records else 0
    return records + [Record(last + 1, one.epoch, one.kind, one.payload, True) for one in again]


def reorders(records: list[Record]) -> list[Record]:
    """As where two groups overtook one another."""
    ats = messages(records)
    if len(ats) < 2:
        return records
    first, last = records[ats[0]], records[ats[-1]]
    changed = list(records)
    changed[ats[0]] = Record(first.seq, first.epoch, first.kind, last.payload, first.end)
    changed[ats[-1]] = Record(last.seq, last.epoch, last.kind, first.payload, last.end)
    return changed


def tears(records: list[Record]) -> list[Record]:
    """As after a write that ended within a group."""
    inner = [at for at in messages(records) if not records[at].end]
    return records[: inner[-1] + 1] if inner else records


@pytest.mark.parametrize(
    ("how", "label"),
    [
        (loses_the_end, "lost"),
        (doubles, "doubled"),
        (reorders, "misplaced"),
        (tears, "torn-group"),
    ],
)
def test_the_judge_of_schedules_notices_a_planted_fault(how: Any, label: str) -> None:
    done = played(
        "memory", 5, "turns", lambda store: Tampered(store, how), beside=False, dies=False
    )
    assert label in {failure.label for failure in done.failures}


def renamed_twice(*, elsewhere: bool, before: bool) -> list[str]:
    """Judge a session that went to a1, and the next one of its id, which went to a2 or is lost."""
    journal = Journal()

    def told(at: float, kind: str, *facts: Any) -> None:
        journal.take((kind, at, *facts))

    def saved(at: float, text: str) -> None:
        told(at, "begin", f"save {text}", "main.0", "save", ("a",), "")
        told(at, "intend", f"save {text}", "main", "a", [text], "")
        told(at, "accept", [text], 1, 2)
        told(at, "durable", "a", 1, 2)
        told(at, "end", f"save {text}", HAPPENED, None)

    def log(text: str) -> list[Line]:
        return [
            Line(1, 1, "epoch", b"{}"),
            Line(2, 1, "message", f'{{"content":"{text}"}}'.encode()),
        ]

    saved(1, "first")
    if before:
        told(2, "begin", "x", "main.1", "rename", ("a", "a1"), "")
        told(3, "end", "x", DOUBT, "CancelledError")
    saved(4, "second")
    told(5, "begin", "y", "main.0", "rename", ("a", "a2"), "")
    told(6, "begin", "z", "main.1", "rename", ("a", "a1"), "")
    told(7, "end", "y", HAPPENED if elsewhere else REFUSED, 2 if elsewhere else "LeaseHeldError: …")
    told(8, "end", "z", HAPPENED, 2)
    found = Found(logs={"a1": log("first"), **({"a2": log("second")} if elsewhere else {})})
    return [failure.label for failure in judge(journal, found) if "second" in failure.text]


def test_the_judge_knows_that_a_rename_answers_for_an_earlier_one_to_the_same_name() -> None:
    """That is where there is nothing to rename any more, and nowhere else."""
    assert renamed_twice(elsewhere=True, before=True) == []
    assert "rename-not-equal" in renamed_twice(elsewhere=True, before=False)
    assert "rename-not-equal" in renamed_twice(elsewhere=False, before=True)


def test_schedules_are_told_with_what_runs_them_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedules", "--minutes", "5", "--store", "memory", "--theme", "turns"]
    assert explore.main([*words, "--seed", "11", "--episodes", "2"]) == 0
    assert "seed 11" in capsys.readouterr().out
    from tests.schedules.search import story

    done = played("memory", 5, "turns", lambda store: Tampered(store, doubles), beside=False)
    told = story(done, done.failures, "python -m tests.explore --schedules --seed 5")
    assert "turn(" in told
    assert "SAW doubled" in told
    assert told.endswith("--seed 5")
