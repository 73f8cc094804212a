"""Shared parts of the suite: the fixture of stores, and helpers for frequent calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import msgspec
import pytest

from perdure.errors import LeaseLostError
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest
from perdure.records.records import EPOCH, MESSAGE, Entry, Record
from perdure.store import Batch, Document, LeaseState, Outcome, Status, Store, Taken, take_after

KEY = SessionKey("agent")
SESSION = {"session.json": b"{}"}
"""Documents of a fold, where it does not matter which."""

OpenStore = Callable[[str], Awaitable[Store]]
"""Open a store for an owner of that name, at the test's one place."""


@pytest.mark.anyio
class Suite(ABC):
    """A part of the suite: makes stores, and closes them after each test."""

    clock_step: float = 0.25
    """Seconds that the store can tell apart as ages of blobs, and more than a sweep takes."""

    @abstractmethod
    def make_store(self, place: Path, owner: str) -> Store:
        """Return a store that is not open yet; its data is at ``place``."""

    @pytest.fixture
    async def open_store(self, tmp_path: Path) -> AsyncIterator[OpenStore]:
        """Open stores, one an owner, as processes on one machine would."""
        async with AsyncExitStack() as stack:

            async def open_one(owner: str) -> Store:
                store = self.make_store(tmp_path, owner)
                await store.open()
                stack.push_async_callback(store.aclose)
                return store

            yield open_one

    @pytest.fixture
    async def store(self, open_store: OpenStore) -> Store:
        """One open store, for the tests that need no second."""
        return await open_store("one")

    @pytest.fixture
    async def other(self, open_store: OpenStore, store: Store) -> Store:
        """Another owner's store at the same place."""
        return await open_store("other")


async def take(store: Store, key: SessionKey = KEY) -> Taken:
    """Acquire a session, even if another owner holds it."""
    holder = await store.holder(key)
    return await take_after(store, key, after=holder.epoch if holder else 0)


def group(*texts: str) -> tuple[Entry, ...]:
    """Make a group of message records."""
    last = len(texts) - 1
    return tuple(
        Entry(MESSAGE, msgspec.json.encode({"text": text}), end=place == last)
        for place, text in enumerate(texts)
    )


async def append(store: Store, grant: Taken, first: int, *records: Entry) -> Outcome:
    """Append to one session."""
    (outcome,) = await store.append_many([Batch(grant.key, grant.epoch, first, records)])
    return outcome


async def append_ok(store: Store, grant: Taken, first: int, *records: Entry) -> int:
    """Append to one session, which must work; return the new head."""
    outcome = await append(store, grant, first, *records)
    assert outcome.status is Status.OK, outcome
    return first + len(records) - 1


async def read(
    store: Store,
    key: SessionKey = KEY,
    *,
    after: int = 0,
    before: int | None = None,
    limit: int | None = None,
    reverse: bool = False,
) -> list[Record]:
    """Read the whole answer of ``read_log``; it must be settled."""
    records: list[Record] = []
    async for chunk in store.read_log(
        key, after=after, before=before, limit=limit, reverse=reverse
    ):
        assert chunk.settled
        records.extend(chunk.records)
    return records


def entries(records: list[Record]) -> list[Entry]:
    """Return what was appended, without the records that the store added."""
    return [
        Entry(record.kind, record.payload, record.end) for record in records if record.kind != EPOCH
    ]


async def appended(store: Store, key: SessionKey = KEY, *, after: int = 0) -> tuple[Entry, ...]:
    """Read what was appended to a session, or its part after a record."""
    return tuple(entries(await read(store, key, after=after)))


def texts_of(records: list[Record]) -> list[str]:
    """Return the texts of the messages that were appended."""
    return [msgspec.json.decode(entry.payload)["text"] for entry in entries(records)]


async def seqs(store: Store, key: SessionKey = KEY) -> list[int]:
    """Read the numbers of a log's records."""
    return [record.seq for record in await read(store, key)]


async def folded(
    store: Store, key: SessionKey = KEY, names: Collection[str] | None = None
) -> dict[str, Document]:
    """Read documents, none of which may be damaged."""
    documents = await store.read_documents(key, names)
    assert not documents.damaged
    return documents.found


async def held(store: Store, key: SessionKey = KEY) -> LeaseState:
    """Return the lease of a session that another process has taken."""
    holder = await store.holder(key)
    assert holder is not None
    return holder


async def lost(call: Awaitable[object]) -> None:
    """Await a call that must raise LeaseLostError."""
    with pytest.raises(LeaseLostError):
        await call


async def together(*calls: Callable[[], Awaitable[object]]) -> None:
    """Run calls at the same time."""

    async def run(call: Callable[[], Awaitable[object]]) -> None:
        await call()

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(run, call)


def manifest_of(
    grant: Taken, as_of_seq: int, documents: Mapping[str, bytes], **fields: object
) -> Manifest:
    """Make the manifest of a fold that has just written all of these documents."""
    folded = {name: FoldedDocument.of(as_of_seq, data) for name, data in documents.items()}
    manifest = Manifest(key=grant.key, epoch=grant.epoch, as_of_seq=as_of_seq, documents=folded)
    return msgspec.structs.replace(manifest, **fields) if fields else manifest


class SessionWriter:
    """A holder of a session, who knows where its log ends."""

    def __init__(self, store: Store, grant: Taken) -> None:
        self.store: Store = store
        self.grant: Taken = grant
        self.key: SessionKey = grant.key
        self.epoch: int = grant.epoch
        self.head: int = grant.head

    async def add(self, *texts: str) -> None:
        """Append a group of messages, which must work."""
        await self.put(*group(*texts))

    async def put(self, *records: Entry) -> None:
        """Append records, which must work."""
        self.head = await append_ok(self.store, self.grant, self.head + 1, *records)

    async def send(self, first: int, *texts: str) -> Status:
        """Append a group at a place of the log, and return the status of the answer."""
        return (await append(self.store, self.grant, first, *group(*texts))).status

    async def fold(
        self, documents: Mapping[str, bytes], as_of: int | None = None, **fields: object
    ) -> Manifest:
        """Write documents as of the log's end, or of an earlier record; return their manifest."""
        as_of_seq = self.head if as_of is None else as_of
        manifest = manifest_of(self.grant, as_of_seq, documents, **fields)
        await self.store.write_documents(self.key, documents, manifest)
        return manifest

    async def release(self) -> None:
        """Release the session."""
        await self.store.release(self.key, self.epoch)

    async def delete(self) -> None:
        """Delete the session."""
        await self.store.delete(self.key, self.epoch)


async def hold(store: Store, *texts: str, key: SessionKey = KEY) -> SessionWriter:
    """Acquire a session, as `take` does, and append a group of messages, if there are any."""
    writer = SessionWriter(store, await take(store, key))
    if texts:
        await writer.add(*texts)
    return writer
