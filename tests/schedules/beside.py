"""The second process of an episode: a manager of its own, on the same store."""

from __future__ import annotations

import logging
from typing import Any

import anyio

import perdure
from tests.schedules.acts import Actor
from tests.schedules.episode import Overheard, Plan, connect, in_tasks
from tests.schedules.journal import Journal
from tests.schedules.places import Place

TASKS = 2


def run(out: Any, plan: Plan, place: tuple[str, str, str], phase: int) -> None:
    """Act, tell it through the pipe, and close."""
    journal = Journal()
    journal.send = out.send
    logger = logging.getLogger("perdure")
    logger.addHandler(Overheard(journal, may_be_stopped=True))
    logger.propagate = False
    anyio.run(_act, plan, Place(*place), phase, journal)


async def _act(plan: Plan, place: Place, phase: int, journal: Journal) -> None:
    name = f"other{phase}"
    manager = await connect(place.store("main"), plan)
    actor = Actor(manager, name, place, journal, plan.theme.ids)
    await in_tasks(actor, name, plan, phase, TASKS)
    try:
        (await manager.aclose()).raise_if_unsaved()
    except perdure.PerdureError as error:
        journal.note("closed", name, f"{type(error).__name__}: {error}")
    else:
        journal.note("closed", name, "clean")
