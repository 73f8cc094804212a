"""The content of each page, read without a lease: one value for the template and the JSON."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar, cast, final, get_args

import anyio
import msgspec

from perdure._lib.tasks import each
from perdure.checkpoints.engine import Difference
from perdure.checkpoints.verify import Verification
from perdure.errors import InvalidArgumentError, SessionNotFoundError
from perdure.inspector import conversation
from perdure.inspector.activity import (
    Heading,
    SessionStatus,
    TurnShown,
    headings,
    is_held,
    turns_in,
)
from perdure.inspector.query import Page, Query
from perdure.inspector.state import intervals, saving_here, status_here, stored_status
from perdure.inspector.stored import has_thread, records_of, thread_counts, turn_records
from perdure.inspector.threads import ThreadMessage, ThreadReader, ThreadView
from perdure.memory.state import States
from perdure.memory.working_memory import WorkingMemory
from perdure.providers.context_fit import Format
from perdure.records.keys import DEFAULT_SESSION, SessionKey, require_filters
from perdure.records.manifest import LeaseState
from perdure.records.media import decode_read
from perdure.records.records import MESSAGE_KINDS, Record
from perdure.session.contents import HistoryItem
from perdure.session.internals import (
    contents_of,
    described,
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
from perdure.store import DeadLetter, PendingItem, SessionInfo, all_records, record_at

T = TypeVar("T")

PAGE: Final = 50
"""Items of a conversation on a page."""
MOST: Final = 200
PATIENCE: Final = 0.15
"""Seconds that a page waits for a read that may take long."""
FRESH: Final = 30.0
"""Seconds in which what was read for a page that did not wait is shown to the next one."""
READS: Final = 16
"""The number of long reads whose results are kept."""
LISTED: Final = 100
"""Sessions on a page."""
BUDGET: Final = 0.15
"""Seconds that a search of the list may take before it answers with what it has."""
COMPLETIONS: Final = 10
HOLDERS: Final = 100
"""Sessions whose leases the page of workers looks at."""
FORMATS: Final = ("openai", "openai-responses", "anthropic", "gemini")


# What takes long: a whole log, or all sessions


class _LongRead:
    """One read that may take long, and what the one before has given."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.error: Exception | None = None
        self.running: anyio.Event | None = None
        self.unseen_since: float = -math.inf
        """The time at which a read ended that no page has shown."""


@final
class LongReads:
    """Reads that take long: a page does not wait for their end, and is asked for again.

    Args:
        sessions: The manager, whose tasks the reads belong to.

    """

    def __init__(self, sessions: SessionManager) -> None:
        self.sessions: SessionManager = sessions
        self._reads: dict[Hashable, _LongRead] = {}
        self._threads = ThreadReader()

    async def thread(self, view: SessionView) -> FoundThread:
        """Return a session's LangGraph thread, if it is one, and whether it is being read."""
        store, key = followed(store_of(view)), view.key
        if not await has_thread(view):
            return None, False
        what = ("thread", key, view.seq)
        return await self.result(what, partial(self._threads.read, store, key))

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


FoundThread = tuple[ThreadView | None, bool]
"""A thread, and whether it is being read."""


# The list of sessions


class SessionFilters(msgspec.Struct, frozen=True, kw_only=True):
    """The filters of a list of sessions."""

    tenant: str = ""
    prefix: str = ""
    owner: str = ""
    tag: str = ""
    order: Literal["", "id"] = ""
    """"id" for the order of ids; otherwise those come first that were used last."""
    q: str = ""
    """Text in an id, a title, an owner or a tag."""

    def fits(self, info: SessionInfo) -> bool:
        """Return whether a session has the text; the rest is the store's to look at."""
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
    """The time of that session's last use, in a list by last use."""
    statuses: list[SessionStatus | None] = []
    """By session: that of one that works, or cannot be saved, in this process. Any other's takes a
    look at its log, which a list does not take: ask ``/status``."""

    @property
    def owners(self) -> list[str]:
        """The owners on this page, for completion."""
        return sorted({info.owner for info in self.sessions if info.owner})

    @property
    def tags(self) -> list[str]:
        """The tags on this page, for completion."""
        return sorted({tag for info in self.sessions for tag in info.tags})


async def sessions_page(reads: LongReads, query: Query) -> SessionsPage:
    """Return a page of sessions; a search that takes long is continued by the next.

    Raises:
        InvalidArgumentError: A filter is no text that an id can have.

    """
    given: dict[str, Any] = {
        name: query.text(name).strip() for name in SessionFilters.__struct_fields__
    }
    given["order"] = query.choice("order", ("", "id"))
    filters = SessionFilters(**given)
    limit = max(1, min(query.number("limit") or LISTED, MOST))
    last: SessionInfo | None = None
    if after := query.text("after"):
        last = SessionInfo(
            key=SessionKey(after, query.text("after_session") or DEFAULT_SESSION, filters.tenant),
            updated_at=query.decimal("after_at"),
        )
    require_filters(tenant=filters.tenant, prefix=filters.prefix)
    sessions = reads.sessions
    store = store_below(sessions)
    page = SessionsPage(
        location=store.location, tenants=sorted({"", *await store.tenants()}), filters=filters
    )
    until = anyio.current_time() + BUDGET
    is_newest = filters.order != "id"
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
                page.statuses.append(status_here(sessions, info.key))
        else:
            if len(chunk) <= limit:
                return page
            is_full = anyio.current_time() > until
        if is_full and last is not None:
            page.next, page.next_at = last.key, last.updated_at if is_newest else None
            return page


async def revision(reads: LongReads, query: Query) -> str:
    """Return a text that changes when a session of a tenant is saved, opened or closed.

    With ``every``, it changes after so many seconds, too.
    """
    sessions = reads.sessions
    newest = await sessions.list(tenant=query.text("tenant"), limit=1, newest_first=True)
    opened = parts_of(sessions).lifecycle.sessions
    working = sum(status_here(sessions, key) is not None for key in list(opened))
    every = query.number("every")
    period = int(time.time() // every) if every else 0
    return repr(([(str(one.key), one.updated_at, one.head) for one in newest], working, period))


async def completions(reads: LongReads, query: Query) -> list[str]:
    """Return the first agents' ids that begin with a prefix."""
    tenant, prefix = query.text("tenant"), query.text("prefix")
    require_filters(tenant=tenant, prefix=prefix)
    found = await reads.sessions.list(tenant=tenant, prefix=prefix, limit=COMPLETIONS)
    return sorted({info.key.agent for info in found})


# One session


async def load(sessions: SessionManager, key: SessionKey) -> SessionView:
    """Return a view of a session.

    Raises:
        SessionNotFoundError: There is no such session.

    """
    view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
    if view is None:
        raise _not_there(sessions, key)
    return view


def _not_there(sessions: SessionManager, key: SessionKey) -> SessionNotFoundError:
    where = store_below(sessions).location
    return SessionNotFoundError(f"there is no session {key} in {where}", key=str(key))


async def facts_of(reads: LongReads, view: SessionView, found: FoundThread | None = None) -> Page:
    """Return the facts about a session, of whose thread *found* is known, if it was asked for."""
    store, sessions = followed(store_of(view)), reads.sessions
    thread, looking = found or await reads.thread(view)
    holder = await store.holder(view.key)
    facts = {
        "key": view.key,
        **described(view),
        # of a graph's thread; None for any other session
        "checkpoints": None,
        "status": status_here(sessions, view.key) or await stored_status(store, view.key, holder),
        # why records may be missing at an encrypted log's end; empty if none are
        "unproven": (await store.read_documents(view.key, ())).unproven_tail or "",
        "holder": holder,
        "is_open_here": session_open_here(sessions, view.key) is not None,
        # what is unsaved and the intervals in force; None if another process saves it
        "saving": saving_here(session_open_here(sessions, view.key)),
        "revision": "",
    }
    if looking and thread is None:  # its counts take a read of the whole log
        facts |= {"turns": None, "messages": None}
    elif thread is not None:
        facts |= thread_counts(thread)
    facts["revision"] = _revision(view.seq, facts["status"], holder, facts["saving"])
    return facts


def _revision(
    head: int, status: SessionStatus, holder: LeaseState | None, saving: dict[str, Any] | None
) -> str:
    """Return a text that changes when a session's pages do."""
    lease = (holder.epoch, holder.released, holder.alive) if holder is not None else ()
    unsaved = (saving["unsaved_records"], int(saving["unsaved_age"])) if saving else ()
    return repr((head, status.name, status.detail, lease, unsaved))


# Its conversation


View = Literal["compact", "timeline", "raw"]


async def conversation_page(reads: LongReads, query: Query) -> Page:
    """Return the newest items before a record."""
    view = cast("View", query.choice("view", get_args(View)))
    loaded = await load(reads.sessions, query.key())
    limit = max(1, min(query.number("limit") or PAGE, MOST))
    found = await reads.thread(loaded)
    page: Page = {
        "head": await facts_of(reads, loaded, found),
        "view": view,
        # of the compact view, what was not retracted; of the raw view, every record
        "items": [],
        "rows": [],
        # the parameter of the address that the next two are
        "by": "before",
        # before which record (of a thread: message) to continue; None at the beginning
        "older": None,
        # before which the next page ends; None at the end
        "newer": None,
        "limit": limit,
        # true while a thread is read for the first time
        "looking": False,
    }
    if view != "compact" or found == (None, False):
        return page | await _records_page(loaded, query, view, limit, page["head"])
    thread, looking = found
    if thread is None:
        return page | {"looking": looking}
    return page | await _thread_page(loaded, query, thread, limit, page["head"]["status"])


async def _thread_page(
    view: SessionView, query: Query, thread: ThreadView, limit: int, status: SessionStatus
) -> Page:
    """Return messages of a graph's thread, each with the turn that begins with it."""
    end, before = query.number("end"), query.number("before")
    messages = thread.messages
    if before is not None:
        end = sum(message.checkpoint < before for message in messages)
    end = len(messages) if end is None else min(end, len(messages))
    start = max(end - limit, 0)
    items = await thread_items(view, thread, messages[start:end])
    turns = thread.turns_as_of(status.name)
    turn: TurnShown | None = None
    for place, item in enumerate(items, start):
        item.place = place
        begun = next(one for one in reversed(turns) if one.first <= (item.checkpoint or one.first))
        if begun is not turn:
            item.turn = turn = begun
    return {
        "items": items,
        "by": "end",
        "older": start or None,
        "newer": min(end + limit, len(messages)) if end < len(messages) else None,
    }


async def thread_items(
    view: SessionView, thread: ThreadView, wanted: Sequence[ThreadMessage]
) -> list[conversation.ShownItem]:
    """Return messages of a thread with their content."""
    records = await records_of(view, {message.seq for message in wanted})
    return [
        conversation.thread_message(
            message, records[message.seq], in_state=message.name in thread.current
        )
        for message in wanted
        if message.seq in records
    ]


async def _records_page(
    loaded: SessionView, query: Query, view: View, limit: int, head: Page
) -> Page:
    """Return items of a session's history, or records of its log."""
    before = query.number("before")
    is_newest = before is None
    before = loaded.seq + 1 if before is None else max(1, min(before, loaded.seq + 1))
    context = frozenset(seq for seq, _ in working_context(loaded).by_seq())
    items: list[conversation.ShownItem] = []
    rows: list[conversation.LogRow] = []
    if view == "compact":
        history = await loaded.history(before=before, limit=limit)
        items = [conversation.shown_item(item, context) for item in history]
        until = None if is_newest or not items else items[-1].seq + 2
        await _with_turns(loaded, items, until, held=is_held(head["holder"]))
    if items:
        first = items[0].seq if len(items) == limit else 1
        last = items[-1].seq
    else:
        log = store_of(loaded).read_log(loaded.key, before=before, limit=limit, reverse=True)
        records = (await all_records(log))[:limit][::-1]
        if view == "compact":  # a transcript has entries, and no messages of its own
            steps = (conversation.shown_step(record, only_messages=True) for record in records)
            items = [step for step in steps if step is not None]
        elif view == "raw":
            items = [conversation.raw_record(record) for record in records]
        else:
            rows = conversation.timeline(records, registry_of(loaded), context)
        first = records[0].seq if records else 1
        last = before - 1
    return {
        "items": items,
        "rows": rows,
        "older": first if first > 1 else None,
        "newer": min(last + limit, loaded.seq) + 1 if before <= loaded.seq else None,
    }


async def _with_turns(
    view: SessionView, items: Sequence[conversation.ShownItem], until: int | None, *, held: bool
) -> None:
    """Note with items which turn begins with them."""
    if not items:
        return
    turns = await turn_records(store_of(view), view.key, after=items[0].seq - 2, before=until)
    begun = headings(
        [Heading(item.seq, item.role, item.at, item.tokens) for item in items],
        turns_in(turns, held=held),
    )
    for item in items:
        item.turn = begun.get(item.seq)


async def _record(view: SessionView, seq: int) -> Record:
    record = await record_at(store_of(view), view.key, seq)
    if record is None:
        raise InvalidArgumentError(f"session {view.key} has no record {seq}", seq=seq)
    return record


async def whole_part(reads: LongReads, query: Query) -> conversation.ShownPart:
    """Return one part of a record with all of its text.

    Raises:
        InvalidArgumentError: There is no such record, or part.

    """
    key, seq, number = query.key(), query.number("seq") or 0, query.number("part") or 0
    is_raw = query.choice("view", get_args(View)) == "raw"
    view = await load(reads.sessions, key)
    parts = conversation.whole_parts(await _record(view, seq), registry_of(view), raw=is_raw)
    if not 0 <= number < len(parts):
        raise InvalidArgumentError(f"record {seq} of session {key} has no part {number}")
    return msgspec.structs.replace(parts[number], size=len(parts[number].text))


async def image(reads: LongReads, query: Query) -> conversation.Blob:
    """Return an image that is in a record.

    Raises:
        InvalidArgumentError: There is none.

    """
    key, seq, number = query.key(), query.number("seq") or 0, query.number("part") or 0
    view = await load(reads.sessions, key)
    record = await _record(view, seq)
    found = None
    if record.kind in MESSAGE_KINDS:
        found = conversation.image_in(decode_read(record.payload, registry_of(view)), number)
    if found is None:
        raise InvalidArgumentError(f"record {seq} of session {key} has no image {number}")
    return found


# What the model sees next


async def context_page(reads: LongReads, query: Query) -> Page:
    """Return messages that the model sees next: those before a place, by default the newest.

    Raises:
        InvalidArgumentError: There is no such target.

    """
    target, end = query.choice("target", ("", *FORMATS)), query.number("end")
    view = await load(reads.sessions, query.key())
    found = await reads.thread(view)
    page: Page = {
        "head": await facts_of(reads, view, found),
        "items": [],
        # bytes of the messages' JSON, and bytes that it may have; None of a thread
        "size": None,
        "limit": None,
        # true if older messages were left out
        "is_cut": False,
        # messages of it that are records of the log; the others were made by a compaction
        "own_records": 0,
        # the oldest of these records
        "first": None,
        # messages that it has, of which ``items`` are some
        "messages": 0,
        # the place of the first of the items, counted from 0
        "start": 0,
        "target": target,
        # the context as a provider takes it: JSON
        "rendered": "",
        # true while a thread is read for the first time
        "looking": False,
    }
    thread, looking = found
    if thread is not None:
        current = [message for message in thread.messages if message.name in thread.current]
        end = len(current) if end is None else min(end, len(current))
        start = max(end - PAGE, 0)
        return page | {
            "items": await thread_items(view, thread, current[start:end]),
            "own_records": len(current),
            "messages": len(current),
            "start": start,
        }
    if looking:
        return page | {"looking": True}
    context = working_context(view)
    registry = registry_of(view)
    own = frozenset(seq for seq, _ in context.by_record())
    messages = context.by_seq()
    end = len(messages) if end is None else min(end, len(messages))
    start = max(end - PAGE, 0)
    return page | {
        "items": [
            conversation.shown_item(
                HistoryItem(seq, "message", decode_read(payload, registry)), own
            )
            for seq, payload in await contents_of(view).filled(messages[start:end])
        ],
        "size": context.size,
        "limit": context.limit,
        "is_cut": context.cut,
        "own_records": len(context.by_record()),
        "first": min(own, default=None),
        "messages": len(messages),
        "start": start,
        "rendered": value_text(view.context(cast("Any", target))) if target else "",
    }


# Memory and states


async def states_page(reads: LongReads, query: Query) -> Page:
    """Return a session's named states, and the entries of its memory without their values."""
    view = await load(reads.sessions, query.key())
    states = []
    for name in await view.state.keys():
        text = value_text(await view.state.get(name))
        states.append(
            {
                "key": name,
                "text": text[: conversation.LONGEST],
                # characters of the whole
                "size": len(text),
            }
        )
    return {
        "head": await facts_of(reads, view),
        "states": states,
        "memory": await view.memory.entries(),
    }


async def named_value(reads: LongReads, query: Query) -> Page:
    """Return one state, or one value of the memory, whole.

    Raises:
        InvalidArgumentError: There is none of that name.

    """
    kind, name = query.choice("kind", ("state", "memory")), query.text("name")
    view = await load(reads.sessions, query.key())
    values: States | WorkingMemory = view.state if kind == "state" else view.memory
    if name not in await values.keys():
        raise InvalidArgumentError(f"session {view.key} has no {kind} {name!r}")
    text = value_text(await values.get(name))
    return {
        "key": name,
        "text": text,
        # characters of the whole
        "size": len(text),
    }


def value_text(value: Any) -> str:
    """Return a value as JSON over several lines."""
    data = msgspec.json.encode(value, enc_hook=str)
    return msgspec.json.format(data, indent=2).decode()


# Checkpoints


async def checkpoints_page(reads: LongReads, query: Query) -> Page:
    """Return the checkpoints; with a pair, what changed from the first of it to the second.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.

    """
    a, b, key = query.number("a"), query.number("b"), query.key()
    pair = None if a is None or b is None else (a, b)
    verify = query.choice("verify", ("", "1")) == "1"
    view = await load(reads.sessions, key)

    async def read() -> tuple[Verification | None, Difference | None]:
        return (
            await view.checkpoints.verify() if verify else None,
            await view.checkpoints.diff(*pair) if pair else None,
        )

    what = ("checkpoints", key, view.seq, pair, verify)
    found, looking = await reads.result(what, read) if verify or pair else (None, False)
    verified, difference = found or (None, None)
    thread, is_read = await reads.thread(view)
    steps = [] if thread is None else thread.checkpoints
    end = query.number("end")
    end = len(steps) if end is None else min(end, len(steps))
    start = max(end - LISTED, 0)
    return {
        "head": await facts_of(reads, view, (thread, is_read)),
        "checkpoints": await view.checkpoints.states(),
        # of a LangGraph thread, the newest first
        "steps": steps[start:end][::-1],
        # before which place to continue; None at the end, which is the beginning of the thread
        "older": start or None,
        "verified": verified,
        "a": pair[0] if pair else None,
        "b": pair[1] if pair else None,
        # from the state at checkpoint a to the one at b
        "difference": difference,
        # true while the log is being read for the two, or for a thread
        "looking": looking or is_read,
    }


# How it would come back


async def restore_page(reads: LongReads, query: Query) -> Page:
    """Return a session's restore plan, and the report of the restore that this page is.

    Raises:
        InvalidArgumentError: There is no such target.

    """
    target, key, sessions = query.choice("target", ("", *FORMATS)), query.key(), reads.sessions
    view = await load(sessions, key)
    plan = await sessions.plan_restore(
        key.agent,
        session=key.session,
        tenant=key.tenant,
        target=cast("Format | None", target or None),
    )
    return {
        "head": await facts_of(reads, view),
        "plan": msgspec.structs.replace(plan, messages=()),  # the page of the context has them
        "report": view.restore_report,
        # the plan in words
        "lines": plan.lines(),
    }


# Who holds it, and what waits for it


async def delivery_page(reads: LongReads, query: Query) -> Page:
    """Return who holds a session, and what waits for it, also before it was ever opened.

    Raises:
        SessionNotFoundError: There is no such session, and nothing waits for one.

    """
    key, sessions = query.key(), reads.sessions
    store = store_below(sessions)
    view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
    head = None if view is None else await facts_of(reads, view)
    epoch = 0 if head is None or head["holder"] is None else head["holder"].epoch
    waiting = await store.receive(key, epoch, limit=MOST)
    dead = await store.dead_letters(key)
    if head is None and not (waiting or dead):
        raise _not_there(sessions, key)
    return {
        "key": key,
        # None: there is no session yet
        "head": head,
        "waiting": [_waiting(item) for item in waiting],
        "dead": [_waiting(letter.item, letter) for letter in dead],
    }


def _waiting(item: PendingItem, letter: DeadLetter | None = None) -> Page:
    """Return a posted item that waits for a session, or is set aside as a dead letter."""
    return {
        "post": item.key,
        "kind": item.kind,
        "size": len(item.payload),
        "text": item.payload[: conversation.LONGEST].decode(errors="backslashreplace"),
        "posted_at": item.posted_at,
        "damage": item.damage,
        # of a dead letter: why, after how many tries, and when it became one
        "reason": "" if letter is None else letter.reason,
        "tries": 0 if letter is None else letter.tries,
        "at": None if letter is None else letter.at,
    }


async def inbox_page(reads: LongReads, _: Query) -> Page:
    """Return the sessions for which a post waits, or that have dead letters, of all tenants.

    It looks at all sessions; while that takes long, the page has what was seen before.
    """
    store = store_below(reads.sessions)

    async def look() -> Page:
        return {
            "location": store.location,
            "waiting": await store.sessions_with_pending_items(),
            "dead": await store.sessions_with_pending_items(dead_letters=True),
            "at": time.time(),
        }

    seen, looking = await reads.result("inbox", look)
    # None: the store was not read yet
    nothing = {"location": store.location, "waiting": (), "dead": (), "at": None}
    return {**(seen or nothing), "looking": looking}


async def status_page(reads: LongReads, query: Query) -> Page:
    """Return the status of a session, and a text that changes when its pages do.

    It is cheap: the lease, and the log's end.
    """
    sessions, key = reads.sessions, query.key()
    store = store_below(sessions)
    holder, head = await store.holder(key), await store.head(key)
    if not head:
        raise _not_there(sessions, key)
    status = status_here(sessions, key) or await stored_status(store, key, holder)
    saving = saving_here(session_open_here(sessions, key))
    return {
        "key": key,
        "status": status,
        "saving": saving,
        "revision": _revision(head, status, holder, saving),
    }


# The processes that hold sessions


async def workers_page(reads: LongReads, query: Query) -> Page:
    """Return the processes that hold the sessions that were saved last, and this one's autosave."""
    sessions, tenant = reads.sessions, query.text("tenant")
    require_filters(tenant=tenant)

    async def look() -> list[Page]:
        return await _workers(sessions, tenant)

    workers, looking = await reads.result(("workers", tenant), look)
    health, autosave = sessions.health(), sessions.autosave
    return {
        "location": store_below(sessions).location,
        "tenant": tenant,
        "pid": os.getpid(),
        # of this process: its state of saving, and the intervals in force, in seconds
        "health": health,
        "intervals": intervals(autosave.in_force),
        # the newest sessions whose lease was looked at, at most
        "looked_at": HOLDERS,
        "workers": workers or [],
        # true while the leases are being read
        "looking": looking,
    }


async def _workers(sessions: SessionManager, tenant: str) -> list[Page]:
    store = store_below(sessions)
    newest = await sessions.list(tenant=tenant, limit=HOLDERS, newest_first=True)
    holders: dict[SessionKey, LeaseState | None] = {}

    async def look(info: SessionInfo) -> None:
        holders[info.key] = await store.holder(info.key)

    await each(newest, look)
    workers: dict[str, Page] = {}
    for info in newest:
        lease = holders[info.key]
        if lease is None or lease.released:
            continue
        worker = workers.setdefault(
            lease.owner,
            {
                "owner": lease.owner,
                "host": lease.host,
                "pid": lease.pid,
                # true, false or, where the store cannot tell, None
                "alive": lease.alive,
                # true if it is this process: it has one of the sessions open
                "is_here": False,
                # when one of its sessions was saved last, in seconds since 1970
                "saved_at": info.updated_at,
                "sessions": [],
            },
        )
        opened = session_open_here(sessions, info.key)
        worker["is_here"] = worker["is_here"] or opened is not None
        worker["sessions"].append(
            {
                "key": info.key,
                "epoch": lease.epoch,
                "status": status_here(sessions, info.key),
                "saving": saving_here(opened),
            }
        )
    return list(workers.values())
