"""``python -m tests.integration.workers --requests 5000``: prints a JSON summary, exits by it."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

from tests.integration.fleet import Fleet, drive, verify


async def run(
    store: Path,
    *,
    requests: int,
    sessions: int,
    workers: int,
    clients: int,
    kills: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Serve, ask, stop, count; return what was seen."""
    fleet = Fleet(store, workers)
    try:
        began = time.perf_counter()
        tally = await drive(
            fleet, requests=requests, sessions=sessions, clients=clients, kills=kills, seed=seed
        )
        seconds = time.perf_counter() - began
        stderr = await anyio.to_thread.run_sync(fleet.stop)
    finally:
        fleet.close()
    found = await verify(store, tally)
    answered = sum(map(len, tally.answered.values()))
    wrong = bool(found["lost"] or found["doubled"] or found["disordered"])
    return {
        "ok": answered == requests and not wrong and (kills > 0 or not stderr),
        "answered": answered,
        **found,
        "workers_seen": len(tally.workers),
        "killed": tally.killed,
        "retries": tally.retries,
        "replayed": tally.replayed,
        "seconds": round(seconds, 1),
        "ms_p50": round(statistics.median(tally.took) * 1000, 1),
        "ms_p99": round(statistics.quantiles(tally.took, n=100)[98] * 1000, 1),
        "said": stderr[-2000:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.workers")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="perdure-workers-") as folder:
        summary = anyio.run(lambda: run(Path(folder) / "store", **given))
    print(json.dumps(summary, indent=2))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
