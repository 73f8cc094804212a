"""A LangGraph thread in its session's log: its records, and the index of what they hold.

Pure: records in, an index out. Nothing here knows LangGraph or a store.

A value is stored once, under a name made of its content. A list is stored as what it adds to an
earlier one, so a list that grows costs what was added. A checkpoint names the value of each of its
channels. Later records take back what earlier ones hold: a ``reset`` begins a thread anew.
"""

from __future__ import annotations

import hashlib
import math
from base64 import b64decode
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, final

import msgspec

from perdure.adapters.envelopes import SdkEnvelope, read_entry
from perdure.errors import CorruptRecordError
from perdure.records.json import encode
from perdure.records.records import EPOCH, FOREIGN, Entry, Record

SDK: Final = "langgraph"
SHAPE: Final = 1
"""The version of what is stored here."""
LIST: Final = "list"
SNAPSHOT: Final = "snapshot"
"""The type of a list that LangGraph stores now and then of a channel that it rebuilds."""
JOINED: Final = "joined:"
"""Before the serializer's type of a large value, whose items are its parts."""
PART: Final = 4 * 1024 * 1024
"""Bytes of a value in one record; a larger one is stored in parts."""
SLACK: Final = 64
"""A list is stored whole again if so many more lists than items are needed to read it."""

RECENT_LISTS: Final = 8
"""Lists whose items are kept in memory."""


class Leaf(msgspec.Struct, frozen=True, array_like=True, tag="leaf"):
    """A value, or a part of one, as the serializer gave it."""

    name: str
    kind: str
    """The serializer's type, or ``part``."""
    data: str
    """In base64."""


class Items(msgspec.Struct, frozen=True, array_like=True, tag="items"):
    """A value that is made of others: how an earlier one begins, and what follows."""

    name: str
    kind: str
    """`LIST`, `SNAPSHOT`, or `JOINED` and a type."""
    base: str | None
    keep: int
    """Number of items of the base that it begins with."""
    add: tuple[str, ...]


class CheckpointPut(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checkpoint."""

    ns: str
    id: str
    parent: str | None
    channels: dict[str, str]
    """The names of the channels' values; a channel without one is empty."""
    versions: dict[str, str | int | float]
    body: msgspec.Raw = msgspec.Raw(b"")
    """The rest of it and its metadata, as JSON."""
    delta: tuple[str, ...] = ()
    """Channels that are rebuilt from what was written since their last snapshot."""
    opaque: str = ""
    """Instead, the name of the value that has both, where they are no JSON."""
    hidden: bool = False
    """Whether it was pruned, and is there for what others are rebuilt from."""


class TaskWrites(msgspec.Struct, frozen=True, omit_defaults=True):
    """Writes of a task."""

    ns: str
    id: str
    """The checkpoint that it ran on."""
    task: str
    path: str
    writes: tuple[tuple[int, str, str], ...]
    """Index, channel, and the name of the value."""


class ThreadRecord(SdkEnvelope, frozen=True, omit_defaults=True):
    """One record."""

    reset: bool = False
    """Whether nothing counts that was stored before."""
    values: tuple[Leaf | Items, ...] = ()
    put: CheckpointPut | None = None
    writes: TaskWrites | None = None


class Holder(msgspec.Struct, frozen=True):
    """Writer under an epoch."""

    owner: str = ""
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else f"owner {self.owner}"


class Mark(NamedTuple):
    """Place of a checkpoint, and the facts that a walk along its parents needs."""

    seq: int
    parent: str | None
    channels: dict[str, str]
    versions: dict[str, str | int | float]
    delta: tuple[str, ...]
    hidden: bool


class Write(NamedTuple):
    """A write of a task."""

    path: str
    channel: str
    value: str


_holders = msgspec.json.Decoder(Holder)


def name_of(kind: str, data: bytes) -> str:
    """Return the name of a value: equal ones have the same."""
    digest = hashlib.blake2b(b"%b\0%b" % (kind.encode(), data), digest_size=15).digest()
    return b2a_base64(digest, newline=False).decode()


def name_of_items(kind: str, items: Iterable[str]) -> str:
    """Return the name of a value that is made of others."""
    return name_of("+" + kind, "".join(items).encode())


def read_record(record: Record) -> ThreadRecord | None:
    """Return a record of a thread; None for any other.

    Raises:
        CorruptRecordError: It cannot be read.
        UnsupportedVersionError: A newer release wrote it.

    """
    return read_entry(record, ThreadRecord, sdk=SDK, newest=SHAPE)


def entries_of(records: Iterable[ThreadRecord]) -> tuple[Entry, ...]:
    """Return records of a thread as records of a log."""
    return tuple(Entry(FOREIGN, encode(record)) for record in records)


def split_values(values: Iterable[Leaf | Items]) -> Iterator[ThreadRecord]:
    """Return records with values, as many as it takes to keep each of them small."""
    batch: list[Leaf | Items] = []
    size = 0
    for value in values:
        grows = len(value.data) if isinstance(value, Leaf) else 24 * len(value.add)
        if batch and size + grows > PART:
            yield ThreadRecord(SDK, SHAPE, values=tuple(batch))
            batch, size = [], 0
        batch.append(value)
        size += grows
    if batch:
        yield ThreadRecord(SDK, SHAPE, values=tuple(batch))


@final
class ThreadIndex:
    """Contents of a thread's records, without the data of its values."""

    def __init__(self) -> None:
        self.upto: int = 0
        """The newest record that was taken in."""
        self.epoch: int = 0
        """Its epoch."""
        self.holders: dict[int, Holder] = {}
        self.is_known: bool = False
        """Whether the log has any record of a thread."""
        self._clear()

    def _clear(self) -> None:
        self.checkpoints: dict[str, dict[str, Mark]] = {}
        self._newest: dict[str, str] = {}
        self.writes: dict[tuple[str, str], dict[tuple[str, int], Write]] = {}
        self.leaves: dict[str, int] = {}
        """The records that have the values."""
        self.items: dict[str, Items] = {}
        self._depth: dict[str, int] = {}
        self._recent: dict[str, tuple[str, ...]] = {}
        self.values_of: dict[tuple[str, str, str | int | float], str | None] = {}
        """By namespace, channel and version: the value, None for an empty channel."""
        self.newest_list: dict[tuple[str, str], str] = {}
        """By namespace and channel: the list that a longer one probably continues."""

    def apply(self, record: Record) -> ThreadRecord | None:
        """Take a record in, and return it if it is a thread's."""
        self.upto, self.epoch = record.seq, record.epoch
        if record.kind == EPOCH:
            try:
                self.holders[record.epoch] = _holders.decode(record.payload)
            except msgspec.DecodeError:
                self.holders[record.epoch] = Holder()
            return None
        stored = read_record(record)
        if stored is not None:
            self.add(stored, record.seq, record.epoch)
        return stored

    def add(self, stored: ThreadRecord, seq: int, epoch: int) -> None:
        """Take in what the record of a number has."""
        self.upto, self.epoch, self.is_known = seq, epoch, True
        if stored.reset:
            self._clear()
        for value in stored.values:
            if isinstance(value, Leaf):
                self.leaves[value.name] = seq
            else:
                self.items[value.name] = value
                base = 0 if value.base is None else self._depth.get(value.base, 0) + 1
                self._depth[value.name] = base
        if stored.put is not None:
            self._put(seq, stored.put)
        if stored.writes is not None:
            self._write(stored.writes)

    def _put(self, seq: int, put: CheckpointPut) -> None:
        mark = Mark(seq, put.parent, put.channels, put.versions, put.delta, put.hidden)
        self.checkpoints.setdefault(put.ns, {})[put.id] = mark
        if put.hidden:
            self._newest.pop(put.ns, None)
        elif put.ns in self._newest:
            self._newest[put.ns] = max(self._newest[put.ns], put.id)
        for channel, version in put.versions.items():
            value = put.channels.get(channel)
            self.values_of[put.ns, channel, version] = value
            if value in self.items:
                self.newest_list[put.ns, channel] = value

    def _write(self, put: TaskWrites) -> None:
        stored = self.writes.setdefault((put.ns, put.id), {})
        for at, channel, value in put.writes:
            if at < 0 or (put.task, at) not in stored:
                stored[put.task, at] = Write(put.path, channel, value)

    # what there is

    def mark(self, ns: str, checkpoint: str) -> Mark | None:
        """Return a checkpoint, also one that is hidden."""
        return self.checkpoints.get(ns, {}).get(checkpoint)

    def value_of(self, put: CheckpointPut, channel: str) -> str | None:
        """Return the value of a channel that a checkpoint leaves as it was; None for no value."""
        version = put.versions[channel]
        parent = None if put.parent is None else self.mark(put.ns, put.parent)
        if parent is not None and parent.versions.get(channel) == version:
            return parent.channels.get(channel)
        return self.values_of.get((put.ns, channel, version))

    def newest(self, ns: str) -> str | None:
        """Return the id of a namespace's newest checkpoint."""
        if ns not in self._newest:
            newest = max((id_ for id_, _ in self.visible(ns)), default=None)
            if newest is None:
                return None
            self._newest[ns] = newest
        return self._newest[ns]

    def visible(self, ns: str) -> Iterator[tuple[str, Mark]]:
        """Return the checkpoints of a namespace that were not taken away."""
        marks = self.checkpoints.get(ns, {})
        return ((id_, mark) for id_, mark in marks.items() if not mark.hidden)

    def ancestors(self, ns: str, checkpoint: str) -> Iterator[tuple[str, Mark]]:
        """Return a checkpoint's parents, the nearest first, hidden ones included."""
        mark, passed = self.mark(ns, checkpoint), {checkpoint}
        while mark is not None and mark.parent is not None and mark.parent not in passed:
            passed.add(mark.parent)  # ids are what callers say: a circle ends, too
            parent, mark = mark.parent, self.mark(ns, mark.parent)
            if mark is not None:
                yield parent, mark

    def writes_of(self, ns: str, checkpoint: str) -> list[tuple[str, int, Write]]:
        """Return a checkpoint's writes, with task and index, in the order of a superstep."""
        stored = self.writes.get((ns, checkpoint), {})
        order = sorted(stored, key=lambda at: (stored[at].path, *at))
        return [(task, at, stored[task, at]) for task, at in order]

    def history_of(
        self, ns: str, checkpoint: str, channels: Iterable[str]
    ) -> tuple[dict[str, list[tuple[str, str]]], dict[str, str]]:
        """Return what was written to channels before a checkpoint, and where that begins.

        Returns:
            By channel: tasks and values, the newest first; and the value before these.

        """
        seeds: dict[str, str] = {}
        written: dict[str, list[tuple[str, str]]] = {channel: [] for channel in channels}
        for parent, mark in self.ancestors(ns, checkpoint):
            remaining = written.keys() - seeds.keys()
            if not remaining:
                break
            for task, _, write in reversed(self.writes_of(ns, parent)):
                if write.channel in remaining:
                    written[write.channel].append((task, write.value))
            seeds |= {name: mark.channels[name] for name in remaining & mark.channels.keys()}
        return written, seeds

    # lists

    def names_in(self, name: str) -> tuple[str, ...]:
        """Return the names of a list's items.

        Raises:
            CorruptRecordError: What it continues is not there.

        """
        recent = self._recent.get(name)
        if recent is not None:
            return recent
        parts: list[tuple[str, ...]] = []
        need: float = math.inf
        at: str | None = name
        while at is not None and need > 0:
            node = self.items.get(at)
            if node is None:
                message = f"a list continues the value {at}, which is not stored"
                raise CorruptRecordError(message, value=at)
            if need > node.keep:
                parts.append(node.add[: None if need == math.inf else int(need) - node.keep])
            need = min(need, node.keep)
            at = node.base
        return self._used(name, tuple(item for part in reversed(parts) for item in part))

    def _used(self, name: str, items: tuple[str, ...]) -> tuple[str, ...]:
        self._recent[name] = items
        if len(self._recent) > RECENT_LISTS:
            del self._recent[next(iter(self._recent))]
        return items

    def as_items(self, name: str, kind: str, items: tuple[str, ...], base: str | None) -> Items:
        """Return how to store a list, as what it adds to a stored one."""
        self._used(name, items)
        if base is not None and self._depth.get(base, 0) <= len(items) + SLACK:
            known = self.names_in(base)
            keep = _common(known, items)
            if keep:
                return Items(name, kind, base, keep, items[keep:])
        return Items(name, kind, None, 0, items)

    # what a pruned thread keeps

    def with_sources(self, ns: str, ids: Iterable[str]) -> dict[str, bool]:
        """Return ids of checkpoints, and of those that they are rebuilt from.

        Returns:
            The ids, the oldest record first, and whether each of them is one of the given ones.

        """
        kept = dict.fromkeys(ids, True)
        for id_ in list(kept):
            missing = self._rebuilt(ns, id_)
            for parent, mark in self.ancestors(ns, id_):
                if not missing:
                    break
                kept.setdefault(parent, False)
                missing -= mark.channels.keys()
        marks = self.checkpoints[ns]
        return {id_: kept[id_] for id_ in sorted(kept, key=lambda id_: marks[id_].seq)}

    def _rebuilt(self, ns: str, checkpoint: str) -> set[str]:
        """Return the channels of a checkpoint that are rebuilt from what was written before it."""
        mark = self.checkpoints[ns][checkpoint]
        empty = mark.versions.keys() - mark.channels.keys()
        return {name for name in empty if name in mark.delta or self._had_snapshot(ns, name)}

    def _had_snapshot(self, ns: str, channel: str) -> bool:
        newest = self.newest_list.get((ns, channel))
        return newest is not None and self.items[newest].kind == SNAPSHOT

    def parts_of(self, names: Iterable[str]) -> Iterator[str]:
        """Return the leaves that values are made of."""
        for name in names:
            yield from (self.names_in(name) if name in self.items else (name,))


def _common(known: tuple[str, ...], items: tuple[str, ...]) -> int:
    """Return how many items two lists begin with alike."""
    if items[: len(known)] == known:
        return len(known)
    for at, (old, new) in enumerate(zip(known, items, strict=False)):
        if old != new:
            return at
    return min(len(known), len(items))


class Value(NamedTuple):
    """A value to be stored."""

    name: str
    kind: str
    """The type of `Items`; empty for a leaf."""
    items: tuple[str, ...]
    leaves: dict[str, Leaf]
    """Values of a checkpoint that may have to be stored."""

    def missing(self, index: ThreadIndex, base: str | None) -> Iterator[Leaf | Items]:
        """Return what is to be stored of it, where ``base`` is a list that it may continue."""
        if self.name in index.leaves or self.name in index.items:
            return
        for name, leaf in self.leaves.items():
            if name not in index.leaves:
                yield leaf
        if self.kind:
            yield index.as_items(self.name, self.kind, self.items, base)


class PutChange(NamedTuple):
    """A checkpoint to be stored."""

    put: CheckpointPut
    emptied: frozenset[str]
    """New channels without a value."""
    values: dict[str, Value]
    """Of the channels that are new, and of others of which no value is stored."""
    opaque: Value | None
    is_input: bool = False
    """Whether a run begins with it."""

    def records(self, index: ThreadIndex) -> list[ThreadRecord]:
        """Return what to append to a thread."""
        put, ns = self.put, self.put.ns
        parent = None if put.parent is None else index.mark(ns, put.parent)
        before = {} if parent is None else parent.channels
        channels = {name: value.name for name, value in self.values.items()}
        for name in put.versions:
            is_new = name in channels or name in self.emptied
            kept = None if is_new else index.value_of(put, name)
            if kept is not None:
                channels[name] = kept
        values = dict[str, Leaf | Items]()
        for name, value in self.values.items():
            base = before.get(name)
            base = base if base in index.items else index.newest_list.get((ns, name))
            _add(values, value.missing(index, base))
        if self.opaque is not None:
            _add(values, self.opaque.missing(index, None))
        return _with_values(values, put=msgspec.structs.replace(put, channels=channels))


class WritesChange(NamedTuple):
    """Writes of a task to be stored."""

    about: TaskWrites
    writes: tuple[tuple[int, str, Value], ...]

    def records(self, index: ThreadIndex) -> list[ThreadRecord]:
        """Return what to append to a thread; nothing if all of it is there."""
        about = self.about
        stored = index.writes.get((about.ns, about.id), {})
        writes = [
            each for each in self.writes if each[0] < 0 or (about.task, each[0]) not in stored
        ]
        if not writes:
            return []
        values = dict[str, Leaf | Items]()
        for _, channel, value in writes:
            _add(values, value.missing(index, index.newest_list.get((about.ns, channel))))
        names = tuple((at, channel, value.name) for at, channel, value in writes)
        return _with_values(values, writes=msgspec.structs.replace(about, writes=names))


def compacted(
    index: ThreadIndex,
    kept: Mapping[str, Mapping[str, bool]],
    puts: Mapping[int, CheckpointPut],
    leaves: Mapping[str, Leaf],
) -> list[ThreadRecord]:
    """Return records that replace a thread by some of its checkpoints.

    Args:
        index: What it has now.
        kept: By namespace and id: whether a checkpoint stays visible.
        puts: The records of these checkpoints.
        leaves: What their values are made of.

    """
    fresh = ThreadIndex()
    records = [ThreadRecord(SDK, SHAPE, reset=True)]

    def value_of(name: str) -> Value:
        node = index.items.get(name)
        items = () if node is None else index.names_in(name)
        parts = {part: leaves[part] for part in items or (name,)}
        return Value(name, "" if node is None else node.kind, items, parts)

    def add(change: PutChange | WritesChange) -> None:
        for record in change.records(fresh):
            fresh.add(record, len(records), 1)
            records.append(record)

    for ns, ids in kept.items():
        for id_, is_visible in ids.items():
            mark = index.checkpoints[ns][id_]
            put = msgspec.structs.replace(puts[mark.seq], hidden=not is_visible)
            values = {channel: value_of(name) for channel, name in mark.channels.items()}
            opaque = value_of(put.opaque) if put.opaque else None
            add(PutChange(put, frozenset(mark.versions), values, opaque))
            for task, at, write in index.writes_of(ns, id_):
                about = TaskWrites(ns, id_, task, write.path, ())
                add(WritesChange(about, ((at, write.channel, value_of(write.value)),)))
    return records


def _add(values: dict[str, Leaf | Items], more: Iterable[Leaf | Items]) -> None:
    for value in more:
        values[value.name] = value


def _with_values(
    values: Mapping[str, Leaf | Items],
    *,
    put: CheckpointPut | None = None,
    writes: TaskWrites | None = None,
) -> list[ThreadRecord]:
    records = list(split_values(values.values()))
    last = records.pop() if records else ThreadRecord(SDK, SHAPE)
    return [*records, msgspec.structs.replace(last, put=put, writes=writes)]


# The classes that values are of, read without LangGraph: nothing is imported, called or rebuilt


NAMED_CODES: Final = frozenset(range(6))
"""Codes of LangGraph's msgpack extensions that begin with a module and a name."""
METHOD_CODE: Final = 3
"""That of a class's method, whose name follows the argument."""
REBUILT: Final = 7
"""That of a value which a channel is rebuilt from."""


def classes_of(record: Record) -> set[str]:
    """Return the dotted names of the classes in a record, and what else is no plain data."""
    stored = read_record(record)
    return set() if stored is None else {name for each in stored.values for name in _names(each)}


def _names(value: Leaf | Items) -> Iterator[str]:
    if isinstance(value, Items):
        if value.kind.startswith(JOINED):
            yield "a value of more than 4 MiB, which was not looked into"
    elif value.kind == "msgpack":
        yield from _in_msgpack(b64decode(value.data))
    elif value.kind == "json":
        yield from _in_json(msgspec.json.decode(b64decode(value.data)))
    elif value.kind not in ("null", "bytes", "bytearray", "part"):
        yield f"a value stored as {value.kind}"


def _in_msgpack(data: bytes) -> set[str]:
    names: set[str] = set()

    def look(code: int, data: memoryview) -> Any:
        if code in NAMED_CODES:
            inside = msgspec.msgpack.decode(data, ext_hook=look)
            parts = (*inside[:2], inside[3]) if code == METHOD_CODE else inside[:2]
            names.add(".".join(map(str, parts)))
        elif code == REBUILT:
            msgspec.msgpack.decode(data, ext_hook=look)
        return None

    msgspec.msgpack.decode(data, ext_hook=look)
    return names


def _in_json(value: Any) -> Iterator[str]:
    """Yield the classes of LangChain's own JSON, in which LangGraph stored until 2024."""
    inside: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inside = value.values()
        if value.get("type") == "constructor" and isinstance(value.get("id"), list):
            yield ".".join(map(str, value["id"]))
    for item in inside:
        yield from _in_json(item)
