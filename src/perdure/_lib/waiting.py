"""Cancellation: waiting through one, and telling one's own from somebody else's."""

from __future__ import annotations

import anyio

from perdure._lib.clock import on_trio

__all__ = ["wait_through", "was_cancelled"]


def was_cancelled(error: BaseException) -> bool:
    """Whether an exception says that this very task is cancelled.

    On asyncio user code may bring one from elsewhere, by awaiting a task that was cancelled: that
    is a failure as any other.
    """
    if on_trio():
        from trio import Cancelled

        return isinstance(error, Cancelled)
    import asyncio

    task = asyncio.current_task()  # none, where a bare callback is called
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def wait_through(done: anyio.Event) -> None:
    """Wait for an event that is sure to come, cancellation or not; then be cancelled."""
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not done.is_set():
            try:
                await done.wait()
            except anyio.get_cancelled_exc_class() as error:  # a native cancel passes a shield
                cancelled = error
    if cancelled is not None:
        raise cancelled
