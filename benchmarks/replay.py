"""What a replay of many events takes in memory, set against one of few.

Each ``perdure replay`` is a process of its own, and tells its own peak (``VmHWM``). The session's
log and the pair of files that is exported from it are both replayed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import anyio
import msgspec

import perdure
from benchmarks.disk import filesystem
from benchmarks.figures import Report, Row
from perdure import Shutdown
from perdure.records.checkpoints import KernelEvent
from perdure.records.records import EVENT, Entry
from perdure.session.export import export_pair

__all__ = ["Options", "run"]

SAVE_EVERY = 2000
CHECKPOINT_EVERY = 50_000
KIB = 1024


class Options(NamedTuple):
    """How much."""

    events: int = 1_000_000
    few: int = 100_000
    folder: Path | None = None


class Seen(NamedTuple):
    """One replay."""

    peak: int
    """Bytes, of the whole process."""
    seconds: float
    events: int


def run(options: Options) -> Report:
    """Measure."""
    found: dict[str, dict[str, Seen]] = {"session": {}, "files": {}}
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as name:
        place = Path(name)
        kind = filesystem(place)
        for size, events in (("few", options.few), ("many", options.events)):
            store, pair = place / size, place / f"{size} pair"
            pair.mkdir()
            anyio.run(_write, store, pair, events)
            found["session"][size] = _replay("ada", "--store", str(store))
            found["files"][size] = _replay("--files", str(pair))
    growth = {where: seen["many"].peak / seen["few"].peak for where, seen in found.items()}
    wanted = {"few": options.few, "many": options.events}
    for seen in found.values():
        for size, one in seen.items():
            checkpoints = wanted[size] // CHECKPOINT_EVERY
            if one.events != wanted[size] + checkpoints:
                raise SystemExit(f"{one.events} events were replayed of {wanted[size]}")
    rows = [
        Row(
            "checkpoints.replay_memory_growth",
            max(growth.values()),
            "peak of a replay of many events over that of few",
        )
    ]
    details = {
        where: {
            size: {"peak_kib": one.peak // KIB, "seconds": round(one.seconds, 2)}
            for size, one in seen.items()
        }
        for where, seen in found.items()
    }
    about = {"filesystem": kind, "events": options.events, "few": options.few}
    return Report(rows, {**about, "growth": growth, "replays": details})


async def _write(store: Path, pair: Path, events: int) -> None:
    async with perdure.connect(store, autosave=None, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            for n in range(1, events + 1):
                session._accept((_event(session._contents.clock + 1, n),))
                if n % SAVE_EVERY == 0:
                    await session.save()
                if n % CHECKPOINT_EVERY == 0:
                    await session.checkpoints.create(f"after {n}", {"events": n})
            await session.save()
        view = await sessions.load("ada")
        assert view is not None
        await export_pair(view, pair)


def _event(timestamp: int, n: int) -> Entry:
    kind = "custom" if n % 10 == 0 else "capability_used"
    event = KernelEvent(
        token_id=n // 20, timestamp=timestamp, kind=kind, label=f"tool {n % 30}", detail={"n": n}
    )
    return Entry(EVENT, msgspec.json.encode(event))


PROBE = """
import sys
from perdure.cli import main
status = main(sys.argv[1:])
with open("/proc/self/status") as file:
    fields = dict(line.split(":", 1) for line in file)
print(fields["VmHWM"].split()[0], file=sys.stderr)
sys.exit(status)
"""


def _replay(*what: str) -> Seen:
    command = [sys.executable, "-c", PROBE, "replay", *what, "--json"]
    begun = perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"the replay of {what} failed: {done.stderr.decode()[:2000]}")
    report = msgspec.json.decode(done.stdout)
    return Seen(int(done.stderr.split()[-1]) * KIB, perf_counter() - begun, report["events"])
