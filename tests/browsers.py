"""A real browser for tests, Debian's chromium by Playwright: they are left out without it.

The documentation's pictures go into the folder ``PERDURE_SCREENSHOTS``, else into one that goes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PICTURES = os.environ.get("PERDURE_SCREENSHOTS")  # tests themselves run without such variables
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(PICTURES or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
