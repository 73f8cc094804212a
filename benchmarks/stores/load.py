"""The load: sessions that talk at once, what reached the store, and how late the loop came."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.chat import Chat
from benchmarks.timing import Lag
from perdure import Autosave, Message, Shutdown
from perdure.store import Batch, Outcome, Store
from perdure.stores.delegate import DelegatingStore

__all__ = ["Part", "Recorder", "Talk", "connected"]

PER_TURN = 4
"""Messages, and so records, of a turn."""


class Part(NamedTuple):
    """What one session had in a batch."""

    session: int
    turns: tuple[tuple[Message, ...], ...]


class Recorder(DelegatingStore):
    """A store that notes the sizes of the batches that it is given."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.batches: list[list[tuple[str, int]]] | None = None

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """See the port."""
        if self.batches is not None:
            self.batches.append([(one.key.agent, len(one.records)) for one in batches])
        return await self.inner.append_many(batches)


class Talk:
    """Sessions in conversation."""

    def __init__(self, sessions: list[Any], recorder: Recorder) -> None:
        self._sessions = sessions
        self._recorder = recorder
        self._chats = [Chat(n) for n in range(len(sessions))]
        self._number = {session.id: n for n, session in enumerate(sessions)}
        self.lag = Lag()

    async def round(self, turns: int) -> tuple[float, list[list[Part]]]:
        """Let each session have some turns; return the time, and what the store was given."""
        said = [[chat.turn().messages for _ in range(turns)] for chat in self._chats]
        # What was made beforehand is nobody's garbage: without this, looking through half a
        # million messages takes a quarter of a second, in whichever side's time it falls.
        gc.collect()
        gc.freeze()
        recorded = self._recorder.batches = []
        async with anyio.create_task_group() as watching:
            watching.start_soon(self.lag.watch)
            start = perf_counter()
            async with anyio.create_task_group() as group:
                for session, mine in zip(self._sessions, said, strict=True):
                    group.start_soon(_talk, session, mine)
            took = perf_counter() - start
            watching.cancel_scope.cancel()
        self._recorder.batches = None
        return took, self._parts(recorded, said)

    def _parts(
        self, recorded: list[list[tuple[str, int]]], said: list[list[tuple[Message, ...]]]
    ) -> list[list[Part]]:
        """Return which turns were in which batch."""
        left = [iter(mine) for mine in said]
        found = []
        for batch in recorded:
            parts = []
            for name, records in batch:
                at = self._number[name]
                turns = tuple(next(left[at]) for _ in range(records // PER_TURN))
                parts.append(Part(at, turns))
            found.append(parts)
        return found


async def _talk(session: Any, turns: list[tuple[Message, ...]]) -> None:
    for messages in turns:
        for message in messages:
            session.append(message)
        await session.save()


@asynccontextmanager
async def connected(store: Store, count: int, prefix: str = "agent") -> Any:
    """Open sessions on a store."""
    recorder = Recorder(store)
    shutdown = Shutdown(deadline=120, signals=False)
    async with perdure.connect(recorder, autosave=Autosave(), shutdown=shutdown) as sessions:
        opened = [await sessions.open(f"{prefix}-{n:04d}") for n in range(count)]
        yield Talk(opened, recorder)
