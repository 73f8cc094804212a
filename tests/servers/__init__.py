"""Servers in processes of their own, on the loopback interface."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

LONG = 60.0

_DEATHSIG = 1


def free_port() -> int:
    """Return a port that is this process's as long as it lives, also while nobody listens on it.

    Connections get no such port from the system, and each process of tests gets others.
    """
    for_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(for_connections, 20_000))
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0perdure-tests-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
        else:
            atexit.register(name.close)
            return port


def until_up(port: int, server: subprocess.Popen[str]) -> None:
    """Wait until a server takes connections."""
    end = time.monotonic() + LONG
    while True:
        assert server.poll() is None, server.stderr.read() if server.stderr else "it ended"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < end, "the server did not come up"
            time.sleep(0.02)
        else:
            return


def die_with_parent(how: signal.Signals) -> Callable[[], None]:
    """Return what a child runs before its program, to get a signal when this process ends."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_DEATHSIG, how)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def at_exit_of_this_process(end: Callable[[], object]) -> None:
    """End a server with the process that started it; a forked child has none."""
    mine = os.getpid()
    atexit.register(lambda: end() if os.getpid() == mine else None)


def stop(pid: int) -> None:
    """Stop a process; it stands still when this returns, each of its threads."""
    os.kill(pid, signal.SIGSTOP)
    while not _stands_still(pid):
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    """Say whether each thread of a process is stopped or gone; a signal takes its time to reach them."""
    return all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").glob("*"))


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
