"""A store is lost under load, and its backup has all that was durable when it began."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.integration.journeys.loss import KINDS, loss

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_durable_when_the_last_backup_began_comes_back(kind: str, tmp_path: Path) -> None:
    told = anyio.run(lambda: loss(kind, tmp_path, runs=2))
    assert told["problems"] == []
    assert told["turns durable when the last backup began"] > 200
