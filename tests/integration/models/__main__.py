"""Kill an agent amid a tool call, on both loops, with each API: `python -m tests.integration.models`."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from tests.integration.models.test_lives import killed_amid_a_tool_call
from tests.servers.models import running

if __name__ == "__main__":
    kinds = ("chat", "responses", "anthropic")
    with running() as server:
        for backend, kind, resumed in itertools.product(("asyncio", "trio"), kinds, (True, False)):
            with tempfile.TemporaryDirectory() as folder:
                killed_amid_a_tool_call(backend, kind, server, Path(folder), resumed=resumed)
            how = "its turn resumed" if resumed else "another message answered"
            print(f"{backend}, {kind}: killed amid a tool call, restored, {how}", flush=True)
