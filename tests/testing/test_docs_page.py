"""The tests on the page about testing are tests, and pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
PLUGINS = {
    "anyio": ("-p", "anyio.pytest_plugin", "-o", "anyio_mode=auto"),
    "asyncio": (
        *("-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto"),
        *("-o", "asyncio_default_fixture_loop_scope=function"),
    ),
}


def block(begin: str) -> str:
    """Return the one block of code on the page that holds this text."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if begin in block]
    return found


@pytest.mark.deep
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_tests_on_the_page_pass(plugin, tmp_path):
    (tmp_path / "conftest.py").write_text(block("pytest_plugins"), encoding="utf-8")
    (tmp_path / "test_page.py").write_text(block("async def test_"), encoding="utf-8")
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", *PLUGINS[plugin]]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_the_page_knows_every_fixture():
    from perdure.testing import plugin

    fixtures = [name for name in plugin.__all__ if name.startswith("perdure_")]
    assert [name for name in fixtures if f"| `{name}` |" not in PAGE] == []


def test_the_page_knows_every_way_to_fail():
    from typing import get_args

    from perdure.testing import How

    for_processes = {"crash", "crash_applied"}
    assert [how for how in set(get_args(How)) - for_processes if f"`{how}`" not in PAGE] == []
