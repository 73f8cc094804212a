"""Shared parts of the suite: the fixture of stores, and helpers for frequent calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest
from perdure.records.records import MESSAGE, Entry, Record
from perdure.store import Batch, Outcome, Status, Store, Taken, take_after

KEY = SessionKey("agent")

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
        Entry(record.kind, record.payload, record.end)
        for record in records
        if record.kind != "epoch"
    ]


def manifest_of(
    grant: Taken, as_of_seq: int, documents: Mapping[str, bytes], **fields: object
) -> Manifest:
    """Make the manifest of a fold that has just written all of these documents."""
    folded = {name: FoldedDocument.of(as_of_seq, data) for name, data in documents.items()}
    manifest = Manifest(key=grant.key, epoch=grant.epoch, as_of_seq=as_of_seq, documents=folded)
    return msgspec.structs.replace(manifest, **fields) if fields else manifest
