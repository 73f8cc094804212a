"""Rebuilding documents from the log, and finding those that differ from it.

What a fold writes is a function of the log's records alone: folding the whole log again gives every
document back, and comparing them shows which ones are wrong. The log never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio.to_thread
import msgspec

from perdure.errors import (
    CorruptRecordError,
    FormatError,
    SessionNotFoundError,
    StoreUnavailableError,
)
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import (
    SESSION,
    SessionDocument,
    WholeSessionDocument,
    in_one_form,
)
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.media import text_bytes
from perdure.records.records import Record
from perdure.restore.ladder import keep_evidence, require_plain, validated
from perdure.session.fold import FoldInput
from perdure.session.lifecycle import HandoverTerms
from perdure.session.media import put_blobs
from perdure.session.options import Limits
from perdure.session.point_in_time import base_documents, fold_onto
from perdure.session.stored import followed
from perdure.store import Documents, Store, all_records, require_same

if TYPE_CHECKING:
    from perdure.session.base import SessionBase
    from perdure.session.lifecycle import ExclusiveAccess


def fold_afresh(
    key: SessionKey,
    records: Sequence[Record],
    *,
    limits: Limits,
    began: Documents | None = None,
) -> dict[str, bytes]:
    """Return the documents that a log folds to, from its first record on.

    The log of a pruned session starts from documents: those that it *began* with.
    """
    began = began or Documents()
    if not records:  # a copy of what has just been pruned may have nothing but the documents
        return {name: document.data for name, document in began.found.items()}
    work = FoldInput(key, began.found, list(records), records[-1].seq, limits)
    return fold_onto(work, began, {}).data


def context_bytes_of(snapshot: bytes | None) -> int:
    """Return how much of the working context a stored snapshot holds, 0 if that is unknown.

    With this as the limit, a fresh fold cuts where the stored one was cut.
    """
    try:
        stored = decode(snapshot or b"", Snapshot)
    except FormatError:
        return 0
    return sum(text_bytes(bytes(raw)) for raw in stored.messages[int(stored.pinned) :])


async def rebuild(
    store: Store,
    key: SessionKey,
    *,
    epoch: int,
    limits: Limits,
    wrong: Collection[str] = (),
) -> Manifest:
    """Write all documents again, as the holder of an epoch; return the new manifest.

    The snapshot keeps at least as much of the context as the stored one holds. What lay there is
    kept as evidence where it could not be used, or is *wrong* by the caller's judgement.

    Raises:
        CorruptRecordError: The log itself is damaged before its tail, or empty.
        LeaseLostError: The epoch is not the newest any more.
        SessionNotFoundError: Another process has deleted it meanwhile.
        ConfigError: It is encrypted, and the store was opened without its key.

    """
    store = followed(store)
    began = await base_documents(store, key)
    have = validated(await store.read_documents(key, None), key)
    require_plain(have.manifest, key)
    stored = have.found.get(SNAPSHOT)
    context_bytes = context_bytes_of(None if stored is None else stored.data)
    limits = msgspec.structs.replace(limits, context_bytes=max(limits.context_bytes, context_bytes))
    records = await all_records(store.read_log(key))
    if not records:
        await require_same(store, key)  # another process may have taken it over
        raise CorruptRecordError(
            f"session {key} has no records to rebuild from: restore its log from a copy",
            key=str(key),
        )
    work = FoldInput(key, began.found, records, records[-1].seq, limits)
    was = await anyio.to_thread.run_sync(fold_onto, work, began, {})
    remains = {name: have.found[name].data for name in wrong if name in have.found}
    have = msgspec.structs.replace(have, remains={**remains, **have.remains})
    # The damaged bytes are kept before anything is written over them.
    await keep_evidence(store, key, have)
    # Blobs before the documents that name them: a crash here leaves only garbage.
    await put_blobs(store, key.blobs, was.blobs)
    manifest = msgspec.structs.replace(was.manifest, epoch=epoch)
    await store.write_documents(key, was.data, manifest)
    return manifest


# Whether stored documents are what the log folds to: each compared with a fresh fold of it
#
# A document whose checksum is right may still be wrong, if another program wrote it;
# only the log shows that.


class DocumentDifference(NamedTuple):
    """A document that is not what it should be."""

    name: str
    detail: str
    """The difference in words."""


class WholeLog(msgspec.Struct):
    """A session's whole log, and the documents that it starts from."""

    key: SessionKey
    records: list[Record]
    began: Documents

    @property
    def head(self) -> int:
        """The last record."""
        return self.records[-1].seq if self.records else 0

    def lacks(self, documents: Documents) -> str:
        """Return that it ends before the documents do, and so cannot give them; else nothing."""
        upto = 0 if documents.manifest is None else documents.manifest.as_of_seq
        if upto <= self.head:
            return ""
        return (
            f"the documents are as of record {upto}, the log ends at {self.head}: records are "
            "missing"
        )

    def fold(self, upto: int, limits: Limits) -> dict[str, bytes]:
        """Return the documents as of a record."""
        records = [record for record in self.records if record.seq <= upto]
        return fold_afresh(self.key, records, limits=limits, began=self.began)


def differences(log: WholeLog, documents: Documents) -> Iterator[DocumentDifference]:
    """Give what is wrong with the documents."""
    for name in documents.damaged:
        reason = documents.why.get(name)
        lost = f"{name} is lost, or not what its manifest says"
        yield DocumentDifference(name, f"{name}: {reason}" if reason else lost)
    manifest = documents.manifest
    if manifest is None:
        return
    folds: dict[int, dict[str, bytes]] = {}
    for name, document in sorted(documents.found.items()):
        # Each as of its own record: a crash within a fold leaves documents of different ages.
        upto = document.as_of_seq
        if upto not in folds:
            folds[upto] = log.fold(upto, Limits())
        if name in documents.damaged or _is_same(name, folds[upto].get(name), document.data):
            continue
        if name in {SNAPSHOT, SESSION} and _is_cut_elsewhere(log, name, documents):
            continue
        yield DocumentDifference(
            name, f"{name} differs from a fresh fold of the log up to record {upto}"
        )
    upto = manifest.as_of_seq
    fresh = folds.get(upto) or log.fold(upto, Limits())
    for name in sorted(fresh.keys() - documents.found.keys() - set(documents.damaged)):
        yield DocumentDifference(name, f"{name} is missing from the manifest")


def _is_cut_elsewhere(log: WholeLog, name: str, documents: Documents) -> bool:
    """Return whether a document is sound, and was only made under another limit."""
    snapshot, document = documents.found.get(SNAPSHOT), documents.found[name]
    if snapshot is None:
        return False
    limits = Limits(context_bytes=max(context_bytes_of(snapshot.data), 1))
    fresh = log.fold(document.as_of_seq, limits)
    return _is_same(name, fresh[name], document.data)


def _is_same(name: str, fresh: bytes | None, stored: bytes) -> bool:
    """Return whether a document is what a fresh fold of the log gives.

    One of an older release may lack fields that are written now, or have times in another form.
    """
    if fresh is None or fresh == stored:
        return fresh == stored
    try:
        if name == SNAPSHOT:
            return encode(decode(fresh, Snapshot)) == encode(decode(stored, Snapshot))
        if name == SESSION:
            whole = decode(stored, WholeSessionDocument)
            kind = WholeSessionDocument if whole.describes_agent else SessionDocument
            return in_one_form(decode(fresh, kind)) == in_one_form(decode(stored, kind))
    except FormatError:
        return False
    return False


class RebuildReport(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The findings of a rebuild, and the documents that it rebuilt."""

    key: SessionKey
    records: int = 0
    """Of the log that the documents were compared with."""
    wrong: tuple[str, ...] = ()
    """Documents that differed from a fold of the log, in words; empty if all were right."""
    rebuilt: tuple[str, ...] = ()
    """Documents that were written, by name."""
    dry_run: bool = False

    def __str__(self) -> str:
        wrong = "; ".join(self.wrong) or "every document was what its log folds to"
        done = "nothing was changed" if self.dry_run else f"rebuilt {', '.join(self.rebuilt)}"
        return f"{self.key}: {wrong}; {done}"


async def rebuild_session(
    access: ExclusiveAccess, key: SessionKey, terms: HandoverTerms, *, dry_run: bool
) -> RebuildReport:
    """Compare a session's documents with its log, and rewrite those that are wrong."""
    records, wrong = await _compared(access, key)
    report = RebuildReport(
        key=key,
        records=records,
        wrong=tuple(difference.detail for difference in wrong),
        dry_run=dry_run,
    )
    if dry_run:
        return report
    names = frozenset(difference.name for difference in wrong)
    async with access.exclusive(key):
        session = access.sessions.get(key)
        if session is not None:
            manifest = await _rebuild_open(access, session, names)
        else:
            async with access.held(key, terms) as hold:
                limits = access.runtime.limits
                manifest = await rebuild(
                    access.store, key, epoch=hold.epoch, limits=limits, wrong=names
                )
    return msgspec.structs.replace(report, rebuilt=tuple(sorted(manifest.documents)))


async def _rebuild_open(
    access: ExclusiveAccess, session: SessionBase, wrong: frozenset[str]
) -> Manifest:
    """Rebuild the stored documents of a session that is open here; its memory is untouched."""
    runtime = access.runtime
    # Only durable records are folded: without this, the rebuilt documents would be older.
    await session.save()

    async def work() -> Manifest:
        tail = session._durable_tail()
        manifest = await rebuild(
            access.store, session.key, epoch=session.epoch, limits=runtime.limits, wrong=wrong
        )
        session._folded(manifest, tail)
        return manifest

    manifest = await runtime.saver.exclusive(session._tracked, work, urgent=True)
    if manifest is None:
        raise StoreUnavailableError(
            f"session {session.key} cannot be rebuilt now: the store is not well; try again",
            key=str(session.key),
        )
    return manifest


async def _compared(
    access: ExclusiveAccess, key: SessionKey
) -> tuple[int, list[DocumentDifference]]:
    """Return how many records there are, and what of the documents does not follow from them.

    Raises:
        CorruptRecordError: The log ends before its documents: a rebuild would lose what they know.

    """
    store = access.store
    documents = validated(await store.read_documents(key, None), key)
    records = await all_records(store.read_log(key))
    if not records:
        raise SessionNotFoundError(f"there is no session {key}", key=str(key))
    whole_log = WholeLog(key, records, await base_documents(store, key))
    if lack := whole_log.lacks(documents):
        message = f"session {key}: {lack}: restore the log's files from a copy"
        raise CorruptRecordError(message, key=str(key))
    wrong = await anyio.to_thread.run_sync(lambda: list(differences(whole_log, documents)))
    return len(records), wrong
