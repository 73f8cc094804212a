"""Kill a restore at each call that changes the disk; the next one gives the same state.

What is restored was left by a process that was killed, too: with a tail behind the last fold, a
tool call without a result, and, by variant, a snapshot or a manifest that cannot be used.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiofiles  # noqa: F401  # imported here once, not in each child that is forked
import anyio
import anyio._backends._asyncio  # noqa: F401

import perdure
from perdure import Message, SessionManager, Shutdown, ToolCall
from perdure.agent import MemoryManager
from perdure.memory.compaction import EpisodicItem, item_entry
from perdure.memory.context import SNAPSHOT
from perdure.records.messages import encode_message
from perdure.restore import (
    WorkingContextSnapshotBootstrapOptions,
    WorkingContextSnapshotBootstrapper,
)
from perdure.session.internals import accept
from tests.crash.forks import Child, Report
from tests.crash.hooks import Act, Tripwire
from tests.crash.scratch import scratch

PROMPT, NEW_PROMPT = "Be kind.", "Be brief."
State = dict[str, Any]


def _manager(root: Path) -> SessionManager:
    return perdure.connect(root, autosave=None, shutdown=Shutdown(signals=False))


async def _restore(sessions: SessionManager, prompt: str) -> State:
    """Open the session, have an agent's strategy bring it back, and tell what is there."""
    session = await sessions.open("ada")
    memory = MemoryManager(session)
    await WorkingContextSnapshotBootstrapper().bootstrap(
        memory, prompt, WorkingContextSnapshotBootstrapOptions()
    )
    said = [item.value.text for item in await session.history(limit=1000) if item.kind == "message"]
    return {
        "context": [encode_message(message).payload.decode() for message in session.context()],
        "said": said,
        "memory": {key: await session.memory.get(key) for key in await session.memory.keys()},
        "state": await session.state.get("mood"),
        "episodes": [item.summary for item in await memory.retriever.episodic()],
        "turns": session.info.turns,
        "messages": session.info.messages,
        "title": session.info.metadata.title,
    }


def prepare(root: Path) -> None:
    """Leave a session as a kill in the middle of a turn leaves it."""

    async def main() -> None:
        async with _manager(root) as sessions:
            await _restore(sessions, PROMPT)
            session = await sessions.open("ada")
            session.describe(title="Ships")
            async with session.turn():
                session.append(Message.user("hello"), Message.assistant("hi"))
            session.memory.set("harbor", "north")
            session.state.set("mood", "calm")
            accept(session, (item_entry(EpisodicItem(id="e1", ts=1.0, summary="They met.")),))
            await session.aclose()  # folded
            session = await sessions.open("ada")
            async with session.turn():
                session.append(Message.user("and now?"))
                session.memory.set("wind", "west")
                session.append(
                    Message.assistant("Let me see.", tool_calls=[ToolCall("c1", "look")])
                )
                await session.save()
                os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())


def sound(_: Path) -> None:
    """Leave everything as it is."""


def without_snapshot(session: Path) -> None:
    """Lose the cache."""
    (session / SNAPSHOT).unlink()


def damaged(session: Path) -> None:
    """Damage two documents, one of them the cache."""
    for name in (SNAPSHOT, "memory.json"):
        path = session / name
        path.write_bytes(path.read_bytes()[:-9])


def without_manifest(session: Path) -> None:
    """Lose what says which documents count."""
    for path in session.glob("manifest-*"):
        path.unlink()


VARIANTS: dict[str, Callable[[Path], None]] = {
    "sound": sound,
    "snapshot": without_snapshot,
    "damaged": damaged,
    "manifest": without_manifest,
}


def _run(root: Path, report: Report) -> None:
    async def main() -> None:
        async with _manager(root) as sessions:
            report("state", await _restore(sessions, NEW_PROMPT))

    asyncio.run(main())


def _attempt(root: Path, at: int, act: Act) -> tuple[Child, list[str]]:
    """Restore and close, killed at a call; 0 is for never."""

    def program(report: Report) -> None:
        wire = Tripwire(at, act)
        wire.install()
        _run(root, report)
        report("calls", wire.calls)

    child = Child(program)
    events = child.wait()
    calls = [name for event in events if event[0] == "calls" for name in event[1]]
    return child, calls


def _judge(root: Path, expected: State | None) -> tuple[State, list[str]]:
    """Restore unhindered; return the state, and what is wrong with it."""
    child = Child(lambda report: _run(root, report))
    problems = [event[1] for event in child.wait() if event[0] == "problem"]
    states = [event[1] for event in child.events if event[0] == "state"]
    if child.status or not states:
        return {}, [*problems, f"the restart ended with status {child.status}"]
    state: State = states[0]
    if expected is not None and state != expected:
        problems += [
            f"{name}: {json.dumps(state[name])}, and without the kill {json.dumps(expected[name])}"
            for name in expected
            if state[name] != expected[name]
        ]
    return state, problems


def _kills(calls: list[str]) -> Iterator[tuple[int, Act]]:
    for at, name in enumerate(calls, 1):
        yield at, "kill"
        if name == "write":
            yield at, "kill torn"


def restore(*, variant: str, every: int = 1) -> dict[str, object]:
    """Kill a restore at every call, or every so many, and restart."""
    killed = acknowledged = 0
    logging.getLogger("perdure").setLevel(logging.ERROR)  # damage is what it is about
    with scratch() as top:
        left = top / "left"
        Child(lambda _: prepare(left)).wait()
        VARIANTS[variant](left / "agents" / "ada")
        reference = shutil.copytree(left, top / "reference")
        _, calls = _attempt(reference, 0, "kill")
        # An unhindered restore, and one more behind it: the same state.
        expected, problems = _judge(reference, None)
        first, again = _judge(shutil.copytree(left, top / "first"), expected)
        problems += again
        for at, act in itertools.islice(_kills(calls), 0, None, every):
            root = shutil.copytree(left, top / f"{at}-{act[-4:]}")
            child, _ = _attempt(root, at, act)
            _, wrong = _judge(root, expected)
            problems += [f"{variant}, {act} at {at} ({calls[at - 1]}): {text}" for text in wrong]
            killed += child.was_killed
            acknowledged += not wrong
            shutil.rmtree(root)
    return {
        "variant": variant,
        "calls": len(calls),
        "kills": killed,
        "acknowledged": acknowledged,
        "messages": len(first.get("context", ())),
        "problems": problems,
    }
