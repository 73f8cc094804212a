"""A model of blobs that are renewed beside sweeps in the file store, in every order.

One step is one call to the disk. Sweeps move an old blob away, and later sweeps remove it. Who is about to refer to the blob renews it, which is
reported, or is told that it is missing. Nobody reaches the blob as far as the sweeps know. What
was reported as renewed must not be removed: it is young. Keep it in step with
`perdure.stores.file.documents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Protocol(NamedTuple):
    """The rules; False leaves one out."""

    look_again: bool = True
    """A sweep brings back what is younger than what it would move, and does not remove it."""
    touch_after_return: bool = True
    """A renewal brings a moved blob back before it touches it, and begins again if it cannot."""


class Sweep(NamedTuple):
    """A sweep, and what it remembers."""

    at: str = "begin"
    stamp: int = 0
    seen: int = 0
    left: int = 2
    """Sweeps that follow."""


class State(NamedTuple):
    """The disk, the processes, and what was promised."""

    place: str = "shard"
    """Or "moved", or "gone"."""
    stamp: int = 0
    """The folder that it was moved to: no two sweeps have the same."""
    is_old: bool = True
    clock: int = 0
    renewal: str = "look"
    sweeps: tuple[Sweep, ...] = ()


def _renewal(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    match state.renewal:
        case "look" if state.place == "gone":
            yield "is told that it is missing", state._replace(renewal="missing")
        case "look" if state.place == "shard":
            yield "sees it", state._replace(renewal="touch")
        case "look" if protocol.touch_after_return:
            yield "sees it moved", state._replace(renewal="return")
        case "look":
            after = state._replace(is_old=False, renewal="present")
            yield "touches it where it was moved to", after
        case "return":
            is_there = state.place == "moved"
            place = "shard" if is_there else state.place
            at = "touch" if is_there else "look"
            yield "brings it back, if it is there", state._replace(place=place, renewal=at)
        case "touch" if state.place == "shard":
            yield "touches it", state._replace(is_old=False, renewal="present")
        case "touch":
            yield "finds it gone", state._replace(renewal="look")


def _sweep(state: State, me: Sweep, protocol: Protocol) -> Iterator[tuple[str, State, Sweep]]:
    match me.at:
        case "begin" if me.left:
            clock = state.clock + 1
            moved = Sweep("expire", clock, left=me.left - 1)
            yield f"{clock} begins", state._replace(clock=clock), moved
        case "expire" if state.place == "moved":
            became_young = protocol.look_again and not state.is_old
            at = "return" if became_young else "remove"
            yield f"finds it moved, to {at}", state, me._replace(at=at, seen=state.stamp)
        case "expire":
            yield "finds nothing moved", state, me._replace(at="stat")
        case "remove":
            is_there = state.place == "moved" and state.stamp == me.seen
            place = "gone" if is_there else state.place
            yield "removes it, if it is there", state._replace(place=place), me._replace(at="stat")
        case "return":
            is_there = state.place == "moved" and state.stamp == me.seen
            place = "shard" if is_there else state.place
            yield "brings it back", state._replace(place=place), me._replace(at="stat")
        case "stat" if state.place == "shard" and state.is_old:
            yield "sees it old", state, me._replace(at="move")
        case "stat":
            yield "leaves it", state, me._replace(at="begin")
        case "move" if state.place == "shard":
            after = state._replace(place="moved", stamp=me.stamp)
            yield "moves it away", after, me._replace(at="begin")
        case "move":
            yield "finds it gone", state, me._replace(at="begin")


def next_steps(state: State, protocol: Protocol) -> Iterator[tuple[str, State]]:
    """Yield every step that some process could make."""
    for what, after in _renewal(state, protocol):
        yield f"renewal {what}", after
    for place, sweep in enumerate(state.sweeps):
        for what, after, moved in _sweep(state, sweep, protocol):
            sweeps = list(after.sweeps)
            sweeps[place] = moved
            yield f"sweep {what}", after._replace(sweeps=tuple(sorted(sweeps)))


def explore(protocol: Protocol, sweeps: int = 2) -> tuple[int, tuple[str, ...] | None]:
    """Return how many states there are, and the steps that lose a renewed blob, if any do."""
    start = State(sweeps=(Sweep(),) * sweeps)
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    ahead = [start]
    while ahead:
        state = ahead.pop()
        if state.renewal == "present" and state.place == "gone":
            steps: list[str] = []
            while origin := came_from[state]:
                state, what = origin
                steps.append(what)
            return len(came_from), tuple(reversed(steps))
        for what, after in next_steps(state, protocol):
            if after not in came_from:
                came_from[after] = (state, what)
                ahead.append(after)
    return len(came_from), None
