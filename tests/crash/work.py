"""What the children do with a store, and report while they do it.

Each writer tells its parent what it is about to send, and then what was acknowledged, so
that the parent knows at any moment what must be in the log and what may be.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiofiles  # noqa: F401  # imported here once, not in each child that is forked
import anyio
import anyio._backends._asyncio  # noqa: F401

from perdure.errors import LeaseLostError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest
from perdure.records.records import EPOCH, MESSAGE, Entry, Record
from perdure.store import Batch, Draft, Status, Store, Taken, take_after
from perdure.stores.file import log
from tests import runners
from tests.crash import places
from tests.crash.forks import Report

RUNNER = ["asyncio"]
"""How the children start their event loops."""
_TRIES = 500
"""Sending again while a batch is in doubt: until whoever takes over has sealed the log."""


class Lost(Exception):
    """Another epoch has the session: this writer's work is over."""


async def read(store: Store, key: SessionKey) -> list[Record]:
    """Read a session's whole log, settled."""
    while True:
        chunks = [chunk async for chunk in store.read_log(key)]
        if all(chunk.settled for chunk in chunks):
            return [record for chunk in chunks for record in chunk.records]


def texts_of(records: list[Record]) -> list[str]:
    """Return what writers sent, without epoch records."""
    return [json.loads(record.payload) for record in records if record.kind != EPOCH]


class Writer:
    """A holder of one session that says what it does."""

    def __init__(self, store: Store, grant: Taken, texts: list[str], report: Report) -> None:
        self.key = grant.key
        self.epoch = grant.epoch
        self._store = store
        self._head = grant.head
        self._texts = texts
        self._report = report
        self._sent = 0

    @classmethod
    async def take(cls, store: Store, key: SessionKey, report: Report) -> Writer:
        """Acquire a session, whoever has it, and read what it holds."""
        holder = await store.holder(key)
        after = holder.epoch if holder else 0
        report("taking", key.agent, after + 1)
        grant = await take_after(store, key, after=after)
        # A holder that was stopped just now may find records of others behind its grant.
        records = (await read(store, key))[: grant.head]
        texts = texts_of(records)
        report("granted", key.agent, grant.epoch, grant.head, texts)
        last = records[-1]
        if (last.seq, last.kind, last.epoch) != (grant.head, EPOCH, grant.epoch):
            report("problem", f"{key}: at the grant's head is {last}, the grant is {grant}")
        return cls(store, grant, texts, report)

    async def append(self, size: int, *, padding: int = 0, is_acknowledged: bool = True) -> None:
        """Append one group of some records; nobody hears of it unless it is acknowledged."""
        self._sent += 1
        texts = [f"{self.epoch}.{self._sent}.{n}{'x' * padding}" for n in range(size)]
        records = tuple(
            Entry(MESSAGE, json.dumps(text).encode(), end=n == size - 1)
            for n, text in enumerate(texts)
        )
        self._report("sent", self.key.agent, self.epoch, texts)
        batch = Batch(self.key, self.epoch, self._head + 1, records)
        (outcome,) = await self._store.append_many([batch])
        for _ in range(_TRIES):
            if outcome.status not in (Status.IN_DOUBT, Status.TRANSIENT):
                break
            await anyio.sleep(0.01)
            (outcome,) = await self._store.append_many([batch])
        if outcome.status is Status.CONFLICT:
            self._report("lost", self.key.agent, self.epoch)
            raise Lost
        if outcome.status is not Status.OK:
            self._report("problem", f"append {texts}: {outcome.status} {outcome.error!r}")
            raise Lost
        self._head += size
        self._texts += texts
        if is_acknowledged:
            self._report("ok", self.key.agent, self.epoch, self._sent)

    async def fold(self) -> None:
        """Write documents that hold what was acknowledged."""
        documents = {
            "session.json": json.dumps(self._texts).encode(),
            "plugins/count.json": str(len(self._texts)).encode(),
        }
        folded = {
            name: FoldedDocument(self._head, hashlib.sha256(data).hexdigest(), len(data))
            for name, data in documents.items()
        }
        manifest = Manifest(key=self.key, epoch=self.epoch, as_of_seq=self._head, documents=folded)
        try:
            await self._store.write_documents(self.key, documents, manifest)
        except LeaseLostError:
            self._report("lost", self.key.agent, self.epoch)
            raise Lost from None
        except StoreUnavailableError:
            return  # somebody was stopped with the store's lock; a fold may be left out
        self._report("folded", self.key.agent, self._head)

    async def release(self) -> None:
        """Let the session go."""
        await self._store.release(self.key, self.epoch)
        self._report("released", self.key.agent, self.epoch)


AGENT = SessionKey("agent")

Scenario = Callable[[Store, Report], Awaitable[None]]


async def append(store: Store, report: Report) -> None:
    """Make a session, and append."""
    writer = await Writer.take(store, AGENT, report)
    for size in (1, 3, 1):
        await writer.append(size)


async def acquire(store: Store, report: Report) -> None:
    """Take a session over from a dead holder, twice."""
    first = await Writer.take(store, AGENT, report)
    await first.append(2)
    second = await Writer.take(store, AGENT, report)
    await second.append(1)


async def unsynced(store: Store, report: Report) -> None:
    """Take over from a holder that was killed between its write and its sync, at two places."""
    folder = Path(store.location, "agents", "other", "log")
    folder.mkdir(parents=True)
    other = await Writer.take(store, SessionKey("other"), report)
    await other.append(1)
    first = await Writer.take(store, AGENT, report)
    await first.append(1)
    sync, os.fdatasync = os.fdatasync, lambda _: None
    with contextlib.suppress(Lost):
        await first.append(2, is_acknowledged=False)
    os.fdatasync = sync
    second = await Writer.take(store, AGENT, report)
    await second.append(1)


async def fold(store: Store, report: Report) -> None:
    """Fold twice, with an append between and behind."""
    writer = await Writer.take(store, AGENT, report)
    await writer.append(2)
    await writer.fold()
    await writer.append(2)
    await writer.fold()
    await writer.append(1)


async def release(store: Store, report: Report) -> None:
    """Work, release, and take the session anew."""
    writer = await Writer.take(store, AGENT, report)
    await writer.append(1)
    await writer.fold()
    await writer.release()
    again = await Writer.take(store, AGENT, report)
    await again.append(1)
    await again.release()


async def everything(store: Store, report: Report) -> None:
    """Use a session from one release to the next, two sessions in turns."""
    for agent in (AGENT, SessionKey("other")):
        writer = await Writer.take(store, agent, report)
        await writer.append(2)
        await writer.fold()
        await writer.append(1)
        await writer.release()


async def roll(store: Store, report: Report) -> None:
    """Fill one segment after the other, with folds, and take the session over from oneself."""
    log.SEGMENT_BYTES = 400  # In this process, which ends with this work.
    writer = await Writer.take(store, AGENT, report)
    for size in (1, 3, 2):
        await writer.append(size, padding=90)
    await writer.fold()
    await writer.append(2, padding=90)
    again = await Writer.take(store, AGENT, report)
    for size in (2, 2):
        await again.append(size, padding=90)


async def delete(store: Store, report: Report) -> None:
    """Delete a session, and begin its next life."""
    writer = await Writer.take(store, AGENT, report)
    await writer.append(2)
    await writer.fold()
    await writer.append(1)
    report("deleting", AGENT.agent, writer.epoch)
    await store.delete(AGENT, writer.epoch)
    report("deleted", AGENT.agent, writer.epoch)
    again = await Writer.take(store, AGENT, report)
    await again.append(1)
    await again.fold()


async def draft(store: Store, report: Report) -> None:
    """Write a copy and leave it, write it again, publish it, and take it over."""
    whole = [f"copied {n}" for n in range(5)]
    report("copying", AGENT.agent, whole)
    source = Draft(source=SessionKey("source"), generation=1, up_to=506, purpose="fork")
    records = [
        Entry(MESSAGE, json.dumps(text).encode(), end=n != 2) for n, text in enumerate(whole)
    ]
    data = json.dumps(whole).encode()
    epoch = 0
    for _ in range(2):
        grant = await take_after(store, AGENT, after=epoch, first=501, draft=source)
        epoch = grant.epoch
        batches = [Batch(AGENT, epoch, 502, tuple(records[:2]))]
        batches.append(Batch(AGENT, epoch, 504, tuple(records[2:])))
        for batch in batches:
            (outcome,) = await store.append_many([batch])
            if outcome.status is not Status.OK:
                raise outcome.error or Lost
        folded = {"session.json": FoldedDocument.of(506, data)}
        manifest = Manifest(key=AGENT, epoch=epoch, as_of_seq=506, documents=folded)
        await store.write_documents(AGENT, {"session.json": data}, manifest)
    await store.publish(AGENT, epoch)
    report("published", AGENT.agent)
    await store.release(AGENT, epoch)
    writer = await Writer.take(store, AGENT, report)
    await writer.append(1)
    await writer.fold()


SCENARIOS: dict[str, Scenario] = {
    "append": append,
    "acquire": acquire,
    "unsynced": unsynced,
    "fold": fold,
    "release": release,
    "roll": roll,
    "delete": delete,
    "draft": draft,
    "everything": everything,
}


async def opened(store: Store, report: Report) -> None:
    """Open a store, also one whose lock somebody was stopped with."""
    for _ in range(_TRIES):
        try:
            await store.open()
        except StoreUnavailableError:
            report("waits")
            await anyio.sleep(0.01)
        else:
            return
    raise Lost


def run(root: Path, work: Scenario, report: Report, *, owner: str | None = None) -> None:
    """Run a scenario on the store of the chosen kind at *root*, on a loop of its own."""

    async def main() -> None:
        store = places.make(root, owner)
        await opened(store, report)
        report("open")
        try:
            await work(store, report)
        except Lost:
            return
        finally:
            await store.aclose()

    runners.run(RUNNER[0], main)
