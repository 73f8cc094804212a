"""The shipped conformance suite on the S3 store, a prefix for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.stores.s3 import S3Store
from perdure.testing.conformance import StoreConformance
from tests.servers.s3 import shared, store_on


@pytest.mark.deep
class TestS3Store(StoreConformance):
    """Stores of one test share a prefix of this process's server."""

    on_trio = "never"
    clock_step = 4.0

    def make_store(self, place: Path, owner: str) -> S3Store:
        return store_on(shared(), place, owner=owner)
