"""Listener: a separate connection on which the server sends notifications.

A thread that sleeps until the server writes. While it cannot reach the server it retries with
back-off and reports nothing: the waiting task wakes up by its own timeout.
"""

from __future__ import annotations

import contextlib
import random
import select
import threading
from collections.abc import Callable
from typing import final

from perdure._lib.backoff import backoff
from perdure.errors import PerdureError
from perdure.stores.postgres.connections import Connection, Connections

_SLOWEST = 5.0
"""Seconds between two attempts to connect, at most."""
_PING = 30.0
"""Seconds of silence after which the server is pinged."""


@final
class Listener:
    """Call ``notify`` from a thread for each notification, and when some may have been missed."""

    def __init__(self, connections: Connections, channel: str, notify: Callable[[], None]) -> None:
        self._connections = connections
        self._channel = channel
        self._notify = notify
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="perdure listen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, without waiting for it."""
        self._stopped.set()
        with self._lock:
            if self._connection is not None:
                self._connections.shut_down(self._connection)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended; blocking."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(PerdureError, self._connections.errors, OSError):
                self._listen()
            self._failures += 1
            chance = 0.5 + random.random() / 2
            self._stopped.wait(backoff(self._failures, base=0.1, cap=_SLOWEST, chance=chance))

    def _listen(self) -> None:
        with self._connections.connect() as connection:
            with self._lock:
                if self._stopped.is_set():
                    return
                self._connection = connection
            try:
                connection.execute(f"LISTEN {self._channel}".encode(), prepare=False)
                self._failures = 0
                self._notify()
                self._wait_for_notifications(connection)
            finally:
                with self._lock:
                    self._connection = None

    def _wait_for_notifications(self, connection: Connection) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        while not self._stopped.is_set():
            if not poll.poll(_PING * 1000):
                connection.execute(b"SELECT 1", prepare=False)
            connection.pgconn.consume_input()
            is_notified = False
            while connection.pgconn.notifies() is not None:
                is_notified = True
            if is_notified:
                self._notify()
