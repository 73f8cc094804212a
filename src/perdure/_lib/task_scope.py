"""The scopes that a task is inside of, inherited by the tasks that it starts there.

They detect deadlocks at once: a task inside a scope must not wait for something that waits for the
scope's end. `Host.call` passes them on to the background task.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, final


@final
class TaskScope:
    """One scope that a task is inside of; it references nothing once it has ended."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of: object = of

    def leave(self) -> None:
        """End it, also for tasks that continue to run."""
        self.of = None
        stays.set(tuple([stay for stay in stays.get() if stay.of is not None]))


stays: Final[ContextVar[tuple[TaskScope, ...]]] = ContextVar("perdure_stays", default=())


def enter(of: object) -> TaskScope:
    """Enter a scope with this task, and with every task that it starts from now on."""
    stay = TaskScope(of)
    stays.set((*stays.get(), stay))
    return stay


def is_within(of: object) -> bool:
    """Return whether this task is inside the scope of an object, or was started there."""
    return any(stay.of is of for stay in stays.get())


def is_within_any(kind: type) -> bool:
    """Return whether this task is inside the scope of any object of a type."""
    return any(type(stay.of) is kind for stay in stays.get())
