"""LangGraph's threads as conversations: their messages and checkpoints, from the log alone.

No class that a thread names is imported, and nothing that is stored runs. A message is shown at the
first checkpoint that has it, once; one that the newest checkpoint has no longer is still shown.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, final

import msgspec

from perdure.adapters.thread_log import (
    CheckpointPut,
    Leaf,
    TaskWrites,
    ThreadIndex,
    ThreadRecord,
    read_record,
)
from perdure.errors import CorruptRecordError
from perdure.inspector.activity import (
    TAIL,
    SessionStatus,
    StatusName,
    Tokens,
    TurnShown,
    tokens_in,
    unfinished,
)
from perdure.records.keys import SessionKey
from perdure.records.records import FOREIGN, Record
from perdure.store import Store

KNOWN: Final = 8
"""Threads whose index is kept."""
LARGEST: Final = 100_000
"""Bytes of a value that is decoded, unless it is a message."""
ROLES: Final = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}
"""By the type of a message of LangChain's."""
_INPUT: Final = "__start__"
"""The channel of a run's input."""
_ERROR: Final = "__error__"
_INTERRUPT: Final = "__interrupt__"
_RESUME: Final = "__resume__"
_NEXT: Final = "branch:to:"
"""Channels that start a node."""
_MESSAGE: Final = b"langchain_core.messages"


# Values


def plain_value(leaf: Leaf) -> Any:
    """Return a stored value as plain data; a text about it if it is large, or of another kind.

    Raises:
        ValueError: It cannot be read.

    """
    data = b64decode(leaf.data)
    if leaf.kind != "msgpack" or (len(data) > LARGEST and _MESSAGE not in data[:80]):
        return f"{len(data):,} bytes of {leaf.kind}"
    return msgspec.msgpack.decode(data, ext_hook=_plain)


def _plain(_: int, data: memoryview) -> Any:
    """Return an object's fields, or its only argument: it is stored as module, class, argument."""
    value = msgspec.msgpack.decode(data, ext_hook=_plain)
    if isinstance(value, list) and len(value) > 2:
        return value[2]
    return value


def role_of(value: Any) -> str:
    """Return the role of a value that is a message; "" for any other."""
    if not isinstance(value, dict) or "content" not in value:
        return ""
    kind = value.get("type") or value.get("role")
    if not isinstance(kind, str):
        return ""
    return ROLES.get(kind, kind if kind in ROLES.values() else "")


# A thread


class ThreadMessage(NamedTuple):
    """A message's place, without its content."""

    name: str
    """The value's."""
    seq: int
    """The record that has the value."""
    role: str
    at: float | None
    """The time of the first checkpoint that has it."""
    tokens: Tokens
    checkpoint: int
    """That checkpoint's record."""


class ThreadCheckpoint(msgspec.Struct, kw_only=True):
    """A checkpoint."""

    id: str
    ns: str
    """The subgraph that it is of; "" for the graph."""
    parent: str | None
    seq: int
    at: float | None
    source: str
    """``input``, ``loop``, ``update`` or ``fork``; "" where it cannot be read."""
    step: int | None
    turn: int
    messages: int
    """Messages that came with it."""
    next: list[str]
    """Nodes that run next."""
    hidden: bool
    """Whether it was pruned, and is there for what others are rebuilt from."""


class ThreadView(NamedTuple):
    """All that pages show of a thread."""

    messages: list[ThreadMessage]
    checkpoints: list[ThreadCheckpoint]
    """In the order of the log."""
    turns: list[TurnShown]
    current: frozenset[str]
    """Values that the newest checkpoint has."""

    def turns_as_of(self, status: StatusName) -> list[TurnShown]:
        """Return the turns, the newest with the status that the end of the log tells."""
        if not self.turns:
            return []
        newest: StatusName | Literal["done"] = "done" if status == "idle" else status
        return [*self.turns[:-1], msgspec.structs.replace(self.turns[-1], status=newest)]


class _Metadata(msgspec.Struct, frozen=True):
    source: Any = ""
    step: Any = None


class _State(msgspec.Struct, frozen=True):
    ts: Any = None


class _Body(msgspec.Struct):
    checkpoint: _State = _State()
    metadata: _Metadata = _Metadata()


class _Value(NamedTuple):
    seq: int
    role: str
    tokens: Tokens


@final
class ThreadLog:
    """What is known of one thread's log; it grows with the log."""

    def __init__(self) -> None:
        self.index: ThreadIndex = ThreadIndex()
        self._clear()

    def _clear(self) -> None:
        self._values: dict[str, _Value] = {}
        self._walked: set[str] = set()
        self._shown: set[str] = set()
        self.messages: list[ThreadMessage] = []
        self.checkpoints: list[ThreadCheckpoint] = []
        self.turns: list[TurnShown] = []

    def take(self, record: Record) -> None:
        """Take in the next record; one that cannot be read counts as nothing."""
        try:
            stored = self.index.apply(record)
        except CorruptRecordError:
            return
        if stored is None:
            return
        if stored.reset:
            self._clear()
        for value in stored.values:
            if isinstance(value, Leaf):
                self._note(record.seq, value)
        if stored.put is not None:
            self._put(record.seq, stored.put)

    def _note(self, seq: int, leaf: Leaf) -> None:
        try:
            value = plain_value(leaf)
        except (ValueError, RecursionError):
            return
        if role := role_of(value):
            tokens = tokens_in(value.get("usage_metadata"))
            self._values.setdefault(leaf.name, _Value(seq, role, tokens))

    def _put(self, seq: int, put: CheckpointPut) -> None:
        body = _body(put)
        at = _time(body.checkpoint.ts)
        is_root = not put.ns
        if is_root and not put.hidden:
            if not self.turns or _INPUT in put.channels:
                if self.turns and put.parent is not None:
                    self.turns[-1].status = self._end_of(put.parent)
                number = len(self.turns) + 1
                self.turns.append(TurnShown(first=seq, number=number, at=at, status="done"))
            turn = self.turns[-1]
            turn.last = seq
            if at is not None and turn.at is not None:
                turn.took = max(at - turn.at, 0.0)
        fresh = self._fresh(put) if is_root else []
        for name in fresh:
            value = self._values[name]
            self.turns[-1].tokens += value.tokens
            self.messages.append(ThreadMessage(name, value.seq, value.role, at, value.tokens, seq))
        source, step = body.metadata.source, body.metadata.step
        self.checkpoints.append(
            ThreadCheckpoint(
                id=put.id,
                ns=put.ns,
                parent=put.parent,
                seq=seq,
                at=at,
                source=source if isinstance(source, str) else "",
                step=step if isinstance(step, int) else None,
                turn=len(self.turns),
                messages=len(fresh),
                next=_next(put.channels),
                hidden=put.hidden,
            )
        )

    def _end_of(self, checkpoint: str) -> Literal["failed", "interrupted", "done"]:
        """Return how the turn ended that had this checkpoint as its last one."""
        mark = self.index.mark("", checkpoint)
        written = {write.channel for _, _, write in self.index.writes_of("", checkpoint)}
        if _ERROR in written:
            return "failed"
        return "interrupted" if mark is not None and _next(mark.channels) else "done"

    def _fresh(self, put: CheckpointPut) -> list[str]:
        """Return the messages of a checkpoint that no earlier one had."""
        parent = None if put.parent is None else self.index.mark(put.ns, put.parent)
        before = {} if parent is None else parent.channels
        names = [name for channel, name in put.channels.items() if before.get(channel) != name]
        if put.parent is not None and put.delta:  # rebuilt from what was written
            writes = self.index.writes_of(put.ns, put.parent)
            names += [write.value for _, _, write in writes if write.channel in put.delta]
        fresh: list[str] = []
        for value in names:
            for name in self._items(value):
                if name in self._values and name not in self._shown:
                    self._shown.add(name)
                    fresh.append(name)
        return fresh

    def _items(self, name: str) -> tuple[str, ...]:
        """Return the values in a list that were in no list before, at least."""
        if name in self._walked:
            return ()
        self._walked.add(name)
        node = self.index.items.get(name)
        if node is None:
            return (name,)
        if node.base is None or node.base in self._walked:
            return node.add
        return self._names_in(name)

    def _names_in(self, name: str) -> tuple[str, ...]:
        try:
            return self.index.names_in(name)
        except CorruptRecordError:  # what it continues was damaged
            return self.index.items[name].add

    def thread(self) -> ThreadView:
        """Return the thread as of the newest record."""
        current: set[str] = set()
        newest = self.index.newest("")
        mark = None if newest is None else self.index.mark("", newest)
        for name in () if mark is None else mark.channels.values():
            current.update(self._names_in(name) if name in self.index.items else (name,))
        if mark is not None and mark.delta:
            current |= self._shown
        return ThreadView(
            list(self.messages), list(self.checkpoints), list(self.turns), frozenset(current)
        )


@final
class ThreadReader:
    """Reads threads, each on from where it was read before."""

    def __init__(self) -> None:
        self._known: dict[SessionKey, ThreadLog] = {}

    async def read(self, store: Store, key: SessionKey) -> ThreadView:
        """Read a thread up to the log's end."""
        known = self._known.pop(key, None)
        if known is None or not await self._goes_on(store, key, known):
            known = ThreadLog()
            await self._goes_on(store, key, known)
        self._known[key] = known
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
        return known.thread()

    async def _goes_on(self, store: Store, key: SessionKey, known: ThreadLog) -> bool:
        """Take in what a log has now; False if it is no longer the log that was read."""
        anchor, epoch = known.index.upto, known.index.epoch
        is_same = not anchor
        async with aclosing(store.read_log(key, after=max(anchor - 1, 0))) as log:
            async for chunk in log:
                for record in chunk.records:
                    if is_same:
                        known.take(record)
                    elif (record.seq, record.epoch) != (anchor, epoch):
                        return False
                    is_same = True
        return is_same


def _body(put: CheckpointPut) -> _Body:
    try:
        return msgspec.json.decode(put.body, type=_Body)
    except msgspec.DecodeError:
        return _Body()


def checkpoint_time(put: CheckpointPut) -> float | None:
    """Return when a checkpoint was made; None if it does not say."""
    return _time(_body(put).checkpoint.ts)


def _time(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


def _next(channels: Iterable[str]) -> list[str]:
    """Return the nodes that a checkpoint with values in these channels starts."""
    return [
        name.removeprefix(_NEXT) for name in channels if name.startswith(_NEXT) or name == _INPUT
    ]


# The end of a log


def thread_status(newest_first: list[Record], *, held: bool) -> SessionStatus | None:
    """Return the status that the newest records of a thread tell; None if they are no thread's."""
    written: dict[str, set[str]] = {}
    newest: CheckpointPut | None = None
    is_thread = False
    for stored in _stored(newest_first):
        is_thread = True
        if stored.writes is not None and not stored.writes.ns:
            written.setdefault(stored.writes.id, set()).update(_channels(stored.writes))
        put = stored.put
        if put is not None and not put.ns and not put.hidden:
            if newest is not None and newest.id > put.id:
                break
            newest = put  # go on: a task's writes may be before the checkpoint that it ran on
    if newest is None:
        return SessionStatus("idle") if is_thread else None
    channels = written.get(newest.id, set())
    if _ERROR in channels:
        return SessionStatus(
            "failed", f"{', '.join(_next(newest.channels)) or 'a task'} ended with an error"
        )
    if _INTERRUPT in channels and _RESUME not in channels:
        return SessionStatus("interrupted", "it waits for a person")
    following = _next(newest.channels)
    if following:
        return unfinished(f"next: {', '.join(following)}", held=held)
    return SessionStatus("idle")


def _stored(records: list[Record]) -> Iterator[ThreadRecord]:
    for record in records[:TAIL]:
        if record.kind == FOREIGN:
            try:
                stored = read_record(record)
            except CorruptRecordError:
                continue
            if stored is not None:
                yield stored


def _channels(writes: TaskWrites) -> set[str]:
    return {channel for _, channel, _ in writes.writes}
