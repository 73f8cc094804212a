"""An engine on an inline store, started and stopped around a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio

from perdure._lib.loop import loop_clock
from perdure._lib.tasks import Host
from perdure.autosave.deadline import Deadline
from perdure.autosave.engine import Autosaver
from perdure.autosave.events import Event
from perdure.autosave.options import Autosave, EngineOptions, Shutdown
from perdure.autosave.tracked import Tracked
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from tests.autosave.inline_store import DirectStore, InlineStore

CALM = Autosave(debounce=2.0, max_delay=10.0)
PLAIN = EngineOptions(jitter=0.0, eager=False)
"""No jitter and no adaption: due times are what the options say."""


class Clock:
    """The loop's clock as an engine reads it: counted, put forward, or cut off once."""

    def __init__(self) -> None:
        self._now = loop_clock()
        self.reads = 0
        self.ahead = 0.0
        self.interrupt: BaseException | None = None

    def __call__(self) -> float:
        self.reads += 1
        if self.interrupt is not None:
            error, self.interrupt = self.interrupt, None
            raise error
        return self._now() + self.ahead


def within(seconds: float, hard_grace: float) -> Deadline:
    """Return the deadline of a close that begins now."""
    options = Shutdown(deadline=seconds, turn_grace=0, hard_grace=hard_grace)
    return Deadline.of(options, anyio.current_time())


def entry(n: int = 0, *, size: int = 0) -> Entry:
    return Entry(MESSAGE, b'{"n":%d,"x":"%s"}' % (n, b"x" * size))


class Rig:
    """What a test works with."""

    def __init__(self, store: InlineStore, host: Host, saver: Autosaver, events: list[Event]):
        self.store = store
        self.host = host
        self.saver = saver
        self.events = events
        self.count = 0

    def track(self, name: str = "a", **options: Any) -> Tracked:
        return self.saver.track(SessionKey(name), epoch=1, head=0, **options)

    def append(self, t: Tracked, count: int = 1, *, size: int = 0) -> int:
        """Append one group of so many records, no two alike."""
        numbers = range(self.count, self.count + count)
        self.count += count
        return self.saver.append(t, tuple(entry(n, size=size) for n in numbers))

    async def outlasts_an_outage(self) -> bool:
        """Whether saving goes on after one: for nothing else is in flight when the store is tried."""
        t = self.track("after an outage")
        self.store.down = True
        self.append(t)
        with anyio.move_on_after(200):
            await self.saver.save(t)
        assert self.saver.health().breaker == "open"
        self.store.down = False
        await anyio.sleep(200)
        return self.stored(t) == 1

    def stored(self, t: Tracked) -> int:
        return len(self.store.logs.get(t.key, []))

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@contextlib.asynccontextmanager
async def rig(
    store: InlineStore | None = None,
    *,
    autosave: Autosave | None = CALM,
    engine: EngineOptions = PLAIN,
    clock: Clock | None = None,
) -> AsyncIterator[Rig]:
    store = store or InlineStore()
    host = Host()
    await host.start()
    if isinstance(store, DirectStore):
        store.host = host
    events: list[Event] = []
    saver = Autosaver(
        store,  # type: ignore[arg-type]  # as much of a store as the engine uses
        host,
        autosave=autosave,
        engine=engine,
        clock=clock or loop_clock(),
        seed=0,
        on_event=events.append,
    )
    try:
        yield Rig(store, host, saver, events)
    finally:
        await host.aclose()
    assert store.breaches == []
