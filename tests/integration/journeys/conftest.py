"""What journeys share: the keys of encrypted stores and buckets."""

from __future__ import annotations

import pytest

from tests.integration.journeys.backends import ENVIRONMENT


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: journeys are about backends, whose conformance is tested on both."""
    return "asyncio"
