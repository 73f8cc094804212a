"""Hooks of a manager: events by name, delivered to plain or async functions."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal, get_args

import msgspec

from perdure._lib.host import Host, HostClosedError
from perdure._lib.signals import exit_in
from perdure._lib.tasks import was_cancelled
from perdure.errors import InvalidArgumentError
from perdure.restore.report import RestoreReport


class SessionOpened(msgspec.Struct, frozen=True):
    """A session was loaded."""

    session: str
    epoch: int
    report: RestoreReport


class SessionClosed(msgspec.Struct, frozen=True):
    """A session left memory: closed, hibernated, handed over or deleted."""

    session: str
    why: str
    version: int


class SessionFolded(msgspec.Struct, frozen=True):
    """Documents were folded as of a record."""

    session: str
    as_of_seq: int


class SessionFoldFailed(msgspec.Struct, frozen=True):
    """A fold failed; nothing is lost by it, the next one will do its work."""

    session: str
    error: Exception


class MemoryEvicted(msgspec.Struct, frozen=True):
    """Entries of a working memory went, to make room for a new value."""

    session: str
    keys: tuple[str, ...]
    """Least in priority first."""
    bytes: int
    """Of their values."""


class SessionPosted(msgspec.Struct, frozen=True):
    """What others posted has entered a session that is open here; autosave makes it durable."""

    session: str
    keys: tuple[str, ...]
    """The keys of the posts."""
    version: int
    """The seq of the newest record of it."""


# What users are told: events by name, to plain or async functions


log: logging.Logger = logging.getLogger("perdure")

EventName = Literal[
    "before_save",
    "saved",
    "save_failed",
    "quarantined",
    "lost",
    "degraded",
    "recovered",
    "loop_blocked",
    "store_warned",
    "stalled",
    "resumed",
    "opened",
    "closed",
    "folded",
    "fold_failed",
    "memory_evicted",
    "posted",
    "drain",
]
"""``before_save`` gets the session, and is awaited before a due save captures what to
write; all others get an event with facts, after it has happened."""

Hook = Callable[[Any], Awaitable[None] | None]


class Hooks:
    """Functions by the event that they wait for."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._hooks: dict[str, list[Hook]] = {}

    def on(self, event: EventName, hook: Hook) -> Callable[[], None]:
        """Call ``hook`` at each event; return what takes it off again.

        Raises:
            InvalidArgumentError: There is no such event, or the hook cannot be called.

        """
        if event not in get_args(EventName):
            message = f"event {event!r} is unknown: choose {', '.join(get_args(EventName))}"
            raise InvalidArgumentError(message, event=event)
        if not callable(hook):
            message = (
                f"a hook for {event} is a function of one argument, not a {type(hook).__name__}"
            )
            raise InvalidArgumentError(message, event=event)
        hooks = self._hooks.setdefault(event, [])
        hooks.append(hook)

        def off() -> None:
            with contextlib.suppress(ValueError):  # it is off already
                hooks.remove(hook)

        return off

    def has(self, event: EventName) -> bool:
        """Whether an event has hooks."""
        return bool(self._hooks.get(event))

    def emit(self, event: EventName, facts: object) -> None:
        """Run an event's hooks; one that fails is logged and affects nothing else."""
        for hook in tuple(self._hooks.get(event, ())):
            try:
                result = hook(facts)
            except BaseException as error:
                exit_error = exit_in(error)
                if exit_error is not None:
                    self._host.leave(exit_error)
                else:
                    log.exception("a hook failed", extra={"event": event})
            else:
                if inspect.isawaitable(result):
                    self._follow(event, result)

    def _follow(self, event: str, result: Awaitable[None]) -> None:
        try:
            self._host.spawn(_finish, event, result)
        except HostClosedError:
            log.warning("a hook was not run: its manager has ended", extra={"event": event})
            if inspect.iscoroutine(result):
                result.close()

    async def run(self, event: EventName, facts: object) -> None:
        """Run an event's hooks, and wait for them."""
        for hook in tuple(self._hooks.get(event, ())):
            result = hook(facts)
            if inspect.isawaitable(result):
                await result


async def _finish(event: str, result: Awaitable[None]) -> None:
    try:
        await result
    except BaseException as error:
        if was_cancelled(error) or exit_in(error) is not None:
            raise  # the host takes it
        log.exception("a hook failed", extra={"event": event})
