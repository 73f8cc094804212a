"""What a listing costs beside the SDKs' own stores, and what a save pays for it.

The question: of many sessions, those of one owner, fifty at most, the newest first.

- **Google ADK**: ``list_sessions`` of a user, by `PerdureSessionService` and by the SDK's
  ``DatabaseSessionService``; both return all of the user's sessions with their state.
- **LangGraph**: ``alist`` without a thread, filtered by a user, by `PerdureSaver` and by the SDK's
  savers; and the newest fifty of all threads, which is only reported.

Both on SQLite and on PostgreSQL, in one process, by turns. The figure is the median of the rounds'
ratios of CPU, of this process: a server's own is not in it. What is asked was written by a manager
that has been closed, so nothing of it is in memory.

- **A turn** on SQLite over another revision's (``--base``), each in a process of its own over a
  store of its own, by turns: what a save pays for the directory. In memory (``/dev/shm``), where a
  sync costs nothing: a disk at work adds more than what is looked for.
- **Requests** of a save on S3, as a proxy counts them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.figures import Report, Row
from benchmarks.revisions import Worker
from benchmarks.stores.network import SERVERS
from benchmarks.timing import quartile
from perdure import Autosave, LeaseOptions, Message, Shutdown

__all__ = ["QUICK", "STORES", "Options", "run"]

STORES = ("sqlite", "postgres")
ROOT = Path(__file__).parents[1]
MEMORY = Path("/dev/shm")
"""A file system in memory, if there is one."""
PAGE = 50
WARM_UP = 2
AT_ONCE = 50
ASKED = 8
"""Owners that are asked for in a round."""


class Options(NamedTuple):
    """How much to list, and where."""

    sessions: int = 10_000
    rounds: int = 9
    blocks: int = 100
    """Blocks of turns that are compared with the base's."""
    stores: tuple[str, ...] = STORES
    base: Path | None = None
    """A checkout of the revision whose turns are the measure."""
    folder: Path | None = None


QUICK = Options(sessions=500, rounds=3, blocks=4, stores=("sqlite",))


class Contender(NamedTuple):
    """A store, and what it is asked."""

    mine: Callable[[str], Awaitable[int]]
    """Lists an owner's, and returns how many there were."""
    newest: Callable[[], Awaitable[int]] | None = None
    """Lists the newest of all."""


Pair = tuple[Contender, Contender]


def run(options: Options) -> Report:
    """Measure in a folder that is removed afterwards."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as name:
        folder = Path(name)
        for store in options.stores:
            with _url(store, folder) as url:
                for sdk, pair in (("adk", _adk), ("langgraph", _langgraph)):
                    found = asyncio.run(_measured(pair(url, folder, options), options))
                    details[f"{sdk}.{store}"] = found
                    rows += _rows(sdk, store, found, options)
        for sdk in ("adk", "langgraph"):
            worst = max(row.value for row in rows if row.name.startswith(f"listing.{sdk}."))
            rows.append(Row(f"listing.{sdk}", worst, "the worst of these ratios of CPU"))
        rows.append(_s3(folder, details))
        if options.base is not None:
            rows.append(_over_base(folder, options, details))
    about = {**options._asdict(), "folder": None, "base": str(options.base)}
    return Report(rows, {**about, "taken": details})


def _rows(sdk: str, store: str, found: dict[str, Any], options: Options) -> list[Row]:
    def ratio(what: str) -> float:
        return median(mine / other for mine, other in zip(*found[what], strict=True))

    of = f"of {options.sessions:,} sessions on {store}: CPU over the SDK's own"
    rows = [Row(f"listing.{sdk}.{store}", ratio("mine"), f"one owner's {of}")]
    if "newest" in found:
        meaning = f"the newest {PAGE} {of}"
        rows.append(Row(f"listing.newest.{sdk}.{store}", ratio("newest"), meaning))
    return rows


@contextmanager
def _url(store: str, folder: Path) -> Iterator[str]:
    if store == "sqlite":
        yield f"sqlite:///{folder}/perdure.db"
        return
    from tests.servers.postgres import Postgres

    with Postgres() as server:
        yield server.url


def owner_of(number: int, sessions: int) -> str:
    """Return whose a session is: each has about a page."""
    return f"user-{number % max(sessions // PAGE, 1)}"


async def _measured(opening: Any, options: Options) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds of CPU: of a round of each contender, by question."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    async with opening as pair:
        for number in range(WARM_UP + options.rounds):
            first = number * ASKED
            owners = [owner_of(first + at, options.sessions) for at in range(ASKED)]
            for at in (0, 1) if number % 2 else (1, 0):
                contender = pair[at]
                began = process_time()
                for owner in owners:
                    count = await contender.mine(owner)
                    assert count >= min(PAGE, options.sessions) * 0.9, (at, owner, count)
                found.setdefault("mine", ([], []))[at].append(process_time() - began)
                if contender.newest is not None:
                    began = process_time()
                    assert await contender.newest() == PAGE
                    found.setdefault("newest", ([], []))[at].append(process_time() - began)
    return {what: (ours[WARM_UP:], theirs[WARM_UP:]) for what, (ours, theirs) in found.items()}


async def _all(count: int, act: Callable[[int], Awaitable[object]]) -> None:
    """Act on each number, many at a time."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await act(number)

    async with anyio.create_task_group() as group:
        for _ in range(AT_ONCE):
            group.start_soon(some)


# Google ADK


@asynccontextmanager
async def _adk(url: str, folder: Path, options: Options) -> AsyncIterator[Pair]:
    from google.adk.sessions import DatabaseSessionService

    from perdure.adapters import PerdureSessionService

    if url.startswith("sqlite"):
        their_url = f"sqlite+aiosqlite:///{folder}/adk.db"
    else:
        their_url = url.replace("postgresql://", "postgresql+asyncpg://")

    def ours() -> Any:
        return PerdureSessionService(url, tenant="adk")

    def theirs() -> Any:
        return DatabaseSessionService(their_url)

    for make, at_once in ((ours, True), (theirs, not url.startswith("sqlite"))):
        service = make()

        async def create(number: int, service: Any = service) -> None:
            await service.create_session(
                app_name="harbor",
                user_id=owner_of(number, options.sessions),
                session_id=f"s{number}",
                state={"title": f"Plan {number}"},
            )

        if at_once:
            await _all(options.sessions, create)
        else:
            _unsynced(service)
            for number in range(options.sessions):
                await create(number)
        await service.close()

    async def listed(service: Any, owner: str) -> int:
        found = await service.list_sessions(app_name="harbor", user_id=owner)
        return len(found.sessions)

    services = (ours(), theirs())
    try:
        yield (
            Contender(lambda owner: listed(services[0], owner)),
            Contender(lambda owner: listed(services[1], owner)),
        )
    finally:
        for service in services:
            await service.close()


def _unsynced(service: Any) -> None:
    from sqlalchemy import event

    def without_sync(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(service.db_engine.sync_engine, "connect", without_sync)


# LangGraph


@asynccontextmanager
async def _langgraph(url: str, folder: Path, options: Options) -> AsyncIterator[Pair]:
    from perdure.adapters import PerdureSaver

    async def fill(saver: Any) -> None:
        from langgraph.checkpoint.base import empty_checkpoint

        async def put(number: int) -> None:
            user = owner_of(number, options.sessions)
            about = {"thread_id": f"t{number}", "checkpoint_ns": "", "user_id": user}
            checkpoint = empty_checkpoint() | {"channel_values": {"answer": f"Plan {number}"}}
            checkpoint["channel_versions"] = {"answer": 1}
            config = {"configurable": about}
            metadata = {"source": "loop", "step": 1, "user_id": user}
            await saver.aput(config, checkpoint, metadata, {"answer": 1})

        await _all(options.sessions, put)

    @asynccontextmanager
    async def ours() -> AsyncIterator[Any]:
        async with perdure.connect(url) as sessions:
            yield PerdureSaver(sessions, tenant="langgraph", owner="user_id")

    async with AsyncExitStack() as stack:
        theirs = await stack.enter_async_context(_their_saver(url, folder))
        await fill(theirs)
        async with ours() as saver:
            await fill(saver)
        saver = await stack.enter_async_context(ours())
        yield (
            Contender(*_questions(saver)),
            Contender(*_questions(theirs)),
        )


def _questions(
    saver: Any,
) -> tuple[Callable[[str], Awaitable[int]], Callable[[], Awaitable[int]]]:
    async def listed(about: dict[str, Any] | None) -> int:
        return len([one async for one in saver.alist(None, filter=about, limit=PAGE)])

    return lambda owner: listed({"user_id": owner}), lambda: listed(None)


@asynccontextmanager
async def _their_saver(url: str, folder: Path) -> AsyncIterator[Any]:
    if url.startswith("sqlite"):
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        async with AsyncSqliteSaver.from_conn_string(f"{folder}/langgraph.db") as saver:
            await saver.conn.execute("PRAGMA synchronous=OFF")
            yield saver
        return
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

    async with AsyncPostgresSaver.from_conn_string(url) as saver:
        await saver.setup()
        yield saver


# What a save pays


async def _requests(make: Callable[[], Any], proxy: Any) -> list[int]:
    quiet: dict[str, Any] = {
        "autosave": Autosave(debounce=3600, max_delay=3600),
        "lease": LeaseOptions(heartbeat=300, ttl=1200),
        "shutdown": Shutdown(signals=False),
    }
    counts: list[int] = []
    async with (
        perdure.connect(make(), **quiet) as sessions,
        sessions.open("ada", owner="ada") as session,
    ):
        await session.save()  # which brings the labels
        for number in range(9):
            proxy.take()
            async with session.turn():
                session.append(Message.user(f"{number}"), Message.assistant("hello"))
            counts.append(len(proxy.take()))
    return counts


def _s3(folder: Path, details: dict[str, Any]) -> Row:
    with SERVERS["s3"](folder) as counted:
        counts = anyio.run(_requests, counted.make, counted.proxy)
    details["s3"] = counts
    return Row("listing.s3.requests", median(counts), "requests of a durable turn on S3")


WORKER = """
import asyncio, gc, json, sys
from time import process_time
import perdure
from perdure import LeaseOptions, Message, Shutdown

async def main():
    options = {"autosave": None, "shutdown": Shutdown(signals=False)}
    options["lease"] = LeaseOptions(heartbeat=300, ttl=1200)
    async with perdure.connect(sys.argv[1], **options) as sessions:
        for line in sys.stdin:
            name, turns = json.loads(line)
            async with sessions.open(name, owner="ada", tags=["x"]) as session:
                await session.save()
                gc.collect()
                began = process_time()
                for number in range(turns):
                    async with session.turn():
                        session.append(Message.user(f"hi {number}"), Message.assistant("hello"))
                took = process_time() - began
            await session.aclose()
            print(json.dumps(took), flush=True)

asyncio.run(main())
"""
TURNS = 100


def _over_base(folder: Path, options: Options, details: dict[str, Any]) -> Row:
    assert options.base is not None
    both: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        if MEMORY.is_dir():
            place = tempfile.TemporaryDirectory(prefix="perdure-", dir=MEMORY)
            folder = Path(stack.enter_context(place))
        workers = []
        for number, checkout in enumerate((ROOT, options.base)):
            worker = Worker(checkout, WORKER, f"sqlite:///{folder}/turns-{number}.db")
            stack.callback(worker.close)
            workers.append(worker)
        for number in range(WARM_UP + options.blocks):
            for at in (0, 1) if number % 2 else (1, 0):
                both[at].append(workers[at].ask(f"a{number}", TURNS))
    ours, theirs = (seconds[WARM_UP:] for seconds in both)
    details["turn_over_base"] = {"own": ours, "base": theirs}
    value = quartile(ours) / quartile(theirs)  # without what others have added
    return Row("listing.turn_over_base", value, "CPU of a durable turn on SQLite over the base's")
