"""A workload for those who have none yet: agents in conversation, with tools."""

from __future__ import annotations

import math
import random
from typing import Final

from perdure.tuning.workload import Workload, WorkloadChange, workload_of

_THINKS: Final = (20.0, 1.0)
"""A person's time between an answer and the next question: median, spread (lognormal)."""


_STEP: Final = (3.0, 0.8)
"""A model's or a tool's time."""


_SIZE: Final = (700, 1.0)
"""Bytes of a message."""


_STEPS: Final = 2.5
"""Steps with tools in a turn, on average (geometric)."""


def made_up(*, sessions: int = 50, seconds: float = 900.0, seed: int = 0) -> Workload:
    """Return the changes of agents that are asked, work in steps, and answer.

    Turns are heavy-tailed: most are short, some have dozens of steps.

    Args:
        sessions: How many.
        seconds: For how long each.
        seed: The same workload for the same number.

    """
    chance = random.Random(seed)
    sessions_changes = [_session(chance, seconds) for _ in range(sessions)]
    source = f"{sessions} made-up agents with tools, {seconds / 60:g} minutes each"
    return workload_of(sessions_changes, source)


def _session(chance: random.Random, seconds: float) -> list[WorkloadChange]:
    at, changes = 0.0, []
    while at < seconds:
        steps = int(math.log(1.0 - chance.random()) / math.log(1.0 - 1.0 / (_STEPS + 1.0)))
        changes.append(WorkloadChange(at, _drawn(chance, _SIZE)))
        for _ in range(2 * steps):  # a call, and its result
            at += chance.lognormvariate(math.log(_STEP[0]), _STEP[1])
            changes.append(WorkloadChange(at, _drawn(chance, _SIZE)))
        at += chance.lognormvariate(math.log(_STEP[0]), _STEP[1])
        changes.append(WorkloadChange(at, _drawn(chance, _SIZE), ends_turn=True))
        at += chance.lognormvariate(math.log(_THINKS[0]), _THINKS[1])
    return changes


def _drawn(chance: random.Random, about: tuple[float, float]) -> int:
    return max(round(chance.lognormvariate(math.log(about[0]), about[1])), 20)
