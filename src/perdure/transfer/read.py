"""Export of a session as bundle items: read without a lease, even while a program writes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator
from typing import Final, final

from perdure.checkpoints.chain import CHAIN_KINDS, CheckpointChain
from perdure.errors import CorruptRecordError, StoreUnavailableError
from perdure.records.checkpoints import CHECKPOINTS
from perdure.records.chunks import named_in
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import DeadLetter, Documents, Store
from perdure.transfer.bundle import (
    BundleBlob,
    BundleDocument,
    BundleFooter,
    BundleHeader,
    BundleWriter,
    Item,
    neutral_record,
)

KEPT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of blobs that are cached between the search for references and their export."""


async def items(
    store: Store, key: SessionKey, *, blobs: bool = True, dead_letters: bool = False
) -> AsyncGenerator[Item, None]:
    """Yield a session as of now; it must exist. The blobs that it references come first.

    Args:
        store: An open store.
        key: The session to export.
        blobs: Whether to export blobs.
        dead_letters: Whether to export dead letters.

    Raises:
        CorruptRecordError: The log, a document or a dead letter is damaged.
        StoreUnavailableError: Another process is taking the session over.

    """
    documents = await store.read_documents(key)
    head = await store.head(key)  # second: a log may be ahead of its documents, never behind
    _require_whole(key, documents)
    letters = await dead_letters_of(store, key) if dead_letters else []
    _require_readable(key, letters)
    yield BundleHeader(key, 2 if letters else 1)
    for letter in letters:
        yield letter
    reached = await _reached(store, key, documents, head) if blobs else {}
    for name in sorted(reached):
        data = reached.pop(name) or await store.get_blob(key.tenant, name)
        if data is not None:
            yield BundleBlob(name, data)
    async with contextlib.aclosing(content(store, key, head)) as records:
        async for record in records:
            yield record
    for name, document in sorted(documents.found.items()):
        yield BundleDocument(name, document)
    if documents.manifest is not None:
        yield documents.manifest
    yield BundleFooter()


async def dead_letters_of(store: Store, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters, in the same order everywhere; none without support."""
    letters = await store.dead_letters(key) if store.capabilities.dead_letters else []
    return sorted(letters, key=lambda letter: (letter.at, letter.item.op_id))


async def content(store: Store, key: SessionKey, head: int) -> AsyncGenerator[Record, None]:
    """Yield the log up to record *head*, without the store's own records."""
    async with contextlib.aclosing(store.read_log(key, before=head + 1)) as log:
        async for chunk in log:
            if not chunk.settled:
                message = f"session {key} is just being taken over: try again in a moment"
                raise StoreUnavailableError(message, key=str(key))
            for record in map(neutral_record, chunk.records):
                if record is not None:
                    yield record


def _require_whole(key: SessionKey, documents: Documents) -> None:
    if documents.damaged:
        names = ", ".join(documents.damaged)
        message = f"{names} of {key} is damaged: `perdure rebuild` makes it anew from the log"
        raise CorruptRecordError(message, key=str(key), documents=names)


def _require_readable(key: SessionKey, letters: list[DeadLetter]) -> None:
    for letter in letters:
        if letter.item.damage:
            message = (
                f"a dead letter of {key} is damaged: `perdure inbox {key.agent}` shows it, and "
                "--drop removes it"
            )
            raise CorruptRecordError(message, key=str(key))


async def names_of(store: Store, key: SessionKey, documents: Documents, head: int) -> set[str]:
    """Return the names of the blobs that a session references, directly or through other blobs."""
    return set(await _reached(store, key, documents, head))


async def _reached(
    store: Store, key: SessionKey, documents: Documents, head: int
) -> dict[str, bytes | None]:
    """Return the blobs that a session references; the first few MiB with their data."""
    documents_by_name = documents.found.copy()
    links = documents_by_name.pop(CHECKPOINTS, None)
    chain = CheckpointChain.of(None if links is None else links.data)
    named = named_in(document.data for document in documents_by_name.values())
    async with contextlib.aclosing(content(store, key, head)) as records:
        async for record in records:
            if record.kind in CHAIN_KINDS:
                chain.apply(record.kind, record.payload)
            else:
                named |= named_in((record.payload,))
    # States of pruned checkpoints do not count, although the log still references them.
    named |= named_in(encode(checkpoint.state) for checkpoint in chain.by_id.values())
    if documents.manifest is not None and (base := documents.manifest.base) is not None:
        named |= {name for name in (base.kept, base.folded) if name}
    reached: dict[str, bytes | None] = {}
    looked: set[str] = set()
    room = KEPT_BYTES
    while named:
        name = named.pop()
        looked.add(name)
        data = await store.get_blob(key.tenant, name)
        if data is not None:
            named |= named_in((data,)) - looked
            reached[name] = data if len(data) <= room else None
            room -= len(reached[name] or b"")
    return reached


@final
class Digest:
    """Hash of a session, equal in every store. Blobs count by the names that records have."""

    def __init__(self) -> None:
        self._writer = BundleWriter()
        self._hash = hashlib.sha256()

    @property
    def value(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()

    async def through(self, source: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """Yield items unchanged, and add them to the hash."""
        async with contextlib.aclosing(source):
            async for item in source:
                if not isinstance(item, BundleBlob | BundleFooter):
                    self._hash.update(self._writer.line(item))
                yield item


async def digest_of(store: Store, key: SessionKey) -> str:
    """Return the digest of a session in a store."""
    digest = Digest()
    async with contextlib.aclosing(digest.through(items(store, key, blobs=False))) as passed:
        async for _ in passed:
            pass
    return digest.value
