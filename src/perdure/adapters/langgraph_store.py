"""LangGraph's long-term memory in any store of perdure: `PerdureStore`.

A namespace is a scope (`perdure.session.scope`), so what a graph remembers has a history, can be
forgotten, and is backed up and encrypted with everything else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, final
from urllib.parse import quote, unquote

from perdure._lib.lazy import from_extra
from perdure.adapters.items import AdapterManager, BlockingAdapter
from perdure.errors import InvalidArgumentError
from perdure.records.keys import SCOPES
from perdure.session.internals import store_below
from perdure.session.manager import SessionManager
from perdure.store import SessionQuery

with from_extra("langgraph", used_by="PerdureStore", name="LangGraph", extra="langgraph"):
    from langgraph.store import base as sdk

if TYPE_CHECKING:
    from perdure.session.scope import Scope

PREFIX: Final = "langgraph:"
"""Of the ids of the scopes."""
PAGE: Final = 200
"""Scopes that are listed at a time."""

T = TypeVar("T")
Namespace = tuple[str, ...]


@final
class PerdureStore(BlockingAdapter, sdk.BaseStore):
    """A LangGraph store: ``graph.compile(store=store)``.

    A put is durable when it returns. What one call puts into one namespace is stored together.
    There is no semantic search and no time to live: a ``query`` and a ``ttl`` raise.

    It belongs to the event loop that the manager was opened in. The synchronous methods work in
    every other thread; for a program without an event loop, ``with PerdureStore.from_conn_string(
    url) as store`` runs one in a thread of its own.

    Args:
        sessions: Where it is kept: what ``perdure.connect(url)`` returns, once that is open. None
            for a manager of its own: see `from_conn_string`.
        tenant: Whose it is, where customers share a store.
        wait: Seconds that a put waits for another process that writes the same namespace.

    Raises:
        InvalidArgumentError: ``sessions`` is no manager.

    """

    supports_ttl: bool = False

    def __init__(
        self, sessions: SessionManager | None, *, tenant: str = "", wait: float = 10.0
    ) -> None:
        instead = "PerdureStore.from_conn_string(url)"
        self._connection = AdapterManager(sessions, instead=instead, tenant=tenant, wait=wait)

    # What LangGraph calls

    def batch(self, ops: Iterable[sdk.Op]) -> list[sdk.Result]:
        """Do operations, from another thread than the event loop's; see `abatch`.

        Raises:
            WrongLoopError: This is the event loop's thread, or the store is not open.

        """
        return self._wait_for(self.abatch(ops))

    async def abatch(self, ops: Iterable[sdk.Op]) -> list[sdk.Result]:
        """Do operations: reads see what was there before, and puts follow in their order.

        Raises:
            InvalidArgumentError: A search has a ``query``, which takes an index of vectors.
            NotStorableError: A value cannot be stored; nothing of its namespace has changed.
            LeaseHeldError: Another process keeps writing the namespace.

        """
        results: list[sdk.Result] = []
        puts: dict[Namespace, dict[str, Mapping[str, Any] | None]] = {}
        for op in ops:
            result: sdk.Result = None
            if isinstance(op, sdk.GetOp):
                result = await self._get(op)
            elif isinstance(op, sdk.SearchOp):
                result = await self._search(op)
            elif isinstance(op, sdk.ListNamespacesOp):
                result = await self._list(op)
            else:
                puts.setdefault(op.namespace, {})[op.key] = op.value
            results.append(result)
        for namespace, values in puts.items():
            await self._put(namespace, values)
        return results

    async def _get(self, op: sdk.GetOp) -> sdk.Item | None:
        stored = await (await self._scope(op.namespace)).get(op.key)
        return None if stored is None else sdk.Item(**_item(op.namespace, op.key, stored))

    async def _put(self, namespace: Namespace, values: Mapping[str, Any]) -> None:
        scope = await self._scope(namespace)
        now = datetime.now(UTC).isoformat()
        stored: dict[str, Any] = {}
        for key, value in values.items():
            if value is not None:
                known = await scope.get(key)
                began = now if known is None else known["created_at"]
                stored[key] = {"value": dict(value), "created_at": began, "updated_at": now}
        await scope.update(stored, delete=values.keys() - stored.keys())

    async def _search(self, op: sdk.SearchOp) -> list[sdk.SearchItem]:
        if op.query is not None:
            message = (
                "PerdureStore has no semantic search: leave query out, and choose by namespace "
                "and filter, or search in a store with an index of vectors"
            )
            raise InvalidArgumentError(message, option="query")
        found: list[dict[str, Any]] = []
        wanted = op.offset + op.limit
        async with aclosing(self._newest(op.namespace_prefix)) as namespaces:
            async for namespace, saved_at in namespaces:
                if wanted <= 0 or (len(found) >= wanted and _at(found[wanted - 1]) >= saved_at):
                    break  # whatever else there is was put earlier
                stored = await (await self._scope(namespace)).values()
                found += [
                    _item(namespace, key, each)
                    for key, each in stored.items()
                    if _fits(each["value"], op.filter or {})
                ]
                found = sorted(found, key=_at, reverse=True)[: max(wanted, 0)]
        return [sdk.SearchItem(**item) for item in found[op.offset :]]

    async def _list(self, op: sdk.ListNamespacesOp) -> list[Namespace]:
        found: set[Namespace] = set()
        async with aclosing(self._newest(())) as namespaces:
            async for namespace, _ in namespaces:
                if all(_matches(one, namespace) for one in op.match_conditions or ()):
                    scope = await self._scope(namespace)
                    if await scope.keys():  # else everything was deleted
                        found.add(namespace[: op.max_depth])
        return sorted(found)[op.offset : op.offset + op.limit]

    # Where it is

    async def _scope(self, namespace: Namespace) -> Scope:
        sessions = await self._connection.manager()
        about = self._connection
        return sessions.scope(_id(namespace), tenant=about.tenant, wait=about.wait)

    async def _newest(self, prefix: Namespace) -> AsyncGenerator[tuple[Namespace, float], None]:
        """Yield the namespaces below one, and when each was saved last; the newest first."""
        store = store_below(await self._connection.manager())
        query = SessionQuery(
            tenant=self._connection.tenant, prefix=SCOPES, newest_first=True, limit=PAGE
        )
        while page := await store.sessions(query):
            query = query.after_page(page[-1])
            for info in page:
                if info.key.session.startswith(PREFIX):
                    namespace = _namespace(info.key.session)
                    if namespace[: len(prefix)] == prefix:
                        yield namespace, info.updated_at or 0.0
            if len(page) < PAGE:
                return


def _id(namespace: Namespace) -> str:
    return PREFIX + "/".join(quote(part, safe=" ") for part in namespace)


def _namespace(id: str) -> Namespace:
    return tuple(unquote(part) for part in id.removeprefix(PREFIX).split("/"))


def _item(namespace: Namespace, key: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    times = {name: datetime.fromisoformat(stored[name]) for name in ("created_at", "updated_at")}
    return {"namespace": namespace, "key": key, "value": stored["value"], **times}


def _at(item: Mapping[str, Any]) -> float:
    """Return when an item was put."""
    return float(item["updated_at"].timestamp())


def _matches(condition: sdk.MatchCondition, namespace: Namespace) -> bool:
    wanted, there = condition.path, namespace
    if condition.match_type == "suffix":
        wanted, there = wanted[::-1], there[::-1]
    pairs = zip(wanted, there, strict=False)
    return len(there) >= len(wanted) and all(one in ("*", other) for one, other in pairs)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value is what a filter wants: a part of a dict, or what operators say."""
    if isinstance(wanted, Mapping):
        if any(name.startswith("$") for name in wanted):
            return all(_compares(value, name, other) for name, other in wanted.items())
        return isinstance(value, Mapping) and all(
            _fits(value.get(name), other) for name, other in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(map(_fits, value, wanted))
        )
    return bool(value == wanted)


_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "$eq": lambda one, other: bool(one == other),
    "$ne": lambda one, other: bool(one != other),
    "$gt": lambda one, other: float(one) > float(other),
    "$gte": lambda one, other: float(one) >= float(other),
    "$lt": lambda one, other: float(one) < float(other),
    "$lte": lambda one, other: float(one) <= float(other),
}


def _compares(value: Any, operator: str, wanted: Any) -> bool:
    try:
        return _OPERATORS[operator](value, wanted)
    except KeyError:
        known = ", ".join(_OPERATORS)
        message = f"filter: unknown operator {operator!r}: choose {known}"
        raise InvalidArgumentError(message, option="filter") from None
    except (TypeError, ValueError):  # no number, so neither more nor less
        return False
