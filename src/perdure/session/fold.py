"""Folding: writing the documents that summarize a session's log.

A fold covers only what is durable. It computes the documents that changed, from memory if the
session is open and at rest and else from the store, writes them, and moves the manifest forward.
It saves time at the next restore and nothing else: one that fails is a warning, and one that is
killed loses nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import TypeAlias

import anyio.to_thread
import msgspec

from perdure.checkpoints.chain import fold_chain
from perdure.formats.records import CONFIG, PERMISSIONS, TOOLS
from perdure.formats.state import CARRIED, ForeignFields
from perdure.memory.context import SNAPSHOT, WorkingContext
from perdure.memory.documents import (
    EPISODIC,
    SEMANTIC,
    SESSION,
    AgentParts,
    SessionCounts,
    SessionDocument,
    StateSet,
    WholeSessionDocument,
    fold_items,
    fold_session,
    fold_state,
    names_of,
    typed,
)
from perdure.memory.index import MEMORY, split_memory
from perdure.memory.ledger import LEDGER, fold_ledger
from perdure.records.checkpoints import CHECKPOINTS
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest
from perdure.records.media import LIFTED_KINDS, holds_references
from perdure.records.messages import decode_message
from perdure.records.records import Record
from perdure.restore.ladder import cached_context, keep_evidence, stored_snapshot, validated
from perdure.session.media import put_blobs
from perdure.session.options import Limits
from perdure.store import Document, Store, all_records

KIB = 1024
LEAST_TAIL = 64 * KIB
"""No fold for less, unless it is many records."""
HOP_RECORDS = 40
"""A tail of more records than this is folded before a hand-over."""
SMALL = 512 * KIB
"""Documents up to this size are also folded by count, so that restores stay fast."""
MUCH_TAIL = 1024 * KIB
OFFLOAD = 128 * KIB
"""A larger fold is computed in a thread."""
SPREAD = 0.2
_TOOLS, _PERMISSIONS, _CONFIG = (f"plugins/{name}.json" for name in (TOOLS, PERMISSIONS, CONFIG))
_OF_AGENT = {
    document
    for name in (_TOOLS, _PERMISSIONS, _CONFIG, CARRIED)
    for document in (name, typed(name))
}
"""The documents that session.json repeats."""


def phase_of(key: SessionKey) -> float:
    """Return a session's factor on the fold threshold: 1 to 1.2, so that folds spread."""
    return 1 + SPREAD * zlib.crc32(str(key).encode()) / 2**32


def fold_due(
    *, tail_bytes: int, tail_records: int, rewrite_bytes: int, limits: Limits, phase: float = 1.0
) -> bool:
    """Return whether a fold is worth its writing: O(1) of the log's bytes in the long run.

    >>> fold_due(tail_bytes=60_000, tail_records=9, rewrite_bytes=10, limits=Limits())
    False
    >>> fold_due(tail_bytes=70_000, tail_records=9, rewrite_bytes=10, limits=Limits())
    True
    """
    if tail_bytes >= LEAST_TAIL and tail_bytes >= limits.fold_ratio * rewrite_bytes * phase:
        return True
    # What is small to rewrite is folded by count too: many short records make an open slow.
    by_count = tail_records >= limits.fold_records * phase or tail_bytes >= MUCH_TAIL * phase
    return rewrite_bytes <= SMALL and by_count and limits.fold_ratio < inf


def fold_first(*, tail_bytes: int, tail_records: int, rewrite_bytes: int) -> bool:
    """Return whether to fold before another process that waits for the session gets it.

    A short tail is read sooner than it is folded; what was never folded is in no list.

    >>> fold_first(tail_bytes=2_000, tail_records=9, rewrite_bytes=1_000)
    False
    """
    return rewrite_bytes == 0 or tail_records > HOP_RECORDS or tail_bytes >= LEAST_TAIL


class OpenTail(msgspec.Struct, frozen=True):
    """An open session's log since the last fold, as far as memory has it, as of its newest record.

    With it a fold reads no records, and of the documents only those that it changes.
    """

    since: int
    """The record that the last fold was as of."""
    records: list[Record]
    """The records that documents other than the context need."""
    snapshot: bytes
    system_prompt: str
    counts: SessionCounts
    refers: bool = False
    """True if one of its messages refers to media in blobs."""


class PreparedFold(msgspec.Struct, frozen=True):
    """A fold ready to be written. Preparing it needs no lock: only the write excludes a save."""

    key: SessionKey
    blobs: Mapping[str, bytes]
    documents: Mapping[str, bytes]
    manifest: Manifest

    async def write(self, store: Store) -> Manifest:
        """Make it durable, the manifest last, and return the manifest.

        Raises:
            LeaseLostError: The epoch is not the newest any more.
            StoreError: The store could not write; nothing has changed.

        """
        # First: a document must not name a blob that is not durable.
        await put_blobs(store, self.key.blobs, self.blobs)
        await store.write_documents(self.key, self.documents, self.manifest)
        return self.manifest


async def prepare_fold(
    store: Store,
    key: SessionKey,
    *,
    epoch: int,
    upto: int,
    limits: Limits,
    mend: Collection[str] = (),
    tail: OpenTail | None = None,
) -> PreparedFold | None:
    """Compute a fold of everything up to a durable record; None for nothing to do.

    Damaged documents are rebuilt from the log; *mend* names those already known to be damaged.

    Raises:
        StoreError: The store could not be read.

    """
    if tail is not None and tail.since >= upto:
        return None
    # From memory, if the stored documents end where its tail begins; else from the log.
    read = None if tail is None or mend else await _read_around(store, key, upto, limits, tail)
    read = read or await _read_all(store, key, upto, limits, mend)
    if read is None:
        return None
    before, work, touched = read
    size = sum(len(record.payload) for record in work.records)
    size += sum(len(document.data) for document in work.old.values())
    size += 0 if tail is None else len(tail.snapshot)

    def compute() -> PreparedFold:
        changed = work.documents(touched)
        refers = refers_to_media(work.records) or (tail is not None and tail.refers)
        manifest = manifest_of(key, epoch, upto, before, changed, refers=refers)
        documents = {name: data for name, data in changed.items() if data is not None}
        return PreparedFold(key, work.blobs, documents, manifest)

    if size <= OFFLOAD:
        return compute()
    # It changes nothing, so a cancelled fold may leave the thread to itself.
    return await anyio.to_thread.run_sync(compute, abandon_on_cancel=True)


async def fold(
    store: Store, key: SessionKey, *, epoch: int, upto: int, limits: Limits
) -> Manifest | None:
    """Fold everything up to a durable record; return the new manifest, None for nothing to do.

    Raises:
        LeaseLostError: The epoch is not the newest any more.
        StoreError: The store could not read or write; nothing has changed.

    """
    prepared = await prepare_fold(store, key, epoch=epoch, upto=upto, limits=limits)
    return None if prepared is None else await prepared.write(store)


_Read: TypeAlias = "tuple[Manifest | None, FoldInput, set[str]]"
"""The manifest before a fold, its input, and the names of the documents that change."""


async def _read_around(
    store: Store, key: SessionKey, upto: int, limits: Limits, tail: OpenTail
) -> _Read | None:
    """Read the documents that a fold from memory changes; None if they are not as expected."""
    touched = {name for record in tail.records for name in names_of(record)}
    have = validated(await store.read_documents(key, {SESSION, *touched}), key)
    before = have.manifest
    # Another fold came between, or damage: the tail does not continue these documents.
    if have.damaged or (0 if before is None else before.as_of_seq) != tail.since:
        return None
    if before is not None and not _describes_agent(have.found.get(SESSION)):
        return None
    return before, FoldInput(key, have.found, tail.records, upto, limits, tail), touched


async def _read_all(
    store: Store, key: SessionKey, upto: int, limits: Limits, mend: Collection[str]
) -> _Read | None:
    """Read the records since the last fold, and the documents that they change."""
    have = validated(await store.read_documents(key, {SESSION, SNAPSHOT}), key)
    before = have.manifest
    if before is not None and before.as_of_seq >= upto:
        return None
    # Without these two the whole log is read.
    missing = before is None or bool(have.damaged) or have.found.keys() < {SESSION, SNAPSHOT}
    since = 0 if missing or before is None else before.as_of_seq
    records = await all_records(store.read_log(key, after=since, before=upto + 1))
    if not records:
        return None
    touched = {name for record in records for name in names_of(record)}
    touched |= {*have.damaged, *mend}
    await keep_evidence(store, key, have)
    old = dict(have.found)
    wanted = touched - {SESSION, SNAPSHOT}
    if before is not None and not _describes_agent(old.get(SESSION)):
        wanted |= _OF_AGENT & before.documents.keys()
    if wanted:
        more = validated(await store.read_documents(key, wanted), key)
        await keep_evidence(store, key, more)
        old.update(more.found)
        # A document that is rebuilt needs all records, not the newest alone.
        if more.damaged and since:
            records = await all_records(store.read_log(key, before=upto + 1))
    return before, FoldInput(key, old, records, upto, limits), touched


class FoldInput(msgspec.Struct):
    """A fold's pure part."""

    key: SessionKey
    old: Mapping[str, Document]
    records: list[Record]
    upto: int
    limits: Limits
    tail: OpenTail | None = None
    blobs: dict[str, bytes] = {}
    """Blobs that have to be durable before the documents that refer to them."""

    def documents(self, touched: set[str]) -> dict[str, bytes | None]:
        """Return the documents that changed; None for one that is dropped."""
        changed = {name: self._fold(name) for name in touched - {SESSION, SNAPSHOT}}
        if self.tail is None:
            context, counts = self._context(), None
            snapshot = context.snapshot(self.key.agent, self.key.session)
            parts = self._parts(system_prompt_of(context), changed)
        else:
            snapshot, counts = self.tail.snapshot, self.tail.counts
            parts = self._parts(self.tail.system_prompt, changed)
        session = self._data(SESSION)
        return {
            SESSION: fold_session(session, self.key, self._after(SESSION), parts, counts),
            SNAPSHOT: snapshot,
            **changed,
        }

    def _parts(self, system_prompt: str, changed: Mapping[str, bytes | None]) -> AgentParts:
        """Return what session.json says of an agent, as of now."""

        def state(name: str) -> bytes | None:
            """Return a state as JSON, empty where there is none; None if it was not looked at."""
            names = [
                document_name
                for document_name in (name, typed(name))
                if document_name in changed or document_name in self.old
            ]
            for document_name in names:
                data = (
                    changed[document_name]
                    if document_name in changed
                    else self._data(document_name)
                )
                if data is not None:
                    return data if document_name == name else bytes(decode(data, StateSet).value)
            return b"" if names else None

        carried = state(CARRIED)
        instructions = (
            None if carried is None else decode(carried or b"{}", ForeignFields).instructions
        )
        return AgentParts(
            system_prompt=system_prompt,
            instructions=instructions,
            tools=state(_TOOLS),
            permissions=state(_PERMISSIONS),
            config=state(_CONFIG),
        )

    def _fold(self, name: str) -> bytes | None:
        data, after = self._data(name), self._after(name)
        relevant = [record for record in after if name in names_of(record)]
        if name == MEMORY:
            document, self.blobs = split_memory(data, relevant)
            return document
        if name in {EPISODIC, SEMANTIC}:
            return fold_items(data, relevant)
        if name == LEDGER:
            return fold_ledger(data, relevant)
        if name == CHECKPOINTS:
            return fold_chain(data, relevant)
        return fold_state(name, data, relevant)

    def _context(self) -> WorkingContext:
        snapshot = stored_snapshot(self.old, self.key)
        context, since = cached_context(snapshot, self.limits.context_bytes)
        for record in self.records:
            if record.seq > since:
                context.feed(record.seq, record.kind, record.payload)
        context.seq = self.upto
        return context

    def _data(self, name: str) -> bytes | None:
        document = self.old.get(name)
        return None if document is None else document.data

    def _after(self, name: str) -> list[Record]:
        # Each document has its own number: a fold that was killed has written only some.
        document = self.old.get(name)
        since = 0 if document is None else document.as_of_seq
        return [record for record in self.records if record.seq > since]


def _describes_agent(session: Document | None) -> bool:
    return session is None or decode(session.data, WholeSessionDocument).describes_agent


def refers_to_media(records: Iterable[Record]) -> bool:
    """Return whether a record refers to media in blobs."""
    return any(
        record.kind in LIFTED_KINDS and holds_references(record.payload) for record in records
    )


def system_prompt_of(context: WorkingContext) -> str:
    """Return the system prompt that a context begins with, empty for none."""
    first = next(context.messages(), b"{}")
    decoded = decode(first)
    is_prompt = isinstance(decoded, dict) and decoded.get("role") == "system"
    return decode_message(first).text if is_prompt else ""


def manifest_of(
    key: SessionKey,
    epoch: int,
    upto: int,
    before: Manifest | None,
    changed: Mapping[str, bytes | None],
    *,
    refers: bool = False,
) -> Manifest:
    """Return the manifest after a fold: what did not change is as of now, too.

    A session whose messages refer to media is of format 2, which earlier releases refuse.
    """
    documents_before = {} if before is None else before.documents
    documents = {
        name: FoldedDocument(upto, document.sha256, document.size)
        for name, document in documents_before.items()
        if name not in changed
    }
    documents |= {
        name: FoldedDocument.of(upto, data) for name, data in changed.items() if data is not None
    }
    described = decode(changed[SESSION] or b"", SessionDocument)
    refers = refers or holds_references(changed.get(SNAPSHOT) or b"")
    return Manifest(
        format=max(2 if refers else 1, 1 if before is None else before.format),
        key=key,
        epoch=epoch,
        as_of_seq=upto,
        counters={"turns": described.turns, "messages": described.messages},
        documents=documents,
        about=described.about,
    )
