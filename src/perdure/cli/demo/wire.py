"""What the demo's processes say to each other: one JSON value a line.

Clients ask over loopback TCP; the server answers in pieces, and acknowledges a turn only
after it is durable. To the parent, the server's stdout says when it is ready and how it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from perdure.records.messages import Message, encode_message


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
    """What was asked."""
    sha256: str
    """Of the turn's messages: question, tool calls, results, answer."""
    answer: str
    written: BytesWritten = BytesWritten()
    """By the server so far."""


class ServerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The server takes connections."""

    port: int
    restore_ms: list[float] = []
    """How long each session took to come back."""


class ServerStopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The server's last words after SIGTERM."""

    report: dict[str, Any]
    """The ShutdownReport."""
    written: BytesWritten = BytesWritten()


def encode_line(value: msgspec.Struct) -> bytes:
    """Return a value's line."""
    return msgspec.json.encode(value) + b"\n"


def digest(messages: Iterable[Message]) -> str:
    """Return what stands for a turn's messages, as they are stored."""
    total = hashlib.sha256()
    for message in messages:
        total.update(encode_message(message).payload + b"\n")
    return total.hexdigest()
