"""A session of the OpenAI Agents SDK in a store of perdure: `PerdureSession`.

Each item of the SDK is one message of the session, so that everything that perdure does with
a session works on it too. What a message does not give back to the letter is stored with it, as
the item's own JSON. Nothing is rewritten: taking items away appends a record that retracts them.

What one call adds or takes away is one group of the log: a crash leaves all of it or nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import dropwhile, groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast, final

import anyio
import msgspec

from perdure._lib.lazy import import_extra
from perdure.adapters.claims import Large, claimed
from perdure.adapters.envelopes import SdkEnvelope, read_envelope, with_envelope
from perdure.adapters.exact import refused_part
from perdure.adapters.items import (
    PAGE,
    AdapterManager,
    Recent,
    SessionAdapter,
    append_turn,
    deleted,
    named_key,
    newest_messages,
)
from perdure.adapters.thread_log import read_record
from perdure.adapters.versions import warn_untested
from perdure.errors import (
    FormatError,
    InvalidArgumentError,
    LeaseLostError,
    NotStorableError,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
    TooLargeError,
)
from perdure.providers import Issuer, render
from perdure.providers.openai_responses import FORMAT, items_of, parse_history
from perdure.providers.replies import PlainHistory
from perdure.records.keys import DEFAULT_SESSION
from perdure.records.media import holds_references
from perdure.records.messages import Message, decode_message, encode_message
from perdure.records.records import Entry
from perdure.records.values import is_plain
from perdure.session.internals import (
    LogPlace,
    has_content,
    let_go,
    place_of,
    refusal_of,
    release_unused,
    replace_tail,
    session_open_here,
    store_of,
    working_context,
)
from perdure.session.manager import SessionManager
from perdure.session.reach import CLAIM
from perdure.session.session import Session, SessionView
from perdure.store import all_records

if TYPE_CHECKING:
    from perdure.lease import OnHeld

SDK: Final = "openai-agents"
SHAPE: Final = 1
"""The version of what is stored here of an item."""
RUN_STATE: Final = "openai-agents/run_state"
"""The named state that keeps a run that waits for approval."""
TEXT_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a session's items that are kept in memory as JSON, to read them faster."""


class Envelope(SdkEnvelope, frozen=True):
    """Fields stored with a message that is an SDK's item."""

    item: str | msgspec.UnsetType = msgspec.UNSET
    """The item's JSON as text, where the message alone would not give it back."""


class _Unit(NamedTuple):
    """Items that one record has, or a run of records that are not the SDK's."""

    seq: int
    """The first record."""
    items: list[Any]


@final
class PerdureSession(SessionAdapter):
    """A session for ``Runner.run(agent, …, session=…)``, in any store of perdure.

    Reading takes no lease. The first write does, and the session is given back to other
    processes when it has been idle for some minutes, by `aclose`, or at the end of ``async with``.
    Another process that wants to write it meanwhile gets a LeaseHeldError that names the holder.
    It belongs to the event loop that the manager was opened in.

    Args:
        session_id: The id of the session in the store.
        sessions: Where it is kept: what ``perdure.connect(url)`` returns, once that is open. None
            for a manager of its own: see `from_url`.
        session: Which of the id's conversations.
        tenant: Whose it is, where customers share a store.
        owner: Who it belongs to: a label, which a session that has one keeps.
        title: A title for a session that has none.
        tags: Labels for listing.
        session_settings: The SDK's own: a `SessionSettings`, or a dict.
        durable: Whether a write returns once it is durable. If not, autosave saves it soon.
        on_held: What a write does if another process holds the session: ``"steal"`` waits for it to
            be released or to expire, ``"handover"`` asks for it, ``"raise"`` raises at once.
        wait: Seconds to wait for another process.

    Raises:
        InvalidArgumentError: An id is invalid, or ``sessions`` is no manager.
        MissingExtraError: The SDK is not installed.

    """

    session_id: str
    session_settings: Any

    def __init__(
        self,
        session_id: str,
        sessions: SessionManager | None,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        owner: str | None = None,
        title: str | None = None,
        tags: Sequence[str] = (),
        session_settings: Any = None,
        durable: bool = True,
        on_held: OnHeld = "steal",
        wait: float = 10.0,
    ) -> None:
        self._connection = AdapterManager(
            sessions,
            instead="PerdureSession.from_url(session_id, url)",
            tenant=tenant,
            owner=owner,
            tags=tags,
            on_held=on_held,
            wait=wait,
        )
        self._key = named_key(
            session_id, session, tenant, agent_is="session_id", session_is="session"
        )
        self.session_id = session_id
        self.session_settings = _settings(session_settings)
        self.durable: bool = durable
        self._title = title
        self._lock = anyio.Lock()
        self._is_entered = False
        self._pinned: Session | None = None
        self._current: Session | None = None
        """Items that were read or written last, if they were held here then."""
        self._seen: LogPlace | None = None
        """Where what was read last ended, if it was not held here."""
        self._before: LogPlace | None = None
        """The same of what was read or written before the newest read."""
        self._texts: Recent[bytes, bytes] = Recent(TEXT_BYTES)
        """Items as JSON, by the messages that they are, so that each is made an item once."""

    async def __aenter__(self) -> Self:
        self._connection.enter()
        self._is_entered = True
        return self

    async def acquire(self) -> None:
        """Take the lease now, and keep it until `aclose`: from before a run reads its history."""
        self._is_entered = True
        async with self._write():
            pass

    async def aclose(self) -> None:
        """Make everything durable, and give the session back to other processes.

        Unless another caller in this process uses it. What was opened by `from_url` is closed.
        """
        self._connection.leave_ended_loop()
        pinned, self._pinned, self._is_entered = self._pinned, None, False
        sessions = self._connection.opened
        if sessions is None:
            return
        if self._connection.is_last:
            await self._connection.aclose()
            return
        try:
            session = session_open_here(sessions, self._key)
            if session is not None and session.is_writable:
                await session.save()
            if pinned is not None:
                await let_go(pinned)
            elif session is not None:
                await release_unused(session)
        except SessionClosedError:  # the manager was closed: it has done all of this
            return
        finally:
            await self._connection.aclose()

    async def close(self) -> None:
        """Close it, as `aclose` does: sessions of the SDK's have this name."""
        await self.aclose()

    # What the SDK calls

    async def get_items(self, limit: int | None = None, *, wrapper: Any = None) -> list[Any]:
        """Return the items, oldest first.

        A limit gives the newest items that do not take a call from its output, or from the
        reasoning before it: usually so many, else some less; the newest such group in any case.

        Args:
            limit: How many at most; None for what ``session_settings`` says, or else all.
            wrapper: The run's context, which makes no difference here.

        """
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        source = None if limit == 0 else await self._peek()
        self._before = self._place or self._before
        self._current = source if isinstance(source, Session) else None
        self._seen = None if source is None else place_of(source)
        if source is None:
            return []
        # A negative one is none, as in the SDK's own session.
        return await _items(source, None if limit is None or limit < 0 else limit, self._texts)

    async def add_items(self, items: list[Any], *, wrapper: Any = None) -> None:
        """Add items at the end, all or none of them, and return once they are durable.

        If the first is a user's message, a turn of the session begins with it.

        Raises:
            NotStorableError: An item is not JSON; nothing was added.
            TooLargeError: An item is larger than a record, and the store keeps no blobs; nothing
                was added.
            LeaseHeldError: Another process writes the session.
            LeaseLostError: Another process has taken it over since it was read; it is named. Or
                it was deleted or renamed since, also if another one has its id by now.

        """
        entries = self._encoded(items)
        if not entries:
            return
        first = items[0]
        is_asked = isinstance(first, Mapping) and first.get("role") == "user"
        async with self._write() as session:
            append_turn(session, await claimed(session, entries), is_asked=is_asked)

    async def pop_item(self, *, wrapper: Any = None) -> Any | None:
        """Take the newest item away, and return it; None if there is none.

        Raises:
            LeaseHeldError: Another process writes the session.

        """
        if await self._peek() is None:
            return None
        async with self._write() as session, self._lock:
            while True:
                version = session.version
                units, _ = await _units_of(session, 1)
                if not units:
                    return None
                *others, item = units[-1].items
                entries = await claimed(session, self._encoded(others))
                # Not if another caller has changed the session while this one was reading.
                if await replace_tail(session, units[-1].seq - 1, *entries, version=version):
                    break
        return item

    async def clear_session(self, *, wrapper: Any = None) -> None:
        """Take all items away. The log still has them: ``sessions.forget`` erases a session.

        Raises:
            LeaseHeldError: Another process writes the session.

        """
        source = await self._peek()
        if source is None:
            return
        if working_context(source).size or (await newest_messages(source, 1))[0]:
            await self.replace_items([])

    # Beyond the SDK's protocol

    async def replace_items(self, items: list[Any], *, expected: list[Any] | None = None) -> bool:
        """Replace all items by others, at once: a crash leaves the old ones or the new ones.

        Raises as `add_items` does.

        Args:
            items: What the session has from now on.
            expected: What it must have until now, as `get_items` returned it: what was added
                since, while a summary was made, is not replaced. Equal items are the same, also if
                they were taken away and added again. None to replace whatever it has.

        Returns:
            Whether it was done.

        """
        return await self._replace(items, expected)

    async def _replace(
        self, items: list[Any], expected: list[Any] | None, *, of: LogPlace | None = None
    ) -> bool:
        entries = self._encoded(items)
        async with self._write(of) as session:
            stored = await claimed(session, entries)
            while True:
                version = session.version
                if expected is not None:
                    current = await _items(session, None, self._texts)
                    if list(map(_canonical, current)) != list(map(_canonical, expected)):
                        return False
                if await replace_tail(session, 0, *stored, version=version):
                    return True

    # What the SDK's compaction looks for

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[Any], bool] | None = None
    ) -> Any:
        """Return the newest items, and what replaces the last of them if they are the newest still.

        Args:
            limit: How many, at most.
            prune_prefix: Says of the oldest items that they go as well: those that have expired, of
                an ``EncryptedSession``.

        """
        source = await self._peek()
        units, is_all = ([], True) if source is None else await _replaceable(source, limit)
        items = [(unit.seq, at, item) for unit in units for at, item in enumerate(unit.items)]
        newest = items[-limit:]
        place = None if source is None else place_of(source)

        async def replace_suffix(start: int, output: list[Any]) -> bool:
            if start >= len(newest):
                return False
            seq, at, _ = newest[start]
            expected = [unit for unit in units if unit.seq >= seq]
            count = None if prune_prefix is not None else len(newest) - start
            async with self._write(place) as session:
                while True:
                    version = session.version
                    current, _ = await _replaceable(session, count)
                    if [unit for unit in current if unit.seq >= seq] != expected:
                        return False
                    after, kept = seq - 1, expected[0].items[:at]
                    if prune_prefix is not None:
                        older = [item for unit in current if unit.seq < seq for item in unit.items]
                        live = list(dropwhile(prune_prefix, older))
                        if len(live) < len(older):
                            after, kept = 0, [*live, *kept]
                    entries = await claimed(session, self._encoded([*kept, *output]))
                    if await replace_tail(session, after, *entries, version=version):
                        return True

        snapshot = _sdk("agents.memory.session")._CompactionSnapshot  # noqa: SLF001  # it is for sessions
        is_whole = is_all and len(newest) == len(items)
        return snapshot([item for _, _, item in newest], is_whole, replace_suffix)

    async def _atomic_replace_items(self, items: list[Any]) -> bool:
        """Replace all items, for a compaction that is asked for; else the SDK clears and adds.

        The SDK has just read the session, so it is compared with what was read before that.
        """
        return await self._replace(items, None, of=self._before)

    async def save_run_state(self, state: Any, **options: Any) -> None:
        """Keep a run that was interrupted for an approval, with the session and as durable.

        Args:
            state: The ``RunState`` of ``result.to_state()``.
            options: As for ``RunState.to_json``: ``context_serializer`` and others.

        """
        text = json.dumps(state.to_json(**options))
        async with self._write() as session:
            session.state.set(RUN_STATE, text)

    async def load_run_state(self, agent: Any, **options: Any) -> Any | None:
        """Return the run that was kept, to be resumed with this session; None if there is none.

        Takes the lease, so that one process at a time resumes it.

        Args:
            agent: The agent that it began with.
            options: As for ``RunState.from_json``: ``context_override`` and others.

        Raises:
            LeaseHeldError: Another process writes the session.

        """
        source = await self._peek()
        if source is None or await source.state.get(RUN_STATE) is None:
            return None
        async with self._write() as session:
            text = await session.state.get(RUN_STATE)
        if text is None:
            return None
        state_class = _sdk("agents.run_state").RunState
        return await state_class.from_json(agent, json.loads(text), **options)

    async def drop_run_state(self) -> None:
        """Drop the run that was kept, once it has been resumed to its end."""
        source = await self._peek()
        if source is not None and await source.state.get(RUN_STATE) is not None:
            async with self._write() as session:
                session.state.drop(RUN_STATE)

    # Inside

    async def _peek(self) -> Session | SessionView | None:
        return await self._connection.peek(self._key)

    @property
    def _place(self) -> LogPlace | None:
        """Where what was read or written last ended."""
        return self._seen if self._current is None else place_of(self._current)

    @asynccontextmanager
    async def _write(self, of: LogPlace | None = None) -> AsyncGenerator[Session, None]:
        """Hold the session for a change, which is durable at the end of the block.

        Args:
            of: A place that the change is of, beside what was read or written last.

        """
        await self._require_current()
        places = {place for place in (self._place, of) if place is not None}
        opening = self._connection.open(self._key, of=places)
        async with await opening as session:
            if not has_content(session):
                await self._require_no_thread(session)
            if self._is_entered and self._pinned is not session:
                # One pin more, for after this block.
                self._pinned = await self._connection.open(self._key)
            if self._title is not None and session.info.metadata.title is None:
                session.describe(title=self._title)
            self._current = session
            yield session
            if self.durable:
                await self._connection.save(session)

    async def _require_no_thread(self, session: Session) -> None:
        """Refuse a session whose newest records are a LangGraph thread's, which would drop items.

        Raises:
            SessionError: They are.

        """
        after = max(session.durable_version - PAGE, 0)
        stored = await all_records(store_of(session).read_log(session.key, after=after))
        records = [*session.unsaved(), *stored]
        if any(read_record(record) is not None for record in records):
            message = f"session {session.key} is a LangGraph thread: choose another id"
            raise SessionError(message, key=str(session.key))

    async def _require_current(self) -> None:
        """Refuse a write of a run that read the session before it was taken over or deleted.

        A process that asked for the session, and was given it, has not taken it over.
        """
        lost = None if self._current is None else refusal_of(self._current)
        if isinstance(lost, SessionNotFoundError):
            raise deleted(self._key) from lost
        is_overtaken = isinstance(lost, LeaseLostError) and "unsaved" in lost.facts
        if self._current is not None and isinstance(lost, LeaseLostError) and is_overtaken:
            await self._connection.refuse(self._current, lost, discard=self.durable)

    def _encoded(self, items: Sequence[Any]) -> tuple[Entry | Large, ...]:
        if isinstance(items, str | Mapping):
            message = f"items are a {type(items).__name__}: give a list of items, such as [item]"
            raise InvalidArgumentError(message, option="items")
        now = time.time()
        made = [_entry(item, f"items[{at}]", now) for at, item in enumerate(items)]
        for entry, text in made:
            if text is not None and isinstance(entry, Entry):
                self._texts.put(entry.payload, text, len(entry.payload) + len(text))
        return tuple([entry for entry, _ in made])


def _settings(given: Any) -> Any:
    """Return the SDK's settings of a session."""
    settings = _sdk("agents.memory.session_settings")
    warn_untested("openai-agents")
    if given is None:
        return settings.SessionSettings()
    return settings.coerce_session_settings(given)


def _sdk(module: str) -> Any:
    return import_extra(
        module, used_by="PerdureSession", name="the OpenAI Agents SDK", extra="openai-agents"
    )


# Items as messages


def _entry(item: Any, at: str, now: float) -> tuple[Entry | Large, bytes | None]:
    """Return an item as a record, and its JSON as `_text_of` has it.

    Raises:
        NotStorableError: It is not JSON.

    """
    text = None if is_plain(item) else _dumped(item, at)
    plain = item if text is None else json.loads(text)
    made = _as_message(plain, now) if text is None or is_plain(plain) else None
    if made is not None:
        return made
    text = _dumped(item, at) if text is None else text
    role = plain.get("role") if isinstance(plain, dict) else None
    shown = Message(role="user" if role == "user" else "assistant")
    envelope = Envelope(SDK, SHAPE, text)
    try:
        return encode_message(with_envelope(shown, envelope), now=now), None
    except TooLargeError as error:
        refusal = TooLargeError(f"{at}: {error}", path=at, size=len(text))
        refusal.__cause__ = error
        return Large(shown, envelope, "", now, refusal), None


def _dumped(item: Any, at: str) -> str:
    try:
        return json.dumps(item)
    except (TypeError, ValueError, RecursionError) as error:
        path, part = refused_part(item, _is_refused, at)
        message = f"{path} is not JSON ({error}): add items as the SDK makes them, dicts"
        raise NotStorableError(message, path=path, type=type(part).__name__) from error


def _is_refused(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return True
    return False


def _as_message(item: Any, now: float) -> tuple[Entry, bytes] | None:
    """Return a plain item as a message alone, None if that would not give it back to the letter."""
    if not isinstance(item, dict):
        return None
    try:
        (parsed,) = parse_history(PlainHistory([item], None), _ISSUER)
        message = with_envelope(parsed, _ENVELOPE)
        (back,) = items_of(message)
        text = msgspec.json.encode(back)  # refuses what it would not read back
        entry = encode_message(message, now=now)
    except (FormatError, NotStorableError, TooLargeError, ValueError, OverflowError, TypeError):
        return None
    is_same = back == item and _sorted(back) == _sorted(item)  # 1 is equal to True
    return (entry, text) if is_same else None


_ENVELOPE = Envelope(SDK, SHAPE)
_ISSUER = Issuer(FORMAT)
_sorted = msgspec.json.Encoder(order="deterministic").encode


def _canonical(item: Any) -> str:
    return json.dumps(item, sort_keys=True)


def _envelope(message: Message) -> Envelope | None:
    return read_envelope(message, Envelope, sdk=SDK, newest=SHAPE)


def _units(messages: Sequence[tuple[int, Message]]) -> Iterator[_Unit]:
    """Yield what messages are as items; those that are not the SDK's as a request has them."""
    marked = [(seq, message, _envelope(message)) for seq, message in messages]
    for is_own, run in groupby(marked, key=lambda each: each[2] is None):
        if is_own:
            plain = list(run)
            yield _Unit(plain[0][0], render([each[1] for each in plain], FORMAT).messages)
            continue
        for seq, message, envelope in run:
            if envelope is None or isinstance(envelope.item, msgspec.UnsetType):
                yield _Unit(seq, items_of(message))
            else:
                yield _Unit(seq, [json.loads(envelope.item)])


# Reading


async def _items(
    source: Session | SessionView, limit: int | None, texts: Recent[bytes, bytes]
) -> list[Any]:
    """Return the newest whole groups of items within a limit; all items if that is None."""
    if working_context(source).epoch_id:
        # perdure has compacted the session: the items are what its own model would see.
        items = source.context(FORMAT)
        return items if limit is None else items[_begin(items, limit, is_all=True) or 0 :]
    count = None if limit is None else limit + 1
    while True:
        at_hand = _items_at_hand(source, count, texts)
        if at_hand is None:
            messages, is_all = await newest_messages(source, count)
            items = [item for unit in _units(messages) for item in unit.items]
        else:
            items, is_all = at_hand
        if limit is None or count is None:
            return items
        begin = _begin(items, limit, is_all=is_all)
        if begin is not None:
            return items[begin:]
        count *= 2


def _items_at_hand(
    source: Session | SessionView, count: int | None, texts: Recent[bytes, bytes]
) -> tuple[list[Any], bool] | None:
    """Return the items of the newest messages, and whether there are no others.

    None if some of them are not in memory, or are not the SDK's. The items are the caller's own, so
    they are read anew each time, but from their own JSON: that costs a tenth of what it takes to
    make items of messages.
    """
    context = working_context(source)
    payloads = None if context.cut else context.since(0)
    if payloads is None:  # something was retracted, or replaced
        messages = context.whole()
        if messages is None:
            return None
        payloads = [payload for _, payload in messages]
    begin = 0 if count is None else max(len(payloads) - count, 0)
    payloads = payloads[begin:]
    newest = list(map(texts.get, payloads))
    for at in [at for at, text in enumerate(newest) if text is None]:
        text = _text_of(payloads[at])
        if text is None:
            return None
        texts.put(payloads[at], text, len(payloads[at]) + len(text))
        newest[at] = text
    return msgspec.json.decode(b"[%b]" % b",".join(cast("list[bytes]", newest))), not begin


def _text_of(payload: bytes) -> bytes | None:
    """Return the JSON of the SDK's item that a message is, None if msgspec reads it otherwise.

    None, too, where its media, or all of it, are in blobs.
    """
    if holds_references(payload) or CLAIM in payload:
        return None
    units = list(_units([(0, decode_message(payload))]))
    if _envelope(decode_message(payload)) is None or len(units[0].items) != 1:
        return None
    text = json.dumps(units[0].items[0]).encode()
    try:
        same = repr(msgspec.json.decode(text)) == repr(units[0].items[0])
    except msgspec.DecodeError:  # it has a NaN, or nests too deeply
        return None
    return text if same else None


async def _units_of(source: Session | SessionView, count: int | None) -> tuple[list[_Unit], bool]:
    """Return what so many of the newest messages are, or more, and whether there are no others.

    Each unit begins at another record, so that everything from it on can be replaced.
    """
    messages, is_all = await newest_messages(source, None if count is None else count + 1)
    if not is_all and (_envelope(messages[0][1]) is None or messages[0][0] == messages[1][0]):
        # The first may belong to messages before it: to a run, or to a record of a pruned log.
        messages, is_all = await newest_messages(source, None)
    units: list[_Unit] = []
    for unit in _units(messages):
        if units and units[-1].seq == unit.seq:  # of a pruned log: a record with several messages
            units[-1].items.extend(unit.items)
        elif unit.items:
            units.append(unit)
    return (units if is_all else units[1:]), is_all


async def _replaceable(
    source: Session | SessionView, count: int | None
) -> tuple[list[_Unit], bool]:
    """Return the newest items that a caller sees, as `_units_of` does."""
    if not working_context(source).epoch_id:
        return await _units_of(source, count)
    items = source.context(FORMAT)  # perdure has compacted the session: they are in one piece
    return ([_Unit(1, items)] if items else []), True


def _begin(items: Sequence[Any], limit: int, *, is_all: bool) -> int | None:
    """Return where the newest whole groups within a limit begin; None if more must be known."""
    size = len(items)
    inside = _inside_groups(items, is_all=is_all)
    if inside is None:
        return None
    wanted = max(size - limit, 0)
    fits = [at for at in range(wanted, size) if at not in inside]
    if not fits:  # the newest group alone is larger
        fits = [at for at in range(wanted) if at not in inside][-1:]
    if not is_all and fits[:1] in ([], [0]):
        return None
    return fits[0] if fits else 0


def _inside_groups(items: Sequence[Any], *, is_all: bool) -> set[int] | None:
    """Return the places that are between a call and its output, or behind reasoning.

    None if an output's call is older than these items, and there are older ones.
    """
    inside: set[int] = set()
    calls: dict[Any, int] = {}
    for at, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "reasoning":
            inside.add(at + 1)
        name = _call_name(item, str(kind))
        if name is None:
            continue
        if not str(kind).endswith(("_output", "_response")):
            calls[name] = at
        elif name in calls:
            inside.update(range(calls[name] + 1, at + 1))
        elif not is_all:
            return None
    return inside


def _call_name(item: Any, kind: str) -> str | None:
    """Return what a call and its output have in common."""
    if kind == "mcp_approval_request":
        name = item.get("id")
    elif kind == "mcp_approval_response":
        name = item.get("approval_request_id")
    else:
        name = item.get("call_id") if isinstance(item, dict) else None
    return name if isinstance(name, str) else None
