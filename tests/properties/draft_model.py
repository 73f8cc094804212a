"""A model of drafts in the file store, explored step by step in every order.

One step is one call to the disk, as in `lease_model`: which process moves next is free, and a
dead one is one whose next step never comes. A copier begins a draft, writes it and publishes it,
and publishes once more, as after a lost answer. Takers open the id, as if its holder were dead,
and may delete what they have taken. In each state, and after each cut of power, are judged:

* what a reader finds: nothing, or a whole copy, or what a taker began anew; never half of one;
* that a publish which was reported stays, until a holder that came later deletes the session;
* that a post stays until a session is deleted.

Published and taken over are two marks, `published-<epoch>` and `dropped-<epoch>`: each side sets
its own before it looks for the other's. `Protocol` has a switch for each rule. Keep it in step
with `perdure.stores.file`; a store with transactions does each side in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

WHOLE = 2
"""Records of a copy."""


class Protocol(NamedTuple):
    """The rules; False leaves one out."""

    drop_first: bool = True
    """A taker marks a draft as dropped before it looks whether it is published."""
    look_for_drop: bool = True
    """A publisher looks for that mark, after its own is durable."""
    sync_mark: bool = True
    """A publisher makes its mark durable before it looks."""
    prove_epoch: bool = True
    """A publisher proves that its epoch is still the newest, after its mark."""
    decide_before: bool = True
    """A taker publishes its lease with the decision in it, rather than removing the draft first."""
    keep_posts: bool = True
    """A draft's inbox goes on in the next generation."""


class Size(NamedTuple):
    """How much happens in a run."""

    copiers: int = 1
    openers: int = 1
    deletes: bool = True
    """Openers delete what they have taken."""


class Lease(NamedTuple):
    """The content of a lease file; it is durable once it is seen."""

    epoch: int = 0
    since: int = 1
    """The epoch that this generation began with."""
    draft: bool = False
    """Hidden unless it is marked as published."""
    deleted: bool = False
    inbox: int = 1
    """The generation of its inbox."""


class Mark(NamedTuple):
    """An empty file of an epoch."""

    name: str
    epoch: int
    synced: bool


class Process(NamedTuple):
    """A copier or an opener, and what it remembers."""

    at: str = "look"
    is_copier: bool = False
    lease: Lease = Lease()
    is_over: bool = True
    """Whether what it takes is no session: never begun, deleted, or a draft that it dropped."""
    again: bool = False


class State(NamedTuple):
    """The disk, the processes, and what was promised."""

    lease: Lease
    """The newest one."""
    marks: frozenset[Mark] = frozenset()
    logs: frozenset[tuple[int, int]] = frozenset()
    """Records by epoch."""
    copies: frozenset[int] = frozenset()
    """Epochs of drafts."""
    processes: tuple[Process, ...] = ()
    published: int = 0
    """The epoch of the last draft whose publish was reported."""
    gone: int = 0
    """The epoch up to which a holder has deleted the session."""
    inboxes: frozenset[int] = frozenset()
    """Where posts wait."""
    posted: bool = False
    late: bool = False
    """Whether an overtaken holder has reported a publish."""


class Explored(NamedTuple):
    """What an exploration has seen."""

    states: int
    fault: str | None
    trace: tuple[str, ...] = ()
    publishes: int = 0


Steps = Iterator[tuple[str, State, Process]]


def has(state: State, name: str, epoch: int) -> bool:
    return any(mark[:2] == (name, epoch) for mark in state.marks)


def with_mark(state: State, name: str, epoch: int, *, synced: bool) -> State:
    mark = Mark(name, epoch, synced=True)
    if mark in state.marks:
        return state
    return state._replace(marks=state.marks | {mark._replace(synced=synced)})


def with_log(state: State, epoch: int, count: int) -> State:
    rest = {log for log in state.logs if log[0] != epoch}
    return state._replace(logs=frozenset({*rest, (epoch, count)}))


def next_steps(state: State, protocol: Protocol, size: Size) -> Iterator[tuple[str, State]]:
    """Yield every step that some process, or somebody who posts, could make."""
    if not state.posted:
        inboxes = state.inboxes | {state.lease.inbox}
        yield "posts", state._replace(inboxes=inboxes, posted=True)
    for place, process in enumerate(state.processes):
        steps = _STEPS.get(process.at)
        for what, after, moved in steps(state, process, protocol, size) if steps else ():
            processes = list(after.processes)
            processes[place] = moved
            who = "copier" if process.is_copier else "opener"
            yield f"{who} {what}", after._replace(processes=tuple(sorted(processes)))


def _look(state: State, me: Process, protocol: Protocol, _size: Size) -> Steps:
    lease = state.lease
    moved = me._replace(lease=lease)
    is_draft = lease.draft and not has(state, "published", lease.epoch)
    if is_draft:
        if not protocol.decide_before:
            yield "removes the draft", _without(state, lease.epoch + 1), moved._replace(at="take")
            return
        at = "drop" if protocol.drop_first else "take"
        yield f"sees the draft {lease.epoch}", state, moved._replace(at=at)
    else:
        is_over = lease.deleted or not lease.epoch
        if me.is_copier and not is_over:
            yield "finds a session", state, moved._replace(at="gone")
        else:
            moved = moved._replace(at="take", is_over=is_over)
            yield f"sees epoch {lease.epoch}", state, moved


def _drop(state: State, me: Process, _protocol: Protocol, _size: Size) -> Steps:
    after = with_mark(state, "dropped", me.lease.epoch, synced=False)
    yield f"marks {me.lease.epoch} as dropped", after, me._replace(at="check")


def _check(state: State, me: Process, _protocol: Protocol, _size: Size) -> Steps:
    is_over = not has(state, "published", me.lease.epoch)
    at = "gone" if me.is_copier and not is_over else "take"
    yield f"decides: over is {is_over}", state, me._replace(at=at, is_over=is_over)


def _take(state: State, me: Process, protocol: Protocol, _size: Size) -> Steps:
    before = me.lease
    if state.lease.epoch != before.epoch:
        yield "lost the race", state, me._replace(at="gone")
        return
    epoch = before.epoch + 1
    since = epoch if me.is_over else before.since
    keeps = protocol.keep_posts or not before.draft or not me.is_over
    lease = Lease(epoch, since, draft=me.is_copier, inbox=before.inbox if keeps else since)
    copies = state.copies | {epoch} if me.is_copier else state.copies
    yield (
        f"publishes the lease {epoch} since {since}",
        state._replace(lease=lease, copies=copies),
        me._replace(at="clean", lease=lease),
    )


def _clean(state: State, me: Process, _protocol: Protocol, _size: Size) -> Steps:
    after = _without(state, me.lease.since)
    kept = frozenset(inbox for inbox in state.inboxes if inbox >= me.lease.inbox)
    yield "cleans up", after._replace(inboxes=kept), me._replace(at="begin")


def _without(state: State, below: int) -> State:
    return state._replace(logs=frozenset(log for log in state.logs if log[0] >= below))


def _begin(state: State, me: Process, _protocol: Protocol, size: Size) -> Steps:
    after = with_log(state, me.lease.epoch, 1)
    if state.lease != me.lease:
        yield "was overtaken", after, me._replace(at="gone")
    elif me.is_copier:
        yield "begins its draft", after, me._replace(at="write")
    else:
        yield "holds it", after, me._replace(at="delete" if size.deletes else "gone")


def _write(state: State, me: Process, _protocol: Protocol, _size: Size) -> Steps:
    yield "writes it whole", with_log(state, me.lease.epoch, WHOLE), me._replace(at="mark")


def _mark(state: State, me: Process, protocol: Protocol, _size: Size) -> Steps:
    after = with_mark(state, "published", me.lease.epoch, synced=False)
    at = "sync" if protocol.sync_mark else "prove"
    yield "marks it as published", after, me._replace(at=at)


def _sync(state: State, me: Process, _protocol: Protocol, _size: Size) -> Steps:
    marks = frozenset(Mark(mark.name, mark.epoch, synced=True) for mark in state.marks)
    yield "syncs its mark", state._replace(marks=marks), me._replace(at="prove")


def _prove(state: State, me: Process, protocol: Protocol, _size: Size) -> Steps:
    epoch = me.lease.epoch
    is_dropped = protocol.look_for_drop and has(state, "dropped", epoch)
    if is_dropped or (protocol.prove_epoch and state.lease.epoch != epoch):
        yield "was overtaken", state, me._replace(at="gone")
        return
    after = state._replace(published=epoch, late=state.late or state.lease.epoch != epoch)
    yield "reports it", after, me._replace(at="gone" if me.again else "mark", again=True)


def _delete(state: State, me: Process, _protocol: Protocol, _size: Size) -> Steps:
    if state.lease != me.lease:
        yield "was overtaken", state, me._replace(at="gone")
        return
    end = me.lease.epoch + 1
    lease = Lease(end, end + 1, deleted=True, inbox=end + 1)
    after = state._replace(lease=lease, gone=end)
    yield "deletes it", after, me._replace(at="remove", lease=lease)


def _remove(state: State, me: Process, _protocol: Protocol, _size: Size) -> Steps:
    after = _without(state, me.lease.epoch)
    kept = frozenset(inbox for inbox in state.inboxes if inbox >= me.lease.inbox)
    yield "removes it", after._replace(inboxes=kept), me._replace(at="gone")


_STEPS: dict[str, Callable[[State, Process, Protocol, Size], Steps]] = {
    "look": _look,
    "drop": _drop,
    "check": _check,
    "take": _take,
    "clean": _clean,
    "begin": _begin,
    "write": _write,
    "mark": _mark,
    "sync": _sync,
    "prove": _prove,
    "delete": _delete,
    "remove": _remove,
}


# what must hold


def fault_of(state: State) -> str | None:
    """Say what is wrong with a state, as it is or after a cut of power."""
    unsynced = [mark for mark in state.marks if not mark.synced]
    for count in range(len(unsynced) + 1):
        for lost in combinations(unsynced, count):
            fault = _fault(state._replace(marks=state.marks.difference(lost)))
            if fault:
                return f"after a cut of power, {fault}" if lost else fault
    return None


def _fault(state: State) -> str | None:
    lease = state.lease
    is_draft = lease.draft and not has(state, "published", lease.epoch)
    is_hidden = lease.deleted or is_draft
    shown = {} if is_hidden else {e: n for e, n in state.logs if e >= lease.since}
    for epoch in state.copies.intersection(shown):
        if shown[epoch] < WHOLE:
            return "a reader finds half a copy"
    kept = state.published > state.gone
    if state.late:
        return "an overtaken holder reports its publish"
    if kept and state.published not in shown:
        return "a session whose publish was reported is gone"
    waits = bool(state.inboxes) and max(state.inboxes) >= lease.inbox
    if state.posted and not state.gone and not waits:
        return "a post is lost"
    return None


def explore(protocol: Protocol, size: Size) -> Explored:
    """Visit every state that can be reached, up to the first with a fault."""
    copiers = [Process(is_copier=True)] * size.copiers
    start = State(Lease(), processes=tuple(sorted([*copiers, *[Process()] * size.openers])))
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    ahead = [start]
    publishes = 0
    while ahead:
        state = ahead.pop()
        fault = fault_of(state)
        if fault:
            return Explored(len(came_from), fault, _trace(came_from, state), publishes)
        for what, after in next_steps(state, protocol, size):
            publishes += what.endswith("reports it")
            if after not in came_from:
                came_from[after] = (state, what)
                ahead.append(after)
    return Explored(len(came_from), None, (), publishes)


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while origin := came_from[state]:
        state, what = origin
        steps.append(what)
    return tuple(reversed(steps))
