"""Crash tests from the command line, with a summary in JSON.

    python -m tests.crash steps --scenario fold     # kill at every call
    python -m tests.crash faults --scenario fold    # let every call fail
    python -m tests.crash kill --cycles 300         # kill at random, under load: sessions and turns
    python -m tests.crash kill --runner uvloop      # the same under another runner
    python -m tests.crash kill --bare               # a store alone, without a manager
    python -m tests.crash stop --cycles 50          # stop, take over, go on; without: every call
    python -m tests.crash pause --cycles 20         # the same at random moments, any store
    python -m tests.crash race --rounds 50          # eight processes want one session
    python -m tests.crash readers --seconds 10      # readers beside a folding writer
    python -m tests.crash effects --cycles 100      # kill an agent that sends mail; without: everywhere
    python -m tests.crash mail                      # kill who posts and takes, at every call
    python -m tests.crash restore --variant damaged # kill a restore at every call, and restart
    python -m tests.crash rollback                  # kill a rollback at every call
    python -m tests.crash aside                     # kill who sets a damaged log aside
    python -m tests.crash compaction                # kill a turn that compacts at every step
    python -m tests.crash forks --forks 1000        # kill who forks sessions that go meanwhile
    python -m tests.crash media                     # kill an agent that looks at screenshots
    python -m tests.crash flip --cycles 1000        # damage to each file of a session
    python -m tests.crash cuts --limit 1000         # states that a cut of power may leave
    python -m tests.crash power --system ext4      # cut it for real, on an image; as root

``forks``, ``kill``, ``pause``, ``race`` and ``readers`` take ``--store``: file, sqlite, encrypted, encrypted-file,
postgres, redis, s3.

Exits with 1 if anything was lost, or nothing was put to the test.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from tests.crash import places, work
from tests.crash.aside import aside
from tests.crash.compacting import compaction
from tests.crash.cuts import cuts
from tests.crash.effects import effects
from tests.crash.faults import faults
from tests.crash.flip import flip
from tests.crash.forking import forks
from tests.crash.kill import kill
from tests.crash.mail import mail
from tests.crash.media import media
from tests.crash.pause import pause
from tests.crash.power import SYSTEMS, power
from tests.crash.race import race
from tests.crash.readers import readers
from tests.crash.restoring import VARIANTS, restore
from tests.crash.rollbacks import rollback
from tests.crash.sessions import kill_sessions
from tests.crash.steps import steps
from tests.crash.stop import stop
from tests.crash.work import SCENARIOS
from tests.runners import LOOPS

COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "aside": aside,
    "compaction": compaction,
    "cuts": cuts,
    "effects": effects,
    "faults": faults,
    "flip": flip,
    "forks": forks,
    "kill": kill,
    "kill-sessions": kill_sessions,
    "mail": mail,
    "media": media,
    "pause": pause,
    "power": power,
    "race": race,
    "readers": readers,
    "restore": restore,
    "rollback": rollback,
    "steps": steps,
    "stop": stop,
}


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    commands = whole.add_subparsers(dest="command", required=True)
    for name in ("steps", "cuts", "faults"):
        command = commands.add_parser(name)
        command.add_argument("--scenario", choices=sorted(SCENARIOS), default="everything")
    commands.choices["cuts"].add_argument("--limit", type=int)
    commands.choices["faults"].add_argument("--every", type=int, default=1)
    commands.choices["cuts"].add_argument(
        "--lie", choices=["fsync", "fdatasync"], help="break this sync: must be seen"
    )
    command = commands.add_parser("kill")
    command.add_argument("--cycles", type=int, default=30)
    command.add_argument("--sessions", type=int, default=4)
    command.add_argument("--bare", action="store_true", help="a store without a manager")
    command = commands.add_parser("stop")
    command.add_argument("--cycles", type=int, help="at random; else once at every call")
    command.add_argument("--unfenced", action="store_true", help="break the store: must be seen")
    command = commands.add_parser("pause")
    command.add_argument("--cycles", type=int, default=20)
    command = commands.add_parser("power")
    command.add_argument("--cycles", type=int, default=20)
    command.add_argument("--system", choices=sorted(SYSTEMS), default="ext4")
    for name in ("mail", "compaction"):
        commands.add_parser(name).add_argument("--every", type=int, default=1)
    command = commands.add_parser("effects")
    command.add_argument("--cycles", type=int, help="at points spread evenly; else at every point")
    command.add_argument("--asks", action="store_true", help="ask, instead of posting")
    command = commands.add_parser("media")
    command.add_argument("--screenshots", type=int, default=20)
    command.add_argument("--photos", type=int, default=3)
    command.add_argument("--least", type=int, default=300_000, help="bytes of the smallest image")
    command.add_argument("--most", type=int, default=1_700_000, help="bytes of the largest image")
    command.add_argument("--tokens", type=int, default=40_000, help="the budget for media")
    command.add_argument("--cycles", type=int, default=12, help="how often it is killed at most")
    command = commands.add_parser("race")
    command.add_argument("--rounds", type=int, default=10)
    command.add_argument("--racers", type=int, default=8)
    command = commands.add_parser("forks")
    command.add_argument("--forks", type=int, default=100)
    command.add_argument("--records", type=int, default=1000, help="of each session")
    command.add_argument("--hasty", action="store_true", help="break the copier: must be seen")
    stores = ["file", "sqlite", "postgres", "redis"]
    command.add_argument("--store", choices=stores, default="file")
    command = commands.add_parser("flip")
    command.add_argument("--cycles", type=int, default=200)
    command = commands.add_parser("restore")
    command.add_argument("--variant", choices=sorted(VARIANTS), default="sound")
    command.add_argument("--every", type=int, default=1)
    command = commands.add_parser("aside")
    command.add_argument("--every", type=int, default=1)
    command = commands.add_parser("rollback")
    command.add_argument("--every", type=int, default=1)
    command = commands.add_parser("readers")
    command.add_argument("--seconds", type=float, default=3.0)
    for name in ("compaction", "effects"):
        commands.choices[name].add_argument(
            "--backend", choices=["asyncio", "trio"], default="asyncio"
        )
    for name in ("kill", "pause", "power", "race", "readers"):
        commands.choices[name].add_argument("--store", choices=sorted(places.KINDS), default="file")
    for name in ("flip", "faults"):
        commands.choices[name].add_argument("--store", choices=["file", "sqlite"], default="file")
    for name in ("kill", "stop", "pause", "faults", "race"):
        commands.choices[name].add_argument("--runner", choices=sorted(LOOPS), default="asyncio")
    for name in ("kill", "stop", "pause", "cuts", "flip", "forks", "media", "power"):
        commands.choices[name].add_argument("--seed", type=int, default=0)
    return whole


def main() -> int:
    options = vars(parser().parse_args())
    command = options.pop("command")
    if command in ("steps", "cuts", "faults"):
        options["name"] = options.pop("scenario")
    places.choose(options.pop("store", "file"))
    work.RUNNER[0] = options.pop("runner", "asyncio")
    if command == "kill" and not options.pop("bare"):
        options["runner"] = work.RUNNER[0]
        command = "kill-sessions"
    summary = COMMANDS[command](**options)
    print(json.dumps(summary, indent=2))
    tested = [summary.get(figure) for figure in ("acknowledged", "with_promises", "noticed")]
    return 1 if summary["problems"] or not any(tested) else 0


if __name__ == "__main__":
    sys.exit(main())
