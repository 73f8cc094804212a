"""Replays: nothing is done again, and whatever is missing, moved or changed has a place and a name."""

from __future__ import annotations

import json
import random
import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import pytest
from hypothesis import given, strategies as st

import perdure
from perdure import CheckpointNotFoundError, Message
from perdure.checkpoints.audit_files import (
    CHECKPOINTS_FILE,
    EVENTS_FILE,
    SUMMARY_FILE,
    EventSigner,
    replay_folder,
)
from perdure.checkpoints.chain import sealed
from perdure.checkpoints.events import replay_files
from perdure.checkpoints.replay import Replay, ReplayReport, TimelineRow, page
from perdure.errors import ConfigError, ReplayDivergedError, ReplayError
from perdure.records.checkpoints import ExplicitState, KernelEvent
from perdure.records.records import CHECKPOINT, EVENT, Entry
from perdure.session.export import export_pair, import_pair
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.forged import forge


def event(timestamp: int, kind: str = "custom", **more: Any) -> KernelEvent:
    return KernelEvent(token_id=more.pop("token_id", 0), timestamp=timestamp, kind=kind, **more)


def run(times: list[int], *, gapless: bool = True) -> ReplayReport:
    replay = Replay("record", gapless=gapless, clock=0 if gapless else None)
    for place, time in enumerate(times, 1):
        replay.feed(place, time, event(time))
    return replay.report("here")


# the dry run


@given(st.integers(2, 60), st.data())
def test_whatever_is_taken_away_moved_or_doubled_is_found(count: int, data: st.DataObject) -> None:
    """S3-10: the clock goes up by one, so a gap or a step back has a place."""
    whole = list(range(1, count + 1))
    at = data.draw(st.integers(0, count - 2))
    what = data.draw(st.sampled_from(["away", "swap", "double"]))
    if what == "away":
        times = whole[:at] + whole[at + 1 :]
    elif what == "swap":
        times = [*whole[:at], whole[at + 1], whole[at], *whole[at + 2 :]]
    else:
        times = [*whole[: at + 1], whole[at], *whole[at + 1 :]]
    assert run(whole).ok
    report = run(times)
    assert not report.ok
    assert report.problems[0].startswith("record ")


def test_ties_keep_their_places_where_a_clock_has_them() -> None:
    """S3-G6."""
    assert run([1, 4, 4, 9], gapless=False).ok
    assert not run([1, 4, 3], gapless=False).ok


def test_it_counts_decisions_and_capabilities_by_name() -> None:
    """S3-10: decisions from custom events, capability use from what the events say."""
    replay = Replay("record", gapless=True)
    told = [
        event(1, "custom", label="plan", detail={"goal": "draft"}, token_id=1),
        event(2, "capability_requested", label="mail", token_id=1),
        event(3, "capability_denied", label="mail", token_id=1),
        event(4, "scheduled", detail={"capability": "disk"}, token_id=2),
        event(5, "idle"),
    ]
    rows = [replay.feed(one.timestamp, one.timestamp, one) for one in told]
    report = replay.report("here")
    assert [(one.what, one.name) for one in rows if one] == [
        ("decision", "plan"),
        ("requested", "mail"),
        ("denied", "mail"),
        ("used", "disk"),
    ]
    assert (report.decisions, report.turns, report.events) == (1, 2, 5)
    assert (report.capabilities["mail"].requested, report.capabilities["mail"].denied) == (1, 1)
    assert report.capabilities["disk"].used == 1


def test_a_decision_without_a_label_has_an_empty_name() -> None:
    row = Replay("record", gapless=True).feed(1, 1, event(1, "custom"))
    assert row is not None
    assert (row.what, row.name) == ("decision", "")


def test_a_report_stays_small_whatever_happens() -> None:
    replay = Replay("record", gapless=True)
    for n in range(5000):
        label = f"capability {n}"
        replay.feed(n, n * 2, event(n * 2, "capability_used", label=label))
    report = replay.report("here")
    assert len(report.problems) == 1000 < report.problem_count
    assert len(report.capabilities) == 1001
    assert sum(use.used for use in report.capabilities.values()) == 5000
    replay.feed(5000, 10000, event(10000, "capability_used", label="capability 7"))
    assert replay.report("here").capabilities["capability 7"].used == 2


# a session


async def told(sessions: perdure.SessionManager, id: str = "ada") -> None:
    """Talk, decide, make checkpoints of the session and of a state, prune one."""
    async with sessions.open(id) as session:
        for n in range(3):
            async with session.turn():
                session.append(Message.user(f"question {n}"))
                session.events.emit("custom", "plan", {"step": n})
                session.append(Message.assistant(f"answer {n}"))
            await session.checkpoints.create(f"after {n}")
            await session.checkpoints.create("given", {"n": n, "text": "x" * 3000})
        await session.checkpoints.prune(keep=[2, 3, 4, 5, 6])
        session.events.emit("custom", "done")
        await session.save()


async def test_a_session_replays_whole(tmp_path: Path) -> None:
    """S3-9 S3-10: events and checkpoints suffice; each is compared with what was recorded."""
    rows: list[TimelineRow] = []
    async with perdure.connect(tmp_path / "kept") as sessions:
        await told(sessions)
        view = await sessions.load("ada")
        assert view is not None
        before = view.seq
        report = await view.events.replay(on_row=rows.append, strict=True)
        later = await view.events.replay(since=4)
        assert (await sessions.load("ada")).seq == before  # type: ignore[union-attr]
    assert report.problems == ()
    assert (report.snapshots, report.unverified, report.decisions) == (5, 1, 4)
    assert [one.name for one in rows] == ["plan", "plan", "plan", "done"]
    assert [one.token_id for one in rows] == [1, 2, 3, 0]
    said = [one.created_at for one in view.context() if one.role == "user"]
    assert [one.at for one in rows[:3]] == said
    assert (later.ok, later.since, later.decisions, later.snapshots) == (True, 4, 2, 2)


async def test_a_replay_from_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path / "kept") as sessions:
        await told(sessions)
        view = await sessions.load("ada")
        assert view is not None
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint 9"):
            await view.events.replay(since=9)


async def test_an_event_put_in_between_is_found(tmp_path: Path) -> None:
    """S3-10: also one that the log itself took for its own."""
    place = tmp_path / "kept"
    async with perdure.connect(place) as sessions:
        await told(sessions)
    async with perdure.connect(store := perdure.store_for(place)) as sessions:
        forged = event(3, "custom", label="forged")
        await forge(store, "ada", Entry(EVENT, msgspec.json.encode(forged)))
        view = await sessions.load("ada")
        assert view is not None
        with pytest.raises(ReplayDivergedError, match="time 3 comes after"):
            await view.events.replay(strict=True)


async def test_a_replay_from_a_checkpoint_tells_of_the_later_ones(tmp_path: Path) -> None:
    place = tmp_path / "kept"
    async with perdure.connect(place) as sessions:
        await told(sessions)
    async with perdure.connect(store := perdure.store_for(place)) as sessions:
        records = [
            record
            async for chunk in store.read_log(perdure.SessionKey("ada"))
            for record in chunk.records
        ]
        fourth = next(
            made
            for record in records
            if record.kind == CHECKPOINT and (made := json.loads(record.payload)).get("id") == 4
        )
        await forge(store, "ada", Entry(CHECKPOINT, json.dumps({**fourth, "label": "x"}).encode()))
        view = await sessions.load("ada")
        assert view is not None
        for since in (2, 3, 4, 5):
            report = await view.events.replay(since=since)
            is_told = any("checkpoint 4" in problem for problem in report.problems)
            assert is_told == (since < 4), (since, report.problems)


# the pair of files


@pytest.fixture
async def pair(tmp_path: Path) -> Path:
    folder = tmp_path / "pair"
    folder.mkdir()
    async with perdure.connect(tmp_path / "kept") as sessions:
        await told(sessions)
        view = await sessions.load("ada")
        assert view is not None
        names = await export_pair(view, str(folder))
    assert names == [CHECKPOINTS_FILE, EVENTS_FILE, SUMMARY_FILE]
    return folder


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_an_exported_pair_replays_as_the_session_did(pair: Path) -> None:
    """S3-8 S3-9: a line for each checkpoint, beside the events."""
    report = await replay_files(str(pair))
    assert report.problems == ()
    assert (report.snapshots, report.unverified, report.decisions) == (5, 1, 4)
    saved = lines_of(pair / CHECKPOINTS_FILE)
    assert [set(one) for one in saved] == [{"snapshot_id", "label", "timestamp", "state"}] * 5
    assert saved[0]["state"] == {"n": 0, "text": "x" * 3000}
    assert [one["content"] for one in saved[1]["state"]["context"]] == [
        "question 0",
        "answer 0",
        "question 1",
        "answer 1",
    ]


@pytest.mark.parametrize("name", [EVENTS_FILE, CHECKPOINTS_FILE])
async def test_one_byte_that_was_changed_is_found_and_named(pair: Path, name: str) -> None:
    """S3-10 S3-G3: every byte counts, not only those of long texts; 200 are tried one by one."""
    path = pair / name
    whole = path.read_bytes()
    others = [place for place, byte in enumerate(whole) if byte != ord("x")][:-1]
    for place in [
        whole.index(b"xx") if b"xx" in whole else 0,
        *random.Random(7).sample(others, 200),
    ]:
        old = whole[place]
        new = ord("7") if chr(old) != "7" else ord("3")
        if chr(old) == "\n":
            new = ord(" ")
        path.write_bytes(whole[:place] + bytes([new]) + whole[place + 1 :])
        report = await replay_files(pair)
        assert not report.ok, (place, whole[max(0, place - 20) : place + 20])
    path.write_bytes(whole)
    assert (await replay_files(pair)).ok


CHANGES: list[tuple[Callable[[list[str]], list[str]], str]] = [
    (lambda lines: lines[:2] + lines[3:], "taken away"),
    (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "moved or taken away"),
    (lambda lines: [*lines[:3], lines[2], *lines[3:]], "moved or taken away"),
    (lambda lines: lines[:-1], "says that there are"),
    (lambda lines: [*lines[:-1], lines[-1][: len(lines[-1]) // 2].rstrip()], "torn here"),
    (lambda lines: [*lines[:1], "{no json}\n", *lines[2:]], "cannot be read"),
]


@pytest.mark.parametrize(("change", "found"), CHANGES)
async def test_lines_that_are_missing_moved_or_torn_are_found(
    pair: Path, change: Callable[[list[str]], list[str]], found: str
) -> None:
    """S3-G7: a torn last line is reported, and not fatal."""
    path = pair / EVENTS_FILE
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    report = await replay_files(pair)
    assert any(found in problem for problem in report.problems), report.problems
    assert report.events >= 8


async def test_a_checkpoint_that_is_gone_or_twice_is_found(pair: Path) -> None:
    path = pair / CHECKPOINTS_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    assert "checkpoint 2 is not in" in (await replay_files(pair)).problems[0]
    path.write_text("".join([*lines, lines[0]]))
    assert "checkpoint 2 is in line 1, too" in (await replay_files(pair)).problems[0]


def foreign(folder: Path, events: list[dict[str, Any]], *states: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / EVENTS_FILE).write_text("".join(json.dumps(one) + "\n" for one in events))
    if states:
        text = "".join(json.dumps(one) + "\n" for one in states)
        (folder / CHECKPOINTS_FILE).write_text(text)
    return folder


SEED = {"snapshot_id": 3, "label": "reflect", "timestamp": 124, "state": {"memory": "vector://xyz"}}


def test_the_files_of_another_kernel_replay(tmp_path: Path) -> None:
    """S3-8 S3-12: without seals, with gaps and ties, and unsorted."""
    said = [
        {"token_id": 0, "timestamp": 125, "kind": "snapshot_created", "detail": {"snapshot": 3}},
        {"detail": {"goal": "a"}, "kind": "custom", "label": "plan", "timestamp": 4, "token_id": 0},
        {"token_id": 1, "timestamp": 4, "kind": "custom", "label": "again", "detail": {}},
    ]
    rows: list[TimelineRow] = []
    report = replay_folder(foreign(tmp_path / "x", said, SEED), on_row=rows.append)
    assert report.problems == ()
    assert (report.events, report.first_timestamp, report.verdict) == (3, 4, "not compared")
    assert (report.snapshots, report.unverified) == (0, 1)  # no event says what its state was
    assert "3 events have no hash" in report.unproven[0]
    assert [one.name for one in rows] == ["plan", "again"]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_events_are_sorted_by_time_and_stay_in_order_where_times_tie(times: list[int]) -> None:
    """S3-G6: also when they have to be sorted on the disk."""
    with tempfile.TemporaryDirectory() as name:
        said = [
            {"token_id": 0, "timestamp": time, "kind": "custom", "label": str(n)}
            for n, time in enumerate(times)
        ]
        rows: list[TimelineRow] = []
        foreign(Path(name) / "x", said)
        report = replay_folder(Path(name) / "x", on_row=rows.append)
    assert report.ok
    expected = sorted(range(len(times)), key=lambda n: times[n])
    assert [int(one.name) for one in rows] == expected


async def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"no events\.jsonl"):
        await replay_files(tmp_path)


async def test_what_another_kernel_wrote_becomes_a_session(tmp_path: Path) -> None:
    """S3-8 S3-9: import, then restore by id, replay, and export again."""
    said = [
        {"token_id": 0, "timestamp": 4, "kind": "custom", "label": "plan", "detail": {"goal": "a"}},
        {"token_id": 0, "timestamp": 9, "kind": "snapshot_created", "detail": {"snapshot": 3}},
        {"token_id": 0, "timestamp": 9, "kind": "custom", "label": "on", "detail": {}},
    ]
    folder = foreign(tmp_path / "theirs", said, SEED)
    async with perdure.connect(tmp_path / "kept") as sessions:
        async with sessions.open("ada") as session:
            taken = await import_pair(session, str(folder))
            assert (taken.events, taken.checkpoints, taken.findings) == (3, 1, ())
            restored = await session.checkpoints.restore(3)
            assert restored is not None
            assert (restored.label, restored.state) == ("reflect", {"memory": "vector://xyz"})
            assert (await session.checkpoints.create("next")).id == 4
            with pytest.raises(ConfigError, match="must go up"):
                await import_pair(session, folder)
        view = await sessions.load("ada")
        assert view is not None
        report = await view.events.replay(strict=True)
        assert report.snapshots == 2
        (tmp_path / "ours").mkdir()
        await export_pair(view, tmp_path / "ours")
    assert (await replay_files(tmp_path / "ours")).ok
    assert lines_of(tmp_path / "ours" / CHECKPOINTS_FILE)[0]["state"] == SEED["state"]


async def test_a_session_without_events_has_no_pair(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path / "kept") as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("hello"))
        view = await sessions.load("ada")
        assert view is not None
        assert await export_pair(view, tmp_path) == []


# reports


def test_a_page_shows_what_was_found_and_nothing_of_it_is_markup() -> None:
    """S3-11: for an audit, by people."""
    bad = "<script>alert(1)</script>"
    replay = Replay("line", gapless=True)
    row = replay.feed(1, 5, event(5, "custom", label=bad, detail={"why": bad}))
    replay.problem(bad, 7)
    replay.feed(2, 6, event(6, "capability_used", label=bad))
    assert row is not None
    text = page(replay.report(bad), [row], left_out=12)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 5
    assert "line 7: " in text
    assert "12 more" in text


def test_seals_depend_on_all_that_came_before() -> None:
    one, other = EventSigner(), EventSigner()
    first = one.next(event(1)), other.next(event(1, label="x"))
    assert first[0] != first[1]
    assert one.next(event(2)) != other.next(event(2))


# what a review has found


async def test_a_checkpoint_whose_time_was_changed_is_named(pair: Path) -> None:
    """S3-10 S3-G3: what the digest of the state does not cover is compared as well."""
    path = pair / CHECKPOINTS_FILE
    lines = path.read_text().splitlines(keepends=True)
    time = f'"timestamp":{json.loads(lines[1])["timestamp"]},'
    path.write_text("".join([lines[0], lines[1].replace(time, '"timestamp":2,'), *lines[2:]]))
    report = await replay_files(pair)
    assert ["time in line 2" in one for one in report.problems] == [True]


async def test_a_checkpoint_that_was_put_in_is_named(pair: Path) -> None:
    """S3-10: no event tells of it."""
    forged = {"snapshot_id": 99, "label": "forged", "timestamp": 3, "state": {}}
    with (pair / CHECKPOINTS_FILE).open("a") as file:
        file.write(json.dumps(forged) + "\n")
    report = await replay_files(pair)
    assert ["no event records checkpoint 99" in one for one in report.problems] == [True]


def test_a_foreign_checkpoint_without_an_event_is_said_to_be_unverified(tmp_path: Path) -> None:
    said = [{"token_id": 0, "timestamp": 4, "kind": "custom"}]
    report = replay_folder(foreign(tmp_path / "x", said, SEED))
    assert (report.ok, report.snapshots, report.unverified) == (True, 0, 1)


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize("state", [DEEP, "1e999"])
def test_a_line_that_no_decoder_takes_is_left_out_and_named(tmp_path: Path, state: str) -> None:
    """S3-G7: however deep, however large a number: the rest replays."""
    folder = tmp_path / "x"
    folder.mkdir()
    bad = '{"token_id":0,"timestamp":1,"kind":"custom","detail":{"x":%s}}\n'
    good = '{"token_id":0,"timestamp":2,"kind":"custom","label":"on"}\n'
    (folder / EVENTS_FILE).write_text(bad % state + good)
    saved = '{"snapshot_id":%d,"label":"a","timestamp":1,"state":%s}\n'
    (folder / CHECKPOINTS_FILE).write_text(saved % (1, state) + saved % (2, "{}"))
    report = replay_folder(folder)
    assert (report.events, report.unverified) == (1, 1)
    assert [one.partition(": ")[0] for one in report.problems] == ["line 1", "line 1"]


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import os

    folder = foreign(tmp_path / "x", [{"token_id": 0, "timestamp": 4, "kind": "custom"}])
    os.mkfifo(folder / CHECKPOINTS_FILE)
    with pytest.raises(ReplayError, match=r"checkpoints\.jsonl cannot be read"):
        replay_folder(folder)


def test_many_large_events_are_sorted_on_the_disk(tmp_path: Path) -> None:
    """S3-G6: what is in memory does not grow with the file."""
    times = random.Random(3).sample(range(500), 500)
    text = "x" * 10_000
    said = [{"token_id": 0, "timestamp": t, "kind": "custom", "label": text} for t in times]
    folder = foreign(tmp_path / "x", said)
    seen: list[int] = []
    tracemalloc.start()
    try:
        report = replay_folder(folder, on_row=lambda row: seen.append(row.place))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.ok
    assert [times[place - 1] for place in seen] == sorted(times)
    assert peak < 2_000_000 < (folder / EVENTS_FILE).stat().st_size


async def test_an_import_keeps_all_that_an_event_says(tmp_path: Path) -> None:
    """S3-8 S3-9: fields of others are others', whatever they are called."""
    told = {"pruned": True, "state_sha256": "x", "snapshot": 1}
    said = [{"token_id": 0, "timestamp": 4, "kind": "custom", "detail": told}]
    folder = foreign(tmp_path / "theirs", said)
    async with perdure.connect("memory:") as sessions:
        async with sessions.open("ada") as session:
            await import_pair(session, folder)
        view = await sessions.load("ada")
        assert view is not None
        assert [one.detail for one in await view.events.read()] == [told]


def checkpoint(id: int, state: Any = None) -> dict[str, Any]:
    return {"snapshot_id": id, "label": f"n{id}", "timestamp": id, "state": state}


async def test_checkpoints_that_count_from_0_are_taken_in(tmp_path: Path) -> None:
    """S3-1 S3-8: as the seed's kernel does; each has an event then, and the chain holds."""
    said = [{"token_id": 0, "timestamp": 5, "kind": "snapshot_created", "detail": {"snapshot": 0}}]
    folder = foreign(tmp_path / "theirs", said, checkpoint(0, {"a": 1}), checkpoint(1, {"a": 2}))
    async with perdure.connect("memory:") as sessions:
        async with sessions.open("ada") as session:
            assert (await import_pair(session, folder)).checkpoints == 2
            restored = await session.checkpoints.restore(0)
            assert restored is not None
            assert restored.state == {"a": 1}
            assert (await session.checkpoints.create("mine")).id == 2
            assert (await session.checkpoints.verify()).ok
        view = await sessions.load("ada")
        assert view is not None
        assert (await view.events.replay(strict=True)).snapshots == 3
        assert (await view.events.replay(since=0, strict=True)).snapshots == 2
        ours = tmp_path / "ours"
        ours.mkdir()
        await export_pair(view, ours)
    assert (await replay_files(ours)).problems == ()


@pytest.mark.parametrize(
    ("ids", "says"), [([2, 1], "line 2: checkpoint 1 comes after 2"), ([1, 1], "comes after 1")]
)
async def test_an_import_that_does_not_fit_changes_nothing(
    tmp_path: Path, ids: list[int], says: str
) -> None:
    """S3-6: refused before the first event is appended."""
    said = [{"token_id": 0, "timestamp": 4, "kind": "custom"}]
    folder = foreign(tmp_path / "theirs", said, *map(checkpoint, ids))
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        before = session.version
        with pytest.raises(ConfigError, match=says):
            await import_pair(session, folder)
        assert session.version == before


def test_a_page_stays_small_and_shows_what_would_hide() -> None:
    """S3-11: a detail without end, and text that turns the rest of the line round."""
    replay = Replay("line", gapless=True)
    long = event(5, "custom", label="a\u202eb", detail={"x": "y" * 1_000_000})
    row = replay.feed(1, 5, long)
    replay.problem("z" * 1_000_000)
    assert row is not None
    text = page(replay.report("here"), [row])
    assert len(text) < 10_000
    assert "\u202e" not in text
    assert "a\\u202eb" in text


@pytest.mark.parametrize("order", [1, -1])
def test_a_replay_ends_when_it_is_told_to(tmp_path: Path, order: int) -> None:
    said = [{"token_id": 0, "timestamp": n, "kind": "custom"} for n in range(50)][::order]
    folder = foreign(tmp_path / "x", said)
    seen: list[TimelineRow] = []
    replay_folder(folder, on_row=seen.append, go_on=lambda: len(seen) < 3)
    assert len(seen) == 3


async def test_a_replay_that_nobody_waits_for_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, it does not read millions of events in its thread before the program ends."""
    begun, cancelled, ended = anyio.Event(), threading.Event(), threading.Event()
    asked: list[bool] = []

    def reading(*_: Any, go_on: Callable[[], bool], **__: Any) -> None:
        asked.append(go_on())
        anyio.from_thread.run_sync(begun.set)
        cancelled.wait(10)
        asked.append(go_on())
        ended.set()

    monkeypatch.setattr("perdure.checkpoints.events.replay_folder", reading)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replay_files, tmp_path)
        await begun.wait()
        tasks.cancel_scope.cancel()
    cancelled.set()
    await anyio.to_thread.run_sync(ended.wait, 10)
    assert asked == [True, False]


async def test_a_checkpoint_that_was_changed_in_the_log_is_found() -> None:
    """S3-10 S3-G3: also where the log and the document agree on the changed one."""
    async with perdure.connect(store := MemoryStore()) as sessions:
        async with sessions.open("ada") as session:
            made = await session.checkpoints.create("real", {"balance": 10})
            await session.aclose()
        forged = msgspec.structs.replace(
            made,
            id=2,
            timestamp=made.timestamp + 2,
            event_seq=session.version,
            previous=made.hash,
            state=ExplicitState(value=msgspec.Raw(b'{"balance":99}'), size=14),
        )
        told = event(made.timestamp + 3, "snapshot_created", label="real", detail={"snapshot": 2})
        made_entry = Entry(CHECKPOINT, msgspec.json.encode(forged), end=False)
        await forge(store, "ada", made_entry, Entry(EVENT, msgspec.json.encode(told)))
        view = await sessions.load("ada")
        assert view is not None
        report = await view.events.replay()
    assert report.problems == (
        "checkpoint 2: it was changed: its hash is not that of what it says",
    )


async def test_a_state_that_is_not_as_it_was_is_found_by_a_replay() -> None:
    """S3-10: the chain and the events are sound; what a checkpoint is of has changed."""
    backing, quiet = MemoryBacking(), perdure.Shutdown(signals=False)
    store = MemoryStore(backing=backing)
    async with perdure.connect(store, shutdown=quiet) as sessions:
        async with sessions.open("ada") as session:
            large = await session.checkpoints.create("large", {"text": "x" * 300_000})
            session.append(Message.user("Hello"))
            made = await session.checkpoints.create("here")
            last = await session.checkpoints.create("last", 1)
        kept = backing.sessions[session.key].entries
        view = await sessions.load("ada")
        assert view is not None
        report = await view.events.replay(strict=True)
        assert (report.problems, report.snapshots) == ((), 3)

        (place,) = [at for at, one in enumerate(kept) if b"Hello" in one.payload]
        whole = kept[place]
        kept[place] = whole._replace(payload=whole.payload.replace(b"Hello", b"Hullo"))
        (problem,) = (await view.events.replay()).problems
        assert f"checkpoint {made.id}: a record from" in problem
        with pytest.raises(ReplayDivergedError):
            await view.events.replay(strict=True)
        kept[place] = whole

        (place,) = [at for at, one in enumerate(kept) if b'"label":"last"' in one.payload][:1]
        whole = kept[place]
        other = sealed(
            msgspec.structs.replace(last, state=ExplicitState(value=msgspec.Raw(b"2"), size=1))
        )
        kept[place] = whole._replace(payload=msgspec.json.encode(other))
        (problem,) = (await view.events.replay()).problems
        assert f"checkpoint {last.id}: the log's record of it is another one" in problem
        kept[place] = whole

        assert isinstance(large.state, ExplicitState)
        await store.remove_blobs("", [large.state.root])
        (problem,) = (await view.events.replay()).problems
        assert (
            problem.startswith(f"record {large.event_seq}") or f"checkpoint {large.id}:" in problem
        )


@pytest.mark.parametrize(
    ("label", "id", "says"),
    [
        ("real", 2, None),
        (None, 2, None),
        ("other", 2, "checkpoint 2 does not stand before its event"),
        ("real", 3, "checkpoint 3 does not stand before its event"),
    ],
)
async def test_an_event_names_the_checkpoint_that_it_is_of(
    label: str | None, id: int, says: str | None
) -> None:
    """S3-10 S3-12: its label and its number are those of the checkpoint before it."""
    async with perdure.connect(store := MemoryStore()) as sessions:
        async with sessions.open("ada") as session:
            first = await session.checkpoints.create("first", {"n": 1})
            await session.aclose()
        second = sealed(
            msgspec.structs.replace(
                first,
                id=2,
                label="real",
                timestamp=first.timestamp + 2,
                event_seq=session.version,
                previous=first.hash,
            )
        )
        told = event(first.timestamp + 3, "snapshot_created", label=label, detail={"snapshot": id})
        made = Entry(CHECKPOINT, msgspec.json.encode(second), end=False)
        await forge(store, "ada", made, Entry(EVENT, msgspec.json.encode(told)))
        view = await sessions.load("ada")
        assert view is not None
        problems = (await view.events.replay()).problems
        assert len(problems) == (says is not None)
        assert says is None or says in problems[0]


async def test_events_are_what_the_schema_says() -> None:
    """S3-12: five fields, and the label of a checkpoint's event is the checkpoint's."""
    async with perdure.connect("memory:") as sessions:
        async with sessions.open("ada") as session:
            session.events.emit("custom", "plan", {"goal": "a"})
            made = await session.checkpoints.create("first", {"n": 1})
            await session.save()
        view = await sessions.load("ada")
        assert view is not None
        plan, created = [msgspec.to_builtins(one) for one in await view.events.read()]
    assert plan == {
        "token_id": 0,
        "timestamp": plan["timestamp"],
        "kind": "custom",
        "label": "plan",
        "detail": {"goal": "a"},
    }
    assert (created["kind"], created["label"]) == ("snapshot_created", "first")
    assert created["detail"]["snapshot"] == made.id
    assert created["timestamp"] > plan["timestamp"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((5,), "kind must be text"),
        (("",), "at least one character"),
        (("custom", 7), "label must be text"),
        (("custom", None, [1]), "detail must be a dict"),
        (("snapshot_created", "x", {"snapshot": 9}), r"checkpoints\.create"),
    ],
)
async def test_an_event_that_could_not_be_read_again_is_refused(
    given: tuple[Any, ...], says: str
) -> None:
    """S3-12: written, it would be one that is missing, or a checkpoint that never was."""
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(ConfigError, match=says):
            session.events.emit(*given)
        session.events.emit("custom", "on")
        await session.save()
        report = await session.events.replay(strict=True)
    assert report.events == 1
