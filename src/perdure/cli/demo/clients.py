"""The demo's clients: one conversation each, over loopback TCP, through a crash of the server.

A client asks, reads the streamed answer, and notes the acknowledgement. When the connection
breaks it waits for the next server and asks the same again, as any client would.
"""

from __future__ import annotations

import anyio
import msgspec
from anyio.abc import SocketStream

from perdure.cli.demo.wire import Ack, Ask, StreamedText, encode_line

GONE = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
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
        """Talk to an agent until the end, whatever becomes of the server."""
        turn, again = 0, False
        while (port := await self._server()) is not None:
            self._connected.add(agent)
            try:
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    lines = AnswerLines(stream)
                    while not self._closing:
                        await self._turn(lines, agent, turn + 1, again=again)
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

    async def _turn(self, lines: AnswerLines, agent: str, turn: int, *, again: bool) -> None:
        about = WORDS[turn % len(WORDS)]
        question = "asked again" if again else "asked"
        text = f"Question {turn}, {question} of {agent}: what do you know about {about}?"
        self.asked += 1
        self.talking.add((agent, turn))
        await lines.send(Ask(agent, turn, text))
        reply_text = ""
        while isinstance(answer := await lines.receive(), StreamedText):
            self.pieces += 1
            reply_text += answer.text
        if answer.answer != reply_text or answer.text != text:
            self.refused.append((agent, turn))
        self.talking.discard((agent, turn))
        self.acks.append(answer)
        self._tell()


class AnswerLines:
    """A connection, line by line."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def send(self, value: Ask) -> None:
        """Send one value."""
        await self._stream.send(encode_line(value))

    async def receive(self) -> StreamedText | Ack:
        """Return the next value."""
        while (end := self._buffer.find(b"\n")) < 0:
            self._buffer += await self._stream.receive()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return msgspec.json.decode(line, type=StreamedText | Ack)
