from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.models import KEY, running

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]


def test_a_real_model_with_an_mcp_server_goes_on(tmp_path: Path) -> None:
    env = {**os.environ, "PERDURE_HOME": str(tmp_path), "OPENAI_API_KEY": KEY}
    with running() as server:
        for turn, zone in enumerate(("Asia/Tokyo", "Africa/Cairo"), start=1):
            command = [sys.executable, "-W", "error", str(ROOT / "examples" / "real_model.py")]
            command += ["openai:m", f"time in {zone}", server.openai_url]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            # On a busy machine the import of the SDK blocks the loop for long enough to be told.
            lines = done.stderr.splitlines()
            said = [line for line in lines if "blocked the event loop" not in line]
            assert (done.returncode, said) == (0, [])
            first, *_, last = done.stdout.splitlines()
            assert first == f"[get_current_time {{'timezone': '{zone}'}}]"
            assert f'"timezone":"{zone}"' in done.stdout
            assert last == f"{turn} turns are kept"
        assert server.seen()["broken"] == []
