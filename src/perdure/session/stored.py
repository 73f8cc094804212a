"""A manager's store: sessions with what comes before their logs, around any store.

A pruned session, and what was copied of one, begins with documents: they stand in for those that
are lost. A session of before 0.1.0 may begin with records of others: `perdure.lineage` reads them.
What is known of a session that is held here is not read again.

A refused batch is compared with the log: the store may have gone back to an earlier state and
lost records that it had acknowledged. Large media of a batch are put into blobs before its records.
"""

from __future__ import annotations

import contextlib
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from typing import final

import anyio
import msgspec

from perdure import lineage
from perdure._lib.tasks import each
from perdure.autosave.core import REFUSALS
from perdure.errors import CorruptRecordError, PerdureError, UnsupportedVersionError
from perdure.records.chunks import name_of
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, FoldedDocuments, Manifest, Origin, origin_in
from perdure.records.media import may_lift
from perdure.records.records import Record
from perdure.restore.ladder import validated
from perdure.session.copied import renamed
from perdure.session.media import Filled, append_with_media
from perdure.session.refused import explain_refusal
from perdure.store import (
    Batch,
    Document,
    Documents,
    Held,
    LogChunk,
    Outcome,
    RestoreData,
    Status,
    Store,
    SupportsBeginAppend,
    SupportsReadMany,
    SupportsRestore,
    Taken,
    Terms,
    first_record,
    record_at,
    shortcut,
)
from perdure.stores.delegate import DelegatingStore


class _HeldSession(msgspec.Struct):
    """Facts about a session that is held here."""

    epoch: int
    base: Origin | None
    begun: int = 0
    """The epoch's first record."""
    is_folded: bool = False
    """True if it has all documents that it began with, for itself."""


def followed(store: Store) -> SessionStore:
    """Return a store that reads what comes before logs; unchanged if it already does."""
    store = store.inner if isinstance(store, Filled) else store
    return store if isinstance(store, SessionStore) else SessionStore(store)


def kept_documents(documents: Documents) -> tuple[str, dict[str, bytes]]:
    """Return the blobs that keep documents, and the name of their list, "" for none."""
    manifest = documents.manifest
    if manifest is None or documents.damaged:
        return "", {}
    blobs = {name_of(document.data): document.data for document in documents.found.values()}
    listed = {
        name: msgspec.structs.replace(manifest.documents[name], sha256=name_of(document.data))
        for name, document in documents.found.items()
    }
    kept = FoldedDocuments(manifest.as_of_seq, listed, manifest.counters, manifest.about)
    data = encode(kept)
    return name_of(data), {**blobs, name_of(data): data}


async def folded(
    store: Store, key: SessionKey, base: Origin, names: Collection[str] | None
) -> Documents:
    """Return the documents that an origin names, as those of the session."""
    if not base.folded:
        return Documents()
    kept = decode(await lineage.blob_of(store, key, base.folded), FoldedDocuments)
    found = {
        name: Document(
            renamed(name, await lineage.blob_of(store, key, document.sha256), key),
            document.as_of_seq,
        )
        for name, document in kept.documents.items()
        if names is None or name in names
    }
    listed = {
        name: FoldedDocument.of(document.as_of_seq, document.data)
        for name, document in found.items()
    }
    manifest = Manifest(
        key=key,
        epoch=0,
        as_of_seq=kept.as_of_seq,
        counters=kept.counters,
        documents={**kept.documents, **listed},
        about=kept.about,
        base=base,
    )
    return Documents(manifest, found)


def _up_to(have: Documents, seq: int) -> Documents:
    """Return documents as of a record up to *seq*, none if they are of a later one.

    A killed fold leaves documents that are newer than their manifest: those are unusable.
    """
    if have.manifest is None or have.manifest.as_of_seq > seq:
        return Documents()
    late = {name for name, document in have.found.items() if document.as_of_seq > seq}
    if not late:
        return have
    return msgspec.structs.replace(
        have,
        found={name: document for name, document in have.found.items() if name not in late},
        damaged=(*have.damaged, *sorted(late)),
        why={**have.why, **dict.fromkeys(late, f"it is newer than record {seq}")},
    )


@final
class SessionStore(DelegatingStore):
    """A manager's store; see the module."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._direct = shortcut(store, SupportsBeginAppend)
        self._restoring = shortcut(store, SupportsRestore)
        self._many = shortcut(store, SupportsReadMany)
        self._held: dict[SessionKey, _HeldSession] = {}

    async def aclose(self) -> None:
        self._held.clear()
        await self.inner.aclose()

    # What comes before a session's log.

    async def base_of(self, key: SessionKey) -> Origin | None:
        """Return what comes before a session's own log; None for most sessions.

        Raises:
            CorruptRecordError: The session's log is damaged.

        """
        held = self._held.get(key)
        if held is not None:
            return held.base
        data = RestoreData(await self.inner.read_documents(key, ()))
        return await lineage.base_of(self.inner, key, data)

    def assume_plain(self, key: SessionKey) -> None:
        """Take it as known that nothing comes before a session's own log."""
        self._held[key] = _HeldSession(2**62, None)

    async def beginning_of(self, key: SessionKey) -> Origin:
        """Return the origin that a session's history begins with.

        Its ``cut`` is the last record that was removed, 0 for a whole history.
        """
        base = await self.base_of(key)
        while base is not None and not base.cut and not base.kept and base.parent is not None:
            parent = base.parent
            base = await lineage.above(self, key, base)
            key = parent
        return base or Origin()

    async def has_removed(self, key: SessionKey, base: Origin) -> bool:
        """Return whether a session's own log has records that a pruning was to remove.

        The first epoch of a copy of what was pruned names what comes before it, and stays.
        """
        first = await first_record(self.inner.read_log(key, limit=1))
        return first is not None and first.seq <= base.cut and origin_in(first) != base

    @contextlib.contextmanager
    def rebased(self, key: SessionKey, epoch: int, base: Origin) -> Iterator[None]:
        """Note that a session held here has a new origin in its log, unless the block fails."""
        before = self._held.get(key)
        known = before or _HeldSession(epoch, None)
        # From now on each fold names it: `write_documents` adds the base of a held session.
        self._held[key] = msgspec.structs.replace(known, epoch=epoch, base=base)
        try:
            yield
        except BaseException:
            held = self._held.get(key)
            if held is not None and held.epoch == epoch:  # else it was lost meanwhile
                self._held[key] = before or _HeldSession(epoch, None)
            raise

    # The log.

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        if self._has_media(batches):
            outcomes = await append_with_media(self.inner, batches)
        else:
            outcomes = await self.inner.append_many(batches)
        for place, (batch, outcome) in enumerate(zip(batches, outcomes, strict=False)):
            if outcome.status in REFUSALS:
                outcomes[place] = await self._refused(batch, outcome)
        return outcomes

    async def _refused(self, batch: Batch, outcome: Outcome) -> Outcome:
        """Distinguish a takeover, or an invalid batch, from a store that has lost records."""
        held = self._held.get(batch.key)
        if outcome.status is Status.CONFLICT:
            self.forget(batch.key)
        if held is not None and held.epoch == batch.epoch:
            outcome = await explain_refusal(self.inner, batch, outcome, held.begun)
            if outcome.status is Status.IN_DOUBT:  # not known yet
                self._held[batch.key] = held
        return outcome

    def begun_at(self, key: SessionKey, epoch: int) -> int:
        """Return the seq of the epoch record under which this store holds a session; 0: unknown."""
        held = self._held.get(key)
        return held.begun if held is not None and held.epoch == epoch else 0

    def begin_append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Outcome]], object]
    ) -> bool:
        """Append without a task, where the inner store can, and no media have to be put first."""
        if self._direct is None or self._has_media(batches):
            return False
        return self._direct.begin_append(batches, done)

    def _has_media(self, batches: Sequence[Batch]) -> bool:
        for batch in batches:
            if may_lift(batch.records):
                return self.capabilities.blobs
        return False

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records, including those before the session's own log."""
        base = await self.base_of(key)
        # Up to the cut all counts as removed, even where a killed pruning has left records.
        after = after if base is None else max(after, base.cut)
        if base is None or not base.at:
            log = self.inner.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        else:
            log = lineage.read(self, key, base, after, before, limit, reverse=reverse)
        async with contextlib.aclosing(log):
            async for chunk in log:
                yield chunk

    async def has(self, key: SessionKey, seq: int, epoch: int) -> bool:
        """Return whether a session has a record with this number and epoch."""
        record = await record_at(self, key, seq)
        return record is not None and record.epoch == epoch

    async def head(self, key: SessionKey) -> int:
        own = await self.inner.head(key)
        base = await self.base_of(key) if own else None
        # A fork's own log counts from 1, after its parent's records.
        return own + (base.at if base else 0)

    # Documents.

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read documents: the session's own, else those that it began with."""
        return await self._completed(key, names, await self.inner.read_documents(key, names))

    async def read_for_restore(
        self, key: SessionKey, names: Collection[str] | None = None, *, newest: int = 0
    ) -> RestoreData:
        """Read documents as above, and if the inner store can, the log after them."""
        data = await self._read_inner(key, names, newest)
        manifest = data.documents.manifest
        if data.newest and (manifest is None or manifest.base is not None):
            # Of a pruned log some may only have been left by a pruning that was killed.
            data = msgspec.structs.replace(data, newest=())
        return await self._with_origin(key, names, data)

    async def read_many_for_restore(
        self, keys: Sequence[SessionKey], names: Collection[str] | None = None
    ) -> list[RestoreData | None]:
        """Read the same of several sessions, at once if the inner store can."""
        found: dict[SessionKey, RestoreData | None] = {}
        if self._many is not None:
            read = await self._many.read_many_for_restore(keys, names)
            for key, data in zip(keys, read, strict=True):
                found[key] = None if data is None else await self._with_origin(key, names, data)
        else:

            async def read_one(key: SessionKey) -> None:
                found[key] = None
                with contextlib.suppress(CorruptRecordError, UnsupportedVersionError):
                    found[key] = await self.read_for_restore(key, names)

            await each(keys, read_one)
        return [found[key] for key in keys]

    async def read_logs(self, keys: Sequence[SessionKey]) -> list[tuple[Record, ...] | None]:
        """Read logs at once if the inner store can; None for one that is read by itself.

        As is one with history before it.
        """
        if self._many is None:
            return [None] * len(keys)
        logs = await self._many.read_logs(keys)
        return [None if log is None or any(map(origin_in, log)) else log for log in logs]

    async def _with_origin(
        self, key: SessionKey, names: Collection[str] | None, data: RestoreData
    ) -> RestoreData:
        have = await self._completed(key, names, data.documents)
        base = None if have.manifest is None else have.manifest.base
        if base is None or (not base.at and base.cut <= data.after == have.log_after):
            return msgspec.structs.replace(data, documents=have)
        return RestoreData(have, may_have_items=data.may_have_items)

    async def _read_inner(
        self, key: SessionKey, names: Collection[str] | None, newest: int = 0
    ) -> RestoreData:
        if self._restoring is not None:
            return await self._restoring.read_for_restore(key, names, newest=newest)
        return RestoreData(await self.inner.read_documents(key, names))

    async def _completed(
        self, key: SessionKey, names: Collection[str] | None, have: Documents
    ) -> Documents:
        """Replace what is not there, or is damaged, by what the session began with."""
        held, manifest = self._held.get(key), have.manifest
        if held is not None and manifest is not None and manifest.epoch > held.epoch:
            self.forget(key)  # another process has it, and maybe another generation
            held = None
        # A manifest names what comes before the log, so most sessions need no further read.
        if manifest is not None and manifest.base is None:
            return have
        base = held.base if held else await lineage.base_of(self.inner, key, RestoreData(have))
        if base is None:
            return have
        if manifest is None:
            old = await folded(self.inner, key, await self.beginning_of(key), names)
            return msgspec.structs.replace(
                old, damaged=have.damaged, remains=have.remains, cut=have.cut
            )
        have = lineage.renumbered(have, base.at)
        return await self._with_older(key, base, have) if base.cut else have

    async def _with_older(self, key: SessionKey, base: Origin, have: Documents) -> Documents:
        """Replace damaged documents of a pruned session: its log cannot rebuild them."""
        have = validated(have, key)
        if not have.damaged:
            return have
        old = await folded(self.inner, key, base, have.damaged)
        return msgspec.structs.replace(have, found={**old.found, **have.found})

    async def documents_upto(self, key: SessionKey, seq: int) -> Documents:
        """Return the documents of a session that are as of a record up to *seq*, if any are."""
        base = await self.base_of(key)
        have = _up_to(validated(await self.read_documents(key), key), seq)
        if base is None:
            return have
        if have.manifest is not None:
            return await self._with_older(key, base, have) if base.cut else have
        return _up_to(await folded(self.inner, key, await self.beginning_of(key), None), seq)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Fold; what a session without documents began with is written as its own."""
        held = self._held.get(key)
        if held is None:  # held through another store object
            held = _HeldSession(manifest.epoch, await self.base_of(key))
        base = held.base
        if base is None or held.epoch != manifest.epoch:
            await self.inner.write_documents(key, documents, manifest)
            return
        # Its first fold adds what it began with, so that later ones need not look there.
        if not held.is_folded:
            own = (await self.inner.read_documents(key, ())).manifest
            missing = manifest.documents.keys() - documents.keys()
            missing -= own.documents.keys() if own is not None else frozenset()
            old = await folded(self.inner, key, base, missing) if missing else Documents()
            theirs = {name: document.data for name, document in old.found.items()}
            documents = {**theirs, **documents}
        based = msgspec.structs.replace(manifest, base=base)
        await self.inner.write_documents(key, documents, based)
        held.is_folded = True

    # Leases.

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        taken = await self.inner.acquire(key, terms)
        if isinstance(taken, Held):
            return taken
        self._held.pop(key, None)
        base, found = terms.beginning.base, taken.found
        if not taken.created:
            try:
                data = found or await self._read_inner(key, terms.names)
                base = await lineage.base_of(self.inner, key, data)
                may_be_cut_short = base and not base.at and data.may_have_removed
                if base and may_be_cut_short and await self.has_removed(key, base):
                    # A pruning failed, or was killed.
                    await self.inner.trim(key, taken.epoch, base.cut + 1)
                self._held[key] = _HeldSession(taken.epoch, base, taken.head)
                is_restored = terms.names != frozenset() and not (base and base.at)
                found = await self._with_origin(key, terms.names, data) if is_restored else None
            except BaseException:
                # Taken, but of no use here: unless it is released, others wait for the lease's end.
                with (
                    anyio.CancelScope(shield=True),
                    anyio.move_on_after(1),
                    contextlib.suppress(PerdureError),
                ):
                    await self.release(key, taken.epoch)
                raise
        else:
            self._held[key] = _HeldSession(taken.epoch, base, taken.head)
        return msgspec.structs.replace(taken, found=found)

    def forget(self, key: SessionKey) -> None:
        """Forget a session: it is not held here any more."""
        self._held.pop(key, None)

    async def release(self, key: SessionKey, epoch: int) -> None:
        await self.inner.release(key, epoch)
        self.forget(key)

    async def delete(self, key: SessionKey, epoch: int, *, keep_posts: bool = False) -> None:
        await self.inner.delete(key, epoch, keep_posts=keep_posts)
        self.forget(key)
