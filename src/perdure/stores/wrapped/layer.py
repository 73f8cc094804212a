"""Store that transforms all content on its way to an inner store: base of the wrappers.

The inner store sees keys, seqs, epochs, kinds, group ends, times, counters and document names.
All other data (payloads, documents, blobs, inbox items, titles, owners, tags) is transformed:
encrypted or compressed. Leases and fencing are the inner store's.

Large amounts are transformed in a thread; cancellation behaves as in the inner store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

import anyio
import msgspec

from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    LeaseLostError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.memory.documents import SESSION
from perdure.records.chunks import verified
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest, lease_lost, too_large
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import (
    ALL,
    Batch,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Document,
    Documents,
    DraftInfo,
    HeartbeatRequests,
    Held,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    SessionQuery,
    Status,
    Store,
    SupportsLocalPath,
    Taken,
    Terms,
    capability,
    open_read_only,
)
from perdure.stores.wrapped.chain import ChainLink, ChainReader, ReadRequest
from perdure.stores.wrapped.manifests import (
    HiddenManifest,
    ManifestProof,
    has_hidden,
    inner_about,
    inner_manifest,
    mismatched,
    outer_manifest,
    read_hidden,
    restore_documents,
    restore_info,
    transform_document,
    unproven_tail,
)
from perdure.stores.wrapped.transform import (
    Transform,
    in_thread_if_large,
    inbox_place,
    require_hashed,
    restore_item,
    restore_letter,
    restore_records,
    transform_batch,
    transform_blobs,
    transform_letter,
)


class TransformProvider(ABC):
    """Provider of the transforms of sessions and tenants, and of their data in the inner store.

    By default it keeps nothing there, needs no lease and proves nothing.
    """

    kind: str
    """What this does to a store, as text for its location."""
    hidden_agent: str | None = None
    """An agent id that the wrapper uses for its own sessions."""
    accepts_plain: bool
    """Whether data that was stored without the wrapper is read unchanged."""

    @abstractmethod
    def max_payload_bytes(self, inner_max: int) -> int:
        """Return the largest payload that has at most ``inner_max`` bytes once transformed."""

    @abstractmethod
    def overhead(self) -> int:
        """Return by how many bytes a small blob grows."""

    @abstractmethod
    async def session_transform(
        self, store: Store, key: SessionKey, data: bytes = b""
    ) -> Transform | None:
        """Return a session's transform, which can restore ``data``; None if it has none."""

    @abstractmethod
    async def tenant_transform(
        self, store: Store, tenant: str, *, create: bool
    ) -> Transform | None:
        """Return the transform of a tenant's blobs, listings and inboxes; None if it has none."""

    @abstractmethod
    async def batch_transform(self, store: Store, batch: Batch) -> Callable[[Batch], Batch] | None:
        """Return the function that transforms a batch; None if its session has no transform."""

    @abstractmethod
    def cached_transform(self, key: SessionKey) -> Transform | None:
        """Return a recently used session's transform without awaiting; None if not cached."""

    async def require_compatible(self, store: Store) -> None:
        """Raise if the store's content was written without this wrapper."""

    async def require_readable(self, store: Store, key: SessionKey) -> None:
        """Raise if a session could not be read; called before its lease is acquired."""

    async def begin(self, store: Store, lease: Taken, *, is_draft: bool) -> None:
        """Prepare a session whose lease was just acquired."""

    def note_refused(self, batch: Batch) -> None:
        """Note that the log will never accept a batch."""

    def note_published(self, key: SessionKey) -> None:
        """Note that a draft can be read by now."""

    async def chain_reader(
        self, store: Store, key: SessionKey, request: ReadRequest, records: Sequence[Record]
    ) -> ChainReader | None:
        """Return the verifier of a log whose first chunk is ``records``; None without chain."""

    def note_link(self, key: SessionKey, link: ChainLink | None) -> None:
        """Remember the link after a log's last record."""

    async def prove(self, store: Store, manifest: Manifest) -> ManifestProof | None:
        """Return the proof of a manifest; None if the session has no hash chain."""

    def note_fold(self, manifest: Manifest, proof: ManifestProof) -> None:
        """Remember a fold that is durable."""

    async def record_trim(self, store: Store, key: SessionKey, epoch: int, below: int) -> None:
        """Make durable that the records before ``below`` are about to be removed."""

    async def unproven_reason(self, store: Store, inner: Documents, key: SessionKey) -> str | None:
        """Return why documents without a proof may not be used; None if they may."""

    def note_proof(self, manifest: Manifest, hidden: HiddenManifest) -> None:
        """Remember what a manifest proves."""

    def is_own(self, name: str) -> bool:
        """Return whether a document of this name is the wrapper's own."""
        return False

    def new_own_documents(self, key: SessionKey) -> dict[str, bytes]:
        """Return the wrapper's own documents for a session whose manifest lost them.

        Called right after `session_transform`, which has cached what they are made of.
        """
        return {}

    def forget(self, key: SessionKey) -> None:
        """Drop everything that is cached for a session."""


def max_restored_bytes(store: Store) -> int:
    """Return the largest size of a restored record or inbox item, in bytes."""
    return max(store.capabilities.max_record_bytes, MAX_RECORD_BYTES)


class _PendingTransform(NamedTuple):
    transform: Callable[[Batch], Batch]
    size: int


class TransformingStore:
    """Base class of the wrapper stores.

    It does not derive from `DelegatingStore`, which forwards unknown attributes, and defines each
    call of the port itself. So nothing reaches the inner store untransformed by inheritance: a
    call that is added to the port, or a backend's extra such as a folder for plain files, is
    missing here until it is written.
    """

    def __init__(self, store: Store, wrapper: TransformProvider) -> None:
        self._store = store
        self._wrapper = wrapper
        self._max_payload = wrapper.max_payload_bytes(store.capabilities.max_record_bytes)

    @property
    def capabilities(self) -> Capabilities:
        """The inner store's, with a smaller limit for records."""
        return msgspec.structs.replace(self._store.capabilities, max_record_bytes=self._max_payload)

    @property
    def location(self) -> str:
        """The inner store's location, and what this wrapper does."""
        return f"{self._store.location} ({self._wrapper.kind})"

    @property
    def owner(self) -> str:
        """The inner store's id as a lease holder."""
        return self._store.owner

    @property
    def local_path(self) -> str | None:
        """The inner store's, if it has one."""
        local = capability(self._store, SupportsLocalPath)
        return None if local is None else local.local_path

    async def open(self) -> None:
        """Open the inner store, and check that it is compatible with this wrapper.

        Raises:
            ConfigError: Its content was written without this wrapper.

        """
        await self._store.open()
        await self._require_compatible()

    async def open_read_only(self) -> None:
        """Open the inner store read-only, and check that it is compatible with this wrapper."""
        await open_read_only(self._store)
        await self._require_compatible()

    async def _require_compatible(self) -> None:
        try:
            await self._wrapper.require_compatible(self._store)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._store.aclose()
            raise

    async def _session(self, key: SessionKey, data: bytes = b"") -> Transform:
        transform = await self._wrapper.session_transform(self._store, key, data)
        if transform is None:
            raise CorruptRecordError(
                f"the data key of {key} is missing, but data encrypted with it exists: restore its "
                "documents from a copy",
                key=str(key),
            )
        return transform

    async def _tenant(self, tenant: str) -> Transform:
        transform = await self._wrapper.tenant_transform(self._store, tenant, create=True)
        assert transform is not None  # it was created
        return transform

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        pending = [await self._pending_transform(batch) for batch in batches]
        size = sum(job.size for job in pending if isinstance(job, _PendingTransform))

        def transform_all() -> list[Batch | Outcome]:
            return [
                job.transform(batch) if isinstance(job, _PendingTransform) else job
                for job, batch in zip(pending, batches, strict=True)
            ]

        results = [
            result if isinstance(result, Outcome) else await self._with_listed(result, batch)
            for result, batch in zip(
                await in_thread_if_large(size, transform_all), batches, strict=True
            )
        ]
        transformed = [result for result in results if isinstance(result, Batch)]
        outcomes = await self._store.append_many(transformed) if transformed else []
        for batch, outcome in zip(transformed, outcomes, strict=True):
            if outcome.status is Status.PERMANENT:
                self._wrapper.note_refused(batch)
        remaining = iter(outcomes)
        return [result if isinstance(result, Outcome) else next(remaining) for result in results]

    async def _with_listed(self, transformed: Batch, batch: Batch) -> Batch:
        """Return a transformed batch with what the original one says for the directory."""
        about = batch.about
        if about is not None:
            about = inner_about(batch.key, about, await self._tenant(batch.key.tenant))
        return msgspec.structs.replace(transformed, turns=batch.turns, about=about)

    async def _pending_transform(self, batch: Batch) -> _PendingTransform | Outcome:
        try:
            size = self._require_fit(batch)
            transform = await self._wrapper.batch_transform(self._store, batch)
            if transform is None:
                return Outcome(Status.CONFLICT, lease_lost(batch.key, batch.epoch, 0))
            return _PendingTransform(transform, size)
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

    async def read_log(  # both wrappers' reading, chunk by chunk
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        chunks = self._store.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        request = ReadRequest(after, before, limit, reverse)
        wrapper, reader = self._wrapper, None
        settled, is_first = True, True
        async with aclosing(chunks):
            async for chunk in chunks:
                settled = settled and chunk.settled
                if is_first and chunk.records:
                    is_first = False
                    reader = await wrapper.chain_reader(self._store, key, request, chunk.records)
                if reader is None:
                    records = await self.restore_session_records(key, chunk.records)
                    yield LogChunk(records, chunk.settled)
                elif verified_records := await reader.verify(chunk.records):
                    yield LogChunk(tuple(verified_records), settled)
        if is_first:
            reader = await wrapper.chain_reader(self._store, key, request, ())
        if reader is not None:
            pending = await reader.finish()
            if not reverse and before is None and limit is None:
                wrapper.note_link(key, reader.link)
            if pending or not settled:
                yield LogChunk(tuple(pending), settled)

    async def restore_session_records(
        self, key: SessionKey, records: Sequence[Record]
    ) -> tuple[Record, ...]:
        """Return the original records of transformed ones that have no link hashes.

        Raises:
            ConfigError: None of the given master keys decrypts them.
            CorruptRecordError: A record is damaged or belongs to another place.

        """
        first = next((record for record in records if record.kind != EPOCH), None)
        if first is None:
            return tuple(records)
        transform = await self._session(key, first.payload)
        size = sum(len(record.payload) for record in records)
        return await in_thread_if_large(size, lambda: restore_records(transform, records))

    def transform_spill(
        self, key: SessionKey, epoch: int, base: int, entries: Sequence[Entry]
    ) -> tuple[Entry, ...] | None:
        """Transform the entries of a spill file at shutdown, without awaiting.

        Returns None if the session's data key is not cached: plain text must not be spilled.
        """
        transform = self._wrapper.cached_transform(key)
        if transform is None:
            return None
        return transform_batch(transform, Batch(key, epoch, base + 1, tuple(entries))).records

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        # First, so that a reader never takes the removal for a forgery.
        await self._wrapper.record_trim(self._store, key, epoch, below)
        return await self._store.trim(key, epoch, below)

    async def head(self, key: SessionKey) -> int:
        return await self._store.head(key)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        inner = await self._store.read_documents(key, names)
        manifest = inner.manifest
        hidden = await self._hidden(key, inner)
        proof = None if hidden is None else hidden.proof
        if manifest and hidden and proof is not None and not proof.lost:
            self._wrapper.note_proof(manifest, hidden)
        elif reason := await self._wrapper.unproven_reason(self._store, inner, key):
            return self._unproven(inner, reason, _tail(key, hidden, reason))
        if manifest is None or hidden is None or hidden.is_begun:
            return self._foreign(inner)
        own = self._wrapper.is_own
        unreadable = [name for name in inner.damaged if not own(name)]
        readable = {name: document for name, document in inner.found.items() if not own(name)}
        restored: dict[str, Document] = {}
        if readable:
            transform = await self._session(key, next(iter(readable.values())).data)
            size = sum(len(document.data) for document in readable.values())
            restored = await in_thread_if_large(
                size, lambda: restore_documents(transform, readable, hidden)
            )
        damaged = (*unreadable, *(name for name in readable if name not in restored))
        stored = inner.remains | {name: document.data for name, document in readable.items()}
        remains = {name: stored[name] for name in damaged if name in stored}
        tail = _tail(key, hidden) or inner.unproven_tail
        outer = outer_manifest(manifest, hidden)
        return Documents(
            outer, restored, damaged, remains=remains, unproven_tail=tail, cut=inner.cut
        )

    async def _hidden(self, key: SessionKey, inner: Documents) -> HiddenManifest | None:
        manifest = inner.manifest
        if manifest is None or not has_hidden(manifest.about.title):
            return None
        tenant = await self._wrapper.tenant_transform(self._store, key.tenant, create=False)
        try:
            return read_hidden(manifest, tenant)
        except CorruptRecordError:
            if await self._wrapper.unproven_reason(self._store, inner, key):
                return None  # the caller reports the reason
            raise

    def _unproven(self, inner: Documents, reason: str, tail: str) -> Documents:
        """Return the result for a manifest that was lost or forged: all documents are damaged."""
        listed = () if inner.manifest is None else tuple(inner.manifest.documents)
        names = [name for name in (*listed, *inner.damaged) if not self._wrapper.is_own(name)]
        damaged = tuple(dict.fromkeys(names)) or (SESSION,)
        stored = inner.remains | {name: document.data for name, document in inner.found.items()}
        remains = {name: data for name, data in stored.items() if name in damaged}
        reasons = dict.fromkeys(damaged, reason)
        return Documents(
            damaged=damaged, why=reasons, remains=remains, unproven_tail=tail, cut=inner.cut
        )

    def _foreign(self, inner: Documents) -> Documents:
        """Return the result for a manifest that was never folded through this wrapper."""
        manifest = inner.manifest
        if manifest is None:
            damaged = [name for name in inner.damaged if not self._wrapper.is_own(name)]
            remains = {name: inner.remains[name] for name in damaged if name in inner.remains}
            return Documents(damaged=tuple(damaged), remains=remains, cut=inner.cut)
        if self._own(manifest) or not self._wrapper.accepts_plain:
            return Documents(cut=inner.cut)
        return inner

    def _own(self, manifest: Manifest | None) -> dict[str, FoldedDocument]:
        listed = {} if manifest is None else manifest.documents
        return {name: entry for name, entry in listed.items() if self._wrapper.is_own(name)}

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        if reserved := self._own(manifest):
            raise NotStorableError(
                f"documents named like {min(reserved)} are this store's own: choose another name",
                key=str(key),
                documents=sorted(reserved),
            )
        before = (await self._store.read_documents(key, ())).manifest
        own = self._own(before)
        transform = await self._wrapper.session_transform(self._store, key)
        if transform is None:
            raise lease_lost(key, manifest.epoch, 0)
        new_own = {} if own else self._wrapper.new_own_documents(key)
        tenant = await self._tenant(key.tenant)
        plain = {name: documents[name] for name in documents if name in manifest.documents}
        proof = await self._wrapper.prove(self._store, manifest)

        def transform_all() -> dict[str, bytes]:
            listed = manifest.documents
            return {
                name: transform_document(transform, name, data, proof, listed[name].as_of_seq)
                for name, data in plain.items()
            }

        transformed = await in_thread_if_large(sum(map(len, plain.values())), transform_all)
        own |= {name: FoldedDocument.of(manifest.as_of_seq, data) for name, data in new_own.items()}
        inner = inner_manifest(manifest, transformed, before, own, tenant, proof)
        # A document that is not the one the engine listed is stored with a hash that no bytes
        # have, so that reading reports it as damaged.
        for name in mismatched(manifest, plain):
            entry = msgspec.structs.replace(inner.documents[name], sha256="0" * 64)
            inner.documents[name] = entry
        await self._store.write_documents(key, transformed | new_own, inner)
        if proof is not None:
            self._wrapper.note_fold(manifest, proof)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        await in_thread_if_large(sum(map(len, blobs.values())), lambda: require_hashed(blobs))
        if not blobs:
            return
        transform = await self._tenant(tenant)
        transformed = await transform_blobs(transform, blobs)
        inner = {transform.inner_name(name): data for name, data in transformed.items()}
        await self._store.put_blobs(tenant, inner)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, restored and verified against its name; None if there is none."""
        transform = await self._wrapper.tenant_transform(self._store, tenant, create=False)
        if transform is None:
            return None
        data = await self._store.get_blob(tenant, transform.inner_name(name))
        if data is None:
            accepts_plain = self._wrapper.accepts_plain
            return await self._store.get_blob(tenant, name) if accepts_plain else None
        return await in_thread_if_large(
            len(data), lambda: verified(name, transform.restore(("blob", name), data))
        )

    async def sweep(
        self,
        tenant: str,
        reachable: Collection[str],
        older_than: float,
        *,
        among: Collection[str] | None = None,
    ) -> BlobSweep:
        """Remove unreachable blobs; the freed bytes count their size before encryption."""
        inner = await self._inner_names(tenant, reachable)
        looked_at = None if among is None else await self._inner_names(tenant, among)
        swept = await self._store.sweep(tenant, inner, older_than, among=looked_at)
        freed = max(swept.bytes - swept.removed * self._wrapper.overhead(), 0)
        return msgspec.structs.replace(swept, bytes=freed)

    async def renew(self, tenant: str, names: Collection[str]) -> set[str]:
        transform = await self._wrapper.tenant_transform(self._store, tenant, create=False)
        missing = set(names)
        if transform is not None:
            inner = {transform.inner_name(name): name for name in names}
            missing = {inner[name] for name in await self._store.renew(tenant, list(inner))}
        return await self._store.renew(tenant, missing) if self._wrapper.accepts_plain else missing

    async def blob_names(self, tenant: str) -> list[str]:
        transform = await self._wrapper.tenant_transform(self._store, tenant, create=False)
        names: set[str] = set()
        for inner in await self._store.blob_names(tenant):
            if inner.startswith("x"):
                name = transform.outer_name(inner) if transform is not None else None
                if name is not None:
                    names.add(name)
            elif self._wrapper.accepts_plain:
                names.add(inner)
        return sorted(names)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        inner = await self._inner_names(tenant, names)
        existing = set(inner).intersection(await self._store.blob_names(tenant))
        freed = await self._store.remove_blobs(tenant, inner)
        return max(freed - len(existing) * self._wrapper.overhead(), 0)

    async def _inner_names(self, tenant: str, names: Collection[str]) -> list[str]:
        transform = await self._wrapper.tenant_transform(self._store, tenant, create=False)
        plain = list(names) if self._wrapper.accepts_plain else []
        return plain if transform is None else [*map(transform.inner_name, names), *plain]

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Return the lease's state; None for the wrapper's own sessions."""
        return None if key.agent == self._wrapper.hidden_agent else await self._store.holder(key)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        """Acquire the lease of a session that this wrapper can read and write."""
        if key.agent == self._wrapper.hidden_agent:
            raise ConfigError(
                f"the agent id {key.agent!r} is this store's own: choose another",
                option="agent id",
                value=key.agent,
            )
        if terms.after != 0:
            await self._wrapper.require_readable(self._store, key)
        new = terms.beginning
        if new.about is not None:
            about = inner_about(key, new.about, await self._tenant(key.tenant))
            new = msgspec.structs.replace(new, about=about)
        terms = msgspec.structs.replace(terms, names=frozenset(), beginning=new)
        answer = await self._store.acquire(key, terms)
        if isinstance(answer, Held):
            return answer
        is_draft = terms.beginning.draft is not None
        try:
            await self._wrapper.begin(self._store, answer, is_draft=is_draft)
        except BaseException:  # the caller never learns of the lease, so release it here
            with anyio.CancelScope(shield=True), suppress(PerdureError):
                await self._store.release(key, answer.epoch)
            raise
        return msgspec.structs.replace(answer, found=None)  # it was read as the inner store has it

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self._store.publish(key, epoch)
        self._wrapper.note_published(key)

    async def drafts(self, tenant: str) -> list[DraftInfo]:
        return await self._store.drafts(tenant)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._store.release(key, epoch)

    async def heartbeat(self) -> HeartbeatRequests:
        return await self._store.heartbeat()

    async def wait_for_notification(self, timeout: float) -> None:
        await self._store.wait_for_notification(timeout)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._store.request_handover(key, holder)

    # inbox

    async def enqueue(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        if not items:
            return await self._store.enqueue(key, (), limit=limit)
        self._require_size(key, "a post to", [len(item.payload) for item in items])
        transform = await self._tenant(key.tenant)
        transformed = [
            msgspec.structs.replace(
                item, payload=transform.transform_payload(inbox_place(key, item), item.payload)
            )
            for item in items
        ]
        return await self._store.enqueue(key, transformed, limit=limit)

    async def receive(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        items = await self._store.receive(key, epoch, limit=limit)
        if not items:
            return []
        transform = await self._tenant(key.tenant)
        return [restore_item(transform, key, item) for item in items]

    async def ack(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        await self._store.ack(key, epoch, op_ids)

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        # A store that keeps no dead letters may not know the option.
        return await (
            self._store.sessions_with_pending_items(dead_letters=True)
            if dead_letters
            else self._store.sessions_with_pending_items()
        )

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        transform = await self._tenant(key.tenant)
        transformed = [transform_letter(transform, key, letter) for letter in letters]
        await self._store.reject(key, epoch, transformed)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        letters = await self._store.dead_letters(key)
        if not letters:
            return []
        transform = await self._tenant(key.tenant)
        by_key = not self._wrapper.accepts_plain
        return [restore_letter(transform, key, letter, by_key=by_key) for letter in letters]

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._store.drop_dead_letters(key, op_ids)

    # directory

    async def sessions(self, query: SessionQuery = ALL) -> list[SessionInfo]:
        transform = await self._wrapper.tenant_transform(self._store, query.tenant, create=False)
        if transform is None and (query.owner is not None or query.tag is not None):
            return []
        inner, hidden_agent = query, self._wrapper.hidden_agent
        if hidden_agent is not None:
            inner = msgspec.structs.replace(inner, without=(*query.without, hidden_agent))
        if transform is not None:
            owner = None if query.owner is None else transform.token(query.owner)
            tag = None if query.tag is None else transform.token(query.tag)
            inner = msgspec.structs.replace(inner, owner=owner, tag=tag)
        return [restore_info(info, transform) for info in await self._store.sessions(inner)]

    async def tenants(self) -> list[str]:
        tenants = await self._store.tenants()
        if self._wrapper.hidden_agent is None or "" not in tenants:
            return tenants
        # The mark of an encrypted store is a key of the unnamed tenant, which may own nothing else.
        has_content = await self.sessions(SessionQuery(limit=1)) or await self._store.blob_names("")
        return tenants if has_content else [name for name in tenants if name]

    async def delete(self, key: SessionKey, epoch: int) -> None:
        """Delete everything that the session owns, its data key included."""
        await self._store.delete(key, epoch)
        self._wrapper.forget(key)

    async def scrub(self) -> None:
        await self._store.scrub()

    async def aclose(self) -> None:
        await self._store.aclose()


def _tail(key: SessionKey, hidden: HiddenManifest | None, reason: str = "") -> str:
    """Return why a log may be incomplete; empty if there is no sign of it."""
    end = 0 if hidden is None or hidden.proof is None else hidden.proof.unproven_end
    return unproven_tail(key, end, reason) if end or reason else ""
