"""One thing at a time with a session: its load, its close, a change of it from outside.

Whoever does such a thing has the session's flight; others wait until it has landed, or leave it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

import anyio

from perdure.model.keys import SessionKey

__all__ = ["Flight", "Flights", "alone", "alone_at_once", "landed"]


class Flight:
    """Something under way with a session, for others to wait for."""

    __slots__ = ("done", "error", "scope")

    def __init__(self) -> None:
        self.done: anyio.Event = anyio.Event()
        self.error: Exception | None = None
        """Why a load has failed."""
        self.scope: anyio.CancelScope = anyio.CancelScope()
        """Around a load, if it is one: nobody wants that any more once its manager stops."""


Flights: TypeAlias = dict[SessionKey, Flight]
"""What is under way, one a session at most."""


async def landed(flights: Flights, key: SessionKey) -> None:
    """Wait until nothing is under way with a session."""
    while (flight := flights.get(key)) is not None:
        await flight.done.wait()


@asynccontextmanager
async def alone(flights: Flights, key: SessionKey) -> AsyncGenerator[None, None]:
    """Be alone with a session, once others are done with it."""
    await landed(flights, key)
    with alone_at_once(flights, key):
        yield


@contextmanager
def alone_at_once(flights: Flights, key: SessionKey) -> Iterator[bool]:
    """Be alone with a session; False if somebody is already, and then one is not."""
    if key in flights:
        yield False
        return
    flight = flights[key] = Flight()
    try:
        yield True
    finally:
        del flights[key]
        flight.done.set()
