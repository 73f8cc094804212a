"""The bucket of docs/own-backend.md makes a store: the suite says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.own_bucket import table_store
from perdure.errors import StoreUnavailableError
from perdure.stores import ObjectStore
from perdure.testing.conformance import StoreConformance

ROOT = Path(__file__).parents[2]


@pytest.mark.deep
@pytest.mark.parametrize("anyio_backend", ["trio"])
class TestTableStore(StoreConformance):
    """All of the suite; on asyncio the store around a bucket is with the buckets of S3."""

    def make_store(self, place: Path, owner: str) -> ObjectStore:
        return table_store(place / "kept" / "objects.db", owner)


def lines(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines() if line.strip()]


def test_the_steps_of_the_page_are_the_whole_bucket() -> None:
    page = (ROOT / "docs" / "own-backend.md").read_text(encoding="utf-8")
    steps = re.findall(r"<!-- given: table_bucket -->\n```python\n(.*?)```", page, re.DOTALL)
    example = (ROOT / "examples" / "own_bucket.py").read_text(encoding="utf-8")
    bucket = example[example.index("TABLE = ") : example.index("async def main")]
    assert lines("".join(steps)) == lines(bucket)


@pytest.mark.parametrize(("name", "most"), [("own_backend", 400), ("own_bucket", 150)])
def test_a_backend_of_ones_own_stays_short(name: str, most: int) -> None:
    example = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert len(example.splitlines()) <= most


def test_it_keeps_a_greeting(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "examples/own_bucket.py", str(tmp_path / "x.db")]
    for count in (1, 2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout == f"{count} messages in {tmp_path / 'x.db'}\n", done.stderr


async def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"no database at all, but quite long enough to be one")
    with pytest.raises(StoreUnavailableError, match="x.db"):
        await table_store(tmp_path / "x.db").open()
