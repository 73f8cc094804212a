"""The site of the documents: `python -m tests.site` builds site/, and fails on any warning.

The pages of the repository are laid out below build/pages/ as they lie here, with the examples,
so that a link between them needs no second form. Public names resolve when they are used, which a
reader of the source cannot see: each `::: module` is given the names of its `__all__`.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.source_tree import ROOT

PARTS = ("docs", "examples", "LICENSE", *(page.name for page in ROOT.glob("*.md")))
UNSEEN = shutil.ignore_patterns("__pycache__", ".*")


def lay_out(pages: Path) -> None:
    """Copy what the site is made of."""
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, pages / part, ignore=UNSEEN)
        else:
            shutil.copyfile(source, pages / part)
    for page in (pages / "docs" / "api").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"^::: (\S+)$", with_members, text, flags=re.MULTILINE)
        page.write_text(text, encoding="utf-8")


def with_members(line: re.Match[str]) -> str:
    names = importlib.import_module(line[1]).__all__
    listed = "".join(f"        - {name}\n" for name in names if not name.startswith("_"))
    return f"{line[0]}\n    options:\n      members:\n{listed}"


def build() -> int:
    """Build site/, and return the status of the build."""
    lay_out(ROOT / "build" / "pages")
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(build())
