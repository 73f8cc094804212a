"""Blobs: put before the records and documents that refer to them; and media of messages, read back.

The log is read as it is stored. `Filled` reads it with the media in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.tasks import each
from perdure.autosave.core import complete, outcome_of
from perdure.errors import CorruptRecordError
from perdure.memory.context import WorkingContext
from perdure.memory.media import HELD_BYTES, MediaBudget
from perdure.records.keys import SessionKey
from perdure.records.media import (
    LIFTED_KINDS,
    MOST,
    Medium,
    filled,
    holds_references,
    lifted_entries,
    referred,
)
from perdure.records.records import CONTEXT, Entry, Record
from perdure.store import Batch, LogChunk, Outcome, Status, Store
from perdure.stores.delegate import DelegatingStore

OFFLOAD: Final = 512 * 1024
"""Media of more bytes than this are taken out of their records in a thread."""
AT_A_TIME: Final = 4 * 1024 * 1024
"""Bytes of blobs in one call of the store."""


async def media_of(
    store: Store, tenant: str, wanted: Iterable[Medium], *, most: int = MOST
) -> dict[str, bytes]:
    """Read media out of their blobs, so many bytes of them.

    What is lost, damaged or of another size is not among them.

    Raises:
        StoreError: The store cannot be read.

    """
    media: dict[str, bytes] = {}
    read_next: dict[str, int] = {}
    size = 0
    for medium in wanted:
        size += medium.bytes
        if size > most:
            break
        read_next[medium.name] = medium.bytes

    async def read(name: str) -> None:
        with contextlib.suppress(CorruptRecordError):
            data = await store.get_blob(tenant, name)
            if data is not None and len(data) == read_next[name]:
                media[name] = data

    await each(list(read_next), read)
    return media


async def hold_media(
    store: Store, key: SessionKey, context: WorkingContext, budget: MediaBudget
) -> None:
    """Load the media that a restored working context may show, and hold those of later messages."""
    context.budget = budget
    context.lifts = store.capabilities.blobs
    await load_media(store, key, context)


async def load_media(store: Store, key: SessionKey, context: WorkingContext) -> None:
    """Load the media that the model may be shown, and that are not in memory."""
    wanted = [medium for medium in context.wanted() if medium.name not in context.media]
    if wanted:
        context.media |= await media_of(store, key.blobs, wanted, most=HELD_BYTES)


@final
class Filled(DelegatingStore):
    """Reads logs with the media of their messages in place, for all who read messages.

    Code that follows references, folds or compares reads the store below it. Contexts keep their
    references: one may hold as many images as were ever shown.
    """

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records; media whose blob is lost stay a reference."""
        log = self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        async with contextlib.aclosing(log):
            async for chunk in log:
                if not any(holds_references(record.payload) for record in chunk.records):
                    yield chunk
                    continue
                begin = size = 0
                for at, record in enumerate(chunk.records):
                    size += sum(medium.bytes for medium in referred_in(record))
                    if size >= AT_A_TIME:  # a reader that has enough does not wait for the rest
                        yield await self._part(key, chunk, begin, at + 1)
                        begin, size = at + 1, 0
                if begin < len(chunk.records):
                    yield await self._part(key, chunk, begin, len(chunk.records))

    async def _part(self, key: SessionKey, chunk: LogChunk, begin: int, end: int) -> LogChunk:
        return LogChunk(await with_media(self.inner, key, chunk.records[begin:end]), chunk.settled)


async def _lifted(batch: Batch) -> tuple[tuple[Entry, ...], dict[str, bytes]]:
    """Return a batch's records with references to their media, and these."""
    if sum(len(entry.payload) for entry in batch.records) <= OFFLOAD:
        return lifted_entries(batch.records)
    lift = partial(lifted_entries, batch.records)
    limiter = anyio.CapacityLimiter(1)  # callers' own threads may all be waiting for the save
    return await anyio.to_thread.run_sync(lift, abandon_on_cancel=True, limiter=limiter)


def referred_in(record: Record) -> list[Medium]:
    """Return the media in blobs that a record refers to."""
    is_one = record.kind in LIFTED_KINDS and record.kind != CONTEXT
    return referred(record.payload) if is_one else []


async def with_media(
    store: Store, key: SessionKey, records: Sequence[Record]
) -> tuple[Record, ...]:
    """Return records with their media in place, read one record after the other."""
    whole: list[Record] = []
    for record in records:
        if referred_in(record):
            payload = await with_its_media(store, key, record.payload, {})
            whole.append(msgspec.structs.replace(record, payload=payload))
        else:
            whole.append(record)
    return tuple(whole)


async def with_its_media(
    store: Store, key: SessionKey, payload: bytes, held: Mapping[str, bytes]
) -> bytes:
    """Return a message with its media in place; those that are not *held* are read."""
    media = referred(payload)
    missing = [medium for medium in media if medium.name not in held]
    read = await media_of(store, key.blobs, missing) if missing else {}
    return filled(payload, {**held, **read}) if media else payload


async def append_with_media(store: Store, batches: Sequence[Batch]) -> list[Outcome]:
    """Put the media of batches into blobs, and append the batches of which that was done."""
    outcomes: list[Outcome | None] = []
    ready: list[Batch] = []
    for batch in batches:
        try:
            records, media = await _lifted(batch)
            # Before the records that refer to them.
            await put_blobs(store, batch.key.blobs, media)
        except Exception as error:  # noqa: BLE001  # becomes the outcome
            outcome = outcome_of(error)
            if outcome.status is Status.IN_DOUBT:  # no record was sent
                outcome = Outcome(Status.TRANSIENT, error)
            outcomes.append(outcome)
        else:
            outcomes.append(None)
            ready.append(msgspec.structs.replace(batch, records=records))
    answers = iter(complete(await store.append_many(ready), len(ready)) if ready else [])
    return [next(answers) if outcome is None else outcome for outcome in outcomes]


async def put_blobs(store: Store, tenant: str, blobs: Mapping[str, bytes]) -> None:
    """Make blobs durable, some at a time; a store that keeps none has the log."""
    if not store.capabilities.blobs:
        return
    some: dict[str, bytes] = {}
    size = 0
    for name, data in blobs.items():
        some[name] = data
        size += len(data)
        if size >= AT_A_TIME:
            await store.put_blobs(tenant, some)
            some, size = {}, 0
    if some:
        await store.put_blobs(tenant, some)
