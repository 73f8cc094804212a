"""A run of the demo: serve, kill, restore, continue, stop; and the comparison with the logs.

The run waits for counts, never for times, so a slow machine only takes longer; one generous
deadline turns a hang into an error that quotes the server. Clients and server exchange one JSON
value a line over loopback TCP; the server acknowledges a turn only after it is durable, and reports
on stdout when it is ready and how it stopped.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.abc
import msgspec
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

import perdure
from perdure.autosave.options import Shutdown
from perdure.errors import StoreError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.messages import Message, encode_message
from perdure.records.records import MESSAGE_KINDS
from perdure.store import Batch, Outcome, Store
from perdure.stores.delegate import DelegatingStore


class BytesWritten(msgspec.Struct, frozen=True):
    """Bytes that a server has handed to its store."""

    log: int = 0
    documents: int = 0

    def __add__(self, other: BytesWritten) -> BytesWritten:
        return BytesWritten(self.log + other.log, self.documents + other.documents)


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A client's turn."""

    agent: str
    turn: int
    text: str
    """Different for every turn, so that the log can be searched for it."""


class StreamedText(msgspec.Struct, frozen=True, tag="piece"):
    """A piece of the answer, as it is streamed."""

    text: str


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The turn is durable: sent after the save, never before."""

    agent: str
    turn: int
    text: str
    """The question."""
    sha256: str
    """Of the turn's messages: question, tool calls, results, answer."""
    answer: str
    written: BytesWritten = BytesWritten()
    """By the server so far."""


class ServerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The server takes connections."""

    port: int
    restore_ms: list[float] = []
    """The time that each session took to come back."""


class ServerStopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The server's report after SIGTERM."""

    report: dict[str, Any]
    """The ShutdownReport."""
    written: BytesWritten = BytesWritten()


def encode_line(value: msgspec.Struct) -> bytes:
    """Return a value's line."""
    return msgspec.json.encode(value) + b"\n"


def digest(messages: Iterable[Message]) -> str:
    """Return the SHA-256 of a turn's messages, as they are stored."""
    total = hashlib.sha256()
    for message in messages:
        total.update(encode_message(message).payload + b"\n")
    return total.hexdigest()


GONE = (
    OSError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
)
LINE = 4 * 1024 * 1024
WORDS = ("the harbor", "the old mill", "the night train", "the lighthouse", "the market hall")


class Clients:
    """All clients, and what they were promised."""

    def __init__(self, agents: list[str]) -> None:
        self.agents = agents
        self.acks: list[Ack] = []
        """In the order in which they came."""
        self.asked: int = 0
        self.talking: set[tuple[str, int]] = set()
        """Turns that were asked and are not acknowledged."""
        self.pieces: int = 0
        """Pieces of answers that have come."""
        self.refused: list[tuple[str, int]] = []
        """Answers that differ from what was acknowledged: a fault of the demo's server."""
        self._port: int | None = None
        self._connected: set[str] = set()
        self._changed = anyio.Event()
        self._closing = False

    # for the stage

    def connect_to(self, port: int | None) -> None:
        """Say where the server is; None: nowhere."""
        self._port = port
        self._tell()

    def finish(self) -> None:
        """Ask no more."""
        self._closing = True
        self._port = None
        self._tell()

    async def acknowledged(self, count: int) -> None:
        """Wait until this many turns are acknowledged in all."""
        while len(self.acks) < count:
            await self._changed.wait()

    async def parted(self) -> None:
        """Wait until every client has read what was under way to it, and knows of the end."""
        while self._connected:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # one client

    async def converse(self, agent: str) -> None:
        """Talk to an agent until the end, through every restart of the server."""
        turn, again = 0, False
        while (port := await self._server()) is not None:
            self._connected.add(agent)
            try:
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    lines = BufferedByteReceiveStream(stream)
                    while not self._closing:
                        await self._turn(stream, lines, agent, turn + 1, again=again)
                        turn, again = turn + 1, False
            except GONE:
                again = (agent, turn + 1) in self.talking
            self._connected.discard(agent)
            self._tell()
            await self._gone(port)

    async def _server(self) -> int | None:
        while self._port is None and not self._closing:
            await self._changed.wait()
        return None if self._closing else self._port

    async def _gone(self, port: int) -> None:
        """Wait until the stage, too, knows that this server is gone."""
        while self._port == port and not self._closing:
            await self._changed.wait()

    async def _turn(
        self,
        stream: SocketStream,
        lines: BufferedByteReceiveStream,
        agent: str,
        turn: int,
        *,
        again: bool,
    ) -> None:
        about = WORDS[turn % len(WORDS)]
        question = "asked again" if again else "asked"
        text = f"Question {turn}, {question} of {agent}: what do you know about {about}?"
        self.asked += 1
        self.talking.add((agent, turn))
        await stream.send(encode_line(Ask(agent, turn, text)))
        reply_text = ""
        while isinstance(answer := await _answer(lines), StreamedText):
            self.pieces += 1
            reply_text += answer.text
        if answer.answer != reply_text or answer.text != text:
            self.refused.append((agent, turn))
        self.talking.discard((agent, turn))
        self.acks.append(answer)
        self._tell()


async def _answer(lines: BufferedByteReceiveStream) -> StreamedText | Ack:
    return msgspec.json.decode(await lines.receive_until(b"\n", LINE), type=StreamedText | Ack)


# The proof: is every acknowledged turn in the log, once, with the very messages acknowledged?


ALL = 1_000_000


class LoggedAgent(msgspec.Struct, frozen=True):
    """The content of one agent's log."""

    turns: dict[str, list[str]]
    """The digests of the turns that asked a text."""
    count: int = 0
    payload: int = 0
    """Bytes of all its messages."""


class LostTurn(msgspec.Struct, frozen=True):
    """An acknowledged turn that is not in the log as it was acknowledged."""

    agent: str
    turn: int
    why: str


def turns_in(messages: Iterable[Message]) -> dict[str, list[str]]:
    """Return the digests of a log's turns by what the user asked, in order."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "user":
            turns.append([])
        if turns:
            turns[-1].append(message)
    result: dict[str, list[str]] = {}
    for turn in turns:
        result.setdefault(turn[0].text, []).append(digest(turn))
    return result


def lost(acks: Sequence[Ack], logs: dict[str, LoggedAgent]) -> list[LostTurn]:
    """Return the acknowledged turns that are not there exactly once, as acknowledged."""
    missing: list[LostTurn] = []
    for ack in acks:
        log = logs.get(ack.agent)
        lost_turns = [] if log is None else log.turns.get(ack.text, [])
        if not lost_turns:
            missing.append(LostTurn(ack.agent, ack.turn, "it is not in the log"))
        elif lost_turns.count(ack.sha256) != 1:
            missing.append(LostTurn(ack.agent, ack.turn, "the log holds other messages for it"))
    return missing


async def read_logs(store: str, agents: Iterable[str], tenant: str = "") -> dict[str, LoggedAgent]:
    """Read the agents' logs from the store, a path or a URL, without a lease."""
    logs: dict[str, LoggedAgent] = {}
    silent = Shutdown(signals=False)
    async with perdure.connect(store, autosave=None, shutdown=silent) as sessions:
        for agent in agents:
            view = await sessions.load(agent, tenant=tenant)
            if view is None:
                continue
            items = await view.history(limit=ALL)
            messages = [item.value for item in items if item.kind in MESSAGE_KINDS]
            turns = turns_in(messages)
            logs[agent] = LoggedAgent(
                turns,
                count=sum(map(len, turns.values())),
                payload=sum(len(encode_message(message).payload) for message in messages),
            )
            await anyio.lowlevel.checkpoint()
    return logs


# A store around a store that counts the bytes handed to it


class CountingStore(DelegatingStore):
    """A store wrapper that counts the bytes written to logs and documents."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.log: int = 0
        """Bytes of log lines so far, as framed."""
        self.documents: int = 0
        """Bytes of documents so far, with each manifest twice."""

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Pass it on, and count what was written."""
        outcomes = await self.inner.append_many(batches)
        self.log += sum(outcome.written for outcome in outcomes)
        return outcomes

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Pass it on, and count it. A manifest is written as coming, then as done."""
        await self.inner.write_documents(key, documents, manifest)
        manifests = 2 * len(msgspec.json.encode(manifest))
        self.documents += manifests + sum(map(len, documents.values()))

    @property
    def written(self) -> BytesWritten:
        """Both counts, as they are reported to the parent."""
        return BytesWritten(self.log, self.documents)


T = TypeVar("T")

STORE = "store"


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the demo."""

    folder: Path
    store: str
    """A path or a URL; it may hold a password."""
    tenant: str = ""
    """Under which the sessions are, so that they meet no others."""
    agents: int
    before: int
    """Acknowledged turns an agent, on average, before the kill."""
    after: int
    """And from there to SIGTERM."""
    deadline: float = 300.0
    """Seconds until a demo that hangs is given up."""


class Report(msgspec.Struct, kw_only=True):
    """The demo's result: ``perdure demo --json`` prints it."""

    agents: int
    turns: int = 0
    """Turns that the logs hold at the end, also those that were never acknowledged."""
    asked: int = 0
    acknowledged: int = 0
    lost: int = 0
    """Acknowledged, and not in the log as acknowledged."""
    lost_turns: list[LostTurn] = []
    acknowledged_before_kill: int = 0
    cut_off_by_kill: int = 0
    """Turns that were under way, and not acknowledged, when the server was killed."""
    kill_status: int = 0
    restored: int = 0
    restore_ms_p50: float = 0.0
    restore_ms_max: float = 0.0
    write_amplification: float = 0.0
    """Bytes handed to the store for each byte of the turns' messages."""
    written_log_bytes: int = 0
    written_document_bytes: int = 0
    """By folds: a conversation as short as the demo's is folded once, when it is closed."""
    turn_bytes: int = 0
    term_status: int = 0
    """-15: it ended by the signal, as the default action does."""
    shutdown: dict[str, object] = {}
    """The ShutdownReport after SIGTERM."""
    seconds: float = 0.0
    folder: str = ""
    store: str = ""
    """The place of the sessions, without a password."""
    tenant: str = ""
    ok: bool = False


class ServerProcess:
    """One server process, started for the demo."""

    def __init__(self, process: anyio.abc.Process, log: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self._log = log
        self._lines = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls, plan: DemoPlan, number: int) -> ServerProcess:
        """Start a server on the store; its stderr goes to a file in the folder."""
        log = plan.folder / f"server-{number}.log"
        command = [sys.executable, "-P", "-m", "perdure.cli.demo.server", plan.tenant]
        # Not among the arguments, which everybody on the machine can read.
        environment = {**os.environ, "PERDURE_URL": plan.store}
        with log.open("wb") as errors:
            process = await anyio.open_process(command, stderr=errors, env=environment)
        return cls(process, log)

    async def says(self, type: type[T]) -> T:
        """Return the next line of its stdout.

        Raises:
            StoreError: It said nothing, and has ended.

        """
        try:
            line = await self._lines.receive_until(b"\n", LINE)
        except (anyio.IncompleteRead, anyio.EndOfStream) as error:
            status = await self.process.wait()
            words = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise StoreError(
                f"the demo's server ended with status {status} and said {words[-1]!r}: "
                f"all of it is in {self._log}",
                status=status,
            ) from error
        return msgspec.json.decode(line, type=type)

    async def aclose(self) -> None:
        """End it, if it has not ended."""
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.wait()
            await self.process.aclose()


class DemoRun:
    """One run of the demo."""

    def __init__(self, plan: DemoPlan, tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.crowd: Clients = Clients(
            [f"agent-{number:02d}" for number in range(1, plan.agents + 1)]
        )
        self.report: Report = Report(
            agents=plan.agents, folder=str(plan.folder), tenant=plan.tenant
        )
        self._tell = tell
        self._written = BytesWritten()

    @property
    def target(self) -> int:
        """The number of acknowledged turns that it takes in all."""
        return self.plan.agents * (self.plan.before + self.plan.after)

    async def run(self) -> Report:
        """Run it, and return what it has shown.

        Raises:
            StoreError: It could not be brought to its end.

        """
        start = time.monotonic()
        with anyio.move_on_after(self.plan.deadline) as scope:
            async with anyio.create_task_group() as clients:
                for agent in self.crowd.agents:
                    clients.start_soon(self.crowd.converse, agent, name="perdure:client")
                try:
                    await self._killed()
                    await self._restored_and_stopped()
                finally:
                    self.crowd.finish()
        if scope.cancelled_caught:
            message = f"the demo did not end within {self.plan.deadline:.0f} s: look into "
            raise StoreError(f"{message}{self.plan.folder}")
        self.report.seconds = round(time.monotonic() - start, 2)
        is_clean = self.report.shutdown.get("clean") is True
        is_restored = self.report.restored == self.report.agents
        self.report.ok = is_clean and is_restored and not self.report.lost
        return self.report

    @asynccontextmanager
    async def _server(self, number: int) -> AsyncGenerator[tuple[ServerProcess, ServerReady], None]:
        """Start a server, and see to its end and to its clients'."""
        server = await ServerProcess.start(self.plan, number)
        try:
            yield server, await server.says(ServerReady)
        finally:
            await server.aclose()
        self.crowd.connect_to(None)
        await self.crowd.parted()

    async def _killed(self) -> None:
        self._tell("a server starts, the agents talk")
        async with self._server(1) as (server, ready):
            self.crowd.connect_to(ready.port)
            await self.crowd.acknowledged(self.plan.agents * self.plan.before)
            server.process.kill()
            self.report.kill_status = await server.process.wait()
        self._tell("killed with SIGKILL; every acknowledged turn is looked up in the logs")
        self.report.cut_off_by_kill = len(self.crowd.talking)
        self.report.acknowledged_before_kill = len(self.crowd.acks)
        self._written = max((ack.written for ack in self.crowd.acks), key=lambda agent: agent.log)
        await self._prove()

    async def _restored_and_stopped(self) -> None:
        self._tell("a second server restores every session")
        async with self._server(2) as (server, ready):
            times = sorted(ready.restore_ms)
            self.report.restored = len(times)
            if times:
                self.report.restore_ms_p50 = round(times[len(times) // 2], 2)
                self.report.restore_ms_max = round(times[-1], 2)
            self._tell("the agents continue to talk")
            self.crowd.connect_to(ready.port)
            await self.crowd.acknowledged(self.target)
            self._tell("SIGTERM while they talk")
            server.process.send_signal(signal.SIGTERM)
            stopped = await server.says(ServerStopped)
            self.report.term_status = await server.process.wait()
        self.report.shutdown = stopped.report
        self._written = self._written + stopped.written
        self._tell("stopped; every acknowledged turn is looked up again")
        await self._prove()

    async def _prove(self) -> None:
        """Compare everything that was acknowledged so far with the logs as they lie there."""
        logs = await read_logs(self.plan.store, self.crowd.agents, self.plan.tenant)
        missing = lost(self.crowd.acks, logs)
        missing += [
            LostTurn(agent, turn, "the answer that was streamed is not the one acknowledged")
            for agent, turn in self.crowd.refused
        ]
        report = self.report
        known = {(lost_turn.agent, lost_turn.turn) for lost_turn in report.lost_turns}
        report.lost_turns += [
            lost_turn for lost_turn in missing if (lost_turn.agent, lost_turn.turn) not in known
        ]
        report.lost = len(report.lost_turns)
        report.asked = self.crowd.asked
        report.acknowledged = len(self.crowd.acks)
        report.turns = sum(log.count for log in logs.values())
        report.turn_bytes = sum(log.payload for log in logs.values())
        report.written_log_bytes = self._written.log
        report.written_document_bytes = self._written.documents
        written = self._written.log + self._written.documents
        report.write_amplification = round(written / max(report.turn_bytes, 1), 3)
