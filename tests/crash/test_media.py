"""An agent that looks at images, killed and restored (``python -m tests.crash media``)."""

from __future__ import annotations

import sys

import pytest

from tests.crash.test_crash import crash

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on Linux alone: forks")


def test_a_killed_agent_is_shown_its_images_again() -> None:
    """A small version, of which some images do not fit into the budget."""
    summary = crash(
        *("media", "--screenshots", "6", "--photos", "2", "--least", "70000", "--most", "90000"),
        *("--tokens", "9000", "--cycles", "3"),
    )
    assert summary["problems"] == []
    assert summary["acknowledged"] == summary["images"] == 8
    assert summary["kills"] >= 2


@pytest.mark.deep
def test_a_killed_agent_is_shown_twenty_screenshots_and_three_photos_again() -> None:
    summary = crash("media", "--cycles", "8")
    assert summary["problems"] == []
    assert summary["acknowledged"] == summary["images"] == 23
    assert summary["kills"] >= 4
