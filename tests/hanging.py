"""A store, one method of which hangs from some moment on."""

from __future__ import annotations

import inspect
from typing import Any

import anyio
import msgspec

from perdure.store import Capabilities, Store
from perdure.stores.delegate import DelegatingStore

METHODS = [
    name for name, value in inspect.getmembers(Store, callable) if name[0] != "_" and name != "open"
]
"""Which may hang once the store is open."""
EVERY, HELD = "every method", "every method but acquire"


class Hanging(DelegatingStore):
    """A store of batches of one session.

    Args:
        store: What does the work.
        method: Which hangs, as long as `hangs` is set; `EVERY` for all, `HELD`
            for those that follow it.
        only: If it is ``append_many``: for agents whose ids begin so.

    """

    def __init__(self, store: Store, method: str, only: str = "") -> None:
        super().__init__(store)
        self.hangs = False
        for name in METHODS if method in (EVERY, HELD) else [method]:
            if method != HELD or name != "acquire":
                self._intercept(name, only)

    def _intercept(self, method: str, only: str) -> None:
        whole = getattr(self, method)

        async def call(*args: Any, **options: Any) -> Any:
            if self.hangs and (not only or args[0][0].key.agent.startswith(only)):
                await anyio.sleep_forever()
            return await whole(*args, **options)

        async def chunks(*args: Any, **options: Any) -> Any:
            if self.hangs:
                await anyio.sleep_forever()
            async for chunk in whole(*args, **options):
                yield chunk

        setattr(self, method, chunks if method == "read_log" else call)

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, batch_max=1)
