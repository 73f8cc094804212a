"""The command that looks for new examples and orders: what it draws, and what it says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import explore

FAILS = """
import random

import trio
from hypothesis import given, strategies as st


@given(st.integers())
def test_drawn(number: int) -> None:
    assert number < 5
"""


@pytest.mark.deep
def test_a_failure_is_told_with_its_seed_and_fails_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the tests' own set-up, and one test that some examples fail."""
    (tmp_path / "tests").mkdir()
    shutil.copy(explore.ROOT / "pyproject.toml", tmp_path)
    conftest = (explore.ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    conftest = conftest.replace("Path(__file__).parents[1]", f"Path({str(explore.ROOT)!r})")
    (tmp_path / "tests" / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "tests" / "test_drawn.py").write_text(FAILS, encoding="utf-8")
    monkeypatch.setattr(explore, "ROOT", tmp_path)
    words = explore.command("tests/test_drawn.py", 11, has_examples=True)
    for _ in range(2):
        done = explore.run(words, 120)
        assert done is not None
        assert done[0] == 1, done[1]
        assert "assert number < 5" in done[1]
    ran: list[list[str]] = []

    def once(words: list[str], seconds: float) -> tuple[int, str] | None:
        ran.append(words)
        return (1, "it has failed") if len(ran) == 1 else None

    monkeypatch.setattr(explore, "run", once)
    monkeypatch.setattr(explore, "drawable", lambda: [("tests/test_drawn.py", True)])
    assert explore.main(["--minutes", "5"]) == 1
    told = capsys.readouterr().out
    assert "run again what has failed" in told
    assert told.count(" ".join(ran[0])) == 2
    monkeypatch.setattr(explore, "run", lambda words, seconds: None)
    assert explore.main(["--minutes", "5", "--seed", "3"]) == 0
    assert "--seed 3" in capsys.readouterr().out


def test_it_draws_what_has_examples_or_an_order() -> None:
    among = dict(explore.drawable())
    assert among["tests/properties/test_autosave.py"]
    assert among["tests/session/test_session.py"] is False
    assert not [name for name in among if "postgres" in name or "crash" in name]


def test_the_time_is_kept() -> None:
    assert explore.run(["python", "-c", "import time; time.sleep(100)"], 0.5) is None
    with pytest.raises(SystemExit):
        explore.main(["--minutes", "0"])
