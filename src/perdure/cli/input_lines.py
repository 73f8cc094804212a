"""Lines of standard input, for a command that must be able to end while it waits for one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from math import inf

import anyio
import anyio.from_thread
import anyio.lowlevel
from anyio.lowlevel import EventLoopToken

CHUNK = 4096


class InputLines:
    """Standard input, line by line; from the event loop that made it."""

    def __init__(self) -> None:
        self._send, self._lines = anyio.create_memory_object_stream[str](inf)
        token = anyio.lowlevel.current_token()
        threading.Thread(target=self._read, args=(token,), daemon=True).start()

    async def next(self) -> str | None:
        """Return the next line, without its end; None when there is none any more."""
        try:
            return await self._lines.receive()
        except anyio.EndOfStream:
            return None

    def close(self) -> None:
        """Wait for no more lines."""
        self._lines.close()
        self._send.close()

    def _read(self, token: EventLoopToken) -> None:
        descriptor, partial = sys.stdin.fileno(), b""
        # The loop, or the reader, may be gone by the time that a line comes.
        with contextlib.suppress(RuntimeError, anyio.BrokenResourceError, OSError):
            while data := os.read(descriptor, CHUNK):
                *lines, partial = (partial + data).split(b"\n")
                for line in lines:
                    self._pass_on(line, token)
            if partial:
                self._pass_on(partial, token)
            anyio.from_thread.run_sync(self._send.close, token=token)

    def _pass_on(self, line: bytes, token: EventLoopToken) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        anyio.from_thread.run_sync(self._send.send_nowait, text, token=token)
