"""The tests really run on the event loop that they ask for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.source_tree import ROOT


def running() -> str:
    if trio.lowlevel.in_trio_run():
        return "trio"
    asyncio.get_running_loop()
    return "asyncio"


async def test_the_loop_is_the_one_asked_for(anyio_backend_name: str) -> None:
    assert running() == anyio_backend_name


@pytest.mark.parametrize("option", [["-o", "addopts="], ["-p", "pytest_asyncio.plugin"]])
def test_a_run_that_would_put_trio_on_asyncio_is_refused(option: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", *option, "--collect-only", __file__]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "run without pytest-asyncio" in run.stderr


def test_the_home_of_tests_is_a_temporary_folder(untouched_home: Path) -> None:
    assert Path(os.environ["PERDURE_HOME"]) == untouched_home
    assert not untouched_home.is_relative_to(Path("~").expanduser())


def test_short_folders_leave_room_for_a_socket(short_tmp: Path) -> None:
    assert short_tmp.is_dir()
    assert len(str(short_tmp / "a-socket-with-a-long-name.sock")) < 108
