"""A large store under the commands: ``ls``, ``check``, and a ``migrate`` that is killed midway.

The store is on files, of chats of about 500 KB each, whose documents take as much again; the
target of the migration is SQLite. Each command is a process of its own. The migration is killed
when the target has half of the bytes, and run again: what the first run had verified is not copied
twice. Peak memory is the process's, as the kernel has it. With the default of 1,000 MB this takes
some minutes, and 5 GB of disk.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.chat import Chat
from benchmarks.figures import Report, Row
from perdure import Shutdown

__all__ = ["Options", "run"]

TURNS = 70
"""Of each session, about 7 KB each."""
SESSION_MB = 0.5
MOST = 100_000
"""Sessions that `ls` is asked for."""


class Options(NamedTuple):
    """How large, and where."""

    megabytes: int = 1000
    """Of messages."""
    folder: Path | None = None


class _Ran(NamedTuple):
    seconds: float
    peak_mb: float
    answer: Any


def run(options: Options) -> Report:
    """Fill a store, then let each command have it."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        source, target = f"{folder}/source", f"{folder}/target.db"
        sessions = max(2, int(options.megabytes / SESSION_MB))
        anyio.run(_fill, source, sessions)
        size = sum(file.stat().st_size for file in Path(source).rglob("*") if file.is_file())
        listed = _perdure("ls", "--limit", str(MOST), "--store", source)
        checked = _perdure("check", "--store", source)
        command = ("migrate", source, f"sqlite:///{target}")
        before = _killed(command, Path(target), size // 2)
        resumed = _perdure(*command)
    copied = resumed.answer["copied"] + resumed.answer["continued"]
    assert len(listed.answer["sessions"]) == sessions
    assert not resumed.answer["failed"]
    megabytes = size / 1e6
    rows = [
        Row("large.ls_s", listed.seconds, f"seconds to list {sessions} sessions"),
        Row("large.ls_peak_mb", listed.peak_mb, "its peak memory"),
        Row("large.check_mb_s", megabytes / checked.seconds, f"of {megabytes:,.0f} MB a second"),
        Row("large.check_peak_mb", checked.peak_mb, "its peak memory"),
        Row("large.migrate_s", before + resumed.seconds, "both runs together"),
        Row("large.migrate_peak_mb", resumed.peak_mb, "peak memory of the second run"),
        Row("large.copied_again", copied / sessions, "sessions that the second run copied, of all"),
    ]
    return Report(rows, {**options._asdict(), "folder": None, "bytes": size, "sessions": sessions})


async def _fill(root: str, sessions: int) -> None:
    shutdown = Shutdown(signals=False)
    chat = Chat(5)
    async with perdure.connect(f"file:{root}", autosave=None, shutdown=shutdown) as manager:
        for number in range(sessions):
            async with manager.open(f"agent-{number:06}") as session:
                for _ in range(TURNS):
                    session.append(*chat.turn().messages)
                await session.aclose()


def _perdure(*arguments: str) -> _Ran:
    """Run a command to its end."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(_command(arguments), stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, arguments
        output.seek(0)
        return _Ran(seconds, usage.ru_maxrss / 1024, json.loads(output.read()))


def _killed(arguments: tuple[str, ...], target: Path, size: int) -> float:
    """Run a command until a file has a size, and kill it; return how long that took."""
    start = time.perf_counter()
    process = subprocess.Popen(_command(arguments), stdout=subprocess.DEVNULL)
    while process.poll() is None and _size(target) < size:
        time.sleep(0.02)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    return time.perf_counter() - start


def _size(target: Path) -> int:
    files = (target, target.with_name(f"{target.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "perdure", *arguments, "--json"]
