"""Servers in processes of their own, on the loopback interface."""

from __future__ import annotations

import socket
import subprocess
import time

LONG = 60.0


def free_port() -> int:
    """Return a port that nobody uses; whoever comes first after that has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
