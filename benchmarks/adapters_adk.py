"""Turns of Google ADK: `PerdureSessionService` on SQLite over ADK's own service on SQLite.

A turn is what a run asks of a session service: load the session with its events, append the
question, append the answer with a change of the state. What was appended is durable. It is measured
in a session that has so many turns already; the two take turns, and the figure is the median of the
rounds' ratios.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.figures import Report, Row

__all__ = ["Options", "run"]

HERE: dict[str, Any] = {"app_name": "harbor", "user_id": "ada", "session_id": "tides"}
TEXT = "The tide is low at noon, and again after midnight. " * 4


class Options(NamedTuple):
    """How much to measure, and where."""

    turns: int = 1000
    """That the session has before the first round."""
    measured: int = 10
    """Turns in a round."""
    rounds: int = 5
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        ours, theirs = asyncio.run(_run(options, Path(folder)))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    rows = [
        Row(
            "adapters.adk.turns",
            median(ratios),
            f"turns/s over DatabaseSessionService on SQLite, in a session of {options.turns} turns",
        ),
        Row("adapters.adk.turns_per_second", median(ours), "turns/s of PerdureSessionService"),
    ]
    rates = {"perdure": ours, "database": theirs}
    return Report(rows, {**options._replace(folder=None)._asdict(), "turns_per_second": rates})


async def _run(options: Options, folder: Path) -> tuple[list[float], list[float]]:
    from google.adk.sessions import DatabaseSessionService
    from sqlalchemy import event

    from perdure.adapters import PerdureSessionService

    our_url, their_url = f"sqlite:///{folder}/perdure.db", f"sqlite+aiosqlite:///{folder}/adk.db"
    await _fill(PerdureSessionService(our_url, durable=False), options.turns)
    unsynced = DatabaseSessionService(their_url)
    event.listen(unsynced.db_engine.sync_engine, "connect", _without_sync)
    await _fill(unsynced, options.turns)

    ours, theirs = PerdureSessionService(our_url), DatabaseSessionService(their_url)
    try:
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds + 1):
            for service, found in zip((ours, theirs), rates, strict=True):
                found.append(await _rate(service, options.measured))
    finally:
        await ours.close()
        await theirs.close()
    return rates[0][1:], rates[1][1:]  # the first round reads what was not in memory


def _without_sync(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA synchronous=OFF")


async def _fill(service: Any, turns: int) -> None:
    session = await service.create_session(**HERE)
    for number in range(turns):
        await _append(service, session, number)
    await service.close()


async def _rate(service: Any, turns: int) -> float:
    start = perf_counter()
    for number in range(turns):
        session = await service.get_session(**HERE)
        await _append(service, session, number)
    return turns / (perf_counter() - start)


async def _append(service: Any, session: Any, number: int) -> None:
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.genai import types

    for author, delta in (("user", {}), ("pilot", {"answer": TEXT, "count": number})):
        content = types.Content(
            role="user" if author == "user" else "model", parts=[types.Part(text=TEXT)]
        )
        actions = EventActions(state_delta=delta)
        event = Event(author=author, invocation_id=f"i{number}", content=content, actions=actions)
        await service.append_event(session, event)
