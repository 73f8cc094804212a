"""How a call reaches the server: one hop into a thread, there a connection, and a deadline.

Cancelling a caller abandons its call, which goes on in its thread to its end, or until it is
cut. A call that finds its connection dead is made again on a new one, if that is safe; so is
one that gave way to another transaction.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import anyio

from perdure._lib.backoff import backoff
from perdure._lib.threads import Threads
from perdure.errors import PerdureError, StoreUnavailableError
from perdure.store import Batch, Outcome, Status
from perdure.stores.postgres import direct, leases, log
from perdure.stores.postgres.connections import Connection, Connections, Password, password_reader
from perdure.stores.postgres.errors import gave_way, is_broken
from perdure.stores.postgres.listener import Listener
from perdure.stores.postgres.rows import Holding
from perdure.stores.postgres.schema import durability_of, migrate
from perdure.stores.postgres.settings import PostgresSettings
from perdure.stores.postgres.statements import Statements

T = TypeVar("T")
P = ParamSpec("P")

PARALLELISM = 2
"""Appends at a time: one is encoded while the server commits the other."""
LONG = 3600.0
"""Seconds that a migration, a sweep or a scrub may take."""
GIVE_WAY = 5
"""How often a call is made again after the server chose it to end a deadlock."""
LEAVE = 2.0
"""Seconds that closing waits for the server to hear of it."""

MARGIN = 0.1
"""Seconds after a deadline until its connection is cut."""

Function = Callable[Concatenate[Connection, Statements, P], T]


@final
class Calls:
    """An open store's connections and threads."""

    def __init__(
        self, settings: PostgresSettings, sql: Statements, connections: Connections, others: Threads
    ) -> None:
        self.connections = connections
        self.durability = ""
        self.post: Callable[..., object] = others.post
        """Runs a function soon on the event loop."""
        self._sql = sql
        self._location = settings.location
        self._timeout = settings.timeout
        self._appends = Threads(PARALLELISM, name="perdure append")
        self._others = others
        self._pid = os.getpid()
        self._listener: Listener | None = None

    @property
    def is_here(self) -> bool:
        """Whether it was opened in this process."""
        return self._pid == os.getpid()

    async def append(self, holding: Holding, batches: Sequence[Batch]) -> list[Outcome]:
        """Append batches: from here if that is plain, else in one hop."""
        self.connections.cut()
        outcomes: list[Outcome | None] = [None] * len(batches)
        with anyio.move_on_after(self._timeout + MARGIN):
            outcomes = await direct.append(self.connections, self._sql, holding, batches)
            rest = [place for place, outcome in enumerate(outcomes) if outcome is None]
            if rest:
                left = [batches[place] for place in rest]
                found = await self._appends.run(
                    log.append, self.connections, self._sql, holding, left
                )
                for place, outcome in zip(rest, found, strict=True):
                    outcomes[place] = outcome
        self.connections.cut()
        silent = Outcome(Status.IN_DOUBT, self._silent("write to", self._timeout))
        return [silent if outcome is None else outcome for outcome in outcomes]

    async def again(self, doing: str, function: Function[P, T], *args: P.args, **_: P.kwargs) -> T:
        """Call a function that may be called twice: once more if its connection was dead."""
        return await self._run(doing, function, args, 2, self._timeout)

    async def once(
        self,
        doing: str,
        function: Function[P, T],
        *args: P.args,
        **_: P.kwargs,
    ) -> T:
        """Call a function with a connection; whether it had its effect may stay open."""
        return await self._run(doing, function, args, 1, self._timeout)

    async def long(self, doing: str, function: Function[P, T], *args: P.args, **_: P.kwargs) -> T:
        """Call a function that may be called twice, and may take long."""
        return await self._run(doing, function, args, 2, LONG)

    async def _run(
        self,
        doing: str,
        function: Callable[..., T],
        args: tuple[Any, ...],
        tries: int,
        patience: float,
    ) -> T:
        with anyio.move_on_after(patience + MARGIN):
            return await self._others.run(self._work, doing, function, args, tries, patience)
        self.connections.cut()
        raise self._silent(doing, patience)

    def _silent(self, doing: str, patience: float) -> StoreUnavailableError:
        message = (
            f"cannot {doing} {self._location}: no answer within {patience:g} s: look at the "
            "server's load and at the network; saving goes on by itself"
        )
        return StoreUnavailableError(message)

    def _work(
        self,
        doing: str,
        function: Callable[..., T],
        args: tuple[Any, ...],
        tries: int,
        patience: float,
    ) -> T:
        self.connections.cut()
        gave, repeatable = 0, tries > 1
        while True:
            with self.connections.borrow(patience) as connection:
                try:
                    return function(connection, self._sql, *args)
                except self.connections.errors as error:
                    if repeatable and gave < GIVE_WAY and gave_way(error):
                        gave += 1
                    elif tries > 1 and is_broken(error, connection):
                        tries -= 1
                    else:
                        raise self.connections.failed(error, connection, doing) from error
            if gave:  # the other one needs a moment to go on, or both meet again
                time.sleep(backoff(gave, base=0.2, cap=1.0, chance=random.uniform(0.5, 1.0)))

    def listen(self, owner: str, notify: Callable[[], None]) -> None:
        """Begin to listen for an owner's news; ``notify`` is called on the event loop."""
        if self._listener is None:

            def from_thread() -> None:
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    self.post(notify)

            channel = leases.channel_of(self._sql.schema, owner)
            self._listener = Listener(self.connections, channel, from_thread)

    async def close(self, owner: str) -> None:
        """Say that the owner leaves, if the server hears it in time, and close everything."""
        listener = self._listener
        if listener is not None:
            listener.stop()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(LEAVE), contextlib.suppress(PerdureError):
                await self._run("close", leases.leave, (owner,), 1, LEAVE)
            if listener is not None:
                with anyio.move_on_after(LEAVE):
                    await self._others.run(listener.join, LEAVE)
        self.connections.close()
        self._appends.close()
        self._others.close()


async def open_calls(
    settings: PostgresSettings, sql: Statements, owner: str, password: Password | None = None
) -> Calls:
    """Connect, make or update the tables, and make the owner known.

    Raises:
        MissingExtraError: The driver is not installed.
        ConfigError: The URL is not one, or the database's encoding is not UTF-8.
        StoreUnavailableError: The server cannot be reached, or refuses.
        UnsupportedVersionError: A newer release has made the tables.

    """
    others = Threads(max(settings.connections - PARALLELISM, 1), name="perdure postgres")
    try:
        reader = None
        if password is not None:
            reader = password_reader(password, settings.location, settings.timeout)
        connections, durability = await others.run(_enter, settings, sql, owner, reader)
    except BaseException:
        others.close()
        raise
    calls = Calls(settings, sql, connections, others)
    calls.durability = durability
    return calls


def _enter(
    settings: PostgresSettings, sql: Statements, owner: str, password: Callable[[], str] | None
) -> tuple[Connections, str]:
    connections = Connections(settings, password)
    try:
        with connections.borrow(LONG) as connection:
            migrate(connection, settings.schema, settings.location)
            leases.enter(connection, sql, owner)
            return connections, durability_of(connection, settings.location)
    except connections.errors as error:
        connections.close()
        raise connections.mapped(error, "open") from error
    except BaseException:
        connections.close()
        raise
