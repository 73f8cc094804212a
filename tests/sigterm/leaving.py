"""A process that is just leaving its manager when it is told to end: ``… ROOT RUNNER``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import anyio

import perdure
from perdure import Message
from perdure.store import Batch, Outcome
from perdure.stores.delegate import DelegatingStore
from tests.runners import run
from tests.sigterm.child import tell


class Slow(DelegatingStore):
    """A store that tells when it is asked to save, and takes its time."""

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        tell("saving")
        await anyio.sleep(0.2)
        return await self.inner.append_many(batches)


async def main(root: str) -> None:
    store = Slow(perdure.store_for(root))
    async with perdure.connect(store, autosave=None) as sessions:  # type: ignore[arg-type]
        session = await sessions.open("s0")
        session.append(Message.user("s0:1"))
        tell("s0:1")


if __name__ == "__main__":
    run(sys.argv[2], partial(main, sys.argv[1]))
