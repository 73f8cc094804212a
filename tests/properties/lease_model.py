"""A model of the file store's leases, explored step by step in every order.

One step is one call to the disk. Writers take one session over from each other, append,
and fold; a reader reads beside them. Which process moves next is free, so every moment
at which one could be stopped, killed or resumed is among the states: nothing in the
protocol waits for anybody, and a dead process is one whose next step never comes.

In each state that can be reached, four things are judged:

* the log that a recovery would find on the disk as it is, and on every disk that a cut of
  power could leave behind: each acknowledged record is in it, once, behind its own parent;
* what a holder believes the log to be, and what a reader was given;
* a folded document whose manifest vouches for it;
* that an epoch has one owner.

`Protocol` has a switch for each rule that looks as if one could do without it, so that a
test can show what goes wrong then. Keep it in step with `perdure.stores.file`.

    python -m tests.properties.lease_model    # explores sizes that are too large for the suite
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple


class Protocol(NamedTuple):
    """The rules; False leaves one out."""

    follow_chain: bool = True
    """The predecessor is the highest segment that begins with an epoch record, not epoch - 1."""
    sync_predecessor: bool = True
    """The predecessor's end is made durable before the new epoch relies on its length."""
    settle: bool = True
    """A reader starts at the segment of exactly the newest epoch, once there is one."""
    look_again: bool = True
    """A reader reads the epoch again at its end, and all again if it moved."""
    fold_acknowledged: bool = True
    """A fold covers only what was acknowledged."""
    release_by_marker: bool = True
    """A release writes a file of its own; it does not rewrite who holds the session."""
    prove_epoch: bool = True
    """After the sync, an append proves that its epoch is still the newest."""
    list_again: bool = True
    """A taker reads its predecessor's log behind the publication of its own epoch, not before."""


class Size(NamedTuple):
    """How much happens in a run."""

    takers: int = 1
    appends: int = 1
    """By each holder."""
    folds: bool = False
    reader: bool = True


class Line(NamedTuple):
    """One record in a segment: the epoch record, or half of a group of two."""

    kind: str
    id: str = ""
    parent: str = ""
    """The record that its writer believed to be the log's last."""
    before: int = 0
    """An epoch record's predecessor, and its length as sealed."""
    sealed: int = 0


class Segment(NamedTuple):
    """An epoch's file."""

    epoch: int
    lines: tuple[Line, ...]
    synced: int = 0
    """Lines that a cut of power leaves."""
    named: bool = False
    """Whether the folder's entry for it is durable."""


class Writer(NamedTuple):
    """A process that takes the session and writes, and what it remembers."""

    at: str = "look"
    epoch: int = 0
    before: int = 0
    sealed: int = 0
    appended: int = 0
    known: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    """What the document has that it restores from."""


class Reader(NamedTuple):
    """A process without a lease."""

    at: str = "look"
    epoch: int = 0
    top: int = 0
    view: tuple[str, ...] = ()


Segments = tuple[Segment, ...]

BROKEN = ("?",)
"""What stands for a view over a chain that does not hold."""


class State(NamedTuple):
    """Everything: the disk, the processes, and what was promised."""

    newest: int
    segments: Segments
    writers: tuple[Writer, ...]
    reader: Reader | None
    acknowledged: frozenset[str] = frozenset()
    document: tuple[str, ...] = ()
    manifest: tuple[int, tuple[str, ...]] = (0, ())
    """The highest epoch's: it is the one that counts."""


Step = tuple[str, State]


class Finding(NamedTuple):
    """A rule that was broken, and how it came to that."""

    fault: str
    trace: tuple[str, ...]


class Explored(NamedTuple):
    """What a complete exploration, or one up to its first finding, has seen."""

    states: int
    finding: Finding | None
    late_acknowledgements: int
    """Steps that reported Ok after somebody else had taken over: allowed, and to be met."""


# the disk


def find(segments: Segments, epoch: int) -> Segment | None:
    return next((segment for segment in segments if segment.epoch == epoch), None)


def put(segments: Segments, new: Segment) -> Segments:
    rest = [segment for segment in segments if segment.epoch != new.epoch]
    return tuple(sorted([*rest, new]))


def end_of(segment: Segment) -> int:
    """Return the length up to the last whole group."""
    ends = [place for place, line in enumerate(segment.lines, 1) if line.kind != "half"]
    return max(ends, default=0)


def top_of(segments: Segments, below: int) -> int:
    """Return the newest epoch below one whose segment has an epoch record, or 0."""
    epochs = [segment.epoch for segment in segments if segment.lines and segment.epoch < below]
    return max(epochs, default=0)


@lru_cache(maxsize=200_000)
def log_of(segments: Segments, epoch: int, length: int | None) -> tuple[Line, ...] | None:
    """Walk the chain that ends in a segment; None when it does not hold."""
    if not epoch:
        return ()
    segment = find(segments, epoch)
    if segment is None or not segment.lines:
        return None
    cut = end_of(segment) if length is None else length
    if cut > len(segment.lines):
        return None
    first = segment.lines[0]
    older = log_of(segments, first.before, first.sealed)
    if older is None:
        return None
    return older + tuple(line for line in segment.lines[:cut] if line.kind == "end")


def ids_of(log: tuple[Line, ...] | None) -> tuple[str, ...]:
    return BROKEN if log is None else tuple(line.id for line in log)


FAR = 1 << 30


# what may happen next


def next_steps(state: State, protocol: Protocol, size: Size) -> Iterator[Step]:
    """Yield every step that some process could make."""
    for place, writer in enumerate(state.writers):
        for what, after, moved in _WRITER_STEPS.get(writer.at, _no_step)(
            state, writer, protocol, size
        ):
            writers = list(after.writers)
            writers[place] = moved
            # Writers are alike, so their order tells nothing: fewer states.
            yield f"{writer.epoch}: {what}", after._replace(writers=tuple(sorted(writers)))
    if state.reader is not None:
        yield from _reader_steps(state, state.reader, protocol)


WriterSteps = Iterator[tuple[str, State, Writer]]


def _no_step(_state: State, _writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    yield from ()


def _look(state: State, writer: Writer, protocol: Protocol, _size: Size) -> WriterSteps:
    seen = Writer("publish", state.newest + 1)
    if not protocol.list_again:
        seen = _sealed(state, seen._replace(before=top_of(state.segments, seen.epoch)))
    yield f"sees epoch {state.newest}", state, seen


def _publish(state: State, writer: Writer, protocol: Protocol, _size: Size) -> WriterSteps:
    if state.newest + 1 == writer.epoch:
        after = state._replace(newest=writer.epoch)
        at = "list" if protocol.list_again else "sync_predecessor"
        yield f"publishes epoch {writer.epoch}", after, writer._replace(at=at)
    else:
        yield "lost the race", state, Writer("gone")


def _list(state: State, writer: Writer, protocol: Protocol, _size: Size) -> WriterSteps:
    before = top_of(state.segments, writer.epoch) if protocol.follow_chain else writer.epoch - 1
    yield f"follows epoch {before}", state, writer._replace(at="seal", before=before)


def _sealed(state: State, writer: Writer) -> Writer:
    segment = find(state.segments, writer.before)
    sealed = end_of(segment) if segment else 0
    log = log_of(state.segments, writer.before, sealed)
    return writer._replace(sealed=sealed, known=ids_of(log) if log is not None else ())


def _seal(state: State, writer: Writer, protocol: Protocol, _size: Size) -> WriterSteps:
    sealed = _sealed(state, writer)
    has_one = find(state.segments, writer.before) is not None
    at = "sync_predecessor" if protocol.sync_predecessor and has_one else "begin"
    yield f"reads it to {sealed.sealed}", state, sealed._replace(at=at)


def _sync_predecessor(
    state: State, writer: Writer, _protocol: Protocol, _size: Size
) -> WriterSteps:
    after = _synced(state, writer.before)
    yield "syncs its predecessor", after, writer._replace(at="begin")


def _begin(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    if find(state.segments, writer.epoch):  # It is only ever created, never written over.
        yield "finds its segment taken", state, writer._replace(at="gone")
        return
    line = Line("epoch", before=writer.before, sealed=writer.sealed)
    segments = put(state.segments, Segment(writer.epoch, (line,)))
    yield "writes its epoch record", state._replace(segments=segments), writer._replace(at="sync")


def _sync(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    after = _synced(state, writer.epoch)
    yield "syncs its segment", after, writer._replace(at="confirm", before=0, sealed=0)


def _confirm(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    if state.newest == writer.epoch:
        yield "is the newest still", state, writer._replace(at="restore")
    else:
        yield "was overtaken", state, Writer("gone", writer.epoch)


def _restore(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    """Read the document, which the predecessor may be writing just now."""
    used = state.document
    yield f"restores from {used}", state, writer._replace(at="hold", used=used)


def _hold(state: State, writer: Writer, protocol: Protocol, size: Size) -> WriterSteps:
    if writer.appended < size.appends:
        yield _written(state, writer, "half", to="half")
    elif size.folds and writer.known:
        yield "begins to fold", state, writer._replace(at="fold")
    elif not protocol.release_by_marker:
        yield "begins to release", state, writer._replace(at="release")
    else:
        yield "is done", state, Writer("gone", writer.epoch)


def _half(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    yield _written(state, writer, "end", to="written")


def _sync_append(state: State, writer: Writer, protocol: Protocol, size: Size) -> WriterSteps:
    after = _synced(state, writer.epoch)
    at = "prove" if protocol.prove_epoch else "acknowledge"
    yield "syncs the append", after, writer._replace(at=at)
    if size.folds and not protocol.fold_acknowledged:
        known = (*writer.known, _id(writer))
        yield "folds what it wrote", after, writer._replace(at="fold", known=known)


def _prove(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    if state.newest == writer.epoch:
        yield "is still the newest", state, writer._replace(at="acknowledge")
    else:
        yield "finds a newer epoch", state, Writer("gone", writer.epoch)


def _acknowledge(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    id_ = _id(writer)
    late = " late" if state.newest != writer.epoch else ""
    after = state._replace(acknowledged=state.acknowledged | {id_})
    moved = writer._replace(at="hold", appended=writer.appended + 1, known=(*writer.known, id_))
    yield f"acknowledges {id_}{late}", after, moved


def _fold(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    after = state._replace(document=writer.known)
    yield f"writes the document {writer.known}", after, writer._replace(at="manifest")


def _manifest(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    manifest = max(state.manifest, (writer.epoch, writer.known))
    yield "writes the manifest", state._replace(manifest=manifest), Writer("gone", writer.epoch)


def _release(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    mine = state.newest == writer.epoch
    yield "looks whether it holds", state, writer._replace(at="rename" if mine else "gone")


def _rename(state: State, writer: Writer, _protocol: Protocol, _size: Size) -> WriterSteps:
    after = state._replace(newest=writer.epoch)
    yield f"renames the lease to epoch {writer.epoch}", after, Writer("gone", writer.epoch)


_WRITER_STEPS: dict[str, Callable[[State, Writer, Protocol, Size], WriterSteps]] = {
    "look": _look,
    "publish": _publish,
    "list": _list,
    "seal": _seal,
    "sync_predecessor": _sync_predecessor,
    "begin": _begin,
    "sync": _sync,
    "confirm": _confirm,
    "restore": _restore,
    "hold": _hold,
    "half": _half,
    "written": _sync_append,
    "prove": _prove,
    "acknowledge": _acknowledge,
    "fold": _fold,
    "manifest": _manifest,
    "release": _release,
    "rename": _rename,
}


def _id(writer: Writer) -> str:
    return f"{writer.epoch}.{writer.appended}"


def _written(state: State, writer: Writer, kind: str, *, to: str) -> tuple[str, State, Writer]:
    parent = writer.known[-1] if writer.known else ""
    line = Line(kind, _id(writer), parent)
    segment = find(state.segments, writer.epoch)
    assert segment is not None
    segments = put(state.segments, segment._replace(lines=(*segment.lines, line)))
    return f"writes {kind} {line.id}", state._replace(segments=segments), writer._replace(at=to)


def _synced(state: State, epoch: int) -> State:
    segment = find(state.segments, epoch)
    assert segment is not None
    synced = segment._replace(synced=len(segment.lines), named=True)
    return state._replace(segments=put(state.segments, synced))


def _reader_steps(state: State, reader: Reader, protocol: Protocol) -> Iterator[Step]:
    top = top_of(state.segments, FAR)
    match reader.at:
        case "look":
            moved = Reader("list", state.newest)
            yield f"reader sees epoch {state.newest}", state._replace(reader=moved)
        case "list" if top == reader.epoch or not protocol.settle:
            yield (
                f"reader lists, top {top}",
                state._replace(reader=reader._replace(at="read", top=top)),
            )
        case "list" if reader.epoch != state.newest:
            yield "reader looks again", state._replace(reader=Reader())
        case "read":
            view = ids_of(log_of(state.segments, reader.top, None))
            yield (
                f"reader reads {view}",
                state._replace(reader=reader._replace(at="prove", view=view)),
            )
        case "prove" if state.newest == reader.epoch or not protocol.look_again:
            done = Reader("done", view=reader.view)
            yield "reader is done", state._replace(reader=done)
        case "prove":
            yield "reader reads again", state._replace(reader=Reader())


# what must hold


@lru_cache(maxsize=400_000)
def log_fault(segments: Segments, acknowledged: frozenset[str]) -> str | None:
    """Say what is wrong with the log, as it is or after any cut of power."""
    fault = _recovery_fault(segments, acknowledged)
    if fault:
        return fault
    for cut in _cuts(segments):
        fault = _recovery_fault(cut, acknowledged)
        if fault:
            return f"after a cut of power, {fault}"
    return None


def _cuts(segments: Segments) -> Iterator[Segments]:
    """Yield what a cut of power could leave: unsynced ends go, unsynced names go."""
    choices: list[list[Segment | None]] = []
    for segment in segments:
        lengths = range(segment.synced, len(segment.lines) + 1)
        left: list[Segment | None] = [segment._replace(lines=segment.lines[:n]) for n in lengths]
        choices.append(left if segment.named else [*left, None])
    if all(len(choice) == 1 for choice in choices):
        return
    for combination in product(*choices):
        yield tuple(segment for segment in combination if segment is not None)


def _recovery_fault(segments: Segments, acknowledged: frozenset[str]) -> str | None:
    log = log_of(segments, top_of(segments, FAR), None)
    if log is None:
        return "the chain of segments does not hold"
    ids = [line.id for line in log]
    if len(set(ids)) != len(ids):
        return "a record is in the log twice"
    if acknowledged.difference(ids):
        return "an acknowledged record is lost"
    parents = ["", *ids][: len(ids)]
    if any(line.parent != parent for line, parent in zip(log, parents, strict=True)):
        return "a record does not follow its parent"
    return None


def fault_of(state: State) -> str | None:
    """Say what is wrong with a state, or None."""
    fault = log_fault(state.segments, state.acknowledged)
    if fault:
        return fault
    owned = [writer.epoch for writer in state.writers if writer.at not in ("publish", "gone")]
    held = [epoch for epoch in owned if epoch]
    if len(set(held)) != len(held):
        return "an epoch has two owners"
    top = top_of(state.segments, FAR)
    if top != state.newest:
        return None  # A takeover is under way: the log's end is not decided yet.
    ids = ids_of(log_of(state.segments, top, None))
    for writer in state.writers:
        if writer.at == "hold" and writer.epoch == top and writer.known != ids:
            return "a holder has restored something else than the log"
        used = writer.used if writer.epoch == top else ()  # who was overtaken holds nothing
        if writer.at == "hold" and used != writer.known[: len(used)]:
            return "a holder has restored what is no prefix of its log"
    if state.reader and state.reader.at == "done":
        view = state.reader.view
        if view != ids[: len(view)]:
            return "a reader's view is no prefix of the log"
    folded = state.manifest[1]
    if folded == state.document and folded != ids[: len(folded)]:
        return "a document that its manifest vouches for is no prefix of the log"
    return None


def explore(protocol: Protocol, size: Size) -> Explored:
    """Visit every state that can be reached, up to the first with a fault."""
    holder = Writer("hold", epoch=1)
    first = Segment(1, (Line("epoch"),), synced=1, named=True)
    start = State(
        newest=1,
        segments=(first,),
        writers=tuple(sorted([holder, *[Writer()] * size.takers])),
        reader=Reader() if size.reader else None,
    )
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    ahead = [start]
    late = 0
    while ahead:
        state = ahead.pop()
        fault = fault_of(state)
        if fault:
            return Explored(len(came_from), Finding(fault, _trace(came_from, state)), late)
        for what, after in next_steps(state, protocol, size):
            late += what.endswith(" late")
            if after not in came_from:
                came_from[after] = (state, what)
                ahead.append(after)
    return Explored(len(came_from), None, late)


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while origin := came_from[state]:
        state, what = origin
        steps.append(what)
    return tuple(reversed(steps))


def main() -> None:
    """Explore sizes that take minutes."""
    sizes = [
        Size(takers=1, appends=3, folds=True),
        Size(takers=2, appends=1, folds=True),
        Size(takers=2, appends=2, reader=False),
        Size(takers=3, appends=1, reader=False),
    ]
    for size in sizes:
        began = time.monotonic()
        explored = explore(Protocol(), size)
        print(size, explored, f"{time.monotonic() - began:.1f} s", flush=True)
        log_of.cache_clear()
        log_fault.cache_clear()


if __name__ == "__main__":
    main()
