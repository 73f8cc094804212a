"""A reader passes on what a backend offers besides the port, but nothing that writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import SessionKey
from perdure.store import SupportsBeginAppend, capability
from perdure.stores.delegate import DelegatingStore, ReadOnlyStore
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore


class Directory(MemoryStore):
    """A backend with a directory of its own."""

    async def rebuild_directory(self) -> int:
        return 0


def test_a_reader_offers_no_write_of_the_inner_store(tmp_path: Path) -> None:
    assert hasattr(DelegatingStore(Directory()), "rebuild_directory")
    assert not hasattr(ReadOnlyStore(Directory()), "rebuild_directory")


def test_no_wrapper_lets_an_append_pass_by_itself(tmp_path: Path) -> None:
    inner = FileStore(tmp_path)
    assert capability(inner, SupportsBeginAppend) is inner
    assert capability(DelegatingStore(inner), SupportsBeginAppend) is None
    assert capability(ReadOnlyStore(inner), SupportsBeginAppend) is None


@pytest.mark.anyio
async def test_a_reader_offers_the_folder_of_a_session(tmp_path: Path) -> None:
    key, inner = SessionKey("ada"), FileStore(tmp_path)
    assert ReadOnlyStore(inner).folder_of(key) == inner.folder_of(key)
