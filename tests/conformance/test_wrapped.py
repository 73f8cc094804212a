"""The shipped conformance suite on stores around stores: the parts that they encode.

Calls that carry no content are inherited: `tests/stores/wrapped/test_coded.py` says which. The codecs
by themselves are in `tests/stores/wrapped/test_codec.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.errors import NotStorableError
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from perdure.stores.wrapped.keys import GROWTH
from perdure.testing.conformance import (
    BlobConformance,
    DirectoryConformance,
    DocumentConformance,
    LogConformance,
    ReaderConformance,
    TrimConformance,
)

KEY = "ab" * 32


class EncryptedMemory:
    """Encrypted, in memory."""

    on_trio = "never"

    def make_store(self, place: Path, owner: str) -> Store:
        self.backings: dict[Path, MemoryBacking] = getattr(self, "backings", {})
        backing = self.backings.setdefault(place, MemoryBacking())
        return EncryptedStore(MemoryStore(owner=owner, backing=backing), KEY)


class CompressedMemory:
    """Packed, in memory."""

    on_trio = "never"

    def make_store(self, place: Path, owner: str) -> Store:
        self.backings: dict[Path, MemoryBacking] = getattr(self, "backings", {})
        backing = self.backings.setdefault(place, MemoryBacking())
        return CompressedStore(MemoryStore(owner=owner, backing=backing))


class WrappedBlobs(BlobConformance):
    """Names of a wrapper's own are between it and the inner store."""

    async def test_names_of_a_wrapper_s_own_are_kept(self, store: Store) -> None:
        with pytest.raises(NotStorableError):
            await store.put_blobs("", {"x" + "0" * 64: b"sealed"})


class TestEncryptedMemoryStore(
    EncryptedMemory,
    LogConformance,
    ReaderConformance,
    TrimConformance,
    DocumentConformance,
    DirectoryConformance,
    WrappedBlobs,
):
    """What it seals: records in their order, documents, blobs and labels."""

    added_bytes = GROWTH


class TestCompressedMemoryStore(
    CompressedMemory, ReaderConformance, DocumentConformance, WrappedBlobs
):
    """What it packs."""

    added_bytes = 1
