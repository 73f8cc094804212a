"""Whatever the order of requests, who dies and which answer is lost: what was reported durable
is in the log, once, and nobody who comes late gets in.
"""

from __future__ import annotations

import pytest

from perdure.stores.objects import log
from tests.stores.s3.schedules import play

pytestmark = pytest.mark.deep

SEEDS = 60


@pytest.fixture(autouse=True)
def merged_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fold merges what it can, so that places are freed all the time."""
    monkeypatch.setattr(log, "MIN_COMMITS", 1)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("faults", [0.0, 0.08])
@pytest.mark.parametrize("deletes", [False, True])
def test_no_order_of_requests_loses_or_doubles_a_record(
    part: int, faults: float, deletes: bool
) -> None:
    seeds = range(part * SEEDS, (part + 1) * SEEDS)
    acknowledged = [play(seed, faults=faults, deletes=deletes) for seed in seeds]
    assert sum(acknowledged) > SEEDS, "hardly anything was put to the test"
