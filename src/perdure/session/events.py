"""Events of a manager, and the hooks that get them.

An event is a name and a payload: ``saved`` comes with a `Saved`. Autosave's payloads are in
`perdure.autosave.events`; the others are here. Payloads hold ids, counts and sizes, never content.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, cast, get_args, overload

import msgspec

from perdure._lib.logs import log_facts
from perdure._lib.signals import exit_in
from perdure._lib.tasks import Host, HostClosedError, was_cancelled
from perdure.autosave.events import (
    Degraded,
    LoopBlocked,
    Lost,
    Quarantined,
    Recovered,
    Resumed,
    Saved,
    SaveFailed,
    Stalled,
    StoreWarned,
)
from perdure.errors import InvalidArgumentError
from perdure.records.keys import SessionKey
from perdure.restore.report import RestoreReport
from perdure.session.retention import PruneReport

log: logging.Logger = logging.getLogger("perdure")


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A session was loaded."""

    key: SessionKey
    epoch: int
    """Its number of holders so far, this one included."""
    report: RestoreReport
    """The documents and records that were read, and what was rebuilt."""
    took: float
    """Seconds that it took, waiting for the lease included."""


ClosedWhy = Literal["closed", "hibernated", "handed over", "lost", "deleted"]


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A session left memory."""

    key: SessionKey
    why: ClosedWhy
    version: int
    """The last record of it that is durable."""


class Folded(msgspec.Struct, frozen=True, kw_only=True):
    """Documents were folded as of a record."""

    key: SessionKey
    as_of_seq: int


class FoldFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A fold failed; nothing is lost by it, the next one will do its work."""

    key: SessionKey
    error: Exception


class MemoryEvicted(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of a working memory went, to make room for a new value."""

    key: SessionKey
    entries: tuple[str, ...]
    """Their keys in the memory, least in priority first."""
    bytes: int
    """Of their values."""


class MemorySearched(msgspec.Struct, frozen=True, kw_only=True):
    """A session's memory was searched: the working memory, or an agent's long-term memory."""

    key: SessionKey
    found: int
    """The number of entries or items that were returned."""
    took: float
    """Seconds."""
    error: str | None = None
    """The type of the error that it ended with."""


class MediaLeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Images or other media are not shown to the model any more; reported once per open session.

    The log keeps them, and ``history()`` returns them.
    """

    key: SessionKey
    count: int
    """The number that is left out now, since the budget is spent."""
    bytes: int
    """Of those."""
    lost: int = 0
    """The number of others that cannot be shown, because their blobs are missing or damaged."""


class TurnWarned(msgspec.Struct, frozen=True, kw_only=True):
    """A turn may not own what it should, or may wait for itself; reported once for each turn."""

    key: SessionKey
    turn: str
    """The id of the turn that runs."""
    why: Literal["append", "exit", "wait"]
    """Another task appended while it ran; another task left it than entered it; a turn waits for it
    that was begun in it."""


class Posted(msgspec.Struct, frozen=True, kw_only=True):
    """Posts of others have entered a session that is open here; autosave makes them durable."""

    key: SessionKey
    posts: tuple[str, ...]
    """The keys of the posts."""
    version: int
    """The seq of the newest record of it."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """The manager saves every change at once and opens nothing new: it will stop."""

    sessions: int
    """The number of open sessions."""


EventName = Literal[
    "before_save",
    "saved",
    "save_failed",
    "recovered",
    "quarantined",
    "lost",
    "degraded",
    "loop_blocked",
    "store_warned",
    "stalled",
    "resumed",
    "opened",
    "closed",
    "folded",
    "fold_failed",
    "memory_evicted",
    "memory_searched",
    "media_left_out",
    "turn_warned",
    "posted",
    "pruned",
    "drain",
]
"""``before_save`` gets the session, and is awaited before a due save captures what to
write; all others get their payload, after it has happened."""

NAMES: Final[dict[type, EventName]] = {
    Saved: "saved",
    SaveFailed: "save_failed",
    Recovered: "recovered",
    Quarantined: "quarantined",
    Lost: "lost",
    Degraded: "degraded",
    LoopBlocked: "loop_blocked",
    StoreWarned: "store_warned",
    Stalled: "stalled",
    Resumed: "resumed",
    Opened: "opened",
    Closed: "closed",
    Folded: "folded",
    FoldFailed: "fold_failed",
    MemoryEvicted: "memory_evicted",
    MemorySearched: "memory_searched",
    MediaLeftOut: "media_left_out",
    TurnWarned: "turn_warned",
    Posted: "posted",
    PruneReport: "pruned",
    Drain: "drain",
}
"""The events by their payload's type."""

PayloadT = TypeVar("PayloadT")
SessionT_co = TypeVar("SessionT_co", covariant=True)

Hook: TypeAlias = Callable[[PayloadT], object]
"""A hook, plain or async."""
Off: TypeAlias = Callable[[], None]
"""The way to take a hook off."""


class OnEvent(Protocol[SessionT_co]):
    """The method ``on`` of a manager, as type checkers see it: each name with its payload."""

    @overload
    def __call__(self, event: Literal["before_save"], hook: Hook[SessionT_co]) -> Off: ...
    @overload
    def __call__(self, event: Literal["saved"], hook: Hook[Saved]) -> Off: ...
    @overload
    def __call__(self, event: Literal["save_failed"], hook: Hook[SaveFailed]) -> Off: ...
    @overload
    def __call__(self, event: Literal["recovered"], hook: Hook[Recovered]) -> Off: ...
    @overload
    def __call__(self, event: Literal["quarantined"], hook: Hook[Quarantined]) -> Off: ...
    @overload
    def __call__(self, event: Literal["lost"], hook: Hook[Lost]) -> Off: ...
    @overload
    def __call__(self, event: Literal["degraded"], hook: Hook[Degraded]) -> Off: ...
    @overload
    def __call__(self, event: Literal["loop_blocked"], hook: Hook[LoopBlocked]) -> Off: ...
    @overload
    def __call__(self, event: Literal["store_warned"], hook: Hook[StoreWarned]) -> Off: ...
    @overload
    def __call__(self, event: Literal["stalled"], hook: Hook[Stalled]) -> Off: ...
    @overload
    def __call__(self, event: Literal["resumed"], hook: Hook[Resumed]) -> Off: ...
    @overload
    def __call__(self, event: Literal["opened"], hook: Hook[Opened]) -> Off: ...
    @overload
    def __call__(self, event: Literal["closed"], hook: Hook[Closed]) -> Off: ...
    @overload
    def __call__(self, event: Literal["folded"], hook: Hook[Folded]) -> Off: ...
    @overload
    def __call__(self, event: Literal["fold_failed"], hook: Hook[FoldFailed]) -> Off: ...
    @overload
    def __call__(self, event: Literal["memory_evicted"], hook: Hook[MemoryEvicted]) -> Off: ...
    @overload
    def __call__(self, event: Literal["memory_searched"], hook: Hook[MemorySearched]) -> Off: ...
    @overload
    def __call__(self, event: Literal["media_left_out"], hook: Hook[MediaLeftOut]) -> Off: ...
    @overload
    def __call__(self, event: Literal["turn_warned"], hook: Hook[TurnWarned]) -> Off: ...
    @overload
    def __call__(self, event: Literal["posted"], hook: Hook[Posted]) -> Off: ...
    @overload
    def __call__(self, event: Literal["pruned"], hook: Hook[PruneReport]) -> Off: ...
    @overload
    def __call__(self, event: Literal["drain"], hook: Hook[Drain]) -> Off: ...


def typed_by_event(
    session: type[SessionT_co],  # noqa: ARG001  # the payload of ``before_save``
) -> Callable[[Callable[[Any, EventName, Hook[Any]], Off]], OnEvent[SessionT_co]]:
    """Return a decorator for a manager's ``on``, by which type checkers see an `OnEvent`."""
    return lambda method: cast("OnEvent[SessionT_co]", method)


class Hooks:
    """Functions by the event that they wait for."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._hooks: dict[str, list[Hook[Any]]] = {}

    def on(self, event: EventName, hook: Hook[Any]) -> Off:
        """Call ``hook`` at each event; return what takes it off again.

        Raises:
            InvalidArgumentError: There is no such event, or the hook cannot be called.

        """
        if event not in get_args(EventName):
            raise InvalidArgumentError(
                f"event {event!r} is unknown: choose {', '.join(get_args(EventName))}", event=event
            )
        if not callable(hook):
            raise InvalidArgumentError(
                f"a hook for {event} is a function of one argument, not a {type(hook).__name__}",
                event=event,
            )
        hooks = self._hooks.setdefault(event, [])
        hooks.append(hook)

        def off() -> None:
            with contextlib.suppress(ValueError):  # it is off already
                hooks.remove(hook)

        return off

    def has(self, event: EventName) -> bool:
        """Return whether an event has hooks."""
        return bool(self._hooks.get(event))

    def emit(self, payload: object) -> None:
        """Run the hooks of a payload's event; one that fails is logged and affects nothing else.

        Some of autosave's events are for the log alone, and have no hooks.
        """
        event = NAMES.get(type(payload), "")
        for hook in tuple(self._hooks.get(event, ())):
            try:
                result = hook(payload)
            except BaseException as error:  # noqa: BLE001  # logged, or passed on
                exit_error = exit_in(error)
                if exit_error is not None:
                    self._host.leave(exit_error)
                else:
                    log_facts(log, logging.ERROR, "a hook failed", error, event=event)
            else:
                if result is not None and inspect.isawaitable(result):
                    self._follow(event, result)

    def _follow(self, event: str, result: Awaitable[None]) -> None:
        try:
            self._host.spawn(_finish, event, result)
        except HostClosedError:
            message = "a hook was not run: its manager has ended"
            log_facts(log, logging.WARNING, message, event=event)
            if inspect.iscoroutine(result):
                result.close()

    async def run(self, event: Literal["before_save"], session: object) -> None:
        """Run an event's hooks, and wait for them."""
        for hook in tuple(self._hooks.get(event, ())):
            result = hook(session)
            if inspect.isawaitable(result):
                await result


async def _finish(event: str, result: Awaitable[None]) -> None:
    try:
        await result
    except BaseException as error:
        if was_cancelled(error) or exit_in(error) is not None:
            raise  # the host takes it
        log_facts(log, logging.ERROR, "a hook failed", error, event=event)
