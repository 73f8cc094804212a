"""Whoever appends, and however a turn is cut: what a retry takes back is its own, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from hypothesis import example, given, settings, strategies as st

from perdure import Message, Session, Turn
from perdure.testing import Sandbox
from tests._virtual import BACKENDS, run
from tests.properties.turn_model import Turns, conversation

TURNS = ("a", "b")

says = st.tuples(
    st.just("say"),
    st.sampled_from(["session", "turn", "child", "outside", "result", "group"]),
)
returns = st.tuples(st.just("go back"), st.integers(0, 12), st.booleans())
cuts = st.tuples(st.just("cut"), st.sampled_from(["error", "cancel", "crash", "crash unsaved"]))
steps = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(TURNS), st.booleans()),
    says,
    returns,
    cuts,
    st.tuples(st.just("end")),
    st.tuples(st.just("reopen")),
)
acts = st.lists(st.one_of(says, returns), max_size=5)
attempts = st.lists(st.tuples(acts, cuts, acts, st.booleans()), min_size=1, max_size=4)


def told(attempts: list[Any]) -> list[Any]:
    """Return a story of one turn that is cut again and again."""
    story: list[Any] = [("say", "session")]
    for inside, cut, behind, resume in attempts:
        story += [("begin", "a", resume), *inside, cut, *behind]
    return [*story, ("begin", "a", False)]


def texts(messages: list[Any]) -> list[str]:
    return [
        one.text if one.tool_result is None else one.tool_result.result
        for one in messages
        if isinstance(one, Message)
    ]


@dataclass
class Story:
    """Sessions of one process after another, and what the model says of them."""

    sandbox: Sandbox
    session: Session
    elsewhere: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]
    """Does something in a task from before all turns."""
    model: Turns = field(default_factory=Turns)
    versions: list[int] = field(default_factory=list)
    """By line of the model: the session's version with it."""
    turn: Turn | None = None
    said: int = 0

    async def step(self, what: str, *how: Any) -> None:
        await getattr(self, what.replace(" ", "_"))(*how)
        assert texts(self.session.context()) == self.expected
        history = [item.value for item in await self.session.history(limit=1000)]
        assert texts(history) == self.expected

    @property
    def expected(self) -> list[str]:
        return conversation(self.model.lines)

    async def begin(self, id: str, resume: bool) -> None:
        if self.turn is None and id not in self.model.ended:
            self.turn = self.session.turn(id, resume=resume)
            await self.turn.__aenter__()
            before = len(self.model.lines)
            self.model.begin(id, resume=resume)
            self.versions += [self.session.version] * (len(self.model.lines) - before)

    async def say(self, how: str) -> None:
        self.said += 1
        text = f"{self.said} {how}"
        message = Message.user(text)
        if how == "child":
            async with anyio.create_task_group() as group:
                group.start_soon(self._say, message)
        elif how == "turn" and self.turn is not None:
            self.turn.append(message)
        elif how == "outside":
            await self.elsewhere(lambda: self._say(message))
        elif how == "result":
            await self.elsewhere(lambda: self._say(Message.tool("call", text)))
        elif how == "group":
            self.session.append(message, Message.assistant(text + "!"))
        else:
            self.session.append(message)
        for one in [text, text + "!"] if how == "group" else [text]:
            self.model.say(one, outside=how in {"outside", "result"})
            self.versions.append(self.session.version)
        if how == "group":  # a record amid a group can be gone back to, too
            self.versions[-2] -= 1

    async def _say(self, message: Message) -> None:
        self.session.append(message)

    async def go_back(self, lines: int, outside: bool) -> None:
        to = len(self.versions) - 1 - lines
        if outside or self.turn is None:  # else what it shows of the attempt may stay
            to = min(to, self.model.begun - 1)
        if to >= 0:
            session, after = self.session, self.versions[to]
            if outside:
                await self.elsewhere(lambda: session.retract(after=after))
            else:
                await session.retract(after=after)
            self.model.go_back(to, outside=outside)
            self.versions.append(self.session.version)

    async def cut(self, how: str) -> None:
        if self.turn is None:
            return
        if how.startswith("crash"):
            if how == "crash":
                await self.session.save()
            else:
                await self.session.wait_durable()
            await self._again(crash=True)
        else:
            kind = ConnectionError if how == "error" else anyio.get_cancelled_exc_class()
            await self.turn.__aexit__(kind, None, None)
        self.turn = None
        self.model.cut()

    async def end(self) -> None:
        if self.turn is not None:
            await self.turn.__aexit__(None, None, None)
            self.turn = None
            self.model.end()

    async def reopen(self) -> None:
        if self.turn is None:
            await self._again(crash=False)

    async def _again(self, *, crash: bool) -> None:
        await self.sandbox.reopen(crash=crash)
        self.session = await self.sandbox.sessions.open("ada", wait=60)


@settings(deadline=None)
@given(st.one_of(st.lists(steps, max_size=30), attempts.map(told)), st.sampled_from(BACKENDS))
@example(
    [("begin", "a", False), ("say", "outside"), ("cut", "crash"), ("begin", "a", False)], "trio"
)
@example(
    [
        ("say", "session"),
        ("say", "session"),
        ("begin", "a", False),
        ("go back", 1, False),
        ("say", "outside"),
        ("cut", "error"),
        ("begin", "a", False),
    ],
    "asyncio",
)
@example(
    [
        ("begin", "a", False),
        ("say", "session"),
        ("say", "result"),
        ("say", "outside"),
        ("cut", "error"),
        ("begin", "a", False),
        ("cut", "error"),
        ("reopen",),
    ],
    "asyncio",
)
def test_a_retry_takes_back_what_the_attempt_owns(story: list[Any], backend: str) -> None:
    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[Callable[[], Awaitable[object]]]()
        done, did = anyio.create_memory_object_stream[None]()

        async def other() -> None:
            async for act in receive:
                await act()
                await done.send(None)

        async def elsewhere(act: Callable[[], Awaitable[object]]) -> None:
            await send.send(act)
            await did.receive()

        with send, receive, done, did:
            async with Sandbox() as sandbox, anyio.create_task_group() as group:
                group.start_soon(other)
                tale = Story(sandbox, await sandbox.sessions.open("ada"), elsewhere)
                for step in story:
                    await tale.step(*step)
                await tale.end()
                await tale.session.aclose()
                if tale.model.lines:
                    for _ in ("folded", "rebuilt"):
                        view = await sandbox.sessions.load("ada")
                        assert view is not None
                        assert texts(view.context()) == tale.expected
                        await sandbox.sessions.rebuild_working_context("ada")
                group.cancel_scope.cancel()

    run(backend, main)
