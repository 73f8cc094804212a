"""The ready lanes: earliest deadline first, and at most half for those that are waited for."""

from __future__ import annotations

from perdure.autosave.schedule import ReadyQueue
from perdure.autosave.tracked import Tracked
from perdure.records.keys import SessionKey


def tracked(name: str) -> Tracked:
    return Tracked(SessionKey(name), epoch=1, head=0, options=None)


def drain(ready: ReadyQueue) -> str:
    names = []
    while (t := ready.pop()) is not None:
        names.append(t.key.agent)
    return "".join(names)


def test_the_earliest_deadline_comes_first() -> None:
    ready = ReadyQueue()
    for name, deadline in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        ready.push(tracked(name), deadline, urgent=False)
    assert drain(ready) == "abc"


def test_the_smaller_comes_first_among_equals() -> None:
    ready, big, small = ReadyQueue(), tracked("b"), tracked("s")
    big.pending_bytes, small.pending_bytes = 100, 10
    ready.push(big, 1.0, urgent=False)
    ready.push(small, 1.0, urgent=False)
    assert drain(ready) == "sb"


def test_the_lanes_take_turns() -> None:
    ready = ReadyQueue()
    for n, name in enumerate("uvwx"):
        ready.push(tracked(name), n, urgent=True)
    for n, name in enumerate("ab"):
        ready.push(tracked(name), 100 + n, urgent=False)
    assert drain(ready) == "uavbwx"


def test_a_session_that_becomes_urgent_moves() -> None:
    ready, t = ReadyQueue(), tracked("t")
    ready.push(t, 5.0, urgent=False)
    ready.push(tracked("a"), 1.0, urgent=False)
    ready.push(t, 5.0, urgent=True)
    assert len(ready) == 2
    assert drain(ready) == "ta"


def test_what_is_dropped_does_not_come() -> None:
    ready, t = ReadyQueue(), tracked("t")
    ready.push(t, 1.0, urgent=True)
    ready.drop(t)
    ready.drop(t)
    assert (len(ready), t.ticket, ready.pop()) == (0, 0, None)


def test_what_was_left_behind_keeps_no_place() -> None:
    ready, t, other = ReadyQueue(), tracked("t"), tracked("o")
    ready.push(t, 1.0, urgent=False)
    ready.drop(t)
    ready.push(other, 2.0, urgent=False)
    ready.push(t, 3.0, urgent=False)
    assert drain(ready) == "ot"
