"""The backend of docs/own-backend.md is a store: the suite says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perdure.testing.conformance import (
    DirectoryConformance,
    DocumentConformance,
    LogConformance,
    ReaderConformance,
)
from tests.conformance.parts import all_but

ROOT = Path(__file__).parents[2]

pytest.importorskip("fcntl")

from examples.own_backend import OneFileStore  # noqa: E402


class OneFile:
    """The stores of the example."""

    on_trio = "deep"

    def make_store(self, place: Path, owner: str) -> OneFileStore:
        return OneFileStore(place / "kept" / "everything.json", owner=owner)


KEPT = (LogConformance, ReaderConformance, DocumentConformance, DirectoryConformance)


class TestOneFileStore(OneFile, *KEPT):
    """What it keeps."""


@pytest.mark.deep
class TestRestOfOneFileStore(OneFile, *all_but(*KEPT)):
    """The rest of the suite, whose calls meet the event loop as those above do."""

    on_trio = "never"


def test_it_keeps_a_greeting(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "examples/own_backend.py"]
    bare = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (bare.returncode, bare.stderr) == (1, "usage: python examples/own_backend.py FILE\n")
    for count in (1, 2):
        done = subprocess.run(
            [*command, str(tmp_path / "kept" / "x.json")], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout == f"x.json holds {count} messages now.\n", done.stderr
