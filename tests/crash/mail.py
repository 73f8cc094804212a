"""Kill whoever posts to a session and takes from it, at each call, and see what came of it.

The posts of a run are retried by whoever comes after, as a client would that has got no answer.
In the end each of them stands in the log once, in the order in which they were posted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import anyio

from perdure import Message, Session, SessionManager, Shutdown, connect
from perdure.store import Store
from tests.crash import places
from tests.crash.forks import Child, Event, Report
from tests.crash.hooks import Act, Tripwire
from tests.crash.scratch import scratch

AGENT = "agent"
KEYS = ("first", "second", "third", "fourth")
QUIET = Shutdown(signals=False)


async def work(sessions: SessionManager, store: Store, report: Report) -> None:
    """Post before, while and after somebody holds the session."""

    async def post(key: str) -> None:
        report("posting", key)
        await sessions.post(AGENT, Message.user(key), Message.assistant(f"{key}!"), key=key)
        report("ok", key)

    await post(KEYS[0])
    await post(KEYS[1])
    async with sessions.open(AGENT) as session:
        await post(KEYS[2])
        await until_taken(session, store)
        async with session.turn():
            report("turn")
        await session.aclose()
    await post(KEYS[3])
    async with sessions.open(AGENT) as session:
        await until_taken(session, store)
    report("through")


async def until_taken(session: Session, store: Store) -> None:
    """Wait until nothing waits for the session any more."""
    while await store.receive(session.key, session.epoch):
        await anyio.sleep(0.005)


async def judge(
    sessions: SessionManager, store: Store, report: Report, posted: list[str], least: int
) -> None:
    """Retry what was posted, and compare."""
    for again in ("retried", "opened anew"):
        for key in posted[least:] if again == "retried" else posted:
            await sessions.post(AGENT, Message.user(key), Message.assistant(f"{key}!"), key=key)
        async with sessions.open(AGENT) as session:
            await until_taken(session, store)
            found = [message.text for message in session.context()]
            await session.aclose()
        wanted = [text for key in posted for text in (key, f"{key}!")]
        if found != wanted:
            report("problem", f"{again}: of the posts {posted} the log has {found}")


def _run(root: Path, main: object, report: Report, *arguments: object) -> None:
    async def whole() -> None:
        store = places.make(root, None)
        async with connect(store, shutdown=QUIET) as sessions:
            await main(sessions, store, report, *arguments)  # type: ignore[operator]

    asyncio.run(whole())


def kill_at(at: int, act: Act) -> tuple[bool, list[Event]]:
    """Kill a run at a call; return whether it came to that, and what was wrong or told."""
    with scratch() as top:
        root = top / "store"

        def program(report: Report) -> None:
            wire = Tripwire(at, act)
            wire.install()
            _run(root, work, report)
            report("calls", wire.calls)

        child = Child(program)
        events = child.wait()
        posted = [key for what, *rest in events if what == "posting" for key in rest]
        answered = sum(what == "ok" for what, *_ in events)
        judged = Child(lambda report: _run(root, judge, report, posted, answered))
        events += judged.wait()
        if judged.status or (child.status and not child.was_killed):
            events.append(["problem", f"ended with {child.status}, judged with {judged.status}"])
    return child.was_killed, events


def every_call(every: int) -> Iterator[tuple[str, bool, list[Event]]]:
    """Kill before call 1, 2, 3 … (or every so manieth) up to the first run that is through, and in each write."""
    events: list[Event] = []
    for at in itertools.count(1, every):
        killed, events = kill_at(at, "kill")
        yield f"kill at {at}", killed, events
        if not killed:
            break
    calls = [name for what, *rest in events if what == "calls" for name in rest[0]]
    for at, name in enumerate(calls, 1):
        if name == "write":
            yield f"kill torn at {at}", *kill_at(at, "kill torn")


def mail(*, every: int = 1) -> dict[str, object]:
    """Kill at every call, or at every so manieth one."""
    kills = answered = 0
    problems: list[str] = []
    for what, killed, events in every_call(every):
        kills += killed
        answered += sum(event[0] == "ok" for event in events)
        problems += [f"{what}: {event[1]}" for event in events if event[0] == "problem"]
    return {"kills": kills, "acknowledged": answered, "problems": problems}
