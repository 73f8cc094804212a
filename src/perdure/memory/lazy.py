"""A value that loads when it is first awaited, once, however many wait for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Lazy(Generic[T]):
    """Load a value at the first touch.

    Concurrent first touches share one load. One that fails, or is cancelled, leaves the value
    unloaded, and the next touch tries again.
    """

    __slots__ = ("_load", "_lock", "value")

    def __init__(self, load: Callable[[], Awaitable[T]]) -> None:
        self._load = load
        self._lock: anyio.Lock | None = None
        self.value: T | None = None
        """None until it is loaded."""

    async def get(self) -> T:
        """Return the value, loaded if need be."""
        if self.value is None:
            if self._lock is None:  # made late: most sessions never touch their memory
                self._lock = anyio.Lock()
            async with self._lock:
                if self.value is None:
                    self.value = await self._load()
        return self.value
