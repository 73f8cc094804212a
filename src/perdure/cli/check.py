"""``perdure check`` and ``rebuild``: what is wrong with sessions, a store's file and its blobs.

An audit only reads, without a lease, also while another process writes: the documents are read
first and compared with a fold of the log up to the record that they are as of. The log is the
truth: damage in it is reported and never repaired. Documents can be rebuilt from it; a lost blob is
named with what needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import anyio
import anyio.to_thread
import msgspec
from cyclopts import Parameter, validators
from rich.progress import MofNCompleteColumn

from perdure.cli.access import (
    below,
    existing,
    found_keys,
    is_there,
    layers,
    managed,
    no_session,
    opened,
)
from perdure.cli.findings import CheckFinding, say_findings
from perdure.cli.output import SessionOption, counted, print_json, progress_bar, say, size
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    FormatError,
    PerdureError,
    UnsupportedVersionError,
)
from perdure.lease import LeaseOptions, OwnerWatch, named, while_beating
from perdure.records.chunks import is_hash
from perdure.records.keys import KEYRING, SessionKey, keyring_of
from perdure.records.manifest import Origin
from perdure.records.messages import decode_message
from perdure.records.records import ENDING, EPOCH, HOLDER_KINDS, MESSAGE_KINDS, MISSING, Record
from perdure.records.types import Registry
from perdure.restore.ladder import validated
from perdure.session.copier import remove_drafts
from perdure.session.internals import parts_of
from perdure.session.lifecycle import HandoverTerms
from perdure.session.point_in_time import base_documents
from perdure.session.reach import RESTORE, Reach
from perdure.session.rebuild import WholeLog, differences
from perdure.session.stored import followed
from perdure.store import (
    BlobSweep,
    Documents,
    DraftInfo,
    LeaseState,
    Store,
    SupportsIntegrityCheck,
    SupportsRebuild,
    blobs_are_apart,
    first_record,
    is_begun,
    listed_blobs,
    open_read_only,
    take_after,
)
from perdure.stores.file import FileStore
from perdure.stores.file.layout import LEASE, NEXT_MANIFEST, QUARANTINE, is_tail, session_path
from perdure.stores.wrapped import EncryptedStore
from perdure.stores.wrapped.keys import is_key
from perdure.transfer import receipts
from perdure.transfer.backup_view import ANEW, JOURNAL, KEPT, POINT
from perdure.transfer.migration import keys_of
from perdure.transfer.second_look import look_again


def leftovers(store: Store, key: SessionKey) -> list[CheckFinding]:
    """Return notes on unused files in a session's folder; none unless files are below the store."""
    files = _file_store(store)
    if files is None:
        return []
    folder = Path(files.location).joinpath(*session_path(key))
    names = _names(folder)
    notes: list[CheckFinding] = []
    coming = list(filter(NEXT_MANIFEST.epoch, names))
    if coming:
        notes.append(
            CheckFinding(
                "leftover",
                "note",
                f"a fold that did not end left {', '.join(coming)}",
                "nothing to do: the next fold replaces it",
            )
        )
    leases = sorted(filter(None, map(LEASE.epoch, names)))
    if len(leases) > 1:
        notes.append(
            CheckFinding(
                "leftover",
                "note",
                "older " + ", ".join(f"lease-{epoch}.json" for epoch in leases[:-1]),
                "nothing to do: the next holder removes it",
            )
        )
    quarantine = folder / QUARANTINE
    kept = [name for name in _names(quarantine) if not is_tail(name)]
    if kept:
        total = sum((quarantine / name).lstat().st_size for name in kept)
        notes.append(
            CheckFinding(
                "leftover",
                "note",
                f"{len(kept)} files ({size(total)}) in {quarantine}, kept as evidence of damage",
                "inspect them, and remove the folder when you no longer need it",
            )
        )
    return notes


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names, not paths
    except FileNotFoundError:
        return []


def _file_store(store: Store) -> FileStore | None:
    return next((layer for layer in layers(store) if isinstance(layer, FileStore)), None)


async def tails(store: Store, key: SessionKey) -> list[CheckFinding]:
    """Return problems with the end of a log in files: bytes that do not count."""
    files = _file_store(store)
    why = "a write that a crash cut, which was never reported as durable, or damage"
    return [
        CheckFinding("log", "problem", f"{tail}: {why}", ACCEPT, repairable=True)
        for tail in (() if files is None else await files.log_tails(key))
    ]


FORGET = "forget it again; if it is opened instead, it may have lost its media"
COMPARE = "compare it with a copy"
ACCEPT = f"{COMPARE}; `perdure check --repair` accepts the log as it is"


class Audit(msgspec.Struct, kw_only=True):
    """The audit of one session."""

    key: SessionKey
    records: int = 0
    documents: int = 0
    findings: list[CheckFinding] = []
    reached: set[str] = set()
    """The blobs that it reaches, other than those that were passed over."""
    sound: set[str] = set()
    """Those of them that are sound; nothing is lost of what they name."""
    is_reach_known: bool = False
    """True if those are all."""
    left: list[CheckFinding] | None = None
    """The problems that a repair has left; None where none was made."""
    repair_error: str | None = None
    """The reason why it was not repaired."""

    def add(self, what: str, detail: str, cure: str = "", *, repairable: bool = False) -> None:
        """Add a problem."""
        self.findings.append(CheckFinding(what, "problem", detail, cure, repairable=repairable))

    @property
    def problems(self) -> list[CheckFinding]:
        """The findings that are problems."""
        return [finding for finding in self.findings if finding.problem]

    @property
    def repairable(self) -> bool:
        """True if there are problems, and a rebuild repairs all of them."""
        return bool(self.problems) and all(problem.repairable for problem in self.problems)


async def audit(store: Store, key: SessionKey, sound: Container[str] = ()) -> Audit:
    """Check a whole session: every record, document and blob, and its lease.

    While a program writes it, what does not fit is looked at again.

    Args:
        store: Its store.
        key: The session.
        sound: Blobs to pass over, with all that is reached through them.

    """
    return await look_again(
        store, key, lambda: _look(store, key, sound), is_wrong=lambda done: bool(done.problems)
    )


async def _look(store: Store, key: SessionKey, sound: Container[str]) -> Audit:
    done = Audit(key=key)
    store = lineage = followed(store)  # a fork's log continues its parent's
    documents = await _documents(store, done)
    tail = "" if documents is None else documents.unproven_tail
    records = await _records(store, done)
    base, began = Origin(), Documents()
    try:
        base = await lineage.beginning_of(key)
        base = msgspec.structs.replace(base, at=(await lineage.base_of(key) or Origin()).at)
        began = await base_documents(lineage, key)
    except (CorruptRecordError, UnsupportedVersionError) as error:
        done.add("log", str(error))
    if not records and not done.problems and await lineage.inner.head(key):
        detail = f"none of its records can be read: its history up to {base.cut} was removed"
        done.add("log", detail, RESTORE)
    done.findings += log_problems(records, base)
    lost = [record for record in records if record.kind == MISSING]
    done.findings += map(_missing_note, lost)
    holder = await store.holder(key)
    await _blobs_of(store, done, documents or Documents(), records, sound)
    if records and records[-1].kind == ENDING and any(one.what == "blob" for one in done.problems):
        # Not damage: they went first, and the session would have followed.
        rest = [finding for finding in done.findings if finding.what != "blob"]
        done.findings = [*rest, _ending(holder)]
    if lost:
        documents = None  # they may contain what the log has lost
    if documents is not None and not any(problem.what == "log" for problem in done.problems):
        log = WholeLog(key, records, began)
        done.findings += await anyio.to_thread.run_sync(
            lambda: list(_document_problems(log, documents))
        )
    if tail:
        done.add("log", tail, ACCEPT, repairable=True)
    done.findings += _lease_notes(holder)
    return done


async def _blobs_of(
    store: Store, seen: Audit, documents: Documents, records: list[Record], sound: Container[str]
) -> None:
    """Read all blobs that a session reaches."""
    reach = Reach(store, seen.key, documents)
    is_known = not seen.problems and not documents.damaged
    try:
        for record in records:
            reach.feed(record)
        async with contextlib.aclosing(reach.blobs(sound)) as blobs:
            async for blob in blobs:
                seen.reached.add(blob.name)
                if blob.is_whole and not blob.why:
                    seen.sound.add(blob.name)
                if blob.why:
                    seen.add(
                        "blob",
                        f"{blob.name} {blob.why}, which {blob.by} needs",
                        RESTORE if blob.is_lost else "the log has it, and a rebuild puts it back",
                        repairable=not blob.is_lost,
                    )
                    is_known = is_known and blob.is_leaf  # else it may have named others
    except FormatError as error:
        if not seen.problems:  # else that is why
            seen.add("blob", str(error))
    else:
        seen.is_reach_known = is_known


async def incomplete(store: Store, key: SessionKey) -> str:
    """Return why records may be missing at the end of a log, and the cure; empty if none are."""
    tail = (await followed(store).read_documents(key, ())).unproven_tail
    details = [tail] if tail else [finding.detail for finding in await tails(store, key)]
    return "; ".join(f"{detail}: {ACCEPT}" for detail in details)


def _ending(holder: LeaseState | None) -> CheckFinding:
    """Return the finding on a session whose forgetting has removed some of it."""
    if holder is not None and not holder.released and holder.alive is not False:
        return CheckFinding(
            "forget", "note", "it is being forgotten", "unless that ends: " + FORGET
        )
    return CheckFinding("forget", "problem", "its forgetting was cut off", FORGET)


def _missing_note(record: Record) -> CheckFinding:
    """Return the note on a range of records that a salvaged session lacks."""
    lost = msgspec.json.decode(record.payload, type=_MissingRange)
    return CheckFinding(
        "log",
        "note",
        f"records {lost.first} to {lost.last} were lost to damage before it was salvaged",
        "the documents stay as they are: a rebuild from the log would lose what they know",
    )


class _MissingRange(msgspec.Struct):
    first: int
    last: int


async def _documents(store: Store, seen: Audit) -> Documents | None:
    try:
        documents = validated(await store.read_documents(seen.key, None), seen.key)
    except (CorruptRecordError, UnsupportedVersionError) as error:
        seen.add("document", str(error))
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
        seen.add("log", str(error))
    if not settled:
        seen.findings.append(
            CheckFinding(
                "lease",
                "note",
                "another process is taking the session over: the newest records may be missing "
                "here",
            )
        )
    seen.records = len(records)
    return records


def log_problems(records: list[Record], base: Origin | None = None) -> list[CheckFinding]:
    """Return what is wrong with the records as a log: their numbers, epochs and payloads."""
    return [
        CheckFinding("log", "problem", detail, "restore the log's files from a copy")
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
    if lack := log.lacks(documents):
        yield CheckFinding("log", "problem", lack, "restore the log's files from a copy")
        return
    for difference in differences(log, documents):
        yield CheckFinding(
            "document",
            "problem",
            difference.detail,
            "a rebuild from the log replaces it",
            repairable=True,
        )


def _lease_notes(holder: LeaseState | None) -> Iterator[CheckFinding]:
    if holder is None or holder.released or holder.deleted:
        return
    if holder.alive is False:
        yield CheckFinding(
            "lease",
            "note",
            f"{named(holder)} ended without releasing epoch {holder.epoch}",
            "nothing to do: the next open takes it over",
        )
    else:
        yield CheckFinding("lease", "note", f"{named(holder)} holds it, epoch {holder.epoch}")


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
    """The reason why nothing was counted: a session that cannot be read may need any blob."""
    swept: BlobSweep | None = None
    """The result of the sweep."""


async def garbage(
    store: Store, tenant: str, names_there: set[str] | str, audits: Sequence[Audit]
) -> tuple[Garbage, set[str]]:
    """Count the blobs that none of a tenant's sessions reaches; return those that are reached.

    Args:
        store: The store.
        tenant: The tenant.
        names_there: Its blobs before the audits; or why they are not known.
        audits: Of all of its sessions.

    """
    if isinstance(names_there, str):
        return Garbage(tenant=tenant, unknown=names_there), set()
    counted = Garbage(tenant=tenant, blobs=len(names_there))
    if not names_there:
        return counted, set()
    reached: set[str] = set()
    for audit in audits:
        # A session that cannot be read may need any of the blobs: then none is garbage.
        if not audit.is_reach_known:
            detail = audit.problems[0].detail if audit.problems else "documents of it are damaged"
            counted.unknown = f"{audit.key} cannot be read: {detail}"
            return counted, names_there
        reached |= (await listed_blobs(store, audit.key, audit.reached)).keys()
    if not blobs_are_apart(store):  # their sessions are not known here
        reached |= {name for name in names_there if not is_hash(name)}
    kept = await receipts.current(store, tenant, set(filter(is_hash, names_there - reached)))
    counted.receipts = len(kept)
    reached |= kept
    counted.unreachable = len(names_there - reached)
    return counted, reached


async def collect(store: Store, garbage_found: Garbage, reached: set[str], grace: float) -> None:
    """Set unreferenced blobs aside, and remove those set aside more than *grace* seconds ago."""
    if garbage_found.unknown is None:
        garbage_found.swept = await store.sweep(garbage_found.tenant, reached, grace)


# The integrity of a SQLite store's file. Sessions are audited one by one all the same.


MAX_SHOWN = 5
"""Problems of the file that are printed one by one."""


class Integrity(msgspec.Struct):
    """The integrity of a store's database file."""

    problems: list[str]
    """The findings of SQLite's integrity_check."""
    reindexed: bool
    """True if its indexes were rebuilt."""
    left: list[str]
    """The problems that remain."""

    def besides(self, audits: Sequence[Audit]) -> Integrity:
        """Return what is not a finding of a session already."""
        known = {finding.detail for audit in audits for finding in audit.findings}
        new = [
            [line for line in lines if line not in known] for lines in (self.problems, self.left)
        ]
        return Integrity(problems=new[0], reindexed=self.reindexed, left=new[1])


async def reindexed(store: Store) -> list[str] | None:
    """Rebuild the indexes of a store's database file if it has problems; the store is not open.

    Returns the problems found before; None for a store without such a file.
    """
    database = below(store, SupportsIntegrityCheck)
    if database is None:
        return None
    await open_read_only(cast("Store", database))
    try:
        problems = await database.integrity_problems()
    finally:
        await cast("Store", database).aclose()
    if problems:
        await database.reindex()
    return problems


async def integrity_of(store: Store, before: list[str] | None = None) -> Integrity | None:
    """Check a store's database file; *before* are the problems that a repair has found."""
    database = below(store, SupportsIntegrityCheck)
    if database is None:
        return None
    left = await database.integrity_problems()
    problems = left if before is None else before
    return Integrity(problems=problems, reindexed=len(left) < len(problems), left=left)


def _print_integrity(
    file: Integrity, location: str, audits: Sequence[Audit], *, repair: bool
) -> None:
    """Print the problems of the file, what was repaired, and how to recover."""
    for line in (file.left or file.problems)[:MAX_SHOWN]:
        say(f"{location}: {'PROBLEM' if file.left else 'repaired'}: file: {line}")
    if len(file.left) > MAX_SHOWN:
        say(f"{location}: and {len(file.left) - MAX_SHOWN} more problems of the file")
    if file.reindexed:
        say(f"{location}: the indexes were rebuilt from their tables (REINDEX)")
    if file.left and not repair:
        say(
            f"{location}: `perdure check --repair` rebuilds the indexes; damage elsewhere in the "
            "file stays"
        )
    elif file.left:
        damaged = [str(audit.key) for audit in audits if audit.problems]
        count = f"{len(audits) - len(damaged)} of {len(audits)} sessions can be read in whole"
        lost = f"; not so: {', '.join(damaged)}" if damaged else ""
        say(
            f"{location}: REINDEX does not repair this. {count}{lost}. Restore the file from a "
            "copy; or copy the sound ones into a new store, with `perdure export ID --layout "
            "bundle --out FILE` and `perdure import FILE`"
        )


async def _unlocked(store: Store) -> list[SessionKey]:
    """Remove what makes a store look encrypted, or like a backup, that is neither; not open yet.

    What its sessions hold says what a store is. An encrypted one has none in plain text, and a
    backup has records of its own kinds only: where all are otherwise, a session under the id of the
    keys, or of the journal, was put there.
    """
    await store.open()
    try:
        tenants = sorted({"", *await store.tenants()})
        locks = [keyring_of(tenant) for tenant in tenants] + [JOURNAL]
        locks = [key for key in locks if await is_begun(store, key)]
        if not locks:
            return []
        records: list[Record] = []
        has_keys = False
        for key in await keys_of(store, tenants):
            if key.agent == KEYRING or key == JOURNAL:
                continue
            documents = await store.read_documents(key, ())
            manifest = documents.manifest
            names = documents.remains if manifest is None else manifest.documents
            has_keys = has_keys or any(map(is_key, names))
            log = store.read_log(key)
            first = await first_record(log, lambda record: record.kind not in HOLDER_KINDS)
            records += [] if first is None else [first]
        is_plain = bool(records) and all(record.payload[:1] == b"{" for record in records)
        is_plain = is_plain and not has_keys
        is_backup = not records or any(record.kind in {KEPT, ANEW, POINT} for record in records)
        wrong = [key for key in locks if (not is_backup if key == JOURNAL else is_plain)]
        for key in wrong:
            holder = await store.holder(key)
            grant = await take_after(store, key, after=0 if holder is None else holder.epoch)
            await store.delete(key, grant.epoch)
        return wrong
    finally:
        await store.aclose()


async def check(
    id: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *,
    repair: bool = False,
    gc: bool = False,
    grace: Annotated[float, Parameter(validator=validators.Number(gte=0))] = 24.0,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Check sessions: the log, documents against a fresh fold, blobs, leases, leftovers.

    Without --repair or --gc it changes nothing, and says what they would do. Exits with 1 if a
    problem remains. The log is never repaired: it is the truth, and only a copy can restore what
    is damaged in it.

    Args:
        id: The agent's id. Default: every session of the store, or of the tenant.
        repair: Rebuild the documents of sessions whose log is sound and whose documents are not,
            lost memory values, the index of `ls`, a SQLite database's indexes. Accept a log that
            may be incomplete. Remove what makes a plain store look encrypted, or like a backup.
        gc: Set aside the blobs that no session references, and remove those that were set aside
            a grace period ago. Remove copies that a process was killed in the middle of.
        grace: The grace period: the minimum age of such a blob, in hours.

    """
    if gc and id is not None:
        raise ConfigError("--gc looks at every session of a tenant: leave the id out")
    before = await reindexed(existing(where.store)) if repair else None
    unlocked = await _unlocked(existing(where.store)) if repair else []
    async with opened(where.store, write=repair or gc) as store:
        entries = await rebuilt_directory(store) if repair and id is None else None
        file = await integrity_of(store, before)
        audits, blobs = await _seen(store, id, grace if gc else None, where, file)
        file = file and file.besides(audits)
    folded = await _repair_all(where, audits) if repair else 0
    problems = sum(
        len(audited.problems if audited.left is None else audited.left) for audited in audits
    ) + (0 if file is None else len(file.left))
    repairable = sum(audited.repairable and audited.left is None for audited in audits)
    records = sum(audited.records for audited in audits)
    report = {
        "location": store.location,
        "checked": len(audits),
        "records": records,
        "problems": problems,
        "repairable": repairable,
        "repaired": sum(audited.left == [] for audited in audits),
        "sessions": [
            {
                "agent": audited.key.agent,
                "session": audited.key.session,
                "tenant": audited.key.tenant,
                "records": audited.records,
                "documents": audited.documents,
                "findings": audited.findings,
                "repaired": audited.left == [],
                "repair_error": audited.repair_error,
            }
            for audited in audits
        ],
        "blobs": blobs,
        "index": {"folded": folded, "entries": entries},
        "file": file,
        "unlocked": [key.agent for key in unlocked],
    }
    if where.json:
        print_json(report)
        return 1 if problems else 0
    for key in unlocked:
        say(f"{key}: removed: this store is neither encrypted nor a backup")
    if file is not None:
        _print_integrity(file, store.location, audits, repair=repair)
    _print_audits(audits)
    say(
        f"{counted(len(audits), 'session')} with {counted(records, 'record')} in {store.location}: "
        f"{problems or 'no'} problem{'s' if problems != 1 else ''}"
    )
    if repairable and not repair:
        say(f"`perdure check --repair` would repair {counted(repairable, 'session')}")
    if entries is not None:
        say(f"index: the directory was rebuilt: {counted(entries, 'session')}")
    if folded:
        say(f"index: {counted(folded, 'session')} folded, of which a listing had only the ids")
    for blob in blobs:
        _print_blobs(blob)
    return 1 if problems else 0


def _print_audits(audits: Sequence[Audit]) -> None:
    for audited in audits:
        say_findings(audited.findings, audited.key)
        if audited.repair_error is not None:
            say(f"{audited.key}: not repaired: {audited.repair_error}")
        elif audited.left is not None:
            left = f", {len(audited.left)} problems left" if audited.left else ""
            say(f"{audited.key}: repaired{left}")


async def _seen(
    store: Store,
    id: str | None,
    grace: float | None,
    where: SessionOption,
    file: Integrity | None,
) -> tuple[list[Audit], list[Garbage]]:
    """Audit one session, or all of them and the blobs."""
    if id is not None:
        key = where.key(id)
        if not await is_there(store, key):
            raise no_session(key, store)
        return await _audit_all(store, [key]), []
    tenants, keys = await listed_sessions(store, where.tenant)
    is_damaged = file is not None and bool(file.left)
    sweeps = grace is not None and not is_damaged
    for found in await _without_drafts(store, tenants) if sweeps else ():
        if not where.json:
            say(f"{found.key}: an unfinished copy of {found.draft.source} was removed")
    # Blobs are listed before the sessions are read: one that is put after this, for a record
    # that the audit does not see, is never taken for garbage.
    there: dict[str, set[str] | str] = {}
    for tenant in tenants:
        try:
            there[tenant] = set(await store.blob_names(tenant))
        except CorruptRecordError as error:
            there[tenant] = str(error)
        if is_damaged:
            there[tenant] = f"{store.location} may have lost a session that needs any of them"
    audits = await _audit_all(store, keys)
    blobs: list[Garbage] = []
    for tenant in tenants:
        theirs = [audit for audit in audits if audit.key.tenant == tenant]
        garbage_found, reached = await garbage(store, tenant, there[tenant], theirs)
        if grace is not None:
            await collect(store, garbage_found, reached, grace * 3600)
        blobs.append(garbage_found)
    return audits, blobs


async def _without_drafts(store: Store, tenants: Sequence[str]) -> list[DraftInfo]:
    """Remove unfinished copies; wait a lease's time where no one sees whether a process lives."""
    lease = LeaseOptions()
    watch = OwnerWatch(lease, anyio.current_time)

    async def removed() -> list[DraftInfo]:
        return [found for tenant in tenants for found in await remove_drafts(store, tenant, watch)]

    async def act() -> list[DraftInfo]:
        first = await removed()
        left = [found.key for tenant in tenants for found in await store.drafts(tenant)]
        holders = [await store.holder(key) for key in left]
        if all(holder is None or holder.alive is not None for holder in holders):
            return first
        # A holder that does not beat within a lease's time is dead.
        await anyio.sleep(lease.ttl + lease.heartbeat)
        return first + await removed()

    return await while_beating(store, watch, act)


def _print_blobs(garbage: Garbage) -> None:
    whose = f" of tenant {garbage.tenant}" if garbage.tenant else ""
    if garbage.receipts:
        say(
            f"blobs{whose}: {garbage.receipts} are receipts of `perdure migrate` or "
            "`restore-backup`,"
            " for when it runs again"
        )
    if garbage.unknown is not None:
        say(f"blobs{whose}: not counted: {garbage.unknown}")
    elif garbage.swept is not None:
        swept = garbage.swept
        say(
            f"blobs{whose}: {swept.quarantined} set aside, {swept.removed} removed, "
            f"{size(swept.bytes)} freed"
        )
    elif garbage.unreachable:
        say(
            f"blobs{whose}: no session references {garbage.unreachable} of {garbage.blobs}; "
            "`perdure check --gc` would set them aside"
        )


async def listed_sessions(store: Store, tenant: str) -> tuple[list[str], list[SessionKey]]:
    """Return the tenants and their sessions; if the listing is damaged, those that are readable."""
    try:
        tenants = [tenant] if tenant else await store.tenants()
        return tenants, await keys_of(store, tenants)
    except CorruptRecordError:
        known = await found_keys(store)
        if known is None:
            raise
    keys = [key for key in known if not tenant or key.tenant == tenant]
    return sorted({key.tenant for key in keys}), keys


async def _audit_all(store: Store, keys: list[SessionKey]) -> list[Audit]:
    audits: list[Audit] = []
    refused: list[ConfigError] = []
    sound: dict[str | SessionKey, set[str]] = {}
    is_apart = blobs_are_apart(store)
    with progress_bar("checking", MofNCompleteColumn(), total=len(keys)) as update:
        for done, key in enumerate(keys, 1):
            known = sound.setdefault(key if is_apart else key.tenant, set())
            try:
                audited = await audit(store, key, known)
                known |= audited.sound
            except ConfigError as error:  # its key is missing, or differs from the others'
                refused.append(error)
                audited = Audit(key=key, findings=[CheckFinding("key", "problem", str(error))])
            except CorruptRecordError as error:  # damaged before anything of it is read
                audited = Audit(key=key, findings=[CheckFinding("log", "problem", str(error))])
            audited.findings += await tails(store, key)
            audited.findings += leftovers(store, key)
            await _dead_letters(store, audited)
            if not audited.repairable:  # then nothing of it is accepted
                audited.findings = list(map(_unaccepted, audited.findings))
            audits.append(audited)
            update(done, len(keys))
    if refused and len(refused) == len(keys):
        raise refused[0]  # the key that was given is wrong
    return audits


def _unaccepted(finding: CheckFinding) -> CheckFinding:
    if finding.cure != ACCEPT:
        return finding
    return msgspec.structs.replace(finding, cure=COMPARE, repairable=False)


async def _dead_letters(store: Store, seen: Audit) -> None:
    try:
        letters = await store.dead_letters(seen.key)
    except CorruptRecordError as error:  # the session's row is damaged
        if not seen.problems:
            seen.add("dead letters", str(error))
        return
    if not letters:
        return
    posts = list(dict.fromkeys(letter.item.key for letter in letters))
    detail = f"{len(letters)} posted items could not be delivered ({', '.join(posts[:5])}"
    detail += f" and {len(posts) - 5} more posts)" if len(posts) > 5 else ")"
    detail += f": {letters[0].reason}"
    agent = seen.key.agent
    cure = f"`perdure inbox {agent}` shows them; --retry posts them again, --drop removes them"
    seen.findings.append(CheckFinding("dead letters", "note", detail, cure))


async def rebuilt_directory(store: Store) -> int | None:
    """Rebuild a store's directory, if it or a store that it wraps keeps one; return its size."""
    directory = below(store, SupportsRebuild)
    return None if directory is None else await directory.rebuild_directory()


async def _repair_all(where: SessionOption, audits: Sequence[Audit]) -> int:
    """Repair what can be; return how many sessions were folded of which a listing had only ids."""
    folded = 0
    for audited in audits:
        if audited.repairable:
            audited.left, audited.repair_error = await _repair(where, audited)
        elif not audited.problems and not audited.documents and audited.records > 1:
            _, error = await _repair(where, audited)
            folded += error is None
    return folded


async def _repair(where: SessionOption, audited: Audit) -> tuple[list[CheckFinding], str | None]:
    """Rebuild one session's documents, accept its log, and audit it again.

    Returns the problems that remain, and why it was not repaired.
    """
    try:
        async with managed(existing(where.store), write=True) as sessions:
            await parts_of(sessions).rebuild(audited.key, HandoverTerms("raise", 0.0))
        async with opened(where.store, write=True) as store:
            for layer in layers(store):
                if isinstance(layer, EncryptedStore | FileStore):
                    await layer.accept_log(audited.key)
            again = await audit(store, audited.key)
            again.findings += await tails(store, audited.key)
    except PerdureError as error:
        return audited.problems, str(error)
    return again.problems, None


async def rebuild(
    id: Annotated[str, Parameter(name="ID")],
    /,
    *,
    dry_run: bool = False,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Rebuild a session's documents from its log.

    The documents are caches: this loses nothing, and repairs any damage to them. It takes the
    session's lease without waiting, so it fails while the session is in use.

    Args:
        id: The agent's id.
        dry_run: Only show what is wrong with the documents.

    """
    key = where.key(id)
    async with opened(where.store) as store:
        if not await is_there(store, key):
            raise no_session(key, store)
        audited = await audit(store, key)
    for finding in audited.problems:
        if not finding.repairable:
            raise CorruptRecordError(f"session {key}: {finding.detail}", key=str(key))
    answer: dict[str, Any] = {
        "agent": key.agent,
        "session": key.session,
        "tenant": key.tenant,
        "records": audited.records,
        "wrong": [finding.detail for finding in audited.problems],
        "rebuilt": [],
    }
    if not dry_run:
        async with managed(existing(where.store), write=True) as sessions:
            report = await parts_of(sessions).rebuild(key, HandoverTerms("raise", 0.0))
        answer["rebuilt"] = list(report.rebuilt)
    lines = [f"{key}: {detail}" for detail in answer["wrong"]]
    if dry_run:
        count = len(answer["wrong"])
        lines.append(f"{key}: {count} of its documents would be rebuilt; nothing was changed")
    else:
        names = ", ".join(answer["rebuilt"])
        lines.append(f"{key}: rebuilt {names} from {answer['records']} records")
    where.show(answer, "\n".join(lines))
    return 0
