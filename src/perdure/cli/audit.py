"""What a look at a session finds: values only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from perdure.store import BlobSweep, Document, Documents, LeaseState, Store
from perdure.stores.file import FileStore
from perdure.stores.file.layout import QUARANTINE, lease_epoch, manifest_epoch, session_path
from perdure.transfer import receipts
from perdure.transfer.bundle_files import names_of

# What a look at a session finds, and what kills and damage have left in a file store. Reads only


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a session, or worth knowing."""

    what: str
    """log, document, key, lease, leftover, or dead letters."""
    detail: str
    cure: str = ""
    problem: bool = True
    """False for what is worth knowing and in order."""
    repairable: bool = False
    """Whether rebuilding the documents mends it."""


# What kills and damage have left in a file store. Reads only


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
    """Return what lies in a session's folder and no longer counts; a file store's only."""
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
    cure = "look at them, and remove the folder when you need it no more"
    yield CheckFinding(what="leftover", detail=detail, cure=cure, problem=False)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names, not paths
    except FileNotFoundError:
        return []


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


# Blobs that nothing reaches: counted by every whole check, removed when told to


class Garbage(msgspec.Struct, kw_only=True):
    """What of a tenant's blobs nothing reaches."""

    tenant: str
    blobs: int = 0
    """All that can be read."""
    receipts: int = 0
    """Those by which a migration finds out what an earlier one did: they stay."""
    unreachable: int = 0
    unknown: str | None = None
    """Why it cannot be told: a session cannot be read, and may need any of them."""
    swept: BlobSweep | None = None
    """What was done about it."""


async def garbage(store: Store, tenant: str, keys: list[SessionKey]) -> tuple[Garbage, set[str]]:
    """Look for blobs that none of a tenant's sessions, which are *keys*, reaches."""
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
    """Set aside what nothing reaches, and remove what was set aside long enough ago."""
    if garbage_found.unknown is None:
        garbage_found.swept = await store.sweep(garbage_found.tenant, reached, grace)


# The file that a store keeps everything in: whether it is sound, and what is readable if not
#
# Of stores that can tell, which is SQLite's. The sessions are looked at one by one all the same.


TOLD = 5
"""Problems of the file that are told one by one."""


class Integrity(msgspec.Struct, kw_only=True):
    """What a look at the file as a whole has shown."""

    problems: list[str]
    """What SQLite's integrity_check says."""
    reindexed: bool = False
    """Whether its indexes were made anew."""
    left: list[str]
    """What is wrong with it now."""


async def mended(store: Store) -> list[str] | None:
    """Make the indexes of a store's file anew if that mends anything; the store is not open.

    Returns what was wrong; None for a store that has no such file.
    """
    layer: Any
    for layer in layers(store):
        if hasattr(layer, "reindex"):
            await layer.open_read_only()
            try:
                findings: list[str] = await layer.integrity_problems()
            finally:
                await layer.aclose()
            if findings:
                await layer.reindex()
            return findings
    return None


async def examined(store: Store, before: list[str] | None = None) -> Integrity | None:
    """Look at a store's file, behind a repair that has seen other problems before."""
    for layer in layers(store):
        look = getattr(layer, "integrity_problems", None)
        if look is not None:
            remaining: list[str] = await look()
            findings = remaining if before is None else before
            return Integrity(
                problems=findings, reindexed=len(remaining) < len(findings), left=remaining
            )
    return None


def print_integrity(
    integrity: Integrity, location: str, audits: Sequence[Audit], *, repair: bool
) -> None:
    """Say what is wrong with the file, what was done about it, and the way out."""
    for line in (integrity.left or integrity.problems)[:TOLD]:
        say(f"{location}: {'PROBLEM' if integrity.left else 'mended'}: file: {line}")
    if len(integrity.left) > TOLD:
        say(f"{location}: and {len(integrity.left) - TOLD} more problems of the file")
    if integrity.reindexed:
        say(f"{location}: the indexes were made anew from their tables (REINDEX)")
    if not integrity.left:
        return
    if not repair:
        say(
            f"{location}: `perdure check --repair` makes the indexes anew; damage elsewhere in the "
            "file stays"
        )
        return
    damaged = [str(audit.key) for audit in audits if audit.problems]
    count = f"{len(audits) - len(damaged)} of {len(audits)} sessions can be read in whole"
    lost = f"; not so: {', '.join(damaged)}" if damaged else ""
    say(
        f"{location}: REINDEX does not mend this. {count}{lost}. Restore the file from a copy; or "
        "take the sound ones over into a new store, by `perdure export ID --layout bundle --out "
        "FILE` and `perdure import FILE`"
    )
