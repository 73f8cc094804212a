"""Kill a rollback at every call that changes the disk: all of it is there afterwards, or nothing.

The session has a context that was cut, memory, states and long-term memories, all of which the
rollback changes. What is left by a kill is opened, compared and verified; then the rollback is
done again.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path
from typing import Any

from perdure import Limits, Message, Session, SessionManager, Shutdown, connect
from perdure.memory.compaction import EpisodicItem, item_entry
from perdure.session.internals import accept
from tests.crash import places
from tests.crash.forks import Child, Report
from tests.crash.hooks import Act, Tripwire
from tests.crash.scratch import scratch

AGENT = "agent"
SMALL = Limits(context_bytes=500)


def manager(root: Path) -> SessionManager:
    store = places.make(root, None)
    return connect(store, autosave=None, limits=SMALL, shutdown=Shutdown(signals=False))


async def talk(session: Session, text: str) -> None:
    """Have a turn that changes everything a session has."""
    async with session.turn():
        session.append(Message.user(text), Message.assistant(f"re {text}"))
        session.memory.set("last", text)
        session.memory.set(f"about {text}", text * 400)
        session.state.set("plan", {"said": text})
        session.state.set(f"at {text}", text)
        accept(session, (item_entry(EpisodicItem(id=text, ts=0.0, summary=text)),))


async def begin(root: Path, report: Report) -> None:
    """Make a session with a checkpoint, and go on; tell what it was, and what it is."""
    async with manager(root) as sessions:
        session = await sessions.open(AGENT)
        for number in range(6):
            await talk(session, f"number {number}")
        await session.checkpoints.create("here")
        report("then", await looks(session))
        for number in range(8):
            await talk(session, f"later {number}")
        await session.checkpoints.create("there")
        report("now", await looks(session))


async def go_back(root: Path, report: Report) -> None:
    async with manager(root) as sessions, sessions.open(AGENT) as session:
        back = await session.checkpoints.rollback(1)
        report("ok", back.checkpoint.id)


async def looks(session: Session) -> dict[str, Any]:
    """Return what a session shows, as JSON."""
    made = await session.checkpoints.create("a look")
    restored = await session.checkpoints.restore(made.id)
    assert restored is not None
    await session.checkpoints.prune(keep=[one.id for one in await before(session, made.id)])
    return {
        "context": [message.text for message in session.context()],
        "content": [one["content"] for one in restored.state.pop("context")],
        **restored.state,
    }


async def before(session: Session, id: int) -> list[Any]:
    return [one for one in await session.checkpoints.states() if one.id != id]


async def judge(root: Path, report: Report, then: Any, now: Any, answered: bool) -> None:
    """Look for anything that is neither as before nor as after."""
    async with manager(root) as sessions, sessions.open(AGENT) as session:
        labels = [one.label for one in await session.checkpoints.states()]
        done = labels == ["here", "there", "rollback::here#1"]
        if not done and (labels != ["here", "there"] or answered):
            report("problem", f"there are the checkpoints {labels}, answered: {answered}")
        if (found := await looks(session)) != (then if done else now):
            report("problem", f"done: {done}, and the session is {found}")
        if problems := (await session.checkpoints.verify()).problems:
            report("problem", f"it does not verify: {problems}")
        await session.checkpoints.rollback(1)
        if (found := await looks(session)) != then:
            report("problem", f"gone back again, the session is {found}")
        report("judged", done)


def _run(main: Any, report: Report, *arguments: Any) -> None:
    asyncio.run(main(*arguments[:1], report, *arguments[1:]))


def kill_at(prepared: Path, at: int, act: Act, then: Any, now: Any) -> tuple[bool, list[Any]]:
    """Kill a rollback at a call; return whether it came to that, and all that was told."""
    with scratch() as top:
        root = top / "store"
        shutil.copytree(prepared, root)

        def program(report: Report) -> None:
            wire = Tripwire(at, act)
            wire.install()
            _run(go_back, report, root)
            report("calls", wire.calls)

        child = Child(program)
        events = list(child.wait())
        answered = any(event[0] == "ok" for event in events)
        judged = Child(lambda report: _run(judge, report, root, then, now, answered))
        events += judged.wait()
        if judged.status or (child.status and not child.was_killed):
            events.append(["problem", f"ended with {child.status}, judged with {judged.status}"])
        return child.was_killed, events


def rollback(every: int = 1) -> dict[str, object]:
    """Kill at every call, or at each *every*-th of them, and in the middle of every write."""
    tried: list[tuple[str, bool, list[Any]]] = []
    with scratch() as top:
        prepared = top / "prepared"
        made = Child(lambda report: _run(begin, report, prepared))
        said = {event[0]: event[1] for event in made.wait()}
        if "problem" in said:
            return {"kills": 0, "problems": [said["problem"]]}
        for at in itertools.count(1, every):
            tried.append(
                (f"kill at {at}", *kill_at(prepared, at, "kill", said["then"], said["now"]))
            )
            if not tried[-1][1]:
                break
        calls = next(event[1] for event in tried[-1][2] if event[0] == "calls")
        for at in [at for at, name in enumerate(calls, 1) if name == "write"][
            :: max(every // 2, 1)
        ]:
            what = f"kill torn at {at}"
            tried.append((what, *kill_at(prepared, at, "kill torn", said["then"], said["now"])))
    judged = [event[1] for _, _, events in tried for event in events if event[0] == "judged"]
    return {
        "kills": sum(killed for _, killed, _ in tried),
        "acknowledged": sum(event[0] == "ok" for _, _, events in tried for event in events),
        "wholly_there": sum(judged),
        "not_at_all": sum(not one for one in judged),
        "problems": [
            f"{what}: {event[1]}"
            for what, _, events in tried
            for event in events
            if event[0] == "problem"
        ],
    }
