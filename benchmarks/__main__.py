"""``python -m benchmarks NAME``: measure, print a table, write JSON; ``--help`` lists the names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    adapters,
    adapters_adk,
    adapters_cpu,
    adapters_openai,
    adapters_pydantic,
    checkpoints,
    deploy,
    forks,
    imports,
    inspector,
    large,
    listing,
    live,
    memory,
    observe,
    opening,
    peers,
    replay,
    report,
    restart,
    restore,
    save,
    scale,
    stores,
    tune,
)
from benchmarks.figures import Report

__all__ = ["main"]

LOOPS = {"both": ("asyncio", "trio"), "asyncio": ("asyncio",), "trio": ("trio",)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; return 1 if a figure misses its target and ``--check`` was given."""
    given = _parser().parse_args(arguments)
    if given.benchmark == "report":
        print(report.page(report.Options(given.file, given.images, given.adapters)), end="")
        return 0
    measured = _run(given)
    print(measured.table())
    if given.benchmark == "adapters":  # the rows of docs/performance.md
        print(*report.adapters_part(measured.document()), sep="\n")
    if given.json is not None:
        measured.save(given.json)
    return 1 if given.check and not measured.met else 0


def _run(given: argparse.Namespace) -> Report:
    if given.benchmark == "save":
        backends = LOOPS[given.backend]
        growth = max(1, min(save.Options().growth_blocks, given.turns // save.BLOCK))
        return save.run(save.Options(given.sessions, given.turns, growth, backends, given.folder))
    if given.benchmark == "adapters":
        found = adapters.run(adapters.Options(given.turns, given.folder))
        adk = adapters_adk.run(adapters_adk.Options(given.turns, folder=given.folder))
        few, fewer = min(given.turns, 200), min(given.turns, 100)
        openai = adapters_openai.run(adapters_openai.Options(few, few, folder=given.folder))
        pydantic = adapters_pydantic.run(adapters_pydantic.Options(fewer, folder=given.folder))
        cpu = adapters_cpu.run(adapters_cpu.Options(few, max(few // 5, 1), folder=given.folder))
        others = {"adk": adk, "openai": openai, "pydantic_ai": pydantic, "cpu": cpu}
        rows = [row for each in (found, *others.values()) for row in each.rows]
        return Report(rows, found.details | {name: each.details for name, each in others.items()})
    if given.benchmark == "live":
        stream = live.Options(given.sessions, given.seconds, given.rate, given.backend)
        return live.run(stream._replace(closed=given.closed, folder=given.folder))
    if given.benchmark == "memory":
        return memory.run(memory.Options(given.entries, given.value_bytes, folder=given.folder))
    if given.benchmark == "checkpoints":
        counts = (given.messages, given.few, given.rounds, given.checkpoints, given.items)
        return checkpoints.run(checkpoints.Options(*counts, given.folder))
    if given.benchmark == "restore":
        return restore.run(restore.Options(given.messages, given.few, given.rounds, given.folder))
    if given.benchmark == "restart":
        again = restart.Options(given.base, given.sessions, given.batch, given.store, given.folder)
        return restart.run(again)
    if given.benchmark == "deploy":
        return deploy.run(
            deploy.Options(given.workers, given.conversations, given.every, given.steady)
        )
    if given.benchmark == "forks":
        sizes = (tuple(given.records or forks.Options().records), forks.Options().restarts)
        options = forks.Options(*sizes, rounds=given.rounds, base=given.base)
        return forks.run(options._replace(folder=given.folder))
    if given.benchmark == "opening":
        chosen = tuple(given.store or opening.STORES)
        sizes = (given.sessions, given.agents, opening.Options().context_kib)
        return opening.run(opening.Options(*sizes, chosen, given.base, given.folder))
    if given.benchmark == "listing":
        usual = listing.QUICK if given.quick else listing.Options()
        sizes = {"sessions": given.sessions or usual.sessions, "base": given.base}
        chosen = tuple(given.store or usual.stores)
        return listing.run(usual._replace(**sizes, stores=chosen, folder=given.folder))
    if given.benchmark == "replay":
        return replay.run(replay.Options(given.events, given.few, given.folder))
    if given.benchmark == "observe":
        return observe.run(observe.Options(given.sessions, given.turns, given.rounds))
    if given.benchmark == "inspector":
        sizes = (given.sessions, given.messages, given.rounds)
        return inspector.run(inspector.Options(*sizes, given.folder))
    if given.benchmark == "tune":
        recordings = tuple(given.seconds or tune.Options().recordings)
        sizes = (given.sessions, given.warm_up, recordings, given.hurry, given.settings)
        return tune.run(tune.Options(*sizes, given.price, given.store, given.folder))
    if given.benchmark == "scale":
        sizes = (given.records, given.sessions, given.rounds)
        return scale.run(scale.Options(*sizes, given.backend, given.folder))
    if given.benchmark == "large":
        return large.run(large.Options(given.megabytes, given.folder))
    if given.benchmark == "stores":
        chosen = tuple(given.store or stores.Options().stores)
        options = stores.Options(given.sessions, given.turns, given.rounds, chosen)
        return stores.run(options._replace(backend=given.backend, folder=given.folder))
    if given.benchmark == "peers":
        chosen = tuple(given.contender or peers.NAMES)
        sizes = tuple(given.sessions or peers.Options().sessions)
        return peers.run(peers.Options(sizes, given.turns, given.rounds, chosen, given.folder))
    return imports.run(imports.Options(given.rounds, given.folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="write figures as JSON")
    common.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--folder", type=Path, help="the disk to measure on (default: temporary)")
    kinds = parser.add_subparsers(dest="benchmark", required=True)

    saving = kinds.add_parser("save", parents=[common, where], help=save.__doc__)
    saving.add_argument("--sessions", type=_count, default=1)
    saving.add_argument("--turns", type=_count, default=3000)
    saving.add_argument("--backend", choices=LOOPS, default="both")

    adapting = kinds.add_parser("adapters", parents=[common, where], help=adapters.__doc__)
    adapting.add_argument("--turns", type=_count, default=1000)

    living = kinds.add_parser("live", parents=[common, where], help=live.__doc__)
    living.add_argument("--sessions", type=_count, default=100_000)
    living.add_argument("--seconds", type=float, default=60.0)
    living.add_argument("--rate", type=float, default=8_000.0, help="appends in a second")
    living.add_argument("--closed", type=_count, default=0, help="open and close so many instead")
    living.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")

    starting = kinds.add_parser("imports", parents=[common, where], help=imports.__doc__)
    starting.add_argument("--rounds", type=_count, default=21)

    remembering = kinds.add_parser("memory", parents=[common, where], help=memory.__doc__)
    remembering.add_argument("--entries", type=_count, default=10_000)
    remembering.add_argument("--value-bytes", type=_count, default=10_240)

    _add_openings(kinds, [common, where])
    _add_long_sessions(kinds, [common, where])

    storing = kinds.add_parser("stores", parents=[common, where], help=stores.__doc__)
    storing.add_argument("--sessions", type=_count, default=200)
    storing.add_argument("--turns", type=_count, default=200, help="of each session")
    storing.add_argument("--rounds", type=_count, default=5)
    storing.add_argument("--store", action="append", choices=stores.Options().stores)
    storing.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")

    beside = kinds.add_parser("peers", parents=[common, where], help=peers.__doc__)
    beside.add_argument("--sessions", type=_count, action="append", help="default: 1 and 200")
    beside.add_argument("--turns", type=_count, default=3000, help="of all sessions together")
    beside.add_argument("--rounds", type=_count, default=5)
    beside.add_argument("--contender", action="append", choices=peers.NAMES)

    writing = kinds.add_parser("report", help=report.__doc__)
    writing.add_argument("file", type=Path, help="what `peers --json` has written")
    writing.add_argument("--images", type=Path, default=report.Options(Path()).images)
    writing.add_argument("--adapters", type=Path, help="what `adapters --json` has written")
    return parser


def _add_openings(kinds: Any, parents: list[argparse.ArgumentParser]) -> None:
    usual = opening.Options()
    opens = kinds.add_parser("opening", parents=parents, help=opening.__doc__)
    opens.add_argument("--sessions", type=_count, default=usual.sessions)
    opens.add_argument("--agents", type=_count, default=usual.agents)
    opens.add_argument("--store", action="append", choices=opening.STORES)
    opens.add_argument("--base", type=Path, help="a checkout of the revision to compare with")

    again = kinds.add_parser("restart", parents=parents, help=restart.__doc__)
    again.add_argument("--sessions", type=_count, default=10_000)
    again.add_argument("--batch", type=_count, default=100, help="sessions at a time")
    again.add_argument("--store", choices=restart.STORES, default=restart.STORES[0])
    again.add_argument("--base", type=Path, required=True, help="a checkout to compare with")

    usually = deploy.Options()
    replacing = kinds.add_parser("deploy", parents=parents[:1], help=deploy.__doc__)
    replacing.add_argument("--workers", type=_count, default=usually.workers)
    replacing.add_argument("--conversations", type=_count, default=usually.conversations)
    replacing.add_argument("--every", type=float, default=usually.every, help="s between turns")
    replacing.add_argument("--steady", type=float, default=usually.steady, help="s before it")

    lists = kinds.add_parser("listing", parents=parents, help=listing.__doc__)
    lists.add_argument("--sessions", type=_count, help="default: 10,000")
    lists.add_argument("--quick", action="store_true", help="few sessions, on SQLite alone")
    lists.add_argument("--store", action="append", choices=listing.STORES)
    lists.add_argument("--base", type=Path, help="a checkout of the revision to compare with")


def _add_long_sessions(kinds: Any, parents: list[argparse.ArgumentParser]) -> None:
    """Add the benchmarks that set a long session against a short one."""
    restoring = kinds.add_parser("restore", parents=parents, help=restore.__doc__)
    restoring.add_argument("--messages", type=_count, default=50_000, help="of the long session")
    restoring.add_argument("--few", type=_count, default=1_000, help="of the short one")
    restoring.add_argument("--rounds", type=_count, default=9)

    sealing = kinds.add_parser("checkpoints", parents=parents, help=checkpoints.__doc__)
    sealing.add_argument("--messages", type=_count, default=50_000, help="of the long session")
    sealing.add_argument("--few", type=_count, default=500, help="of the short one")
    sealing.add_argument("--rounds", type=_count, default=60)
    sealing.add_argument("--checkpoints", type=_count, default=1000, help="of a growing session")
    sealing.add_argument("--items", type=_count, default=10_000, help="of a state, of 1 KB each")

    forking = kinds.add_parser("forks", parents=parents, help=forks.__doc__)
    forking.add_argument(
        "--records", type=_count, action="append", help="default: 1,000 to 100,000"
    )
    forking.add_argument("--rounds", type=_count, default=forks.Options().rounds)
    forking.add_argument("--base", type=Path, help="a checkout of the revision to compare with")

    observing = kinds.add_parser("observe", parents=parents, help=observe.__doc__)
    observing.add_argument("--sessions", type=_count, default=10_000, help="that a scrape is of")
    observing.add_argument("--turns", type=_count, default=400, help="in a block")
    observing.add_argument("--rounds", type=_count, default=41)

    looking = kinds.add_parser("inspector", parents=parents, help=inspector.__doc__)
    looking.add_argument("--sessions", type=_count, default=10_000)
    looking.add_argument("--messages", type=_count, default=50_000, help="of the long session")
    looking.add_argument("--rounds", type=_count, default=5)

    tuning = kinds.add_parser("tune", parents=parents, help=tune.__doc__)
    tuning.add_argument("--sessions", type=_count, default=tune.Options().sessions)
    tuning.add_argument("--warm-up", type=float, default=tune.Options().warm_up)
    tuning.add_argument(
        "--seconds", type=float, action="append", help="of a recording; may be repeated"
    )
    tuning.add_argument("--hurry", type=float, default=tune.Options().hurry)
    tuning.add_argument("--settings", type=_count, default=tune.Options().settings)
    tuning.add_argument("--price", type=float, default=0.0, help="of a million saves")
    tuning.add_argument("--store", choices=tune.STORES, default=tune.Options().store)

    scaling = kinds.add_parser("scale", parents=parents, help=scale.__doc__)
    scaling.add_argument("--records", type=_count, default=1_000_000, help="of the long log")
    scaling.add_argument("--sessions", type=_count, default=10_000)
    scaling.add_argument("--rounds", type=_count, default=21)
    scaling.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")

    storing = kinds.add_parser("large", parents=parents, help=large.__doc__)
    storing.add_argument("--megabytes", type=_count, default=1000)

    replaying = kinds.add_parser("replay", parents=parents, help=replay.__doc__)
    replaying.add_argument("--events", type=_count, default=1_000_000)
    replaying.add_argument("--few", type=_count, default=100_000)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"invalid {text}: give a number from 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
