"""Encrypted store: AES-256-GCM, one data key per session and tenant, wrapped by a master key.

docs/stores.md says what the inner store can see. Everything that is read is verified: a flipped
bit, a record that was moved within a session or to another one, and a wrong key are errors, never
an empty session. A whole store that was replaced by an older copy is not noticed.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import NamedTuple, final

import anyio
import msgspec

from perdure.errors import CorruptRecordError, LeaseHeldError, LeaseLostError
from perdure.records.keys import KEYRING, SessionKey, keyring_of
from perdure.records.manifest import About, Manifest, lease_lost
from perdure.records.records import EPOCH, Record
from perdure.store import Batch, Documents, SessionQuery, Store, Taken, take_after
from perdure.stores.wrapped import keys as keyring
from perdure.stores.wrapped.chain import (
    HEADER,
    ChainLink,
    ChainReader,
    ChainWriter,
    Facts,
    ReadRequest,
    RecordChain,
    chain_error,
)
from perdure.stores.wrapped.compressed import Compression, compression_for
from perdure.stores.wrapped.keys import GROWTH, KEY_BYTES, DataKey, MasterKeys, ciphers, derived
from perdure.stores.wrapped.layer import TransformingStore, TransformProvider, max_restored_bytes
from perdure.stores.wrapped.manifests import (
    HiddenManifest,
    ManifestProof,
    facts_of,
    has_hidden,
    proof_of,
    read_hidden,
    unproven_tail,
    with_hidden,
)
from perdure.stores.wrapped.transform import Transform, from_text

_log = logging.getLogger(__name__)

_MAX_CACHED_SESSIONS = 4096
"""Sessions whose data keys are cached in memory."""
_PAGE = 100


class RewrapResult(msgspec.Struct, frozen=True):
    """Result of a rotation of the master key."""

    done: int
    """Number of data keys that are now wrapped by the current master key, and were not before."""
    left: tuple[SessionKey, ...]
    """Sessions with another holder: their keys are wrapped again when they are next opened."""


@final
class EncryptedStore(TransformingStore):
    """Store that encrypts all content.

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

    def __init__(
        self, store: Store, keys: MasterKeys | bytes | str, *, compression: str | None = None
    ) -> None:
        masters = keys if isinstance(keys, MasterKeys) else MasterKeys(keys)
        self._encryption = _Encryption(
            masters, compression_for(compression, record_limit=max_restored_bytes(store))
        )
        super().__init__(store, self._encryption)
        self._masters = masters

    async def rewrap(self) -> RewrapResult:
        """Wrap all data keys by the current master key, so that older ones are no longer needed.

        Acquires each session's lease for a moment, and skips sessions that have another holder.
        """
        rewrapped = 0
        skipped: list[SessionKey] = []
        for tenant in sorted({"", *await self._store.tenants()}):
            after: SessionKey | None = None
            while page := await self._store.sessions(
                SessionQuery(tenant=tenant, after=after, limit=_PAGE)
            ):
                for info in page:
                    try:
                        rewrapped += await self._rewrap(info.key)
                    except (LeaseHeldError, LeaseLostError):
                        skipped.append(info.key)
                after = page[-1].key
        return RewrapResult(rewrapped, tuple(skipped))

    async def _rewrap(self, key: SessionKey) -> bool:
        entry = await keyring.find(self._store, key, self._masters)
        if entry is None or entry.is_current:
            return False
        cure = "its key is wrapped again when it is next opened"
        async with self._brief_lease(key, cure) as lease:
            await self._encryption.rewrap(self._store, lease)
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
        facts = await self._encryption.facts(self._store, key, fresh=True)
        if not facts.unproven_end:
            return False
        async with self._brief_lease(key, "close it first") as lease:
            return await self._encryption.accept_log(self._store, lease)

    @asynccontextmanager
    async def _brief_lease(self, key: SessionKey, cure: str) -> AsyncGenerator[Taken, None]:
        """Hold a session's lease, if no other process does."""
        holder = await self._store.holder(key)
        if holder is None or not (holder.released or holder.alive is False):
            raise LeaseHeldError(f"{key} is held: {cure}", key=str(key))
        lease = await take_after(self._store, key, after=holder.epoch)
        try:
            yield lease
        finally:
            with anyio.CancelScope(shield=True):
                await self._store.release(key, lease.epoch)


def _known_link(chain: RecordChain, record: Record, folded: ChainLink | None) -> ChainLink | None:
    """Return the link after an encrypted record, or the known one before an epoch record."""
    if record.kind != EPOCH:
        return chain.next_link(chain.decrypt(record).before, record)
    known = (chain.start, folded)
    return next((link for link in known if link is not None and link.seq == record.seq - 1), None)


class _SessionCipher(NamedTuple):
    """A session's cached key."""

    key: DataKey
    chain: RecordChain | None
    """None for a session that was not opened since hash chains were introduced."""
    name: str
    """The document that holds the wrapped key."""
    below: int
    """The record before which a trim removed all."""


class _Encryption(TransformProvider):
    """Data keys, hash chains and proofs of the sessions and tenants of one store.

    Caches what was used last: keys, what manifests prove, and the writers of held sessions.
    """

    kind = "encrypted"
    hidden_agent: str | None = KEYRING
    accepts_plain = False

    def __init__(self, masters: MasterKeys, compression: Compression | None) -> None:
        ciphers()  # raise for a missing package now, not at the first save
        self._masters = masters
        self._compression = compression
        self._sessions: OrderedDict[SessionKey, _SessionCipher] = OrderedDict()
        self._tenants: dict[str, DataKey] = {}
        self._facts: dict[SessionKey, Facts] = {}
        self._writers: dict[SessionKey, ChainWriter] = {}

    def max_payload_bytes(self, inner_max: int) -> int:
        return (inner_max - 2) // 4 * 3 - GROWTH - HEADER - 2

    def overhead(self) -> int:
        return GROWTH

    async def require_compatible(self, store: Store) -> None:
        await keyring.require_encrypted(store)

    async def require_readable(self, store: Store, key: SessionKey) -> None:
        self.forget(key)  # it may have been deleted and created again
        await keyring.find(store, key, self._masters)

    async def begin(self, store: Store, lease: Taken, *, is_draft: bool) -> None:
        key = lease.key
        self.forget(key)
        entry = None
        if not lease.created:
            entry = await keyring.find(store, key, self._masters)
            if entry is None:
                await keyring.require_new(store, key)
        tenant = await self._tenant(store, key.tenant)
        facts = Facts()
        if entry is not None:
            facts = self._facts_in(entry, tenant)
        if facts.epoch and not facts.is_lost and lease.head <= facts.as_of_seq:
            reason = f"its manifest is as of record {facts.as_of_seq}"
            raise chain_error(lease.head - 1, reason)
        if entry is None or not entry.is_current or not entry.chained:
            entry = await self._wrap_again(store, lease, entry, tenant)
            facts = self._facts_in(entry, tenant)
        if facts.is_lost:
            end = facts.unproven_end or lease.head - 1
            facts = msgspec.structs.replace(facts, unproven_end=end)
            _log.warning("%s", unproven_tail(key, end), extra={"session": str(key)})
        cipher = self._cache_cipher(key, entry)
        self._cache_facts(key, facts)
        assert cipher.chain is not None  # _wrap_again begins a chain
        writer = ChainWriter(cipher.chain, lease.epoch, lease.head, facts.as_of_seq)
        self._writers[key] = writer
        if lease.created and lease.record and cipher.chain.start.seq == lease.head - 1:
            record = Record(lease.head, lease.epoch, EPOCH, lease.record, end=True)
            writer.note_link(cipher.chain.next_link(cipher.chain.start, record))
        writer.remembers_all = is_draft  # they cannot be read from its log

    def note_refused(self, batch: Batch) -> None:
        writer = self._writers.get(batch.key)
        if writer is not None and writer.epoch == batch.epoch:
            writer.forget_links(batch.first)

    def note_published(self, key: SessionKey) -> None:
        if (writer := self._writers.get(key)) is not None:
            writer.remembers_all = False

    async def rewrap(self, store: Store, lease: Taken) -> None:
        entry = await keyring.find(store, lease.key, self._masters)
        if entry is None:
            return
        if lease.key.agent == KEYRING:
            before = entry.manifest or keyring.empty_manifest(lease)
            document = keyring.wrap_key(lease.key, entry.key, self._masters)
            manifest = msgspec.structs.replace(before, epoch=lease.epoch)
            await keyring.write(store, document, manifest)
        else:
            tenant = await self._tenant(store, lease.key.tenant)
            await self._wrap_again(store, lease, entry, tenant)

    async def accept_log(self, store: Store, lease: Taken) -> bool:
        key = lease.key
        entry = await keyring.find(store, key, self._masters)
        tenant = await self._tenant(store, key.tenant)
        hidden = self._hidden(entry, tenant)
        proof = None if hidden is None else hidden.proof
        if entry is None or entry.manifest is None or hidden is None or proof is None:
            return False
        if proof.lost or not proof.unproven_end:
            return False
        proof = msgspec.structs.replace(proof, epoch=lease.epoch, unproven_end=0)
        manifest = msgspec.structs.replace(entry.manifest, epoch=lease.epoch)
        hidden = msgspec.structs.replace(hidden, proof=proof)
        await store.write_documents(key, {}, with_hidden(manifest, hidden, tenant))
        self._cache_facts(key, facts_of(proof))
        return True

    async def _wrap_again(
        self,
        store: Store,
        lease: Taken,
        entry: keyring.SessionKeyEntry | None,
        tenant: DataKey,
    ) -> keyring.SessionKeyEntry:
        """Write a session's key wrapped by the newest master key, and where its chain begins.

        Creates the key if ``entry`` is None.
        """
        lost = ""
        if entry is None:
            data_key, chained, below = secrets.token_bytes(KEY_BYTES), lease.head, 0
            before = None
        else:
            data_key, chained, below = entry.key, entry.chained or lease.head, entry.below
            before = entry.manifest
            if before is None and await self._lacks_manifest(store, lease.key):
                lost = _MISSING
        hidden = HiddenManifest(About(), {}, is_begun=True)
        if before is not None:
            try:
                hidden = self._hidden(entry, tenant) or hidden
            except CorruptRecordError as error:
                lost, before = str(error), None
        base = before or keyring.empty_manifest(lease)
        manifest = msgspec.structs.replace(base, epoch=lease.epoch)
        earlier_proof = hidden.proof
        proof = proof_of(manifest, lost=lost, unproven_end=lease.head - 1 if lost else 0)
        if earlier_proof is not None:
            proof = msgspec.structs.replace(earlier_proof, epoch=lease.epoch)
        hidden = msgspec.structs.replace(hidden, proof=proof)
        document = keyring.wrap_key(lease.key, data_key, self._masters, chained, below)
        inner = with_hidden(manifest, hidden, tenant)
        await keyring.write(store, document, inner)
        # is_current, since it was written just now
        return keyring.SessionKeyEntry(data_key, True, chained, below, inner, document[0])

    def _hidden(
        self, entry: keyring.SessionKeyEntry | None, tenant: DataKey | None
    ) -> HiddenManifest | None:
        """Return the hidden part of a session's manifest; None before the first fold and proof.

        Raises:
            CorruptRecordError: The manifest was not written with the keys.

        """
        manifest = None if entry is None else entry.manifest
        if entry is None or manifest is None:
            return None
        if not has_hidden(manifest.about.title):
            if entry.chained:
                raise _not_written_with_key(manifest)
            return None
        hidden = read_hidden(manifest, tenant)
        if entry.chained and hidden.proof is None:
            raise _not_written_with_key(manifest)
        return hidden

    def _facts_in(self, entry: keyring.SessionKeyEntry, tenant: DataKey | None) -> Facts:
        try:
            hidden = self._hidden(entry, tenant)
        except CorruptRecordError:
            return Facts(is_lost=True)
        if entry.manifest is None:
            return Facts(is_lost=True)
        return Facts() if hidden is None or hidden.proof is None else facts_of(hidden.proof)

    def _cache_facts(self, key: SessionKey, facts: Facts) -> None:
        cached = self._facts.pop(key, None)
        if cached is not None and facts.is_lost and not facts.unproven_end:
            facts = msgspec.structs.replace(facts, unproven_end=cached.unproven_end)
        self._facts[key] = facts
        while len(self._facts) > _MAX_CACHED_SESSIONS:
            self._facts.pop(next(iter(self._facts)))

    async def facts(self, store: Store, key: SessionKey, *, fresh: bool) -> Facts:
        facts = self._facts.get(key)
        if facts is None or fresh:
            entry = await keyring.find(store, key, self._masters)
            tenant = await self.tenant_transform(store, key.tenant, create=False)
            facts = Facts() if entry is None else self._facts_in(entry, tenant)
            self._cache_facts(key, facts)
        return facts

    async def session_transform(
        self, store: Store, key: SessionKey, data: bytes = b""
    ) -> DataKey | None:
        cipher = await self._cipher(store, key, data)
        return None if cipher is None else cipher.key

    async def _cipher(
        self, store: Store, key: SessionKey, data: bytes = b""
    ) -> _SessionCipher | None:
        cached = self._sessions.get(key)
        if cached is not None and _has_encrypted(cached.key, data):
            self._sessions.move_to_end(key)
            return cached
        entry = await keyring.find(store, key, self._masters)
        if entry is None:
            if data:
                await keyring.require_new(store, key)  # raises, and says why there is no key
            return None
        return self._cache_cipher(key, entry)

    def _cache_cipher(self, key: SessionKey, entry: keyring.SessionKeyEntry) -> _SessionCipher:
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

    async def _tenant(self, store: Store, tenant: str) -> DataKey:
        data_key = await self.tenant_transform(store, tenant, create=True)
        assert data_key is not None  # it was created
        return data_key

    async def tenant_transform(self, store: Store, tenant: str, *, create: bool) -> DataKey | None:
        if create and tenant and "" not in self._tenants:
            # The unnamed tenant's key marks the store as encrypted.
            await self.tenant_transform(store, "", create=True)
        data_key = self._tenants.get(tenant)
        if data_key is None:
            if create:
                key = await keyring.tenant_key(store, tenant, self._masters)
            else:
                entry = await keyring.find(store, keyring_of(tenant), self._masters)
                if entry is None:
                    return None
                key = entry.key
            data_key = DataKey(key, ("tenant", tenant), self._compression)
            self._tenants[tenant] = data_key
        return data_key

    def cached_transform(self, key: SessionKey) -> Transform | None:
        cipher = self._sessions.get(key)
        return None if cipher is None else cipher.key

    def is_own(self, name: str) -> bool:
        return keyring.is_key(name)

    def new_own_documents(self, key: SessionKey) -> dict[str, bytes]:
        cipher = self._sessions[key]
        chained = 0 if cipher.chain is None else cipher.chain.begins
        return dict([keyring.wrap_key(key, cipher.key.key, self._masters, chained, cipher.below)])

    def forget(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
        self._facts.pop(key, None)
        self._writers.pop(key, None)

    # the hash chain

    async def chain_reader(
        self, store: Store, key: SessionKey, request: ReadRequest, records: Sequence[Record]
    ) -> ChainReader | None:
        if not records and key not in self._sessions:
            return None
        first = next((record.payload for record in records if record.kind != EPOCH), b"")
        cipher = await self._cipher(store, key, first)
        if cipher is None or cipher.chain is None:
            return None
        facts = partial(self._read_facts, store, key)
        trimmed = partial(self._trimmed, store, key)
        return ChainReader(store, key, cipher.chain, facts, trimmed, request)

    async def _read_facts(self, store: Store, key: SessionKey, fresh: bool) -> Facts:  # noqa: FBT001  # a callback's signature
        return await self.facts(store, key, fresh=fresh)

    def note_link(self, key: SessionKey, link: ChainLink | None) -> None:
        writer = self._writers.get(key)
        if writer is not None and link is not None:
            writer.note_link(link)

    async def batch_transform(self, store: Store, batch: Batch) -> Callable[[Batch], Batch] | None:
        key = batch.key
        cipher = await self._cipher(store, key)
        if cipher is None:
            return None
        if cipher.chain is None:
            raise LeaseLostError(
                f"epoch {batch.epoch} of {key} may not write: its lease was not acquired through "
                "this store",
                key=str(key),
                epoch=batch.epoch,
            )
        writer = await self._writer(store, key, batch.epoch, cipher.chain)
        before = batch.first - 1
        if writer.link(before) is None and writer.pending_end != before:
            try:
                writer.note_link(await self._link_after(store, key, writer, before))
            except CorruptRecordError:
                holder = await store.holder(key)
                if holder is None or holder.epoch != batch.epoch:  # another life of the session
                    newest = None if holder is None else holder.epoch
                    raise lease_lost(key, batch.epoch, newest) from None
                raise
        writer.pending_end = before + len(batch.records)
        return writer.encrypt

    async def _writer(
        self, store: Store, key: SessionKey, epoch: int, chain: RecordChain
    ) -> ChainWriter:
        writer = self._writers.get(key)
        if writer is not None and writer.epoch == epoch and writer.chain.secret == chain.secret:
            return writer
        facts = await self.facts(store, key, fresh=False)
        writer = ChainWriter(chain, epoch, await store.head(key), facts.as_of_seq)
        after = max(facts.as_of_seq, chain.begins - 1)
        async with aclosing(store.read_log(key, after=after)) as log:
            async for chunk in log:
                for record in chunk.records:
                    if record.kind != EPOCH:
                        # A batch sent again has to name the same fold, to give the same bytes.
                        writer.note_fold(chain.decrypt(record).folded, record.seq)
        writer.note_fold(facts.as_of_seq)
        self._writers[key] = writer
        return writer

    async def _link_after(
        self, store: Store, key: SessionKey, writer: ChainWriter, seq: int
    ) -> ChainLink:
        """Return the link after a record, from the last encrypted record up to it."""
        chain = writer.chain
        facts = await self.facts(store, key, fresh=False)
        folded = None if facts.is_lost else facts.link
        for known in (writer.link(seq), chain.start, folded):
            if known is not None and known.seq == seq:
                return known
        epochs: list[Record] = []
        async with aclosing(store.read_log(key, before=seq + 1, reverse=True)) as log:
            async for chunk in log:
                for record in chunk.records:
                    if record.kind == EPOCH:
                        epochs.append(record)
                    known = _known_link(chain, record, folded)
                    if known is not None:
                        link = chain.link_after_epochs(known, epochs[::-1])
                        if link.seq == seq:
                            return link
        raise chain_error(seq, "no record is known that it follows")

    async def prove(self, store: Store, manifest: Manifest) -> ManifestProof | None:
        key = manifest.key
        cipher = await self._cipher(store, key)
        if cipher is None or cipher.chain is None:
            return None
        writer = await self._writer(store, key, manifest.epoch, cipher.chain)
        link = None
        if manifest.as_of_seq >= cipher.chain.begins - 1:
            link = await self._link_after(store, key, writer, manifest.as_of_seq)
        facts = await self.facts(store, key, fresh=False)
        end = facts.unproven_end or (manifest.as_of_seq if facts.is_lost else 0)
        return proof_of(manifest, link, unproven_end=end)

    def note_fold(self, manifest: Manifest, proof: ManifestProof) -> None:
        self._cache_facts(manifest.key, facts_of(proof))
        writer = self._writers.get(manifest.key)
        if writer is not None and writer.epoch == manifest.epoch:
            writer.note_fold(manifest.as_of_seq)

    async def record_trim(self, store: Store, key: SessionKey, epoch: int, below: int) -> None:
        entry = await keyring.find(store, key, self._masters)
        if entry is None or entry.manifest is None or not entry.chained:
            return
        below = min(below, await store.head(key) + 1)
        if below <= entry.below:
            return
        tenant = await self._tenant(store, key.tenant)
        hidden = self._hidden(entry, tenant)
        assert hidden is not None  # a session with a chain has one, or `_hidden` raises
        assert hidden.proof is not None  # likewise
        proof = msgspec.structs.replace(hidden.proof, epoch=epoch)
        manifest = msgspec.structs.replace(entry.manifest, epoch=epoch)
        hidden = msgspec.structs.replace(hidden, proof=proof)
        document = keyring.wrap_key(key, entry.key, self._masters, entry.chained, below)
        await keyring.write(store, document, with_hidden(manifest, hidden, tenant))
        self._cache_facts(key, facts_of(proof))
        cipher = self._sessions.get(key)
        if cipher is not None:
            self._sessions[key] = cipher._replace(name=document[0], below=below)

    async def _trimmed(self, store: Store, key: SessionKey) -> int:
        entry = await keyring.find(store, key, self._masters)
        return 0 if entry is None else entry.below

    async def unproven_reason(self, store: Store, inner: Documents, key: SessionKey) -> str | None:
        manifest = inner.manifest
        cipher = self._sessions.get(key)
        if cipher is not None and manifest is not None and cipher.name not in manifest.documents:
            self.forget(key)  # the key was wrapped again, or the session has a new generation
        if manifest is None and not await self._lacks_manifest(store, key):
            return None
        entry = await keyring.find(store, key, self._masters)
        if entry is None:
            return None
        tenant = await self.tenant_transform(store, key.tenant, create=False)
        self._cache_facts(key, self._facts_in(entry, tenant))
        if entry.manifest is None:
            return _MISSING if entry.chained else None
        try:
            hidden = self._hidden(entry, tenant)
        except CorruptRecordError as error:
            if not entry.chained:
                raise
            return str(error)
        return None if hidden is None or hidden.proof is None else hidden.proof.lost or None

    async def _lacks_manifest(self, store: Store, key: SessionKey) -> bool:
        """Return whether a session must have a manifest: it is written before the first record."""
        return await store.head(key) > 0 and await keyring.holds_records(store, key)

    def note_proof(self, manifest: Manifest, hidden: HiddenManifest) -> None:
        cipher = self._sessions.get(manifest.key)
        if cipher is not None and cipher.name not in manifest.documents:
            # The key was wrapped again, or the session has a new generation.
            self._sessions.pop(manifest.key)
        if hidden.proof is not None:
            self._cache_facts(manifest.key, facts_of(hidden.proof))


_MISSING = "the manifest is missing or damaged, and the session had one"


def _not_written_with_key(manifest: Manifest) -> CorruptRecordError:
    return CorruptRecordError(
        f"the manifest of {manifest.key} was not written with the key", key=str(manifest.key)
    )


def _has_encrypted(data_key: DataKey, data: bytes) -> bool:
    if not data:
        return True
    raw = from_text(data, "a record") if data[:1] == b'"' else data
    return data_key.has_encrypted(raw)
