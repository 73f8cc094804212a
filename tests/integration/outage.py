"""``python -m tests.integration.outage FOLDER KIND BACKEND``: a store's place is taken away under load.

``full`` is a small disk that is filled to its last page; run it in a mount namespace of its own
(``unshare -rm``). ``limited`` is a limit of the kernel's on the size of files, which needs no
rights. ``full-spill`` does not give the disk back before the shutdown. Prints what was seen.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Autosave, Message, Shutdown, StoreUnavailableError
from perdure.autosave.options import EngineOptions
from perdure.session.manager import SessionManager
from perdure.session.session import Session

SESSIONS = 6
TEXT = "x" * 1000
SOFT, HARD = 40_000, 120_000
ENGINE = EngineOptions(
    dirty_soft=SOFT,
    dirty_hard=HARD,
    backoff_base=0.05,
    backoff_cap=0.2,
    breaker_reset=0.2,
    backpressure_timeout=0.3,
    jitter=0,
)


class FullDisk:
    """A disk of 2 MB, filled to its last page."""

    def __init__(self, folder: Path) -> None:
        command = ("mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(folder))
        subprocess.run(command, check=True, capture_output=True)
        self.ballast = folder / "ballast"

    def take(self) -> None:
        with self.ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def give_back(self) -> None:
        self.ballast.unlink()


class LimitedFiles:
    """A process whose files may not grow beyond 4 KB."""

    def __init__(self, folder: Path) -> None:
        self.soft, self.hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def take(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.hard))

    def give_back(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.soft, self.hard))


KINDS = {"full": FullDisk, "limited": LimitedFiles}


def connected(folder: Path, *, spill: bool) -> SessionManager:
    shutdown = Shutdown(
        deadline=1.0 if spill else 20.0,
        turn_grace=0,
        hard_grace=1.0,
        signals=False,
        spill=str(folder.parent / "spill"),
    )
    autosave = Autosave(debounce=0.05, max_delay=0.2)
    return perdure.connect(folder / "store", autosave=autosave, shutdown=shutdown, engine=ENGINE)


async def live(folder: Path, disk: Any, *, until_shutdown: bool) -> dict[str, Any]:
    """Take the disk away under load, give it back, and compare."""
    accepted: dict[str, list[str]] = {}
    seen: dict[str, Any] = {}
    sessions = await connected(folder, spill=until_shutdown)
    failed, recovered = anyio.Event(), anyio.Event()
    sessions.on("save_failed", lambda _: failed.set())
    opened = [await sessions.open(f"s{number}") for number in range(SESSIONS)]
    await _say(opened, accepted, 10)
    await sessions.flush()
    disk.take()
    seen["before"] = sessions.health().status
    await _load(sessions, opened, accepted, failed, seen)
    if until_shutdown:
        report = await sessions.aclose()
        seen["spilled"] = sorted(one.key.agent for one in report.spilled)
        seen["clean"] = report.clean
        disk.give_back()
    else:
        sessions.on("recovered", lambda _: recovered.set())
        disk.give_back()
        with anyio.fail_after(60):
            await recovered.wait()
            await sessions.flush()
            async with opened[0].turn():
                _append(opened[0], accepted)
        seen["after"] = sessions.health().status
        report = await sessions.aclose()
        seen["clean"] = report.clean
    seen["kept"] = await _compare(folder, accepted)
    seen["spill_left"] = [path.name for path in (folder.parent / "spill").glob("*")]
    return seen


async def _load(
    sessions: SessionManager,
    opened: list[Session],
    accepted: dict[str, list[str]],
    failed: anyio.Event,
    seen: dict[str, Any],
) -> None:
    """Append while the disk is gone: to the soft limit, beyond it, up to the hard one."""
    with anyio.fail_after(60):
        while not failed.is_set():
            await _say(opened, accepted, 1)
            with anyio.move_on_after(0.01):
                await failed.wait()
    seen["failing"] = sessions.health().status
    try:
        while True:
            await _say(opened, accepted, 1)
            await anyio.sleep(0)
    except StoreUnavailableError as error:
        seen["refused"] = str(error)
    health = sessions.health()
    seen["at_hard"] = health.status
    seen["unsaved_bytes"] = health.unsaved_bytes
    seen["oldest"] = health.oldest_unsaved_age > 0
    try:
        async with opened[0].turn():
            seen["turn"] = "began"
    except StoreUnavailableError:
        seen["turn"] = "waited, and was refused"


def _append(session: Session, accepted: dict[str, list[str]]) -> None:
    said = accepted.setdefault(session.id, [])
    text = f"{session.id} says {len(said)} {TEXT}"
    session.append(Message.user(text))
    said.append(text)


async def _say(opened: list[Session], accepted: dict[str, list[str]], times: int) -> None:
    for _ in range(times):
        for session in opened:
            _append(session, accepted)


async def _compare(folder: Path, accepted: dict[str, list[str]]) -> dict[str, Any]:
    """Open every session anew, and see whether it holds what was accepted."""
    same, steps = 0, []
    async with connected(folder, spill=False) as sessions:
        for id, texts in accepted.items():
            async with sessions.open(id) as session:
                held = [item.value.text for item in await session.history(limit=10**6)]
                same += held == texts
                steps += [step.what for step in session.restore_report.steps]
    return {"same": same, "replayed": steps.count("spill replayed")}


def main() -> int:
    folder, kind, backend = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    logging.getLogger("perdure").setLevel(logging.CRITICAL)
    name, _, end = kind.partition("-")
    disk = KINDS[name](folder)
    seen = anyio.run(lambda: live(folder, disk, until_shutdown=end == "spill"), backend=backend)
    print(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
