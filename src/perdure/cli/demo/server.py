"""The demo's server: ``PERDURE_URL=STORE python -m perdure.cli.demo.server TENANT``.

An ordinary server: a manager, an agent for each id, connections that ask. It acknowledges a turn
when the agent reports its end, which is after the save. SIGTERM has its default action, so the
manager drains and ends the process by the signal. The scripted answers follow from the conversation
alone, so that an agent that has lost its memory is noticed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

import perdure
from perdure import Autosave, LeaseOptions
from perdure.agent import Agent, AgentConfig, AgentFactory
from perdure.agent.events import Segment, TurnEnded
from perdure.agent.llm import ScriptedModel, call
from perdure.agent.llm.scripted import ScriptedReply
from perdure.cli.demo import run
from perdure.records.messages import Message

DELAY = 0.004
"""Seconds before each piece of an answer: enough that answers of all agents interleave."""
PIECE = 160
PAGES = 12
NOTE = (
    "In the year that the archive speaks of, the town rebuilt what the flood had taken, and the "
    "record names the masons, the price of the stone, and the day on which the work was done. "
)
CLOSING = (
    "The older entries agree with the newer ones where they speak of the same thing, and where "
    "they do not, the newer ones say why. If you ask me about it again I will look it up again, "
    "and tell you whether anything has changed since. "
)


async def look_up(subject: str) -> dict[str, Any]:
    """Look a subject up in the archive."""
    pages = [
        {"page": page, "text": f"Page {page}, on {subject}. {NOTE}"} for page in range(1, PAGES + 1)
    ]
    return {"subject": subject, "pages": pages}


async def distance(place: str) -> dict[str, Any]:
    """Measure how far away a place is."""
    return {"place": place, "kilometers": sum(place.encode()) % 97 / 10}


def answer(messages: Sequence[Message]) -> ScriptedReply:
    """Return what the model says next."""
    questions = [message.text for message in messages if message.role == "user"]
    subject = questions[-1].rpartition(" about ")[2].rstrip("?")
    if messages[-1].role == "user" and len(questions) % 2:
        return [call("look_up", subject=subject), call("distance", place=subject)]
    results = sum(message.role == "tool" for message in messages)
    return (
        f"This is your question {len(questions)}. I have looked {results} things up so far. "
        f"About {subject}: it stands where it stood, and the archive has {PAGES} pages on it. "
        f"{NOTE}{CLOSING}What I told you before still holds."
    )


def config(tenant: str = "") -> AgentConfig:
    """Return how an agent of the demo is made; each gets a model of its own."""
    return AgentConfig(
        name="demo",
        model=ScriptedModel(answer, chunk_chars=PIECE, delay=DELAY),
        tools=[look_up, distance],
        instructions="You know the archive of a small town by the sea.",
        tenant=tenant,
    )


LINE = 64 * 1024
LEASE = LeaseOptions(heartbeat=0.5, ttl=3.0)
PATIENCE = 60.0
"""Seconds to wait for the leases of a server that was killed."""


class DemoServer:
    """The agents, until the stack is left, and the connections to them."""

    def __init__(
        self,
        sessions: perdure.SessionManager,
        store: run.CountingStore,
        tenant: str,
        stack: AsyncExitStack,
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._tenant = tenant
        self._factory = AgentFactory(sessions)
        self._agents: dict[str, Agent] = {}
        self._stack = stack

    async def restore(self) -> list[float]:
        """Bring every session of the demo back; return how long each took, in ms.

        Where only heartbeats tell that the killed server is dead, its leases are waited for
        first, all at once.
        """
        times: list[float] = []
        known_sessions = await self._sessions.list(tenant=self._tenant, limit=10_000)
        holder = await self._store.holder(known_sessions[0].key) if known_sessions else None
        if holder is not None and not holder.released and holder.alive is not False:
            async with anyio.create_task_group() as group:
                for info in known_sessions:
                    group.start_soon(self._take, info.key.agent, name="perdure:take over")
        for info in known_sessions:
            start = time.perf_counter()
            agent = await self._factory.restore_agent(info.key.agent, config(self._tenant))
            self._agents[info.key.agent] = await self._stack.enter_async_context(agent)
            times.append((time.perf_counter() - start) * 1000)
        return times

    async def _take(self, id: str) -> None:
        async with self._sessions.open(id, tenant=self._tenant, wait=PATIENCE):
            pass

    async def _agent(self, id: str) -> Agent:
        """Return the agent of an id; one client asks for each, so none is made twice."""
        if id not in self._agents:
            made = await self._factory.create_agent(config(self._tenant), agent_id=id)
            self._agents[id] = await self._stack.enter_async_context(made)
        return self._agents[id]

    async def serve(self, stream: SocketStream) -> None:
        """Answer one connection until it ends."""
        lines = BufferedByteReceiveStream(stream)
        try:
            async with stream:
                while True:
                    line = await lines.receive_until(b"\n", LINE)
                    await self._answer(stream, msgspec.json.decode(line, type=run.Ask))
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            return

    async def _answer(self, stream: SocketStream, ask: run.Ask) -> None:
        agent = await self._agent(ask.agent)
        text = ""
        async for event in agent.stream(ask.text):
            if isinstance(event, Segment) and event.text:
                text += event.text
                await stream.send(run.encode_line(run.StreamedText(event.text)))
            elif isinstance(event, TurnEnded):
                messages = agent.session.context()
                begin = max(at for at, each in enumerate(messages) if each.role == "user")
                turn = messages[begin:]
                ack = run.Ack(
                    ask.agent, ask.turn, ask.text, run.digest(turn), text, self._store.written
                )
                await stream.send(run.encode_line(ack))


def report_to_parent(value: msgspec.Struct) -> None:
    """Write a value to stdout, for the parent."""
    sys.stdout.buffer.write(run.encode_line(value))
    sys.stdout.buffer.flush()


async def main(tenant: str) -> None:
    """Serve until SIGTERM."""
    logging.basicConfig()
    store = run.CountingStore(perdure.store_for())
    async with (
        perdure.connect(store, autosave=Autosave.server(), lease=LEASE) as sessions,
        AsyncExitStack() as stack,
    ):
        server = DemoServer(sessions, store, tenant, stack)
        try:
            times = await server.restore()
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
            async with listener:
                report_to_parent(run.ServerReady(listener.extra(SocketAttribute.local_port), times))  # noqa: S610  # no SQL
                await listener.serve(server.serve)
        finally:
            # Leaving the manager's block would do the same; this way the report can be
            # shown. It lets the turns under way come to their end, and saves.
            report = await sessions.aclose()
            report_to_parent(run.ServerStopped(msgspec.to_builtins(report), store.written))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
