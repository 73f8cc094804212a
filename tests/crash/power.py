"""Cut the power for real: a file system of its own drops at once what was not synced.

The file system is an image on a loop device, made and mounted for each round; an ioctl of ext4 and
XFS stops it without writing anything any more, as a cut of power does. Only for root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.crash.forks import Child, Report
from tests.crash.kill import load
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import run

SYSTEMS = {
    "ext4": ("mkfs.ext4", "-q"),
    "ext4-writeback": ("mkfs.ext4", "-q"),
    "xfs": ("mkfs.xfs", "-q"),
}
_OPTIONS = {"ext4-writeback": "loop,data=writeback"}
_GOING_DOWN = 0x8004587D
_WITHOUT_FLUSH = (2).to_bytes(4, "little")
_BYTES = 320 * 1024 * 1024


def _call(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


@contextlib.contextmanager
def mounted(image: Path, point: Path, system: str) -> Iterator[Path]:
    """Mount an image as long as this lasts; give the folder for a store."""
    point.mkdir(exist_ok=True)
    _call("mount", "-o", _OPTIONS.get(system, "loop"), image, point)
    try:
        yield point / "store"
    finally:
        _call("umount", point)


def cut(folder: Path) -> None:
    """Cut the power of the file system that a folder is on."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _GOING_DOWN, _WITHOUT_FLUSH)
    finally:
        os.close(fd)


def cycle(image: Path, point: Path, system: str, dice: random.Random) -> Ledger:
    """Write to several sessions, cut the power at a random moment, mount again and judge."""
    ledger, seed = Ledger(), dice.randrange(1 << 30)

    def program(report: Report) -> None:
        run(place, lambda store, tell: load(store, tell, sessions=3, seed=seed), report)

    with mounted(image, point, system) as place:
        child = Child(program)
        child.listen(20.0, events=dice.randint(9, 75))
        child.listen(dice.uniform(0, 0.01))
        promised = len(child.events)
        cut(point)
        # Nobody hears anything after a real cut; here the child does, and not all of it is true.
        late = child.kill()[promised:]
        ledger.add(child.events[:promised] + [event for event in late if event[0] == "sent"])
    with mounted(image, point, system) as place:
        verify(place, ledger)
    return ledger


def power(*, cycles: int = 20, system: str = "ext4", seed: int = 0) -> dict[str, object]:
    """Cut the power that many times."""
    dice = random.Random(seed)
    problems: list[str] = []
    acknowledged = 0
    with scratch(on_disk=True) as top:
        for number in range(cycles):
            image = top / "image"
            with image.open("wb") as file:
                file.truncate(_BYTES)
            _call(*SYSTEMS[system], image)
            ledger = cycle(image, top / "mounted", system, dice)
            image.unlink()
            acknowledged += ledger.total
            problems += [f"cycle {number}: {text}" for text in ledger.problems]
    return {
        "system": system,
        "cycles": cycles,
        "acknowledged": acknowledged,
        "lost": sum("lost an acknowledged" in text for text in problems),
        "problems": problems,
        "seed": seed,
    }
