"""A worker that hangs while it holds sessions, and wakes up when another one has them."""

from __future__ import annotations

import pytest

from tests.workers.owner import measured, url_of


@pytest.mark.deep
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_nothing_is_lost_or_doubled_when_a_stopped_worker_wakes_up(store: str) -> None:
    with url_of(store) as url:
        assert measured(url, 5, stop=True, quiet=0.0)["problems"] == []


@pytest.mark.deep
def test_nothing_is_lost_when_a_worker_is_killed() -> None:
    with url_of("file") as url:
        assert measured(url, 5, stop=False, quiet=0.0)["problems"] == []
