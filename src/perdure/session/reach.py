"""The blobs that a session reaches: one walk for all that copies, verifies or collects them.

A blob is reached from a record or a document, or through another blob. The forms that name one:

    the origin of a log        its history in segments, and the documents that it begins with
    memory.json                large values; the log has them, too, unless it was pruned
    checkpoints.jsonl          the states that callers gave: trees of chunks
    archives.json              an archive's pages, and the files' contents that they list
    messages                   large tool results, images and other media, large items of SDKs

A blob that one of these names has to be there. Any other string in the form of a name may be one of
an application's own: then the blob counts where it is there, and none is missed where it is not.
Blobs are read a few at a time, and come after those that they name.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final, TypeAlias, final

import msgspec
from msgspec import UNSET

from perdure._lib.tasks import each
from perdure.checkpoints.chain import CHAIN_KINDS, CheckpointChain, node_of
from perdure.errors import CorruptRecordError, FormatError
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import StateSet
from perdure.memory.index import MEMORY, MemoryEntry, MemoryIndex
from perdure.memory.ledger import LEDGER
from perdure.memory.working_memory import SessionValues
from perdure.records.archives import DOCUMENT as ARCHIVES, Archive, blobs_of, entry_of
from perdure.records.checkpoints import CHECKPOINTS, Checkpoint, ExplicitState
from perdure.records.chunks import fits, may_name, named_in
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocuments, Origin, origin_in
from perdure.records.media import LIFTED_KINDS, referred
from perdure.records.records import CONTEXT, FOREIGN, MESSAGE_KINDS, STATE, Record
from perdure.session.stored import followed
from perdure.store import Documents, Store

AT_ONCE: Final = 8
"""Number of blobs that are read, and in memory, at a time."""

RESULT: Final = b'tool_result_ref"'
CLAIM: Final = b'"claim":['
"""Part of the JSON of each large item of an SDK's."""


class BlobReference(msgspec.Struct, frozen=True):
    """A name of a blob, and what names it."""

    name: str
    by: str
    """Description of what needs the blob."""
    names: Callable[[bytes], Iterator[BlobReference]] | None = None
    """Gives what the blob itself names; None for nothing in a form of perdure's."""
    required: bool = True
    """False for a string that may as well be something else."""
    entry: MemoryEntry | None = None
    """The entry whose value it is: the log may have that, too."""

    @property
    def is_leaf(self) -> bool:
        """True if it is known to name no other blob."""
        return self.required and self.names is None


class ReachedBlob(msgspec.Struct, frozen=True):
    """A blob that a session reaches."""

    name: str
    by: str
    data: bytes | None
    """None if it is lost."""
    why: str = ""
    """Defect of the stored blob; empty if it is sound."""
    is_leaf: bool = False
    """True if it names no other one."""
    is_whole: bool = True
    """False if it, or anything that it names, is lost."""

    @property
    def is_lost(self) -> bool:
        """True if its bytes are nowhere."""
        return self.data is None

    def problem(self, key: SessionKey) -> str:
        """Return what is wrong, naming the session and what needs the blob."""
        return f"session {key}: blob {self.name} {self.why}, which {self.by} needs"


RESTORE: Final = "put it back from a copy of the store, or restore the session from a backup"
SALVAGE: Final = f"{RESTORE}; `perdure export ID --salvage` copies all that is left without it"


def lost_error(key: SessionKey, lost: Sequence[ReachedBlob], cure: str) -> CorruptRecordError:
    """Return the error for blobs of a session that are lost."""
    first = lost[0]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    return CorruptRecordError(
        f"{first.problem(key)}{more}: {cure}", key=str(key), blob=first.name, count=len(lost)
    )


@final
class Reach:
    """Collector of what a session's records and documents name; feed it the records, oldest first.

    Documents that are damaged are left out.
    """

    def __init__(self, store: Store, key: SessionKey, documents: Documents) -> None:
        self._store = store
        self._key = key
        self._documents = documents
        self._links: list[Record] = []
        self._archive_changes: list[StateSet] = []
        self._base: Origin | None = None
        self._messages: dict[str, BlobReference] = {}
        self._further: dict[str, int] = {}
        """Other strings in the form of a name, and the first record that has each."""

    def feed_run(self, records: Sequence[Record]) -> None:
        """Take in the next records; where none can name a blob, they are not looked at singly."""
        if not may_name([record.payload for record in records]):
            records = [record for record in records if record.kind in CHAIN_KINDS]
        for record in records:
            self.feed(record)

    def feed(self, record: Record) -> None:
        """Take the next record in.

        Raises:
            CorruptRecordError: It is damaged.

        """
        kind, payload = record.kind, record.payload
        if kind in CHAIN_KINDS:  # a state of a checkpoint that was pruned does not count
            self._links.append(record)
            return
        for reference in _in_messages(record):
            self._messages.setdefault(reference.name, reference)
        for name in named_in((payload,)):
            self._further.setdefault(name, record.seq)
        if (base := origin_in(record)) is not None:
            self._base = base
        elif kind == STATE and ARCHIVES.encode() in payload:
            change = decode(payload, StateSet)
            if change.name == ARCHIVES:
                self._archive_changes.append(change)

    async def blobs(
        self, skip: Container[str] = (), *, other: Store | None = None, leaves: bool = True
    ) -> AsyncGenerator[ReachedBlob, None]:
        """Yield each blob that is reached once, after those that it names.

        Names to skip are passed over, with all that is reached through them. The other store may
        have what this one has lost. Without *leaves*, blobs that name no other one are not read.

        Raises:
            CorruptRecordError: A document is damaged.
            StoreUnavailableError: The store cannot be reached.

        """
        walk = _Walk(self._store, self._key, skip, other, leaves=leaves)
        possible = [
            reference
            for name, document in self._documents.found.items()
            if name != CHECKPOINTS
            for reference in _possibly(document.data, name)
        ]
        possible += [
            BlobReference(name, f"record {seq}", required=False)
            for name, seq in self._further.items()
        ]
        for references in (await self._required(), possible):
            async with aclosing(walk.through(references)) as blobs:
                async for blob in blobs:
                    yield blob

    async def _required(self) -> list[BlobReference]:
        manifest, found = self._documents.manifest, self._documents.found
        folded_with = None if manifest is None else manifest.base
        references = [
            reference
            for base in (folded_with, self._base)
            if base is not None
            for reference in _of_origin(base)
        ]
        data: Mapping[str, bytes] = {name: document.data for name, document in found.items()}
        if manifest is None and self._base is not None:  # it begins with those of its origin
            data = await self._begun_with(self._base)
        references += _of_memory(data.get(MEMORY)) if manifest is not None else ()
        references += _of_snapshot(data.get(SNAPSHOT))
        chain = CheckpointChain.of(data.get(CHECKPOINTS), self._links)
        for checkpoint in chain.by_id.values():
            references += state_blobs(checkpoint)
        references += _of_archives(data.get(ARCHIVES), self._archive_changes)
        references += _media(data.get(LEDGER) or b"", LEDGER)
        references += self._messages.values()
        return references

    async def _begun_with(self, base: Origin) -> dict[str, bytes]:
        """Return the documents of an origin that list blobs; what is lost is found by the walk."""
        data: dict[str, bytes] = {}
        try:
            listed = await self._store.get_blob(self._key.blobs, base.folded)
            documents = {} if listed is None else decode(listed, FoldedDocuments).documents
            for name in documents.keys() & {CHECKPOINTS, ARCHIVES}:
                blob = await self._store.get_blob(self._key.blobs, documents[name].sha256)
                data |= {} if blob is None else {name: blob}
        except FormatError:
            pass
        return data


async def reach_of(
    store: Store, key: SessionKey, documents: Documents, records: AsyncGenerator[Record, None]
) -> Reach:
    """Return the reach of a session, after all of its records."""
    reach = Reach(store, key, documents)
    async with aclosing(records):
        async for record in records:
            reach.feed(record)
    return reach


class _Open(msgspec.Struct, frozen=True):
    """A blob, until all that it names has been seen."""

    blob: ReachedBlob
    names: list[str]


@final
class _Walk:
    def __init__(
        self,
        store: Store,
        key: SessionKey,
        skip: Container[str],
        other: Store | None,
        *,
        leaves: bool,
    ) -> None:
        self._leaves = leaves
        self._store = store
        self._other = other
        self._key = key
        self._skip = skip
        self._looked: set[str] = set()
        self._absent: set[str] = set()
        """Names of nothing, as long as nothing requires them."""
        self._broken: set[str] = set()
        """Names of blobs that are not whole."""

    async def through(self, references: list[BlobReference]) -> AsyncGenerator[ReachedBlob, None]:
        """Yield the blobs of references, each after those that it names."""
        stack: list[BlobReference | _Open] = [*reversed(references)]
        while stack:
            # These are read at once. What they name is put on top of the stack, and so comes before
            # them.
            some: list[BlobReference] = []
            while stack and len(some) < AT_ONCE:
                top = stack.pop()
                if isinstance(top, _Open):
                    if some:  # what it names comes first
                        stack.append(top)
                        break
                    yield self._closed(top)
                elif not self._is_known(top):
                    self._looked.add(top.name)
                    some.append(top)
            for reference, blob in await self._read(some):
                if blob is None:
                    # Nothing requires it so far: a later reference may.
                    self._looked.discard(reference.name)
                    self._absent.add(reference.name)
                else:
                    below = _below(reference, blob)
                    stack.append(_Open(blob, [named.name for named in below]))
                    stack += below

    def _closed(self, opened: _Open) -> ReachedBlob:
        """Return a blob when all that it names has been seen."""
        blob = opened.blob
        if not blob.is_lost and self._broken.isdisjoint(opened.names):
            return blob
        self._broken.add(blob.name)
        return msgspec.structs.replace(blob, is_whole=False)

    def _is_known(self, reference: BlobReference) -> bool:
        name = reference.name
        is_absent = not reference.required and name in self._absent
        return is_absent or name in self._looked or name in self._skip

    async def _read(
        self, some: list[BlobReference]
    ) -> list[tuple[BlobReference, ReachedBlob | None]]:
        blobs: dict[str, ReachedBlob | None] = {}

        async def read(reference: BlobReference) -> None:
            blobs[reference.name] = await self._blob(reference)

        await each(some, read, at_once=AT_ONCE)
        return [(reference, blobs[reference.name]) for reference in reversed(some)]

    async def _blob(self, reference: BlobReference) -> ReachedBlob | None:
        """Return a blob, None for a string that names none."""
        name = reference.name
        if reference.is_leaf and not self._leaves:
            return ReachedBlob(name, reference.by, b"", is_leaf=True)
        data, why = await self._get(self._store, name)
        if data is not None:
            return ReachedBlob(name, reference.by, data, is_leaf=reference.is_leaf)
        if self._other is not None:
            data, _ = await self._get(self._other, name)
        if data is None and not reference.required and why == "is missing":
            return None
        if data is None and reference.entry is not None:
            data = await self._in_log(reference.entry)
            if data is not None and not self._store.capabilities.blobs:
                return None  # where it is meant to be
        return ReachedBlob(name, reference.by, data, why, reference.is_leaf)

    async def _get(self, store: Store, name: str) -> tuple[bytes | None, str]:
        """Return a blob, or None and what is wrong with it."""
        try:
            data = await store.get_blob(self._key.blobs, name)
        except CorruptRecordError:
            return None, "is damaged"
        if data is None:
            return None, "is missing"
        return (data, "") if fits(name, data) else (None, "is damaged")

    async def _in_log(self, entry: MemoryEntry) -> bytes | None:
        try:
            return await SessionValues(followed(self._store), self._key).read(entry)
        except CorruptRecordError:
            return None


def _below(reference: BlobReference, blob: ReachedBlob) -> list[BlobReference]:
    """Return what a blob names, in reverse; a damaged one names nothing that is known."""
    if blob.data is None:
        return []
    below: list[BlobReference] = []
    if reference.names is not None:
        try:
            below += reference.names(blob.data)
        except FormatError:  # another release's form, whose bytes are sound
            below = []
    if not below:
        below += _possibly(blob.data, reference.by)
    return below[::-1]


# The forms that name blobs


_Below: TypeAlias = Iterator[BlobReference]


def _possibly(data: bytes, by: str) -> _Below:
    for name in sorted(named_in((data,))):
        yield BlobReference(name, by, required=False)


class _Payload(msgspec.Struct):
    perdure_tool_result_ref: Any = None
    tool_result_ref: Any = None
    """Its name before perdure's own fields had a prefix."""


class _StoredClaim(msgspec.Struct):
    claim: list[str] = []


class _StoredMessage(msgspec.Struct):
    tool_payload: _Payload | None = None
    perdure_foreign: _StoredClaim | None = None
    """An SDK's item; a large one is in blobs."""


class _StoredContext(msgspec.Struct):
    messages: list[msgspec.Raw] = []


def _in_messages(record: Record) -> _Below:
    """Give the blobs that a record's messages refer to."""
    kind, payload, seq = record.kind, record.payload, record.seq
    if kind in LIFTED_KINDS:
        yield from _media(payload, f"record {seq}")
    if RESULT not in payload and CLAIM not in payload:
        return
    if kind == FOREIGN:
        with suppress(FormatError):  # another program's
            for name in decode(payload, _StoredClaim).claim:
                yield BlobReference(name, f"the value of record {seq}")
    if kind in MESSAGE_KINDS:
        messages = [payload]
    else:
        stored = decode(payload, _StoredContext).messages if kind == CONTEXT else []
        messages = [bytes(message) for message in stored]
    for message in messages:
        for name in message_blobs(message):
            yield _of_message(name, seq)


def _media(data: bytes, where: str) -> _Below:
    for medium in referred(data):
        yield BlobReference(medium.name, f"the {medium.type} of {where}")


def message_blobs(payload: bytes) -> Iterator[str]:
    """Give the names of the blobs that a stored message refers to."""
    if RESULT not in payload and CLAIM not in payload:
        return
    try:
        message = decode(payload, _StoredMessage)
    except FormatError:  # another library's field
        return
    if message.perdure_foreign is not None:
        yield from message.perdure_foreign.claim
    stored = message.tool_payload
    if stored is not None:
        for named in (stored.perdure_tool_result_ref, stored.tool_result_ref):
            name = named.get("sha256") if isinstance(named, dict) else None
            if isinstance(name, str) and name:
                yield name


def _of_message(name: str, seq: int) -> BlobReference:
    return BlobReference(name, f"the tool result of record {seq}")


def _of_snapshot(data: bytes | None) -> _Below:
    if data is None:
        return
    yield from _media(data, SNAPSHOT)
    if RESULT not in data and CLAIM not in data:
        return
    snapshot = decode(data, Snapshot)
    for place, message in enumerate(snapshot.messages):
        seq = (snapshot.message_seqs or [snapshot.seq] * len(snapshot.messages))[place]
        for name in message_blobs(bytes(message)):
            yield _of_message(name, seq)


def _of_memory(data: bytes | None) -> _Below:
    for entry in MemoryIndex.of_document(data).entries.values():
        if entry.sha256 is not UNSET:
            yield BlobReference(entry.sha256, f"memory key {entry.key!r}", entry=entry)


def state_blobs(checkpoint: Checkpoint) -> _Below:
    """Give the root of a checkpoint's state, if it is in blobs."""
    state = checkpoint.state
    if isinstance(state, ExplicitState) and state.root:
        by = f"the state of checkpoint {checkpoint.id} ({checkpoint.label!r})"
        yield _node(state.root, by)


def _node(name: str, by: str) -> BlobReference:
    def below(data: bytes) -> _Below:
        node = node_of(data)
        for chunk in node.below:
            yield _node(chunk.name, by) if node.level > 1 else BlobReference(chunk.name, by)

    return BlobReference(name, by, below)


def _of_archives(document: bytes | None, changes: list[StateSet]) -> _Below:
    archives: dict[str, Any] = {} if document is None else decode(document)
    for change in changes:
        value = {} if change.dropped else decode(bytes(change.value)) or {}
        archives = {**archives, **value} if change.partial else value
        archives = {name: archives[name] for name in archives if name not in change.gone}
    for raw in archives.values():
        archive = msgspec.convert(raw, Archive)
        by = f"archive {archive.id}"
        for page in archive.pages:
            yield BlobReference(page, by, partial(_of_page, by=by))


def _of_page(data: bytes, by: str) -> _Below:
    for line in data.splitlines():
        for name in blobs_of(entry_of(line, by)):
            yield BlobReference(name, by)


def _of_origin(base: Origin) -> _Below:
    if base.kept:
        yield BlobReference(base.kept, f"the history up to record {base.at}", _whatever)
    if base.folded:
        was = f"what the session was at record {base.cut or base.at}"
        yield BlobReference(base.folded, was, _of_folded)


def _whatever(_: bytes) -> _Below:
    """Give nothing: any string in the form of a name counts, where the blob is there."""
    yield from ()


def _of_folded(data: bytes) -> _Below:
    documents = decode(data, FoldedDocuments)
    for name, listed in documents.documents.items():
        by = f"{name} of record {documents.as_of_seq}"
        yield BlobReference(listed.sha256, by, partial(_of_document, name=name))


def _of_document(data: bytes, name: str) -> _Below:
    if name == MEMORY:
        yield from _of_memory(data)
    elif name == SNAPSHOT:
        yield from _of_snapshot(data)
    elif name == LEDGER:
        yield from _media(data, LEDGER)
    if name != CHECKPOINTS:
        yield from _possibly(data, name)
