"""The proof: is every acknowledged turn in the log, once, with the very messages acknowledged?

`turns_in` cuts a log's messages into turns; `lost` compares. Neither asks the server anything:
the log is read from the store by the parent, which was promised the turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import anyio
import msgspec

import perdure
from perdure.autosave.options import Shutdown
from perdure.cli.demo.wire import Ack, BytesWritten, digest
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.messages import Message
from perdure.records.records import MESSAGE_KINDS
from perdure.store import Batch, Outcome, Store

ALL = 1_000_000


class LoggedAgent(msgspec.Struct, frozen=True):
    """What one agent's log holds."""

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
            payload = sum(map(size_of, messages))
            turns = turns_in(messages)
            count = sum(map(len, turns.values()))
            logs[agent] = LoggedAgent(turns, count, payload)
            await anyio.lowlevel.checkpoint()
    return logs


def size_of(message: Message) -> int:
    """Return a message's bytes as they are stored."""
    from perdure.records.messages import encode_message

    return len(encode_message(message).payload)


# A store around a store that counts the bytes handed to it


class CountingStore:
    """Count what the log and the documents of a store are given; everything else passes by."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.log: int = 0
        """Bytes of log lines so far, as framed."""
        self.documents: int = 0
        """Bytes of documents so far, with each manifest twice."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Pass it on, and count what was written."""
        outcomes = await self._store.append_many(batches)
        self.log += sum(outcome.written for outcome in outcomes)
        return outcomes

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Pass it on, and count it. A manifest is written as coming, then as done."""
        await self._store.write_documents(key, documents, manifest)
        manifests = 2 * len(msgspec.json.encode(manifest))
        self.documents += manifests + sum(map(len, documents.values()))

    @property
    def written(self) -> BytesWritten:
        """Both, as they are told to the parent."""
        return BytesWritten(self.log, self.documents)

    def store(self) -> Store:
        """Return itself as the port."""
        return cast("Store", self)
