"""Children that are forked, report through a pipe, and may be killed at any time.

Forking from a process without threads that has everything imported costs milliseconds,
where a new interpreter would cost half a second: that is what makes "at every call" cheap.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

Event = list[Any]
Report = Callable[..., None]
"""Tell the parent something: it counts as said once the call returns."""

_WRITE = os.write  # The real one, also where it is hooked.


class Child:
    """A forked process that runs one function and ends."""

    def __init__(self, program: Callable[[Report], None]) -> None:
        self.events: list[Event] = []
        self._rest = b""
        self._out, into = os.pipe()
        self._ended = False
        self.status = 0
        self.pid = os.fork()
        if not self.pid:
            os.close(self._out)
            _run(program, into)
        os.close(into)

    def wait(self) -> list[Event]:
        """Read until the child has ended, and return all that it said."""
        while self._read(None):
            pass
        self._reap()
        return self.events

    def wait_stopped(self) -> bool:
        """Wait until the child has stopped itself; False if it ended instead."""
        while not self._ended:
            pid, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                while self._read(0):
                    pass
                return True
            if pid:
                self._ended, self.status = True, status
            self._read(0.001)
        while self._read(None):
            pass
        return False

    def listen(self, seconds: float, *, events: int | None = None) -> None:
        """Read for some time, or until the child has said so many things."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if events is not None and len(self.events) >= events:
                return
            if not self._read(left) and self._closed():
                return

    def listen_on(self) -> bool:
        """Read what there is by now; False once the child has said its last."""
        self._read(0.001)
        return not self._closed()

    def stop(self) -> bool:
        """Stop the child now; False if it has ended."""
        while not self._ended:
            os.kill(self.pid, signal.SIGSTOP)
            pid, status = os.waitpid(self.pid, os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return True
            self._ended, self.status = True, status
        return False

    def ends_before(self, word: str) -> bool:
        """Read until the child has ended, or has said this; say whether it has ended."""
        while not self._closed() and all(event[0] != word for event in self.events):
            self._read(None)
        return self._closed()

    def go_on(self) -> None:
        """Let a stopped child continue; one that has ended stays as it is."""
        if not self._ended:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> list[Event]:
        """Kill the child now, and return all that it had said."""
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL and not by itself."""
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    def _closed(self) -> bool:
        return self._out < 0

    def _read(self, timeout: float | None) -> bool:
        """Read what there is; False at the timeout or the end."""
        if self._closed() or not select.select([self._out], [], [], timeout)[0]:
            return False
        data = os.read(self._out, 1 << 16)
        if not data:
            os.close(self._out)
            self._out = -1
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.events += [json.loads(line) for line in lines]
        return True

    def _reap(self) -> None:
        if not self._ended:
            _, self.status = os.waitpid(self.pid, 0)
            self._ended = True


def _run(program: Callable[[Report], None], into: int) -> None:
    """Be the child. Never returns."""

    def report(*event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        while line:
            line = line[_WRITE(into, line) :]

    code = 1
    try:
        program(report)
        code = 0
    except BaseException:
        report("problem", traceback.format_exc())
    finally:
        os._exit(code)
