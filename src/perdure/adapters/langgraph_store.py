"""LangGraph's long-term memory in any store of perdure: `PerdureStore`.

A namespace is a scope (`perdure.session.scope`), so what a graph remembers has a history, can be
forgotten, and is backed up and encrypted with everything else. An item is one value of it, with
its vectors; a large one has parts, which are values, too.
"""

from __future__ import annotations

import math
import time
from asyncio import _get_running_loop
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, final
from urllib.parse import quote, unquote

from perdure._lib.lazy import from_extra
from perdure.adapters.items import AdapterManager, BlockingAdapter, at_path
from perdure.errors import InvalidArgumentError, NotStorableError
from perdure.records.keys import SCOPES
from perdure.records.values import Tags, decode_value, encode_value
from perdure.session.internals import parts_of, store_below
from perdure.session.manager import SessionManager
from perdure.store import SessionQuery

with from_extra("langgraph", used_by="PerdureStore", name="LangGraph", extra="langgraph"):
    from langgraph.store import base as sdk

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from perdure.records.types import Registry
    from perdure.session.scope import Scope

PREFIX: Final = "langgraph:"
"""Of the ids of the scopes."""
PAGE: Final = 200
"""Scopes that are listed at a time."""
PART: Final = 4 * 1024 * 1024
"""Characters of a large item's JSON in one value."""
OF_PART: Final = "\0"
"""Between the key of an item and the number of a part; no key has it."""
MINUTE: Final = 60.0
FRESH: Final = 0.01
"""Share of a time to live by which a read must extend it for that to be stored."""

T = TypeVar("T")
Namespace = tuple[str, ...]
At = tuple[Namespace, str]
"""A namespace and a key."""


@final
class PerdureStore(BlockingAdapter, sdk.BaseStore):
    """A LangGraph store: ``graph.compile(store=store)``.

    A put is durable when it returns. What one call puts into one namespace is stored together.

    It belongs to the event loop that the manager was opened in. The synchronous methods work in
    every other thread; for a program without an event loop, ``with PerdureStore.from_conn_string(
    url) as store`` runs one in a thread of its own.

    Args:
        sessions: Where it is kept: what ``perdure.connect(url)`` returns, once that is open. None
            for a manager of its own: see `from_conn_string`.
        index: LangGraph's configuration for semantic search: ``embed``, ``dims`` and ``fields``.
            Vectors are stored with their items, and a ``query`` compares it with each of those
            below its prefix (``pip install 'perdure[vectors]'``). Without it a ``query`` counts
            for nothing, as in LangGraph's own stores.
        ttl: LangGraph's configuration for items that expire: ``default_ttl`` in minutes, and
            ``refresh_on_read``. What has expired is not returned; `sweep_ttl` removes it.
        tenant: Whose it is, where customers share a store.
        wait: Seconds that a put waits for another process that writes the same namespace.

    Raises:
        InvalidArgumentError: ``sessions`` is no manager, or ``index`` is not supported.
        MissingExtraError: ``index`` is given, and numpy is not installed.

    """

    supports_ttl: bool = True

    def __init__(
        self,
        sessions: SessionManager | None,
        *,
        index: sdk.IndexConfig | None = None,
        ttl: sdk.TTLConfig | None = None,
        tenant: str = "",
        wait: float = 10.0,
    ) -> None:
        instead = "PerdureStore.from_conn_string(url)"
        self._connection = AdapterManager(sessions, instead=instead, tenant=tenant, wait=wait)
        self.index_config: sdk.IndexConfig | None = index
        self.ttl_config = ttl
        self._index = None if index is None else VectorIndex(index)
        self.embeddings: Any = None if self._index is None else self._index.embeddings

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
            InvalidNamespaceError: A label of a namespace is empty, no text, or has a period.
            NotStorableError: A value cannot be stored; nothing has changed.
            LeaseHeldError: Another process keeps writing a namespace.

        """
        ops = list(ops)
        puts = _puts(ops)  # before anything is done
        registry = await self._registry()
        encoded = {at: _encoded(op, registry) for at, op in puts.items() if op.value is not None}
        results: list[sdk.Result] = []
        for op in ops:
            result: sdk.Result = None
            if isinstance(op, sdk.GetOp):
                result = await self._get(op)
            elif isinstance(op, sdk.SearchOp):
                result = await self._search(op)
            elif isinstance(op, sdk.ListNamespacesOp):
                result = await self._list(op)
            results.append(result)
        vectors = {} if self._index is None else await self._index.vectors_of(puts.values())
        by_namespace: dict[Namespace, list[sdk.PutOp]] = {}
        for op in puts.values():
            by_namespace.setdefault(op.namespace, []).append(op)
        for namespace, changes in by_namespace.items():
            await self._put(namespace, changes, encoded, vectors)
        return results

    def sweep_ttl(self) -> Any:
        """Remove what has expired, and return how many items that were.

        ``await`` it on the event loop, as that of ``AsyncSqliteStore``; in another thread it waits
        itself, as that of ``SqliteStore``.

        Raises:
            LeaseHeldError: Another process keeps writing a namespace.

        """
        swept = self._sweep()
        return swept if _get_running_loop() is not None else self._wait_for(swept)

    async def _sweep(self) -> int:
        removed = 0
        async with aclosing(self._newest(())) as namespaces:
            async for namespace, _ in namespaces:
                scope = await self._scope(namespace)
                there = await scope.values()
                gone = [key for key, item in there.items() if _is_expired(item)]
                await scope.delete(*_with_parts(gone, there))
                removed += len(gone)
        return removed

    async def _get(self, op: sdk.GetOp) -> sdk.Item | None:
        scope = await self._scope(op.namespace)
        stored = await scope.get(op.key)
        if stored is None or OF_PART in op.key or _is_expired(stored):
            return None
        if op.refresh_ttl:
            await _refresh(scope, {op.key: stored})
        if "parts" in stored:
            parts = await scope.values(f"{op.key}{OF_PART}")
            stored = _joined(op.key, stored, parts, await self._registry())
        return sdk.Item(**_item(op.namespace, op.key, stored))

    async def _put(
        self,
        namespace: Namespace,
        changes: Iterable[sdk.PutOp],
        encoded: Mapping[At, tuple[bytes, Tags | None]],
        vectors: Mapping[At, dict[str, str]],
    ) -> None:
        scope = await self._scope(namespace)
        now = datetime.now(UTC)
        values: dict[str, Any] = {}
        replaced: list[str] = []
        for op in changes:
            known = await scope.get(op.key)
            replaced += [op.key] if known is not None else []
            if op.value is None:
                continue
            is_new = known is None or _is_expired(known)
            stored = {
                "value": dict(op.value),
                "created_at": now.isoformat() if is_new else known["created_at"],
                "updated_at": now.isoformat(),
            }
            found = vectors.get((namespace, op.key))
            if found:
                stored["vectors"] = found
            if op.ttl is not None:
                stored["ttl"] = op.ttl
                stored["expires_at"] = now.timestamp() + op.ttl * MINUTE
            values |= _split(op.key, stored, *encoded[namespace, op.key])
        keys = await scope.keys() if replaced else []
        gone = [key for key in _with_parts(replaced, keys) if key not in values]
        await scope.update(values, delete=gone)

    async def _search(self, op: sdk.SearchOp) -> list[sdk.SearchItem]:
        wanted, registry = max(op.offset + op.limit, 0), await self._registry()
        query = None
        if op.query and self._index is not None:
            query = await self._index.query(op.query)
        found: list[tuple[dict[str, Any], Any]] = []
        """Items, and how they are stored."""
        prefix = tuple(op.namespace_prefix)
        async with aclosing(self._newest(prefix)) as namespaces:
            async for namespace, saved_at in namespaces:
                is_full = query is None and len(found) >= wanted
                if wanted == 0 or (is_full and _at(found[wanted - 1]) >= saved_at):
                    break  # whatever else there is was put earlier
                scope = await self._scope(namespace)
                there = await scope.values()
                for key, each in there.items():
                    if OF_PART not in key and not _is_expired(each):
                        stored = _joined(key, each, there, registry)
                        if _fits(stored["value"], op.filter or {}):
                            found.append((_item(namespace, key, stored), stored))
                found.sort(key=_at, reverse=True)
                if query is None:
                    del found[wanted:]
        if query is not None and self._index is not None:
            found = self._index.nearest(query, found)
        found = found[op.offset : wanted]
        if op.refresh_ttl:
            await self._refresh(found)
        return [sdk.SearchItem(**item) for item, _ in found]

    async def _refresh(self, found: Iterable[tuple[dict[str, Any], Any]]) -> None:
        by_namespace: dict[Namespace, dict[str, Any]] = {}
        for item, stored in found:
            if "ttl" in stored:
                by_namespace.setdefault(item["namespace"], {})[item["key"]] = stored
        for namespace, items in by_namespace.items():
            await _refresh(await self._scope(namespace), items)

    async def _list(self, op: sdk.ListNamespacesOp) -> list[Namespace]:
        found: set[Namespace] = set()
        async with aclosing(self._newest(())) as namespaces:
            async for namespace, _ in namespaces:
                if all(_matches(one, namespace) for one in op.match_conditions or ()):
                    scope = await self._scope(namespace)
                    if await self._has_items(scope):  # else everything was deleted
                        found.add(namespace[: op.max_depth])
        return sorted(found)[op.offset : op.offset + op.limit]

    async def _has_items(self, scope: Scope) -> bool:
        for key in await scope.keys():
            if OF_PART not in key and (
                self.ttl_config is None or not _is_expired(await scope.get(key))
            ):
                return True
        return False

    # Where it is

    async def _registry(self) -> Registry:
        return parts_of(await self._connection.manager()).runtime.registry

    async def _scope(self, namespace: Namespace) -> Scope:
        sessions = await self._connection.manager()
        about = self._connection
        try:
            return sessions.scope(_id(namespace), tenant=about.tenant, wait=about.wait)
        except InvalidArgumentError as error:
            message = str(error).replace("session id", "the namespace, with its escapes,")
            raise InvalidArgumentError(message, option="namespace", value=namespace) from None

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


def _puts(ops: Iterable[sdk.Op]) -> dict[At, sdk.PutOp]:
    """Return what is put in the end, by namespace and key.

    Raises:
        InvalidNamespaceError: A namespace of one of the operations cannot be one.
        InvalidArgumentError: A key cannot be one.

    """
    puts: dict[At, sdk.PutOp] = {}
    for op in ops:
        sdk.validate_op_namespace(op)
        if isinstance(op, sdk.PutOp):
            if not op.namespace:
                raise sdk.InvalidNamespaceError("Namespace cannot be empty.")
            if OF_PART in op.key:
                message = f"key {op.key!r} holds a control character: remove it"
                raise InvalidArgumentError(message, option="key", value=op.key)
            namespace = tuple(op.namespace)
            puts[namespace, op.key] = op._replace(namespace=namespace)
    return puts


def _encoded(op: sdk.PutOp, registry: Registry) -> tuple[bytes, Tags | None]:
    """Return the value of a put as JSON, with its tags.

    Raises:
        NotStorableError: It has what is no JSON, or nests too deep.

    """
    try:
        return encode_value(dict(op.value or {}), registry)
    except NotStorableError as error:
        message = f"the value of {op.key!r} in {op.namespace} cannot be stored: {error}"
        raise type(error)(message, **{**error.facts, "key": op.key}) from error


# Large items, and those that expire


def _split(key: str, stored: dict[str, Any], data: bytes, tags: Tags | None) -> dict[str, Any]:
    """Return an item as values of a scope: one, or with the parts of a large one."""
    if len(data) <= PART:
        return {key: stored}
    text = data.decode()
    parts = [text[at : at + PART] for at in range(0, len(text), PART)]
    first = {**stored, "value": None, "parts": len(parts), "tags": tags}
    return {key: first} | {f"{key}{OF_PART}{at}": part for at, part in enumerate(parts)}


def _joined(
    key: str, stored: Mapping[str, Any], there: Mapping[str, Any], registry: Registry
) -> Mapping[str, Any]:
    """Return an item with its value, which may be in parts."""
    if "parts" not in stored:
        return stored
    text = "".join(there[f"{key}{OF_PART}{at}"] for at in range(stored["parts"]))
    return {**stored, "value": decode_value(text.encode(), stored["tags"], registry)}


def _with_parts(keys: Iterable[str], there: Iterable[str]) -> list[str]:
    """Return keys of items with those of their parts."""
    wanted = set(keys)
    return [key for key in there if key.partition(OF_PART)[0] in wanted]


def _is_expired(stored: Any) -> bool:
    return isinstance(stored, Mapping) and stored.get("expires_at", math.inf) <= time.time()


async def _refresh(scope: Scope, items: Mapping[str, Mapping[str, Any]]) -> None:
    """Restart the time to live of items, if that is worth a save."""
    fresh = {}
    for key, stored in items.items():
        lives = stored.get("ttl", 0.0) * MINUTE
        expires_at = time.time() + lives
        if lives and expires_at - stored["expires_at"] > FRESH * lives:
            fresh[key] = {**stored, "expires_at": expires_at}
            if "parts" in stored:
                fresh[key]["value"] = None
    await scope.update(fresh)


# Semantic search


@final
class VectorIndex:
    """Vectors of items, and which are the nearest to a query's.

    Args:
        config: LangGraph's.

    Raises:
        InvalidArgumentError: It asks for another distance than the cosine, or has no ``embed``.
        MissingExtraError: numpy is not installed.

    """

    def __init__(self, config: sdk.IndexConfig) -> None:
        with from_extra(
            "numpy", used_by="PerdureStore(index=…)", name="semantic search", extra="vectors"
        ):
            import numpy

        self._numpy = numpy
        distance = config.get("distance_type", "cosine")
        if distance != "cosine":
            message = f'invalid index={{"distance_type": {distance!r}}}: only "cosine" is supported'
            raise InvalidArgumentError(message, option="index")
        if not config.get("embed"):
            message = 'index has no "embed": give it a function from texts to vectors'
            raise InvalidArgumentError(message, option="index")
        self.embeddings: Embeddings = sdk.ensure_embeddings(config["embed"])
        self._dims = config.get("dims")
        # LangGraph's stores in SQLite and PostgreSQL call them text_fields.
        fields: Any = config.get("fields") or config.get("text_fields") or ["$"]
        self._fields: list[str] = [fields] if isinstance(fields, str) else fields

    async def vectors_of(self, puts: Iterable[sdk.PutOp]) -> dict[At, dict[str, str]]:
        """Return the vectors of what is put, by namespace and key, then by the text's path."""
        texts: dict[str, list[tuple[Namespace, str, str]]] = {}
        for op in puts:
            if op.value is None or op.index is False:
                continue
            for path in self._fields if op.index is None else op.index:
                found = sdk.get_text_at_path(
                    dict(op.value), sdk.tokenize_path(path) if path != "$" else path
                )
                for at, text in enumerate(found):
                    name = path if len(found) == 1 else f"{path}.{at}"
                    texts.setdefault(text, []).append((op.namespace, op.key, name))
        vectors: dict[At, dict[str, str]] = {}
        if texts:
            embedded = await self.embeddings.aembed_documents(list(texts))
            for places, vector in zip(texts.values(), embedded, strict=True):
                data = b64encode(self._vector(vector).tobytes()).decode()
                for namespace, key, name in places:
                    vectors.setdefault((namespace, key), {})[name] = data
        return vectors

    async def query(self, text: str) -> Any:
        """Return the vector of a query."""
        return self._vector(await self.embeddings.aembed_query(text))

    def _vector(self, vector: Any) -> Any:
        made = self._numpy.asarray(vector, dtype="<f4")
        if made.ndim != 1 or (self._dims and len(made) != self._dims):
            message = (
                f"embed returned a vector of the shape {made.shape}, and index says that it has "
                f"{self._dims} dimensions: give the embedding's own"
            )
            raise InvalidArgumentError(message, option="index")
        return made

    def nearest(
        self, query: Any, found: Iterable[tuple[dict[str, Any], Any]]
    ) -> list[tuple[dict[str, Any], Any]]:
        """Return items with their scores, the nearest first; those without vectors come last."""
        np = self._numpy
        owners: list[int] = []
        data: list[bytes] = []
        pairs = list(found)
        for at, (_, stored) in enumerate(pairs):
            for vector in stored.get("vectors", {}).values():
                data.append(b64decode(vector))
                owners.append(at)
        best: dict[int, float] = {}
        if data:
            size = 4 * len(query)
            if any(len(each) != size for each in data):
                message = (
                    f"vectors are stored that have not the {len(query)} dimensions of this query: "
                    "put these items again with today's embedding"
                )
                raise InvalidArgumentError(message, option="index")
            matrix = np.frombuffer(b"".join(data), dtype="<f4").reshape(len(data), len(query))
            lengths = np.linalg.norm(matrix, axis=1) * np.linalg.norm(query)
            scores = np.divide(
                matrix @ query, lengths, out=np.zeros_like(lengths), where=lengths > 0
            )
            for at, score in zip(owners, scores.tolist(), strict=True):
                best[at] = max(score, best.get(at, -math.inf))
        near = sorted(best, key=lambda at: best[at], reverse=True)
        scored = [({**pairs[at][0], "score": best[at]}, pairs[at][1]) for at in near]
        return scored + [pair for at, pair in enumerate(pairs) if at not in best]


# Names, and filters


def _id(namespace: Namespace) -> str:
    return PREFIX + "/".join(quote(part, safe=" ") for part in namespace)


def _namespace(id: str) -> Namespace:
    return tuple(unquote(part) for part in id.removeprefix(PREFIX).split("/"))


def _item(namespace: Namespace, key: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    times = {name: datetime.fromisoformat(stored[name]) for name in ("created_at", "updated_at")}
    return {"namespace": namespace, "key": key, "value": stored["value"], **times}


def _at(found: tuple[Mapping[str, Any], Any]) -> float:
    """Return when an item was put."""
    return float(found[0]["updated_at"].timestamp())


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
            _fits(at_path(value, name), other) for name, other in wanted.items()
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
    "$gt": lambda one, other: bool(one > other),
    "$gte": lambda one, other: bool(one >= other),
    "$lt": lambda one, other: bool(one < other),
    "$lte": lambda one, other: bool(one <= other),
}


def _compares(value: Any, operator: str, wanted: Any) -> bool:
    if operator not in _OPERATORS:
        known = ", ".join(_OPERATORS)
        message = f"filter: unknown operator {operator!r}: choose {known}"
        raise InvalidArgumentError(message, option="filter")
    if operator not in ("$eq", "$ne"):
        try:
            value, wanted = float(value), float(wanted)
        except (TypeError, ValueError):
            if not (isinstance(value, str) and isinstance(wanted, str)):
                return False  # neither more nor less
    return _OPERATORS[operator](value, wanted)
