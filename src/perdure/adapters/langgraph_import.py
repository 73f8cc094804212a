"""Threads of LangGraph's own savers, to be imported into `PerdureSaver`.

Read with the SDK's `AsyncSqliteSaver` or `AsyncPostgresSaver`, and a serializer that rebuilds no
object: what is not plain data is passed on as the bytes that it is stored as. So no stored code is
run, and a class that nobody has named is kept for whoever names it later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import msgspec

from perdure._lib.lazy import from_extra
from perdure.adapters.imports import (
    PAGE,
    Moved,
    ReadRows,
    Source,
    diverged,
    not_equal,
    postgres_url,
    reader,
    reading,
    require_tables,
    sqlite_copy,
    sqlite_path,
    sqlite_rows,
)
from perdure.adapters.langgraph import PerdureSaver
from perdure.errors import CorruptRecordError, StoreUnavailableError

with from_extra("langgraph", used_by="PerdureSaver", name="LangGraph", extra="langgraph"):
    import ormsgpack
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint import base as sdk
    from langgraph.checkpoint.serde import jsonplus, types as sdk_types

if TYPE_CHECKING:
    from perdure.session.manager import SessionManager
    from perdure.session.session import Session

THREADS: Final = "SELECT DISTINCT thread_id FROM checkpoints {} ORDER BY 1 LIMIT"
COUNT: Final = "SELECT count(DISTINCT thread_id) FROM checkpoints"
CHECKPOINTS: Final = (
    "SELECT checkpoint_ns, checkpoint_id FROM checkpoints WHERE thread_id = ? "
    "ORDER BY checkpoint_id, checkpoint_ns"
)
WRITES: Final = (
    "SELECT task_path, task_id, idx FROM {} "
    "WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"
)
BATCH: Final = 16
"""Checkpoints that are stored together."""

_DeltaSnapshot: Any = sdk_types._DeltaSnapshot  # noqa: SLF001  # a value of a channel, as stored


class Extension(msgspec.Struct, frozen=True):
    """An object in msgpack, as it is stored."""

    code: int
    data: bytes


class Typed(msgspec.Struct, frozen=True):
    """A value that is not stored as msgpack."""

    kind: str
    """The serializer's type."""
    data: bytes


@final
class OpaqueSerializer:
    """LangGraph's serializer, which rebuilds nothing but plain data."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return a value as LangGraph's serializer stores it."""
        if obj is None:
            return "null", b""
        if isinstance(obj, bytes | bytearray):
            return type(obj).__name__, bytes(obj)
        if isinstance(obj, Typed):
            return obj.kind, obj.data
        return "msgpack", _packed(obj)

    def loads_typed(self, data: tuple[str, Any]) -> Any:
        """Return a value in which objects are as they were stored."""
        kind, stored = data
        if kind == "null":
            return None
        if kind == "bytes":
            return stored
        if kind == "bytearray":
            return bytearray(stored)
        if kind == "msgpack":
            return _unpacked(stored)
        return Typed(kind, stored.encode() if isinstance(stored, str) else bytes(stored))


def _packed(value: Any) -> bytes:
    return ormsgpack.packb(value, default=_as_extension, option=ormsgpack.OPT_NON_STR_KEYS)


def _as_extension(value: Any) -> ormsgpack.Ext:
    if isinstance(value, Extension):
        return ormsgpack.Ext(value.code, value.data)
    if isinstance(value, _DeltaSnapshot):
        return ormsgpack.Ext(jsonplus.EXT_DELTA_SNAPSHOT, _packed(value.value))
    raise TypeError(f"a {type(value).__name__} cannot be a part of a value")


def _unpacked(data: bytes) -> Any:
    return ormsgpack.unpackb(data, ext_hook=_extension, option=ormsgpack.OPT_NON_STR_KEYS)


def _extension(code: int, data: bytes) -> Any:
    if code == jsonplus.EXT_DELTA_SNAPSHOT:
        return _DeltaSnapshot(_unpacked(data))
    return Extension(code, bytes(data))


SERDE: Final = OpaqueSerializer()


class _Stored(NamedTuple):
    """A checkpoint of the source."""

    at: tuple[str, str]
    """Namespace and id."""
    found: sdk.CheckpointTuple
    writes: list[tuple[str, str, list[tuple[int, str, Any]]]]
    """By task, and its path: what it wrote, with the index of each write."""


@asynccontextmanager
async def source_of(url: str) -> AsyncGenerator[LangGraphSource, None]:
    """Open a database of the SDK's, to be read.

    Raises:
        StoreUnavailableError: It cannot be read.
        ConfigError: It is not the SDK's database.

    """
    path = sqlite_path(url)
    async with AsyncExitStack() as stack:
        if path is not None:
            module = reader("langgraph.checkpoint.sqlite.aio", "langgraph-checkpoint-sqlite")
            connect = reader("aiosqlite", "langgraph-checkpoint-sqlite").connect
            copy = await stack.enter_async_context(sqlite_copy(path, "checkpoints", "writes"))
            saver = module.AsyncSqliteSaver(
                await stack.enter_async_context(connect(copy)), serde=SERDE
            )
            await saver.setup()  # of the copy: a database of an older version lacks a column
            rows: ReadRows = partial(sqlite_rows, copy)
            writes = WRITES.format("writes")
        else:
            saver, rows = await stack.enter_async_context(_postgres(url))
            writes = WRITES.format("checkpoint_writes")
        (total,) = (await rows(COUNT))[0]
        yield LangGraphSource(total, saver, rows, writes)


@asynccontextmanager
async def _postgres(url: str) -> AsyncGenerator[tuple[Any, ReadRows], None]:
    """Open two connections, the saver's and one for rows, each read a read-only transaction.

    The session itself stays as it is: a pooler gives it to other programs afterwards.
    """
    conninfo = postgres_url(url)
    module = reader("langgraph.checkpoint.postgres.aio", "langgraph-checkpoint-postgres")
    from psycopg import AsyncConnection, Error

    async with AsyncExitStack() as stack:
        try:
            connection, plain = [
                await stack.enter_async_context(
                    await AsyncConnection.connect(conninfo, prepare_threshold=None)
                )
                for _ in range(2)
            ]
            for each in (connection, plain):
                await each.set_read_only(True)
        except Error as error:
            raise StoreUnavailableError(f"the source cannot be read: {error}") from error

        async def rows(query: str, *values: Any) -> Sequence[Any]:
            async with plain.transaction():
                found = await plain.execute(query.replace("?", "%s").encode(), values)
                return await found.fetchall()

        tables = "SELECT table_name FROM information_schema.tables"
        there = {name for (name,) in await rows(tables)}
        require_tables("the source", there, "checkpoints", "checkpoint_blobs", "checkpoint_writes")
        yield module.AsyncPostgresSaver(connection, serde=SERDE), rows


@final
class LangGraphSource(Source):
    """The threads of a database of LangGraph's."""

    def __init__(self, total: int, saver: Any, rows: ReadRows, writes: str) -> None:
        self.total: int = total
        self._saver = saver
        self._rows = rows
        self._writes = writes
        self._transaction: Any = getattr(
            saver.conn, "transaction", nullcontext
        )  # SQLite reads a copy

    async def names(self) -> AsyncIterator[str]:
        """Return the threads' ids."""
        where, after = "", list[str]()
        while page := await self._rows(f"{THREADS.format(where)} {PAGE}", *after):
            for (id_,) in page:
                yield id_
            where, after = "WHERE thread_id > ?", [id_]

    async def move(self, name: str, sessions: SessionManager, tenant: str) -> Moved:
        """Add the checkpoints and writes that the store lacks, and compare all of them."""
        with reading(f"thread {name}"):
            places = [(ns, id_) for ns, id_ in await self._rows(CHECKPOINTS, name)]
        is_new = not await sessions.exists(name, tenant=tenant)
        saver = PerdureSaver(sessions, serde=SERDE, tenant=tenant)
        expected: dict[tuple[str, str], bytes] = {}
        missing: list[_Stored] = []
        added = 0
        for place in places:
            stored = await self._read(name, place)
            expected[place] = _fingerprint(stored.found)
            if is_new or not await _is_here(saver, name, stored, expected[place]):
                if not (is_new or added or missing):
                    await _require_untouched(saver, name, places)
                missing.append(stored)
            if len(missing) == BATCH or (missing and place == places[-1]):
                await _put(saver, name, missing)
                added += len(missing)
                missing = []
        await saver.release(name)
        if added:
            back = PerdureSaver(sessions, serde=SERDE, tenant=tenant)  # which reads the store
            for place, fingerprint in expected.items():
                found = await back.aget_tuple(_config(name, *place))
                if found is None or _fingerprint(found) != fingerprint:
                    raise not_equal(name, f"checkpoint {place[1]}")
        return Moved(len(places) - added, added)

    async def _read(self, thread: str, place: tuple[str, str]) -> _Stored:
        with reading(f"thread {thread}: checkpoint {place[1]}"):
            async with self._transaction():
                found = await self._saver.aget_tuple(_config(thread, *place))
            found = found._replace(checkpoint=_opened(found.checkpoint))
            rows = sorted(await self._rows(self._writes, thread, *place))
            return _Stored(place, found, list(_by_task(rows, found.pending_writes or ())))


def _opened(checkpoint: Any) -> Any:
    """Return a checkpoint that an old version has stored as JSON, with its values as they are.

    Raises:
        CorruptRecordError: It is stored as something else as a whole.

    """
    if not isinstance(checkpoint, Typed):
        return checkpoint
    if checkpoint.kind != "json":
        how = "encrypted" if "+" in checkpoint.kind else f"stored as {checkpoint.kind}"
        message = f"it is {how} as a whole: let LangGraph store it anew, without that"
        raise CorruptRecordError(message, type=checkpoint.kind)
    plain = json.loads(checkpoint.data)
    values = plain["channel_values"].items()
    typed = {name: Typed("json", json.dumps(value).encode()) for name, value in values}
    return {**plain, "channel_values": typed}


def _by_task(
    rows: Sequence[tuple[str, str, int]], writes: Iterable[tuple[str, str, Any]]
) -> Iterator[tuple[str, str, list[tuple[int, str, Any]]]]:
    """Yield what tasks wrote."""
    pairs = zip(rows, writes, strict=True)
    for (path, task), group in groupby(pairs, key=lambda pair: pair[0][:2]):
        yield task, path, [(at, channel, value) for (_, _, at), (_, channel, value) in group]


async def _put(saver: PerdureSaver, thread: str, missing: Sequence[_Stored]) -> None:
    """Store checkpoints with their writes; what is there already is not stored again."""
    session: Session | None = None
    for stored in missing:
        ns, id_ = stored.at
        checkpoint, metadata = stored.found.checkpoint, stored.found.metadata
        versions = {
            **dict.fromkeys(checkpoint["channel_values"], ""),
            **checkpoint["channel_versions"],
        }
        at = _config(thread, ns, id_)
        parent = _config(thread, ns, _parent(stored.found))
        session = await saver._append_checkpoint(parent, checkpoint, metadata, versions)  # noqa: SLF001  # all of them are saved at once
        for task, path, writes in stored.writes:
            await saver._append_writes(at, writes, task, path)  # noqa: SLF001  # as above
    if session is not None:
        await session.save()


async def _is_here(saver: PerdureSaver, thread: str, stored: _Stored, fingerprint: bytes) -> bool:
    """Return whether a checkpoint is in the store, with all of its writes.

    Raises:
        SessionError: Another one is.

    """
    found = await saver.aget_tuple(_config(thread, *stored.at))
    if found is None or _fingerprint(found) == fingerprint:
        return found is not None
    here, there = (_fingerprint(each._replace(pending_writes=[])) for each in (found, stored.found))
    if here != there:
        raise diverged(thread, f"its checkpoint {stored.at[1]} is another one than the source's")
    return not _writes(stored.found) - _writes(found)


async def _require_untouched(
    saver: PerdureSaver, thread: str, places: Sequence[tuple[str, str]]
) -> None:
    """Refuse to add to a thread that has gone on here.

    Raises:
        SessionError: A namespace's newest checkpoint is not the source's.

    """
    known = set(places)
    for ns in {ns for ns, _ in places}:
        newest = await saver.aget_tuple(_config(thread, ns, None))
        if newest is not None and (ns, newest.checkpoint["id"]) not in known:
            raise diverged(thread, "it has gone on since")


def _config(thread: str, ns: str, id_: str | None) -> RunnableConfig:
    about = {"thread_id": thread, "checkpoint_ns": ns}
    return {"configurable": about if id_ is None else {**about, "checkpoint_id": id_}}


def _parent(found: sdk.CheckpointTuple) -> str | None:
    return None if found.parent_config is None else sdk.get_checkpoint_id(found.parent_config)


def _fingerprint(found: sdk.CheckpointTuple) -> bytes:
    """Return a digest of a checkpoint, its metadata and its writes."""
    digest = hashlib.blake2b(digest_size=20)
    checkpoint: dict[str, Any] = {**found.checkpoint}
    values = checkpoint.pop("channel_values")
    about = [checkpoint, {**found.metadata}, _parent(found)]
    parts = [("", "", _in_order(about))]
    parts += [("", name, values[name]) for name in sorted(values)]
    parts += found.pending_writes or ()
    for task, name, value in parts:
        kind, data = SERDE.dumps_typed(value)
        digest.update(json.dumps([task, name, kind, len(data)]).encode())
        digest.update(data)
    return digest.digest()


def _writes(found: sdk.CheckpointTuple) -> set[tuple[str, str, tuple[str, bytes]]]:
    writes = found.pending_writes or ()
    return {(task, channel, SERDE.dumps_typed(value)) for task, channel, value in writes}


def _in_order(value: Any) -> Any:
    """Return a value with lists for tuples, and the keys of each dict in order."""
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value, key=str)}
    return [_in_order(item) for item in value] if isinstance(value, list | tuple) else value
