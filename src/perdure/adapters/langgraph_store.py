"""LangGraph's long-term memory in any store of perdure: `PerdureStore`.

A namespace is a scope (`perdure.session.scope`), so what a graph remembers has a history, can be
forgotten, and is backed up and encrypted with everything else. An item is one value of it, with
its vectors; the content of a large one is in blobs (`perdure.adapters.claims`).
"""

from __future__ import annotations

import math
import time
from asyncio import _get_running_loop
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, final
from urllib.parse import quote, unquote

import msgspec

from perdure._lib.lazy import from_extra
from perdure.adapters.claims import check_storable, get, put
from perdure.adapters.items import AdapterManager, BlockingAdapter, at_path
from perdure.errors import InvalidArgumentError, NotStorableError, SessionNotFoundError
from perdure.records.json import decode, encode
from perdure.records.keys import SCOPES, require_name
from perdure.records.values import Tags, decode_value, encode_value
from perdure.session.internals import change_of, parts_of, scope_source, store_below, store_of
from perdure.session.manager import SessionManager
from perdure.session.scope import Scope, change_values
from perdure.session.session import Session, SessionView
from perdure.store import SessionQuery

with from_extra("langgraph", used_by="PerdureStore", name="LangGraph", extra="langgraph"):
    from langgraph.store import base as sdk

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from perdure.records.types import Registry

PREFIX: Final = "langgraph:"
"""Of the ids of the scopes."""
PAGE: Final = 200
"""Scopes that are listed at a time."""
LARGE: Final = 4 * 1024 * 1024
"""Bytes of JSON above which the content of an item is in blobs."""
CLAIM: Final = "claim"
"""The field of such an item that names them."""
MINUTE: Final = 60.0
FRESH: Final = 0.01
"""Share of a time to live by which a read must extend it for that to be stored."""

T = TypeVar("T")
Namespace = tuple[str, ...]
At = tuple[Namespace, str]
"""A namespace and a key."""


class ItemContent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of a large item, as its blobs have it."""

    value: msgspec.Raw
    tags: Tags | None = None
    vectors: dict[str, str] = {}


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
        owner: Returns whose a namespace is, or None for nobody's, when something is put there: by
            this label `SessionManager.forget` finds what the store has of somebody.
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
        owner: Callable[[Namespace], str | None] | None = None,
        wait: float = 10.0,
    ) -> None:
        instead = "PerdureStore.from_conn_string(url)"
        self._connection = AdapterManager(sessions, instead=instead, tenant=tenant, wait=wait)
        self._owner_of = owner
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
            TooLargeError: A value is larger than 256 MiB, or than the limit for a record, and the
                store keeps no blobs; nothing has changed.
            LeaseHeldError: Another process keeps writing a namespace.
            OwnerMismatchError: A namespace is somebody else's than ``owner`` says.

        """
        ops = list(ops)
        puts = _puts(ops)  # before anything is done
        registry = await self._registry()
        encoded = {at: _encoded(op, registry) for at, op in puts.items() if op.value is not None}
        store = store_below(await self._connection.manager())
        for (namespace, key), (data, _) in encoded.items():
            check_storable(store, len(data), f"the value of {key!r} in {namespace}")
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
                await scope.delete(*gone)
                removed += len(gone)
        return removed

    async def _get(self, op: sdk.GetOp) -> sdk.Item | None:
        scope = await self._scope(op.namespace)
        source = await scope_source(scope)
        stored = None if source is None else await source.memory.get(op.key)
        if source is None or stored is None or _is_expired(stored):
            return None
        if op.refresh_ttl:
            await _refresh(scope, {op.key: stored})
        return sdk.Item(**_item(op.namespace, op.key, await self._whole(source, stored)))

    async def _whole(
        self, source: Session | SessionView, stored: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return an item with its content, which may be in blobs."""
        if CLAIM not in stored:
            return stored
        content = decode(await get(source, stored[CLAIM]), ItemContent)
        value = decode_value(bytes(content.value), content.tags, await self._registry())
        return {**stored, "value": value, "vectors": content.vectors}

    async def _put(
        self,
        namespace: Namespace,
        changes: Sequence[sdk.PutOp],
        encoded: Mapping[At, tuple[bytes, Tags | None]],
        vectors: Mapping[At, dict[str, str]],
    ) -> None:
        async def change(session: Session) -> None:
            now = datetime.now(UTC)
            values: dict[str, Any] = {}
            for op in changes:
                if op.value is None:
                    continue
                known = await session.memory.get(op.key)
                is_new = known is None or _is_expired(known)
                stored = {
                    "created_at": now.isoformat() if is_new else known["created_at"],
                    "updated_at": now.isoformat(),
                }
                data, tags = encoded[namespace, op.key]
                found = vectors.get((namespace, op.key), {})
                names = None
                if len(data) > LARGE:
                    content = encode(ItemContent(msgspec.Raw(data), tags, found))
                    names = await put(store_of(session), session.key, content)
                if names is not None:
                    stored[CLAIM] = names
                else:
                    stored["value"] = dict(op.value)
                    if found:
                        stored["vectors"] = found
                if op.ttl is not None:
                    stored["ttl"] = op.ttl
                    stored["expires_at"] = now.timestamp() + op.ttl * MINUTE
                values[op.key] = stored
            gone = [op.key for op in changes if op.value is None]
            await change_values(session, values, gone)

        owner = None if self._owner_of is None else self._owner_of(namespace)
        scope = await self._scope(namespace, owner)
        if all(op.value is None for op in changes):
            there = await scope.keys()
            if not any(op.key in there for op in changes):
                return  # no scope begins for a deletion
        await change_of(scope, change)

    async def _search(self, op: sdk.SearchOp) -> list[sdk.SearchItem]:
        wanted = max(op.offset + op.limit, 0)
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
                source = await scope_source(await self._scope(namespace))
                if source is None:  # it was removed since it was listed
                    continue
                for key in sorted(await source.memory.keys()):
                    stored = await source.memory.get(key)
                    if stored is not None and not _is_expired(stored):
                        whole = await self._whole(source, stored)
                        if _fits(whole["value"], op.filter or {}):
                            found.append((_item(namespace, key, whole), whole))
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
            if self.ttl_config is None or not _is_expired(await scope.get(key)):
                return True
        return False

    # Where it is

    async def _registry(self) -> Registry:
        return parts_of(await self._connection.manager()).runtime.registry

    async def _scope(self, namespace: Namespace, owner: str | None = None) -> Scope:
        sessions = await self._connection.manager()
        about = self._connection
        try:
            return sessions.scope(_id(namespace), tenant=about.tenant, owner=owner, wait=about.wait)
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
        InvalidArgumentError: A key of one of them cannot be one.

    """
    puts: dict[At, sdk.PutOp] = {}
    for op in ops:
        sdk.validate_op_namespace(op)
        if isinstance(op, sdk.PutOp):
            if not op.namespace:
                raise sdk.InvalidNamespaceError("Namespace cannot be empty.")
            require_name("key", op.key)
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


# Items that expire


def _is_expired(stored: Any) -> bool:
    return isinstance(stored, Mapping) and stored.get("expires_at", math.inf) <= time.time()


async def _refresh(scope: Scope, items: Mapping[str, Mapping[str, Any]]) -> None:
    """Restart the time to live of items that were read, if that is worth a save.

    They may have been put again, deleted or forgotten since: what is there now counts.
    """
    if not any(_is_worth_a_save(stored) for stored in items.values()):
        return

    async def change(session: Session) -> None:
        fresh: dict[str, Any] = {}
        for key in items:
            stored = await session.memory.get(key)
            if stored is not None and not _is_expired(stored) and _is_worth_a_save(stored):
                fresh[key] = {**stored, "expires_at": time.time() + stored["ttl"] * MINUTE}
        await change_values(session, fresh, ())

    with suppress(SessionNotFoundError):
        await change_of(scope, change, create=False)


def _is_worth_a_save(stored: Mapping[str, Any]) -> bool:
    """Return whether a refresh moves the end of an item's life by enough."""
    lives: float = stored.get("ttl", 0.0) * MINUTE
    return bool(lives) and time.time() + lives - stored["expires_at"] > FRESH * lives


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
