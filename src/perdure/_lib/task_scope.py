"""The scopes that a task is inside of, inherited by the tasks that it starts there.

`stays` detect deadlocks at once: a task inside a scope must not wait for something that waits for
the scope's end. `Host.call` passes them on to the background task. `turns` has the turn that
a task works for. A scope is emptied at its end and never reset by a token, so it may be left
in another context than it was entered in.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final, TypeAlias, final


@final
class TaskScope:
    """One scope that a task is inside of; it references nothing once it has ended."""

    __slots__ = ("_kind", "of")

    def __init__(self, of: object, kind: Scopes) -> None:
        self.of: object = of
        self._kind = kind

    def leave(self) -> None:
        """End it, also for tasks that continue to run."""
        if self.of is None:
            return
        self.of = None
        self._kind.set(tuple([scope for scope in self._kind.get() if scope.of is not None]))


Scopes: TypeAlias = ContextVar[tuple[TaskScope, ...]]

stays: Final[Scopes] = ContextVar("perdure_stays", default=())
turns: Final[Scopes] = ContextVar("perdure_turns", default=())


def enter(of: object, kind: Scopes = stays) -> TaskScope:
    """Enter a scope with this task, and with every task that it starts from now on."""
    scope = TaskScope(of, kind)
    # Without those that were left in other tasks.
    kind.set((*[one for one in kind.get() if one.of is not None], scope))
    return scope


def is_within(of: object, scopes: tuple[TaskScope, ...] | None = None) -> bool:
    """Return whether a task, by default this one, is in the scope of an object, or began there.

    Args:
        of: The object.
        scopes: That the task is inside of; None for this task's `stays`.

    """
    for scope in stays.get() if scopes is None else scopes:  # noqa: SIM110  # for each append
        if scope.of is of:
            return True
    return False


def is_within_any(kind: type) -> bool:
    """Return whether this task is inside the scope of any object of a type."""
    return any(type(stay.of) is kind for stay in stays.get())
