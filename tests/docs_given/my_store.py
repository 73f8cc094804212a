"""A conftest.py with a store of the reader's: a small one, on SQLite."""

import sys
from types import ModuleType

import pytest

from perdure.stores import SqliteStore


class MyStore(SqliteStore):
    pass


my_store = ModuleType("my_store")
my_store.MyStore = MyStore
sys.modules["my_store"] = my_store


@pytest.fixture
def anyio_backend():
    return "asyncio"


def pytest_collection_modifyitems(items):
    items[:] = items[::8]  # SQLite passes all of them elsewhere; here it is the page's class
