"""What a task is in the middle of, and with it every task that it has started meanwhile.

So that what can never be waited for is refused at once: whoever is inside waits for the end
of something that itself waits for them. `Host.call` carries it along into the background.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, final


@final
class TaskScope:
    """One stay in the middle of something; it keeps nothing in memory once it is over."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of: object = of

    def leave(self) -> None:
        """End it, also for tasks that run on."""
        self.of = None
        stays.set(tuple([stay for stay in stays.get() if stay.of is not None]))


stays: Final[ContextVar[tuple[TaskScope, ...]]] = ContextVar("perdure_stays", default=())


def enter(of: object) -> TaskScope:
    """Begin a stay of this task, and of every task that it starts from now on."""
    stay = TaskScope(of)
    stays.set((*stays.get(), stay))
    return stay


def is_within(of: object) -> bool:
    """Whether this task is in the middle of something, or was started there and it goes on."""
    return any(stay.of is of for stay in stays.get())


def is_within_any(kind: type) -> bool:
    """Whether this task is in the middle of something of a type."""
    return any(type(stay.of) is kind for stay in stays.get())
