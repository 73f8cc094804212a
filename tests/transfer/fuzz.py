"""Look for files that cost too much, or end otherwise than by an error: ``python -m tests.transfer.fuzz --minutes 20``.

Hypothesis draws what is changed in sound bundles, exports, folders, databases of SDKs and backups
(`hostile`). A process reads them, one after the other; this one judges it: each input ends within
10 s, or as many times that as the machine has more to do than processors, and within 10 s of a
processor's time; the process stays below 200 MB of memory (those with the SDKs' modules take as
much as that for what they read), and what comes out is a session, or an error of perdure's. Prints how to run a failure again;
exits 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import queue
import resource
import secrets
import shutil
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.source_tree import ROOT
from tests.transfer.hostile import TARGETS, Samples, attempt

SECONDS: Final = 10.0
MEMORY: Final = 200_000_000
SPACE: Final = 4 * 1024**3
"""Of addresses: what would take the whole machine ends with a MemoryError."""
EXAMPLES: Final = 100
"""Inputs of a process."""


def allowed() -> float:
    """Return the seconds that an input may take on this machine now."""
    return SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def memory(field: str) -> int:
    """Return what this process has of memory, or had at most, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def tell(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def child(target: str, seed: int, examples: int) -> None:
    """Read so many inputs, and tell of each what it took."""
    from hypothesis import HealthCheck, Phase, given, seed as seeded, settings, strategies as st

    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    with TemporaryDirectory() as place:
        samples = Samples.made(Path(place), sdks=target == "databases")
        for number in range(20):  # what is loaded at the first use
            _one(target, samples, Random(number), Path(place))
        gc.collect()
        before = memory("VmRSS")
        tell(ready=before)

        @seeded(seed)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, 2**32))
        def read(number: int) -> None:
            tell(input=number)
            forget_peak()
            begin, used = time.monotonic(), time.process_time()
            fault, taken = _one(target, samples, Random(number), Path(place))
            peak = max(memory("VmHWM") - before, 0)
            seconds, used = time.monotonic() - begin, time.process_time() - used
            tell(taken=taken, fault=fault, seconds=seconds, used=used, peak=peak)

        read()
        tell(done=True)


def _one(target: str, samples: Samples, random: Random, place: Path) -> tuple[str, bool]:
    folder = place / "one"
    folder.mkdir()
    try:
        return "", attempt(target, samples, random, folder)
    except (Exception, SystemExit) as error:
        return _short(error), False
    finally:
        shutil.rmtree(folder)


def _short(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return f"{type(error).__name__}: {str(error)[:300]}\n" + "".join(traceback.format_list(frames))


class Tally:
    """What was read of one target."""

    def __init__(self) -> None:
        self.inputs = self.taken = self.faults = 0
        self.seconds = self.used = 0.0
        self.peak = self.base = 0


def judge(target: str, seed: int, examples: int, tally: Tally) -> None:
    """Let a process read, and judge what it tells."""
    words = [sys.executable, "-m", "tests.transfer.fuzz", "--child", target, "--seed", str(seed)]
    words += ["--examples", str(examples)]
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    number, limit = None, 180.0
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        out, errors = process.stdout, process.stderr
        assert out is not None
        assert errors is not None
        said: list[str] = []
        threads = [
            threading.Thread(target=lambda: [*map(told.put, out), told.put("")]),
            threading.Thread(target=lambda: said.extend(errors)),
        ]
        for thread in threads:
            thread.start()
        while True:
            try:
                line = told.get(timeout=limit)
            except queue.Empty:
                _fault(target, number, tally, f"has not ended within {limit:g} s")
                process.kill()
                break
            if not line:
                process.wait()
                why = f"ended the process with {process.returncode}: {''.join(said)[-1500:]}"
                _fault(target, number, tally, why)
                break
            facts = json.loads(line)
            if "done" in facts:
                break
            if "ready" in facts:
                tally.base = max(tally.base, facts["ready"])
            elif "input" in facts:
                number, limit = facts["input"], 3 * allowed()
            else:
                limit = 180.0
                tally.inputs += 1
                tally.taken += facts["taken"]
                tally.seconds = max(tally.seconds, facts["seconds"])
                tally.used = max(tally.used, facts["used"])
                tally.peak = max(tally.peak, facts["peak"])
                if facts["fault"]:
                    _fault(target, number, tally, facts["fault"])
                if facts["used"] > SECONDS or facts["seconds"] > allowed():
                    took = f"{facts['seconds']:.1f} s, {facts['used']:.1f} s of a processor"
                    _fault(target, number, tally, f"took {took}")
                most = MEMORY if target == "databases" else MEMORY - tally.base
                if facts["peak"] > most:
                    _fault(target, number, tally, f"took {facts['peak'] >> 20} MiB")
        for thread in threads:
            thread.join()


def _fault(target: str, number: int | None, tally: Tally, why: str) -> None:
    tally.faults += 1
    again = f"python -m tests.transfer.fuzz --input {target} {number}"
    print(f"FAILED: {target}, input {number}: {why.strip()}\n  again: {again}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--input", nargs=2, metavar=("TARGET", "NUMBER"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.seed, given.examples)
        return 0
    if given.input:
        target, number = given.input
        with TemporaryDirectory() as place:
            samples = Samples.made(Path(place), sdks=target == "databases")
            fault, taken = _one(target, samples, Random(int(number)), Path(place))
        print(fault or ("read" if taken else "refused"))
        return int(bool(fault))
    seed = secrets.randbits(31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    tallies = {target: Tally() for target in given.target or TARGETS}
    end, rounds = time.monotonic() + given.minutes * 60, 0
    while not rounds or time.monotonic() < end:
        for target, tally in tallies.items():
            if not rounds or time.monotonic() < end:
                judge(target, seed + rounds, given.examples, tally)
        rounds += 1
    for target, tally in tallies.items():
        print(
            f"{target}: {tally.inputs} inputs, {tally.taken} read, the others refused; at most "
            f"{tally.seconds:.1f} s, {tally.used:.1f} s of a processor and {tally.peak >> 20} MiB above {tally.base >> 20}; "
            f"{tally.faults} faults"
        )
    return int(any(tally.faults for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
