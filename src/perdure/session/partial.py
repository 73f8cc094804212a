"""A reply that is saved while it is streamed, and becomes one message at its end.

What has come so far is a message from the first second on, marked as interrupted. Each longer piece
is appended in one group with the retraction of the one before, as the whole message is in the end:
so every reader of a log, and every retry of a turn, knows half an answer already.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, final

import msgspec

from perdure._lib.logs import log_facts
from perdure.errors import InvalidArgumentError, PerdureError, StoreUnavailableError
from perdure.memory.context import RetractionPayload
from perdure.providers.context_fit import Format, clean
from perdure.providers.issued import Issuer
from perdure.providers.replies import as_dict
from perdure.records.json import encode
from perdure.records.messages import CUT_OFF, Message
from perdure.records.records import RETRACT, Entry
from perdure.session.runtime import require_seconds

if TYPE_CHECKING:
    from perdure.providers.streams import StreamedAnswer
    from perdure.session.base import Turn

log: logging.Logger = logging.getLogger("perdure")

_GROWTH: Final = 16
"""A piece is saved again once it has grown by a sixteenth: so all pieces of a reply together take
at most sixteen times its bytes, however long it is."""


@final
class PartialReply:
    """A reply that is being streamed into a turn, from `Turn.partial`: enter it with ``with``.

    Leaving it appends the reply as one message. If an exception or a cancellation leaves it, or the
    stream ended before the reply was complete, that message has what came, marked as interrupted,
    without tool calls, which were not run. A killed process leaves the newest saved piece.
    """

    __slots__ = (
        "_answer",
        "_every",
        "_format",
        "_issuer",
        "_reasoning",
        "_saved",
        "_seq",
        "_size",
        "_text",
        "_turn",
        "_when",
        "message",
    )

    def __init__(
        self, turn: Turn, format: Format | None, issuer: Issuer | str | None, every: float
    ) -> None:
        require_seconds("every", every)
        self._answer: StreamedAnswer | None = None
        if format is not None:  # imported when used, as all formats are
            from perdure.providers.streams import answer_of

            self._answer = answer_of(format)
        self._turn = turn
        self._format = format
        self._issuer = issuer
        self._every = every
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._size = self._saved = self._seq = 0
        self._when = turn._session._runtime.clock()
        self.message: Message | None = None
        """The message that was appended when the block was left; None before, and for no reply."""

    def __repr__(self) -> str:
        state = "complete" if self.complete else "not complete"
        return f"<PartialReply in {self._turn!r}, {len(self.text)} characters, {state}>"

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def complete(self) -> bool:
        """True once the stream has said that the reply ends; text alone is always complete."""
        return self._answer is None or self._answer.complete

    def add(self, event: Any) -> str:
        """Add what the stream has brought, and return the text in it, which may be empty.

        It makes what has come durable with the session's autosave, a second after the last time.

        Args:
            event: An event of the provider's stream, as a dict or as the SDK's object; without a
                format, text.

        Raises:
            FormatError: It is neither a dict nor an SDK's object.
            InvalidArgumentError: It is not text, and no format was given.
            SessionError: The turn has ended.
            LeaseLostError: Another process has taken the session over.

        """
        text, reasoning = self._read(event)
        self._text.append(text)
        self._reasoning.append(reasoning)
        self._size += len(text)
        if text:
            self._save()
        return text

    def _read(self, event: Any) -> tuple[str, str]:
        if self._answer is not None:
            return self._answer.take(as_dict(event))
        if isinstance(event, str):
            return clean(event), ""
        raise InvalidArgumentError(
            f"an event of type {type(event).__name__} is no text: say whose stream it is, as in "
            'turn.partial("openai")',
            type=type(event).__name__,
        )

    def _save(self) -> None:
        """Append what has come as an interrupted message, if that is due."""
        now = self._turn._session._runtime.clock()
        if now - self._when < self._every or (self._size - self._saved) * _GROWTH < self._saved:
            return
        try:
            self._append(self._interrupted())
        except StoreUnavailableError:
            return  # too much is unsaved: the stream goes on, and the end may have room
        self._saved, self._when = self._size, now

    def _interrupted(self) -> Message:
        return Message(
            role="assistant",
            content=self.text,
            reasoning="".join(self._reasoning) or None,
            extra={CUT_OFF: msgspec.Raw(b"true")},
        )

    def _whole(self) -> Message | None:
        """Return the reply as a message; None if nothing came."""
        if not self.complete:
            return self._interrupted() if self._size else None
        if self._answer is None:
            return Message.assistant(self.text) if self._size else None
        from perdure.providers import parse

        assert self._format is not None
        return parse(self._answer.whole(), self._format, issuer=self._issuer)

    def _append(self, message: Message) -> None:
        """Append a message to the turn in place of the piece before."""
        turn, session = self._turn, self._turn._session
        turn._require_running()
        entries = session._entries((message,))
        if self._seq:
            replaced = RetractionPayload(spans=((self._seq, self._seq),), replaces=True)
            entries = (Entry(RETRACT, encode(replaced)), *entries)
        self._seq = session._append(entries, turn)

    def __enter__(self) -> Self:
        self._turn._require_running()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self._end_with(self._whole())
        elif self._size and self._turn._session.is_writable:
            try:
                self._end_with(self._interrupted())
            except PerdureError as error:  # what left the block is raised, and not this
                key = str(self._turn._session.key)
                message = "session %(session)s: half a reply is not kept: %(reason)s"
                log_facts(log, logging.WARNING, message, session=key, reason=error)

    def _end_with(self, message: Message | None) -> None:
        if message is not None:
            self._append(message)
        self.message = message
