"""What autosave knows of one session.

Three numbers say how far it is: ``version`` (accepted), ``inflight`` (with the store now,
or None) and ``durable``, with ``durable <= inflight <= version``. They are seqs of the
log. There is no dirty flag: a change made while a save runs is simply a higher version.

`core` alone changes these fields; the hooks and ``pins`` belong to the session.

Decisions only. `intake` and `core` write them, in the same synchronous step as the
session's own fields, so they never disagree.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, final

from perdure.autosave.options import Autosave
from perdure.errors import AcknowledgedRecordsLostError
from perdure.records.keys import SessionKey
from perdure.records.records import Entry, Record

OVERHEAD: Final = 64
"""Bytes that a record counts beyond its payload."""

NEVER: Final = 1 << 62
"""A slot that does not come: the slot of what is in no slot."""


class State(enum.Enum):
    """What a session's numbers amount to."""

    CLEAN = "clean"
    """Everything accepted is durable."""
    DIRTY = "dirty"
    """Something is to be saved."""
    SAVING = "saving"
    """Everything accepted is with the store."""
    SAVING_DIRTY = "saving_dirty"
    """A part of it is with the store, and more has come since."""
    FAILED = "failed"
    """The last save did not succeed; it will be tried again."""
    QUARANTINED = "quarantined"
    """The store refuses a record for good."""
    LOST = "lost"
    """Nothing more of it can be saved: another process holds it, or the store went back."""
    CLOSED = "closed"
    """Autosave has let go of it."""


@final
class Waiter:
    """Somebody who waits for a version to become durable."""

    __slots__ = ("version", "wake")

    def __init__(self, version: int, wake: Callable[[], object]) -> None:
        self.version: int = version
        self.wake: Callable[[], object] = wake


@final
class Waiters:
    """Those who wait for versions of one session, by version: each comes and goes cheaply.

    Who gives up leaves a number in the heap; when most are such numbers it is built anew.
    """

    __slots__ = ("_heap", "_last", "_waiters")

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._heap: list[tuple[int, int]] = []
        """Version, and the waiter's number."""
        self._last = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, waiter: Waiter) -> int:
        """Have somebody wait; return the number to give up with."""
        self._last += 1
        self._waiters[self._last] = waiter
        heapq.heappush(self._heap, (waiter.version, self._last))
        return self._last

    def discard(self, number: int) -> None:
        """Let somebody go, if they still wait."""
        if self._waiters.pop(number, None) is not None and len(self._heap) > 2 * len(self) + 8:
            self._heap = [(waiter.version, n) for n, waiter in self._waiters.items()]
            heapq.heapify(self._heap)

    def take(self, reached: int) -> list[Waiter]:
        """Return the waiters of versions up to ``reached``, and forget them."""
        due = []
        while self._heap and self._heap[0][0] <= reached:
            waiter = self._waiters.pop(heapq.heappop(self._heap)[1], None)
            if waiter is not None:
                due.append(waiter)
        return due

    def take_all(self) -> list[Waiter]:
        """Return all waiters, and forget them."""
        waiters = list(self._waiters.values())
        self._waiters.clear()
        self._heap.clear()
        return waiters


class _Hottest:
    """What every append touches, side by side in memory.

    With very many sessions, fetching a session's memory is most of what an append costs.
    """

    __slots__ = (
        "end",
        "first_at",
        "groups",
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
    """What else every look at the clock touches."""

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

    def __init__(  # noqa: PLR0915  # a line for each field
        self, *, head: int, options: Autosave | None, earliness: float
    ) -> None:
        self.options: Autosave | None = options
        self.earliness: float = earliness

        # how far it is
        self.version: int = head
        self.inflight: int | None = None
        self.durable: int = head
        self.records: list[Entry] | None = None
        """What `pending` shows; None while there is nothing."""
        self.pending_bytes: int = 0

        # since when
        self.first_at: float | None = None
        """The oldest change that no save has captured."""
        self.last_at: float = 0.0
        """The newest change, while there is one that is not durable."""
        self.oldest_at: float | None = None
        """The oldest change that is not durable."""

        # what should happen, and where it is noted
        self.urgent_to: int = 0
        """Somebody waits for this version: it is due now."""
        self.hurry: bool = False
        """Due now, without anybody waiting: a turn has ended, or much has piled up."""
        self.retry_at: float = 0.0
        """Not before, because a save has failed."""
        self.slot: int = NEVER
        """Where it is in the wheel."""
        self.ticket: int = 0
        """Its place in the ready lanes; 0 for none."""

        # what keeps it
        self.end: State | None = None
        """QUARANTINED, LOST or CLOSED."""
        self.refuses: bool = False
        """Whether an append needs a closer look."""
        self.groups: int = 0
        """How many groups are open, one within the other."""
        self.holds: int = 0
        """Jobs that want it alone: no save begins."""
        self.preparing: bool = False
        """Its contributors are being asked."""


@final
class Tracked(_Hot):
    """One session's place in autosave.

    Args:
        key: Which session.
        epoch: The fencing token that its records are sent with.
        head: The seq of the last record in the log, which is durable.
        options: When it saves itself; None for no timers.
        earliness: The share of its delays that it uses, for spreading bursts.

    """

    __slots__ = (
        "attempt",
        "before_capture",
        "captured_bytes",
        "contributing",
        "doubt_to",
        "epoch",
        "granted",
        "group_at",
        "group_from",
        "group_warned",
        "idle_since",
        "idle_slot",
        "inherits",
        "key",
        "last_error",
        "narrow",
        "occupied",
        "on_captured",
        "on_idle",
        "on_lost",
        "on_saved",
        "pins",
        "prepared",
        "rescue",
        "sealed",
        "waiters",
    )

    def __init__(  # noqa: PLR0915  # a line for each field
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
        self.inherits: bool = True
        """Whether ``options`` follow the engine's."""
        self.captured_bytes: int = 0
        """The part of ``pending_bytes`` that is with the store."""
        self.waiters: Waiters | None = None
        """None while nobody waits."""

        # a group that is open
        self.group_from: int = 0
        """The version when the outermost of them was opened."""
        self.group_at: float | None = None
        """The first change within it."""
        self.group_warned: bool = False

        # failures
        self.attempt: int = 0
        """Failed saves in a row."""
        self.narrow: int = 0
        """Capture at most so many records: a refused one is being looked for; 0 for all."""
        self.doubt_to: int = 0
        """The store may hold records up to this one, beyond ``durable``."""
        self.last_error: Exception | None = None
        """Why the last save did not succeed."""
        self.sealed: bool = False
        self.granted: bool = False
        """One append is let through although too much is unsaved."""

        # who else has to do with it
        self.occupied: bool = False
        """A job that holds it runs."""
        self.prepared: bool = False
        """Its contributors have been asked since the last capture."""
        self.contributing: bool = False
        """What is appended now comes from them, and is accepted behind a seal."""
        self.pins: int = 0
        """Who uses it; a pinned session is never idle."""
        self.idle_since: float = 0.0
        self.idle_slot: int = NEVER

        self.before_capture: Callable[[], Awaitable[None]] | None = None
        """Awaited before a due save; what it appends is saved with it."""
        self.on_captured: Callable[[], None] | None = None
        """Called, maybe twice, before records that the store has taken leave memory."""
        self.on_saved: Callable[[int], None] | None = None
        """Called with the durable version after each successful save."""
        self.on_idle: Callable[[], None] | None = None
        """Called when nobody has used the session for a while."""
        self.on_lost: Callable[[], None] | None = None
        """Called when another process has taken the session over."""
        self.rescue: Callable[[int], tuple[Sequence[Entry], Entry]] | None = None
        """Returns what memory holds of acknowledged records behind one, where the store has lost
        them, and a record that brings the working context back."""

    def __repr__(self) -> str:
        numbers = f"{self.durable}<={self.inflight}<={self.version}"
        return f"<Tracked {self.key} {self.state.value} {numbers}>"

    @property
    def state(self) -> State:
        """What the numbers amount to."""
        if self.end is not None:
            return self.end
        if self.inflight is not None:
            return State.SAVING if self.inflight == self.version else State.SAVING_DIRTY
        if self.version == self.durable:
            return State.CLEAN
        return State.FAILED if self.attempt else State.DIRTY

    @property
    def pending(self) -> Sequence[Entry]:
        """The records that are not durable yet, from seq ``durable + 1`` on."""
        return self.records or ()

    def pending_records(self) -> tuple[Record, ...]:
        """Return what is not durable yet as the records that it will be."""
        return tuple(
            Record(seq, self.epoch, entry.kind, entry.payload, entry.end)
            for seq, entry in enumerate(self.pending, self.durable + 1)
        )

    @property
    def clean(self) -> bool:
        """Whether everything accepted is durable, and nothing is with the store."""
        return self.version == self.durable and self.inflight is None

    @property
    def missing(self) -> int:
        """How many records the store had acknowledged, and has no more."""
        if isinstance(self.last_error, AcknowledgedRecordsLostError):
            return self.durable - int(str(self.last_error.facts["kept"]))
        return 0

    @property
    def undecided(self) -> bool:
        """Whether it is lost, and somebody has to decide what becomes of its records."""
        return self.end is State.LOST and (self.version > self.durable or self.missing > 0)

    @property
    def quarantined(self) -> bool:
        """Whether the store refuses a record for good."""
        return self.end is State.QUARANTINED

    @property
    def writable(self) -> bool:
        """Whether an append can be accepted, as far as the session itself goes."""
        if self.sealed and not self.contributing:
            return False
        return self.end is None or self.end is State.QUARANTINED

    @property
    def capturable(self) -> int:
        """The version that a save may capture: not what an open group holds."""
        return self.group_from if self.groups else self.version

    def take_waiters(self, reached: int | None = None) -> list[Waiter]:
        """Return the waiters of versions up to ``reached``, or all, and forget them."""
        waiters = self.waiters
        if waiters is None:
            return []
        due = waiters.take_all() if reached is None else waiters.take(reached)
        if not waiters:
            self.waiters = None
        return due

    def give_up(self, number: int, waiters: Waiters) -> None:
        """Forget a waiter, if it still waits."""
        waiters.discard(number)
        if not waiters and self.waiters is waiters:
            self.waiters = None
