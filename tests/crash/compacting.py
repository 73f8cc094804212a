"""Kill an agent at every step of a turn that compacts, restart it, and ask again.

Steps are the calls that change the disk, from the turn's first to its last, each write in its middle
and between its records, and each time that the compaction itself gives way to the loop. Whatever the step, the memory of the agent that
was started again, and asked the same, is that of one that was never killed.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiofiles  # noqa: F401  # imported here once, not in each child that is forked
import anyio
import anyio._backends._asyncio  # noqa: F401
import msgspec

from perdure import Message, Shutdown, connect
from perdure.agent import (
    AgentConfig,
    AgentFactory,
    CompactionPolicy,
    MemoryManager,
    ScriptedModel,
    call,
)
from perdure.providers import FORMATS, render
from perdure.session.manager import SessionManager
from tests.crash.forks import Child, Report
from tests.crash.hooks import Tripwire, changes
from tests.crash.scratch import scratch
from tests.providers.rules import wrongs

At = Literal["disk", "torn", "line", "loop"]

BUDGET = 6000


async def gauge(hour: int) -> str:
    """Read the gauge."""
    return f"{hour} m " * 20


def answer(messages: Sequence[Message]) -> Any:
    last = messages[-1]
    if last.role == "tool":
        return "It is low. " * 30
    number = int(last.text.split()[2].rstrip("."))
    return (
        [call("gauge", hour=number), call("gauge", hour=0)] if number % 2 else call("gauge", hour=1)
    )


def config() -> AgentConfig:
    return AgentConfig(
        name="tester",
        model=ScriptedModel(answer),
        tools=[gauge],
        instructions="Be kind.",
        compaction=CompactionPolicy(max_bytes=BUDGET, keep_turns=2, episode_turns=2),
    )


def manager(root: Path) -> SessionManager:
    return connect(root, shutdown=Shutdown(signals=False), autosave=None)


def asked(number: int) -> str:
    return f"Boat number {number}. My boat number {number} is in berth {number + 7}."


async def begin(root: Path) -> int:
    """Talk until the next turn is to compact; return its number."""
    async with manager(root) as sessions:
        made = await AgentFactory(sessions).create_agent(config(), agent_id="ada")
        async with made as agent:
            for number in range(100):
                await agent.ask(asked(number), turn_id=f"t{number}")
                if agent.memory.compaction_required:
                    return number + 1
    raise AssertionError("the turns are too short")


async def go_on(root: Path, number: int, started: Callable[[], None]) -> list[Any]:
    """Ask once more, which compacts first; return what is remembered then."""
    async with manager(root) as sessions:
        restored = await AgentFactory(sessions).restore_agent("ada", config())
        async with restored as agent:
            started()
            await agent.ask(asked(number), turn_id=f"t{number}")
            context = agent.session.context()
            history = await agent.session.history(limit=1000)
            memory = agent.memory.retriever
            items = [*await memory.episodic(), *await memory.semantic()]
            refused = [one for format in FORMATS for one in wrongs(render(context, format))]
            assert not refused, refused
            turn = [one.text for one in context].index(asked(number))
            return [
                [msgspec.to_builtins(msgspec.structs.replace(one, ts=0.0)) for one in items],
                # Behind it stands also what was asked, and not answered, before a kill.
                [[one.role, one.text] for one in (*context[:turn], context[-1])],
                sorted(
                    [one.value.role, one.value.text] for one in history if one.value.role != "tool"
                ),
            ]


class Stepped:
    """An awaitable that counts how often it gives way, and dies at one of those."""

    def __init__(self, inner: Awaitable[Any], at: int, counted: list[int]) -> None:
        self._inner = inner
        self._at = at
        self._counted = counted

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._inner.__await__()
        sent: Any = None
        while True:
            try:
                wanted = steps.send(sent)
            except StopIteration as end:
                return end.value
            self._counted.append(1)
            if len(self._counted) == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            sent = yield wanted


class Wire(Tripwire):
    """Counts where a write could be cut between records, too, and dies there.

    Args:
        at: The call to die at; 0 only counts.
        where: How.
        line: How many lines of a write are written before.

    """

    def __init__(self, at: int, where: At, line: int) -> None:
        super().__init__(0 if where == "loop" else at, "kill" if where == "disk" else "kill torn")
        self.lines: list[int] = []
        self._line = line

    def __call__(self, name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        if changes(name, args):
            self.lines.append(bytes(args[1]).count(b"\n{") if name == "write" else 0)
        return super().__call__(name, real, *args, **kwargs)

    def _trip(self, name: str, real: Any, args: tuple[Any, ...]) -> None:
        if self._line and name == "write":
            real(args[0], b"".join(bytes(args[1]).splitlines(keepends=True)[: self._line]))
            os.kill(os.getpid(), signal.SIGKILL)
        super()._trip(name, real, args)


def stepping(at: int) -> list[int]:
    """Have compactions in this process die at a step of theirs; 0 only counts."""
    counted: list[int] = []
    compact = MemoryManager.compact

    async def stepped(self: MemoryManager, *args: Any, **options: Any) -> Any:
        return await Stepped(compact(self, *args, **options), at, counted)

    MemoryManager.compact = stepped  # type: ignore[method-assign]
    return counted


class Place(NamedTuple):
    where: At
    at: int
    line: int = 0


class Run(NamedTuple):
    killed: bool
    events: list[list[Any]]

    def said(self, name: str) -> Any:
        return next((event[1] for event in self.events if event[0] == name), None)


class Kills:
    """Runs of the turn that compacts, each on a copy of what there was before.

    Args:
        top: A folder for the copies.
        backend: Which loop.

    """

    def __init__(self, top: Path, backend: str) -> None:
        self._top = top
        self._backend = backend
        first = Child(lambda report: report("turn", anyio.run(begin, top / "began")))
        ((_, self._turn),) = first.wait()
        self.whole: Run = self._on_a_copy("whole", [Place("disk", 0)])[0]

    def steps(self, every: int) -> Iterator[tuple[str, Run, Run]]:
        """Kill at each step, or at every so manyth; then go on with what is left."""
        calls, lines = self.whole.said("calls"), self.whole.said("lines")
        places: list[Place] = [Place("disk", at) for at in range(1, len(calls) + 1)]
        places += [Place("torn", at) for at, name in enumerate(calls, 1) if name == "write"]
        places += [
            Place("line", at, line)
            for at, count in enumerate(lines, 1)
            for line in range(1, count + 1)
        ]
        places += [Place("loop", at) for at in range(1, self.whole.said("steps") + 1)]
        for place in places[::every]:
            died, after = self._on_a_copy("-".join(map(str, place)), [place, Place("disk", 0)])
            yield " ".join(map(str, place)), died, after

    def _on_a_copy(self, name: str, kills: list[Place]) -> list[Run]:
        root = self._top / name
        shutil.copytree(self._top / "began", root)
        runs = [self._run(root, place) for place in kills]
        shutil.rmtree(root)
        return runs

    def _run(self, root: Path, place: Place) -> Run:
        """Go on in a child that dies at a step; 0 is none."""

        def program(report: Report) -> None:
            wire = Wire(place.at, place.where, place.line)
            counted = stepping(place.at if place.where == "loop" else 0)
            found = anyio.run(go_on, root, self._turn, wire.install, backend=self._backend)
            report("remembered", found)
            report("calls", wire.calls)
            report("lines", wire.lines)
            report("steps", len(counted))

        child = Child(program)
        child.wait()
        return Run(child.was_killed, child.events)


def problem_of(what: str, died: Run, after: Run, whole: Run) -> list[str]:
    if not died.killed:
        return [f"{what}: it was not killed: {died.events}"]
    if after.said("remembered") is None:
        return [f"{what}: it did not go on: {after.events}"]
    names = ("items", "context", "history")
    pairs = zip(names, after.said("remembered"), whole.said("remembered"), strict=True)
    return [
        f"{what}: other {name}: {str(got)[:400]} for {str(wanted)[:400]}"
        for name, got, wanted in pairs
        if got != wanted
    ]


def compaction(backend: str = "asyncio", every: int = 1) -> dict[str, object]:
    """Kill a turn with a compaction in it at every step, or at every so manyth."""
    with scratch() as top:
        kills = Kills(top, backend)
        whole = kills.whole
        if whole.said("remembered") is None:
            return {"kills": 0, "problems": [f"it does not go on at all: {whole.events}"]}
        runs = list(kills.steps(every))
    return {
        "kills": sum(died.killed for _, died, _ in runs),
        "acknowledged": sum(after.said("remembered") is not None for _, _, after in runs),
        "calls": len(whole.said("calls")),
        "cuts": sum(whole.said("lines")),
        "steps": whole.said("steps"),
        "items": len(whole.said("remembered")[0]),
        "problems": [
            text for what, died, after in runs for text in problem_of(what, died, after, whole)
        ],
    }
