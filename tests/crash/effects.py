"""Kill an agent at each point of a turn whose tools have side effects, and see what came of it.

A sink, which is a process of its own, takes mail over TCP and counts it. The agent looks
something up, then sends a mail, and is killed: before each call that changes the disk, and between
the steps of the tools themselves. Whoever comes after goes on with the turn. Then a message
that was admitted has been answered once, nothing was looked up twice, and
the mail was sent once: with a key, since the sink knows the key; without, since nobody sends it again
before somebody has looked into the sink.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from perdure import Message, SessionManager, Shutdown, connect
from perdure.agent import Agent, AgentConfig, AgentFactory, ScriptedModel, TurnEnded, call, tool
from perdure.agent.events import EffectUnknown, ToolStarted
from perdure.memory.ledger import Policy
from tests.crash import places
from tests.crash.forks import Child, Event, Report
from tests.crash.hooks import Tripwire
from tests.crash.scratch import scratch

AGENT = "agent"
QUIET = Shutdown(signals=False)
POLICIES: tuple[Policy, ...] = ("replay", "ask", "skip")
Point = Callable[[str], object]
Kill = Callable[..., tuple[bool, list[Event]]]


# the sink


class Sink:
    """A process that takes mail, and remembers each that has come in whole."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._child = Child(lambda report: take_mail(listener))
        listener.close()

    def arrived(self, run: str) -> list[dict[str, Any]]:
        """Return what has come of a run, in order."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(json.dumps({"list": run}).encode() + b"\n")
            with connection.makefile() as lines:
                return json.loads(lines.readline())

    def close(self) -> None:
        self._child.kill()


def take_mail(listener: socket.socket) -> None:
    """Take one mail a connection, for ever."""
    arrived: list[dict[str, Any]] = []
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as lines:
            try:
                line = lines.readline()
                if not line.endswith("\n"):
                    continue  # whoever sent it was killed amid
                mail = json.loads(line)
                if "list" in mail:
                    answer = [one for one in arrived if one["run"] == mail["list"]]
                else:
                    arrived.append(mail)
                    answer = []
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
            except OSError:
                continue


async def send(port: int, mail: dict[str, Any], point: Point) -> None:
    """Hand a mail to the sink, in steps that one may be killed between."""
    point("entered")
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        point("connected")
        data = json.dumps(mail).encode() + b"\n"
        await stream.send(data[:9])
        point("half sent")
        await stream.send(data[9:])
        point("sent")
        await stream.receive()
        point("answered")


# the agent


def says(messages: Sequence[Message]) -> Any:
    """Look something up, send a mail, then answer."""
    last = messages[-1]
    if last.tool_result is None:
        return call("look")
    return call("send_mail", to="bea") if last.tool_result.name == "look" else "done"


def config(policy: Policy, port: int, run: str, point: Point, **options: Any) -> AgentConfig:
    """Return the agent; its mail has a key where the policy is to replay."""

    async def look() -> str:
        """Look something up."""
        await send(port, {"run": run, "what": "look"}, point)
        return "found"

    @tool(name="send_mail")
    async def with_key(to: str, idempotency_key: str) -> str:
        """Send a mail."""
        await send(port, {"run": run, "what": "mail", "to": to, "key": idempotency_key}, point)
        return "sent"

    @tool(name="send_mail", effect=policy)
    async def without(to: str) -> str:
        """Send a mail."""
        await send(port, {"run": run, "what": "mail", "to": to, "key": None}, point)
        return "sent"

    tools = [look, with_key if policy == "replay" else without]
    return AgentConfig(name=AGENT, model=ScriptedModel(says), tools=tools, **options)


async def work(
    sessions: SessionManager, report: Report, made: AgentConfig, *, asks: bool = False
) -> None:
    """Post a message, or ask, and wait for the answer."""
    agent = await AgentFactory(sessions).create_agent(made, agent_id=AGENT)
    async with agent, agent.events() as events:
        report("ready")
        if asks:
            async for event in agent.stream("mail bea"):
                if isinstance(event, ToolStarted):  # told once it is durable
                    report("ok", "admitted")
        else:
            await agent.post_user_message("mail bea")
            report("ok", "admitted")
            async for event in events:
                if isinstance(event, TurnEnded):
                    break
    report("ok", "answered")


async def judge(
    sessions: SessionManager, report: Report, made: AgentConfig, sink: Sink, run: str
) -> None:
    """Go on with what is left, deciding where that is asked for; tell what there is then."""
    agent = await AgentFactory(sessions).create_agent(made, agent_id=AGENT)
    async with agent:
        for effect in agent.unknown_effects:
            report("unknown", effect.policy)
        before = mails(sink.arrived(run))
        async with anyio.create_task_group() as group:
            group.start_soon(decide, agent, report, sink, run, before)
            for ending in await agent.resume():
                report("resumed", type(ending).__name__)
            group.cancel_scope.cancel()
        texts = [item.value.text for item in await agent.session.history(limit=1000)]
        report("history", texts)
        report("left", len(agent.unfinished), len(agent.unknown_effects))


async def decide(agent: Agent, report: Report, sink: Sink, run: str, before: int) -> None:
    """Answer what the agent asks: as somebody would who looks whether the mail has come."""
    async with agent.events() as events:
        async for event in events:
            if isinstance(event, EffectUnknown):
                there = mails(sink.arrived(run))
                if there != before:
                    report("problem", "a mail was sent again before anybody was asked")
                report("asked")
                await agent.resolve_effect(event.effect.id, "done" if there else "replay")


def mails(arrived: list[dict[str, Any]]) -> int:
    """Return how many mails the sink would deliver: one for each key."""
    keys = [mail["key"] for mail in arrived if mail["what"] == "mail"]
    return sum(key is None for key in keys) + len({key for key in keys if key is not None})


# killing it


def kill_at(
    at: int, policy: Policy, sink: Sink, run: str, *, backend: str = "asyncio", asks: bool = False
) -> tuple[bool, list[Event]]:
    """Kill a run at a point; return whether it came to that, and what was wrong or told."""
    with scratch() as top:
        root = top / "store"

        def program(report: Report) -> None:
            wire = Tripwire(at, "kill")
            wire.install()
            made = config(policy, sink.port, run, lambda _: wire("write", lambda *_: None, 0, b""))
            reached: dict[str, int] = {}

            def tell(*event: Any) -> None:
                report(*event)
                reached[event[-1]] = len(wire.calls)

            _run(root, backend, partial(work, asks=asks), tell, made)
            report("calls", reached["ready"] + 1, reached["answered"])

        child = Child(program)
        events = child.wait()
        made = config(policy, sink.port, run, lambda _: None)
        judged = Child(lambda report: _run(root, backend, judge, report, made, sink, run))
        told = judged.wait()
        if judged.status or (child.status and not child.was_killed):
            events.append(["problem", f"ended with {child.status}, judged with {judged.status}"])
        problems = [["problem", text] for text in wrong(events, told, sink.arrived(run), policy)]
    return child.was_killed, [*events, *told, *problems]


def wrong(
    events: list[Event], told: list[Event], arrived: list[dict[str, Any]], policy: Policy
) -> Iterator[str]:
    """Say what is wrong with the end of it."""
    admitted = ["ok", "admitted"] in events
    history = next((rest[0] for what, *rest in told if what == "history"), [])
    began = "mail bea" in history
    if (admitted or arrived) and not began:
        yield "an admitted message has vanished"
    if began and (history.count("mail bea"), history.count("done")) != (1, 1):
        yield f"the message was not answered once: {history}"
    counted = Counter(mail["what"] for mail in arrived)
    sent = mails(arrived)
    if counted["look"] > 1:
        yield f"looked up {counted['look']} times"
    if sent > 1 or (began and sent == 0 and policy != "skip"):
        yield f"the sink would deliver {sent} mails: {arrived}"
    if policy != "replay" and counted["mail"] > 1:
        yield f"sent {counted['mail']} times without a key"
    if ["left", 0, 0] not in told:
        yield f"something was left: {told}"


def _run(root: Path, backend: str, main: Any, report: Report, *arguments: Any) -> None:
    async def whole() -> None:
        async with connect(places.make(root, None), shutdown=QUIET) as sessions:
            await main(sessions, report, *arguments)

    anyio.run(whole, backend=backend)


def effects(
    *, cycles: int | None = None, backend: str = "asyncio", asks: bool = False
) -> dict[str, object]:
    """Kill at every point under each policy; or so many times, at points that are spread evenly."""
    sink = Sink()
    kill = partial(kill_at, sink=sink, backend=backend, asks=asks)
    problems: list[str] = []
    figures: Counter[str] = Counter()
    try:
        runs = itertools.count()
        for policy, point in _places(cycles, kill):
            for at in range(point, 0, -1):  # a run may be over before the point of another one
                killed, events = kill(at, policy, run=f"run-{next(runs)}")
                figures["kills"] += killed
                figures["acknowledged"] += sum(event[0] == "ok" for event in events)
                for name in ("unknown", "asked", "resumed"):
                    figures[name] += sum(event[0] == name for event in events)
                problems += [f"{policy}, {at}: {e[1]}" for e in events if e[0] == "problem"]
                if killed:
                    break
    finally:
        sink.close()
    return {**figures, "problems": problems}


def _places(cycles: int | None, kill: Kill) -> Iterator[tuple[Policy, int]]:
    """Give the points to kill at: all, or a number of them in even steps."""
    every = [(policy, at) for policy in POLICIES for at in _points(policy, kill)]
    if cycles is None:
        yield from every
        return
    for number in range(cycles):
        yield every[number * len(every) // cycles % len(every)]


_fresh = itertools.count()


def _points(policy: Policy, kill: Kill) -> range:
    """Return the points of a run, from before the message is posted to its answer."""
    _, events = kill(0, policy, run=f"whole-{next(_fresh)}")
    calls = [rest for what, *rest in events if what == "calls"]
    assert calls, events
    ((first, last),) = calls
    return range(first, last + 1)
