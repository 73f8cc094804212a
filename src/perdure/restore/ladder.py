"""The restore ladder: from stored bytes back to a session.

    snapshot valid? → catch up with the log after it → else rebuild from the log → fresh

Needs no lease, and writes nothing. A cache that cannot be used is rebuilt and reported; damage in
the log itself, which is the truth, raises.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import msgspec

from perdure._lib.logs import log_facts
from perdure.errors import ConfigError, CorruptRecordError, FormatError
from perdure.memory.context import SCHEMA_VERSION, SNAPSHOT, Snapshot, WorkingContext
from perdure.memory.documents import (
    EPISODIC,
    SEMANTIC,
    SESSION,
    SessionDocument,
    note_record,
    session_document,
)
from perdure.memory.index import MEMORY
from perdure.memory.ledger import LEDGER_KINDS
from perdure.records.chunks import name_of
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.manifest import KEYS, Manifest
from perdure.records.records import (
    CHECKPOINT,
    CHECKPOINTS_PRUNED,
    HOLDER_KINDS,
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    META,
    STATE,
    Record,
)
from perdure.restore.report import RestoreReport, RestoreStep, Source, lost_step
from perdure.store import Document, Documents, LogChunk, RestoreData, Store, SupportsRestore

VERSION = 1
"""The version of session.json and memory.json that this release writes."""


class _Versioned(msgspec.Struct):
    version: int = VERSION


class _Schema(msgspec.Struct):
    schema_version: int


_OTHER_SCHEMA = "its schema version is {}, not {}"


def validated(
    have: Documents, key: SessionKey, *, known: Mapping[str, str | None] | None = None
) -> Documents:
    """Return the documents, with unusable ones among the damaged.

    Their bytes match the manifest, so nothing was lost on the way. This checks whether they are
    valid for this release and this session: a newer release may have written them, or another
    session's document may be in their place. Unusable documents are rebuilt from the log.
    Of some it may be *known* already why they are unusable, or that they are not.
    """
    problems: dict[str, str] = {}
    for name, document in have.found.items():
        if known is not None and name in known:
            problem = known[name]
        else:
            problem = problem_of(name, document.data, key, document.as_of_seq)
        if problem is not None and name not in have.damaged:
            problems[name] = problem
    if not problems:
        return have
    return msgspec.structs.replace(
        have,
        found={name: document for name, document in have.found.items() if name not in problems},
        damaged=(*have.damaged, *problems),
        why={**have.why, **problems},
        remains={**have.remains, **{name: have.found[name].data for name in problems}},
    )


def problem_of(name: str, data: bytes, key: SessionKey, as_of_seq: int) -> str | None:
    """Return why a document with this name is unusable, None if it is valid.

    >>> problem_of("memory.json", b'{"version": 9}', SessionKey("ada"), 4)
    'its version is 9, this release reads 1'
    """
    try:
        if name == SNAPSHOT:
            return _problem_in(snapshot_of(data, key, as_of_seq))
        if name == SESSION:
            return _problem_in(_session_of(data, key))
        if name == MEMORY:
            return _version_problem(decode(data, _Versioned).version)
        if name in {EPISODIC, SEMANTIC}:
            for line in data.splitlines():
                decode(line, dict[str, msgspec.Raw])
        elif name.endswith(".json"):
            decode(data, msgspec.Raw)
    except FormatError as error:
        return _NOT_WELL_FORMED.format(error)
    return None


_NOT_WELL_FORMED = "it is not well-formed ({})"


def _problem_in(found: object) -> str | None:
    return found if isinstance(found, str) else None


def _session_of(data: bytes, key: SessionKey) -> SessionDocument | str:
    """Return session.json, or why it cannot be used."""
    try:
        document = decode(data, SessionDocument)
    except FormatError as error:
        return _NOT_WELL_FORMED.format(error)
    if (document.agent_id, document.session_id) != (key.agent, key.session):
        return f"it belongs to {document.agent_id}/{document.session_id}"
    return _version_problem(document.version) or document


def _version_problem(version: int) -> str | None:
    return None if version == VERSION else f"its version is {version}, this release reads {VERSION}"


def snapshot_of(data: bytes, key: SessionKey, as_of_seq: int) -> Snapshot | str:
    """Return the snapshot, or why it cannot be used.

    Valid means: well-formed, of this schema version, of this session, and as of the record in the
    manifest. Otherwise it is rebuilt from the log.
    """
    try:
        snapshot = decode(data, Snapshot)
    except FormatError as error:
        # A newer release may have changed the shape: then its version says more than the error.
        with contextlib.suppress(FormatError):
            version = decode(data, _Schema).schema_version
            if version != SCHEMA_VERSION:  # one of another shape
                return _OTHER_SCHEMA.format(version, SCHEMA_VERSION)
        return _NOT_WELL_FORMED.format(error)
    if snapshot.schema_version != SCHEMA_VERSION:
        return _OTHER_SCHEMA.format(snapshot.schema_version, SCHEMA_VERSION)
    if (snapshot.agent_id, snapshot.session_id) != (key.agent, key.session):
        return f"it belongs to {snapshot.agent_id}/{snapshot.session_id}"
    if snapshot.seq != as_of_seq:
        return f"it is as of record {snapshot.seq}, the manifest says {as_of_seq}"
    unpinned = len(snapshot.messages) - snapshot.pinned
    if unpinned < 0 or len(snapshot.message_seqs) != len(snapshot.messages):
        return "its messages and their seqs differ in number"
    if sum(snapshot.atoms) != unpinned or min(snapshot.atoms, default=1) < 1:
        return "its atoms do not add up to its messages"
    return snapshot


RESTORED = frozenset({SESSION, SNAPSHOT})
"""The documents that a restore reads."""

KEPT_FOR_LATER = (
    frozenset({CHECKPOINT, CHECKPOINTS_PRUNED, ITEM, MEMORY_SET, MEMORY_DROP, STATE, META})
    | LEDGER_KINDS
)
"""Kinds whose documents load at the first access: the tail's records wait for that."""


class RestoredSession(msgspec.Struct, kw_only=True):
    """A session's state as of the log's head."""

    key: SessionKey
    context: WorkingContext
    """Empty if it was not asked for."""
    has_context: bool = True
    documents: Documents
    info: SessionDocument
    """session.json with its counters and labels as of ``head``, and its times as folded."""
    tail: list[Record]
    """The records that documents need after the last fold."""
    head: int = 0
    epoch: int = 0
    """The epoch that wrote the record ``head``."""
    tail_bytes: int = 0
    """Bytes of all records since the last fold."""
    tail_records: int = 0
    may_have_items: bool = True
    """True if something may be waiting in the inbox."""
    newest: tuple[Record, ...] = ()
    """The newest records, newest first from ``head`` on, if they were read on the way."""
    report: RestoreReport

    @property
    def manifest(self) -> Manifest | None:
        """The manifest at the time of the restore."""
        return self.documents.manifest


class RestoringStore(Store, SupportsRestore, Protocol):
    """A store that reads what a restore needs: `SessionStore`, over any store."""


async def restore(
    store: RestoringStore,
    key: SessionKey,
    *,
    context_bytes: int,
    strict: bool = False,
    with_context: bool = True,
    found: RestoreData | None = None,
    newest: int = 0,
) -> RestoredSession:
    """Restore a session, with so many bytes of its working context, or without that.

    What was *found* by its open is not read again: the documents ``RESTORED``, all of them if
    strict; the log only if its tail was long, or a document turns out to be unusable. Strict means
    to raise for any unusable document, instead of rebuilding it. Where it costs nothing more, the
    *newest* messages, so many, are read with the documents.

    Raises:
        CorruptRecordError: The log is damaged before its tail; or, if strict, a document is.
        UnsupportedVersionError: It was written by a newer release.
        ConfigError: It is encrypted, and the store was opened without its key.

    """
    names = None if strict else RESTORED if with_context else {SESSION}
    data = found or await store.read_for_restore(key, names, newest=newest)
    documents = data.documents
    require_plain(documents.manifest, key)
    snapshot = stored_snapshot(documents.found, key)
    session = _stored_session(documents.found, key)
    known = {SNAPSHOT: _problem_in(snapshot), SESSION: _problem_in(session)}
    documents = validated(documents, key, known=known)  # these two are decoded once
    if strict:
        _require_sound(documents, key)
    steps = [RestoreStep("cut", tail) for tail in documents.cut]
    steps += [lost_step(name, documents.why.get(name)) for name in documents.damaged]
    stored = documents.found.get(SNAPSHOT)
    source = None if stored is None else stored.data
    context, since = cached_context(snapshot, context_bytes, source)
    info = session if isinstance(session, SessionDocument) else session_document(key)
    counted = documents.found[SESSION].as_of_seq if SESSION in documents.found else 0
    folded = 0 if documents.manifest is None else documents.manifest.as_of_seq
    since = since if with_context else folded
    # A killed fold may have written these two and not the documents that load later.
    after = min(since, counted, folded)
    restored = RestoredSession(
        key=key,
        context=context,
        has_context=with_context,
        documents=documents,
        info=info,
        tail=[],
        may_have_items=data.may_have_items,
        report=RestoreReport(source="fresh"),
    )
    records = 0
    settled, content = True, False
    async with contextlib.aclosing(_log_after(store, key, data, after)) as log:
        async for chunk in log:
            settled = settled and chunk.settled
            records += len(chunk.records)
            for record in chunk.records:
                is_content = record.kind not in HOLDER_KINDS
                content = content or is_content
                _take_in(restored, record, since, counted)
                if is_content and record.seq > folded:
                    restored.tail_bytes += len(record.payload)
                    restored.tail_records += 1
    if restored.head < folded and documents.manifest is not None:
        # Nothing came after the fold: it ends with a record of the holder that made it.
        restored.head, restored.epoch = folded, documents.manifest.epoch
    if data.newest and data.newest[0].seq == restored.head:  # else the log was read later
        restored.newest = data.newest
    if not with_context:
        restored.context.seq = restored.head
    restored.report = _report(
        restored, documents, steps, since, records, settled=settled, content=content
    )
    return restored


async def _log_after(
    store: Store, key: SessionKey, data: RestoreData, after: int
) -> AsyncGenerator[LogChunk, None]:
    """Read the log after a record, unless it was read already."""
    if data.records is not None and data.after == after:
        yield LogChunk(data.records)
        return
    async with contextlib.aclosing(store.read_log(key, after=after)) as log:
        async for chunk in log:
            yield chunk


def require_plain(manifest: Manifest | None, key: SessionKey) -> None:
    """Raise ConfigError for an encrypted session whose store was opened without its key.

    It would look empty, be written to in plain text, and lose its key.
    """
    if manifest is not None and any(name.startswith(KEYS) for name in manifest.documents):
        raise ConfigError(
            f"session {key} is encrypted: put encrypted+ before the store's URL and set "
            "PERDURE_KEY, or put an EncryptedStore around it",
            key=str(key),
        )


def _require_sound(documents: Documents, key: SessionKey) -> None:
    if documents.damaged:
        reason = "; ".join(
            f"{name}: {documents.why.get(name, 'lost, or not what its manifest says')}"
            for name in documents.damaged
        )
        raise CorruptRecordError(
            f"session {key} has documents that cannot be used, and strict=True forbids rebuilding "
            f"them ({reason}): run `perdure rebuild {key.agent}`, or open it without strict",
            key=str(key),
            damaged=documents.damaged,
        )


def stored_snapshot(found: Mapping[str, Document], key: SessionKey) -> Snapshot | str | None:
    """Return the snapshot among documents, or why it cannot be used; None without one."""
    document = found.get(SNAPSHOT)
    return None if document is None else snapshot_of(document.data, key, document.as_of_seq)


def _stored_session(found: Mapping[str, Document], key: SessionKey) -> SessionDocument | str | None:
    """Return session.json among documents, or why it cannot be used; None without one."""
    document = found.get(SESSION)
    return None if document is None else _session_of(document.data, key)


def cached_context(
    snapshot: Snapshot | str | None, limit: int, data: bytes | None = None
) -> tuple[WorkingContext, int]:
    """Return the context of a snapshot and its seq; an empty one if that cannot be used.

    *data* is what the snapshot was decoded from.
    """
    if snapshot is None or isinstance(snapshot, str):
        return WorkingContext(limit), 0
    return WorkingContext.of_snapshot(snapshot, limit, data), snapshot.seq


def _take_in(restored: RestoredSession, record: Record, since: int, counted: int) -> None:
    """Apply a record to the context after *since*, and to the counters after *counted*."""
    seq, kind = record.seq, record.kind
    restored.head, restored.epoch = seq, record.epoch
    if seq > since and restored.has_context:
        restored.context.feed(seq, kind, record.payload)
    if kind in KEPT_FOR_LATER and (kind != META or seq > counted):
        restored.tail.append(record)
    if seq > counted:
        note_record(restored.info, record)


def _report(
    restored: RestoredSession,
    documents: Documents,
    steps: list[RestoreStep],
    since: int,
    records: int,
    *,
    settled: bool,
    content: bool,
) -> RestoreReport:
    source: Source
    if since == 0 and not content:
        source = "fresh"
        steps.append(RestoreStep("fresh", "no records"))
    elif not restored.has_context:
        source = "left_out"
        steps.append(RestoreStep("left out", "the working context"))
    elif since == 0:
        source = "rebuild"
        steps.append(RestoreStep("rebuilt", f"the context from {records} records"))
    elif restored.tail_records:
        source = "catch_up"
        count = restored.head - since
        steps.append(RestoreStep("caught up", f"with {count} records after {since}"))
    else:
        source = "snapshot"
        steps.append(RestoreStep("read", f"the snapshot as of record {since}"))
    if not settled:
        steps.append(RestoreStep("unsettled", "a takeover was under way"))
    return RestoreReport(
        source=source,
        steps=tuple(steps),
        damaged=documents.damaged,
        records_read=records,
        head=restored.head,
        settled=settled,
    )


log: logging.Logger = logging.getLogger("perdure")


async def keep_evidence(store: Store, key: SessionKey, have: Documents) -> None:
    """Store damaged documents as blobs before they are overwritten.

    The file store copies a document that does not match its manifest into the session's
    ``quarantine/`` itself. This is for documents whose content was found unusable: a blob under the
    hash of their bytes. Nothing refers to it, so `perdure check --gc` removes it eventually.

    Raises:
        StoreUnavailableError: They could not be stored, so nothing may be overwritten.

    """
    if not have.remains or not store.capabilities.blobs:
        return
    names = {name: name_of(data) for name, data in have.remains.items()}
    await store.put_blobs(key.blobs, {names[name]: data for name, data in have.remains.items()})
    for name, blob in names.items():
        log_facts(
            log,
            logging.WARNING,
            "%(document)s of session %(session)s cannot be used, its bytes are kept as the blob "
            "%(blob)s",
            session=str(key),
            document=name,
            why=have.why.get(name),
            blob=blob,
        )
