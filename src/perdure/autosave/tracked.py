"""Autosave's state: each session's numbers, the registers over all of them, and the errors.

Three numbers say how far a session is: ``version`` (accepted), ``inflight`` (with the store now,
or None) and ``durable``, with ``durable <= inflight <= version``. They are sequence numbers of the
log. There is no dirty flag: a change made while a save runs is simply a higher version.

Decisions only. `core` alone changes these fields, in the same synchronous step as the session's
own, so they never disagree; the hooks and ``pins`` belong to the session.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right, insort
from collections.abc import Awaitable, Callable, Sequence
from itertools import count, islice
from operator import itemgetter
from typing import Any, Final, Protocol, TypeAlias, final

from perdure._lib import task_scope
from perdure.autosave.events import Degraded, Event, Recovered
from perdure.autosave.options import Autosave, EngineOptions
from perdure.errors import (
    AcknowledgedRecordsLostError,
    LeaseLostError,
    SessionClosedError,
    SessionError,
    SessionQuarantinedError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import About, Batch
from perdure.records.records import Entry, Record

OVERHEAD: Final = 64
"""Bytes that a record counts beyond its payload."""

NEVER: Final = 1 << 62
"""A slot that does not come: the slot of what is in no slot."""


class State(enum.Enum):
    """Meaning of a session's numbers."""

    CLEAN = "clean"
    """Everything accepted is durable."""
    DIRTY = "dirty"
    """Something is to be saved."""
    SAVING = "saving"
    """Everything accepted is with the store."""
    SAVING_DIRTY = "saving_dirty"
    """A part of it is with the store, and more was appended since."""
    FAILED = "failed"
    """The last save failed; it will be tried again."""
    QUARANTINED = "quarantined"
    """The store refuses a record permanently."""
    LOST = "lost"
    """Nothing more of it can be saved: another process holds it, or the store went back."""
    CLOSED = "closed"
    """Autosave no longer tracks it."""


Wake: TypeAlias = Callable[[], object]
"""Wakes a caller that waits for a version to become durable."""


Waiter: TypeAlias = tuple[int, int, Wake]
"""A version, a number that no other waiter has, and what wakes the caller."""

_numbers: Final = count()
_place: Final = itemgetter(0, 1)


class _Hottest:
    """The fields that every append touches, next to each other in memory.

    With very many sessions, fetching a session's memory is most of the cost of an append.
    """

    __slots__ = (
        "end",
        "first_at",
        "inflight",
        "last_at",
        "oldest_at",
        "options",
        "pending_bytes",
        "records",
        "refuses",
        "version",
    )


class _Hot(_Hottest):
    """The other fields that arming and capturing touch, next to them."""

    __slots__ = (
        "durable",
        "earliness",
        "holds",
        "hurry",
        "preparing",
        "retry_at",
        "slot",
        "ticket",
        "urgent_to",
    )

    def __init__(self, *, head: int, options: Autosave | None, earliness: float) -> None:
        self.options: Autosave | None = options
        self.earliness: float = earliness

        self.version: int = head
        self.inflight: int | None = None
        self.durable: int = head
        # The records of `pending`; None while there are none.
        self.records: list[Entry] | None = None
        self.pending_bytes: int = 0

        # The oldest change that no save has captured.
        self.first_at: float | None = None
        # The newest change, while there is one that is not durable.
        self.last_at: float = 0.0
        # The oldest change that is not durable.
        self.oldest_at: float | None = None

        # A caller waits for this version: it is due now.
        self.urgent_to: int = 0
        # Due now without a waiting caller: a turn has ended, or much is unsaved.
        self.hurry: bool = False
        # Send nothing before this time, because a save has failed.
        self.retry_at: float = 0.0
        self.slot: int = NEVER  # its slot in the wheel
        # Its number in the ready lanes; 0 for none.
        self.ticket: int = 0

        self.end: State | None = None  # QUARANTINED, LOST or CLOSED
        # Whether an append needs a closer look.
        self.refuses: bool = False
        # Jobs that need it to themselves: no save begins.
        self.holds: int = 0
        # Its contributors are being asked.
        self.preparing: bool = False


class SessionListener(Protocol):
    """Listener to what becomes of sessions."""

    def captured(self, session: Any, /) -> None:
        """Hear, maybe twice, that records are about to leave memory, before they do."""
        ...

    def saved(self, session: Any, durable: int, /) -> None:
        """Hear the durable version after a successful save."""
        ...

    def unused(self, session: Any, /) -> None:
        """Hear that a session was not used for a while."""
        ...

    def lost(self, session: Any, /) -> None:
        """Hear that another process has taken a session over."""
        ...


@final
class Tracked(_Hot):
    """One session as autosave sees it.

    Args:
        key: Which session.
        epoch: The fencing token that its records are sent with.
        head: The seq of the last record in the log, which is durable.
        options: Its setting; None for no timers.
        earliness: The share of its delays that it waits, to spread bursts.

    """

    __slots__ = (
        "attempt",
        "before_capture",
        "captured_bytes",
        "carried",
        "contributing",
        "doubt_to",
        "dropped",
        "epoch",
        "given_up",
        "granted",
        "heard_by",
        "idle_since",
        "idle_slot",
        "inherits",
        "key",
        "labels",
        "labels_due",
        "last_error",
        "narrow",
        "occupied",
        "of",
        "pins",
        "prepared",
        "rescue",
        "sealed",
        "turns",
        "waiters",
    )

    def __init__(
        self,
        key: SessionKey,
        *,
        epoch: int,
        head: int,
        options: Autosave | None,
        earliness: float = 1.0,
    ) -> None:
        super().__init__(head=head, options=options, earliness=earliness)
        self.key: SessionKey = key
        self.epoch: int = epoch
        # Whether ``options`` follow the engine's.
        self.inherits: bool = True
        # The part of ``pending_bytes`` that is with the store.
        self.captured_bytes: int = 0
        # The batch with the store: an answer to another one is not for it.
        self.carried: Batch | None = None
        # Those who wait, by version; None without any, which nearly all sessions are.
        self.waiters: list[Waiter] | None = None
        # What saves say for the directory: the turns, and the labels until a save has said them.
        self.turns: int | None = None
        self.labels: About = About()
        self.labels_due: bool = False

        self.attempt: int = 0  # failed saves in a row
        # Capture at most so many records, while bisecting for a refused one; 0 for all.
        self.narrow: int = 0
        # The store has not answered for what is in flight, and its slot was given to others.
        self.given_up: bool = False
        # The store may have records up to this one, beyond ``durable``.
        self.doubt_to: int = 0
        self.dropped: int = 0  # records that were discarded, ever
        self.last_error: Exception | None = None  # why the last save failed
        self.sealed: bool = False
        # One append is accepted although too much is unsaved.
        self.granted: bool = False

        self.occupied: bool = False  # a job that holds it is running
        # Its contributors have been asked since the last capture.
        self.prepared: bool = False
        # Appends come from its contributors now, and are accepted although it is sealed.
        self.contributing: bool = False
        # How many users it has; a pinned session is never idle.
        self.pins: int = 0
        self.idle_since: float = 0.0
        self.idle_slot: int = NEVER

        # Awaited before a due save; what it appends is saved with it.
        self.before_capture: Callable[[], Awaitable[None]] | None = None
        # What the numbers are of, and who hears of it: two references, since four bound methods for
        # each of very many sessions are a good part of what Python's garbage collector walks over.
        self.of: object | None = None
        self.heard_by: SessionListener | None = None
        # Returns what memory holds of acknowledged records after a given one, which the store has
        # lost, and a record that restores the working context.
        self.rescue: Callable[[int], tuple[Sequence[Entry], Entry]] | None = None

    def __repr__(self) -> str:
        numbers = f"{self.durable}<={self.inflight}<={self.version}"
        return f"<Tracked {self.key} {self.state.value} {numbers}>"

    @property
    def state(self) -> State:
        """The state that the numbers show."""
        if self.end is not None:
            return self.end
        if self.inflight is not None and not self.given_up:
            return State.SAVING if self.inflight == self.version else State.SAVING_DIRTY
        if self.version == self.durable:
            return State.CLEAN
        return State.FAILED if self.attempt else State.DIRTY

    @property
    def pending(self) -> Sequence[Entry]:
        """The records that are not durable yet, from seq ``durable + 1`` on."""
        return self.records or ()

    def pending_records(self) -> tuple[Record, ...]:
        """Return the records that are not durable yet, numbered as they will be."""
        return tuple(
            Record(seq, self.epoch, entry.kind, entry.payload, entry.end)
            for seq, entry in enumerate(self.pending, self.durable + 1)
        )

    @property
    def clean(self) -> bool:
        """True if everything accepted is durable, and nothing is with the store."""
        return self.version == self.durable and self.inflight is None

    @property
    def missing(self) -> int:
        """Number of acknowledged records that the store no longer has."""
        if isinstance(self.last_error, AcknowledgedRecordsLostError):
            return self.durable - int(str(self.last_error.facts["kept"]))
        return 0

    @property
    def undecided(self) -> bool:
        """True if it is lost, and its records have yet to be forked or discarded."""
        return self.end is State.LOST and (self.version > self.durable or self.missing > 0)

    @property
    def quarantined(self) -> bool:
        """True if the store refuses a record permanently."""
        return self.end is State.QUARANTINED

    @property
    def writable(self) -> bool:
        """True if the session itself accepts an append."""
        if self.sealed and not self.contributing:
            return False
        return self.end is None or self.end is State.QUARANTINED

    def take_waiters(self, reached: int | None = None) -> list[Wake]:
        """Remove and return the waiters of versions up to ``reached``, or all."""
        waiters = self.waiters or []
        due = len(waiters)
        if reached is not None and waiters and waiters[-1][0] > reached:
            due = bisect_right(waiters, reached, key=itemgetter(0))
        self.waiters = waiters[due:] or None
        return [wake for _, _, wake in waiters[:due]]

    def add_waiter(self, version: int, wake: Wake) -> Waiter:
        """Have a caller woken once a version is durable, or will not be."""
        waiter = version, next(_numbers), wake
        if self.waiters is None:
            self.waiters = [waiter]
        else:
            insort(self.waiters, waiter, key=_place)
        return waiter

    def drop_waiter(self, waiter: Waiter) -> None:
        """Remove a waiter, if it still waits."""
        waiters = self.waiters or []
        at = bisect_left(waiters, _place(waiter), key=_place)
        if waiters[at : at + 1] == [waiter]:
            del waiters[at]
        self.waiters = waiters or None


def ended(
    t: Tracked,
) -> AcknowledgedRecordsLostError | LeaseLostError | SessionClosedError | SessionQuarantinedError:
    """Return the error of a session that has ended, or is sealed."""
    unsaved = f"{t.version - t.durable} of its records are only in memory"
    error: AcknowledgedRecordsLostError | LeaseLostError | SessionQuarantinedError
    if t.end is State.LOST and t.missing:
        error = AcknowledgedRecordsLostError(
            f"{t.last_error}; {unsaved}", key=t.key, durable=t.durable, missing=t.missing
        )
    elif t.end is State.LOST:
        message = (
            f"session {t.key}: another process has taken it over, epoch {t.epoch} can write no "
            f"more; {unsaved}. fork_unsaved(new_id) keeps them, discard_unsaved() drops them; open "
            "the session again to continue"
        )
        error = LeaseLostError(
            message, key=t.key, epoch=t.epoch, version=t.version, durable=t.durable
        )
    elif t.end is State.QUARANTINED:
        message = (
            f"session {t.key}: the store refuses record {t.durable + 1} permanently "
            f"({t.last_error}); {unsaved}. Use retry(), fork_unsaved(new_id) or discard_unsaved()"
        )
        error = SessionQuarantinedError(message, key=t.key, seq=t.durable + 1, version=t.version)
    else:
        return SessionClosedError(
            f"session {t.key} is closed, {unsaved}: open it again",
            key=t.key,
            version=t.version,
            durable=t.durable,
        )
    error.__cause__ = t.last_error
    return error


def require_outside(t: Tracked | None, what: str) -> None:
    """Raise if this task runs in a hook of the save that it is about to wait for.

    None for *t* means a hook of any session.

    Raises:
        SessionError: This task is in a ``before_save`` hook or a contributor of the session, or
            was started there.

    """
    if not task_scope.stays.get():
        return  # nearly always
    if task_scope.is_within_any(Tracked) if t is None else task_scope.is_within(t):
        name = "a session" if t is None else f"session {t.key}"
        raise SessionError(
            f"{name} is about to be saved, and waits for this before_save hook or contributor: "
            f"it cannot wait for the session {what}. Append and return: what is appended here is "
            "saved at once, with the rest",
            key=None if t is None else str(t.key),
        )


EASED: Final = 0.5
"""Below this share of ``dirty_soft`` sessions wait for their debounce again."""
LOOKED_AT: Final = 256
"""Sessions among which the oldest change is searched."""


@final
class SessionRegistry:
    """The registers over all sessions of one store, and how much of them is unsaved.

    Above ``dirty_soft`` nothing waits for a debounce any more. At ``dirty_hard``, or when a failing
    session's oldest change is older than ``max_unsaved_age``, the outage policy blocks appends.
    """

    def __init__(self, engine: EngineOptions) -> None:
        self._engine = engine
        self.sessions: set[Tracked] = set()
        # Sessions with changes that can still become durable, the longest waiting first.
        self.unsaved: dict[Tracked, None] = {}
        # Those of them whose last save failed, the longest failing first.
        self.failed: dict[Tracked, None] = {}
        # Quarantined sessions, and lost ones until their records are forked or discarded.
        self.stuck: dict[Tracked, None] = {}
        # Settings of the store with which it may lose records.
        self.warnings: tuple[str, ...] = ()
        # Unsaved payloads, plus `OVERHEAD` per record.
        self.dirty_bytes: int = 0
        # From this many unsaved bytes on an append is checked further.
        self.ceiling: float = engine.dirty_soft
        # Whether too much is unsaved to wait for debounces.
        self.rising: bool = False
        # Whether a session has been failing for longer than ``max_unsaved_age``.
        self.overdue: bool = False
        self.sealed: bool = False
        # Events that were not reported yet.
        self.events: list[Event] = []
        # Whether each save is an event, which is for others to hear.
        self.reports_saves: bool = True

    @property
    def blocking(self) -> bool:
        """True if a limit is reached, and the policy enforces it."""
        if self._engine.outage_policy == "continue":
            return False
        return self.overdue or self.dirty_bytes >= self._engine.dirty_hard

    def seal(self) -> None:
        """Accept no more records."""
        self.sealed = True
        self._set_ceiling()

    def _set_ceiling(self) -> None:
        if self.sealed or self.overdue:
            self.ceiling = -1
        else:
            self.ceiling = self._engine.dirty_hard if self.rising else self._engine.dirty_soft

    def rises(self) -> bool:
        """Check the number of bytes; return whether it has newly reached ``dirty_soft``."""
        news = not self.rising and self.dirty_bytes >= self._engine.dirty_soft
        self.rising = self.rising or news
        self._set_ceiling()
        return news

    def oldest_age(self, now: float) -> float:
        """Return for how long the oldest change has been unsaved.

        Those that wait longest are in front, give or take the length of a save, so that a
        few of them are enough to look at, however many wait.
        """
        since = [t.oldest_at for t in islice(self.unsaved, LOOKED_AT) if t.oldest_at is not None]
        return now - min(since, default=now)

    def overloaded(self, t: Tracked, now: float) -> StoreUnavailableError:
        """Return the error of an append while too much is unsaved."""
        oldest_age = self.oldest_age(now)
        message = (
            f"session {t.key}: the store does not keep up; {self.dirty_bytes} bytes are unsaved "
            f"over all sessions, the oldest for {oldest_age:.1f} s. Nothing accepted is dropped: "
            "try again when the store works, or raise dirty_hard and max_unsaved_age"
        )
        error = StoreUnavailableError(
            message, key=t.key, dirty_bytes=self.dirty_bytes, oldest_age=oldest_age
        )
        failing = next(iter(self.failed), None)
        error.__cause__ = None if failing is None else failing.last_error
        return error

    def clear_failures(self, t: Tracked) -> None:
        """Forget a session's failures."""
        t.attempt = 0
        t.retry_at = 0.0
        if t in self.failed:
            del self.failed[t]
            if not self.failed:
                self.overdue = False
                self._set_ceiling()
                self.events.append(Recovered())

    def note_age(self, now: float) -> None:
        """Compare the age of the oldest failing session with its limit."""
        was_overdue = self.overdue
        oldest = next((t.oldest_at for t in self.failed), None)
        self.overdue = oldest is not None and now - oldest > self._engine.max_unsaved_age
        if self.rising and self.dirty_bytes < self._engine.dirty_soft * EASED:
            self.rising = False
        self._set_ceiling()
        if self.overdue and not was_overdue:
            self.note_pressure(now)

    def note_pressure(self, now: float) -> None:
        """Report that much is unsaved."""
        self.events.append(
            Degraded(
                dirty_bytes=self.dirty_bytes,
                oldest_age=self.oldest_age(now),
                blocking=self.blocking,
            )
        )
