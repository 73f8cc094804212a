"""Scopes: values that outlive a session, shared by the sessions of a user or of an application.

A scope is a session of its own, without a conversation: its values are a session's working memory.
So it has what sessions have: a log, folds, leases, encryption, backups and a place in `check`.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast, final

import msgspec

from perdure.errors import InvalidArgumentError
from perdure.memory.documents import TurnPayload
from perdure.memory.index import DroppedPayload, MemoryEntry
from perdure.records.json import decode
from perdure.records.keys import SCOPES, SessionKey, require_list, require_name, require_whole
from perdure.records.manifest import SessionQuery
from perdure.records.records import MEMORY_DROP, MEMORY_SET, TURN
from perdure.records.values import decode_value, encode_value
from perdure.session.delete import SessionFilter
from perdure.session.lifecycle import HandoverTerms
from perdure.session.open import OpenRequest, SessionOpening
from perdure.session.session import Session, SessionView

if TYPE_CHECKING:
    from collections.abc import Callable

    from perdure.memory.working_memory import WorkingMemory
    from perdure.session.connected import ManagerParts
    from perdure.store import SessionInfo, Store


class ScopeChange(msgspec.Struct, frozen=True):
    """One change of a scope."""

    seq: int
    """Its place in the scope's log."""
    at: float
    """Seconds since 1970."""
    values: dict[str, Any]
    """Values that were stored, by key."""
    deleted: tuple[str, ...] = ()
    """Keys that were deleted."""


@final
class Scope:
    """Values that many sessions share: ``sessions.scope("user:ada")``.

    Any process may change it. A change is one group of records: it is durable when the call
    returns, and it is based on what all others have changed before. For a change the process
    takes the scope's lease, and keeps it until another process asks for it.
    """

    __slots__ = ("_key", "_owner", "_parts", "_wait")

    def __init__(
        self,
        parts: Callable[[], ManagerParts],
        key: SessionKey,
        *,
        owner: str | None,
        wait: float,
    ) -> None:
        self._parts = parts
        self._key = key
        self._owner = owner
        self._wait = wait

    def __repr__(self) -> str:
        return f"<Scope {self.id!r}>"

    @property
    def id(self) -> str:
        """The scope's id."""
        return self._key.session

    async def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        source = await self._peek()
        return default if source is None else await source.memory.get(key, default)

    async def values(self, prefix: str = "") -> dict[str, Any]:
        """Return all values by their keys, in the order of the keys.

        Args:
            prefix: Only those whose keys begin with it.

        """
        source = await self._peek()
        return {} if source is None else await _values(source.memory, prefix)

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the keys in order; reads no value."""
        source = await self._peek()
        keys = [] if source is None else await source.memory.keys()
        return sorted(key for key in keys if key.startswith(prefix))

    async def set(self, key: str, value: Any) -> None:
        """Store a value under a key.

        Raises as `update` does.
        """
        await self.update({key: value})

    async def delete(self, *keys: str) -> None:
        """Delete keys (no error if one does not exist).

        Raises as `update` does.
        """
        await self.update({}, delete=keys)

    async def update(self, values: Mapping[str, Any], *, delete: Collection[str] = ()) -> None:
        """Store several values and delete others: all or none of it.

        Args:
            values: What to store, by keys.
            delete: Which keys to delete.

        Raises:
            NotStorableError: A value cannot be stored; nothing has changed.
            LeaseHeldError: Another process keeps writing the scope.
            StoreError: It is not durable yet: autosave tries again.

        """
        require_list("delete", delete)
        if not values and not delete:
            return
        async with self._changing() as session:
            await change_values(session, values, delete)

    @asynccontextmanager
    async def edit(self, prefix: str = "") -> AsyncIterator[dict[str, Any]]:
        """Read, change and store values with no change between: ``async with scope.edit() as v``.

        What you have changed in the dict is stored when the block ends, all or none of it; nothing
        is stored if it ends by an exception. Other processes wait meanwhile, so be quick.

        Args:
            prefix: Only the values whose keys begin with it; the others stay as they are.

        Raises:
            InvalidArgumentError: A new key does not begin with the prefix.
            NotStorableError: A value cannot be stored; nothing has changed.
            LeaseHeldError: Another process keeps writing the scope.
            StoreError: It is not durable yet: autosave tries again.

        """
        async with self._changing() as session:
            before = await _values(session.memory, prefix)
            values = copy.deepcopy(before)
            yield values
            for key in values:
                if not key.startswith(prefix):
                    raise InvalidArgumentError(
                        f"edit(prefix={prefix!r}): the key {key!r} does not begin with it",
                        option="key",
                    )
            types = session._runtime.registry
            changed = {
                key: value
                for key, value in values.items()
                if key not in before
                or encode_value(value, types) != encode_value(before[key], types)
            }
            await change_values(session, changed, before.keys() - values.keys())

    async def history(self, *, before: int | None = None, limit: int = 50) -> list[ScopeChange]:
        """Return the newest changes, oldest first.

        Args:
            before: Only those before the one with this ``seq``.
            limit: How many at most.

        """
        require_whole(before=before, limit=limit)
        runtime, changes = self._parts().runtime, list[ScopeChange]()
        if limit <= 0:
            return changes
        values, deleted = dict[str, Any](), list[str]()
        log = runtime.store.read_log(self._key, before=before, reverse=True)
        async with aclosing(log) as chunks:
            async for chunk in chunks:
                for record in chunk.records:
                    if record.kind == MEMORY_SET:
                        entry = decode(record.payload, MemoryEntry)
                        data = bytes(entry.value)
                        value = decode_value(data, entry.types, runtime.registry)
                        values[entry.key] = value
                    elif record.kind == MEMORY_DROP:
                        deleted.append(decode(record.payload, DroppedPayload).key)
                    # Newest first: a change's values come before the record that begins its turn,
                    # and dates it.
                    elif record.kind == TURN and (values or deleted):
                        at = decode(record.payload, TurnPayload).at
                        made = ScopeChange(record.seq, at, values, tuple(deleted))
                        changes.append(made)
                        values, deleted = {}, []
                        if len(changes) == limit:
                            return changes[::-1]
        return changes[::-1]

    async def forget(self) -> bool:
        """Remove the scope with its history and all values; False if there was none.

        Raises:
            LeaseHeldError: Another process keeps writing the scope.

        """
        key = self._key
        wanted = SessionFilter(key.agent, key.session, key.tenant, None, None)
        report = await self._parts().forget(wanted, HandoverTerms("handover", self._wait))
        return bool(report.sessions)

    @asynccontextmanager
    async def _changing(self, *, create: bool = True) -> AsyncIterator[Session]:
        """Open the scope for one change: it is a turn, so there is one at a time."""
        wanted = OpenRequest(key=self._key, owner=self._owner, wait=self._wait, create=create)
        async with SessionOpening(self._parts().opener, wanted) as session, session.turn():
            yield session

    async def _peek(self) -> Session | SessionView | None:
        """Return what to read: the session that is held here, or else what is stored."""
        parts, key = self._parts(), self._key
        session = cast("Session | None", parts.lifecycle.sessions.get(key))
        if session is not None and session.is_writable:
            return session
        return await parts.load(key)


def scope_key(id: str, tenant: str) -> SessionKey:
    """Return the session that is a scope.

    Raises:
        InvalidArgumentError: The id is empty or too long.

    """
    require_name("scope id", id)
    return SessionKey(SCOPES, id, tenant)


async def list_scopes(
    store: Store, *, tenant: str, owner: str | None, prefix: str, after: str, limit: int
) -> list[SessionInfo]:
    """Return scopes whose ids begin with a prefix, up to ``limit``."""
    found: list[SessionInfo] = []
    last = SessionKey(SCOPES, after, tenant) if after else None
    query = SessionQuery(tenant=tenant, owner=owner, prefix=SCOPES, after=last, limit=limit)
    while len(found) < limit and (page := await store.sessions(query)):
        found += [info for info in page if info.key.session.startswith(prefix)]
        query = query.after_page(page[-1])
    return found[:limit]


async def _values(memory: WorkingMemory, prefix: str) -> dict[str, Any]:
    keys = sorted(key for key in await memory.keys() if key.startswith(prefix))
    return {key: await memory.get(key) for key in keys}


async def change_values(
    session: Session, values: Mapping[str, Any], delete: Collection[str]
) -> None:
    """Store values of a scope and delete others, in a turn of its session."""
    for key, value in values.items():  # before anything is appended
        require_name("key", key)
        encode_value(value, session._runtime.registry)
    gone = [key for key in await session.memory.keys() if key in delete and key not in values]
    for key, value in values.items():
        session.memory.set(key, value, pinned=True)  # no limit takes it away
    for key in gone:
        session.memory.drop(key)
