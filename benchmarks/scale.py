"""One long log and very many sessions: reading anywhere, opening again, closing at once.

A page of history is 50 items, read through a view, without a lease. Pages at nine places of a log
are read in turn with the newest one, on files and on SQLite; a figure is the ratio of
25th percentiles, at the worst place. The number in its name is that of the log's records.

Then many sessions on SQLite: made, with a few messages each, closed; opened again by as many
tasks as there are sessions; changed, all of them, and closed by ``aclose`` of the manager, without
any save before. Both have half of the default time for a shutdown. Seconds of the clock count
what others do on the machine as well; those of the CPU, in the details, do not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

import anyio

import perdure
from benchmarks.figures import Report, Row
from benchmarks.timing import quartile
from perdure import EncodedRecord, Message, SessionManager, Shutdown

__all__ = ["Options", "run"]

PAGE = 50
PLACES = 9
BLOCK = 500
"""Records of one save."""
STORES = {"file": "file:{folder}/files", "sqlite": "sqlite:///{folder}/store.db"}


class Options(NamedTuple):
    """How long a log, how many sessions, and how often to read."""

    records: int = 1_000_000
    sessions: int = 10_000
    rounds: int = 21
    backend: str = "asyncio"
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure history first, then opening and closing."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        pages = {
            name: anyio.run(_history, url.format(folder=folder), options, backend=options.backend)
            for name, url in STORES.items()
        }
        url = f"sqlite:///{folder}/many.db"
        many = anyio.run(_many, url, options.sessions, backend=options.backend)
    return Report(_rows(options, pages, many), {**options._asdict(), "folder": None, **many})


def _manager(url: str, deadline: float | None = None) -> SessionManager:
    shutdown = Shutdown(signals=False)
    if deadline is not None:
        shutdown = Shutdown(signals=False, deadline=deadline)
    return perdure.connect(url, autosave=None, shutdown=shutdown)


async def _history(url: str, options: Options) -> dict[str, float]:
    """Return what a page takes, in seconds: of the newest, and of the worst other place."""
    async with _manager(url) as sessions:
        async with sessions.open("ada") as session:
            for number in range(1, options.records + 1):
                text = b'{"role":"user","content":"message %d of a long conversation"}' % number
                session.append(EncodedRecord("message", text))
                if number % BLOCK == 0:
                    await session.save()
        view = await sessions.load("ada")
        assert view is not None
        step = options.records // (PLACES + 1)
        places: dict[int, list[float]] = {place * step: [] for place in range(1, PLACES + 1)}
        newest: list[float] = []
        for _ in range(options.rounds):
            for before, taken in (*places.items(), (None, newest)):
                start = perf_counter()
                page = await view.history(before=before, limit=PAGE)
                taken.append(perf_counter() - start)
                assert len(page) == min(PAGE, options.records)
    worst = max(quartile(taken) for taken in places.values())
    return {"newest": quartile(newest), "worst": worst}


async def _many(url: str, count: int) -> dict[str, float]:
    """Return the seconds that opening and closing so many sessions take, and those of the CPU."""
    names = [f"agent-{number:06}" for number in range(count)]
    taken: dict[str, float] = {}

    async def fill(sessions: SessionManager, name: str) -> None:
        session = await sessions.open(name)
        session.append(Message.user(f"what {name} was asked"), Message.assistant("its answer"))

    async def each(sessions: SessionManager) -> None:
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(fill, sessions, name)

    sessions = await _manager(url, 600.0)
    await each(sessions)
    (await sessions.aclose()).raise_if_unsaved()

    sessions = await _manager(url, 600.0)
    with _Taking(taken, "reopen"):
        await each(sessions)
    with _Taking(taken, "close"):
        report = await sessions.aclose()
    report.raise_if_unsaved()
    return taken


class _Taking:
    """Note the seconds of a block, of the clock and of the CPU."""

    def __init__(self, taken: dict[str, float], name: str) -> None:
        self._taken, self._name = taken, name

    def __enter__(self) -> None:
        self._start = perf_counter(), process_time()

    def __exit__(self, *_: object) -> None:
        start, cpu = self._start
        self._taken[f"{self._name}_s"] = perf_counter() - start
        self._taken[f"{self._name}_cpu_s"] = process_time() - cpu


def _rows(
    options: Options, pages: dict[str, dict[str, float]], many: dict[str, float]
) -> list[Row]:
    ratios = {name: found["worst"] / found["newest"] for name, found in pages.items()}
    return [
        Row(
            f"history.any_of_{options.records}",
            max(ratios.values()),
            "a page anywhere in a log over its newest page, the worse of files and SQLite",
        ),
        *(
            Row(f"history.{name}.newest_ms", found["newest"] * 1e3, "the newest page")
            for name, found in pages.items()
        ),
        *(
            Row(f"scale.{what}_{options.sessions}", many[f"{what}_s"], meaning)
            for what, meaning in (
                ("reopen", "seconds to open sessions that were closed, on SQLite"),
                ("close", "seconds of aclose, all sessions with unsaved changes"),
            )
        ),
    ]
