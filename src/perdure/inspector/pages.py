"""The content of each page, read without a lease: one value for the template and the JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Final, Literal, TypeVar, cast, final, get_args

import anyio
import msgspec

from perdure.checkpoints.engine import Difference
from perdure.checkpoints.verify import Verification
from perdure.errors import InvalidArgumentError, SessionNotFoundError
from perdure.inspector import conversation
from perdure.inspector.query import Page, Query
from perdure.memory.state import States
from perdure.memory.working_memory import WorkingMemory
from perdure.providers.context_fit import Format
from perdure.records.keys import DEFAULT_SESSION, SessionKey, require_filters
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
        else:
            if len(chunk) <= limit:
                return page
            is_full = anyio.current_time() > until
        if is_full and last is not None:
            page.next, page.next_at = last.key, last.updated_at if is_newest else None
            return page


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
        raise SessionNotFoundError(
            f"there is no session {key} in {store_below(sessions).location}", key=str(key)
        )
    return view


async def facts_of(sessions: SessionManager, view: SessionView) -> Page:
    """Return the facts about a session."""
    store = followed(store_of(view))
    return {
        "key": view.key,
        **described(view),
        # why records may be missing at an encrypted log's end; empty if none are
        "unproven": (await store.read_documents(view.key, ())).unproven_tail or "",
        "holder": await store.holder(view.key),
        "is_open_here": session_open_here(sessions, view.key) is not None,
    }


# Its conversation


View = Literal["compact", "timeline", "raw"]


async def conversation_page(reads: LongReads, query: Query) -> Page:
    """Return the newest items before a record."""
    sessions, view = reads.sessions, cast("View", query.choice("view", get_args(View)))
    loaded = await load(sessions, query.key())
    limit = max(1, min(query.number("limit") or PAGE, MOST))
    before = query.number("before")
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
        log = store_of(loaded).read_log(loaded.key, before=before, limit=limit, reverse=True)
        records = (await all_records(log))[:limit][::-1]
        if view == "compact":  # a graph's thread has steps, and no messages of its own
            steps = (conversation.shown_step(record, only_messages=True) for record in records)
            items = [step for step in steps if step is not None]
        elif view == "raw":
            items = [conversation.raw_record(record) for record in records]
        else:
            rows = conversation.timeline(records, registry_of(loaded), context)
        first = records[0].seq if records else 1
        last = before - 1
    return {
        "head": await facts_of(sessions, loaded),
        "view": view,
        # of the compact view, what was not retracted; of the raw view, every record
        "items": items,
        "rows": rows,
        # before which record to continue; None at the beginning
        "older": first if first > 1 else None,
        # before which record the next page ends; None at the end
        "newer": min(last + limit, loaded.seq) + 1 if before <= loaded.seq else None,
        "limit": limit,
    }


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
    sessions = reads.sessions
    view = await load(sessions, query.key())
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
    return {
        "head": await facts_of(sessions, view),
        "items": items,
        # bytes of the messages' JSON
        "size": context.size,
        # bytes that it may have
        "limit": context.limit,
        # true if older messages were left out
        "is_cut": context.cut,
        # messages of it that are records of the log; the others were made by a compaction
        "own_records": len(context.by_record()),
        # the oldest of these records
        "first": min(own, default=None),
        # messages that it has, of which ``items`` are some
        "messages": len(messages),
        # the place of the first of the items, counted from 0
        "start": start,
        "target": target,
        # the context as a provider takes it: JSON
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
        "head": await facts_of(reads.sessions, view),
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
    return {
        "head": await facts_of(reads.sessions, view),
        "checkpoints": await view.checkpoints.states(),
        "verified": verified,
        "a": pair[0] if pair else None,
        "b": pair[1] if pair else None,
        # from the state at checkpoint a to the one at b
        "difference": difference,
        # true while the log is being read for the two
        "looking": looking,
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
        "head": await facts_of(sessions, view),
        "plan": msgspec.structs.replace(plan, messages=()),  # the page of the context has them
        "report": view.restore_report,
        # the plan in words
        "lines": plan.lines(),
    }


# Who holds it, and what waits for it


async def delivery_page(reads: LongReads, query: Query) -> Page:
    """Return who holds a session, and what waits for it."""
    key, store = query.key(), store_below(reads.sessions)
    view = await load(reads.sessions, key)
    head = await facts_of(reads.sessions, view)
    epoch = 0 if head["holder"] is None else head["holder"].epoch
    return {
        "head": head,
        "waiting": [_waiting(item) for item in await store.receive(key, epoch, limit=MOST)],
        "dead": [_waiting(letter.item, letter) for letter in await store.dead_letters(key)],
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


async def position(reads: LongReads, query: Query) -> int:
    """Return a session's last record."""
    return await store_below(reads.sessions).head(query.key())
