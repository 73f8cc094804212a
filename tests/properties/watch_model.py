"""A model of the watch of owners, explored step by step in every order.

An owner beats, or is stopped, wakes up, is killed, and comes back under its old id. A watcher
beats too, and looks at the owner's counter; a look is three steps (it is asked for, the store
reads, the answer is heard), and any time may pass between two of them: a process that is stopped
or slow is one whose next step comes late. Once in a run something befalls both: the store
takes no writes for a while, or all stand still together, or the watcher's clock jumps.

No record depends on any of this, the fence sees to that (`lease_model`). What is judged is that an
owner is found silent only if it was stopped, or dead, since its last beat: a live one must never
be robbed since the watcher was stopped or slow, or since nobody could beat.

`Rules` has a switch for each rule that looks as if one could do without it. Keep it in step with
`perdure.lease`; a test runs both through the same stories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

HEARTBEAT, TTL = 1, 4
"""In ticks; an owner whose beat has failed tries again after as long a time."""
GAP = 2 * HEARTBEAT
"""Ticks between two own beats from which on the time between them does not count."""
GONE = 0
"""The counter of an owner that the store does not know."""


class Rules(NamedTuple):
    """The rules; False leaves one out."""

    between_own_beats: bool = True
    """Time counts only while the watcher's own beats arrive, each soon after the last."""
    until_asked: bool = True
    """A silence is seen to last until a look was asked for, not until its answer was heard."""
    since_heard: bool = True
    """It begins when an answer is heard, not when that look was asked for."""
    fresh_look: bool = True
    """Whether a silent one still is, a look tells in the moment in which that matters."""
    new_counter: bool = True
    """An id that comes back goes on with a counter that it never had."""


class Look(NamedTuple):
    """A look at the owner that is under way."""

    asked: int
    """Counted time from the first sight of the counter that is known until this was asked."""
    value: int | None = None
    """What the store has read."""
    live: bool = False
    """Whether the owner was a live one when it was read."""


class State(NamedTuple):
    """Everything, times as ticks from now."""

    owner: str = "runs"
    due: int = HEARTBEAT
    """Ticks until the owner tries to beat."""
    excused: bool = False
    """Whether it was stopped or dead at any time since its last beat."""
    counter: int = 1
    store: str = "up"
    fates: int = 1
    """How often something may still happen that is not the owner's, nor the watcher's, doing."""
    known: int = 1
    """The counter as the watcher knows it."""
    since_own: int = 0
    """Ticks on the watcher's clock since its own last beat arrived."""
    counted: int = 0
    """Counted time from the first sight of the known counter to the watcher's last beat."""
    silent: bool = False
    """The known counter was seen to stand still for the ttl."""
    look: Look | None = None
    robbed: bool = False


Step = tuple[str, State]


def next_steps(state: State, rules: Rules) -> Iterator[Step]:
    """Yield every step that some process, or fate, could make."""
    yield from _owner_steps(state, rules)
    yield from _watcher_steps(state, rules)
    yield from _troubles(state)
    if state.store == "frozen":
        yield "time passes", _later(state)
    elif state.owner != "runs":
        yield "time passes", _later(state)
    elif state.due:
        yield "time passes", _later(state._replace(due=state.due - 1))


def _later(state: State) -> State:
    return state._replace(since_own=min(state.since_own + 1, GAP))


def _owner_steps(state: State, rules: Rules) -> Iterator[Step]:
    if state.store == "frozen":
        return
    match state.owner:
        case "runs":
            if not state.due:
                yield _beat(state)
            yield "owner is stopped", state._replace(owner="stopped", excused=True)
            yield "owner is killed", state._replace(owner="dead", excused=True)
        case "stopped":
            yield "owner wakes up", state._replace(owner="runs", due=0)
        case "dead" if state.fates:
            back = state._replace(owner="runs", due=HEARTBEAT, excused=False, fates=0)
            if rules.new_counter:
                yield "owner is back", back._replace(counter=_new(state))
            else:
                yield "owner is back", back
        case _:
            pass
    if state.fates:
        yield "its row is removed", state._replace(counter=GONE, fates=0)


def _beat(state: State) -> Step:
    if state.store != "up":
        return "owner's beat fails", state._replace(due=HEARTBEAT)
    counter = _new(state)
    return "owner beats", state._replace(counter=counter, due=HEARTBEAT, excused=False)


def _new(state: State) -> int:
    """Return a counter that nobody knows; values are only ever compared."""
    return max(state.counter, state.known, (state.look and state.look.value) or 0) + 1


def _attended(state: State, rules: Rules) -> int:
    """Return how much time counts by now."""
    if rules.between_own_beats and state.since_own >= GAP:
        return state.counted
    return state.counted + state.since_own


def _watcher_steps(state: State, rules: Rules) -> Iterator[Step]:
    if state.store == "frozen":
        return
    if state.store == "up":
        counted = _attended(state, rules)
        yield "watcher beats", state._replace(counted=min(counted, TTL), since_own=0)
    look = state.look
    if look is None:
        yield "watcher asks", state._replace(look=Look(_attended(state, rules)))
    elif look.value is None:
        yield (
            "store reads",
            state._replace(look=look._replace(value=state.counter, live=not state.excused)),
        )
    else:
        yield _heard(state, look, rules)
    if state.silent and not rules.fresh_look:
        yield "watcher takes over", state._replace(robbed=not state.excused)


def _heard(state: State, look: Look, rules: Rules) -> Step:
    attended = _attended(state, rules)
    after = state._replace(look=None)
    if look.value != state.known:
        # From here on times are told from the first sight of this counter.
        begun = attended if rules.since_heard else look.asked
        counted = state.counted - begun
        return "sees it move", after._replace(known=look.value, counted=counted, silent=False)
    silent = state.silent or (look.asked if rules.until_asked else attended) >= TTL
    return "sees it stand still", after._replace(silent=silent, robbed=silent and look.live)


def _troubles(state: State) -> Iterator[Step]:
    if state.store != "up":
        ended = state._replace(store="up")
        yield "the trouble is over", ended
    elif state.fates:
        once = state._replace(fates=0)
        yield "the store takes no writes", once._replace(store="readonly")
        yield "all stand still", once._replace(store="frozen")
        yield "the clock jumps", once._replace(since_own=GAP)


class Explored(NamedTuple):
    """What a complete exploration, or one up to its first finding, has seen."""

    states: int
    trace: tuple[str, ...] | None
    """How a live owner came to be robbed."""
    takeovers: int
    """States in which an owner was rightly found silent."""


def _same(state: State) -> State:
    """Return a state with counters by their order: only whether they are equal matters."""
    values = [state.counter, state.known, GONE]
    if state.look is not None and state.look.value is not None:
        values.append(state.look.value)
    rank = {value: place for place, value in enumerate(sorted(set(values)))}
    look = state.look
    if look is not None and look.value is not None:
        look = look._replace(value=rank[look.value])
    return state._replace(counter=rank[state.counter], known=rank[state.known], look=look)


def explore(rules: Rules) -> Explored:
    """Visit every state that can be reached, up to the first in which a live owner is robbed."""
    start = State()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    ahead, takeovers = deque([start]), 0
    while ahead:
        state = ahead.popleft()
        takeovers += state.silent and state.excused
        for what, found in next_steps(state, rules):
            after = _same(found)
            if after in came_from:
                continue
            came_from[after] = (state, what)
            if after.robbed:
                return Explored(len(came_from), _trace(came_from, after), takeovers)
            ahead.append(after)
    return Explored(len(came_from), None, takeovers)


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while origin := came_from[state]:
        state, what = origin
        steps.append(what)
    return tuple(reversed(steps))
