"""Waiting for what is sure to come, also where the one who waits is cancelled."""

from __future__ import annotations

import anyio

__all__ = ["wait_through"]


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
