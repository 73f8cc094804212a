"""Bundle files: export and import of one session, and its items.

A file is published complete or not at all. An import reads the file twice, so a damaged bundle
writes nothing to the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Container, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO, Any, Final, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import new_file, open_regular, read_line
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    SessionNotFoundError,
    StoreError,
    StoreUnavailableError,
    TooLargeError,
)
from perdure.lease import OnHeld, OwnerWatch, acquire_lease, while_beating
from perdure.memory.documents import InboxTakenPayload
from perdure.records.json import BOM, decode, encode
from perdure.records.keys import SessionKey, stored_key
from perdure.records.manifest import Manifest, Origin
from perdure.records.media import LIFTED_KINDS, holds_references, severed
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, GAP, TAKEN, Entry, Record
from perdure.records.references import spelled
from perdure.session.options import require_no_backup
from perdure.session.reach import SALVAGE, Reach, ReachedBlob, lost_error, reach_of
from perdure.session.stored import followed
from perdure.store import Batch, Document, Documents, HeldLease, Status, Store, first_record
from perdure.transfer import bundle

# Export of a session as bundle items: read without a lease, even while a program writes


KEPT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of blobs that are cached between the search for references and their export."""


async def items(
    store: Store,
    key: SessionKey,
    *,
    blobs: bool = True,
    dead_letters: bool = False,
    lost: list[ReachedBlob] | None = None,
) -> AsyncGenerator[bundle.Item, None]:
    """Yield a session as of now; it must exist. The blobs that it references come first.

    Args:
        store: An open store.
        key: The session to export.
        blobs: Whether to export blobs.
        dead_letters: Whether to export dead letters.
        lost: Where to note the blobs that are lost; None: they are an error.

    Raises:
        CorruptRecordError: The log, a document, a blob or a dead letter is lost or damaged.
        StoreUnavailableError: Another process is taking the session over.

    """
    documents = await store.read_documents(key)
    head = await store.head(key)  # second: a log may be ahead of its documents, never behind
    generation = await _generation(store, key)
    require_whole(key, documents)
    letters = await dead_letters_of(store, key) if dead_letters else []
    _require_readable(key, letters)
    yield bundle.BundleHeader(key, 2 if letters else 1)
    for letter in letters:
        yield letter
    reached = await _reached(store, key, documents, head, lost) if blobs else {}
    for name in sorted(reached):
        data = reached.pop(name)
        if data is None and (data := await store.get_blob(key.tenant, name)) is None:
            raise _changed(key)
        yield bundle.BundleBlob(name, data)
    async with contextlib.aclosing(content(store, key, head)) as records:
        async for record in records:
            yield record
    if documents.manifest is not None:  # else the first fold is under way, and the log has it all
        for name, document in sorted(documents.found.items()):
            yield bundle.BundleDocument(name, document)
        yield documents.manifest
    if generation != await _generation(store, key):
        raise _changed(key)
    yield bundle.BundleFooter()


async def _generation(store: Store, key: SessionKey) -> list[Any]:
    """Return what changes when a session is deleted, begun anew or pruned."""
    first = await first_record(store.read_log(key, limit=1))
    manifest = (await store.read_documents(key, ())).manifest
    return [first and (first.seq, first.epoch), manifest and manifest.base]


class ChangedError(StoreUnavailableError):
    """A session changed while it was read: the next attempt reads it completely."""


def _changed(key: SessionKey) -> ChangedError:
    return ChangedError(
        f"session {key} was pruned, renamed or deleted while it was read: try again", key=str(key)
    )


async def dead_letters_of(store: Store, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters, in the same order everywhere; none without support."""
    letters = await store.dead_letters(key) if store.capabilities.dead_letters else []
    return sorted(letters, key=lambda letter: (letter.at, letter.item.op_id))


async def content(store: Store, key: SessionKey, head: int) -> AsyncGenerator[Record, None]:
    """Yield the log up to record *head*, without the store's own records and fields."""
    async with contextlib.aclosing(settled_records(store, key, head)) as log:
        async for record in log:
            if (neutral := bundle.neutral_record(record)) is not None:
                yield neutral


async def settled_records(store: Store, key: SessionKey, head: int) -> AsyncGenerator[Record, None]:
    """Yield the log up to record *head*, all of it.

    Raises:
        StoreUnavailableError: A takeover is still deciding about its end, or it was changed.

    """
    at = 0
    async with contextlib.aclosing(store.read_log(key, before=head + 1)) as log:
        async for chunk in log:
            if not chunk.settled:
                raise StoreUnavailableError(
                    f"session {key} is just being taken over: try again in a moment", key=str(key)
                )
            for record in chunk.records:
                if at and record.seq != at + 1:
                    raise _changed(key)
                at = record.seq
                yield record
    if at < head:
        raise _changed(key)


def require_whole(key: SessionKey, documents: Documents) -> None:
    """Raise CorruptRecordError for documents that are damaged."""
    if documents.damaged:
        names = ", ".join(documents.damaged)
        raise CorruptRecordError(
            f"{names} of {key} is damaged: `perdure rebuild` makes it anew from the log",
            key=str(key),
            documents=names,
        )


def _require_readable(key: SessionKey, letters: list[DeadLetter]) -> None:
    for letter in letters:
        if letter.item.damage:
            raise CorruptRecordError(
                f"a dead letter of {key} is damaged: `perdure inbox {key.agent}` shows it, and "
                "--drop removes it",
                key=str(key),
            )


async def reach(
    store: Store, key: SessionKey, documents: Documents | None = None, head: int = 0
) -> Reach:
    """Return what a session reaches: as of now, or of its documents and the record *head*."""
    if documents is None:
        documents = await store.read_documents(key)
        head = await store.head(key)
    base = await followed(store).base_of(key) if documents.manifest is None else None
    if base is not None:  # it begins with what others have, who may have let go of it
        lineage = followed(store)
        documents, head = await lineage.read_documents(key), head + base.at
        return await reach_of(lineage, key, documents, settled_records(lineage, key, head))
    return await reach_of(store, key, documents, content(store, key, head))


async def _reached(
    store: Store, key: SessionKey, documents: Documents, head: int, lost: list[ReachedBlob] | None
) -> dict[str, bytes | None]:
    """Return the blobs that a session reaches; the first few MiB with their data."""
    session_reach = await reach(store, key, documents, head)
    reached: dict[str, bytes | None] = {}
    missed = [] if lost is None else lost
    room = KEPT_BYTES
    async with contextlib.aclosing(session_reach.blobs()) as blobs:
        async for blob in blobs:
            if blob.data is None:
                missed.append(blob)
                continue
            only_in_log = bool(blob.why)
            reached[blob.name] = blob.data if only_in_log or len(blob.data) <= room else None
            room -= len(reached[blob.name] or b"")
    if missed and lost is None:
        raise lost_error(key, missed, SALVAGE)
    return reached


# Import of a session from bundle items, under a lease, with the original sequence numbers


ALL: Final = 1_000_000
"""Limit of pending items that are read at once."""

BATCH_BYTES: Final = 4 * 1024 * 1024
BATCH_RECORDS: Final = 2000
TRIM_RECORDS: Final = 20_000
FEW: Final = 16
"""A longer gap at the beginning of a log is pruned history; all others are epochs."""


class WrittenSession(msgspec.Struct, frozen=True):
    """Result of an import."""

    key: SessionKey
    records: int = 0
    blobs: int = 0
    bytes: int = 0
    """Bytes of records, documents and blobs, before the store frames them."""
    epoch: int = 0
    """The last one under which it was written."""


async def land(
    store: Store,
    key: SessionKey,
    items: AsyncGenerator[bundle.Item, None],
) -> WrittenSession:
    """Write a session that the store does not have, and release it.

    Args:
        store: The store to write to.
        key: The session's key in the store.
        items: The complete session.

    Raises:
        ConfigError: The store has a session of this key.
        StoreError: The store refused a part of it; the store has an incomplete session.

    """
    holder = await store.holder(key)
    if holder is not None and not holder.deleted and await store.head(key):
        raise ConfigError(
            f"{store.location} has a session {key}: choose another id, or delete it first",
            key=str(key),
        )
    landing = _SessionWrite(store, key)
    await landing.take(0 if holder is None else holder.epoch)
    return await landing.of(items)


@final
class _SessionWrite:
    def __init__(self, store: Store, key: SessionKey) -> None:
        self._store = store
        self._key = key
        self._epoch = 0
        self._next = 1
        """Sequence number of the next record."""
        self._written = 1
        """Sequence number of the first record in the buffer."""
        self._entries: list[Entry] = []
        self._size = 0
        self._blobs: dict[str, bytes] = {}
        self._letters: list[DeadLetter] = []
        self._documents: dict[str, bytes] = {}
        self._records = self._count = self._bytes = self._trimmed = 0
        self._base: Origin | None = None
        """The newest origin of the session, with this store's epoch."""
        self._taken_ops: set[str] = set()
        """Op ids of inbox items that are in the log."""

    async def of(self, items: AsyncGenerator[bundle.Item, None]) -> WrittenSession:
        async with aclosing(items) as source:
            async for item in source:
                await self.add(item)
        await self.finish()
        return WrittenSession(self._key, self._records, self._count, self._bytes, self._epoch)

    async def release(self) -> None:
        await self._store.release(self._key, self._epoch)

    async def take(self, after: int) -> None:
        """Acquire the lease, which appends an epoch record."""
        grant = await self._store.acquire(self._key, after=after)
        if grant.head != self._next:
            raise StoreError(
                f"session {self._key} in {self._store.location} is written by another process: "
                f"its log ends at {grant.head}, not {self._next}; try again",
                key=str(self._key),
            )
        self._epoch = grant.epoch
        self._next = self._written = grant.head + 1

    async def add(self, item: bundle.Item) -> None:
        match item:
            case bundle.BundleBlob(name, data):
                self._blobs[name] = data
                self._size += len(data)
                self._count += 1
            case DeadLetter():
                self._letters.append(item)
            case Record():
                await self._record(item)
            case bundle.BundleDocument(name, document):
                self._documents[name] = document.data
                self._bytes += len(document.data)
            case Manifest():
                await self._fold(item)
        if self._size >= BATCH_BYTES:
            await self._flush()

    async def _record(self, record: Record) -> None:
        payload = record.payload
        if record.kind == BASE:
            self._base = await self._based(decode(payload, Origin))
            payload = encode(self._base)
        if record.kind == TAKEN:
            self._taken_ops.update(decode(payload, InboxTakenPayload).ops)
        await self._reach(record.seq)
        self._append(Entry(record.kind, payload, record.end))
        self._records += 1
        if len(self._entries) >= BATCH_RECORDS:
            await self._flush()

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._size += len(entry.payload)
        self._next += 1

    async def _reach(self, seq: int) -> None:
        """Fill the log up to a sequence number, with gap records."""
        if self._next < seq and self._entries and not self._entries[-1].end:
            raise StoreError(f"the log of {self._key} has an epoch within a group at {seq}")
        # Later on, what is missing are epochs and no pruned history.
        is_pruned = not self._records and seq - self._next > FEW
        while self._next < seq:
            self._append(Entry(GAP, b"null"))
            if len(self._entries) >= BATCH_RECORDS:
                await self._flush()
                if is_pruned and self._next - self._trimmed >= TRIM_RECORDS:
                    await self._trim()
        if is_pruned:
            await self._flush()
            await self._trim()

    async def _trim(self) -> None:
        await self._store.trim(self._key, self._epoch, self._next)
        self._trimmed = self._next

    async def _based(self, base: Origin) -> Origin:
        """Return an origin with the epoch that the parent's record has in this store."""
        if base.parent is None:
            return base
        try:
            _require_tenant(self._key, base.parent)
        except StoreError:
            await self._store.delete(self._key, self._epoch)
            raise
        if not base.at:
            return base
        log = followed(self._store).read_log(base.parent, after=base.at - 1, limit=1)
        async with aclosing(log) as chunks:
            async for chunk in chunks:
                return msgspec.structs.replace(base, epoch=chunk.records[0].epoch)
        return base

    async def _flush(self) -> None:
        """Make the buffer durable, up to its last complete group: blobs first, then records."""
        if self._blobs:
            blobs, self._blobs = self._blobs, {}
            await self._store.put_blobs(self._key.tenant, blobs)
            self._bytes += sum(map(len, blobs.values()))
        ends = [at for at, entry in enumerate(self._entries, 1) if entry.end]
        count = ends[-1] if ends else 0
        if count:
            batch = Batch(self._key, self._epoch, self._written, tuple(self._entries[:count]))
            outcome = (await self._store.append_many([batch]))[0]
            if outcome.status is not Status.OK:
                raise StoreError(
                    f"{self._store.location} did not take the records of {self._key}",
                    key=str(self._key),
                ) from outcome.error
            self._bytes += sum(len(entry.payload) for entry in batch.records)
            del self._entries[:count]
            self._written += count
        self._size = sum(len(entry.payload) for entry in self._entries)

    async def _fold(self, manifest: Manifest) -> None:
        await self._reach(manifest.as_of_seq + 1)
        await self._flush()
        base = None if manifest.base is None else await self._based(manifest.base)
        rewritten = msgspec.structs.replace(manifest, key=self._key, epoch=self._epoch, base=base)
        await self._store.write_documents(self._key, self._documents, rewritten)

    async def finish(self) -> None:
        await self._flush()
        if self._entries:
            raise StoreError(f"the log of {self._key} ends within a group, at {self._next - 1}")
        await self._require_parent()
        await self._settle()
        if self._letters:
            await self._store.reject(self._key, self._epoch, self._letters)
        await self.release()

    async def _settle(self) -> None:
        """Acknowledge pending items that the log now contains."""
        if not self._taken_ops:
            return
        waiting = await self._store.receive(self._key, self._epoch, limit=ALL)
        done = [item.op_id for item in waiting if item.op_id in self._taken_ops]
        if done:
            await self._store.ack(self._key, self._epoch, done)

    async def _require_parent(self) -> None:
        """Delete the session and raise if the store lacks the parent's record that it needs."""
        base = self._base
        if base is None or base.parent is None:
            return
        if await followed(self._store).has(base.parent, base.at, base.epoch):
            return
        await self._store.delete(self._key, self._epoch)
        raise _without_parent(self._store, self._key, base)


@asynccontextmanager
async def leased(
    target: Store,
    key: SessionKey,
    *,
    watches: Mapping[str, OwnerWatch],
    on_held: OnHeld = "steal",
    wait: float,
) -> AsyncGenerator[HeldLease, None]:
    """Hold a session's lease in a store that is written to."""
    me = target.owner
    grant = await acquire_lease(target, key, me=me, watch=watches[me], on_held=on_held, wait=wait)
    try:
        yield grant
    finally:
        with anyio.CancelScope(shield=True):
            await target.release(key, grant.epoch)


MARK: Final = b'{"perdure_bundle":'
PART: Final = 1024 * 1024
"""Bytes written to disk at a time."""


async def write_bundle(store: Store, key: SessionKey, path: Path) -> int:
    """Write a session as a bundle into a new file, and return the file's size in bytes.

    Reads without a lease. Exports what is durable when it begins, dead letters included. Items that
    are still pending in the inbox are in no log yet and are not exported.

    Args:
        store: An open store.
        key: The session to export.
        path: A file that does not exist yet.

    Raises:
        SessionNotFoundError: There is no such session.
        ConfigError: The file exists already.
        CorruptRecordError: The session is damaged.
        TooLargeError: A part of it is more than an import takes.

    """
    if not await store.head(key):
        raise SessionNotFoundError(f"there is no session {key} in {store.location}", key=str(key))
    return await write_items(path, items(store, key, dead_letters=True))


async def write_items(path: Path, items: AsyncGenerator[bundle.Item, None]) -> int:
    """Write a bundle's items into a new file, and return the file's size in bytes."""
    writer, kept = bundle.BundleWriter(), bundle.KeptItems()
    async with new_file(path) as file, aclosing(items):
        async for item in items:
            line = writer.line(item)
            if excess := kept.excess(item, len(line)):
                raise TooLargeError(
                    f"there are {excess}, which no import takes: copy the session with "
                    "`perdure migrate` or `perdure backup`",
                    size=len(line),
                    limit=bundle.MOST_KEPT,
                )
            await file.take(line)
    return file.size


async def read_bundle(store: Store, path: Path, *, key: SessionKey | None = None) -> WrittenSession:
    """Import a bundle's session into a store that does not have it.

    Args:
        store: An open store.
        path: The bundle.
        key: The session's key in the store. Default: the bundle's.

    Raises:
        ConfigError: The store has a session of this key, or is a backup.
        CorruptRecordError: The bundle is damaged, or costs more than it may; nothing was written.
        InvalidArgumentError: The key is of perdure's own, and no scope.
        StoreError: It has dead letters, and the store does not support them; nothing was written.
        UnsupportedVersionError: A newer release wrote it; nothing was written.

    """
    if key is not None:
        stored_key(key.agent)
    look = await _look(path, key)
    was = look.key
    await require_no_backup(store)
    if look.has_letters and not store.capabilities.dead_letters:
        raise StoreError(
            f"{path} holds dead letters, and {store.location} keeps none: use another store",
            path=str(path),
        )
    await _require_history(store, key or was, look.base)
    # Documents contain the session's key and its media: they are rebuilt from a log that changes.
    documents = look.has_manifest and key in {None, was} and not look.is_severed
    source = _items(path, look, documents=documents)
    return await while_beating((store,), lambda: land(store, key or was, source))


async def is_bundle(path: Path) -> bool:
    """Say whether a path is a file that begins like a bundle."""
    if not await anyio.Path(path).is_file():
        return False
    async with await anyio.open_file(path, "rb") as file:
        return (await file.read(len(BOM + MARK))).removeprefix(BOM).startswith(MARK)


async def bundle_key(path: Path) -> SessionKey:
    """Read and check all of a bundle, and return its session's key; errors as `read_bundle`."""
    return (await _look(path)).key


class _Look(msgspec.Struct, frozen=True):
    """What is known of a bundle before it is imported."""

    key: SessionKey
    has_letters: bool
    has_manifest: bool
    base: Origin | None
    blobs: frozenset[str]
    is_severed: bool
    """Whether a message refers to media that are not in it: lost ones, or another session's."""


async def _look(path: Path, target: SessionKey | None = None) -> _Look:
    reader = bundle.Reader(str(path), target)
    key: SessionKey | None = None
    has_letters = has_manifest = is_severed = False
    blobs: set[str] = set()
    async with aclosing(_lines(path)) as lines:
        async for line in lines:
            item = reader.item(line)
            if isinstance(item, bundle.BundleHeader):
                key = item.key
            has_letters = has_letters or isinstance(item, DeadLetter)
            has_manifest = has_manifest or isinstance(item, Manifest)
            if isinstance(item, bundle.BundleBlob):  # they come before the records
                blobs.add(item.name)
            is_severed = is_severed or _severed(item, blobs) is not item
    if key is None or not reader.ended:
        raise CorruptRecordError(
            f"{path} is not a whole bundle: its end is missing; export the session again",
            path=str(path),
        )
    return _Look(key, has_letters, has_manifest, reader.base, frozenset(blobs), is_severed)


async def _require_history(store: Store, key: SessionKey, base: Origin | None) -> None:
    """Raise unless the store has the record that a session continues."""
    if base is None or base.parent is None:
        return
    lineage = followed(store)
    _require_tenant(key, base.parent)
    log = lineage.read_log(base.parent, after=base.at - 1, before=base.at + 1)
    above = await lineage.base_of(base.parent)
    is_own = above is None or above.parent is None or above.at < base.at
    if not is_own or await first_record(log) is None:
        raise _without_parent(store, key, base)


def _require_tenant(key: SessionKey, parent: SessionKey) -> None:
    if parent.tenant != key.tenant:
        raise StoreError(
            f"session {key} is a fork of {parent}, and a fork has its parent's tenant: import "
            f"both for {parent.tenant!r}",
            key=str(key),
            parent=str(parent),
        )


def _without_parent(store: Store, key: SessionKey, base: Origin) -> StoreError:
    return StoreError(
        f"session {key} is a fork at record {base.at} of {base.parent}, which {store.location} "
        "does not have: import that session first",
        key=str(key),
        parent=str(base.parent),
        at=base.at,
    )


def _severed(item: bundle.Item, blobs: Container[str]) -> bundle.Item:
    """Return a bundle's item without references to media that the bundle does not hold."""
    if isinstance(item, Record) and item.kind in LIFTED_KINDS:
        payload = severed(item.payload, blobs)
        return item if payload == item.payload else msgspec.structs.replace(item, payload=payload)
    if isinstance(item, bundle.BundleDocument):
        data = severed(item.document.data, blobs)
        if data != item.document.data:
            return msgspec.structs.replace(item, document=Document(data, item.document.as_of_seq))
    if isinstance(item, DeadLetter) and holds_references(item.item.payload):  # no post has any
        post = msgspec.structs.replace(item.item, payload=spelled(item.item.payload))
        return msgspec.structs.replace(item, item=post)
    return item


async def _items(path: Path, look: _Look, *, documents: bool) -> AsyncGenerator[bundle.Item, None]:
    reader = bundle.Reader(str(path))
    async with aclosing(_lines(path)) as lines:
        async for line in lines:
            item = reader.item(line)
            if documents or not isinstance(item, (bundle.BundleDocument, Manifest)):
                yield _severed(item, look.blobs)


async def _lines(path: Path) -> AsyncGenerator[bytes | None, None]:
    """Yield a bundle's lines; None for one that is too long."""
    run = anyio.to_thread.run_sync
    with await run(open_regular, path) as file:
        while lines := await run(_next_lines, file):
            for line in lines:
                yield line


def _next_lines(file: IO[bytes]) -> list[bytes | None]:
    """Read about a part, so that few threads are asked."""
    lines, size = list[bytes | None](), 0
    while size < PART and (line := read_line(file, bundle.MOST_LINE)) != b"":
        lines.append(line)
        if line is None:
            break
        size += len(line)
    return lines
