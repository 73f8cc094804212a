"""The rounds: perdure, then the plain driver, for each store."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.disk import filesystem
from benchmarks.figures import Report, Row
from benchmarks.stores.load import connected
from benchmarks.stores.network import SERVERS, network, processes
from benchmarks.stores.raw import (
    Plain,
    PlainFiles,
    PlainPostgres,
    PlainRedis,
    PlainS3,
    PlainSqlite,
    replay,
)
from benchmarks.timing import percentile
from perdure.store import Store

__all__ = ["STORES", "Options", "run"]


class Options(NamedTuple):
    """What to measure, and where."""

    sessions: int = 200
    turns: int = 200
    """Of each session."""
    rounds: int = 5
    stores: tuple[str, ...] = ("file", "sqlite", "postgres", "redis", "s3")
    backend: str = "asyncio"
    folder: Path | None = None


class Pair(NamedTuple):
    """A store, and the plain driver of the same server."""

    store: Store
    plain: Plain | None


@asynccontextmanager
async def _memory(_folder: Path) -> AsyncIterator[Pair]:
    yield Pair(perdure.store_for("memory:"), None)


@asynccontextmanager
async def _file(folder: Path) -> AsyncIterator[Pair]:
    store = perdure.store_for(folder / "store")
    (folder / "plain").mkdir()
    plain = PlainFiles(folder / "plain", store.capabilities.parallelism)
    try:
        yield Pair(store, plain)
    finally:
        plain.close()


@asynccontextmanager
async def _sqlite(folder: Path) -> AsyncIterator[Pair]:
    plain = PlainSqlite(folder / "plain.db")
    try:
        yield Pair(perdure.store_for(f"sqlite:///{folder / 'store.db'}"), plain)
    finally:
        plain.close()


@asynccontextmanager
async def _postgres(_folder: Path) -> AsyncIterator[Pair]:
    from tests.servers.postgres import Postgres

    with Postgres(fsync=True) as server:
        store = perdure.store_for(server.url)
        plain = PlainPostgres(server.url, store.capabilities.parallelism)
        try:
            yield Pair(store, plain)
        finally:
            plain.close()


@asynccontextmanager
async def _redis(_folder: Path) -> AsyncIterator[Pair]:
    from tests.servers.valkey import valkey

    with valkey() as server:
        store = perdure.store_for(server.url)
        workers = store.capabilities.parallelism
        async with PlainRedis.opened(server.url, workers) as plain:
            yield Pair(store, plain)


@asynccontextmanager
async def _s3(folder: Path) -> AsyncIterator[Pair]:
    from tests.servers.s3 import S3Server, store_on

    with S3Server() as server:
        store = store_on(server, folder)
        yield Pair(store, PlainS3(server.client(), store.capabilities.parallelism))


STORES: dict[str, Callable[[Path], AbstractAsyncContextManager[Pair]]] = {
    "memory": _memory,
    "file": _file,
    "sqlite": _sqlite,
    "postgres": _postgres,
    "redis": _redis,
    "s3": _s3,
}


class Found(NamedTuple):
    """What one store has shown."""

    shares: list[float]
    """perdure's rate over the driver's, by round."""
    rates: list[float]
    """Turns in a second, by round."""
    batch: float
    """Sessions in a batch, on average."""
    lag: float


def run(options: Options) -> Report:
    """Measure each store on one event loop."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        kind = filesystem(Path(folder))
        found: dict[str, Found] = {}
        for name in ("memory", *options.stores):
            place = Path(folder) / name
            place.mkdir()
            found[name] = anyio.run(_measure, name, place, options, backend=options.backend)
    memory = found.pop("memory")
    rows = [
        Row(f"stores.{name}.of_limit", median(one.shares), "rate over the plain driver's")
        for name, one in found.items()
    ]
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        for name in filter(SERVERS.__contains__, options.stores):
            rows += network(name, Path(folder), options.backend)
    together: dict[int, float] = {}
    if "postgres" in options.stores:
        turns = -(-options.turns // options.rounds)
        together = processes(options.sessions // 4 or 1, turns, options.rounds)
        rows += [
            Row(
                f"stores.postgres.processes_{count}_over_{count // 2}",
                together[count] / together[count // 2],
                f"turns/s of {count} processes over those of {count // 2}",
            )
            for count in (2, 4)
        ]
    lag = max(one.lag for one in found.values()) / memory.lag
    rows.append(Row("stores.lag_over_memory", lag, "event loop's lag, p99.9, over the memory's"))
    details = {
        name: {
            "of_limit_by_round": [round(share, 3) for share in one.shares],
            "turns_per_s": round(median(one.rates)),
            "sessions_in_a_batch": round(one.batch, 1),
            "lag_p999_ms": round(one.lag * 1e3, 2),
        }
        for name, one in {"memory": memory, **found}.items()
    }
    about: dict[str, Any] = {
        "filesystem": kind,
        "sessions": options.sessions,
        "turns": options.turns,
        "rounds": options.rounds,
        "loop": options.backend,
    }
    about["turns_per_s_by_processes"] = {
        str(count): round(rate) for count, rate in together.items()
    }
    return Report(rows, {**about, "stores": details})


async def _measure(name: str, folder: Path, options: Options) -> Found:
    turns = -(-options.turns // options.rounds)
    everything = turns * options.sessions
    shares: list[float] = []
    rates: list[float] = []
    sizes: list[int] = []
    heads = [0] * options.sessions
    async with STORES[name](folder) as pair, connected(pair.store, options.sessions) as talk:
        for _ in range(options.rounds):
            ours, batches = await talk.round(turns)
            rates.append(everything / ours)
            sizes += map(len, batches)
            if pair.plain is not None:
                shares.append(await replay(pair.plain, batches, heads) / ours)
            gc.unfreeze()
        return Found(shares, rates, fmean(sizes), percentile(talk.lag.late, 0.999))
