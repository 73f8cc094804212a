"""Audits: what is wrong with a session, with a store's file, and which blobs are garbage.

Reads only, without a lease, also while another process writes: the documents are read first and
compared with a fold of the log up to the record that they are as of. The log is the truth: damage
in it is reported and never repaired. Everything else can be rebuilt from it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from perdure.cli.access import layers
from perdure.cli.output import say, size
from perdure.errors import CorruptRecordError, PerdureError, UnsupportedVersionError
from perdure.lineage.store import Lineage, followed
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.messages import decode_message
from perdure.records.records import EPOCH, MESSAGE_KINDS, MISSING, Record
from perdure.records.types import Registry
from perdure.restore.ladder import validated
from perdure.session.point_in_time import base_documents
from perdure.session.rebuild import WholeLog, differences
from perdure.store import (
    BlobSweep,
    Document,
    Documents,
    LeaseState,
    Store,
    SupportsIntegrityCheck,
    capability,
    open_read_only,
)
from perdure.stores.file import FileStore
from perdure.stores.file.layout import QUARANTINE, lease_epoch, manifest_epoch, session_path
from perdure.transfer import receipts
from perdure.transfer.bundle_files import names_of


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem of a session, or a note about it."""

    what: str
    """log, document, key, lease, leftover, or dead letters."""
    detail: str
    cure: str = ""
    problem: bool = True
    """False for a note: worth knowing, and in order."""
    repairable: bool = False
    """Whether rebuilding the documents repairs it."""


def readable_to(error: CorruptRecordError) -> int:
    """Return the last record before the damage that a file store reports, 0 if it is unknown."""
    path, offset = error.facts.get("path"), error.facts.get("offset")
    if not isinstance(path, str) or not isinstance(offset, int) or not Path(path).is_file():
        return 0
    with Path(path).open("rb") as file:
        lines = file.read(offset).splitlines()
    try:
        return msgspec.json.decode(lines[-1], type=_Numbered).n if lines else 0
    except msgspec.MsgspecError:
        return 0


class _Numbered(msgspec.Struct):
    n: int


def leftovers(store: Store, key: SessionKey) -> list[CheckFinding]:
    """Return notes on unused files in a session's folder; none unless it is a file store."""
    if not isinstance(store, FileStore):
        return []
    folder = Path(store.location).joinpath(*session_path(key))
    return [*_interrupted(folder), *_quarantined(folder / QUARANTINE)]


def _interrupted(folder: Path) -> Iterator[CheckFinding]:
    names = _names(folder)
    coming = [name for name in names if (manifest_epoch(name) or (0, False))[1]]
    leases = sorted(epoch for epoch in map(lease_epoch, names) if epoch)
    if coming:
        cure = "nothing to do: the next fold replaces it"
        detail = f"a fold that did not end left {', '.join(coming)}"
        yield CheckFinding(what="leftover", detail=detail, cure=cure, problem=False)
    if len(leases) > 1:
        older = ", ".join(f"lease-{epoch}.json" for epoch in leases[:-1])
        cure = "nothing to do: the next holder removes it"
        yield CheckFinding(what="leftover", detail=f"older {older}", cure=cure, problem=False)


def _quarantined(folder: Path) -> Iterator[CheckFinding]:
    names = _names(folder)
    if not names:
        return
    total = sum((folder / name).lstat().st_size for name in names)
    detail = f"{len(names)} files ({size(total)}) in {folder}, kept as evidence of damage"
    cure = "inspect them, and remove the folder when you no longer need it"
    yield CheckFinding(what="leftover", detail=detail, cure=cure, problem=False)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names, not paths
    except FileNotFoundError:
        return []


REBUILD = "a rebuild from the log replaces it"
ACCEPT = "compare it with a copy; `perdure check --repair` accepts the log as it is"


class Audit(msgspec.Struct, kw_only=True):
    """The audit of one session."""

    key: SessionKey
    records: int = 0
    documents: int = 0
    findings: list[CheckFinding] = []

    @property
    def problems(self) -> list[CheckFinding]:
        """The findings that are problems."""
        return [finding for finding in self.findings if finding.problem]

    @property
    def repairable(self) -> bool:
        """Whether there are problems, and a rebuild repairs all of them."""
        return bool(self.problems) and all(problem.repairable for problem in self.problems)


async def audit(store: Store, key: SessionKey) -> Audit:
    """Check a whole session: every record, every document, and its lease."""
    lease_state = Audit(key=key)
    store = lineage = followed(store)  # a fork's log continues its parent's
    documents = await _documents(store, lease_state)
    tail = "" if documents is None else documents.unproven_tail
    records = await _records(store, lease_state)
    base, began = await _beginning(lineage, lease_state)
    lease_state.findings += log_problems(records, base)
    lost = [record for record in records if record.kind == MISSING]
    lease_state.findings += _missing_notes(lost)
    if lost:
        documents = None  # they may contain what the log has lost
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
    """Return notes on the records that a salvaged session lacks."""
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
    """Return the origin of a session's own log, and the documents that it began with."""
    try:
        base = await store.base_of(seen.key) or Origin()
        return base, (await base_documents(store, seen.key)).found
    except (CorruptRecordError, UnsupportedVersionError) as error:
        seen.findings.append(CheckFinding(what="log", detail=str(error)))
        return Origin(), {}


async def _documents(store: Store, seen: Audit) -> Documents | None:
    try:
        documents = validated(await store.read_documents(seen.key, None), seen.key)
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
        detail = (
            "another process is taking the session over: the newest records may be missing here"
        )
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
            yield f"record {record.seq} is where record {seq} belongs"
            return
        if seq <= base.at:
            continue  # another session wrote it, in an epoch of its own
        if seq == base.cut + 1 > 1:
            epoch = record.epoch  # its epoch record was pruned
        if record.epoch < epoch:
            yield f"record {seq} is of epoch {record.epoch}, after one of epoch {epoch}"
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
        cure = "nothing to do: the next open takes it over"
        yield CheckFinding(
            what="lease", detail=f"{detail} {holder.epoch}", cure=cure, problem=False
        )
    else:
        detail = f"process {holder.pid} on {holder.host} holds it, epoch {holder.epoch}"
        yield CheckFinding(what="lease", detail=detail, problem=False)


# Garbage blobs. A newly put blob may not be named by a record yet, so only blobs older than a grace
# period are set aside, and they are removed one grace period later.


class Garbage(msgspec.Struct, kw_only=True):
    """Counts of a tenant's blobs, and of those that no session references."""

    tenant: str
    blobs: int = 0
    """All readable blobs."""
    receipts: int = 0
    """Receipts, by which a migration sees what an earlier run did: they are kept."""
    unreachable: int = 0
    unknown: str | None = None
    """Why nothing was counted: a session cannot be read, and may need any of the blobs."""
    swept: BlobSweep | None = None
    """The result of the sweep."""


async def garbage(store: Store, tenant: str, keys: list[SessionKey]) -> tuple[Garbage, set[str]]:
    """Count the blobs that none of a tenant's sessions *keys* references; return those that are."""
    reached: set[str] = set()
    try:
        names_there = set(await store.blob_names(tenant))
    except CorruptRecordError as error:
        return Garbage(tenant=tenant, unknown=str(error)), reached
    names = Garbage(tenant=tenant, blobs=len(names_there))
    if not names_there:
        return names, reached
    lineage = followed(store)
    for key in keys:
        try:
            documents = await lineage.read_documents(key)
            reached |= await names_of(store, key, documents, await store.head(key))
        except PerdureError as error:
            names.unknown = f"{key} cannot be read: {error}"
            return names, names_there
    reachable = await receipts.current(store, tenant, names_there - reached)
    names.receipts = len(reachable)
    reached |= reachable
    names.unreachable = len(names_there - reached)
    return names, reached


async def collect(store: Store, garbage_found: Garbage, reached: set[str], grace: float) -> None:
    """Set unreferenced blobs aside, and remove those set aside more than *grace* seconds ago."""
    if garbage_found.unknown is None:
        garbage_found.swept = await store.sweep(garbage_found.tenant, reached, grace)


# The integrity of a SQLite store's file. Sessions are audited one by one all the same.


MAX_SHOWN = 5
"""Problems of the file that are printed one by one."""


class Integrity(msgspec.Struct, kw_only=True):
    """The integrity of a store's database file."""

    problems: list[str]
    """What SQLite's integrity_check reports."""
    reindexed: bool = False
    """Whether its indexes were rebuilt."""
    left: list[str]
    """The problems that remain."""


async def reindexed(store: Store) -> list[str] | None:
    """Rebuild the indexes of a store's database file if it has problems; the store is not open.

    Returns the problems found before; None for a store without such a file.
    """
    for layer in layers(store):
        database = capability(layer, SupportsIntegrityCheck)
        if database is not None:
            await open_read_only(layer)
            try:
                findings = await database.integrity_problems()
            finally:
                await layer.aclose()
            if findings:
                await database.reindex()
            return findings
    return None


async def integrity_of(store: Store, before: list[str] | None = None) -> Integrity | None:
    """Check a store's database file; *before* are the problems that a repair has found."""
    for layer in layers(store):
        database = capability(layer, SupportsIntegrityCheck)
        if database is not None:
            remaining = await database.integrity_problems()
            findings = remaining if before is None else before
            return Integrity(
                problems=findings, reindexed=len(remaining) < len(findings), left=remaining
            )
    return None


def print_integrity(
    integrity: Integrity, location: str, audits: Sequence[Audit], *, repair: bool
) -> None:
    """Print the problems of the file, what was repaired, and how to recover."""
    for line in (integrity.left or integrity.problems)[:MAX_SHOWN]:
        say(f"{location}: {'PROBLEM' if integrity.left else 'repaired'}: file: {line}")
    if len(integrity.left) > MAX_SHOWN:
        say(f"{location}: and {len(integrity.left) - MAX_SHOWN} more problems of the file")
    if integrity.reindexed:
        say(f"{location}: the indexes were rebuilt from their tables (REINDEX)")
    if not integrity.left:
        return
    if not repair:
        say(
            f"{location}: `perdure check --repair` rebuilds the indexes; damage elsewhere in the "
            "file stays"
        )
        return
    damaged = [str(audit.key) for audit in audits if audit.problems]
    count = f"{len(audits) - len(damaged)} of {len(audits)} sessions can be read in whole"
    lost = f"; not so: {', '.join(damaged)}" if damaged else ""
    say(
        f"{location}: REINDEX does not repair this. {count}{lost}. Restore the file from a copy; "
        "or copy the sound ones into a new store, with `perdure export ID --layout bundle --out "
        "FILE` and `perdure import FILE`"
    )
