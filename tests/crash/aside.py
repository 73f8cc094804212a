"""Kill an open that sets a damaged log aside, at each call that changes the disk."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Message
from tests.crash.forks import Child, Report
from tests.crash.hooks import Act, Tripwire
from tests.crash.scratch import scratch


def _connect(place: Path) -> perdure.SessionManager:
    return perdure.connect(place, shutdown=perdure.Shutdown(signals=False), autosave=None)


def _write(place: Path, report: Report) -> None:
    """Leave a session, as a kill does before anything of it was folded."""

    async def main() -> None:
        async with _connect(place) as sessions, sessions.open("ada") as session:
            session.append(Message.user("before"), Message.assistant("what was said"))
            await session.save()
            report("done")
            await anyio.sleep_forever()

    anyio.run(main)


def _open(place: Path, report: Report, wire: Tripwire | None) -> None:
    """Begin anew, and say what the session holds, and what it was told."""

    async def main() -> None:
        sessions = await _connect(place)
        logging.disable(logging.WARNING)
        if wire is not None:
            wire.install()
        session = await sessions.open("ada", on_damage="fresh")
        report("holds", [message.text for message in session.context()])
        report("told", str(session.restore_report))
        session.append(Message.user("anew"))
        await session.save()
        report("saved")
        report("calls", [] if wire is None else wire.calls)
        await sessions.aclose()

    anyio.run(main)


def _damaged(place: Path) -> bytes:
    child = Child(lambda report: _write(place, report))
    child.listen(30, events=1)
    child.kill()
    (log,) = (place / "agents" / "ada" / "log").glob("*.jsonl")
    data = log.read_bytes().replace(b"before", b"beforf")
    log.write_bytes(data)
    return data


def _problems(place: Path, evidence: bytes, first: Child, act: Act, at: int) -> list[str]:
    child = Child(lambda report: _open(place, report, None))
    child.wait()
    said = {event[0]: event[1:] for event in child.events}
    was_saved = any(event[0] == "saved" for event in first.events)
    found: list[str] = []
    if "saved" not in said:
        found.append("the next open fails")
    elif said["holds"] != [["anew"]] and (was_saved or said["holds"] != [[]]):
        found.append(f"the next open has {said['holds']}")
    elif "a damaged log" not in said["told"][0]:
        found.append("the next open does not name the evidence")
    if evidence not in [path.read_bytes() for path in place.rglob("*") if path.is_file()]:
        found.append("the evidence is lost")
    return [f"{act} at {at}: {text}" for text in found]


def aside(*, every: int = 1) -> dict[str, Any]:
    """Kill at every call, or each so many, clean and in the middle of a write; then open again."""
    problems: list[str] = []
    kills = 0
    with scratch() as top:
        evidence = _damaged(top / "damaged")
        acts: tuple[Act, ...] = ("kill", "kill torn")
        for act in acts:
            for at in itertools.count(1, every):
                place = top / f"{act}-{at}"
                shutil.copytree(top / "damaged", place)
                wire = Tripwire(at, act)
                child = Child(lambda report, wire=wire, place=place: _open(place, report, wire))
                child.wait()
                problems += _problems(place, evidence, child, act, at)
                shutil.rmtree(place)
                kills += child.was_killed
                if not child.was_killed:
                    break
    return {"scenario": "aside", "kills": kills, "problems": problems}
