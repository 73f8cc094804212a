"""The events of a session, read from its log, and the text of an answer that is still coming.

What has a number is in the log, is durable, and is sent once: ``turn``, ``message``, ``end``,
``interrupted`` and ``retracted``. Their ids are the log's own, so a client that names the last one
that it has seen continues at the next, in any process, before a restart or after it. ``text``
shows an answer before it is stored, and the ``message`` that follows replaces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Final, Self, final

import anyio
import msgspec

from perdure.autosave.events import Saved
from perdure.memory.context import RetractionPayload
from perdure.memory.documents import MetadataPayload, TurnPayload
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.media import decode_read
from perdure.records.messages import CUT_OFF, Message
from perdure.records.records import MESSAGE_KINDS, META, RETRACT, TURN, Record
from perdure.session.events import Closed
from perdure.session.internals import durable_head, log_of, session_open_here
from perdure.session.manager import SessionManager
from perdure.session.session import Session
from perdure.store import first_record

KEEP_ALIVE: Final = 15.0
"""Seconds of silence after which a stream says that it is there."""
_PHASES: Final = {"begin": "turn", "end": "end", "interrupted": "interrupted"}


class Cursor(msgspec.Struct, frozen=True):
    """A place in a session's events, as clients name it: ``Last-Event-ID``."""

    seq: int
    """The log up to this record was received."""
    offset: int = 0
    """And so many characters of the answer that came after it."""

    def __str__(self) -> str:
        return f"{self.seq}.{self.offset}" if self.offset else str(self.seq)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the place that an id names; None for one that is not ours."""
        seq, _, offset = text.partition(".")
        numbers = (seq, offset or "0")
        if not all(number.isascii() and number.isdigit() for number in numbers) or len(text) > 40:
            return None
        return cls(int(seq), int(offset or "0"))


class FeedPlace(msgspec.Struct, frozen=True):
    """A place in the log of one session, which a later session of the same id does not have."""

    cursor: Cursor
    record: Record | None = None
    """The record there, or the first one after it; None before the log has begun."""
    head: int = 0
    """The end of the log."""


class FeedEvent(msgspec.Struct, frozen=True):
    """Something that happened in a session."""

    name: str
    id: Cursor | None
    data: dict[str, Any]


@final
class Channel:
    """One session's news, and the answer that is coming there."""

    def __init__(self) -> None:
        self.news: anyio.Event = anyio.Event()
        self.base: int = 0
        """The log was durable up to here when the answer began."""
        self.text: str = ""
        self.readers: int = 0

    def wake(self) -> None:
        """Have the readers look."""
        self.news.set()
        self.news = anyio.Event()

    def add(self, session: Session, text: str) -> None:
        """Take in a piece of the answer."""
        if not self.text:
            self.base = session.durable_version
        self.text += text
        self.wake()

    def after(self, cursor: Cursor, visible: int, read: int) -> FeedEvent | None:
        """Return what a reader does not have of the answer, if there is any.

        Args:
            cursor: What the reader has.
            visible: Its newest event of the log.
            read: Up to where it has read the log.

        """
        if not (self.text and visible <= self.base <= read):
            return None  # of an answer that it has as a message, or before events that it lacks
        sent = cursor.offset if cursor.seq == self.base else 0
        if len(self.text) <= sent:
            return None
        place = Cursor(self.base, len(self.text))
        return FeedEvent("text", place, {"text": self.text[sent:], "offset": sent})

    def clear(self) -> None:
        """The answer is in the log, or will not come."""
        self.text = ""
        self.wake()


@final
class Feed:
    """Events of the sessions of one manager.

    Args:
        sessions: The manager, connected.
        poll: Seconds between two looks at a session that another process writes.

    """

    def __init__(self, sessions: SessionManager, *, poll: float = 0.5) -> None:
        self._sessions = sessions
        self._poll = poll
        self._channels: dict[SessionKey, Channel] = {}
        self.draining: bool = False
        """True once streams end that wait for nothing in particular."""
        sessions.on("saved", self._wake)
        sessions.on("closed", self._wake)  # perhaps it is deleted
        sessions.on("lost", lambda _: self.wake_all())

    def drain(self) -> None:
        """End the streams that wait for nothing in particular."""
        self.draining = True
        self.wake_all()

    def wake_all(self) -> None:
        """Have all readers look."""
        for channel in tuple(self._channels.values()):
            channel.wake()

    def _wake(self, event: Saved | Closed) -> None:
        channel = self._channels.get(event.key)
        if channel is not None:
            channel.wake()

    @contextlib.contextmanager
    def channel(self, key: SessionKey) -> Iterator[Channel]:
        """Hold a session's channel as long as it is in use."""
        channel = self._channels.setdefault(key, Channel())
        channel.readers += 1
        try:
            yield channel
        finally:
            channel.readers -= 1
            if not channel.readers:
                self._channels.pop(key, None)

    async def head(self, key: SessionKey) -> int:
        """Return up to where a session's log is durable."""
        return await durable_head(self._sessions, key)

    async def begin_of(self, key: SessionKey, turn: str) -> int | None:
        """Return the seq of the record that began a turn, the newest of its id; None for none."""
        began = await self._begin(key, await self.head(key), turn)
        return None if began is None else began.seq

    async def turn_at(self, key: SessionKey, cursor: Cursor) -> str | None:
        """Return the id of the turn that had begun last at a place; None for none."""
        began = await self._begin(key, min(cursor.seq, await self.head(key)))
        return None if began is None else decode(began.payload, TurnPayload).turn

    async def _begin(self, key: SessionKey, upto: int, turn: str | None = None) -> Record | None:
        def began(record: Record) -> bool:
            event = event_of(record) if record.kind == TURN else None
            return event is not None and event.name == "turn" and turn in {None, event.data["turn"]}

        log = log_of(self._sessions, key, after=0, before=upto + 1, reverse=True)
        return await first_record(log, began)

    async def place(self, key: SessionKey, cursor: Cursor | None = None) -> FeedPlace:
        """Return where a client is in the session that is there now; None for a cursor: its end."""
        head = await self.head(key)
        if cursor is None or cursor.seq > head:  # a log that is not as long as it was
            cursor = Cursor(head)
        if not head:
            return FeedPlace(cursor)
        begin = max(cursor.seq - 1, 0)
        log = log_of(self._sessions, key, after=begin, before=head + 1)
        return FeedPlace(cursor, await first_record(log), head)

    async def events(
        self,
        key: SessionKey,
        after: Cursor | FeedPlace,
        *,
        until: Callable[[], bool] | None = None,
    ) -> AsyncGenerator[FeedEvent | None, None]:
        """Yield what happens in a session after a place; None now and then while nothing does.

        Nothing is yielded that is not durable, except ``text``. It ends with the session: when it
        is deleted, also if another one has its id by then, and if it gets another owner.

        Args:
            key: The session.
            after: What was received before: as a `FeedPlace`, of the session that it was found in.
            until: Whether to end once all that is durable was yielded; None: when the
                manager drains, or the session's owner changes.

        """
        ends_here = until or (lambda: self.draining)
        with self.channel(key) as channel:
            place = after if isinstance(after, FeedPlace) else await self.place(key, after)
            cursor, last = place.cursor, place.record
            read = visible = cursor.seq
            shown = _Shown()
            is_owned = place.head > 0
            while True:
                # Taken before the look: a change that comes after it wakes this reader.
                news = channel.news
                upto = await self.head(key)
                # A shorter log is another one: the session was deleted.
                if upto < read:
                    return
                try:
                    async with contextlib.aclosing(self._records(key, last, read, upto)) as records:
                        async for record in records:
                            last, read = record, record.seq
                            if until is None and read > place.head and _sets_owner(record):
                                # The first owner that a new session gets is no change.
                                if is_owned:
                                    return
                                is_owned = True
                            for event in shown.events(record):
                                visible = record.seq if event.id is None else event.id.seq
                                yield event
                except _AnotherLogError:
                    return
                piece = channel.after(cursor, visible, read)
                if piece is not None:
                    cursor = piece.id or cursor
                    yield piece
                # Something came while this yielded: look again before it ends.
                if news.is_set():
                    continue
                if ends_here():
                    return
                if not await self._has_news(key, news):
                    yield None

    async def _has_news(self, key: SessionKey, news: anyio.Event) -> bool:
        is_here = session_open_here(self._sessions, key) is not None
        with anyio.move_on_after(KEEP_ALIVE if is_here else self._poll):
            await news.wait()
        return news.is_set()

    async def _records(
        self, key: SessionKey, last: Record | None, after: int, upto: int
    ) -> AsyncGenerator[Record, None]:
        """Yield records of the log that ``last`` is in.

        Raises:
            _AnotherLogError: The session was deleted, and what has its id now is another one.

        """
        if upto <= after:
            return
        begin = after if last is None else last.seq - 1
        log = log_of(self._sessions, key, after=begin, before=upto + 1)
        is_first = True
        async with contextlib.aclosing(log):
            async for chunk in log:
                # The record is still there: so what was read up to now is of the same log.
                if last is not None:
                    there = next(iter(chunk.records), None)
                    if not is_first:
                        there = await first_record(
                            log_of(self._sessions, key, after=last.seq - 1, before=last.seq + 1)
                        )
                    if there != last:
                        raise _AnotherLogError
                is_first = False
                for record in chunk.records:
                    if record.seq > after:
                        yield record


class _AnotherLogError(Exception):
    """Another session has the id of the one that was listened to."""


def _sets_owner(record: Record) -> bool:
    return record.kind == META and decode(record.payload, MetadataPayload).owner is not None


class _Shown:
    """The events of records, in order: half a reply waits for the next record."""

    def __init__(self) -> None:
        self._half: FeedEvent | None = None

    def events(self, record: Record) -> list[FeedEvent]:
        """Return what a record shows, behind the half reply that it does not replace."""
        half, self._half = self._half, None
        if half is not None and _replaces(record, half):
            return []
        event = event_of(record)
        if event is not None and event.name == "message" and "interrupted" in event.data:
            event, self._half = None, event
        return [one for one in (half, event) if one is not None]


def _replaces(record: Record, half: FeedEvent) -> bool:
    """Return True if a record takes half a reply back since the next one has more of it."""
    if record.kind != RETRACT:
        return False
    taken = decode(record.payload, RetractionPayload)
    return taken.replaces and taken.takes(half.data["seq"])


def event_of(record: Record) -> FeedEvent | None:
    """Return what a client gets of a record of the log; None for nothing."""
    place = Cursor(record.seq)
    if record.kind in MESSAGE_KINDS:
        message = message_fields(record.seq, decode_read(record.payload))
        return FeedEvent("message", place, message)
    if record.kind == TURN:
        turn = decode(record.payload, TurnPayload)
        data: dict[str, Any] = {"turn": turn.turn, "number": turn.number, "at": turn.at}
        if turn.error is not None:
            data["error"] = turn.error
        name = _PHASES.get(turn.phase)
        return None if name is None else FeedEvent(name, place, data)
    if record.kind == RETRACT:
        taken = decode(record.payload, RetractionPayload)
        if taken.after is not None:
            return FeedEvent("retracted", place, {"after": taken.after})
        return FeedEvent("retracted", place, {"spans": taken.spans})
    return None


def message_fields(seq: int, message: Message) -> dict[str, Any]:
    """Return a message as clients get it: plain JSON, without the fields of providers."""
    fields: dict[str, Any] = {"seq": seq, "role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning"] = message.reasoning
    if message.tool_calls:
        calls = message.tool_calls
        fields["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls
        ]
    if message.tool_result is not None:
        result = message.tool_result
        fields["tool_result"] = {
            "call_id": result.call_id,
            "result": result.result,
            "error": result.error,
        }
    if message.created_at is not None:
        fields["created_at"] = message.created_at
    if CUT_OFF in message.extra:
        fields["interrupted"] = True
    return fields
