"""Encryption as a wrapper: AES-256-GCM, a data key for each session, a master key for all.

What the store sees, and what it does not, is in docs/stores.md. Whatever is read is
verified: a flipped bit, a record at another place or in another session, and a wrong key are
errors, and never an empty session. Not noticed is a whole store put back to an older copy.
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
from perdure.records.manifest import About, Manifest
from perdure.records.records import EPOCH, Record
from perdure.store import Batch, Documents, HeldLease, Store
from perdure.stores.wrapped import keyring
from perdure.stores.wrapped.chain import HEADER, ChainLink, ChainWriter, Facts, RecordChain, broken
from perdure.stores.wrapped.chain_reader import ChainReader, ReadRequest
from perdure.stores.wrapped.compressed import Compression, packing_of
from perdure.stores.wrapped.keys import GROWTH, KEY_BYTES, DataKey, MasterKeys, ciphers, derived
from perdure.stores.wrapped.layer import TransformingStore, largest_record
from perdure.stores.wrapped.manifests import (
    HiddenManifest,
    ManifestProof,
    facts_of,
    hidden_in,
    is_ours,
    proof_of,
    sealed_in,
    unproven_tail,
)
from perdure.stores.wrapped.transform import Transform, from_text

_log = logging.getLogger(__name__)

_MOST_AT_HAND = 4096
"""Sessions whose keys are kept in memory."""
_PAGE = 100


class RewrapResult(msgspec.Struct, frozen=True):
    """What a rotation of the master key did."""

    done: int
    """Keys that the current master key wraps now, and did not before."""
    left: tuple[SessionKey, ...]
    """Sessions that somebody holds: their keys are wrapped anew when they are opened next."""


@final
class EncryptedStore(TransformingStore):
    """Keep everything in a store, encrypted.

    Args:
        store: The store that keeps it.
        keys: The master key, with older ones to read what they wrapped.
        compression: ``zstd`` packs before it encrypts; lengths then tell a little of the content.

    Raises:
        ConfigError: The key or the compression does not fit.
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
            masters, packing_of(compression, record_limit=largest_record(store))
        )
        super().__init__(store, self._encryption)
        self._masters = masters

    async def rewrap(self) -> RewrapResult:
        """Wrap all data keys by the current master key; older ones are not needed then.

        Takes each session's lease for a moment, and leaves those out that somebody holds.
        """
        done = 0
        left: list[SessionKey] = []
        for tenant in sorted({"", *await self._store.tenants()}):
            after: SessionKey | None = None
            while page := await self._store.sessions(tenant=tenant, after=after, limit=_PAGE):
                for info in page:
                    try:
                        done += await self._rewrap(info.key)
                    except (LeaseHeldError, LeaseLostError):
                        left.append(info.key)
                after = page[-1].key
        return RewrapResult(done, tuple(left))

    async def _rewrap(self, key: SessionKey) -> bool:
        found = await keyring.find(self._store, key, self._masters)
        if found is None or found.is_current:
            return False
        async with self._taken(key, "its key is wrapped anew when it is opened next") as grant:
            await self._encryption.rewrap(self._store, grant)
        return True

    async def accept_log(self, key: SessionKey) -> bool:
        """Accept that a session's log may be incomplete, since its manifest was lost or forged.

        `perdure check` reports it until then. Compare the session with a copy first.

        Returns:
            Whether there was anything to accept.

        Raises:
            CorruptRecordError: The manifest is not one that was written with the keys.
            LeaseHeldError: Somebody holds the session.

        """
        facts = await self._encryption.facts(self._store, key, fresh=True)
        if not facts.unproven_end:
            return False
        async with self._taken(key, "close it first") as grant:
            return await self._encryption.accept_log(self._store, grant)

    @asynccontextmanager
    async def _taken(self, key: SessionKey, cure: str) -> AsyncGenerator[HeldLease, None]:
        """Hold a session's lease that nobody else holds."""
        holder = await self._store.holder(key)
        if holder is None or not (holder.released or holder.alive is False):
            raise LeaseHeldError(f"{key} is held: {cure}", key=str(key))
        grant = await self._store.acquire(key, after=holder.epoch)
        try:
            yield grant
        finally:
            with anyio.CancelScope(shield=True):
                await self._store.release(key, grant.epoch)


def _base(chain: RecordChain, one: Record, folded: ChainLink | None) -> ChainLink | None:
    """Return the link behind a sealed record, or the known one before an epoch record."""
    if one.kind != EPOCH:
        return chain.follow(chain.opened(one).before, one)
    known = (chain.start, folded)
    return next((link for link in known if link is not None and link.seq == one.seq - 1), None)


class _SessionCipher(NamedTuple):
    """A session's key at hand."""

    seal: DataKey
    chain: RecordChain | None
    """None for a session that nobody has opened since there are chains."""
    name: str
    """Of the document that holds the key."""
    below: int


class _Encryption:
    """Seals of sessions and tenants, with the keys that were used last at hand."""

    kind = "encrypted"
    hidden: str | None = KEYRING
    takes_plain = False

    def __init__(self, masters: MasterKeys, packing: Compression | None) -> None:
        ciphers()  # missing: said now, and not at the first save
        self._masters = masters
        self._packing = packing
        self._sessions: OrderedDict[SessionKey, _SessionCipher] = OrderedDict()
        self._tenants: dict[str, DataKey] = {}
        self._facts: dict[SessionKey, Facts] = {}
        self._writers: dict[SessionKey, ChainWriter] = {}

    def fits(self, most: int) -> int:
        return (most - 2) // 4 * 3 - GROWTH - HEADER - 2

    def overhead(self) -> int:
        return GROWTH

    async def require_fit(self, store: Store) -> None:
        await keyring.require_sealed(store)

    async def check(self, store: Store, key: SessionKey) -> None:
        self.forget(key)  # it may have been deleted and begun anew
        await keyring.find(store, key, self._masters)

    async def begin(self, store: Store, grant: HeldLease) -> None:
        key = grant.key
        self.forget(key)
        found = None
        if not grant.created:
            found = await keyring.find(store, key, self._masters)
            if found is None:
                await keyring.require_new(store, key)
        tenant = await self._tenant(store, key.tenant)
        facts = Facts()
        if found is not None:
            facts = self._facts_in(found, tenant)
        if facts.epoch and not facts.is_lost and grant.head <= facts.as_of_seq:
            raise broken(grant.head - 1, f"its manifest is as of record {facts.as_of_seq}")
        if found is None or not found.is_current or not found.chained:
            found = await self._wrap_anew(store, grant, found, tenant)
            facts = self._facts_in(found, tenant)
        if facts.is_lost:
            end = facts.unproven_end or grant.head - 1
            facts = msgspec.structs.replace(facts, unproven_end=end)
            _log.warning("%s", unproven_tail(key, end), extra={"session": str(key)})
        known = self._remember(key, found)
        self._keep(key, facts)
        assert known.chain is not None  # it was wrapped so
        self._writers[key] = ChainWriter(known.chain, grant.epoch, grant.head, facts.as_of_seq)

    async def rewrap(self, store: Store, grant: HeldLease) -> None:
        found = await keyring.find(store, grant.key, self._masters)
        if found is None:
            return
        if grant.key.agent == KEYRING:
            before = found.manifest or keyring.begun(grant)
            made = keyring.wrapped(grant.key, found.key, self._masters)
            manifest = msgspec.structs.replace(before, epoch=grant.epoch)
            await keyring.write(store, made, manifest)
        else:
            tenant = await self._tenant(store, grant.key.tenant)
            await self._wrap_anew(store, grant, found, tenant)

    async def accept_log(self, store: Store, grant: HeldLease) -> bool:
        key = grant.key
        found = await keyring.find(store, key, self._masters)
        tenant = await self._tenant(store, key.tenant)
        hidden = self._hidden(found, tenant)
        proof = None if hidden is None else hidden.proof
        if found is None or found.manifest is None or hidden is None or proof is None:
            return False
        if proof.lost or not proof.unproven_end:
            return False
        proof = msgspec.structs.replace(proof, epoch=grant.epoch, unproven_end=0)
        manifest = msgspec.structs.replace(found.manifest, epoch=grant.epoch)
        hidden = msgspec.structs.replace(hidden, proof=proof)
        await store.write_documents(key, {}, sealed_in(manifest, hidden, tenant))
        self._keep(key, facts_of(proof))
        return True

    async def _wrap_anew(
        self, store: Store, grant: HeldLease, found: keyring.SessionKeyEntry | None, tenant: DataKey
    ) -> keyring.SessionKeyEntry:
        """Write a session's key under the newest master key, and where its chain begins."""
        if found is None:
            data_key, chained, below = secrets.token_bytes(KEY_BYTES), 1, 0
            lost, before = "", None
        else:
            data_key, chained, below = found.key, found.chained or grant.head, found.below
            before = found.manifest
            lost = ""
            if before is None and await self._lacks_manifest(store, grant.key):
                lost = _MISSING
        hidden = HiddenManifest(About(), {}, is_begun=True)
        if before is not None:
            try:
                hidden = self._hidden(found, tenant) or hidden
            except CorruptRecordError as error:
                lost, before = str(error), None
        base = before or keyring.begun(grant)
        manifest = msgspec.structs.replace(base, epoch=grant.epoch)
        old = hidden.proof
        proof = proof_of(manifest, lost=lost, unproven_end=grant.head - 1 if lost else 0)
        if old is not None:
            proof = msgspec.structs.replace(old, epoch=grant.epoch)
        hidden = msgspec.structs.replace(hidden, proof=proof)
        made = keyring.wrapped(grant.key, data_key, self._masters, chained, below)
        sealed = sealed_in(manifest, hidden, tenant)
        await keyring.write(store, made, sealed)
        return keyring.SessionKeyEntry(data_key, True, sealed, made[0], chained, below)  # it is

    def _hidden(
        self, found: keyring.SessionKeyEntry | None, tenant: DataKey | None
    ) -> HiddenManifest | None:
        """Return what a session's manifest hides, None where nothing was folded or proven yet.

        Raises:
            CorruptRecordError: The manifest is not one that was written with the keys.

        """
        manifest = None if found is None else found.manifest
        if found is None or manifest is None:
            return None
        if not is_ours(manifest.about.title):
            if found.chained:
                raise _unproven(manifest)
            return None
        hidden = hidden_in(manifest, tenant)
        if found.chained and hidden.proof is None:
            raise _unproven(manifest)
        return hidden

    def _facts_in(self, found: keyring.SessionKeyEntry, tenant: DataKey | None) -> Facts:
        try:
            hidden = self._hidden(found, tenant)
        except CorruptRecordError:
            return Facts(is_lost=True)
        if found.manifest is None:
            return Facts(is_lost=True)
        return Facts() if hidden is None or hidden.proof is None else facts_of(hidden.proof)

    def _keep(self, key: SessionKey, facts: Facts) -> None:
        known = self._facts.pop(key, None)
        if known is not None and facts.is_lost and not facts.unproven_end:
            facts = msgspec.structs.replace(facts, unproven_end=known.unproven_end)
        self._facts[key] = facts
        while len(self._facts) > _MOST_AT_HAND:
            self._facts.pop(next(iter(self._facts)))

    async def facts(self, store: Store, key: SessionKey, *, fresh: bool) -> Facts:
        known = self._facts.get(key)
        if known is None or fresh:
            found = await keyring.find(store, key, self._masters)
            tenant = await self.of_tenant(store, key.tenant, make=False)
            known = Facts() if found is None else self._facts_in(found, tenant)
            self._keep(key, known)
        return known

    async def of_session(self, store: Store, key: SessionKey, data: bytes = b"") -> DataKey | None:
        known = await self._of_session(store, key, data)
        return None if known is None else known.seal

    async def _of_session(
        self, store: Store, key: SessionKey, data: bytes = b""
    ) -> _SessionCipher | None:
        known = self._sessions.get(key)
        if known is not None and _opens(known.seal, data):
            self._sessions.move_to_end(key)
            return known
        found = await keyring.find(store, key, self._masters)
        if found is None:
            if data:
                await keyring.require_new(store, key)  # says how it came to be without a key
            return None
        return self._remember(key, found)

    def _remember(self, key: SessionKey, found: keyring.SessionKeyEntry) -> _SessionCipher:
        whose = ("session", key.tenant, key.agent, key.session)
        seal = DataKey(found.key, whose, self._packing)
        chain = (
            RecordChain(seal, derived(seal.key, b"chain", 32), found.chained)
            if found.chained
            else None
        )
        known = self._sessions[key] = _SessionCipher(seal, chain, found.name, found.below)
        while len(self._sessions) > _MOST_AT_HAND:
            self._sessions.popitem(last=False)
        return known

    async def _tenant(self, store: Store, tenant: str) -> DataKey:
        seal = await self.of_tenant(store, tenant, make=True)
        assert seal is not None  # it was made
        return seal

    async def of_tenant(self, store: Store, tenant: str, *, make: bool) -> DataKey | None:
        if make and tenant and "" not in self._tenants:
            await self.of_tenant(store, "", make=True)  # the mark that the store is encrypted
        known = self._tenants.get(tenant)
        if known is None:
            if make:
                key = await keyring.tenant_key(store, tenant, self._masters)
            else:
                found = await keyring.find(store, keyring_of(tenant), self._masters)
                if found is None:
                    return None
                key = found.key
            known = self._tenants[tenant] = DataKey(key, ("tenant", tenant), self._packing)
        return known

    def at_hand(self, key: SessionKey) -> Transform | None:
        known = self._sessions.get(key)
        return None if known is None else known.seal

    def is_own(self, name: str) -> bool:
        return keyring.is_key(name)

    def own_anew(self, key: SessionKey, seal: Transform) -> dict[str, bytes]:
        assert isinstance(seal, DataKey)  # as `of_session` gave it
        known = self._sessions.get(key)
        chained = 0 if known is None or known.chain is None else known.chain.begins
        below = 0 if known is None else known.below
        return dict([keyring.wrapped(key, seal.key, self._masters, chained, below)])

    def forget(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
        self._facts.pop(key, None)
        self._writers.pop(key, None)

    # the chain

    async def following(
        self, store: Store, key: SessionKey, asked: ReadRequest, records: Sequence[Record]
    ) -> ChainReader | None:
        if not records and key not in self._sessions:
            return None
        first = next((one.payload for one in records if one.kind != EPOCH), b"")
        known = await self._of_session(store, key, first)
        if known is None or known.chain is None:
            return None
        told = partial(self._told, store, key)
        trimmed = partial(self._trimmed, store, key)
        return ChainReader(store, key, known.chain, told, trimmed, asked)

    async def _told(self, store: Store, key: SessionKey, fresh: bool) -> Facts:  # noqa: FBT001  # a port
        return await self.facts(store, key, fresh=fresh)

    def followed(self, key: SessionKey, link: ChainLink | None) -> None:
        writer = self._writers.get(key)
        if writer is not None and link is not None:
            writer.note(link)

    async def sealer(self, store: Store, batch: Batch) -> Callable[[Batch], Batch] | None:
        key = batch.key
        known = await self._of_session(store, key)
        if known is None:
            return None
        if known.chain is None:
            message = f"epoch {batch.epoch} of {key} may not write: its session was not taken here"
            raise LeaseLostError(message, key=str(key), epoch=batch.epoch)
        writer = await self._writer(store, key, batch.epoch, known.chain)
        before = batch.first - 1
        if writer.link(before) is None and writer.coming != before:
            writer.note(await self._link_at(store, key, writer, before))
        writer.coming = before + len(batch.records)
        return writer.sealed

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
                for one in chunk.records:
                    if one.kind != EPOCH:  # it may be sent again, and has to be the same then
                        writer.fold(chain.opened(one).folded, one.seq)
        writer.fold(facts.as_of_seq)
        self._writers[key] = writer
        return writer

    async def _link_at(
        self, store: Store, key: SessionKey, writer: ChainWriter, seq: int
    ) -> ChainLink:
        """Return the link behind a record: the last sealed one up to it tells."""
        chain = writer.chain
        facts = await self.facts(store, key, fresh=False)
        link = None if facts.is_lost else facts.link
        for known in (writer.link(seq), chain.start, link):
            if known is not None and known.seq == seq:
                return known
        epochs: list[Record] = []
        async with aclosing(store.read_log(key, before=seq + 1, reverse=True)) as log:
            async for chunk in log:
                for one in chunk.records:
                    if one.kind == EPOCH:
                        epochs.append(one)
                    base = _base(chain, one, link)
                    if base is not None:
                        reached = chain.reached(base, epochs[::-1])
                        if reached.seq == seq:
                            return reached
        raise broken(seq, "there is nothing that it could go on behind")

    async def proof(self, store: Store, manifest: Manifest) -> ManifestProof | None:
        key = manifest.key
        known = await self._of_session(store, key)
        if known is None or known.chain is None:
            return None
        writer = await self._writer(store, key, manifest.epoch, known.chain)
        link = None
        if manifest.as_of_seq >= known.chain.begins - 1:
            link = await self._link_at(store, key, writer, manifest.as_of_seq)
        facts = await self.facts(store, key, fresh=False)
        end = facts.unproven_end or (manifest.as_of_seq if facts.is_lost else 0)
        return proof_of(manifest, link, unproven_end=end)

    def folded(self, manifest: Manifest, proof: ManifestProof) -> None:
        self._keep(manifest.key, facts_of(proof))
        writer = self._writers.get(manifest.key)
        if writer is not None and writer.epoch == manifest.epoch:
            writer.fold(manifest.as_of_seq)

    async def trimming(self, store: Store, key: SessionKey, epoch: int, below: int) -> None:
        found = await keyring.find(store, key, self._masters)
        if found is None or found.manifest is None or not found.chained:
            return
        below = min(below, await store.head(key) + 1)
        if below <= found.below:
            return
        tenant = await self._tenant(store, key.tenant)
        hidden = self._hidden(found, tenant)
        assert hidden is not None  # a chained session has one, or is damaged
        assert hidden.proof is not None  # likewise
        proof = msgspec.structs.replace(hidden.proof, epoch=epoch)
        manifest = msgspec.structs.replace(found.manifest, epoch=epoch)
        hidden = msgspec.structs.replace(hidden, proof=proof)
        made = keyring.wrapped(key, found.key, self._masters, found.chained, below)
        await keyring.write(store, made, sealed_in(manifest, hidden, tenant))
        self._keep(key, facts_of(proof))
        known = self._sessions.get(key)
        if known is not None:
            self._sessions[key] = known._replace(name=made[0], below=below)

    async def _trimmed(self, store: Store, key: SessionKey) -> int:
        found = await keyring.find(store, key, self._masters)
        return 0 if found is None else found.below

    async def unproven(self, store: Store, inner: Documents, key: SessionKey) -> str | None:
        """Say why a manifest that proves nothing may not be used; None where that is well."""
        manifest = inner.manifest
        known = self._sessions.get(key)
        if known is not None and manifest is not None and known.name not in manifest.documents:
            self.forget(key)  # wrapped anew, or another life
        if manifest is None and not await self._lacks_manifest(store, key):
            return None
        found = await keyring.find(store, key, self._masters)
        if found is None:
            return None
        tenant = await self.of_tenant(store, key.tenant, make=False)
        self._keep(key, self._facts_in(found, tenant))
        if found.manifest is None:
            return _MISSING if found.chained else None
        try:
            hidden = self._hidden(found, tenant)
        except CorruptRecordError as error:
            if not found.chained:
                raise
            return str(error)
        return None if hidden is None or hidden.proof is None else hidden.proof.lost or None

    async def _lacks_manifest(self, store: Store, key: SessionKey) -> bool:
        """Say whether a session ought to have a manifest: it gets one before its first record."""
        return await store.head(key) > 0 and await keyring.holds_records(store, key)

    def proven(self, manifest: Manifest, hidden: HiddenManifest) -> None:
        known = self._sessions.get(manifest.key)
        if known is not None and known.name not in manifest.documents:
            self._sessions.pop(manifest.key)  # wrapped anew, or another life
        if hidden.proof is not None:
            self._keep(manifest.key, facts_of(hidden.proof))


_MISSING = "the manifest is missing or damaged, and the session had one"


def _unproven(manifest: Manifest) -> CorruptRecordError:
    message = f"the manifest of {manifest.key} was not written with the key"
    return CorruptRecordError(message, key=str(manifest.key))


def _opens(seal: DataKey, data: bytes) -> bool:
    if not data:
        return True
    raw = from_text(data, "a record") if data[:1] == b'"' else data
    return seal.opens(raw)
