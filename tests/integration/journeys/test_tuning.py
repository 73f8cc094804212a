"""Each backend is measured where it is, and left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.store import SessionQuery
from perdure.tuning import measure
from perdure.tuning.measure import TENANT
from tests.integration.journeys.backends import ALL, store_of

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("kind", ALL)
async def test_a_store_is_measured_and_left_as_it_was(kind: str, tmp_path: Path) -> None:
    store = store_of(kind, tmp_path)
    await store.open()
    try:
        found = await measure(store, size=500, seconds=0.0, levels=(1, 5))
        assert [level.sessions for level in found.levels] == [1, 5]
        assert all(level.seconds > 0 and level.rounds == 3 for level in found.levels)
        assert found.rate == max(level.sessions / level.seconds for level in found.levels)
        assert found.save_time == found.levels[0].seconds
        assert await store.sessions(SessionQuery(tenant=TENANT)) == []
    finally:
        await store.aclose()
