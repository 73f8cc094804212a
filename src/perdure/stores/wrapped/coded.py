"""Base of the stores that keep content in another form: encrypted, or compressed.

Content is what people or programs wrote: payloads, documents and their names, blobs, posts, dead
letters, titles, owners, tags. Each call that carries some is encoded or decoded here, once; a call
that carries none is inherited. The inner store sees keys, seqs, epochs, kinds, group ends, times
and counters; leases and fencing are its own.

Large amounts are encoded in a thread; cancellation behaves as in the inner store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec

from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    InvalidArgumentError,
    LeaseLostError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.memory.documents import SESSION
from perdure.records.chunks import is_hash, verified
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey, SessionTenant
from perdure.records.manifest import FoldedDocument, Manifest, lease_lost, too_large
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import (
    ALL,
    Batch,
    Beginning,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Document,
    Documents,
    Held,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    RestoreData,
    SessionInfo,
    SessionQuery,
    Status,
    Store,
    SupportsBeginAppend,
    SupportsRestore,
    Taken,
    Terms,
    first_record,
    shortcut,
)
from perdure.stores.delegate import DelegatingStore
from perdure.stores.wrapped.chain import ChainReader, ManifestProof, ReadRequest
from perdure.stores.wrapped.manifests import (
    HiddenManifest,
    inner_documents,
    read_hidden,
    restore_documents,
    restore_info,
    sealed_labels,
    transform_document,
    unproven_end,
    unproven_tail,
    with_hidden,
)
from perdure.stores.wrapped.transform import (
    LARGE,
    Transform,
    in_thread_if_large,
    require_hashed,
    restore_item,
    restore_letter,
    restore_records,
    transform_batch,
    transform_item,
    transform_letter,
)

T = TypeVar("T")

Encoder = Callable[[Batch], Batch]

_WITHOUT_CONTENT = frozenset(
    {"connection_pool", "local_path", "open_read_only", "watch_connections"}
)
"""Members that a backend may have besides the port, and no content passes through."""


def require_store(store: Store, wrapper: str) -> None:
    """Refuse what is no store object, such as a URL.

    Raises:
        InvalidArgumentError: It is none.

    """
    given: object = store
    if not hasattr(given, "append_many"):
        raise InvalidArgumentError(
            f"{wrapper} got a {type(given).__name__} in place of a store: give a store object, "
            "such as SqliteStore('agents.db'); a URL goes to connect, as "
            "'encrypted+sqlite:///agents.db' or with ?compression=zstd",
            option="store",
        )


def max_restored_bytes(store: Store) -> int:
    """Return the largest size of a restored record or inbox item, in bytes."""
    return max(store.capabilities.max_record_bytes, MAX_RECORD_BYTES)


class CodedStore(DelegatingStore, ABC):
    """Base of the stores that encode content; see the module.

    Subclasses give the transforms of sessions and tenants. Those with keys also say what proves a
    manifest and links a log; by default nothing does, and nothing is kept in the inner store.

    Args:
        store: The inner store.
        max_payload: The largest payload that the inner store accepts encoded, in bytes.

    """

    _kind: str
    """A word for the encoding, as part of the location."""
    _hidden_agent: str | None = None
    """An agent id that is used for the store's own sessions."""
    _accepts_plain: bool = False
    """True if what was stored without this is read unchanged."""

    def __init__(self, store: Store, max_payload: int) -> None:
        super().__init__(store)
        self._max_payload = max_payload
        self._direct = shortcut(store, SupportsBeginAppend)
        self._restoring = shortcut(store, SupportsRestore)

    def __getattr__(self, name: str) -> Any:
        # Anything else, such as a folder for plain files, would pass by what is encoded here.
        if name in _WITHOUT_CONTENT:
            return getattr(self.inner, name)
        raise AttributeError(name)

    # Hooks for subclasses.

    @abstractmethod
    async def _transform(self, key: SessionKey, data: bytes = b"") -> Transform | None:
        """Return a session's transform, which can restore ``data``; None if it has none."""

    @abstractmethod
    async def _shared_transform(self, tenant: str, *, create: bool) -> Transform | None:
        """Return the transform of what a tenant's sessions share; None if it has none."""

    @abstractmethod
    def _cached_transform(self, key: SessionKey) -> Transform | None:
        """Return a session's transform without awaiting; None if that is not possible."""

    def _encoder(self, batch: Batch) -> Encoder | None:
        """Return what encodes a batch, without awaiting; None if that is not possible."""
        transform = self._cached_transform(batch.key)
        return None if transform is None else lambda batch: transform_batch(transform, batch)

    async def _prepare(self, batch: Batch) -> None:
        """Read what the encoder of a batch needs."""

    def _note_refused(self, batch: Batch) -> None:
        """Note that the log will never accept a batch."""

    async def _require_readable(self, key: SessionKey) -> object:
        """Raise if a session could not be read; return what `_begin` needs not read again."""

    async def _begin(self, taken: Taken, known: object, new: Beginning) -> bool:
        """Prepare a session that was just taken; return whether its manifest is another one now.

        A *new* one is as the terms say, with its labels as they are.
        """
        return False

    async def _chain_reader(
        self, key: SessionKey, request: ReadRequest, records: Sequence[Record]
    ) -> ChainReader | None:
        """Return the verifier of a log that begins with ``records``; None without chain."""
        return None

    def _note_end(self, key: SessionKey, reader: ChainReader) -> None:
        """Remember the link after a log's last record."""

    async def _prove(self, manifest: Manifest) -> ManifestProof | None:
        """Return the proof of a manifest; None if the session has no hash chain."""
        return None

    def _note_fold(self, manifest: Manifest, proof: ManifestProof) -> None:
        """Remember a fold that is durable."""

    async def _hidden_part(
        self, key: SessionKey, manifest: Manifest | None
    ) -> tuple[HiddenManifest | None, str]:
        """Return a manifest's hidden part, and why it must not be used, empty if it may."""
        if manifest is None:
            return None, ""
        return read_hidden(manifest, await self._of_tenant(key.tenant)), ""

    async def _distrust(self, key: SessionKey, holder: LeaseState | None) -> None:
        """Look for a session's key again, and forget what its manifest proved, unless held here."""

    def _is_own(self, name: str) -> bool:
        """Return whether a document of this name is not the engine's."""
        return False

    def _new_own_documents(self, key: SessionKey) -> dict[str, bytes]:
        """Return such documents for a session whose manifest lost them; its transform is cached."""
        return {}

    # The store.

    @property
    def capabilities(self) -> Capabilities:
        """The inner store's, with a smaller limit for records."""
        return msgspec.structs.replace(self.inner.capabilities, max_record_bytes=self._max_payload)

    @property
    def location(self) -> str:
        """The inner store's location, and what this does."""
        return f"{self.inner.location} ({self._kind})"

    async def _of_session(self, key: SessionKey, data: bytes = b"") -> Transform:
        transform = await self._transform(key, data)
        if transform is None:
            raise CorruptRecordError(
                f"the data key of {key} is missing, but data encrypted with it exists: restore its "
                "documents from a copy",
                key=str(key),
            )
        return transform

    async def _of_tenant(self, tenant: str) -> Transform:
        transform = await self._shared_transform(tenant, create=True)
        assert transform is not None  # it was created
        return transform

    # The log.

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        prepared = [await self._prepared(batch) for batch in batches]
        size = sum(len(entry.payload) for batch in batches for entry in batch.records)

        def encode_all() -> list[Batch | Outcome]:
            return [one if isinstance(one, Outcome) else one() for one in prepared]

        results = await in_thread_if_large(size, encode_all)
        encoded = [result for result in results if isinstance(result, Batch)]
        outcomes = await self.inner.append_many(encoded) if encoded else []
        self._note_outcomes(encoded, outcomes)
        remaining = iter(outcomes)
        return [result if isinstance(result, Outcome) else next(remaining) for result in results]

    def begin_append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> bool:
        """Append without a task, if the inner store can and no key or link has to be read first."""
        if self._direct is None:
            return False
        encoded: list[Batch] = []
        size = 0
        for batch in batches:
            encode = self._encoder(batch)
            with suppress(PerdureError):  # `append_many` says what is wrong
                size += self._require_fit(batch)
                # Labels are sealed by the tenant's key, which may have to be read.
                if encode is not None and size < LARGE and batch.about is None:
                    encoded.append(encode(batch))
                    continue
            return False

        def answered(outcomes: Sequence[Outcome]) -> None:
            self._note_outcomes(encoded, outcomes)
            done(outcomes)

        return self._direct.begin_append(encoded, answered)

    def _note_outcomes(self, encoded: Sequence[Batch], outcomes: Sequence[Outcome]) -> None:
        for batch, outcome in zip(encoded, outcomes, strict=False):
            if outcome.status is Status.PERMANENT:
                self._note_refused(batch)

    async def _prepared(self, batch: Batch) -> Callable[[], Batch] | Outcome:
        """Return what encodes a batch, with its labels sealed; or why it cannot be."""
        key = batch.key
        try:
            self._require_fit(batch)
            await self._prepare(batch)
            if (encode := self._encoder(batch)) is None:
                raise lease_lost(key, batch.epoch)
            if batch.about is not None:
                about = sealed_labels(key, batch.about, await self._of_tenant(key.tenant))
                batch = msgspec.structs.replace(batch, about=about)
            return partial(encode, batch)
        except LeaseLostError as error:
            return Outcome(Status.CONFLICT, error)
        except StoreUnavailableError as error:
            return Outcome(Status.TRANSIENT, error)
        except PerdureError as error:
            return Outcome(Status.PERMANENT, error)

    def _require_fit(self, batch: Batch) -> int:
        sizes = [len(entry.payload) for entry in batch.records]
        self._require_size(batch.key, "a record of", sizes)
        if EPOCH in [entry.kind for entry in batch.records]:
            raise NotStorableError(
                f"records of the kind {EPOCH!r} are the store's own: choose another",
                key=str(batch.key),
            )
        return sum(sizes)

    def _require_size(self, key: SessionKey, what: str, sizes: Sequence[int]) -> None:
        """Refuse payloads above the limit for restored ones, however well they compress."""
        largest = max(sizes, default=0)
        if largest > self._max_payload:
            raise too_large(key, largest, self._max_payload, what)

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records; with a hash chain, each is given once the chain proves it."""
        request = ReadRequest(after, before, limit, reverse)
        life, newest = None, 0
        while True:
            try:
                async with aclosing(self._read_log(key, request)) as chunks:
                    async for chunk in chunks:
                        newest = max([newest, *(record.epoch for record in chunk.records)])
                        yield chunk
                return
            except CorruptRecordError:
                # The session may have been deleted, or begun again, between its records and the
                # key and manifest that they are read by: only what is so in one life is damage.
                if newest and await self._has_ended(key, newest):
                    return  # as a log that goes while it is read ends elsewhere
                looked_at, life = life, await self._looked_at_again(key)
                if newest or looked_at == life:
                    raise

    async def _has_ended(self, key: SessionKey, epoch: int) -> bool:
        """Return whether a session with records of this epoch is gone, or has begun again."""
        first = await first_record(self.inner.read_log(key, limit=1))
        return first is None or first.epoch > epoch

    async def _looked_at_again(self, key: SessionKey) -> LeaseState | None:
        """Return the holder of a session of which nothing that was read before counts any more."""
        holder = await self.inner.holder(key)
        await self._distrust(key, holder)
        return holder

    async def _read_log(
        self, key: SessionKey, request: ReadRequest
    ) -> AsyncGenerator[LogChunk, None]:
        after, before, limit, reverse = request
        chunks = self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        reader: ChainReader | None = None
        settled, is_first = True, True
        async with aclosing(chunks):
            async for chunk in chunks:
                settled = settled and chunk.settled
                if is_first and chunk.records:
                    is_first = False
                    reader = await self._chain_reader(key, request, chunk.records)
                if reader is None:
                    records = await self.restore_session_records(key, chunk.records)
                    yield LogChunk(records, chunk.settled)
                elif proven := await reader.verify(chunk.records):
                    yield LogChunk(tuple(proven), settled)
        if is_first:
            reader = await self._chain_reader(key, request, ())
        if reader is not None:
            pending = await reader.finish()
            if not reverse and before is None and limit is None:
                self._note_end(key, reader)
            if pending or not settled:
                yield LogChunk(tuple(pending), settled)

    async def restore_session_records(
        self, key: SessionKey, records: Sequence[Record]
    ) -> tuple[Record, ...]:
        """Return the original records of encoded ones that have no link hashes.

        Raises:
            ConfigError: None of the given master keys decrypts them.
            CorruptRecordError: A record is damaged or belongs to another place.

        """
        payloads = [record.payload for record in records if record.kind != EPOCH]
        if not payloads:
            return tuple(records)
        transform = await self._of_session(key, payloads[0])
        size = sum(map(len, payloads))
        return await in_thread_if_large(size, lambda: restore_records(transform, records))

    def transform_spill(
        self, key: SessionKey, epoch: int, base: int, entries: Sequence[Entry]
    ) -> tuple[Entry, ...] | None:
        """Encode the entries of a spill file at shutdown, without awaiting.

        Returns None if the session's data key is not cached: plain text must not be spilled.
        """
        transform = self._cached_transform(key)
        if transform is None:
            return None
        return transform_batch(transform, Batch(key, epoch, base + 1, tuple(entries))).records

    # Documents.

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        async def read() -> tuple[Documents, bool]:
            stored = await self._stored_names(key, names)
            inner = await self.inner.read_documents(key, stored)
            have = await self._decoded(key, inner)
            listed = () if have.manifest is None else have.manifest.documents
            # Listed, but looked for by a name that the key of an earlier life has hidden.
            missed = {*(names or ())}.intersection(listed) - {*have.found, *have.damaged}
            return have, bool(missed) or len(have.damaged) > len(inner.damaged)

        return await self._in_one_life(key, read)

    async def read_for_restore(
        self, key: SessionKey, names: Collection[str] | None = None, *, newest: int = 0
    ) -> RestoreData:
        """Read documents, and if the inner store can, the log after them."""
        restoring = self._restoring
        if restoring is None:
            return RestoreData(await self.read_documents(key, names))

        async def read() -> tuple[RestoreData, bool]:
            stored = await self._stored_names(key, names)
            inner = await restoring.read_for_restore(key, stored)
            have = await self._decoded_all(key, inner)
            return have, len(have.documents.damaged) > len(inner.documents.damaged)

        return await self._in_one_life(key, read)

    async def _in_one_life(
        self, key: SessionKey, read: Callable[[], Awaitable[tuple[T, bool]]]
    ) -> T:
        """Read again what cannot be decoded, unless nothing has happened to the session meanwhile.

        It may have been deleted, or begun again, between its documents and the key that they are
        decoded by: only what is so in one life is damage.
        """
        life = None
        while True:
            looked_at = life
            try:
                have, is_doubtful = await read()
                life = await self._looked_at_again(key) if is_doubtful else looked_at
                if looked_at == life:
                    return have
            except CorruptRecordError:
                life = await self._looked_at_again(key)
                if looked_at == life:
                    raise

    async def _decoded_all(self, key: SessionKey, data: RestoreData) -> RestoreData:
        """Return what a restore needs; the log has to be read if what was read of it is no use."""
        have, records = await self._decoded(key, data.documents), None
        if data.records is not None and have.log_after == data.after:
            with suppress(CorruptRecordError):  # reading the log shows what is wrong
                records = await self._decoded_tail(key, data.after, data.records)
        return msgspec.structs.replace(data, documents=have, records=records)

    async def _decoded_tail(
        self, key: SessionKey, after: int, records: Sequence[Record]
    ) -> tuple[Record, ...]:
        reader = await self._chain_reader(key, ReadRequest(after, None, None, False), records)
        if reader is None:
            return await self.restore_session_records(key, records)
        proven = (*await reader.verify(records), *await reader.finish())
        self._note_end(key, reader)
        return proven

    async def _stored_names(
        self, key: SessionKey, names: Collection[str] | None
    ) -> Collection[str] | None:
        """Return under which names documents may be stored: those of before were not hidden."""
        if names is None or not any("/" in name for name in names):
            return names
        transform = await self._transform(key)
        return names if transform is None else {*names, *map(transform.stored_name, names)}

    async def _plain_names(self, key: SessionKey, stored: Iterable[str]) -> dict[str, str]:
        """Return the engine's names of documents, by those that they are stored under."""
        names = [name for name in stored if not self._is_own(name)]
        if not any("/" in name for name in names) or not (transform := await self._transform(key)):
            return dict(zip(names, names, strict=True))
        return {name: transform.plain_name(name) for name in names}

    async def _decoded(self, key: SessionKey, inner: Documents) -> Documents:
        """Return documents as the engine wrote them; all are damaged under a forged manifest."""
        manifest, cut = inner.manifest, inner.cut
        hidden, forged = await self._hidden_part(key, manifest)
        listed = {} if manifest is None else manifest.documents
        if not forged and manifest is not None and (hidden is None or hidden.is_begun):
            # It was never folded through this store.
            is_plain = self._accepts_plain and not any(map(self._is_own, listed))
            return inner if is_plain else Documents(cut=cut)
        wrong = (*(listed if forged else ()), *inner.damaged)
        plain = await self._plain_names(key, dict.fromkeys((*wrong, *inner.found, *inner.remains)))
        readable = {plain[n]: document for n, document in inner.found.items() if n in plain}
        restored: dict[str, Document] = {}
        if readable and hidden is not None and not forged:
            transform = await self._of_session(key, next(iter(readable.values())).data)
            restored = await in_thread_if_large(
                sum(len(document.data) for document in readable.values()),
                lambda: restore_documents(transform, readable, hidden),
            )
        lost = {name: item.data for name, item in readable.items() if name not in restored}
        remains = {plain[n]: data for n, data in inner.remains.items() if n in plain} | lost
        damaged = dict.fromkeys([*(plain[name] for name in wrong if name in plain), *lost])
        if forged and not damaged:
            damaged[SESSION] = None
        outer = None
        if manifest is not None and hidden is not None and not forged:
            outer = msgspec.structs.replace(
                manifest, documents=hidden.documents, about=hidden.about
            )
        return Documents(
            outer,
            restored,
            tuple(damaged),
            why=dict.fromkeys(damaged, forged) if forged else {},
            remains={name: data for name, data in remains.items() if name in damaged},
            unproven_tail=unproven_tail(key, unproven_end(hidden), forged) or inner.unproven_tail,
            cut=cut,
        )

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        if reserved := sorted(filter(self._is_own, manifest.documents)):
            raise NotStorableError(
                f"documents named like {reserved[0]} are this store's own: choose another name",
                key=str(key),
                documents=reserved,
            )
        before = (await self.inner.read_documents(key, ())).manifest
        transform = await self._transform(key)
        if transform is None:
            raise lease_lost(key, manifest.epoch, 0)
        listed = {} if before is None else before.documents
        as_of = manifest.as_of_seq
        own = {
            name: msgspec.structs.replace(entry, as_of_seq=as_of)
            for name, entry in listed.items()
            if self._is_own(name)
        }
        new_own = {} if own else self._new_own_documents(key)
        own |= {name: FoldedDocument.of(as_of, data) for name, data in new_own.items()}
        tenant = await self._of_tenant(key.tenant)
        names = {name: transform.stored_name(name) for name in manifest.documents}
        plain = {name: documents[name] for name in documents if name in names}
        proof = await self._prove(manifest)

        def encode_all() -> dict[str, bytes]:
            return {
                names[name]: transform_document(
                    transform, name, data, manifest.documents[name], proof
                )
                for name, data in plain.items()
            }

        written = await in_thread_if_large(sum(map(len, plain.values())), encode_all)
        # Names were not hidden before: those documents are stored again.
        shown = [n for n in names if n != names[n] and n in listed and n not in plain]
        old = (await self.inner.read_documents(key, shown)).found if shown else {}
        written |= {names[name]: document.data for name, document in old.items()}
        stored = inner_documents(manifest, names, written, listed) | own
        hidden = HiddenManifest(manifest.about, manifest.documents, proof)
        inner = with_hidden(msgspec.structs.replace(manifest, documents=stored), hidden, tenant)
        await self.inner.write_documents(key, written | new_own, inner)
        if proof is not None:
            self._note_fold(manifest, proof)

    # Blobs: those of a session under its own transform, if it has one; a tenant's under the shared.

    async def _blob_transform(self, tenant: str, *, create: bool) -> Transform | None:
        """Return the transform of new blobs; None if there is none."""
        return await self._shared_transform(tenant, create=create)

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await in_thread_if_large(sum(map(len, blobs.values())), lambda: require_hashed(blobs))
        if not blobs:
            return
        transform = await self._blob_transform(tenant, create=True)
        assert transform is not None  # it was created

        def encode_all() -> dict[str, bytes]:
            return {
                transform.inner_name(name): transform.transform(("blob", name), data)
                for name, data in blobs.items()
            }

        size = sum(map(len, blobs.values()))
        await self.inner.put_blobs(str(tenant), await in_thread_if_large(size, encode_all))

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, restored and verified against its name; None if there is none."""
        transform = await self._blob_transform(tenant, create=False)
        if transform is not None:
            data = await self.inner.get_blob(str(tenant), transform.inner_name(name))
            if data is not None:
                place = ("blob", name)
                return await in_thread_if_large(
                    len(data), lambda: verified(name, transform.restore(place, data))
                )
        return await self.inner.get_blob(str(tenant), name) if self._accepts_plain else None

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        inner = await self._inner_names(tenant, reachable)
        looked_at = None if among is None else await self._inner_names(tenant, among)
        return await self.inner.sweep(str(tenant), inner, older_than, among=looked_at)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        transform = await self._blob_transform(tenant, create=False)
        missing = set(names)
        if transform is not None:
            inner = {transform.inner_name(name): name for name in names}
            missing = {inner[name] for name in await self.inner.renew(str(tenant), list(inner))}
        return await self.inner.renew(str(tenant), missing) if self._accepts_plain else missing

    async def blob_names(self, tenant: str) -> list[str]:
        """List a session's blobs; or a tenant's, and those of its sessions as they are stored."""
        transform = await self._blob_transform(tenant, create=False)
        names: set[str] = set()
        for inner in await self.inner.blob_names(str(tenant)):
            if is_hash(inner):
                names |= {inner} if self._accepts_plain else set()
            elif transform is not None and (name := transform.outer_name(inner)) is not None:
                names.add(name)
            elif not isinstance(tenant, SessionTenant):
                names.add(inner)
        return sorted(names)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        return await self.inner.remove_blobs(str(tenant), await self._inner_names(tenant, names))

    async def _inner_names(self, tenant: str, names: Collection[str]) -> list[str]:
        """Return what blobs of these names, as `blob_names` lists them, may be stored under."""
        transform = await self._blob_transform(tenant, create=False)
        stored = [name for name in names if not is_hash(name) or self._accepts_plain]
        if transform is not None:
            stored += [transform.inner_name(name) for name in names if is_hash(name)]
        return stored

    # Leases.

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Return the lease's state; None for the store's own sessions."""
        return None if key.agent == self._hidden_agent else await self.inner.holder(key)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        """Take a session that this store can read and write, and what the terms name of it."""
        if key.agent == self._hidden_agent:
            raise ConfigError(
                f"the agent id {key.agent!r} is this store's own: choose another",
                option="agent id",
                value=key.agent,
            )
        # Before the lease: what cannot be read is not taken from its holder, nor begun.
        begins = terms.after == 0 or terms.set_aside
        known = None if begins else await self._require_readable(key)
        transform = await self._of_tenant(key.tenant)
        names = await self._stored_names(key, terms.names)
        new = terms.beginning
        if new.about is not None:
            about = sealed_labels(key, new.about, transform)
            new = msgspec.structs.replace(new, about=about)
        inner = msgspec.structs.replace(
            terms, names=None if names is None else frozenset(names), beginning=new
        )
        taken = await self.inner.acquire(key, inner)
        if isinstance(taken, Held):
            return taken
        try:
            is_changed = await self._begin(taken, known, terms.beginning)
            found = taken.found
            # A new session has its epoch record, and nothing that has to be decoded.
            if found is not None and not taken.created:
                if terms.names == frozenset():
                    found = msgspec.structs.replace(found, records=None)
                found = None if is_changed else await self._decoded_all(key, found)
        except BaseException as error:  # the caller never learns of the lease: release it here
            holder = None
            with anyio.CancelScope(shield=True):
                with suppress(PerdureError):
                    holder = await self.inner.holder(key)
                with suppress(PerdureError):
                    await self.inner.release(key, taken.epoch)
            if isinstance(error, PerdureError) and holder and holder.epoch != taken.epoch:
                return Held(holder)  # taken over, maybe deleted, before its key was here
            raise
        return msgspec.structs.replace(taken, found=found)

    # The inbox.

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        self._require_size(key, "a post to", [len(item.payload) for item in items])
        if items:
            transform = await self._of_tenant(key.tenant)
            items = [transform_item(transform, key, item) for item in items]
        return await self.inner.enqueue(key, items, limit=limit)

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        items = await self.inner.receive(key, epoch, limit=limit)
        if not items:
            return []
        transform = await self._of_tenant(key.tenant)
        return [restore_item(transform, key, item) for item in items]

    async def ack(
        self,
        key: SessionKey,
        epoch: int | None,
        op_ids: Collection[str] = (),
        *,
        dead: Sequence[DeadLetter] = (),
    ) -> None:
        if dead:
            transform = await self._of_tenant(key.tenant)
            dead = [transform_letter(transform, key, letter) for letter in dead]
        await self.inner.ack(key, epoch, op_ids, dead=dead)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        letters = await self.inner.dead_letters(key)
        if not letters:
            return []
        transform, by_key = await self._of_tenant(key.tenant), not self._accepts_plain
        return [restore_letter(transform, key, letter, by_key=by_key) for letter in letters]

    # The directory.

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        transform = await self._shared_transform(query.tenant, create=False)
        if transform is None and (query.owner is not None or query.tag is not None):
            return []
        inner = query
        if self._hidden_agent is not None:
            inner = msgspec.structs.replace(inner, without=(*query.without, self._hidden_agent))
        if transform is not None:
            owner = None if query.owner is None else transform.token(query.owner)
            tag = None if query.tag is None else transform.token(query.tag)
            inner = msgspec.structs.replace(inner, owner=owner, tag=tag)
        return [restore_info(info, transform) for info in await self.inner.sessions(inner)]
