"""A store around a store: the port, with everything that people wrote sealed on its way in.

What the inner store must know stays as it is: keys, seqs, epochs, kinds, ends of groups, times,
counters and the names of documents. All else (payloads, documents, blobs, what is in an
inbox, titles, owners, tags) reaches it sealed. Leases and fencing are the inner store's.

Sealing much is done in a thread; cancelling a call then is as with the inner store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple, Protocol

import anyio
import msgspec

from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    LeaseLostError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
    TooLargeError,
)
from perdure.memory.documents import SESSION
from perdure.records.blob_names import verified
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest
from perdure.records.records import EPOCH, Entry, Record
from perdure.store import (
    Batch,
    BlobSweep,
    Capabilities,
    DeadLetter,
    Document,
    Documents,
    HeartbeatRequests,
    HeldLease,
    InboxLimit,
    LeaseState,
    LogChunk,
    Outcome,
    PendingItem,
    SessionInfo,
    Status,
    Store,
    open_read_only,
)
from perdure.stores.wrapped.batches import (
    done,
    opened_item,
    opened_letter,
    opened_records,
    posted,
    require_hashed,
    sealed_batch,
    sealed_blobs,
    sealed_letter,
)
from perdure.stores.wrapped.chain import ChainLink
from perdure.stores.wrapped.chain_reader import ChainReader, ReadRequest
from perdure.stores.wrapped.manifests import (
    HiddenManifest,
    ManifestProof,
    folded_of,
    hidden_in,
    inner_of,
    is_ours,
    listed,
    opened_documents,
    outer_of,
    sealed_document,
    unfit,
    unproven_tail,
)
from perdure.stores.wrapped.transform import Transform

# The calls that a wrapper passes on as they are


class Passing:
    """Leases, heads and the like: they hold nothing that people wrote."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def owner(self) -> str:
        """The inner store's id as a holder of leases."""
        return self._store.owner

    @property
    def local_path(self) -> str | None:
        """The inner store's, if it has one."""
        path: str | None = getattr(self._store, "local_path", None)
        return path

    async def aclose(self) -> None:
        """Close the inner store."""
        await self._store.aclose()

    async def head(self, key: SessionKey) -> int:
        return await self._store.head(key)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self._store.release(key, epoch)

    async def heartbeat(self) -> HeartbeatRequests:
        return await self._store.heartbeat()

    async def news(self, at_most: float) -> None:
        await self._store.news(at_most)

    async def request_handover(self, key: SessionKey, holder: LeaseState) -> None:
        await self._store.request_handover(key, holder)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        await self._store.settle(key, epoch, op_ids)

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        # A store that keeps no dead letters may not know the option.
        return await (
            self._store.waiting(dead_letters=True) if dead_letters else self._store.waiting()
        )

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        return await self._store.drop_dead_letters(key, op_ids)

    async def scrub(self) -> None:
        await self._store.scrub()


# A store around a store: the port, with everything that people wrote sealed on its way in


class SupportsTransform(Protocol):
    """Bring the seals, with whatever the inner store keeps for them."""

    kind: str
    """What this does to a store, for people."""
    hidden: str | None
    """An agent id that is the wrapper's own."""
    takes_plain: bool
    """Whether what was kept without the wrapper is read as it is."""

    def fits(self, most: int) -> int:
        """Return the largest payload whose sealed form has at most so many bytes."""
        ...

    def overhead(self) -> int:
        """Return how many bytes a small blob grows by."""
        ...

    async def require_fit(self, store: Store) -> None:
        """Raise for a store whose contents this wrapper would not read, or would mix."""
        ...

    async def check(self, store: Store, key: SessionKey) -> None:
        """Raise before a session is taken that could not be read."""
        ...

    async def begin(self, store: Store, grant: HeldLease) -> None:
        """Prepare a session that was just acquired."""
        ...

    async def of_session(
        self, store: Store, key: SessionKey, data: bytes = b""
    ) -> Transform | None:
        """Return the seal of a session, which opens ``data``; None if it has none."""
        ...

    async def of_tenant(self, store: Store, tenant: str, *, make: bool) -> Transform | None:
        """Return the seal of a tenant's blobs, listings and inboxes; None if it has none."""
        ...

    async def following(
        self, store: Store, key: SessionKey, asked: ReadRequest, records: Sequence[Record]
    ) -> ChainReader | None:
        """Return what follows the chain of a log, of which the first records are there."""
        ...

    def followed(self, key: SessionKey, link: ChainLink | None) -> None:
        """Take note of the link behind a log's last record."""
        ...

    async def sealer(self, store: Store, batch: Batch) -> Callable[[Batch], Batch] | None:
        """Return what seals a batch; None if its session has no seal."""
        ...

    async def proof(self, store: Store, manifest: Manifest) -> ManifestProof | None:
        """Return what proves a manifest; None where nothing does."""
        ...

    def folded(self, manifest: Manifest, proof: ManifestProof) -> None:
        """Take note of a fold that is durable."""
        ...

    async def trimming(self, store: Store, key: SessionKey, epoch: int, below: int) -> None:
        """Make durable that the records before one are to be removed."""
        ...

    async def unproven(self, store: Store, inner: Documents, key: SessionKey) -> str | None:
        """Say why documents without a proof may not be used; None where they may."""
        ...

    def proven(self, manifest: Manifest, hidden: HiddenManifest) -> None:
        """Take note of what a manifest proves."""
        ...

    def at_hand(self, key: SessionKey) -> Transform | None:
        """Return the seal of a session that was used before, without waiting."""
        ...

    def is_own(self, name: str) -> bool:
        """Say whether a document of this name is the wrapper's own."""
        ...

    def own_anew(self, key: SessionKey, seal: Transform) -> dict[str, bytes]:
        """Return the wrapper's own documents of a session that no manifest names any more."""
        ...

    def forget(self, key: SessionKey) -> None:
        """Drop what is remembered of a session."""
        ...


def largest_record(store: Store) -> int:
    """Return the most bytes that a record or a post may have once it is opened."""
    return max(store.capabilities.max_record_bytes, MAX_RECORD_BYTES)


class _ToSeal(NamedTuple):
    seal: Callable[[Batch], Batch]
    size: int


class TransformingStore(Passing):
    """The port, sealed. What both wrappers share; not for use by itself."""

    def __init__(self, store: Store, seals: SupportsTransform) -> None:
        super().__init__(store)
        self._seals = seals
        self._most = seals.fits(store.capabilities.max_record_bytes)

    @property
    def capabilities(self) -> Capabilities:
        """The inner store's, with records a little smaller."""
        return msgspec.structs.replace(self._store.capabilities, max_record_bytes=self._most)

    @property
    def location(self) -> str:
        """Where the inner store keeps things, and what is done to them."""
        return f"{self._store.location} ({self._seals.kind})"

    async def open(self) -> None:
        """Open the inner store, and see that it is one for this wrapper.

        Raises:
            ConfigError: What it holds was written without.

        """
        await self._store.open()
        await self._require_fit_store()

    async def open_read_only(self) -> None:
        """Open the inner store to read it, and see that it is one for this wrapper."""
        await open_read_only(self._store)
        await self._require_fit_store()

    async def _require_fit_store(self) -> None:
        try:
            await self._seals.require_fit(self._store)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._store.aclose()
            raise

    async def _session(self, key: SessionKey, data: bytes = b"") -> Transform:
        seal = await self._seals.of_session(self._store, key, data)
        if seal is None:
            message = (
                f"the key of {key} is not there, and what it sealed is: restore its documents "
                "from a copy"
            )
            raise CorruptRecordError(message, key=str(key))
        return seal

    async def _tenant(self, tenant: str) -> Transform:
        seal = await self._seals.of_tenant(self._store, tenant, make=True)
        assert seal is not None  # it was made
        return seal

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Seal each batch, and append."""
        found = [await self._sealer(batch) for batch in batches]
        size = sum(one.size for one in found if isinstance(one, _ToSeal))

        def seal_all() -> list[Batch | Outcome]:
            return [
                one.seal(batch) if isinstance(one, _ToSeal) else one
                for one, batch in zip(found, batches, strict=True)
            ]

        sealed = await done(size, seal_all)
        rest = [one for one in sealed if isinstance(one, Batch)]
        outcomes = iter(await self._store.append_many(rest) if rest else ())
        return [one if isinstance(one, Outcome) else next(outcomes) for one in sealed]

    async def _sealer(self, batch: Batch) -> _ToSeal | Outcome:
        try:
            size = self._require_fit(batch)
            seal = await self._seals.sealer(self._store, batch)
            if seal is None:
                message = f"epoch {batch.epoch} of {batch.key} may not write: nobody has it"
                lost = LeaseLostError(message, key=str(batch.key), epoch=batch.epoch, newest=0)
                return Outcome(Status.CONFLICT, lost)
            return _ToSeal(seal, size)
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
            message = f"records of the kind {EPOCH!r} are the store's own: choose another"
            raise NotStorableError(message, key=str(batch.key))
        return sum(sizes)

    def _require_size(self, key: SessionKey, what: str, sizes: Sequence[int]) -> None:
        """Refuse what would not be opened again, however small it is once it is packed."""
        largest = max(sizes, default=0)
        if largest > self._most:
            message = (
                f"{what} {key} has {largest} bytes, the limit is {self._most}: keep large values "
                "as blobs"
            )
            raise TooLargeError(message, key=str(key), size=largest)

    async def read_log(  # noqa: C901  # both wrappers' reading, chunk by chunk
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records, and open them."""
        chunks = self._store.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        asked = ReadRequest(after, before, limit, reverse)
        following: ChainReader | None = None
        settled, is_first = True, True
        async with aclosing(chunks):
            async for chunk in chunks:
                settled = settled and chunk.settled
                if is_first and chunk.records:
                    is_first = False
                    following = await self._seals.following(self._store, key, asked, chunk.records)
                if following is None:
                    yield LogChunk(await self.opened(key, chunk.records), chunk.settled)
                elif records := await following.take(chunk.records):
                    yield LogChunk(tuple(records), settled)
        if is_first:
            following = await self._seals.following(self._store, key, asked, ())
        if following is not None:
            records = await following.rest()
            if not reverse and before is None and limit is None:
                self._seals.followed(key, following.link)
            if records or not settled:
                yield LogChunk(tuple(records), settled)

    async def opened(self, key: SessionKey, records: Sequence[Record]) -> tuple[Record, ...]:
        """Return records as they were before they were sealed.

        Raises:
            ConfigError: No key that was given opens them.
            CorruptRecordError: One is damaged, or belongs elsewhere.

        """
        first = next((one for one in records if one.kind != EPOCH), None)
        if first is None:
            return tuple(records)
        seal = await self._session(key, first.payload)
        size = sum(len(one.payload) for one in records)
        return await done(size, lambda: opened_records(seal, records))

    def seal_spill(
        self, key: SessionKey, epoch: int, base: int, entries: Sequence[Entry]
    ) -> tuple[Entry, ...] | None:
        """Seal what is kept beside the store at shutdown, at once; None without the key at hand."""
        seal = self._seals.at_hand(key)
        if seal is None:
            return None
        return sealed_batch(seal, Batch(key, epoch, base + 1, tuple(entries))).records

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove records, and remember that it was perdure who did."""
        await self._seals.trimming(self._store, key, epoch, below)
        return await self._store.trim(key, epoch, below)

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read documents, and open them."""
        inner = await self._store.read_documents(key, names)
        manifest = inner.manifest
        hidden = await self._hidden(key, inner)
        if manifest is not None and hidden is not None and _proves(hidden):
            self._seals.proven(manifest, hidden)
        elif why := await self._seals.unproven(self._store, inner, key):
            return self._unproven(inner, why, _tail(key, hidden, why))
        if manifest is None or hidden is None or hidden.is_begun:
            return self._foreign(inner)
        outer = outer_of(manifest, hidden)
        lost = [name for name in inner.damaged if not self._seals.is_own(name)]
        wanted = {name: one for name, one in inner.found.items() if not self._seals.is_own(name)}
        found: dict[str, Document] = {}
        if wanted:
            seal = await self._session(key, next(iter(wanted.values())).data)
            size = sum(len(one.data) for one in wanted.values())
            found = await done(size, lambda: opened_documents(seal, wanted, hidden))
        damaged = (*lost, *(name for name in wanted if name not in found))
        sealed = {**inner.remains, **{name: one.data for name, one in wanted.items()}}
        remains = {name: sealed[name] for name in damaged if name in sealed}
        tail = _tail(key, hidden) or inner.unproven_tail
        return Documents(outer, found, damaged, remains=remains, unproven_tail=tail)

    async def _hidden(self, key: SessionKey, inner: Documents) -> HiddenManifest | None:
        manifest = inner.manifest
        if manifest is None or not is_ours(manifest.about.title):
            return None
        tenant = await self._seals.of_tenant(self._store, key.tenant, make=False)
        try:
            return hidden_in(manifest, tenant)
        except CorruptRecordError:
            if await self._seals.unproven(self._store, inner, key):
                return None  # which is told
            raise

    def _unproven(self, inner: Documents, why: str, tail: str) -> Documents:
        """Answer for a manifest that is not what was written: all that it lists is damaged."""
        listed = () if inner.manifest is None else tuple(inner.manifest.documents)
        names = [name for name in (*listed, *inner.damaged) if not self._seals.is_own(name)]
        lost = tuple(dict.fromkeys(names)) or (SESSION,)
        found = {name: one.data for name, one in inner.found.items()}
        remains = {name: data for name, data in {**inner.remains, **found}.items() if name in lost}
        because = dict.fromkeys(lost, why)
        return Documents(damaged=lost, why=because, remains=remains, unproven_tail=tail)

    def _foreign(self, inner: Documents) -> Documents:
        """Answer for a manifest that no engine has folded through this wrapper yet."""
        manifest = inner.manifest
        if manifest is None:
            left = [name for name in inner.damaged if not self._seals.is_own(name)]
            remains = {name: inner.remains[name] for name in left if name in inner.remains}
            return Documents(damaged=tuple(left), remains=remains)
        if self._own(manifest):
            return Documents()
        return inner if self._seals.takes_plain else Documents()

    def _own(self, manifest: Manifest | None) -> dict[str, FoldedDocument]:
        listed = {} if manifest is None else manifest.documents
        return {name: one for name, one in listed.items() if self._seals.is_own(name)}

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Seal documents and what their manifest tells, and write them."""
        if taken := self._own(manifest):
            message = f"documents named as {min(taken)} are this store's own: choose another name"
            raise NotStorableError(message, key=str(key), documents=sorted(taken))
        seal = await self._seals.of_session(self._store, key)
        if seal is None:
            message = f"epoch {manifest.epoch} of {key} may not write: nobody has it"
            raise LeaseLostError(message, key=str(key), epoch=manifest.epoch, newest=0)
        tenant = await self._tenant(key.tenant)
        before = (await self._store.read_documents(key, ())).manifest
        plain = {name: documents[name] for name in documents if name in manifest.documents}
        proof = await self._seals.proof(self._store, manifest)

        def seal_all() -> dict[str, bytes]:
            return {
                name: sealed_document(seal, name, data, proof, manifest.documents[name].as_of_seq)
                for name, data in plain.items()
            }

        sealed = await done(sum(map(len, plain.values())), seal_all)
        own = self._own(before)
        anew = {} if own else self._seals.own_anew(key, seal)
        own |= {name: folded_of(data, manifest.as_of_seq) for name, data in anew.items()}
        inner = inner_of(manifest, sealed, before, own, tenant, proof)
        for name in unfit(manifest, plain):  # the engine's own promise is broken: say it later
            lost = msgspec.structs.replace(inner.documents[name], sha256="0" * 64)
            inner.documents[name] = lost
        await self._store.write_documents(key, sealed | anew, inner)
        if proof is not None:
            self._seals.folded(manifest, proof)

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Seal blobs under names of their own, and keep them."""
        await done(sum(map(len, blobs.values())), lambda: require_hashed(blobs))
        if not blobs:
            return
        seal = await self._tenant(tenant)
        sealed = await sealed_blobs(seal, blobs)
        await self._store.put_blobs(tenant, {seal.name(name): sealed[name] for name in sealed})

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, opened and verified; None when there is none."""
        seal = await self._seals.of_tenant(self._store, tenant, make=False)
        if seal is None:
            return None
        data = await self._store.get_blob(tenant, seal.name(name))
        if data is None:
            return await self._store.get_blob(tenant, name) if self._seals.takes_plain else None
        return await done(len(data), lambda: verified(name, seal.open(("blob", name), data)))

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> BlobSweep:
        """The bytes are those that people put, where blobs are not packed."""
        inner = await self._inner_names(tenant, reachable)
        swept = await self._store.sweep(tenant, inner, older_than)
        freed = max(swept.bytes - swept.removed * self._seals.overhead(), 0)
        return msgspec.structs.replace(swept, bytes=freed)

    async def blob_names(self, tenant: str) -> list[str]:
        seal = await self._seals.of_tenant(self._store, tenant, make=False)
        names: set[str] = set()
        for inner in await self._store.blob_names(tenant):
            if inner.startswith("x"):
                name = seal.named(inner) if seal is not None else None
                if name is not None:
                    names.add(name)
            elif self._seals.takes_plain:
                names.add(inner)
        return sorted(names)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        inner = await self._inner_names(tenant, names)
        there = set(inner).intersection(await self._store.blob_names(tenant))
        freed = await self._store.remove_blobs(tenant, inner)
        return max(freed - len(there) * self._seals.overhead(), 0)

    async def _inner_names(self, tenant: str, names: Collection[str]) -> list[str]:
        seal = await self._seals.of_tenant(self._store, tenant, make=False)
        plain = list(names) if self._seals.takes_plain else []
        return plain if seal is None else [*map(seal.name, names), *plain]

    # leases

    async def holder(self, key: SessionKey) -> LeaseState | None:
        """Who has the wrapper's own sessions is its own affair."""
        return None if key.agent == self._seals.hidden else await self._store.holder(key)

    async def acquire(self, key: SessionKey, *, after: int) -> HeldLease:
        """Take the session, and see that it can be read and written."""
        if key.agent == self._seals.hidden:
            message = f"the agent id {key.agent!r} is this store's own: choose another"
            raise ConfigError(message, option="agent id", value=key.agent)
        if after:
            await self._seals.check(self._store, key)
        grant = await self._store.acquire(key, after=after)
        try:
            await self._seals.begin(self._store, grant)
        except BaseException:  # nobody knows that it was taken
            with anyio.CancelScope(shield=True), suppress(PerdureError):
                await self._store.release(key, grant.epoch)
            raise
        return grant

    # inbox

    async def post(
        self, key: SessionKey, items: Sequence[PendingItem], *, limit: InboxLimit | None = None
    ) -> int:
        """Seal items, and leave them for a session."""
        if not items:
            return await self._store.post(key, (), limit=limit)
        self._require_size(key, "a post to", [len(item.payload) for item in items])
        seal = await self._tenant(key.tenant)
        sealed = [
            msgspec.structs.replace(
                item, payload=seal.seal_payload(posted(key, item), item.payload)
            )
            for item in items
        ]
        return await self._store.post(key, sealed, limit=limit)

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[PendingItem]:
        """Return what waits for a session, opened."""
        items = await self._store.take(key, epoch, limit=limit)
        if not items:
            return []
        seal = await self._tenant(key.tenant)
        return [opened_item(seal, key, item) for item in items]

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        """Seal dead letters, and set them aside."""
        seal = await self._tenant(key.tenant)
        await self._store.reject(key, epoch, [sealed_letter(seal, key, one) for one in letters])

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        """Return dead letters, opened."""
        letters = await self._store.dead_letters(key)
        if not letters:
            return []
        seal = await self._tenant(key.tenant)
        by_key = not self._seals.takes_plain
        return [opened_letter(seal, key, one, by_key=by_key) for one in letters]

    # directory

    async def sessions(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionKey | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        seal = await self._seals.of_tenant(self._store, tenant, make=False)
        if seal is None and (owner is not None or tag is not None):
            return []
        found: list[SessionInfo] = []
        while len(found) < limit:
            page = await self._store.sessions(
                tenant=tenant,
                owner=owner if owner is None or seal is None else seal.token(owner),
                tag=tag if tag is None or seal is None else seal.token(tag),
                prefix=prefix,
                after=after,
                limit=limit - len(found),
            )
            found += [listed(one, seal) for one in page if one.key.agent != self._seals.hidden]
            if not page:
                break
            after = page[-1].key
        return found

    async def tenants(self) -> list[str]:
        found = await self._store.tenants()
        if self._seals.hidden is None or "" not in found:
            return found
        # The mark of encryption lies with the unnamed tenant, who may have nothing else.
        there = await self.sessions(limit=1) or await self._store.blob_names("")
        return found if there else [name for name in found if name]

    async def delete(self, key: SessionKey, epoch: int) -> None:
        """Remove what the session owns, its key included."""
        await self._store.delete(key, epoch)
        self._seals.forget(key)


def _tail(key: SessionKey, hidden: HiddenManifest | None, why: str = "") -> str:
    """Say why a log may not be complete; empty where nothing says so."""
    end = 0 if hidden is None or hidden.proof is None else hidden.proof.unproven_end
    return unproven_tail(key, end, why) if end or why else ""


def _proves(hidden: HiddenManifest) -> bool:
    return hidden.proof is not None and not hidden.proof.lost
