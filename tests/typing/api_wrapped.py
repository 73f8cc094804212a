"""The SQLite store and the stores around a store, as users would make and use them."""

from __future__ import annotations

from typing import assert_type

import perdure
from perdure.records.keys import SessionKey
from perdure.store import Store
from perdure.stores import CompressedStore, EncryptedStore, MasterKeys, SqliteStore

database = SqliteStore("agents/agents.db", owner="worker-1", timeout=10.0)
assert_type(database.location, str)
assert_type(database.local_path, str)
keys = MasterKeys(MasterKeys.new(), bytes(32))
assert_type(keys.current, str)
assert_type(MasterKeys.from_environment(), MasterKeys)
encrypted = EncryptedStore(database, keys, compression="zstd")
packed: Store = CompressedStore(database)
sessions: perdure.SessionManager = perdure.connect(encrypted)
perdure.connect(EncryptedStore(packed, "a" * 64))


async def rotate() -> None:
    """Wrap all keys by the newest master key."""
    done = await encrypted.rewrap()
    assert_type(done.done, int)
    assert_type(done.left, tuple[SessionKey, ...])
