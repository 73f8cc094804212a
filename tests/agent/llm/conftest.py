"""A server of models for all tests of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.models import Server, running


@pytest.fixture(scope="session")
def models() -> Iterator[Server]:
    with running() as server:
        yield server
