"""What each page shows, read without a lease: the values that templates and JSON have in common."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, Literal, TypeVar, cast, final

import anyio
import msgspec

from perdure.checkpoints.engine import Difference
from perdure.checkpoints.verify import Verification
from perdure.errors import InvalidArgumentError, SessionNotFoundError
from perdure.inspector import conversation
from perdure.memory.working_memory import MemoryInfo
from perdure.providers.context_fit import Format
from perdure.records.checkpoints import Checkpoint
from perdure.records.keys import SessionKey, require_filters
from perdure.records.media import decode_read
from perdure.records.records import MESSAGE_KINDS, Record
from perdure.restore.report import RestorePlan, RestoreReport
from perdure.session.contents import HistoryItem
from perdure.session.internals import (
    contents_of,
    parts_of,
    registry_of,
    session_open_here,
    store_below,
    store_of,
    working_context,
)
from perdure.session.manager import SessionManager
from perdure.session.session import SessionView
from perdure.session.stored import followed
from perdure.store import DeadLetter, LeaseState, PendingItem, SessionInfo, Store, first_record

T = TypeVar("T")

PAGE: Final = 50
"""Items of a conversation on a page."""
MOST: Final = 200
PATIENCE: Final = 0.15
"""Seconds that a page waits for a read that may take long."""
FRESH: Final = 30.0
"""Seconds in which what was read for a page that did not wait is shown to the next one."""
READS: Final = 16
"""How many of the long reads' results are kept."""
LISTED: Final = 100
"""Sessions on a page."""
BUDGET: Final = 0.15
"""Seconds that a search of the list may take before it answers with what it has."""
COMPLETIONS: Final = 10
FORMATS: Final = ("openai", "openai-responses", "anthropic", "gemini")


# What takes long: a whole log, or all sessions


class _LongRead:
    """One read that may take long, and what the one before has given."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.error: Exception | None = None
        self.running: anyio.Event | None = None
        self.unseen_since: float = -math.inf
        """When a read ended that no page has shown."""


@final
class LongReads:
    """Reads that take long: a page does not wait for their end, and is asked for again.

    Args:
        sessions: The manager, whose tasks the reads belong to.

    """

    def __init__(self, sessions: SessionManager) -> None:
        self.sessions: SessionManager = sessions
        self._reads: dict[Hashable, _LongRead] = {}

    async def result(
        self, what: Hashable, read: Callable[[], Awaitable[T]]
    ) -> tuple[T | None, bool]:
        """Return what a read gives, and False; after `PATIENCE` what was read before, and True.

        Args:
            what: What is read: the same is read once at a time.
            read: Reads it.

        """
        known = self._reads.setdefault(what, _LongRead())
        now = anyio.current_time()
        if known.running is None and now - known.unseen_since > FRESH:
            known.running = anyio.Event()
            spawn = parts_of(self.sessions).runtime.host.spawn
            spawn(self._read, known, known.running, read)
        if known.running is not None:
            with anyio.move_on_after(PATIENCE) as waited:
                await known.running.wait()
            if waited.cancelled_caught:
                return known.latest, True
        known.unseen_since = -math.inf
        if known.error is not None:
            raise known.error
        return known.latest, False

    async def _read(
        self, known: _LongRead, running: anyio.Event, read: Callable[[], Awaitable[Any]]
    ) -> None:
        known.error = None
        try:
            known.latest = await read()
        except Exception as error:  # noqa: BLE001  # raised to the next page
            known.error = error
        finally:
            known.running = None
            known.unseen_since = anyio.current_time()
            running.set()
            ended = [what for what, other in self._reads.items() if other.running is None]
            for what in ended[:-READS]:
                del self._reads[what]


# The list of sessions


class SessionFilters(msgspec.Struct, frozen=True, kw_only=True):
    """What a list of sessions is narrowed by."""

    tenant: str = ""
    prefix: str = ""
    owner: str = ""
    tag: str = ""
    order: Literal["", "id"] = ""
    """"id" for the order of ids; otherwise those come first that were used last."""
    q: str = ""
    """Text in an id, a title, an owner or a tag."""

    def fits(self, info: SessionInfo) -> bool:
        """Whether a session has the text; the rest is the store's to look at."""
        texts = (info.key.agent, info.key.session, info.title or "", info.owner or "", *info.tags)
        wanted = self.q.casefold()
        return not wanted or any(wanted in text.casefold() for text in texts)


class SessionsPage(msgspec.Struct, kw_only=True):
    """A list of sessions, or as much of it as was found in time."""

    location: str
    tenants: list[str]
    filters: SessionFilters
    sessions: list[SessionInfo] = []
    searched: int = 0
    """Sessions that were looked at."""
    next: SessionKey | None = None
    """After which session to continue; None at the end."""
    next_at: float | None = None
    """When that one was used, in a list by last use."""

    @property
    def owners(self) -> list[str]:
        """The owners on this page, for completion."""
        return sorted({info.owner for info in self.sessions if info.owner})

    @property
    def tags(self) -> list[str]:
        """The tags on this page, for completion."""
        return sorted({tag for info in self.sessions for tag in info.tags})


async def sessions_page(
    sessions: SessionManager,
    filters: SessionFilters,
    after: SessionInfo | None,
    limit: int = LISTED,
) -> SessionsPage:
    """Return a page of sessions; a search that takes long is continued by the next.

    Raises:
        InvalidArgumentError: A filter is no text that an id can have.

    """
    require_filters(tenant=filters.tenant, prefix=filters.prefix)
    store = store_below(sessions)
    page = SessionsPage(
        location=store.location, tenants=sorted({"", *await store.tenants()}), filters=filters
    )
    until = anyio.current_time() + BUDGET
    last, is_newest = after, filters.order != "id"
    while True:
        chunk = await sessions.list(
            tenant=filters.tenant,
            prefix=filters.prefix,
            owner=filters.owner or None,
            tag=filters.tag or None,
            after=last,
            limit=limit + 1,
            newest_first=is_newest,
        )
        for info in chunk:
            is_full = len(page.sessions) == limit
            if is_full:
                break
            page.searched += 1
            last = info
            if filters.fits(info):
                page.sessions.append(info)
        else:
            if len(chunk) <= limit:
                return page
            is_full = anyio.current_time() > until
        if is_full and last is not None:
            page.next, page.next_at = last.key, last.updated_at if is_newest else None
            return page


async def completions(sessions: SessionManager, tenant: str, prefix: str) -> list[str]:
    """Return the first agents' ids that begin with a prefix."""
    require_filters(tenant=tenant, prefix=prefix)
    found = await sessions.list(tenant=tenant, prefix=prefix, limit=COMPLETIONS)
    return sorted({info.key.agent for info in found})


# One session


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts at the head of every page of a session."""

    key: SessionKey
    title: str | None
    owner: str | None
    tags: list[str]
    created_at: str
    last_active_at: str
    turns: int
    messages: int
    records: int
    settled: bool
    """False when a takeover was under way, so that the newest records may be missing."""
    unproven: str
    """Why records may be missing at an encrypted log's end; empty if none are."""
    holder: LeaseState | None
    is_open_here: bool


async def load(sessions: SessionManager, key: SessionKey) -> SessionView:
    """Return a view of a session.

    Raises:
        SessionNotFoundError: There is no such session.

    """
    view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
    if view is None:
        raise SessionNotFoundError(
            f"there is no session {key} in {store_below(sessions).location}", key=str(key)
        )
    return view


async def facts_of(sessions: SessionManager, view: SessionView) -> SessionFacts:
    """Return the facts about a session."""
    info, store = view.info, followed(store_of(view))
    documents = await store.read_documents(view.key, ())
    return SessionFacts(
        key=view.key,
        title=info.metadata.title,
        owner=info.metadata.owner,
        tags=info.metadata.tags,
        created_at=info.created_at,
        last_active_at=info.last_active_at,
        turns=info.turns,
        messages=info.messages,
        records=view.seq,
        settled=view.settled,
        unproven=documents.unproven_tail or "",
        holder=await store.holder(view.key),
        is_open_here=session_open_here(sessions, view.key) is not None,
    )


# Its conversation


View = Literal["compact", "timeline", "raw"]


class ConversationPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a session's conversation, or of its log."""

    head: SessionFacts
    view: View
    items: Sequence[conversation.ShownItem] = ()
    """Of the compact view, what was not retracted; of the raw view, every record."""
    rows: Sequence[conversation.LogRow] = ()
    older: int | None = None
    """Before which record to continue; None at the beginning."""
    newer: int | None = None
    """Before which record the next page ends; None at the end."""
    limit: int = PAGE


async def conversation_page(
    sessions: SessionManager, key: SessionKey, view: View, before: int | None, limit: int
) -> ConversationPage:
    """Return the newest items before a record."""
    loaded = await load(sessions, key)
    limit = max(1, min(limit, MOST))
    before = loaded.seq + 1 if before is None else max(1, min(before, loaded.seq + 1))
    context = frozenset(seq for seq, _ in working_context(loaded).by_seq())
    items: list[conversation.ShownItem] = []
    rows: list[conversation.LogRow] = []
    if view == "compact":
        items = [
            conversation.shown_item(item, context)
            for item in await loaded.history(before=before, limit=limit)
        ]
    if items:
        first = items[0].seq if len(items) == limit else 1
        last = items[-1].seq
    else:
        records = await _records(loaded, before, limit)
        if view == "compact":  # a graph's thread has steps, and no messages of its own
            steps = (conversation.shown_step(record, only_messages=True) for record in records)
            items = [step for step in steps if step is not None]
        elif view == "raw":
            items = [conversation.raw_record(record) for record in records]
        else:
            rows = conversation.timeline(records, registry_of(loaded), context)
        first = records[0].seq if records else 1
        last = before - 1
    return ConversationPage(
        head=await facts_of(sessions, loaded),
        view=view,
        items=items,
        rows=rows,
        older=first if first > 1 else None,
        # At most `limit` items are between the two, so that none is left out.
        newer=min(last + limit, loaded.seq) + 1 if before <= loaded.seq else None,
        limit=limit,
    )


async def _records(view: SessionView, before: int, limit: int) -> list[Record]:
    records: list[Record] = []
    log = store_of(view).read_log(view.key, before=before, limit=limit, reverse=True)
    async with contextlib.aclosing(log):
        async for chunk in log:
            records += chunk.records
    return records[:limit][::-1]


async def _record(view: SessionView, seq: int) -> Record:
    log = store_of(view).read_log(view.key, after=seq - 1, before=seq + 1)
    record = await first_record(log)
    if record is None:
        raise InvalidArgumentError(f"session {view.key} has no record {seq}", seq=seq)
    return record


async def whole_part(
    sessions: SessionManager, key: SessionKey, seq: int, number: int, *, raw: bool
) -> conversation.ShownPart:
    """Return one part of a record with all of its text.

    Raises:
        InvalidArgumentError: There is no such record, or part.

    """
    view = await load(sessions, key)
    parts = conversation.whole_parts(await _record(view, seq), registry_of(view), raw=raw)
    if not 0 <= number < len(parts):
        raise InvalidArgumentError(f"record {seq} of session {key} has no part {number}")
    return msgspec.structs.replace(parts[number], size=len(parts[number].text))


async def image(
    sessions: SessionManager, key: SessionKey, seq: int, number: int
) -> conversation.Blob:
    """Return an image that is in a record.

    Raises:
        InvalidArgumentError: There is none.

    """
    view = await load(sessions, key)
    record = await _record(view, seq)
    found = None
    if record.kind in MESSAGE_KINDS:
        found = conversation.image_in(decode_read(record.payload, registry_of(view)), number)
    if found is None:
        raise InvalidArgumentError(f"record {seq} of session {key} has no image {number}")
    return found


# What the model sees next


class ContextPage(msgspec.Struct, frozen=True, kw_only=True):
    """The working context, next to the whole log."""

    head: SessionFacts
    items: Sequence[conversation.ShownItem]
    size: int
    """Bytes of the messages' JSON."""
    limit: int
    """Bytes that it may have."""
    is_cut: bool
    """Whether older messages were left out."""
    own_records: int
    """Messages of it that are records of the log; the others were made by a compaction."""
    first: int | None
    """The oldest of these records."""
    messages: int
    """Messages that it has, of which ``items`` are some."""
    start: int
    """The place of the first of the items, counted from 0."""
    target: str = ""
    rendered: str = ""
    """The context as a provider takes it: JSON."""


async def context_page(
    sessions: SessionManager, key: SessionKey, target: str, end: int | None
) -> ContextPage:
    """Return messages that the model sees next: those before a place, by default the newest.

    Raises:
        InvalidArgumentError: There is no such target.

    """
    view = await load(sessions, key)
    context = working_context(view)
    registry = registry_of(view)
    own = frozenset(seq for seq, _ in context.by_record())
    messages = context.by_seq()
    end = len(messages) if end is None else min(end, len(messages))
    start = max(end - PAGE, 0)
    items = [
        conversation.shown_item(HistoryItem(seq, "message", decode_read(payload, registry)), own)
        for seq, payload in await contents_of(view).filled(messages[start:end])
    ]
    rendered = ""
    if target:
        shown = view.context(cast("Any", target))
        rendered = value_text(shown)
    return ContextPage(
        head=await facts_of(sessions, view),
        items=items,
        size=context.size,
        limit=context.limit,
        is_cut=context.cut,
        own_records=len(context.by_record()),
        first=min(own, default=None),
        messages=len(messages),
        start=start,
        target=target,
        rendered=rendered,
    )


# Memory and states


class ShownValue(msgspec.Struct, frozen=True, kw_only=True):
    """A named value as JSON, or its beginning."""

    key: str
    text: str
    size: int
    """Characters of the whole."""


class StatesPage(msgspec.Struct, frozen=True, kw_only=True):
    """What a session keeps besides its conversation."""

    head: SessionFacts
    states: Sequence[ShownValue]
    memory: Sequence[MemoryInfo]


async def states_page(sessions: SessionManager, key: SessionKey) -> StatesPage:
    """Return a session's named states, and the entries of its memory without their values."""
    view = await load(sessions, key)
    states = []
    for name in await view.state.keys():
        text = value_text(await view.state.get(name))
        states.append(ShownValue(key=name, text=text[: conversation.LONGEST], size=len(text)))
    return StatesPage(
        head=await facts_of(sessions, view), states=states, memory=await view.memory.entries()
    )


async def named_value(
    sessions: SessionManager, key: SessionKey, kind: Literal["state", "memory"], name: str
) -> ShownValue:
    """Return one state, or one value of the memory, whole.

    Raises:
        InvalidArgumentError: There is none of that name.

    """
    view = await load(sessions, key)
    keys = await (view.state if kind == "state" else view.memory).keys()
    if name not in keys:
        raise InvalidArgumentError(f"session {key} has no {kind} {name!r}")
    text = value_text(await (view.state if kind == "state" else view.memory).get(name))
    return ShownValue(key=name, text=text, size=len(text))


def value_text(value: Any) -> str:
    """Return a value as JSON over several lines."""
    data = msgspec.json.encode(value, enc_hook=str)
    return msgspec.json.format(data, indent=2).decode()


# Checkpoints


class CheckpointsPage(msgspec.Struct, frozen=True, kw_only=True):
    """A session's checkpoints, and the difference of two."""

    head: SessionFacts
    checkpoints: Sequence[Checkpoint]
    verified: Verification | None = None
    a: int | None = None
    b: int | None = None
    difference: Difference | None = None
    """From the state at checkpoint *a* to the one at *b*."""
    looking: bool = False
    """Whether the log is still being read for the two."""


async def checkpoints_page(
    reads: LongReads, key: SessionKey, pair: tuple[int, int] | None, *, verify: bool
) -> CheckpointsPage:
    """Return the checkpoints; with a pair, what changed from the first of it to the second.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.

    """
    view = await load(reads.sessions, key)

    async def read() -> tuple[Verification | None, Difference | None]:
        return (
            await view.checkpoints.verify() if verify else None,
            await view.checkpoints.diff(*pair) if pair else None,
        )

    what = ("checkpoints", key, view.seq, pair, verify)
    found, looking = await reads.result(what, read) if verify or pair else (None, False)
    verified, difference = found or (None, None)
    return CheckpointsPage(
        head=await facts_of(reads.sessions, view),
        checkpoints=await view.checkpoints.states(),
        verified=verified,
        a=pair[0] if pair else None,
        b=pair[1] if pair else None,
        difference=difference,
        looking=looking,
    )


# How it would come back


class RestorePage(msgspec.Struct, frozen=True, kw_only=True):
    """What opening a session would do, and what reading it just did."""

    head: SessionFacts
    plan: RestorePlan
    report: RestoreReport
    lines: Sequence[str]
    """The plan in words."""


async def restore_page(sessions: SessionManager, key: SessionKey, target: str) -> RestorePage:
    """Return a session's restore plan, and the report of the restore that this page is.

    Raises:
        InvalidArgumentError: There is no such target.

    """
    view = await load(sessions, key)
    plan = await sessions.plan_restore(
        key.agent,
        session=key.session,
        tenant=key.tenant,
        target=cast("Format | None", target or None),
    )
    slim = msgspec.structs.replace(plan, messages=())  # the page of the context has them
    return RestorePage(
        head=await facts_of(sessions, view),
        plan=slim,
        report=view.restore_report,
        lines=plan.lines(),
    )


# Who holds it, and what waits for it


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A posted item that waits for a session."""

    post: str
    kind: str
    size: int
    text: str
    posted_at: float
    damage: str = ""
    reason: str = ""
    """Of a dead letter: why it was not delivered."""
    tries: int = 0
    at: float | None = None
    """Of a dead letter: when it became one."""


class DeliveryPage(msgspec.Struct, frozen=True, kw_only=True):
    """A session's lease, its inbox and its dead letters."""

    head: SessionFacts
    waiting: Sequence[Waiting]
    dead: Sequence[Waiting]


async def delivery_page(sessions: SessionManager, key: SessionKey) -> DeliveryPage:
    """Return who holds a session, and what waits for it."""
    view = await load(sessions, key)
    head, store = await facts_of(sessions, view), store_below(sessions)
    epoch = 0 if head.holder is None else head.holder.epoch
    pending = await store.receive(key, epoch, limit=MOST)
    letters = await store.dead_letters(key)
    return DeliveryPage(
        head=head,
        waiting=[_waiting(item) for item in pending],
        dead=[_dead(letter) for letter in letters],
    )


def _waiting(item: PendingItem) -> Waiting:
    return Waiting(
        post=item.key,
        kind=item.kind,
        size=len(item.payload),
        text=item.payload[: conversation.LONGEST].decode(errors="backslashreplace"),
        posted_at=item.posted_at,
        damage=item.damage,
    )


def _dead(letter: DeadLetter) -> Waiting:
    shown = _waiting(letter.item)
    return msgspec.structs.replace(shown, reason=letter.reason, tries=letter.tries, at=letter.at)


class InboxPage(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions of a store for which something waits."""

    location: str
    waiting: Sequence[SessionKey] = ()
    dead: Sequence[SessionKey] = ()
    at: float | None = None
    """When the store was looked at; None: not yet."""
    looking: bool = False
    """Whether a newer look has not come to its end."""


async def inbox_page(sessions: SessionManager, reads: LongReads) -> InboxPage:
    """Return the sessions for which a post waits, or that have dead letters, of all tenants.

    It looks at all sessions; while that takes long, the page has what was seen before.
    """
    store: Store = store_below(sessions)

    async def look() -> InboxPage:
        dead = await store.sessions_with_pending_items(dead_letters=True)
        waiting = await store.sessions_with_pending_items()
        return InboxPage(location=store.location, waiting=waiting, dead=dead, at=time.time())

    seen, looking = await reads.result("inbox", look)
    return msgspec.structs.replace(seen or InboxPage(location=store.location), looking=looking)


async def position(sessions: SessionManager, key: SessionKey) -> int:
    """Return a session's last record."""
    return await store_below(sessions).head(key)
