"""The shipped conformance suite on stores around stores."""

from __future__ import annotations

from pathlib import Path

from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from perdure.testing.conformance import StoreConformance

KEY = "ab" * 32


class TestEncryptedMemoryStore(StoreConformance):
    """Encrypted, in memory."""

    def make_store(self, place: Path, owner: str) -> Store:
        self.backings: dict[Path, MemoryBacking] = getattr(self, "backings", {})
        backing = self.backings.setdefault(place, MemoryBacking())
        return EncryptedStore(MemoryStore(owner=owner, backing=backing), KEY)


class TestEncryptedFileStore(StoreConformance):
    """Encrypted, in files."""

    def make_store(self, place: Path, owner: str) -> Store:
        return EncryptedStore(FileStore(place / "root", owner=owner), KEY)


class TestEncryptedSqliteStore(StoreConformance):
    """Packed and encrypted, in a database."""

    def make_store(self, place: Path, owner: str) -> Store:
        inner = SqliteStore(place / "kept" / "sessions.db", owner=owner)
        return EncryptedStore(inner, KEY, compression="zstd")


class TestCompressedMemoryStore(StoreConformance):
    """Packed, in memory."""

    def make_store(self, place: Path, owner: str) -> Store:
        self.backings: dict[Path, MemoryBacking] = getattr(self, "backings", {})
        backing = self.backings.setdefault(place, MemoryBacking())
        return CompressedStore(MemoryStore(owner=owner, backing=backing))
