"""Episode after episode until the time is over, and what failed as stories: ``python -m tests.explore --schedules``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.schedules import places
from tests.schedules.acts import THEMES
from tests.schedules.episode import Episode, Plan, run
from tests.schedules.journal import Journal
from tests.schedules.oracle import Failure

MOST_LINES = 40


@dataclass
class Summary:
    """How a search went."""

    episodes: int = 0
    acts: int = 0
    promises: int = 0
    """Texts that were durable."""
    counts: Counter[str] = field(default_factory=Counter)
    """Episodes by the kind of failure."""


def story(episode: Episode, failures: Sequence[Failure], again: str) -> str:
    """Tell what was done to the sessions that failures are about, and what was seen then."""
    journal = episode.journal
    about: set[str] = set()
    for failure in failures:
        act = journal.acts.get(failure.id)
        about |= {failure.id} if act is None else {act.id, *act.ids}
    kin = set().union(*(journal.kin(id) for id in about)) if about else set()
    if not kin & {id for act in journal.acts.values() for id in act.ids}:
        kin = set()
    acts = [
        act
        for act in journal.acts.values()
        if not kin or kin & set(act.ids) or act.id in about or act.name in ("backup", "migrate")
    ]
    told = sorted(
        [(act.began, act.told()) for act in acts]
        + [(at, f"{at * 1000 % 1e6:9.1f}  {text}") for at, text in journal.notes]
    )
    lines = [line for _, line in told]
    if len(lines) > MOST_LINES:
        lines = [*lines[:8], f"… {len(lines) - MOST_LINES} more …", *lines[8 - MOST_LINES :]]
    lines.append(f"closed: {journal.closed}")
    lines += [f"SAW {failure.label}: {failure.text}" for failure in failures[:6]]
    return "\n    ".join(
        [f"{failures[0].label} ({episode.plan.told()})", *lines, f"again: {again}"]
    )


TRIES = 4
"""How often a shorter episode is run, before it counts as one that does not fail."""


def shrunk(
    episode: Episode, label: str, again: Callable[[Plan], Episode]
) -> tuple[Episode, list[Failure]]:
    """Leave out what a failure does not need: halves of the acts, then quarters, down to each."""
    best, plan = episode, episode.plan

    def fails(skip: frozenset[str], **changes: Any) -> bool:
        nonlocal best, plan
        for salt in range(TRIES):
            done = again(replace(plan, skip=plan.skip | skip, salt=plan.salt + salt, **changes))
            if any(one.label == label for one in done.failures):
                best, plan = done, done.plan
                return True
        return False

    for change in (
        {"other": False},
        {"twin": False},
        {"beside": False},
        {"dies": False},
        {"restless": False},
        {"autosave": None},
    ):
        if all(getattr(plan, name) not in (value, None) for name, value in change.items()):
            fails(frozenset(), **change)
    acts = sorted(episode.journal.acts)
    size = len(acts) // 2
    while size:
        for start in range(0, len(acts), size):
            part = frozenset(acts[start : start + size]) - plan.skip
            if part:
                fails(part)
        size //= 2
    return best, [one for one in best.failures if one.label == label]


def search(
    minutes: float,
    seed: int,
    *,
    store: str = "file",
    episodes: int | None = None,
    themes: Sequence[str] = (),
    allow: Sequence[str] = (),
    every: bool = False,
    shrink: bool = False,
    repeat: int = 1,
) -> Summary:
    """Run episodes; print each kind of failure once, and what to run for the same again.

    Args:
        minutes: When to end.
        seed: The first episode's; the others follow.
        store: A kind, or a server's URL.
        episodes: How many at most.
        themes: Only these.
        allow: Labels that the status ignores, as a prefix.
        every: Whether to tell each failure, not only the first of its kind.
        shrink: Whether to look for fewer acts that fail in the same way, before it is told.
        repeat: How often each episode is run, each time in another order.

    """
    kind, server = places.server_of(store)
    end = time.monotonic() + 60 * minutes
    summary = Summary()
    episodes = sys.maxsize if episodes is None else episodes * repeat
    salt = 0
    while time.monotonic() < end and summary.episodes < episodes:
        plan = Plan.of(seed, list(themes) or sorted(THEMES), shared=kind != "memory")
        plan.salt = salt
        try:
            done = run(plan, places.fresh(kind, server))
        except KeyboardInterrupt:
            break
        summary.episodes += 1
        summary.acts += len(done.journal.acts)
        summary.promises += sum(
            token.durable < float("inf") for token in done.journal.tokens.values()
        )
        by_label: dict[str, list[Failure]] = {}
        for failure in done.failures:
            by_label.setdefault(failure.label, []).append(failure)
        for label, failures in by_label.items():
            summary.counts[label] += 1
            if every or summary.counts[label] == 1:
                again = f"python -m tests.explore --schedules --minutes 5 --store {store} --seed {seed} --episodes 1 --repeat 50"
                again += "".join(f" --theme '{theme}'" for theme in themes)
                told = (done, failures)
                if shrink:
                    told = shrunk(done, label, lambda plan: run(plan, places.fresh(kind, server)))
                print(story(*told, again), flush=True)
        salt = (salt + 1) % repeat
        seed += not salt
    print(
        f"{summary.episodes} episodes, {summary.acts} operations, {summary.promises} durable messages"
    )
    for label, count in summary.counts.most_common():
        allowed = " (allowed)" if any(label.startswith(one) for one in allow) else ""
        print(f"{count:6} {label}{allowed}")
    return summary


def failed(summary: Summary, allow: Sequence[str]) -> bool:
    """Whether anything failed that is not allowed, or nothing was put to the test."""
    bad = [label for label in summary.counts if not any(label.startswith(one) for one in allow)]
    return bool(bad) or not summary.promises


__all__ = ["Journal", "Summary", "failed", "search", "story"]
