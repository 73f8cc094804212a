"""Blocking managers over one place, a store whose appends wait at a gate, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import pytest

import perdure.sync
from perdure import Shutdown
from perdure.store import Batch, Outcome
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.sync import Session, SessionManager

Connect = Callable[..., SessionManager]


class GatedStore:
    """A memory store whose appends wait while the gate is closed."""

    def __init__(self, backing: MemoryBacking) -> None:
        self._store = MemoryStore(backing=backing)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        self.entered.set()
        await anyio.to_thread.run_sync(self.gate.wait)
        return await self._store.append_many(batches)


def phases(backing: MemoryBacking, session: Session) -> list[str]:
    """Return what the log says of a session's turns."""

    async def read() -> list[str]:
        log = MemoryStore(backing=backing).read_log(session.key)
        async with contextlib.aclosing(log):
            records = [record async for chunk in log for record in chunk.records]
        return [json.loads(one.payload)["phase"] for one in records if one.kind == "turn"]

    return anyio.run(read)


@pytest.fixture
def backing() -> MemoryBacking:
    return MemoryBacking()


@pytest.fixture
def again(backing: MemoryBacking) -> Connect:
    """Return a connect() that always leads to the same place, each time as a new process."""

    def make(**options: Any) -> SessionManager:
        options.setdefault("shutdown", Shutdown(signals=False))
        return perdure.sync.connect(MemoryStore(backing=backing), **options)

    return make


@pytest.fixture
def gated(backing: MemoryBacking) -> Iterator[GatedStore]:
    store = GatedStore(backing)
    yield store
    store.gate.set()


@pytest.fixture
def ctrl_c_when() -> Iterator[Callable[[threading.Event], None]]:
    """Return what sends Ctrl-C to the main thread once an event is set."""
    threads: list[threading.Thread] = []

    def arrange(event: threading.Event) -> None:
        def send() -> None:
            assert event.wait(30)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threads.append(threading.Thread(target=send))
        threads[-1].start()

    yield arrange
    for thread in threads:
        thread.join()
