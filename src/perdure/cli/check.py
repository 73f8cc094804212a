"""``perdure check`` and ``perdure rebuild``: find damage, and repair what the log can restore."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from cyclopts import Parameter, validators
from rich.progress import MofNCompleteColumn

from perdure.cli.access import existing, found_keys, is_there, layers, managed, no_session, opened
from perdure.cli.audit import (
    Audit,
    CheckFinding,
    Garbage,
    audit,
    collect,
    garbage,
    integrity_of,
    leftovers,
    print_integrity,
    reindexed,
)
from perdure.cli.output import SessionOption, print_json, progress_bar, say, size
from perdure.errors import ConfigError, CorruptRecordError, PerdureError
from perdure.records.keys import SessionKey, require_filters
from perdure.store import SessionInfo, Store, SupportsRebuild, capability
from perdure.stores.wrapped import EncryptedStore

PAGE = 500


async def check(
    id: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *,
    repair: bool = False,
    gc: bool = False,
    grace: Annotated[float, Parameter(validator=validators.Number(gte=0))] = 24.0,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Check sessions: the log, the documents against a fresh fold of it, leases, leftovers.

    Without --repair or --gc it changes nothing, and says what they would do. Exits with 1 if a
    problem remains. The log is never repaired: it is the truth, and only a copy can restore what
    is damaged in it.

    Args:
        id: The agent's id. Default: every session of the store, or of the tenant.
        repair: Rebuild the documents of sessions whose log is sound and whose documents are not,
            the index that `ls` lists and filters by, and a SQLite database's indexes. Accept the
            log of an encrypted session that may be incomplete.
        gc: Set aside the blobs that no session references, and remove those that were set aside
            a grace period ago.
        grace: The grace period: the minimum age of such a blob, in hours.

    """
    if gc and id is not None:
        raise ConfigError("--gc looks at every session of a tenant: leave the id out")
    index = RebuiltIndex()
    before = await reindexed(existing(where.store)) if repair else None
    async with opened(where.store, write=repair or gc) as store:
        if repair and id is None:
            index.entries = await rebuilt_directory(store)
        file = await integrity_of(store, before)
        audits, blobs = await _seen(store, id, grace if gc else None, where)
        location = store.location
    repaired: list[RepairAction] = []
    if repair:
        repaired = [await _repair(where, audit) for audit in audits if audit.repairable]
        folded = [await _repair(where, audit) for audit in audits if _is_unlisted(audit)]
        index.folded = sum(blob.error is None for blob in folded)
    report = {**_report(location, audits, repaired, blobs), "index": index, "file": file}
    report["problems"] += len(file.left) if file is not None else 0
    if where.json:
        print_json(report)
        return 1 if report["problems"] else 0
    if file is not None:
        print_integrity(file, location, audits, repair=repair)
    _print(report, audits, repaired, repair=repair)
    _print_index(index)
    for blob in blobs:
        _print_blobs(blob)
    return 1 if report["problems"] else 0


async def _seen(
    store: Store, id: str | None, grace: float | None, where: SessionOption
) -> tuple[list[Audit], list[Garbage]]:
    """Audit one session, or all of them and the blobs."""
    if id is not None:
        key = where.key(id)
        if not await is_there(store, key):
            raise no_session(key, store)
        return await _audit_all(store, [key]), []
    blobs: list[Garbage] = []
    tenants, keys = await _listed(store, where.tenant)
    audits = await _audit_all(store, keys)
    for tenant in tenants:
        theirs = [key for key in keys if key.tenant == tenant]
        blobs.append(await _blobs(store, tenant, theirs, grace))
    return audits, blobs


async def _blobs(store: Store, tenant: str, keys: list[SessionKey], grace: float | None) -> Garbage:
    garbage_found, reached = await garbage(store, tenant, keys)
    if grace is not None:
        await collect(store, garbage_found, reached, grace * 3600)
    return garbage_found


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


async def _listed(store: Store, tenant: str) -> tuple[list[str], list[SessionKey]]:
    """Return the tenants and their sessions; if the listing is damaged, those that are readable."""
    try:
        tenants = [tenant] if tenant else await store.tenants()
        return tenants, [key for listed in tenants for key in await _keys(store, listed)]
    except CorruptRecordError:
        known = await found_keys(store)
        if known is None:
            raise
    keys = [key for key in known if not tenant or key.tenant == tenant]
    return sorted({key.tenant for key in keys}), keys


async def _keys(store: Store, tenant: str) -> list[SessionKey]:
    keys: list[SessionKey] = []
    last: SessionInfo | None = None
    require_filters(tenant=tenant)
    while True:
        after = None if last is None else last.key
        page = await store.sessions(tenant=tenant, after=after, limit=PAGE)
        keys += [info.key for info in page]
        if len(page) < PAGE:
            return keys
        last = page[-1]


async def _audit_all(store: Store, keys: list[SessionKey]) -> list[Audit]:
    audits: list[Audit] = []
    refused: list[ConfigError] = []
    with progress_bar("checking", MofNCompleteColumn(), total=len(keys)) as update:
        for done, key in enumerate(keys, 1):
            try:
                audit = await _audit(store, key)
            except ConfigError as error:  # its key is missing, or differs from the others'
                refused.append(error)
                audit = Audit(key=key, findings=[CheckFinding(what="key", detail=str(error))])
            audit.findings += leftovers(store, key)
            audit.findings += await _dead_letters(store, key)
            audits.append(audit)
            update(done, len(keys))
    if refused and len(refused) == len(keys):
        raise refused[0]  # the key that was given is wrong
    return audits


async def _audit(store: Store, key: SessionKey) -> Audit:
    try:
        return await audit(store, key)
    except CorruptRecordError as error:  # it, or the file, is damaged before anything of it is read
        return Audit(key=key, findings=[CheckFinding(what="log", detail=str(error))])


async def _dead_letters(store: Store, key: SessionKey) -> list[CheckFinding]:
    if not store.capabilities.dead_letters:
        return []
    letters = await store.dead_letters(key)
    if not letters:
        return []
    posts = list(dict.fromkeys(letter.item.key for letter in letters))
    detail = f"{len(letters)} posted items could not be delivered ({', '.join(posts[:5])}"
    detail += f" and {len(posts) - 5} more posts)" if len(posts) > 5 else ")"
    detail += f": {letters[0].reason}"
    cure = f"`perdure inbox {key.agent}` shows them; --retry posts them again, --drop removes them"
    return [CheckFinding(what="dead letters", detail=detail, cure=cure, problem=False)]


class RepairAction(msgspec.Struct, frozen=True):
    """The result of repairing one session."""

    key: SessionKey
    left: tuple[CheckFinding, ...] = ()
    """The problems that remain."""
    error: str | None = None
    """Why it was not repaired."""


class RebuiltIndex(msgspec.Struct):
    """What a repair rebuilt of the index that a listing reads."""

    folded: int = 0
    """Sessions that had no documents, so that a listing had only their ids."""
    entries: int | None = None
    """Sessions in the store's rebuilt directory; None for a store that keeps none."""


async def rebuilt_directory(store: Store) -> int | None:
    """Rebuild a store's directory, if it or a store that it wraps keeps one; return its size."""
    for layer in layers(store):
        directory = capability(layer, SupportsRebuild)
        if directory is not None:
            return await directory.rebuild_directory()
    return None


def _is_unlisted(seen: Audit) -> bool:
    return not seen.problems and not seen.documents and seen.records > 1


def _print_index(index: RebuiltIndex) -> None:
    if index.entries is not None:
        say(f"index: the directory was rebuilt: {index.entries} sessions")
    if index.folded:
        say(f"index: {index.folded} sessions folded, of which a listing had only the ids")


async def _repair(where: SessionOption, audited: Audit) -> RepairAction:
    """Rebuild one session's documents, and audit it again."""
    try:
        async with managed(existing(where.store), write=True) as sessions:
            key = audited.key
            await sessions.rebuild_working_context(
                key.agent, session=key.session, tenant=key.tenant
            )
        async with opened(where.store, write=True) as store:
            await _accept_log(store, audited.key)
            again = await audit(store, audited.key)
    except PerdureError as error:
        return RepairAction(audited.key, tuple(audited.problems), str(error))
    return RepairAction(audited.key, tuple(again.problems))


async def _accept_log(store: Store, key: SessionKey) -> None:
    """Take a log that nothing proves to be complete as it is; also a wrapped store's."""
    for layer in layers(store):
        if isinstance(layer, EncryptedStore):
            await layer.accept_log(key)
            return


def _report(
    location: str, audits: list[Audit], repaired: list[RepairAction], blobs: list[Garbage]
) -> dict[str, Any]:
    after = {finding.key: finding for finding in repaired}
    remaining = sum(
        len(after[audit.key].left if audit.key in after else audit.problems) for audit in audits
    )
    sessions = [
        {
            "agent": audit.key.agent,
            "session": audit.key.session,
            "tenant": audit.key.tenant,
            "records": audit.records,
            "documents": audit.documents,
            "findings": audit.findings,
            "repaired": audit.key in after and not after[audit.key].left,
            "repair_error": after[audit.key].error if audit.key in after else None,
        }
        for audit in audits
    ]
    return {
        "location": location,
        "checked": len(audits),
        "records": sum(audit.records for audit in audits),
        "problems": remaining,
        "repairable": sum(audit.repairable and audit.key not in after for audit in audits),
        "repaired": sum(not finding.left for finding in repaired),
        "sessions": sessions,
        "blobs": blobs,
    }


def _print(
    report: dict[str, Any], audits: list[Audit], repaired: list[RepairAction], *, repair: bool
) -> None:
    after = {problem.key: problem for problem in repaired}
    for audited in audits:
        for finding in audited.findings:
            say(_line(audited.key, finding))
        if audited.key in after:
            say(f"{audited.key}: {_became_of(after[audited.key])}")
    say(
        f"{report['checked']} sessions with {report['records']} records in {report['location']}: "
        f"{report['problems'] or 'no'} problem{'s' if report['problems'] != 1 else ''}"
    )
    if report["repairable"] and not repair:
        say(f"`perdure check --repair` would repair {report['repairable']} sessions")


def _line(key: SessionKey, finding: CheckFinding) -> str:
    level = "PROBLEM" if finding.problem else "note"
    cure = f": {finding.cure}" if finding.cure else ""
    return f"{key}: {level}: {finding.what}: {finding.detail}{cure}"


def _became_of(repair: RepairAction) -> str:
    if repair.error is not None:
        return f"not repaired: {repair.error}"
    return f"repaired, {len(repair.left)} problems left" if repair.left else "repaired"


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
        store = existing(where.store)
        async with managed(store, write=True) as sessions:
            report = await sessions.rebuild_working_context(
                key.agent, session=key.session, tenant=key.tenant
            )
        answer["rebuilt"] = list(report.rebuilt)
    if where.json:
        print_json(answer)
    else:
        _print_rebuilt(key, answer, dry_run=dry_run)
    return 0


def _print_rebuilt(key: SessionKey, answer: dict[str, Any], *, dry_run: bool) -> None:
    for detail in answer["wrong"]:
        say(f"{key}: {detail}")
    if dry_run:
        say(f"{key}: {len(answer['wrong'])} of its documents would be rebuilt; nothing was changed")
    else:
        names = ", ".join(answer["rebuilt"])
        say(f"{key}: rebuilt {names} from {answer['records']} records")
