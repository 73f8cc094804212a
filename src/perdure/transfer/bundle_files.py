"""Bundle files: export and import of one session, and its items.

A file is published complete or not at all. An import checks all of a file before it copies the
session from it, as from a store, so a damaged bundle writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from perdure._lib.files import new_file
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    SessionNotFoundError,
    StoreUnavailableError,
    TooLargeError,
)
from perdure.lease import LeaseOptions, OnHeld, OwnerWatch, acquire_lease, while_beating
from perdure.records.json import BOM
from perdure.records.keys import SessionKey, session_key, stored_key
from perdure.records.manifest import Origin
from perdure.records.posts import DeadLetter
from perdure.records.records import HOLDER_KINDS, Record
from perdure.session.copied import OWN_KINDS
from perdure.session.copier import copy_session
from perdure.session.options import Limits, require_no_backup
from perdure.session.reach import SALVAGE, Reach, ReachedBlob, lost_error, reach_of
from perdure.session.stored import followed
from perdure.store import Documents, Draft, Store, Taken, Terms, first_record, record_at
from perdure.transfer import bundle
from perdure.transfer.views import BundleFile, BundleView

# Export of a session as bundle items: read without a lease, even while a program writes


KEPT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of blobs that are cached between the search for references and their export."""


async def items(store: Store, key: SessionKey) -> AsyncGenerator[bundle.Line, None]:
    """Yield the lines of a session as of now, but for the last one; it must exist.

    Raises:
        CorruptRecordError: The log, a document, a blob or a dead letter is lost or damaged.
        StoreUnavailableError: Another process is taking the session over.

    """
    store = await with_history(store, key)
    documents = await store.read_documents(key)
    head = await store.head(key)  # second: a log may be ahead of its documents, never the reverse
    generation = await _generation(store, key)
    require_whole(key, documents)
    letters = await dead_letters_of(store, key)
    if any(letter.item.damage for letter in letters):
        raise CorruptRecordError(
            f"a dead letter of {key} is damaged: `perdure inbox {key.agent}` shows it, and --drop "
            "removes it",
            key=str(key),
        )
    # Two passes: every blob is known to be there before the first byte is written.
    lost: list[ReachedBlob] = []
    reach = await reach_of(store, key, documents, content(store, key, head))
    blobs = await reached_blobs(reach, lost)
    if lost:
        raise lost_error(key, lost, SALVAGE)
    records = content(store, key, head)
    async with aclosing(items_of(store, key, letters, blobs, records, documents)) as items:
        async for item in items:
            yield item
    # Deleted and created again while it was read, which no record read above need show.
    if generation != await _generation(store, key):
        raise _changed(key)


async def items_of(
    store: Store,
    key: SessionKey,
    letters: list[DeadLetter],
    blobs: dict[str, bytes | None],
    records: AsyncGenerator[Record, None],
    documents: Documents,
) -> AsyncGenerator[bundle.Line, None]:
    """Yield the lines of a session, but for the last one; blobs without data are read."""
    yield bundle.header_line(key, 2 if letters else 1)
    for letter in letters:
        yield bundle.Line(dead_letter=letter)
    for name in sorted(blobs):
        data = blobs.pop(name)
        if data is None and (data := await store.get_blob(key.blobs, name)) is None:
            raise _changed(key)
        yield bundle.blob_line(name, data)
    async with aclosing(records):
        async for record in records:
            yield bundle.record_line(record)
    manifest = documents.manifest
    if manifest is not None:  # else the first fold is under way, and the log has it all
        for name, document in sorted(documents.found.items()):
            yield bundle.document_line(name, document)
        base = manifest.base
        if base is not None:
            base = Origin(cut=base.cut, folded=base.folded) if base.cut else None
        yield bundle.manifest_line(msgspec.structs.replace(manifest, base=base))


async def _generation(store: Store, key: SessionKey) -> list[Any]:
    """Return what changes when a session is deleted, created again or pruned."""
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
    """Return a session's dead letters, in the same order everywhere."""
    letters = await store.dead_letters(key)
    return sorted(letters, key=lambda letter: (letter.at, letter.item.op_id))


async def with_history(store: Store, key: SessionKey) -> Store:
    """Return a store that has all of a session; a fork of before reads other sessions."""
    base = await followed(store).base_of(key)
    return followed(store) if base is not None and base.at else store


async def content(store: Store, key: SessionKey, head: int) -> AsyncGenerator[Record, None]:
    """Yield the log up to record *head*, without the store's own records and fields.

    What was pruned is named once, by its last number, wherever the store has that.
    """
    base = await followed(store).beginning_of(key)
    if base.cut:
        yield bundle.base_record(base, base.cut)
    async with aclosing(said(store, key, head, after=base.cut)) as log:
        async for record in log:
            yield record


async def said(
    store: Store, key: SessionKey, head: int, *, after: int = 0
) -> AsyncGenerator[Record, None]:
    """Yield the records after one up to another that a copy has as they are."""
    async with aclosing(settled_records(store, key, head, after=after)) as log:
        async for record in log:
            if record.kind not in OWN_KINDS and record.kind not in HOLDER_KINDS:
                yield Record(record.seq, 0, record.kind, record.payload, record.end)


async def settled_records(
    store: Store, key: SessionKey, head: int, *, after: int = 0
) -> AsyncGenerator[Record, None]:
    """Yield the log up to record *head*, all of it or what comes *after* a record.

    Raises:
        StoreUnavailableError: A takeover is still deciding about its end, or it was changed.

    """
    at = after
    async with aclosing(store.read_log(key, after=after, before=head + 1)) as log:
        async for chunk in log:
            if not chunk.settled:
                raise StoreUnavailableError(
                    f"session {key} is just being taken over: try again in a moment", key=str(key)
                )
            for record in chunk.records:
                # A hole: the log was pruned between two chunks.
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
            f"{names} of {key} is damaged: `perdure rebuild` makes it again from the log",
            key=str(key),
            documents=names,
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
    return await reach_of(store, key, documents, settled_records(store, key, head))


async def reached_blobs(reach: Reach, lost: list[ReachedBlob]) -> dict[str, bytes | None]:
    """Return the blobs of a reach, the first few MiB with their data; note those that are lost."""
    found: dict[str, bytes | None] = {}
    room = KEPT_BYTES
    async with aclosing(reach.blobs()) as blobs:
        async for blob in blobs:
            if blob.data is None:
                lost.append(blob)
                continue
            only_in_log = bool(blob.why)
            found[blob.name] = blob.data if only_in_log or len(blob.data) <= room else None
            room -= len(found[blob.name] or b"")
    return found


# Writing to a store


ALL: Final = 1_000_000
"""Limit of pending items that are read at once."""


@asynccontextmanager
async def leased(
    target: Store,
    key: SessionKey,
    *,
    watch: OwnerWatch,
    on_held: OnHeld = "steal",
    wait: float,
) -> AsyncGenerator[Taken, None]:
    """Hold a session's lease in a store that is written to."""
    terms = Terms(me=target.owner)
    grant = await acquire_lease(target, key, terms, watch=watch, on_held=on_held, wait=wait)
    try:
        yield grant
    finally:
        with anyio.CancelScope(shield=True):
            await target.release(key, grant.epoch)


MARK: Final = b'{"perdure_bundle":'


async def write_bundle(store: Store, key: SessionKey, path: str | os.PathLike[str]) -> int:
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
    return await write_items(Path(path), items(store, key))


async def write_items(path: Path, items: AsyncGenerator[bundle.Line, None]) -> int:
    """Write a bundle's lines and the last one into a new file, and return its size in bytes."""
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
        await file.take(writer.end())
    return file.size


class WrittenSession(msgspec.Struct, frozen=True):
    """Result of an import."""

    key: SessionKey
    records: int = 0
    blobs: int = 0
    """Blobs that the store did not have."""
    bytes: int = 0
    """Bytes of records, documents and blobs, before the store frames them."""
    epoch: int = 0
    """The one under which it was written."""


async def read_bundle(
    store: Store,
    path: str | os.PathLike[str],
    *,
    key: SessionKey | None = None,
    parent: SessionKey | None = None,
) -> WrittenSession:
    """Import a bundle's session into a store that does not have it: all of it, or nothing.

    Args:
        store: An open store.
        path: The bundle.
        key: The session's key in the store. Default: the bundle's.
        parent: The session in the store that the bundle continues. Only bundles of forks that a
            release before 0.1.0 wrote need it: they lack their parent's records.

    Raises:
        ConfigError: The store has a session of this key, or is a backup; or the bundle needs its
            parent, and *parent* is None, or lacks the record that the fork begins after.
        CorruptRecordError: The bundle is damaged, or costs more than it may.
        InvalidArgumentError: The key is of perdure's own, and no scope.
        LeaseHeldError: Another process makes a session of this key.
        StoreError: It has dead letters, and the store does not support them; or the store refused
            a part of it; or the file was changed.
        UnsupportedVersionError: A newer release wrote it.

    """
    if key is not None:
        stored_key(key.agent)
    async with BundleFile.opened(Path(path)) as file:
        await require_no_backup(store)
        key = key or file.key
        holder = await store.holder(key)
        if holder is not None and not holder.deleted and await store.head(key):
            raise ConfigError(
                f"{store.location} has a session {key}: choose another id, or delete it first",
                key=str(key),
            )
        base = await _continued(store, key, file, parent)
        view = BundleView(store, file, key, base)
        head = await followed(view).head(key)
        watch = OwnerWatch(LeaseOptions(), anyio.current_time)

        async def put_letters(epoch: int) -> None:
            if file.letters:
                await store.ack(key, epoch, dead=file.letters)

        copy = partial(
            copy_session,
            view,
            key,
            store,
            key,
            draft=Draft(source=key, generation=0, up_to=head, purpose="restore"),
            watch=watch,
            limits=Limits(),
            on_epoch=put_letters,
        )
        done = await while_beating(store, watch, copy)
        return WrittenSession(key, file.count, done.blobs, done.bytes, done.epoch)


async def _continued(
    store: Store, key: SessionKey, file: BundleFile, parent: SessionKey | None
) -> Origin | None:
    """Return what a bundle's log begins with, as it is in the store.

    Only the caller says which session a bundle continues: else whoever writes one could read any.
    """
    base = file.base
    if base is None or base.parent is None:
        return base
    point = None
    if parent is not None and parent.tenant == key.tenant:
        session_key(parent.agent)
        point = await record_at(followed(store), parent, base.at)
    if point is None:
        raise ConfigError(
            f"{file.path} is a fork of a release before 0.1.0, and continues record {base.at} of "
            f"{base.parent}: import that session into {store.location} first, for the same tenant, "
            f"and name it with --parent {(parent or base.parent).agent}, or parent=",
            option="parent",
        )
    return msgspec.structs.replace(base, parent=parent, epoch=point.epoch)


async def is_bundle(path: Path) -> bool:
    """Say whether a path is a file that begins like a bundle."""
    if not await anyio.Path(path).is_file():
        return False
    async with await anyio.open_file(path, "rb") as file:
        return (await file.read(len(BOM + MARK))).removeprefix(BOM).startswith(MARK)


async def bundle_key(path: Path) -> SessionKey:
    """Read and check all of a bundle, and return its session's key; errors as `read_bundle`."""
    async with BundleFile.opened(path) as file:
        return file.key
