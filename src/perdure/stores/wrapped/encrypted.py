"""Encrypted store: AES-256-GCM, one data key per session and tenant, wrapped by a master key.

docs/stores.md says what the inner store can see. Everything that is read is verified: a flipped
bit, a record that was moved within a session or to another one, and a wrong key are errors, never
an empty session. A whole store that was replaced by an older copy is not noticed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import NamedTuple, cast, final

import anyio
import msgspec

from perdure._lib.logs import log_facts
from perdure.errors import CorruptRecordError, LeaseHeldError, LeaseLostError
from perdure.records.keys import KEYRING, SessionKey, SessionTenant, keyring_of
from perdure.records.manifest import About, Manifest, lease_lost
from perdure.records.records import EPOCH, Record
from perdure.store import (
    Batch,
    Beginning,
    LeaseState,
    SessionQuery,
    Store,
    Taken,
    open_read_only,
    take_after,
)
from perdure.stores.wrapped import keys as keyring
from perdure.stores.wrapped.chain import (
    HEADER,
    NOTHING_PROVEN,
    ChainLink,
    ChainReader,
    ChainWriter,
    ManifestProof,
    ReadRequest,
    RecordChain,
    chain_error,
    link_at,
)
from perdure.stores.wrapped.coded import CodedStore, Encoder, max_restored_bytes, require_store
from perdure.stores.wrapped.compressed import compression_for
from perdure.stores.wrapped.keys import (
    GROWTH,
    DataKey,
    MasterKeys,
    SessionKeyEntry,
    ciphers,
    derived,
)
from perdure.stores.wrapped.manifests import (
    MISSING,
    HiddenManifest,
    proof_of,
    proven_part,
    unproven_tail,
    with_hidden,
)

_log = logging.getLogger(__name__)

_MAX_CACHED_SESSIONS = 4096
"""Sessions whose data keys are cached in memory."""


class RewrapResult(msgspec.Struct, frozen=True):
    """Result of a rotation of the master key."""

    done: int
    """Number of data keys that are now wrapped by the current master key, and were not before."""
    left: tuple[SessionKey, ...]
    """Sessions with another holder: their keys are wrapped again when they are next opened."""


class _SessionCipher(NamedTuple):
    """A session's cached key."""

    key: DataKey
    chain: RecordChain | None
    """None for a session that was not opened since hash chains were introduced."""
    name: str
    """The document that holds the wrapped key."""
    below: int
    """The record before which a trim removed all."""


@final
class EncryptedStore(CodedStore):
    """Store that encrypts all content.

    Caches what was used last: keys, what manifests prove, and the writers of held sessions.

    Args:
        store: The inner store.
        keys: The master key, with older ones to read what they wrapped.
        compression: ``zstd`` compresses before encryption; lengths then reveal a little about the
            content.

    Raises:
        ConfigError: The key or the compression is invalid.
        MissingExtraError: cryptography, or zstandard, is not installed.

    Example:
        >>> from perdure.stores.memory import MemoryStore
        >>> store = EncryptedStore(MemoryStore(), MasterKeys(MasterKeys.new()))
    """

    _kind = "encrypted"
    _hidden_agent: str | None = KEYRING

    def __init__(
        self, store: Store, keys: MasterKeys | bytes | str, *, compression: str | None = None
    ) -> None:
        require_store(store, "EncryptedStore")
        ciphers()  # raise for a missing package now, not at the first save
        largest = (store.capabilities.max_record_bytes - 2) // 4 * 3 - GROWTH - HEADER - 2
        super().__init__(store, largest)
        self._masters = keys if isinstance(keys, MasterKeys) else MasterKeys(keys)
        self._compression = compression_for(compression, record_limit=max_restored_bytes(store))
        self._sessions: OrderedDict[SessionKey, _SessionCipher] = OrderedDict()
        self._tenants: dict[str, DataKey] = {}
        self._proofs: dict[SessionKey, ManifestProof] = {}
        self._writers: dict[SessionKey, ChainWriter] = {}

    async def open(self) -> None:
        """Open the inner store, and check that it holds nothing in plain text.

        Raises:
            ConfigError: It was written without encryption.

        """
        await self.inner.open()
        await self._checked()

    async def open_read_only(self) -> None:
        """Open the inner store read-only, and check that it holds nothing in plain text."""
        await open_read_only(self.inner)
        await self._checked()

    async def _checked(self) -> None:
        try:
            await keyring.require_encrypted(self.inner)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.inner.aclose()
            raise

    async def tenants(self) -> list[str]:
        tenants = await self.inner.tenants()
        if "" not in tenants:
            return tenants
        # The mark of an encrypted store is a key of the unnamed tenant, which may own nothing else.
        has_content = await self.sessions(SessionQuery(limit=1)) or await self.inner.blob_names("")
        return tenants if has_content else [name for name in tenants if name]

    async def rewrap(self) -> RewrapResult:
        """Wrap all data keys by the current master key, so that older ones are no longer needed.

        Acquires each session's lease for a moment, and skips sessions that have another holder.
        """
        rewrapped = 0
        skipped: list[SessionKey] = []
        async with aclosing(keyring.all_sessions(self.inner)) as keys:
            async for key in keys:
                try:
                    rewrapped += await self._rewrap(key)
                except (LeaseHeldError, LeaseLostError):
                    skipped.append(key)
        return RewrapResult(rewrapped, tuple(skipped))

    async def _rewrap(self, key: SessionKey) -> bool:
        entry = await self._find(key)
        if entry is None or entry.is_current:
            return False
        async with self._brief_lease(
            key, "its key is wrapped again when it is next opened"
        ) as lease:
            # Again, under the lease.
            entry = await self._find(key)
            if entry is not None and key.agent != KEYRING:
                await self._wrap_again(lease, entry)
            elif entry is not None:
                before = entry.manifest or keyring.empty_manifest(lease)
                manifest = msgspec.structs.replace(before, epoch=lease.epoch)
                await keyring.write(self.inner, entry, manifest, self._masters)
        return True

    async def accept_log(self, key: SessionKey) -> bool:
        """Accept that a session's log may be incomplete, since its manifest was lost or forged.

        `perdure check` reports it until then. Compare the session with a copy first.

        Returns:
            Whether there was anything to accept.

        Raises:
            CorruptRecordError: The manifest was not written with the keys.
            LeaseHeldError: The session has a holder.

        """
        if not (await self._proof(key, fresh=True)).doubtful_from:
            return False
        async with self._brief_lease(key, "close it first") as lease:
            entry = await self._find(key)
            if entry is None or entry.manifest is None:
                return False
            hidden, proof = entry.proven_part(await self._of_tenant(key.tenant))
            if hidden is None or proof.lost or not proof.unproven_end:
                return False
            accepted = msgspec.structs.replace(proof, unproven_end=0)
            await self._write(entry, entry.manifest, lease.epoch, hidden, accepted)
            return True

    async def _write(
        self,
        entry: SessionKeyEntry,
        manifest: Manifest,
        epoch: int,
        hidden: HiddenManifest,
        proof: ManifestProof,
    ) -> SessionKeyEntry:
        """Write a manifest and its session's key under an epoch; remember what it proves."""
        key = manifest.key
        proof = msgspec.structs.replace(proof, epoch=epoch)
        manifest = msgspec.structs.replace(manifest, epoch=epoch)
        hidden = msgspec.structs.replace(hidden, proof=proof)
        inner = with_hidden(manifest, hidden, await self._of_tenant(key.tenant))
        written = await keyring.write(self.inner, entry, inner, self._masters)
        self._cache_proof(key, proof)
        return written

    @asynccontextmanager
    async def _brief_lease(self, key: SessionKey, cure: str) -> AsyncGenerator[Taken, None]:
        """Hold a session's lease, if no other process does."""
        holder = await self.inner.holder(key)
        if holder is None or not (holder.released or holder.alive is False):
            raise LeaseHeldError(f"{key} is held: {cure}", key=str(key))
        lease = await take_after(self.inner, key, after=holder.epoch)
        try:
            yield lease
        finally:
            with anyio.CancelScope(shield=True):
                await self.inner.release(key, lease.epoch)

    # Keys.

    async def _find(self, key: SessionKey) -> SessionKeyEntry | None:
        return await keyring.find(self.inner, key, self._masters)

    async def _require_readable(self, key: SessionKey) -> SessionKeyEntry | None:
        return await self._find(key)

    async def _transform(self, key: SessionKey, data: bytes = b"") -> DataKey | None:
        cipher = await self._cipher(key, data)
        return None if cipher is None else cipher.key

    def _cached_transform(self, key: SessionKey) -> DataKey | None:
        cipher = self._sessions.get(key)
        return None if cipher is None else cipher.key

    async def _blob_transform(self, tenant: str, *, create: bool) -> DataKey | None:
        if isinstance(tenant, SessionTenant):
            transform = await self._transform(tenant.key)
            if transform is None and create:
                raise lease_lost(tenant.key, 0)
            return transform
        return await self._shared_transform(tenant, create=create)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        blob = await super().get_blob(tenant, name)
        if blob is None and isinstance(tenant, SessionTenant):  # as earlier releases put it
            blob = await super().get_blob(str(tenant), name)
        return blob

    async def listed_blobs(self, key: SessionKey, names: Collection[str]) -> dict[str, str]:
        """Return names of a session's blobs, by those under which a tenant's listing has them."""
        transform = await self._transform(key)
        own = {} if transform is None else {transform.inner_name(name): name for name in names}
        return {**own, **{name: name for name in names}}

    async def _cipher(self, key: SessionKey, data: bytes = b"") -> _SessionCipher | None:
        cached = self._sessions.get(key)
        if cached is not None and cached.key.has_encrypted(data):
            self._sessions.move_to_end(key)
            return cached
        entry = await self._find(key)
        if entry is None:
            if data:
                await keyring.require_new(self.inner, key)  # raises, and says why there is no key
            return None
        return self._cache_cipher(key, entry)

    def _cache_cipher(self, key: SessionKey, entry: SessionKeyEntry) -> _SessionCipher:
        owner = ("session", key.tenant, key.agent, key.session)
        data_key = DataKey(entry.key, owner, self._compression)
        chain = None
        if entry.chained:
            chain = RecordChain(data_key, derived(data_key.key, b"chain", 32), entry.chained)
        cipher = _SessionCipher(data_key, chain, entry.name, entry.below)
        self._sessions[key] = cipher
        while len(self._sessions) - len(self._writers) > _MAX_CACHED_SESSIONS:
            oldest, held = self._sessions.popitem(last=False)
            if oldest in self._writers:  # it may be the only copy, if the key document is lost
                self._sessions[oldest] = held
        return cipher

    async def _shared_transform(self, tenant: str, *, create: bool) -> DataKey | None:
        if create and tenant and "" not in self._tenants:
            # The unnamed tenant's key marks the store as encrypted.
            await self._shared_transform("", create=True)
        if tenant not in self._tenants:
            if create:
                key = await keyring.tenant_key(self.inner, tenant, self._masters)
            elif entry := await self._find(keyring_of(tenant)):
                key = entry.key
            else:
                return None
            self._tenants[tenant] = DataKey(key, ("tenant", tenant), self._compression)
        return self._tenants[tenant]

    def _is_own(self, name: str) -> bool:
        return keyring.is_key(name)

    def _new_own_documents(self, key: SessionKey) -> dict[str, bytes]:
        cipher = self._sessions[key]
        chained = 0 if cipher.chain is None else cipher.chain.begins
        return dict([keyring.wrap_key(key, cipher.key.key, self._masters, chained, cipher.below)])

    async def _distrust(self, key: SessionKey, holder: LeaseState | None) -> None:
        writer = self._writers.get(key)
        if writer is None or holder is None or holder.epoch != writer.epoch:
            self._proofs.pop(key, None)  # the holder itself knows whether its log is incomplete
        if writer is None and key in self._sessions:  # a writer's may be the only copy
            entry = await self._find(key)
            if entry is not None:
                self._cache_cipher(key, entry)

    def _forget(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
        self._proofs.pop(key, None)
        self._writers.pop(key, None)

    # Taking a session.

    async def _begin(self, taken: Taken, known: object, new: Beginning) -> bool:
        key = taken.key
        self._forget(key)
        entry = await self._entry_of(taken, cast("SessionKeyEntry | None", known))
        tenant = await self._of_tenant(key.tenant)
        proof = NOTHING_PROVEN if entry is None else entry.proven_part(tenant)[1]
        # The log ends before what its manifest proves: records were cut off.
        if proof.epoch and not proof.lost and taken.head <= proof.as_of_seq:
            reason = f"its manifest is as of record {proof.as_of_seq}"
            raise chain_error(taken.head - 1, reason)
        is_changed = entry is None or not entry.is_current or not entry.chained
        if entry is None or is_changed:
            entry = await self._wrap_again(taken, entry, new.about)
            proof = entry.proven_part(tenant)[1]
        if proof.lost:
            end = proof.doubtful_from or taken.head - 1
            proof = msgspec.structs.replace(proof, unproven_end=end)
            reason = unproven_tail(key, end)
            log_facts(_log, logging.WARNING, "%(reason)s", reason=reason, session=str(key))
        cipher = self._cache_cipher(key, entry)
        self._cache_proof(key, proof)
        assert cipher.chain is not None  # _wrap_again begins a chain
        writer = ChainWriter(cipher.chain, taken.epoch, taken.head, proof.as_of_seq)
        self._writers[key] = writer
        if taken.created and taken.record and cipher.chain.start.seq == taken.head - 1:
            record = Record(taken.head, taken.epoch, EPOCH, taken.record, end=True)
            writer.note_link(cipher.chain.next_link(cipher.chain.start, record))
        writer.remembers_all = new.draft is not None  # they cannot be read from its log
        return is_changed

    async def _entry_of(
        self, taken: Taken, known: SessionKeyEntry | None
    ) -> SessionKeyEntry | None:
        """Return the key of a session that was just taken; None where it has none yet."""
        if taken.created:
            return None
        manifest = None if taken.found is None else taken.found.documents.manifest
        if known is not None and manifest is not None and known.name in manifest.documents:
            return msgspec.structs.replace(known, manifest=manifest)
        entry = await self._find(taken.key)
        if entry is None:
            await keyring.require_new(self.inner, taken.key)
        return entry

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self.inner.release(key, epoch)
        writer = self._writers.get(key)
        if writer is not None and writer.epoch == epoch:
            del self._writers[key]

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        """Delete everything that the session owns, its data key included."""
        await self.inner.delete(key, epoch, keep_posts=keep_posts)
        self._forget(key)

    async def publish(self, key: SessionKey, epoch: int) -> None:
        await self.inner.publish(key, epoch)
        if (writer := self._writers.get(key)) is not None:
            writer.remembers_all = False

    async def _wrap_again(
        self, lease: Taken, entry: SessionKeyEntry | None, about: About | None = None
    ) -> SessionKeyEntry:
        """Write a session's key wrapped by the newest master key, and where its chain begins.

        Creates the key if ``entry`` is None, and the manifest then has the labels of *about*.
        """
        hidden, before, lost = None, None, ""
        if entry is None:
            entry = SessionKeyEntry.new(chained=lease.head)
        elif entry.manifest is None:
            lost = MISSING if await self._lacks_manifest(lease.key) else ""
        else:
            hidden, proof = entry.proven_part(await self._of_tenant(lease.key.tenant))
            lost = proof.lost if hidden is None else ""
            before = None if lost else entry.manifest
        if not entry.chained:
            entry = msgspec.structs.replace(entry, chained=lease.head)
        if hidden is None:
            labels = about if about is not None and lease.created else About()
            hidden = HiddenManifest(labels, {}, is_begun=True)
        manifest = before or keyring.empty_manifest(lease)
        end = lease.head - 1 if lost else 0
        proof = hidden.proof or proof_of(manifest, lost=lost, unproven_end=end)
        return await self._write(entry, manifest, lease.epoch, hidden, proof)

    # Proofs of manifests.

    def _cache_proof(self, key: SessionKey, proof: ManifestProof) -> None:
        cached = self._proofs.pop(key, None)
        if cached is not None and proof.lost and not proof.unproven_end:
            proof = msgspec.structs.replace(proof, unproven_end=cached.doubtful_from)
        self._proofs[key] = proof
        while len(self._proofs) > _MAX_CACHED_SESSIONS:
            self._proofs.pop(next(iter(self._proofs)))

    async def _proof(self, key: SessionKey, *, fresh: bool = False) -> ManifestProof:
        """Return what a session's manifest proves; read it again if asked to."""
        proof = self._proofs.get(key)
        if proof is None or fresh:
            entry = await self._find(key)
            tenant = await self._shared_transform(key.tenant, create=False)
            proof = NOTHING_PROVEN if entry is None else entry.proven_part(tenant)[1]
            self._cache_proof(key, proof)
        return proof

    async def _hidden_part(
        self, key: SessionKey, manifest: Manifest | None
    ) -> tuple[HiddenManifest | None, str]:
        cipher = self._sessions.get(key)
        if cipher is not None and manifest is not None and cipher.name not in manifest.documents:
            self._sessions.pop(key)  # the key was wrapped again, or it has a new generation
        if manifest is None and not await self._lacks_manifest(key):
            return None, ""
        tenant = await self._shared_transform(key.tenant, create=False)
        hidden, proof = proven_part(manifest, tenant, is_chained=True)
        if hidden is None:
            entry = await self._find(key)
            if manifest is None and entry is not None and entry.manifest is not None:
                return None, ""  # it was written in between
            if entry is None or not entry.chained:
                hidden, proof = proven_part(manifest, tenant, is_chained=False)
                if proof.lost:
                    raise CorruptRecordError(proof.lost, key=str(key))
        self._cache_proof(key, proof)
        return hidden, proof.lost

    async def _lacks_manifest(self, key: SessionKey) -> bool:
        """Return whether a session must have a manifest: it is written before the first record."""
        return await self.inner.head(key) > 0 and await keyring.holds_records(self.inner, key)

    async def _prove(self, manifest: Manifest) -> ManifestProof:
        key, link = manifest.key, None
        writer = self._writer(key, manifest.epoch)
        if manifest.as_of_seq >= writer.chain.begins - 1:
            link = await self._link_after(writer, key, manifest.as_of_seq)
        before = await self._proof(key)
        end = before.doubtful_from or (manifest.as_of_seq if before.lost else 0)
        return proof_of(manifest, link, unproven_end=end)

    def _note_fold(self, manifest: Manifest, proof: ManifestProof) -> None:
        self._cache_proof(manifest.key, proof)
        writer = self._writers.get(manifest.key)
        if writer is not None and writer.epoch == manifest.epoch:
            writer.note_fold(manifest.as_of_seq)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove records, after noting durably that they go: else a reader calls it a forgery."""
        entry = await self._find(key)
        if entry is not None and entry.manifest is not None and entry.chained:
            end = min(below, await self.inner.head(key) + 1)
            if end > entry.below:
                hidden, proof = entry.proven_part(await self._of_tenant(key.tenant))
                if hidden is None:
                    raise CorruptRecordError(proof.lost, key=str(key))
                trimmed = msgspec.structs.replace(entry, below=end)
                trimmed = await self._write(trimmed, entry.manifest, epoch, hidden, proof)
                if (cipher := self._sessions.get(key)) is not None:
                    self._sessions[key] = cipher._replace(name=trimmed.name, below=end)
        return await self.inner.trim(key, epoch, below)

    # The hash chain.

    async def _chain_reader(
        self, key: SessionKey, request: ReadRequest, records: Sequence[Record]
    ) -> ChainReader | None:
        if not records and key not in self._sessions:
            return None
        first = next((record.payload for record in records if record.kind != EPOCH), b"")
        cipher = await self._cipher(key, first)
        if cipher is None or cipher.chain is None:
            return None

        async def trimmed() -> int:
            entry = await self._find(key)
            return 0 if entry is None else entry.below

        return ChainReader(
            self.inner,
            key,
            cipher.chain,
            request,
            proof=await self._proof(key),
            fresh=partial(self._proof, key, fresh=True),
            trimmed=trimmed,
        )

    def _note_end(self, key: SessionKey, reader: ChainReader) -> None:
        writer = self._writers.get(key)
        if writer is not None and reader.link is not None:
            writer.note_link(reader.link)

    def _encoder(self, batch: Batch) -> Encoder | None:
        writer = self._writers.get(batch.key)
        if writer is None or writer.epoch != batch.epoch or writer.link(batch.first - 1) is None:
            return None
        return writer.encrypt

    async def _prepare(self, batch: Batch) -> None:
        key = batch.key
        writer = self._writer(key, batch.epoch)
        try:
            writer.note_link(await self._link_after(writer, key, batch.first - 1))
        except CorruptRecordError:
            holder = await self.inner.holder(key)
            if holder is None or holder.epoch != batch.epoch:  # another life of the session
                newest = None if holder is None else holder.epoch
                raise lease_lost(key, batch.epoch, newest) from None
            raise

    def _writer(self, key: SessionKey, epoch: int) -> ChainWriter:
        """Return the writer of a session that was taken through this store.

        Raises:
            LeaseLostError: It was not taken, not under this epoch, or has been released.

        """
        writer = self._writers.get(key)
        if writer is None or writer.epoch != epoch:
            raise lease_lost(key, epoch)
        return writer

    def _note_refused(self, batch: Batch) -> None:
        writer = self._writers.get(batch.key)
        if writer is not None and writer.epoch == batch.epoch:
            writer.forget_links(batch.first)

    async def _link_after(self, writer: ChainWriter, key: SessionKey, seq: int) -> ChainLink:
        """Return the link after a record, from the nearest one that is known."""
        link = writer.link(seq)
        if link is None:
            proven = (await self._proof(key)).link
            link, _ = await link_at(self.inner, key, writer.chain, seq, proven)
        if link is None:
            raise chain_error(seq, "no record is known that it follows")
        return link
