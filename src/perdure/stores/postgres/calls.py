"""Calls to the server: a thread, a connection and a deadline for each; appends without a thread.

Cancelling a caller abandons its call, which runs in its thread to its end, or until it is cut. A
call whose connection turns out to be dead is repeated on a new one, if that is safe; so is one
that the server rolled back in favor of another transaction.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import anyio
import msgspec

from perdure._lib.backoff import backoff
from perdure._lib.loop import Threads
from perdure.errors import PerdureError, StoreUnavailableError
from perdure.store import Batch, ConnectionHook, ConnectionPool, Outcome, Status
from perdure.stores.postgres import leases
from perdure.stores.postgres.connections import (
    Connection,
    Connections,
    Listener,
    Password,
    PostgresSettings,
    password_reader,
)
from perdure.stores.postgres.errors import is_broken, is_rollback
from perdure.stores.postgres.log import AppendMany, HeldSessionsByKey, arrays
from perdure.stores.postgres.schema import Statements, durability_of, migrate

T = TypeVar("T")
P = ParamSpec("P")

PARALLELISM = 2
"""Appends at a time: one is encoded while the server commits the other."""
LONG_TIMEOUT = 3600.0
"""Seconds that a migration, a sweep or a scrub may take."""
MAX_ROLLBACKS = 5
"""Repetitions of a call that the server rolled back to resolve a deadlock."""

MARGIN = 0.1
"""Seconds after a deadline until its connection is cut."""

MAX_BYTES = 1024 * 1024
"""Bytes of payload that are appended from the event loop; encoding more would block it."""

TOGETHER = 64
"""Calls at most that are one transaction."""
TOGETHER_BYTES = 4 * 1024 * 1024
"""Bytes from which on no further call is added to a transaction."""
V = TypeVar("V")
R = TypeVar("R")


class _SharedCall(msgspec.Struct, eq=False):
    """A call that one thread makes together with others."""

    value: Any
    size: int
    result: Any = None
    done: threading.Event = msgspec.field(default_factory=threading.Event)


Function = Callable[Concatenate[Connection, Statements, P], T]


@final
class Calls:
    """An open store's connections and threads."""

    connections: Connections

    def __init__(self, settings: PostgresSettings, sql: Statements) -> None:
        self.durability: str = ""
        self._settings = settings
        self._sql = sql
        self._timeout = settings.timeout
        self._appends = Threads(PARALLELISM, name="perdure:append")
        others = max(settings.connections - PARALLELISM, 1)
        self._others = Threads(others, name="perdure:postgres")
        self._pid = os.getpid()
        self._listener: Listener | None = None
        self._lock = threading.Lock()
        self._together: dict[Callable[..., Any], deque[_SharedCall]] = {}
        """Calls that no thread has taken yet, by what they call."""

    async def open(
        self, owner: str, password: Password | None, hook: ConnectionHook | None
    ) -> None:
        """Connect, create or migrate the tables, and register the owner.

        Raises:
            MissingExtraError: The driver is not installed.
            ConfigError: The URL is not valid, or the database's encoding is not UTF-8.
            StoreUnavailableError: The server cannot be reached, or refuses.
            UnsupportedVersionError: A newer release has created the tables.

        """
        reader = None
        if password is not None:
            reader = password_reader(password, self._settings.location, self._timeout)
        try:
            self.durability = await self._others.run(self._connect, owner, reader, hook)
        except BaseException:
            self._appends.close()
            self._others.close()
            raise

    def _connect(
        self, owner: str, password: Callable[[], str] | None, hook: ConnectionHook | None
    ) -> str:
        self.connections = connections = Connections(self._settings, password, hook)
        try:
            with connections.borrow(LONG_TIMEOUT) as connection:
                migrate(connection, self._sql, self._settings.location)
                leases.register_owner(connection, self._sql, owner)
                return durability_of(connection, self._settings.location)
        except connections.errors as error:
            connections.close()
            raise connections.perdure_error(error, "open") from error
        except BaseException:
            connections.close()
            raise

    @property
    def is_in_this_process(self) -> bool:
        """True if it was opened in this process, not in its parent."""
        return self._pid == os.getpid()

    def pool(self) -> ConnectionPool:
        """Return how many connections there are, and how many calls wait for a thread with one."""
        idle, used = self.connections.counts()
        groups = (self._appends, self._others)
        return ConnectionPool(
            idle=idle,
            used=used,
            waiting=sum(max(threads.busy - threads.most, 0) for threads in groups),
            most=sum(threads.most for threads in groups),
        )

    async def append(
        self, held_sessions: HeldSessionsByKey, batches: Sequence[Batch]
    ) -> list[Outcome]:
        """Append batches: simple ones from the event loop, the others in one thread call."""
        self.connections.cut()
        appends = AppendMany(self._sql, held_sessions, batches)
        with anyio.move_on_after(self._timeout + MARGIN):
            await self._append_from_loop(appends)
            if None in appends.outcomes:
                await self._appends.run(appends.run, self.connections)
        self.connections.cut()
        error = self._no_answer_error("write to", self._timeout)
        return appends.fill_outcomes(Outcome(Status.IN_DOUBT, error))

    async def _append_from_loop(self, appends: AppendMany) -> None:
        """Append without a thread, where a connection is ready and all of it is simple.

        Cancelling it closes the connection: the server has the whole statement, or does nothing.
        """
        statement, connection = self._sql.append, None
        if appends.size <= MAX_BYTES:
            connection = self.connections.take_ready(statement.is_ready)
        if connection is None:
            return
        try:
            ready, unknown = appends.encode_ready()
            # A log has to be read first, which blocks: a thread does all of it.
            if unknown or not ready:
                return
            with (
                self.connections.watched(connection),
                appends.answering(self.connections, connection),
            ):
                ready.sort(key=lambda batch: batch.session.id)
                moved = await statement.exchange(connection, arrays(ready))
                if moved is not None:
                    appends.mark_appended(ready, moved)
        except BaseException:
            connection.close()
            raise
        finally:
            self.connections.give_back(connection)

    async def run_idempotent(
        self, doing: str, function: Function[P, T], *args: P.args, **_: P.kwargs
    ) -> T:
        """Call a function that may be called twice; repeat it once if its connection was dead."""
        return await self._run(doing, function, args, 2, self._timeout)

    async def run_once(
        self,
        doing: str,
        function: Function[P, T],
        *args: P.args,
        **_: P.kwargs,
    ) -> T:
        """Call a function once; after an error it may or may not have taken effect."""
        return await self._run(doing, function, args, 1, self._timeout)

    async def run_together(
        self,
        doing: str,
        function: Callable[[Connection, Statements, Sequence[V]], Sequence[R | Exception]],
        value: V,
        *,
        size: int = 0,
        is_repeatable: bool = True,
    ) -> R:
        """Call a function with the values of all callers that wait, in one transaction.

        Args:
            doing: For messages.
            function: Returns a result, or an error, for each of its values.
            value: This caller's value.
            size: About how many bytes it sends.
            is_repeatable: Whether the function may be called twice.

        """
        waiting = self._together.setdefault(function, deque())
        call = _SharedCall(value, size)
        waiting.append(call)
        timeout = self._timeout
        try:
            with anyio.move_on_after(timeout + MARGIN):
                return await self._others.run(
                    self._call_together, doing, function, waiting, call, is_repeatable
                )
        finally:
            if not call.done.is_set():
                with self._lock, contextlib.suppress(ValueError):  # a thread has taken it
                    waiting.remove(call)
                    call.done.set()  # or its own thread, still to come, would wait for it
        self.connections.cut()
        raise self._no_answer_error(doing, timeout)

    def _call_together(
        self,
        doing: str,
        function: Callable[..., Sequence[Any]],
        waiting: deque[_SharedCall],
        call: _SharedCall,
        is_repeatable: bool,  # noqa: FBT001  # passed on by position
    ) -> Any:
        """Call the function for one caller and for others, unless a thread does so already."""
        calls: list[_SharedCall] = []
        # One thread takes this value with all that wait; the others' threads find theirs taken, and
        # wait.
        with self._lock:
            if call in waiting:
                waiting.remove(call)
                calls, size = [call], call.size
                while waiting and len(calls) < TOGETHER and size < TOGETHER_BYTES:
                    calls.append(waiting.popleft())
                    size += calls[-1].size
        if calls:
            self._finish_together(doing, function, calls, 2 if is_repeatable else 1)
        if not call.done.wait(self._timeout):
            raise self._no_answer_error(doing, self._timeout)
        if isinstance(call.result, Exception):
            raise call.result.with_traceback(None)
        return call.result

    def _finish_together(
        self,
        doing: str,
        function: Callable[..., Sequence[Any]],
        calls: Sequence[_SharedCall],
        tries: int,
    ) -> None:
        parts = [calls]
        while parts:
            part = parts.pop(0)
            values = [call.value for call in part]
            try:
                results = self._call_with_retries(doing, function, (values,), tries, self._timeout)
            except Exception as error:  # noqa: BLE001  # it goes to the callers
                if not getattr(error.__cause__, "sqlstate", None):  # there is no server
                    part = [*part, *(call for other in parts for call in other)]
                    parts = []
                elif len(part) > 1:  # it refused one of them, and rolled all of them back
                    parts = [[call] for call in part]
                    continue
                results = [error] * len(part)
            for call, result in zip(part, results, strict=True):
                call.result = result
                call.done.set()

    async def run_long(
        self, doing: str, function: Function[P, T], *args: P.args, **_: P.kwargs
    ) -> T:
        """Call a function that may be called twice, and may take long."""
        return await self._run(doing, function, args, 2, LONG_TIMEOUT)

    async def _run(
        self,
        doing: str,
        function: Callable[..., T],
        args: tuple[Any, ...],
        tries: int,
        deadline_seconds: float,
    ) -> T:
        with anyio.move_on_after(deadline_seconds + MARGIN):
            return await self._others.run(
                self._call_with_retries, doing, function, args, tries, deadline_seconds
            )
        self.connections.cut()
        raise self._no_answer_error(doing, deadline_seconds)

    def _no_answer_error(self, doing: str, deadline_seconds: float) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"cannot {doing} {self._settings.location}: no answer within {deadline_seconds:g} s: "
            "check the server's load and the network; a connected manager tries again"
        )

    def _call_with_retries(
        self,
        doing: str,
        function: Callable[..., T],
        args: tuple[Any, ...],
        tries: int,
        deadline_seconds: float,
    ) -> T:
        self.connections.cut()
        rollbacks, is_repeatable = 0, tries > 1
        while True:
            with self.connections.borrow(deadline_seconds) as connection:
                try:
                    return function(connection, self._sql, *args)
                except self.connections.errors as error:
                    is_lost = is_broken(error, connection)
                    converted = self.connections.handle_error(error, connection, doing)
                    # Rolled back in favor of another transaction; or the connection was dead, which
                    # a new one is not.
                    if is_repeatable and rollbacks < MAX_ROLLBACKS and is_rollback(error):
                        rollbacks += 1
                    elif tries > 1 and is_lost:
                        tries -= 1
                    else:
                        raise converted from error
            if rollbacks:  # the other transaction needs time to finish, or they deadlock again
                time.sleep(backoff(rollbacks, base=0.2, cap=1.0, chance=random.uniform(0.5, 1.0)))

    def listen(self, owner: str, notify: Callable[[], None]) -> None:
        """Start listening for an owner's notifications; ``notify`` runs on the event loop."""
        if self._listener is None:

            def from_thread() -> None:
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    self._others.post(notify)

            channel = leases.channel_of(self._sql.schema, owner)
            self._listener = Listener(self.connections, channel, from_thread)

    async def close(self, owner: str) -> None:
        """Unregister the owner, if the server answers in time, and close everything."""
        listener = self._listener
        if listener is not None:
            listener.stop()
        try:
            with contextlib.suppress(PerdureError):
                await self._run("close", leases.unregister_owner, (owner,), 1, self._timeout)
            if listener is not None:
                await self._others.run(listener.join, self._timeout)
        finally:
            self.connections.close()
            self._appends.close()
            self._others.close()
