"""A checkpointer for LangGraph in any store of perdure: `PerdureSaver`.

A thread is one session. What LangGraph puts is appended to the session's log in the order of its
calls, before the first ``await`` of a call, so a checkpoint is never durable without the writes
before it. Values are stored once: see `perdure.adapters.thread_log`.
"""

from __future__ import annotations

import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast, final
from uuid import UUID

import msgspec

from perdure._lib.lazy import from_extra
from perdure.adapters.items import AdapterManager, BlockingAdapter, at_path
from perdure.adapters.thread_log import (
    PART,
    SDK,
    CheckpointPut,
    Mark,
    PutChange,
    TaskWrites,
    ThreadIndex,
    WritesChange,
)
from perdure.adapters.thread_types import DataSerializer
from perdure.adapters.thread_values import ValueCodec, require_data_only
from perdure.adapters.threads import At, Change, Thread, ThreadSessions, has_room, release_put
from perdure.adapters.versions import warn_untested
from perdure.errors import FormatError, InvalidArgumentError, NotStorableError
from perdure.records.json import encode
from perdure.records.values import is_plain
from perdure.session.internals import release_unused
from perdure.session.manager import SessionManager

with from_extra("langgraph", used_by="PerdureSaver", name="LangGraph", extra="langgraph"):
    from langgraph.checkpoint import base as sdk

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from perdure.lease import OnHeld
    from perdure.records.types import Registered
    from perdure.session.session import Session
    from perdure.store import SessionInfo
warn_untested("langgraph-checkpoint")
warn_untested("langgraph")

PAGE: Final = 64
"""Checkpoints that are read from the log at a time."""


class _Place(NamedTuple):
    """Names in a config."""

    thread: str
    ns: str
    id: str | None


class Placed(NamedTuple):
    """A checkpoint of a thread."""

    ns: str
    id: str
    mark: Mark


@final
class PerdureSaver(BlockingAdapter, sdk.BaseCheckpointSaver[Any]):
    """A LangGraph checkpointer: ``graph.compile(checkpointer=saver)``.

    Each thread is a session, whose id is the ``thread_id``. A call returns once what it stores is
    durable. Reading takes no lease. The first write of a thread does, and the session is given to
    a process that asks for it, between two writes, or when it has been idle for some minutes. A run
    that goes on after another process has changed its thread gets a LeaseLostError that names it.

    It belongs to the event loop that the manager was opened in. The synchronous methods, which
    ``graph.invoke`` calls, work in every other thread; for a program without an event loop,
    ``with PerdureSaver.from_conn_string(url) as saver`` runs one in a thread of its own.

    Args:
        sessions: Where threads are kept: what ``perdure.connect(url)`` returns, once that is open.
            None for a manager of its own: see `from_conn_string`.
        types: Your classes that may be read back, or what `perdure.register` returns for one that
            has changed since it was stored, or has moved. LangGraph's and LangChain's own always
            are; any other that is found in the store raises.
        serde: A serializer of yours, which then decides what is read back.
        tenant: Whose the threads are, where customers share a store.
        tags: Labels for listing.
        owner: Which value of a config's ``configurable`` says whose a thread is, such as
            ``"user_id"``: it is the session's owner, and a config that names another one is
            refused. `alist` with a filter by it then looks at that owner's threads alone.
        on_held: What a write does if another process holds the session: ``"handover"`` asks for
            it, ``"steal"`` waits for it to be released or to expire, ``"raise"`` raises at once.
        wait: Seconds to wait for another process.

    Raises:
        InvalidArgumentError: ``sessions`` is no manager, or ``serde`` would read pickles.

    """

    def __init__(
        self,
        sessions: SessionManager | None,
        *,
        types: Sequence[type | tuple[str, ...] | Registered] = (),
        serde: SerializerProtocol | None = None,
        tenant: str = "",
        tags: Sequence[str] = (SDK,),
        owner: str | None = None,
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        super().__init__(serde=DataSerializer(types) if serde is None else serde)
        self._connection = AdapterManager(
            sessions,
            instead="PerdureSaver.from_conn_string(url)",
            tenant=tenant,
            tags=tags,
            on_held=on_held,
            wait=wait,
        )
        self._threads = ThreadSessions(self._connection)
        self._owner = owner

    @property
    def serde(self) -> SerializerProtocol:
        """The serializer that decides what is read back."""
        return self._serde

    @serde.setter
    def serde(self, serde: SerializerProtocol) -> None:
        require_data_only(serde)
        self._serde = serde
        self._codec = ValueCodec(serde)

    async def release(self, thread_id: str) -> None:
        """Make a thread durable, and give it back to other processes now."""
        session = self._threads.open_here(self._threads.thread(thread_id))
        if session is not None:
            await self._connection.save(session)
            await release_unused(session)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Self:
        """Return a saver of the same threads that reads more classes back."""
        return cast("Self", super().with_allowlist(extra_allowlist))

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Return the version after one, as a number, or as text where another saver began so."""
        if not isinstance(current, str):
            return 1 if current is None else current + 1
        number, _, rest = current.partition(".")
        return f"{int(number) + 1:0{len(number)}}{'.' if rest else ''}{rest}"

    # What a graph calls

    async def aget_tuple(self, config: RunnableConfig) -> sdk.CheckpointTuple | None:
        """Return a checkpoint, by default the namespace's newest; None if there is none.

        Raises:
            FormatError: One of its values cannot be read back.
            OwnerMismatchError: The thread has another owner than the config names.

        """
        place = _place(config)
        thread = await self._current(config)
        id_ = place.id or thread.index.newest(place.ns)
        mark = None if id_ is None else thread.index.mark(place.ns, id_)
        if id_ is None or mark is None or mark.hidden:
            return None
        thread.note(place.ns, id_)
        (found,) = await self._tuples(thread, [Placed(place.ns, id_, mark)])
        return found._replace(config=config) if place.id else found

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[sdk.CheckpointTuple]:
        """Return checkpoints, the newest first; of all threads without a config.

        Args:
            config: Of which thread, and of which namespace and checkpoint, if it names them.
            filter: Keys and values that their metadata must have.
            before: Only those with a lower id than this one's.
            limit: How many at most.

        """
        remaining = sys.maxsize if limit is None else limit
        pages = self._pages(config, filter, before, limit)
        async with aclosing(pages):
            while remaining > 0 and (page := await anext(pages, None)) is not None:
                thread, places = page
                places = places if filter else places[:remaining]
                found = await self._tuples(thread, places, filter)
                for each in found[:remaining]:
                    yield each
                remaining -= len(found)

    async def _pages(
        self,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> AsyncGenerator[tuple[Thread, list[Placed]], None]:
        """Yield checkpoints, the newest first, some of one thread at a time.

        Without a config, no more threads are read than may have the newest ones.
        """
        upper = sdk.get_checkpoint_id(before) if before else None
        if config:
            thread = await self._current(config)
            for page in _in_pages(_matching(thread, config, upper)):
                yield page
            return
        at_once = PAGE if filter or limit is None else min(limit + 1, PAGE)
        left: list[tuple[Placed, Thread]] = []
        listing = self._threads.listed(owner=self._owner_in(filter), newest_first=True)
        async with aclosing(listing):
            is_more = True
            while is_more:
                part: list[SessionInfo] = []
                async for info in listing:
                    part.append(info)
                    if len(part) == at_once:
                        break
                is_more = len(part) == at_once
                for thread in await self._threads.current_of([each.key.agent for each in part]):
                    left += _matching(thread, None, upper)
                left.sort(key=_age, reverse=True)
                # What was made since then is in no thread that was saved before the last of these.
                since = (part[-1].updated_at or 0.0) if is_more else 0.0
                older = (at for at, (place, _) in enumerate(left) if made_at(place.id) < since)
                count = next(older, len(left))
                for page in _in_pages(left[:count]):
                    yield page
                del left[:count]

    def _owner_in(self, about: Mapping[str, Any] | None) -> str | None:
        """Return the owner that a config or a filter names, if threads have owners."""
        owner = (about or {}).get(self._owner) if self._owner is not None else None
        return owner if isinstance(owner, str) else None

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: sdk.Checkpoint,
        metadata: sdk.CheckpointMetadata,
        new_versions: sdk.ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint, and return its config once it is durable.

        With ``durability="async"`` it may return earlier, if writes that were made after it wait
        until they and the checkpoint are durable: so saves of several supersteps become one.

        Raises:
            LeaseHeldError: Another process keeps holding the thread.
            LeaseLostError: Another process has changed the thread since this one read it, or it was
                deleted.
            NotStorableError: A value cannot be stored.

        """
        place, id_ = _place(config), checkpoint["id"]
        thread, at = self._threads.thread(place.thread), (place.ns, id_)
        session = await self._append_checkpoint(config, checkpoint, metadata, new_versions)
        version = session.version
        if thread.writing and at in thread.index.writes and has_room(session):
            thread.released = max(thread.released, version)
        else:
            await self._threads.save_checkpoint(thread, session, version, at)
        return _config(config["configurable"]["thread_id"], place.ns, id_)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task wrote, and return once it is durable.

        A write that is there already stays as it is; an error, an interrupt or a resume value is
        replaced.

        Raises as `aput` does.
        """
        place = _place(config)
        thread = self._threads.thread(place.thread)
        numbered = [
            (sdk.WRITES_IDX_MAP.get(channel, at), channel, value)
            for at, (channel, value) in enumerate(writes)
        ]
        session = await self._append_writes(config, numbered, task_id, task_path)
        thread.writing += 1
        try:
            if has_room(session):
                release_put(thread, (place.ns, config["configurable"]["checkpoint_id"]))
            await self._connection.save(session)
            while session.durable_version < thread.released:
                await self._connection.save(session)
        finally:
            thread.writing -= 1

    # The same, not yet durable

    async def _append_checkpoint(
        self,
        config: RunnableConfig,
        checkpoint: sdk.Checkpoint,
        metadata: sdk.CheckpointMetadata,
        new_versions: sdk.ChannelVersions,
    ) -> Session:
        """Append a checkpoint to its thread's session, which is returned; raises as `aput` does."""
        place, about = _place(config), sdk.get_checkpoint_metadata(config, metadata)
        index = self._threads.thread(place.thread).index

        def change(known: Collection[str]) -> PutChange:
            return self._put(place, checkpoint, about, new_versions, index, known)

        return await self._append(config, (place.ns, place.id), change)

    async def _append_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[int, str, Any]],
        task_id: str,
        task_path: str,
    ) -> Session:
        """Append what a task wrote, with the index of each write; raises as `aput` does."""
        place, id_ = _place(config), config["configurable"]["checkpoint_id"]
        about = TaskWrites(place.ns, id_, task_id, task_path, ())

        def change(known: Collection[str]) -> WritesChange:
            encode_value = self._codec.encode
            where = place.thread, f"{place.ns}\0writes"  # apart from the channels themselves
            values = [
                (at, channel, encode_value(value, (*where, channel), known))
                for at, channel, value in writes
            ]
            return WritesChange(about, tuple(values))

        return await self._append(config, (place.ns, id_), change)

    async def _append(
        self, config: RunnableConfig, at: At, change: Callable[[Collection[str]], Change]
    ) -> Session:
        about = config["configurable"]
        thread = self._threads.thread(about["thread_id"])
        within = tuple((about.get("checkpoint_map") or {}).items())  # graphs that this one is in
        owner = self._owner_in(about)
        return await self._threads.append(thread, at, change, within=within, owner=owner)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, sdk.DeltaChannelHistory]:
        """Return what was written to channels since their last stored value, and that value."""
        place = _place(config)
        thread = await self._current(config)
        id_ = place.id or thread.index.newest(place.ns)
        written, seeds = thread.index.history_of(place.ns, id_ or "", channels)
        names = [name for each in written.values() for _, name in each]
        loaded = await self._values(thread, [*names, *seeds.values()])
        result: dict[str, sdk.DeltaChannelHistory] = {}
        for channel, found in written.items():
            history = [(task, channel, loaded(name, channel)) for task, name in reversed(found)]
            result[channel] = {"writes": history}
            if channel in seeds:
                result[channel]["seed"] = loaded(seeds[channel], channel)
        return result

    # Reading

    async def _current(self, config: RunnableConfig) -> Thread:
        """Return the thread of a config, which may name its owner and nobody else."""
        owner = self._owner_in(config.get("configurable"))
        return await self._threads.current(_place(config).thread, owner)

    async def _values(self, thread: Thread, names: Collection[str]) -> Callable[[str, str], Any]:
        """Return what loads these values of a thread; it is told the channel, for its errors."""
        index, codec = thread.index, self._codec
        pinned = codec.pin(index, thread.key.agent, names)
        unknown = [name for name, original in pinned.originals.items() if original is None]
        leaves = await self._threads.leaves_of(thread, unknown)

        def load(name: str, channel: str) -> Any:
            try:
                return codec.load(index, name, leaves, pinned)
            except FormatError as error:
                message = f"thread {thread.key}: channel {channel!r} cannot be read back: {error}"
                raise type(error)(message, key=str(thread.key), channel=channel) from error

        return load

    async def _bodies(self, thread: Thread, places: Sequence[Placed]) -> list[dict[str, Any]]:
        """Return what checkpoints have apart from channels: ``checkpoint`` and ``metadata``."""
        puts = await self._threads.puts_at(thread, [mark.seq for _, _, mark in places])
        stored = [puts[mark.seq] for _, _, mark in places]
        opaque = [put.opaque for put in stored if put.opaque]
        if not opaque:
            return [msgspec.json.decode(put.body) for put in stored]
        load = await self._values(thread, opaque)
        return [
            load(put.opaque, "metadata") if put.opaque else msgspec.json.decode(put.body)
            for put in stored
        ]

    async def _tuples(
        self, thread: Thread, places: Sequence[Placed], wanted: dict[str, Any] | None = None
    ) -> list[sdk.CheckpointTuple]:
        """Return checkpoints as LangGraph knows them, if their metadata have these values."""
        index, bodies = thread.index, await self._bodies(thread, places)
        if wanted:
            both = [
                (place, body)
                for place, body in zip(places, bodies, strict=True)
                if all(at_path(body["metadata"], name) == wanted[name] for name in wanted)
            ]
            places, bodies = [place for place, _ in both], [body for _, body in both]
        writes = [index.writes_of(ns, id_) for ns, id_, _ in places]
        names = [name for _, _, mark in places for name in mark.channels.values()]
        names += [write.value for each in writes for _, _, write in each]
        load = await self._values(thread, names)
        found = []
        for (ns, id_, mark), stored, body in zip(places, writes, bodies, strict=True):
            values = {channel: load(name, channel) for channel, name in mark.channels.items()}
            checkpoint = {**body["checkpoint"], "id": id_, "channel_values": values}
            checkpoint["channel_versions"] = dict(mark.versions)
            pending = [
                (task, write.channel, load(write.value, write.channel)) for task, _, write in stored
            ]
            thread_id = thread.key.agent
            parent = None if mark.parent is None else _config(thread_id, ns, mark.parent)
            found.append(
                sdk.CheckpointTuple(
                    config=_config(thread_id, ns, id_),
                    checkpoint=cast("sdk.Checkpoint", checkpoint),
                    metadata=body["metadata"],
                    parent_config=parent,
                    pending_writes=pending,
                )
            )
        return found

    # Threads as a whole

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete a thread's session with all that it has.

        Raises:
            LeaseHeldError: Another process keeps holding it.

        """
        await self._threads.delete(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs with their writes, in all threads.

        What other checkpoints are rebuilt from stays, and is not shown.

        Raises:
            LeaseHeldError: Another process keeps holding a thread that has one.

        """
        runs = set(run_ids)
        async for info in self._threads.listed():
            thread = await self._threads.current(info.key.agent)
            gone = set[tuple[str, str]]()
            for _, places in _in_pages(_matching(thread, None, None)):
                bodies = await self._bodies(thread, places)
                for (ns, id_, _), body in zip(places, bodies, strict=True):
                    if body["metadata"].get("run_id") in runs:
                        gone.add((ns, id_))
            if gone:
                await self._threads.keep(
                    thread,
                    lambda ns, ids, gone=gone: {  # type: ignore[misc]
                        id_ for id_ in ids if (ns, id_) not in gone
                    },
                )

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Begin a thread with all of another one's checkpoints; both share what they have now.

        Raises:
            SessionError: The new thread exists.
            SessionNotFoundError: The other does not.

        """
        await self._threads.copy(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Remove what threads do not need any more, also from the store.

        ``"keep_latest"`` keeps each namespace's newest checkpoint with its writes, and, not shown
        any more, those that it is rebuilt from. ``"delete"`` deletes the threads.

        Raises:
            InvalidArgumentError: There is no such strategy.
            LeaseHeldError: Another process keeps holding a thread.

        """
        if strategy not in ("keep_latest", "delete"):
            message = f'invalid strategy={strategy!r}: choose "keep_latest" or "delete"'
            raise InvalidArgumentError(message, option="strategy")
        for thread_id in thread_ids:
            if strategy == "delete":
                await self.adelete_thread(thread_id)
            else:
                thread = await self._threads.current(thread_id)
                if thread.index.checkpoints:
                    await self._threads.keep(thread, lambda _, ids: {max(ids)} if ids else set())

    # The same for other threads of execution

    def get_tuple(self, config: RunnableConfig) -> sdk.CheckpointTuple | None:
        """Return a checkpoint; see `aget_tuple`."""
        return self._wait_for(self.aget_tuple(config))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: sdk.Checkpoint,
        metadata: sdk.CheckpointMetadata,
        new_versions: sdk.ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint; see `aput`."""
        return self._wait_for(self.aput(config, checkpoint, metadata, new_versions))

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task wrote; see `aput_writes`."""
        self._wait_for(self.aput_writes(config, writes, task_id, task_path))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, sdk.DeltaChannelHistory]:
        """Return channels' histories; see `aget_delta_channel_history`."""
        return self._wait_for(self.aget_delta_channel_history(config=config, channels=channels))

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread; see `adelete_thread`."""
        self._wait_for(self.adelete_thread(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs; see `adelete_for_runs`."""
        self._wait_for(self.adelete_for_runs(run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread; see `acopy_thread`."""
        self._wait_for(self.acopy_thread(source_thread_id, target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Prune threads; see `aprune`."""
        self._wait_for(self.aprune(thread_ids, strategy=strategy))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[sdk.CheckpointTuple]:
        """Return checkpoints; see `alist`."""

        async def collect() -> list[sdk.CheckpointTuple]:
            found = self.alist(config, filter=filter, before=before, limit=limit)
            return [each async for each in found]

        yield from self._wait_for(collect())

    def _put(
        self,
        place: _Place,
        checkpoint: sdk.Checkpoint,
        metadata: sdk.CheckpointMetadata,
        new_versions: sdk.ChannelVersions,
        index: ThreadIndex,
        known: Collection[str],
    ) -> PutChange:
        values = checkpoint["channel_values"]
        parts = ("channel_values", "channel_versions")
        rest = {name: value for name, value in checkpoint.items() if name not in parts}
        where = place.thread, place.ns
        whole = _as_json({"checkpoint": rest, "metadata": metadata})
        opaque, body = None, msgspec.Raw(_body(whole))
        if not body:
            opaque = self._codec.encode(whole, (*where, "metadata"), known)
        put = CheckpointPut(
            ns=place.ns,
            id=checkpoint["id"],
            parent=place.id,
            channels={},
            versions=dict(checkpoint["channel_versions"]),
            body=body,
            delta=tuple(metadata.get("counters_since_delta_snapshot") or ()),
            opaque="" if opaque is None else opaque.name,
        )

        old = [name for name in put.versions if name not in new_versions]
        unknown = [name for name in old if index.value_of(put, name) is None]
        unknown += [name for name in values if name not in put.versions]
        encoded = {
            name: self._codec.encode(values[name], (*where, name), known)
            for name in (*new_versions, *unknown)
            if name in values
        }
        emptied = frozenset(new_versions) - frozenset(values)
        is_input = metadata.get("source") == "input"
        return PutChange(put, emptied, encoded, opaque, is_input)


def _place(config: RunnableConfig) -> _Place:
    about = config["configurable"]
    thread_id = str(about["thread_id"])
    return _Place(thread_id, about.get("checkpoint_ns", ""), sdk.get_checkpoint_id(config) or None)


def _config(thread_id: Any, ns: str, id_: str) -> RunnableConfig:
    about = {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": id_}
    return {"configurable": about}


def _matching(
    thread: Thread, config: RunnableConfig | None, upper: str | None
) -> list[tuple[Placed, Thread]]:
    """Return a thread's checkpoints that a config names, the newest first."""
    about = config["configurable"] if config else {}
    namespace, wanted = about.get("checkpoint_ns"), about.get("checkpoint_id")
    found = [
        (Placed(ns, id_, mark), thread)
        for ns in thread.index.checkpoints
        if namespace in (None, ns)
        for id_, mark in thread.index.visible(ns)
        if (not wanted or id_ == wanted) and (upper is None or id_ < upper)
    ]
    return sorted(found, key=_age, reverse=True)


def _age(placed: tuple[Placed, Thread]) -> tuple[str, str]:
    """Return the key that sorts checkpoints by age."""
    place, _ = placed
    return place.id, place.ns


def _in_pages(placed: list[tuple[Placed, Thread]]) -> Iterator[tuple[Thread, list[Placed]]]:
    """Yield checkpoints that are of one thread, as many as are read at a time."""
    for thread, run in groupby(placed, key=itemgetter(1)):
        places = [place for place, _ in run]
        for at in range(0, len(places), PAGE):
            yield thread, places[at : at + PAGE]


def made_at(checkpoint_id: str) -> float:
    """Return when a checkpoint was made, in seconds since 1970; 0.0 if its id does not say it.

    >>> int(made_at("1efb6f3c-0000-6000-8000-000000000000"))
    1733834348
    """
    with suppress(ValueError):
        number = UUID(checkpoint_id).int
        if (number >> 76) & 0xF == 6:
            ticks = (number >> 80) << 12 | (number >> 64) & 0xFFF  # of 100 ns since 1582
            return ticks / 1e7 - 12_219_292_800
    return 0.0


def _body(whole: dict[str, Any]) -> bytes:
    """Return a checkpoint's own record as JSON; nothing if it is no JSON, or large."""
    if not is_plain(whole):
        return b""
    with suppress(NotStorableError):  # a lone surrogate
        data = encode(whole)
        if len(data) <= PART:
            return data
    return b""


def _as_json(value: Any) -> Any:
    """Return a value with lists instead of tuples, which LangGraph's serializer makes of them."""
    if type(value) is dict:
        return {key: _as_json(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_as_json(item) for item in value]
    return value
