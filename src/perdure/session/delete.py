"""Choosing, renaming and deleting sessions, and forgetting everything that is stored about them.

Sessions are chosen by agent, owner or tag, as of their newest record and not of their fold.

Forgetting also removes blobs that nothing else refers to, spill files, and what a backend keeps of
removed data. A rename is a copy, then the deletion of the old session.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.to_thread
import msgspec

from perdure.errors import (
    FormatError,
    LeaseLostError,
    PerdureError,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
    StoreUnavailableError,
)
from perdure.lineage import require_not_read_by, require_unread
from perdure.memory.index import value_names
from perdure.records.chunks import is_hash, named_in
from perdure.records.keys import DEFAULT_SESSION, SessionKey
from perdure.records.manifest import About, Origin
from perdure.records.records import ENDING, FORK, HOLDER_KINDS, Entry
from perdure.restore.ladder import restore
from perdure.session import spill as spilling
from perdure.session.copied import OWN_KINDS
from perdure.session.copier import PAUSE, TRIES, exists, has_own, remove_drafts
from perdure.session.fork import Fork, made_of, newest
from perdure.session.lifecycle import (
    MAX_WAITING,
    ExclusiveAccess,
    HandoverTerms,
    HeldSession,
    require_different,
)
from perdure.session.stored import SessionStore
from perdure.store import (
    DeadLetter,
    Documents,
    Draft,
    SessionInfo,
    SessionQuery,
    Store,
    blobs_are_apart,
    first_record,
    listed_blobs,
)

if TYPE_CHECKING:
    from perdure.session.base import SessionBase


_PAGE = 500


class SessionFilter(msgspec.Struct, frozen=True):
    """Filter of sessions; None for any."""

    id: str | None
    session: str | None
    tenant: str
    owner: str | None
    tag: str | None

    def fits(self, owner: str | None, tags: tuple[str, ...]) -> bool:
        """Say whether a session with this owner and these tags is meant."""
        return self.owner in (None, owner) and (self.tag is None or self.tag in tags)


async def chosen(
    store: SessionStore, wanted: SessionFilter, open_sessions: Mapping[SessionKey, SessionBase]
) -> list[SessionKey]:
    """Return the sessions that are meant.

    A listing reports the last fold; where the log is longer by now, it is read, and a session
    that is open *here* knows what is not durable yet.

    Raises:
        CorruptRecordError: The session that is named is damaged so that no listing has it.

    """
    async with aclosing(tenant_sessions(store, wanted.tenant, wanted.id or "")) as listed:
        found = [
            info.key
            async for info in listed
            if wanted.id in (None, info.key.agent)
            and wanted.session in (None, info.key.session)
            and await _fits(store, info, wanted, open_sessions)
        ]
    if wanted.id is not None and wanted.owner is None and wanted.tag is None:
        key = SessionKey(wanted.id, wanted.session or DEFAULT_SESSION, wanted.tenant)
        if key not in found:
            await store.head(key)  # raises if damage hides it from the listing
    return found


async def only_posted_to(store: SessionStore, wanted: SessionFilter) -> list[SessionKey]:
    """Return the sessions of an id that were never opened but have pending items."""
    if wanted.id is None or wanted.owner is not None or wanted.tag is not None:
        return []
    found: list[SessionKey] = []
    for key in await store.sessions_with_pending_items():
        if (key.tenant, key.agent) != (wanted.tenant, wanted.id):
            continue
        # One that is damaged is not, and is listed.
        with suppress(FormatError):
            if wanted.session in (None, key.session) and await store.head(key) == 0:
                found.append(key)
    return found


async def _fits(
    store: SessionStore,
    info: SessionInfo,
    wanted: SessionFilter,
    open_sessions: Mapping[SessionKey, SessionBase],
) -> bool:
    """Say whether a session has the owner and the tag that are meant, as of its newest record."""
    if wanted.owner is None and wanted.tag is None:
        return True
    session = open_sessions.get(info.key)
    if session is not None:
        metadata = session.info.metadata
        return wanted.fits(metadata.owner, tuple(metadata.tags))
    try:
        restored = await restore(store, info.key, context_bytes=0, with_context=False)
    except FormatError:  # damaged: what its last fold says is all that there is
        return wanted.fits(info.owner, info.tags)
    about = restored.info.about
    if about.owner is None and not about.tags:  # its holder may have died before the first save
        about = About(owner=info.owner, tags=info.tags)
    return wanted.fits(about.owner, about.tags)


_DOES, _MAY = "reaches it too", "cannot be read, and may reach it"
_DRAFT = "is just being made of another one, and may reach it"
_ANEW = "it was put or renewed meanwhile"
_UNKNOWN = "it was damaged, and may have named more: `perdure check --gc` removes unreached ones"


class RetainedItem(msgspec.Struct, frozen=True):
    """Something that was not removed, and why."""

    what: str
    """A ``blob``, or ``blobs`` that a damaged session may have named."""
    why: str
    of: SessionKey
    """The session that it belonged to."""
    by: SessionKey | None = None
    """The session that refers to it now."""


class ForgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a forget, or of its dry run."""

    sessions: tuple[SessionKey, ...] = ()
    records: int = 0
    documents: int = 0
    blobs: int = 0
    spill_files: int = 0
    bytes: int = 0
    """Of the records' and documents' values, the blobs and the spill files."""
    kept: tuple[RetainedItem, ...] = ()
    """Blobs that others reach, or may reach. `perdure check --gc` removes unreached ones."""
    carriers: tuple[SessionKey, ...] = ()
    """Copies of the forgotten sessions, and copies of those: they still have the content.
    A session that is too damaged to say what it is a copy of is not among them."""
    places: tuple[str, ...] = ()
    """Places that were searched: the store, and the folder of spill files."""
    dry_run: bool = False
    """Nothing was removed."""


_Retained: TypeAlias = dict[str, tuple[SessionKey | None, str]]
"""Names of blobs that stay, with who reaches each, and how."""


class _Sum:
    """Contents of one session in numbers, and the blobs that it may name."""

    def __init__(self) -> None:
        self.records = self.documents = self.bytes = 0
        self.names: set[str] = set()
        self.is_damaged = False
        """True if it may name more."""


async def delete(
    access: ExclusiveAccess, key: SessionKey, terms: HandoverTerms, *, unchanged: int | None = None
) -> bool:
    """Remove a session; False if there is none.

    If ``unchanged`` is given, only if the session is open here, and that is its version.

    Raises:
        LeaseHeldError: Another process keeps holding it.

    """
    with suppress(FormatError):  # damaged: it is there
        if await access.store.inner.head(key) == 0:
            return False
    async with access.exclusive(key), AsyncExitStack() as stack:
        await _require_unread(access, key, frozenset())
        if unchanged is None:
            try:
                hold = await _hold(access, stack, key, terms)
            except FormatError:
                hold = await _hold(access, stack, key, terms, aside=True)
        else:
            session = access.open_here(key)
            if session is None or session.version != unchanged:
                return False
            # Nothing is awaited between this check and the session's end.
            hold = await stack.enter_async_context(access.left(session, "deleted"))
        await hold.delete()
        return True


async def _hold(
    access: ExclusiveAccess,
    stack: AsyncExitStack,
    key: SessionKey,
    terms: HandoverTerms,
    *,
    aside: bool = False,
) -> HeldSession:
    """Hold a session to delete it, open here or not; as `ExclusiveAccess.held` if it is damaged."""
    session = access.sessions.get(key)
    if session is None:  # new: what was only posted to is forgotten, too
        held = access.held(key, terms, new=True, goes=True, aside=aside)
        return await stack.enter_async_context(held)
    # What may yet be refused, by one that is held elsewhere, must not cost what is unsaved.
    with suppress(PerdureError), access.lifecycle.deadline().scope("saves"):
        await access.runtime.saver.save(session._tracked)
    return await stack.enter_async_context(access.left(session, "deleted"))


async def forget(
    access: ExclusiveAccess,
    keys: list[SessionKey],
    tenant: str,
    terms: HandoverTerms,
    *,
    dry_run: bool,
    look_for_carriers: bool = True,
    scrub: bool = True,
) -> ForgetReport:
    """Remove sessions of one tenant, and everything that only they reach.

    Args:
        access: Holds them.
        keys: The sessions.
        tenant: Whose they are.
        terms: How to take them from other processes.
        dry_run: Remove nothing.
        look_for_carriers: Whether to look for copies of what is removed.
        scrub: Whether the store then removes what it keeps of removed data.

    Raises:
        LeaseHeldError: Another process keeps holding one; then nothing was removed.
        LeaseLostError: Another process took one over meanwhile.

    """
    async with AsyncExitStack() as stack:
        # 1. Hold all of them, and end their logs: no copy is published from here on.
        holds, damaged = ([], {}) if dry_run else await _begin_ending(access, stack, keys, terms)
        carriers = await _carriers(access, keys, tenant) if look_for_carriers else ()
        sums = {key: damaged.get(key) or await _sum(access, key) for key in keys}
        if not dry_run:
            # 2. Remove drafts that are made of them.
            await remove_drafts(access.store.inner, tenant, access.runtime.watch, keys)
        # 3. Remove blobs that only they reach, then them: killed in between, they can be
        # forgotten again.
        named = await _named(access, tenant, sums)
        wait = None if dry_run else terms.wait
        retained = await _remove_blobs(access, tenant, keys, holds, named, wait) if named else {}
        for hold in holds:
            await hold.delete()
        # 4. Remove spill files, and what the backend keeps of removed data.
        spilled = await _spilled(access, keys, remove=not dry_run)
        if scrub and not dry_run:
            await access.store.scrub()
    runtime = access.runtime
    spill = runtime.spill_folder if runtime.shutdown.spill or spilled else None
    removed = [size for name, size in named.items() if name not in retained]
    unknown = [key for key, total in sums.items() if total.is_damaged]
    if not access.store.capabilities.blobs:
        unknown = []
    return ForgetReport(
        sessions=tuple(sorted(sums)),
        records=sum(total.records for total in sums.values()),
        documents=sum(total.documents for total in sums.values()),
        blobs=len(removed),
        spill_files=len(spilled),
        bytes=sum(total.bytes for total in sums.values()) + sum(removed) + sum(spilled),
        kept=tuple(
            RetainedItem(
                what="blob",
                why=f"{how if by is None else f'{by} {how}'}: {name}",
                of=next((key for key, total in sums.items() if name in total.names), min(sums)),
                by=by,
            )
            for name, (by, how) in retained.items()
        )
        + tuple(RetainedItem(what="blobs", why=_UNKNOWN, of=key) for key in unknown),
        carriers=carriers,
        places=(access.store.location, *((spill,) if spill else ())),
        dry_run=dry_run,
    )


async def _begin_ending(
    access: ExclusiveAccess, stack: AsyncExitStack, keys: list[SessionKey], terms: HandoverTerms
) -> tuple[list[HeldSession], dict[SessionKey, _Sum]]:
    """Hold sessions in the order in which they go; from then on, no copy is published.

    Also return what could be read of those that cannot be held as they are.
    """
    # Always in this order: two forgets would else wait for each other.
    for key in sorted(keys):
        await stack.enter_async_context(access.exclusive(key))
    for key in keys:
        await _require_unread(access, key, frozenset(keys))
    # Those that are open here last: if another one is refused, they stay open.
    open_here = access.sessions.keys() & set(keys)
    order = sorted(keys, key=lambda key: (key in open_here, key))
    holds, damaged = list[HeldSession](), dict[SessionKey, _Sum]()
    for key in order:
        try:
            holds.append(await _hold(access, stack, key, terms))
        except FormatError:
            damaged[key] = await _sum(access, key)
            damaged[key].is_damaged = True
    # Once all others are held: if one of those is refused, no damaged log was set aside.
    for key in damaged:
        holds.append(await _hold(access, stack, key, terms, aside=True))
    for hold in holds:
        await hold.append(Entry(ENDING, b"{}"))
    begins_at = dict.fromkeys(keys, 0)
    for key in keys:
        with suppress(FormatError):
            begins_at[key] = (await access.store.base_of(key) or Origin()).at
    # A fork of before 0.1.0 goes before what it reads, which ends earlier.
    return sorted(holds, key=lambda hold: (-begins_at[hold.key], hold.key)), damaged


async def _remove_blobs(
    access: ExclusiveAccess,
    tenant: str,
    keys: list[SessionKey],
    holds: list[HeldSession],
    named: Collection[str],
    wait: float | None,
) -> _Retained:
    """Remove blobs that no other session reaches, none without *wait*; return the others.

    They are set aside first. A session that begins to refer to one then puts or renews it,
    and so takes it back. Who has done that before is read, unless it is still a draft.

    Raises:
        LeaseLostError: Another process took a session over; then all of them stay.

    """
    sweep = partial(access.store.sweep, tenant, older_than=0.0, among=named)
    if wait is None:
        return await _reached_elsewhere(access, tenant, keys, named)
    await sweep(named)  # also those that an earlier sweep has set aside, and would remove now
    await sweep(())
    shared = {name for name in named if is_hash(name)}  # others are one session's own
    draft = await _draft_left(access, tenant, wait) if shared else None
    reached = await _reached_elsewhere(access, tenant, keys, named)
    if draft is not None:
        reached = {**dict.fromkeys(shared, (draft, _DRAFT)), **reached}
    try:
        for hold in holds:  # a sweep is not refused to who has lost them, an append is
            await hold.append(Entry(ENDING, b"{}"))
    except LeaseLostError:
        await sweep(named)
        raise
    await sweep(reached)
    # What is still there was put or renewed after it was set aside.
    left = set(await access.store.blob_names(tenant)).intersection(named)
    return {**dict.fromkeys(left, (None, _ANEW)), **reached}


async def _draft_left(access: ExclusiveAccess, tenant: str, wait: float) -> SessionKey | None:
    """Wait until the copies that are being made are over; return one that is not."""
    drafts = {(found.key, found.epoch) for found in await access.store.drafts(tenant)}
    with anyio.move_on_after(wait):
        while drafts:
            await anyio.sleep(PAUSE)
            now = await access.store.drafts(tenant)
            drafts &= {(found.key, found.epoch) for found in now}
    return min(drafts)[0] if drafts else None


async def _carriers(
    access: ExclusiveAccess, keys: list[SessionKey], tenant: str
) -> tuple[SessionKey, ...]:
    """Return the sessions whose leases say that they are copies of these, or of such ones."""
    made: dict[SessionKey, Draft] = {}
    async with aclosing(tenant_sessions(access.store, tenant)) as listed:
        async for info in listed:
            with suppress(FormatError):  # a damaged one: nobody can say
                holder = await access.store.holder(info.key)
                if holder is not None and holder.draft is not None:
                    made[info.key] = holder.draft
    before = {made[key].source for key in keys if key in made and made[key].purpose == "rename"}
    found = before.union(keys)
    while new := {key for key, draft in made.items() if draft.source in found} - found:
        found |= new
    return tuple(sorted((found & made.keys()).difference(keys)))


async def _require_unread(
    access: ExclusiveAccess, key: SessionKey, besides: frozenset[SessionKey]
) -> None:
    store = access.store
    with suppress(FormatError):
        await require_unread(store, store.inner, key, besides)
        return
    # Damaged, and its notes of forks may be lost: each session is asked what it reads.
    async with aclosing(tenant_sessions(store, key.tenant)) as listed:
        async for info in listed:
            if info.key != key and info.key not in besides:
                with suppress(FormatError):
                    await require_not_read_by(store, store.inner, key, info.key)


async def _sum(access: ExclusiveAccess, key: SessionKey, *, strict: bool = False) -> _Sum:
    """Count the records, documents and blob names of a session's own log."""
    total, store, documents = _Sum(), access.store.inner, Documents()
    try:
        async with aclosing(store.read_log(key)) as log:
            async for chunk in log:
                total.records += len(chunk.records)
                payloads = [record.payload for record in chunk.records]
                total.bytes += sum(map(len, payloads))
                total.names |= named_in(payloads)
                total.names |= value_names(chunk.records)  # a fold puts them again just now
    except FormatError:
        if strict:
            raise
        total.is_damaged = True  # it is removed all the same
    try:
        documents = await store.read_documents(key)
    except FormatError:
        if strict:
            raise
        total.is_damaged = True
    found = documents.found.values()
    total.documents = len(found)
    total.bytes += sum(len(document.data) for document in found)
    total.names |= named_in(document.data for document in found)
    return total


async def _named(
    access: ExclusiveAccess, tenant: str, sums: Mapping[SessionKey, _Sum]
) -> dict[str, int]:
    """Return the blobs that sessions reach, as the tenant's are listed, by size."""
    if not blobs_are_apart(access.store):  # one name is one blob
        names = set().union(*(total.names for total in sums.values()))
        return await _reach(access, tenant, names)
    there, named = set(await access.store.blob_names(tenant)), dict[str, int]()
    for key, total in sums.items():
        sizes = await _reach(access, key.blobs, total.names)
        listed = await listed_blobs(access.store, key, sizes)
        named |= {at: sizes[name] for at, name in listed.items() if at in there}
    return named


async def _reach(access: ExclusiveAccess, tenant: str, names: set[str]) -> dict[str, int]:
    """Return the blobs that are reached from these names, through others too, by size."""
    sizes: dict[str, int] = {}
    new = names
    while new:
        further: set[str] = set()
        for name in new:
            data: bytes | None = b""
            with suppress(FormatError):  # a damaged one is there, and names nothing
                data = await access.store.get_blob(tenant, name)
            if data is not None:
                sizes[name] = len(data)
                further |= named_in([data])
        new = further - sizes.keys()
    return sizes


async def _reached_elsewhere(
    access: ExclusiveAccess, tenant: str, keys: list[SessionKey], names: Collection[str]
) -> _Retained:
    """Return which of the blobs another session reaches, with one that does, and how."""
    shared: _Retained = {}
    names = {name for name in names if is_hash(name)}  # others are one session's own
    if not names:
        return shared
    async with aclosing(tenant_sessions(access.store, tenant)) as listed:
        async for info in listed:
            if info.key in keys:
                continue
            try:
                theirs = await _names(access, info.key)
            except FormatError:
                shared = {**dict.fromkeys(names, (info.key, _MAY)), **shared}
                continue
            reached = await _reach(access, info.key.blobs, theirs)
            shared.update(dict.fromkeys(reached.keys() & names, (info.key, _DOES)))
    return shared


async def _names(access: ExclusiveAccess, key: SessionKey) -> set[str]:
    """Return which blobs another session may name; it may be pruned or deleted meanwhile."""
    for left in reversed(range(TRIES)):
        try:
            return (await _sum(access, key, strict=True)).names
        except StoreUnavailableError:
            if not left:
                raise
        await anyio.sleep(PAUSE)
    raise AssertionError("unreachable")


async def _spilled(access: ExclusiveAccess, keys: list[SessionKey], *, remove: bool) -> list[int]:
    saver = access.runtime.saver
    for tracked in saver.lost if remove else ():
        if tracked.key in keys:
            saver.discard(tracked)
    folder = access.runtime.spill_folder
    if folder is None:
        return []
    sizes: list[int] = []
    for key in keys:
        sizes += await anyio.to_thread.run_sync(spilling.forget, folder, key, remove)
    return sizes


async def tenant_sessions(
    store: Store, tenant: str, prefix: str = ""
) -> AsyncGenerator[SessionInfo, None]:
    """Yield a tenant's sessions, as they are listed."""
    after: SessionKey | None = None
    while page := await store.sessions(
        SessionQuery(tenant=tenant, prefix=prefix, after=after, limit=_PAGE)
    ):
        for info in page:
            yield info
        after = page[-1].key


async def rename(
    access: ExclusiveAccess, old: SessionKey, new: SessionKey, terms: HandoverTerms
) -> Fork:
    """Give a session another name; what is unsaved of it here is saved, and it is closed.

    Raises:
        SessionError: The new name is taken.
        SessionNotFoundError: There is no session of the old name.
        LeaseHeldError: Another process keeps holding it.

    """
    require_different(old, new, "rename")
    session = access.sessions.get(old)
    if session is not None:  # not below: its turn may need the session
        await access.lifecycle.between_turns(session)
    async with AsyncExitStack() as stack:
        # Always in this order: renames there and back would else wait for each other.
        for key in sorted((old, new)):
            await stack.enter_async_context(access.exclusive(key))
        if new in access.sessions:
            raise exists(new)
        return await _rename(access, stack, old, new, terms)


async def _rename(
    access: ExclusiveAccess,
    stack: AsyncExitStack,
    old: SessionKey,
    new: SessionKey,
    terms: HandoverTerms,
) -> Fork:
    holder = await access.store.holder(new)
    made = None if holder is None or holder.deleted else holder.draft
    if made is not None and (made.source, made.purpose) != (old, "rename"):
        made = None  # by a rename, which may not have been finished
    # Case 1: the old one is gone. If an earlier rename has finished, its answer is given again.
    if await access.store.inner.head(old) == 0:
        if made is None:
            raise SessionNotFoundError(f"there is no session {old}", key=str(old))
        return Fork(new, old, made.up_to)
    if made is not None and not await access.store.has(old, made.up_to, made.generation):
        made = None  # of an earlier life of the old name
    if made is None and not await access.is_empty(new):
        raise exists(new)
    await require_unread(access.store, access.store.inner, old)
    hold = await _hold_old(access, stack, old, new, terms)
    # Case 2: a rename was killed after its copy was published, and the old one continued. It is
    # copied again, unless both did.
    if made is not None and await _has_said(access, old, made.up_to):
        if await has_own(access.store.inner, new, made):
            raise SessionError(
                f"{old} was renamed to {new}, and records came under both names: "
                "delete the one that you do not need",
                key=str(old),
                new=str(new),
            )
        async with access.held(new, HandoverTerms("raise", 0)) as copy:
            await copy.delete(keep_posts=True)
        made = None
    if made is not None:
        done = Fork(new, old, made.up_to)
    else:
        point = await newest(access, old, await access.store.head(old))
        done = await made_of(access, old, new, point, "rename")
    # Posts first: killed before the deletion, the next call moves them again, which changes
    # nothing.
    await _forward(access, hold, new)
    await hold.delete(keep_posts=True)  # what was posted since waits at the old name
    return done


async def _hold_old(
    access: ExclusiveAccess,
    stack: AsyncExitStack,
    old: SessionKey,
    new: SessionKey,
    terms: HandoverTerms,
) -> HeldSession:
    """Hold the old session from here until it is deleted: what comes later would be lost."""
    session = access.sessions.get(old)
    if session is None:
        return await stack.enter_async_context(access.held(old, terms, goes=True))
    message = (
        f"session {old} was closed to be renamed to {new}: open {new}, or {old} if that failed"
    )
    renamed = SessionClosedError(message, key=str(old), new=str(new))
    deadline = access.lifecycle.deadline()
    return await stack.enter_async_context(access.left(session, "rename", deadline, error=renamed))


async def _has_said(access: ExclusiveAccess, key: SessionKey, after: int) -> bool:
    log, quiet = access.store.read_log(key, after=after), OWN_KINDS | HOLDER_KINDS
    return await first_record(log, lambda record: record.kind not in quiet) is not None


async def _forward(access: ExclusiveAccess, old: HeldSession, new: SessionKey) -> None:
    """Have what was posted to the old name wait at the new one, once however often done."""
    waiting = await access.store.receive(old.key, old.epoch, limit=MAX_WAITING)
    mail = [item for item in waiting if item.kind != FORK and not item.damage]
    if mail:
        await access.store.enqueue(new, mail)
    letters, now = await access.store.dead_letters(old.key), time.time()
    letters += [DeadLetter(item, item.damage, 0, now) for item in waiting if item.damage]
    if letters:
        async with access.held(new, HandoverTerms("raise", 0), new=True) as hold:
            await access.store.ack(new, hold.epoch, dead=letters)
    # Last: a kill before this leaves posts at both names, not at none.
    if waiting:
        await access.store.ack(old.key, old.epoch, [item.op_id for item in waiting])
