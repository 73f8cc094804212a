"""Whether one task waits for another to end, as far as the event loop can tell.

On trio that is exact: who opened the nursery waits. On asyncio tasks may run on without
anybody, so it is asked what the one waits for at this moment: the other, a future that its
end completes (``gather``, ``wait``, ``wait_for``, ``shield``), or the end of its task group.
What goes another way round, such as an event that the other would set, nobody can know.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, final

__all__ = ["ThisTask"]

LONGEST = 32
"""Tasks that may wait for each other in a row."""


@final
class ThisTask:
    """The task that makes it, and the nurseries that it is in by then."""

    __slots__ = ("_before", "_nurseried", "_task")

    def __init__(self) -> None:
        trio = sys.modules.get("trio")
        self._nurseried = trio is not None and trio.lowlevel.in_trio_run()
        if trio is not None and self._nurseried:
            self._task: Any = trio.lowlevel.current_task()
            self._before = len(self._task.child_nurseries)
            return
        import asyncio

        self._task, self._before = asyncio.current_task(), 0

    def waits_for(self, other: ThisTask) -> bool:
        """Whether it cannot go on before another has ended: because of what it began since."""
        if self._nurseried:
            return _in_nursery(self._task.child_nurseries[self._before :], other._task)
        return _on_asyncio(self._task, other._task)


def _in_nursery(nurseries: list[Any], task: Any) -> bool:
    nursery = task.parent_nursery
    while nursery is not None:
        if nursery in nurseries:
            return True
        nursery = nursery.parent_task.parent_nursery
    return False


def _on_asyncio(waiter: Any, other: Any) -> bool:
    completed = list(_completed_by(other))
    for _ in range(LONGEST):
        waiter = getattr(waiter, "_fut_waiter", None)
        if waiter is None:
            return False
        if waiter is other or any(one is waiter for one in completed):
            return True
    return False


def _completed_by(task: Any) -> Iterator[Any]:
    """Find the futures that the end of a task completes."""
    for callback, _ in getattr(task, "_callbacks", None) or ():
        found = [getattr(callback, "__self__", None), *getattr(callback, "args", ())]
        for cell in getattr(callback, "__closure__", None) or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        for one in found:
            yield one
            yield getattr(one, "_on_completed_fut", None)  # of a task group
