"""The table of docs/architecture.md is the way that the code takes: traced on the file store."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| (append|save|turn|open) \| (.*) \| (.*) ?\|$", re.MULTILINE)


def packages(modules: Iterable[str]) -> set[str]:
    return {module.partition("/")[0] for module in modules} - {"_lib"}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_road_is_as_the_page_shows_it(backend: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "road.py"), backend, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    roads: dict[str, list[str]] = json.loads(done.stdout)

    page = {act: (stations, also) for act, stations, also in ROW.findall(PAGE.read_text())}
    assert page.keys() == roads.keys()
    for act, road in roads.items():
        stations, also = (re.findall(r"`([^`]+)`", column) for column in page[act])
        assert [module for module in road if module in stations] == stations, act
        assert packages(road) == packages(stations) | set(also), act
