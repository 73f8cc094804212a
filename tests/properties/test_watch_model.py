"""No order of steps robs a live owner; each rule of the watch is needed; the code has the same."""

from __future__ import annotations

import random

import pytest

from perdure.lease import LeaseOptions, OwnerWatch
from tests.properties.watch_model import HEARTBEAT, TTL, Rules, State, explore, next_steps


def test_no_order_of_steps_robs_a_live_owner() -> None:
    explored = explore(Rules())
    assert explored.trace is None
    assert explored.states > 20_000
    assert explored.takeovers > 1_000  # of those that are silent


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_is_needed(rule: str) -> None:
    trace = explore(Rules()._replace(**{rule: False})).trace
    assert trace is not None
    assert trace.count("time passes") >= 3


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(8, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_watch_judges_as_the_model_does(seed: int) -> None:
    """Through long stories, of which the model knows only that none robs anybody."""
    chance, silent = random.Random(seed), 0
    for _ in range(100):
        silent += _told(chance)
    assert silent > 0


def _told(chance: random.Random) -> int:
    """Go through one story with both; return how often the owner was found silent."""
    time = [0.0]
    watch = OwnerWatch(LeaseOptions(heartbeat=HEARTBEAT, ttl=TTL), lambda: time[0])
    state, asked, silent = State(), 0.0, 0
    watch.note_beat("owner", state.known, watch.counted())
    for _ in range(120):
        what, after = chance.choice([*next_steps(state, Rules())])
        match what:
            case "time passes":
                time[0] += 1
            case "the clock jumps":
                time[0] += 100
            case "watcher beats":
                watch.renewed()
            case "watcher asks":
                asked = watch.counted()
            case "sees it move" | "sees it stand still":
                assert state.look is not None
                assert state.look.value is not None
                found = watch.note_beat("owner", state.look.value, asked)
                assert found == after.silent, what
                silent += found
            case _:
                pass
        state = after
    return silent
