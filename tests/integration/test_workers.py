"""Four workers on one store: sessions move between them, and each request counts once.

The full measure is a command of its own: ``python -m tests.integration.workers --requests 5000``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.workers import run

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform == "win32", reason="uvicorn's workers are ended by signals"),
]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # of the clients; the workers are uvicorn's
async def test_requests_spread_over_four_workers_are_neither_lost_nor_doubled(
    tmp_path: Path, anyio_backend: str
) -> None:
    seen = await run(tmp_path / "store", requests=600, sessions=60, workers=4, clients=12)
    assert seen["ok"], seen
    assert seen["workers_seen"] == 4
    assert seen["hops"] > 200  # or it would prove nothing


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_that_is_killed_takes_no_answered_request_with_it(
    tmp_path: Path, anyio_backend: str
) -> None:
    seen = await run(
        tmp_path / "store", requests=240, sessions=24, workers=3, clients=8, kills=2, seed=1
    )
    assert seen["ok"], seen
    assert seen["killed"] == 2
