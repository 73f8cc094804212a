"""A sandbox for tests: a store that can fail, a process that can crash, a clock that tests move."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypedDict, Unpack, final

import anyio

from perdure.autosave.options import Autosave, EngineOptions, Shutdown
from perdure.errors import InvalidArgumentError, SessionClosedError
from perdure.lease import LeaseOptions
from perdure.session.internals import kill, tracked_of
from perdure.session.manager import SessionManager
from perdure.session.options import Limits
from perdure.session.session import Session
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import Faults, SwitchedStore


def assert_saved(*sessions: Session) -> None:
    """Assert that everything appended to these sessions is durable.

    Raises:
        AssertionError: Some records are not; it names the session, their number, and the reason.

    """
    unsaved = [
        _unsaved(session) for session in sessions if session.durable_version != session.version
    ]
    if unsaved:
        raise AssertionError("; ".join(unsaved))


async def wait_saved(*sessions: Session, timeout: float = 5.0) -> None:
    """Wait until autosave has made everything in these sessions durable, without forcing a save.

    Args:
        sessions: The sessions.
        timeout: Seconds after which it gives up, by the loop's own clock.

    Raises:
        AssertionError: It is not durable in time.
        LeaseLostError: Another process has taken a session over.
        SessionQuarantinedError: The store permanently refuses a record.
        SessionClosedError: The manager stopped before.

    """
    with anyio.move_on_after(timeout):
        for session in sessions:
            await session.wait_durable()
    assert_saved(*sessions)


def _unsaved(session: Session) -> str:
    tracked = tracked_of(session)
    count = session.version - session.durable_version
    reason = f", the last save failed: {tracked.last_error}" if tracked.last_error else ""
    return (
        f"session {session.key} has {count} records that are not durable "
        f"(version {session.version}, durable up to {session.durable_version}, "
        f"{tracked.state.value}{reason})"
    )


# A clock for autosave that advances only when the test moves it


@final
class ManualClock:
    """A clock for autosave that the test moves: ``await clock.advance(30)``.

    Debounce, ceiling, backoff and hibernation go by it. The event loop keeps its own time,
    so sleeps, timeouts, deadlines and leases are real, and no loop has to be a virtual one.

    Args:
        now: Where it begins.

    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._driven: list[Callable[[], Awaitable[float]]] = []

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def __repr__(self) -> str:
        return f"<ManualClock {self._now:g} s>"

    def drive(self, catch_up: Callable[[], Awaitable[float]]) -> None:
        """Await ``catch_up`` each time that the clock was moved; called by a manager."""
        self._driven.append(catch_up)

    async def advance(self, seconds: float) -> None:
        """Advance the time, and return when autosave has done what was due by then.

        Everything happens in order and at its own time: with the store down, ten seconds give as
        many attempts as ten real ones.

        Raises:
            InvalidArgumentError: The time is negative.

        """
        if not 0 <= seconds < float("inf"):
            raise InvalidArgumentError(
                f"invalid advance({seconds!r}): time only grows, by finite steps", seconds=seconds
            )
        end = self._now + seconds
        while (due := await self._catch_up()) <= end:
            self._now = max(self._now, due)
        self._now = max(self._now, end)  # another task may have advanced it further

    async def _catch_up(self) -> float:
        """Let every manager do what is due now, and return when more is due."""
        return min([await catch_up() for catch_up in tuple(self._driven)], default=float("inf"))


# A place to test in: a manager whose store can fail, and whose process can crash and return
#
# Everything is the real thing but two: the store keeps its data in memory, and a crash ends the
# manager, not the process. What a manager finds after a crash is what the one before had made
# durable.


LONGEST_BACKOFF: Final = 60.0
"""After so long everything that failed has been tried again, with the default engine."""


class SandboxOptions(TypedDict, total=False):
    """Options for a sandbox's managers, named as in ``perdure.connect``."""

    autosave: Autosave | None
    lease: LeaseOptions
    shutdown: Shutdown
    limits: Limits
    types: Sequence[Any]
    engine: EngineOptions


@final
class Sandbox:
    """Sessions to test with: ``async with Sandbox() as sandbox``.

    Saves go by the clock if there is one, with ``Autosave()``; without one everything
    saves itself at once, with ``Autosave.write_through()``. No signal is watched.

    Args:
        clock: Autosave's clock, which advances only when the test moves it.
        store: Makes the store of each manager, for tests on another than the memory store;
            all of them must open the same data, each as an owner of its own.
        options: Further options for the managers.

    Example:
        async with Sandbox() as sandbox:
            session = await sandbox.sessions.open("mia")
            session.append(Message.user("Hello"))
            await session.save()
            await sandbox.reopen()
            session = await sandbox.sessions.open("mia")
            assert [message.text for message in session.context()] == ["Hello"]

    """

    def __init__(
        self,
        *,
        clock: ManualClock | None = None,
        store: Callable[[], Store] | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        self.clock = clock
        backing = MemoryBacking()
        self._make_store = store or (lambda: MemoryStore(backing=backing))
        self._options = _with_defaults(options, clock)
        self._faults = Faults()
        self._store: SwitchedStore | None = None
        self._sessions: SessionManager | None = None

    def __repr__(self) -> str:
        return (
            "<Sandbox not entered>" if self._sessions is None else f"<Sandbox {self._sessions!r}>"
        )

    # its life

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the manager with a working store; unsaved changes are not an error here."""
        if self._sessions is None:
            return
        self._faults.forget()
        with anyio.CancelScope(shield=True):
            if self.clock is not None:
                await self.clock.advance(LONGEST_BACKOFF)
            await self._sessions.aclose()

    async def _connect(self) -> None:
        self._store = SwitchedStore(self._make_store(), faults=self._faults)
        self._sessions = await SessionManager(self._store, clock=self.clock, **self._options)

    # what is in it

    @property
    def sessions(self) -> SessionManager:
        """The manager, since the last crash."""
        if self._sessions is None:
            raise _not_entered()
        return self._sessions

    @property
    def store(self) -> SwitchedStore:
        """The manager's store: take it down, bring it up, let calls fail."""
        if self._store is None:
            raise _not_entered()
        return self._store

    async def reopen(self, *, crash: bool = True) -> SessionManager:
        """End the manager and return a new one over the same data.

        Args:
            crash: Whether it ends as by ``kill -9``, so that only what was durable is
                there. Otherwise it closes, and raises if it could not save everything.

        Raises:
            UnsavedChangesError: It was to close, and something is not durable.

        """
        if crash:
            await kill(self.sessions)
        else:
            report = await self.sessions.aclose()
            report.raise_if_unsaved()
        await self._connect()
        return self.sessions


def _with_defaults(options: SandboxOptions, clock: ManualClock | None) -> SandboxOptions:
    complete: SandboxOptions = {
        "autosave": Autosave.write_through() if clock is None else Autosave(),
        "lease": LeaseOptions(),
        "shutdown": Shutdown(deadline=5.0, turn_grace=1.0, signals=False),
        "limits": Limits(),
        "types": (),
        # On a clock that is moved, things are due when the options say, and not before.
        "engine": EngineOptions() if clock is None else EngineOptions(jitter=0.0, eager=False),
    }
    complete.update(options)
    return complete


def _not_entered() -> SessionClosedError:
    return SessionClosedError("this sandbox is not open: use `async with Sandbox() as sandbox`")
