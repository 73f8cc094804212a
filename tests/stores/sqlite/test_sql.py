"""Statements with many rows: the same as one by one, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import anyio

from perdure.records.keys import SessionKey
from perdure.store import Batch, Status
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.sql import at_once, statements
from perdure.testing.conformance._kit import group, read, take


def test_a_statement_gets_a_row_of_marks_for_each_session() -> None:
    assert at_once("save", 3).count("(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)") == 3


async def test_commits_of_any_size_save_each_session_once(tmp_path: Path) -> None:
    """They share the statements of a few sizes, whose other rows are empty."""
    store = SqliteStore(tmp_path / "kept" / "x.db")
    await store.open()
    keys = [SessionKey(f"agent-{n:03d}") for n in range(33)]
    grants = [await take(store, key) for key in keys]
    heads = [grant.head for grant in grants]
    for count in (1, 5, 7, 9, 33):
        batches = [
            Batch(keys[n], grants[n].epoch, heads[n] + 1, group(f"{count}")) for n in range(count)
        ]
        assert {outcome.status for outcome in await store.append_many(batches)} == {Status.OK}
        heads[:count] = [head + 1 for head in heads[:count]]
    assert [await store.head(key) for key in keys] == heads
    assert (heads[0], heads[32]) == (grants[0].head + 5, grants[32].head + 1)
    await store.aclose()


async def test_a_commit_of_many_sessions_with_one_that_moved_keeps_the_others(
    tmp_path: Path,
) -> None:
    """One stale session among 130, more than a statement holds: it alone is refused."""
    store = SqliteStore(tmp_path / "kept" / "x.db")
    await store.open()
    keys = [SessionKey(f"agent-{n:03d}") for n in range(130)]
    grants = [await take(store, key) for key in keys]
    batches = [
        Batch(key, grant.epoch + (n == 77), grant.head + 1, group(f"said {n}"))
        for n, (key, grant) in enumerate(zip(keys, grants, strict=True))
    ]
    outcomes = await store.append_many(batches)
    refused = [n for n, outcome in enumerate(outcomes) if outcome.status is not Status.OK]
    assert refused == [77]
    for n in (0, 63, 64, 76, 78, 129):
        assert [one.payload for one in await read(store, keys[n])][-1:] == [
            batches[n].records[-1].payload
        ]
    assert len(await read(store, keys[77])) == 1
    await store.aclose()


async def test_what_is_sent_again_while_the_first_call_runs_is_stored_once(tmp_path: Path) -> None:
    """Both calls are framed for the same end of each log, and only one of them can be there."""
    store = SqliteStore(tmp_path / "kept" / "x.db")
    await store.open()
    keys = [SessionKey(f"agent-{n:03d}") for n in range(40)]
    grants = [await take(store, key) for key in keys]
    calls = [
        [
            Batch(key, grant.epoch, grant.head + 1, group("first") + group("later") * later)
            for key, grant in zip(keys, grants, strict=True)
        ]
        for later in (0, 0, 1)
    ]
    outcomes: list[Status] = []

    async def send(batches: list[Batch]) -> None:
        outcomes.extend(outcome.status for outcome in await store.append_many(batches))

    async with anyio.create_task_group() as group_of_calls:
        for batches in calls:
            group_of_calls.start_soon(send, batches)
    assert outcomes == [Status.OK] * 120
    expected = [entry.payload for entry in calls[-1][0].records]
    for key, grant in zip(keys, grants, strict=True):
        assert [one.payload for one in await read(store, key)][grant.head :] == expected
    await store.aclose()


def test_empty_statements_are_left_out() -> None:
    assert statements("SELECT 1;\n-- nothing\n;\nSELECT 2;\n") == ["SELECT 1", "SELECT 2"]
