"""A store around a store that a test takes down, brings up, and lets fail at will.

`FaultyStore` says before a run which calls will fail, by counting; this one is told while
the run goes on. What a failing call does is `FaultyStore`'s business in both cases.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import final

from perdure.errors import ConfigError
from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.store import (
    Asked,
    Batch,
    Capabilities,
    DeadLetter,
    Documents,
    Grant,
    Holder,
    InboxLimit,
    LogChunk,
    Outcome,
    Posted,
    SessionInfo,
    Store,
    Swept,
)
from perdure.testing.faulty import FaultyStore, How

__all__ = ["Faults", "SwitchedStore"]

_METHODS = {name for name, value in vars(Store).items() if name[0] != "_" and callable(value)}


@final
class Faults:
    """Which calls fail next; several stores, one after the other, may share it."""

    def __init__(self) -> None:
        self.is_down: bool = False
        self._planned: list[tuple[str | None, How]] = []

    def plan(self, method: str | None, how: How, times: int) -> None:
        """Let the next calls of a method fail, or of any for None."""
        self._planned += [(method, how)] * times

    def forget(self) -> None:
        """Let nothing fail any more."""
        self.is_down = False
        self._planned.clear()

    def take(self, method: str) -> How | None:
        """Return how this call fails, None if it does not."""
        for place, (planned, how) in enumerate(self._planned):
            if planned in (None, method):
                del self._planned[place]
                return how
        # Closing takes nobody else: a store that is down can still be given up.
        return "transient" if self.is_down and method != "aclose" else None


@final
class SwitchedStore:
    """Pass every call on to a store, unless the test has switched it off.

    Args:
        store: The store that does the work.
        faults: What fails; stores that share it go down together.

    Example:
        >>> from perdure.stores.memory import MemoryStore
        >>> store = SwitchedStore(MemoryStore())
        >>> store.down()
        >>> store.is_down
        True

    """

    def __init__(self, store: Store, *, faults: Faults | None = None) -> None:
        self._store = store
        self._faults = faults or Faults()

    # the switches

    @property
    def is_down(self) -> bool:
        """Whether every call fails."""
        return self._faults.is_down

    def down(self) -> None:
        """Fail every call from now on, as a store that cannot be reached."""
        self._faults.is_down = True

    def up(self) -> None:
        """Work again, and forget the failures that were still to come."""
        self._faults.forget()

    def fail_next(
        self, method: str | None = "append_many", *, how: How = "transient", times: int = 1
    ) -> None:
        """Let the next calls fail.

        Args:
            method: Of which method; None for the next calls of all.
            how: As of `FaultyStore`: ``transient`` may be tried again, ``permanent`` never
                works, ``in_doubt_applied`` had its effect but does not say so, …
            times: How many.

        Raises:
            ConfigError: A store has no such method, cannot fail in that way while its process
                goes on, or that is no number of calls.

        """
        if method is not None and method not in _METHODS:
            message = f"fail_next({method!r}): a store has no such method; see perdure.store.Store"
            raise ConfigError(message, method=method)
        if how.startswith("crash"):
            message = f"fail_next(how={how!r}): to crash a manager, use `await sandbox.reopen()`"
            raise ConfigError(message, how=how)
        if times < 1:
            message = f"fail_next: times={times} does not fit: it must be at least 1"
            raise ConfigError(message, times=times)
        self._faults.plan(method, how, times)

    def _to(self, method: str) -> Store:
        how = self._faults.take(method)
        return self._store if how is None else FaultyStore(self._store, how=how)

    # the port

    @property
    def capabilities(self) -> Capabilities:
        """The inner store's."""
        return self._store.capabilities

    @property
    def owner(self) -> str:
        """The inner store's."""
        return self._store.owner

    @property
    def location(self) -> str:
        """The inner store's."""
        return self._store.location

    async def open(self) -> None:
        """See the port."""
        await self._to("open").open()

    async def aclose(self) -> None:
        """See the port; works while the store is down."""
        await self._to("aclose").aclose()

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """See the port."""
        return await self._to("append_many").append_many(batches)

    def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """See the port."""
        store = self._to("read_log")
        return store.read_log(key, after=after, before=before, limit=limit, reverse=reverse)

    async def head(self, key: SessionKey) -> int:
        """See the port."""
        return await self._to("head").head(key)

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """See the port."""
        return await self._to("trim").trim(key, epoch, below)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """See the port."""
        return await self._to("read_documents").read_documents(key, names)

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """See the port."""
        await self._to("write_documents").write_documents(key, documents, manifest)

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """See the port."""
        await self._to("put_blobs").put_blobs(tenant, blobs)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """See the port."""
        return await self._to("get_blob").get_blob(tenant, name)

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> Swept:
        """See the port."""
        return await self._to("sweep").sweep(tenant, reachable, older_than)

    async def blob_names(self, tenant: str) -> list[str]:
        """See the port."""
        return await self._to("blob_names").blob_names(tenant)

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        """See the port."""
        return await self._to("remove_blobs").remove_blobs(tenant, names)

    async def holder(self, key: SessionKey) -> Holder | None:
        """See the port."""
        return await self._to("holder").holder(key)

    async def acquire(self, key: SessionKey, *, after: int) -> Grant:
        """See the port."""
        return await self._to("acquire").acquire(key, after=after)

    async def release(self, key: SessionKey, epoch: int) -> None:
        """See the port."""
        await self._to("release").release(key, epoch)

    async def heartbeat(self) -> Asked:
        """See the port."""
        return await self._to("heartbeat").heartbeat()

    async def news(self, at_most: float) -> None:
        """See the port."""
        await self._to("news").news(at_most)

    async def request_handover(self, key: SessionKey, holder: Holder) -> None:
        """See the port."""
        await self._to("request_handover").request_handover(key, holder)

    async def post(
        self, key: SessionKey, items: Sequence[Posted], *, limit: InboxLimit | None = None
    ) -> int:
        """See the port."""
        return await self._to("post").post(key, items, limit=limit)

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[Posted]:
        """See the port."""
        return await self._to("take").take(key, epoch, limit=limit)

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        """See the port."""
        await self._to("settle").settle(key, epoch, op_ids)

    async def sessions(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionKey | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        """See the port."""
        store = self._to("sessions")
        return await store.sessions(
            tenant=tenant, owner=owner, tag=tag, prefix=prefix, after=after, limit=limit
        )

    async def waiting(self, *, dead_letters: bool = False) -> list[SessionKey]:
        """See the port."""
        store = self._to("waiting")
        return await (store.waiting(dead_letters=True) if dead_letters else store.waiting())

    async def reject(self, key: SessionKey, epoch: int, letters: Sequence[DeadLetter]) -> None:
        """See the port."""
        await self._to("reject").reject(key, epoch, letters)

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        """See the port."""
        return await self._to("dead_letters").dead_letters(key)

    async def drop_dead_letters(self, key: SessionKey, op_ids: Collection[str]) -> int:
        """See the port."""
        return await self._to("drop_dead_letters").drop_dead_letters(key, op_ids)

    async def tenants(self) -> list[str]:
        """See the port."""
        return await self._to("tenants").tenants()

    async def delete(self, key: SessionKey, epoch: int) -> None:
        """See the port."""
        await self._to("delete").delete(key, epoch)

    async def scrub(self) -> None:
        """See the port."""
        await self._to("scrub").scrub()
