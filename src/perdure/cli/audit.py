"""What a look at a session finds: values only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import anyio.to_thread
import msgspec

from perdure.cli.findings import CheckFinding, readable_to
from perdure.errors import CorruptRecordError, PerdureError, UnsupportedVersionError
from perdure.lineage.store import Lineage, followed
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.messages import decode_message
from perdure.records.records import EPOCH, MESSAGE_KINDS, MISSING, Record
from perdure.records.types import Registry
from perdure.restore.ladder import judged
from perdure.session.point_in_time import base_documents
from perdure.session.rebuild import WholeLog, differences
from perdure.store import Document, Documents, LeaseState, Store

# Whether a session is sound: its log, and what was folded from it
#
# Reads only, without a lease, also beside a writer: the documents are read first and compared with
# a fold of the log up to the record that they are as of. The log is the truth: damage in it is
# reported and never mended. Everything else can be made again from it.


REBUILD = "a rebuild from the log makes it anew"
ACCEPT = "compare it with a copy; `perdure check --repair` accepts the log as it is"


class Audit(msgspec.Struct, kw_only=True):
    """What the look at one session has shown."""

    key: SessionKey
    records: int = 0
    documents: int = 0
    findings: list[CheckFinding] = []

    @property
    def problems(self) -> list[CheckFinding]:
        """What is wrong."""
        return [finding for finding in self.findings if finding.problem]

    @property
    def repairable(self) -> bool:
        """Whether there are problems, and a rebuild mends all of them."""
        return bool(self.problems) and all(problem.repairable for problem in self.problems)


async def audit(store: Store, key: SessionKey) -> Audit:
    """Look at a session in whole: every record, every document, and who holds it."""
    lease_state = Audit(key=key)
    store = lineage = followed(store)  # a fork's log goes on behind its parent's
    documents = await _documents(store, lease_state)
    tail = "" if documents is None else documents.unproven_tail
    records = await _records(store, lease_state)
    base, began = await _beginning(lineage, lease_state)
    lease_state.findings += log_problems(records, base)
    lost = [record for record in records if record.kind == MISSING]
    lease_state.findings += _missing_notes(lost)
    if lost:
        documents = None  # they may know what the log does not
    if documents is not None and not any(problem.what == "log" for problem in lease_state.problems):
        log = WholeLog(key, records, began)
        problems = await anyio.to_thread.run_sync(lambda: list(_document_problems(log, documents)))
        lease_state.findings += problems
    if tail:
        lease_state.findings.append(
            CheckFinding(what="log", detail=tail, cure=ACCEPT, repairable=True)
        )
    lease_state.findings += _lease_notes(await store.holder(key))
    return lease_state


async def incomplete(store: Store, key: SessionKey) -> str:
    """Return why records may be missing at the end of a log, and the cure; empty if none are."""
    tail = (await followed(store).read_documents(key, ())).unproven_tail
    return f"{tail}: {ACCEPT}" if tail else ""


def _missing_notes(records: list[Record]) -> list[CheckFinding]:
    """Say what a salvaged session lacks."""
    notes: list[CheckFinding] = []
    for record in records:
        lost = msgspec.json.decode(record.payload, type=_MissingRange)
        detail = f"records {lost.first} to {lost.last} were lost to damage before it was salvaged"
        cure = "the documents stay as they are: a rebuild from the log would lose what they know"
        notes.append(CheckFinding(what="log", detail=detail, cure=cure, problem=False))
    return notes


class _MissingRange(msgspec.Struct):
    first: int
    last: int


async def _beginning(store: Lineage, seen: Audit) -> tuple[Origin, Mapping[str, Document]]:
    """Return what comes before a session's own log, and the documents that it began with."""
    try:
        base = await store.base_of(seen.key) or Origin()
        return base, (await base_documents(store, seen.key)).found
    except (CorruptRecordError, UnsupportedVersionError) as error:
        seen.findings.append(CheckFinding(what="log", detail=str(error)))
        return Origin(), {}


async def _documents(store: Store, seen: Audit) -> Documents | None:
    try:
        documents = judged(await store.read_documents(seen.key, None), seen.key)
    except UnsupportedVersionError as error:
        seen.findings.append(CheckFinding(what="document", detail=str(error)))
        return None
    except CorruptRecordError as error:
        seen.findings.append(CheckFinding(what="document", detail=str(error)))
        return None
    seen.documents = len(documents.found) + len(documents.damaged)
    return documents


async def _records(store: Store, seen: Audit) -> list[Record]:
    records: list[Record] = []
    settled = True
    try:
        async with contextlib.aclosing(store.read_log(seen.key)) as log:
            async for chunk in log:
                records += chunk.records
                settled = settled and chunk.settled
    except (CorruptRecordError, UnsupportedVersionError) as error:
        upto = readable_to(error) if isinstance(error, CorruptRecordError) else 0
        readable = f"; up to record {upto} it is sound" if upto else ""
        seen.findings.append(CheckFinding(what="log", detail=f"{error}{readable}"))
    if not settled:
        detail = "somebody is taking the session over: the newest records may be missing here"
        seen.findings.append(CheckFinding(what="lease", detail=detail, problem=False))
    seen.records = len(records)
    return records


def log_problems(records: list[Record], base: Origin | None = None) -> list[CheckFinding]:
    """Return what is wrong with the records as a log: their numbers, epochs and payloads."""
    return [
        CheckFinding(what="log", detail=detail, cure="restore the log's files from a copy")
        for detail in (*_order_problems(records, base or Origin()), *_payload_problems(records))
    ]


def _order_problems(records: list[Record], base: Origin) -> Iterator[str]:
    epoch = 0
    for seq, record in enumerate(records, base.cut + 1):
        if record.seq != seq:
            yield f"record {record.seq} stands where record {seq} belongs"
            return
        if seq <= base.at:
            continue  # another session wrote it, in an epoch of its own
        if seq == base.cut + 1 > 1:
            epoch = record.epoch  # its epoch record was pruned
        if record.epoch < epoch:
            yield f"record {seq} is of epoch {record.epoch}, behind one of epoch {epoch}"
        elif record.epoch > epoch and record.kind != EPOCH:
            yield f"epoch {record.epoch} begins at record {seq} without an epoch record"
        epoch = record.epoch
    if records and not records[-1].end:
        yield f"the last group, at record {len(records)}, has no end"


def _payload_problems(records: list[Record]) -> Iterator[str]:
    registry = Registry(())
    for record in records:
        try:
            msgspec.json.decode(record.payload)
            if record.kind in MESSAGE_KINDS:
                decode_message(record.payload, registry)
        except (PerdureError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            what = type(error).__name__
            yield f"record {record.seq}, of kind {record.kind}, cannot be decoded ({what})"


def _document_problems(log: WholeLog, documents: Documents) -> Iterator[CheckFinding]:
    """Compare what is stored with a fresh fold of the log."""
    manifest = documents.manifest
    if manifest is not None and manifest.as_of_seq > log.head:
        detail = f"the documents are as of record {manifest.as_of_seq}, the log ends at "
        yield CheckFinding(
            what="log",
            detail=f"{detail}{log.head}: records are missing",
            cure="restore the log's files from a copy",
        )
        return
    for difference in differences(log, documents):
        yield CheckFinding(what="document", detail=difference.detail, cure=REBUILD, repairable=True)


def _lease_notes(holder: LeaseState | None) -> Iterator[CheckFinding]:
    if holder is None or holder.released or holder.deleted:
        return
    if holder.alive is False:
        detail = f"process {holder.pid} on {holder.host} ended without releasing epoch"
        cure = "nothing to do: whoever opens it next takes it over"
        yield CheckFinding(
            what="lease", detail=f"{detail} {holder.epoch}", cure=cure, problem=False
        )
    else:
        detail = f"process {holder.pid} on {holder.host} holds it, epoch {holder.epoch}"
        yield CheckFinding(what="lease", detail=detail, problem=False)
