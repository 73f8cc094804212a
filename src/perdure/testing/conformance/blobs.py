"""Blobs: bytes under the name of their content, and the sweep of what nobody reaches."""
# ruff: noqa: D102

from __future__ import annotations

import pytest

from perdure.errors import CorruptRecordError, PerdureError
from perdure.store import BlobSweep, Store
from perdure.testing.conformance._kit import OpenStore, Suite, name_of

_DATA = b"a large tool result"
_NAME = name_of(_DATA)


class BlobConformance(Suite):
    """A blob is returned verified, and goes only when nobody has reached it for two sweeps."""

    async def test_an_unknown_blob_is_none(self, store: Store) -> None:
        assert await store.get_blob("", _NAME) is None

    async def test_blobs_come_back(self, open_store: OpenStore) -> None:
        store = await open_store("one")
        blobs = {name_of(data): data for data in (_DATA, b"", bytes(range(256)) * 999)}
        await store.put_blobs("", blobs)
        await store.put_blobs("", {_NAME: _DATA})
        await store.put_blobs("", {})
        other = await open_store("other")
        for name, data in blobs.items():
            assert await other.get_blob("", name) == data

    async def test_tenants_do_not_share_blobs(self, store: Store) -> None:
        await store.put_blobs("a", {_NAME: _DATA})
        assert await store.get_blob("b", _NAME) is None
        assert await store.get_blob("", _NAME) is None
        await store.put_blobs("b", {_NAME: _DATA})
        for _ in range(2):
            await store.sweep("a", (), 0)
        assert await store.get_blob("a", _NAME) is None
        assert await store.get_blob("b", _NAME) == _DATA

    async def test_bytes_that_do_not_match_their_name_are_not_returned(self, store: Store) -> None:
        try:
            await store.put_blobs("", {_NAME: b"other bytes"})
        except PerdureError:
            assert await store.get_blob("", _NAME) is None
        else:
            with pytest.raises(CorruptRecordError):
                await store.get_blob("", _NAME)

    async def test_names_of_a_wrapper_s_own_are_kept(self, store: Store) -> None:
        """What is sealed or packed has a name that begins with x, and proves nothing here."""
        data, names = b"sealed", ("x" + _NAME, "x" + "0" * 96)
        await store.put_blobs("", dict.fromkeys(names, data))
        assert [await store.get_blob("", name) for name in names] == [data, data]
        assert sorted(await store.blob_names("")) == sorted(names)
        assert await store.sweep("", {names[0]}, 0) == BlobSweep(quarantined=1)
        assert await store.sweep("", {names[0]}, 0) == BlobSweep(removed=1, bytes=len(data))
        assert await store.remove_blobs("", names) == len(data)
        assert await store.blob_names("") == []

    async def test_names_are_those_of_what_can_be_read(self, store: Store) -> None:
        assert await store.blob_names("") == []
        blobs = {name_of(data): data for data in (_DATA, b"", b"another")}
        await store.put_blobs("", blobs)
        await store.put_blobs("tenant", {_NAME: _DATA})
        await store.sweep("", {name_of(b"another")}, 0)
        assert sorted(await store.blob_names("")) == sorted(blobs)
        assert await store.blob_names("tenant") == [_NAME]
        assert await store.blob_names("nobody's") == []

    async def test_what_is_removed_is_gone_at_once(self, store: Store) -> None:
        kept_names, moved = b"kept", b"moved away"
        blobs = {name_of(data): data for data in (_DATA, kept_names, moved)}
        await store.put_blobs("", blobs)
        await store.put_blobs("tenant", {_NAME: _DATA})
        await store.sweep("", {_NAME, name_of(kept_names)}, 0)
        names = [_NAME, name_of(moved), name_of(b"never was"), "../owners"]
        assert await store.remove_blobs("", names) == len(_DATA) + len(moved)
        assert await store.blob_names("") == [name_of(kept_names)]
        assert await store.get_blob("", _NAME) is None
        assert await store.get_blob("", name_of(moved)) is None
        assert await store.get_blob("", name_of(kept_names)) == kept_names
        assert await store.get_blob("tenant", _NAME) == _DATA
        assert await store.remove_blobs("", names) == 0
        await store.put_blobs("", {_NAME: _DATA})
        assert await store.get_blob("", _NAME) == _DATA

    async def test_a_sweep_moves_away_before_it_removes(self, store: Store) -> None:
        await store.put_blobs("", {_NAME: _DATA})
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=1)
        assert await store.get_blob("", _NAME) == _DATA
        assert await store.sweep("", (), 0) == BlobSweep(removed=1, bytes=len(_DATA))
        assert await store.get_blob("", _NAME) is None
        assert await store.sweep("", (), 0) == BlobSweep()

    async def test_a_sweep_leaves_what_is_reachable_or_young(self, store: Store) -> None:
        young = b"young"
        await store.put_blobs("", {_NAME: _DATA, name_of(young): young})
        for _ in range(3):
            assert await store.sweep("", (), 3600) == BlobSweep()
            assert await store.sweep("", {_NAME, name_of(young)}, 0) == BlobSweep()
        assert await store.get_blob("", _NAME) == _DATA

    async def test_what_is_reached_again_comes_back(self, store: Store) -> None:
        await store.put_blobs("", {_NAME: _DATA})
        await store.sweep("", (), 0)
        assert (await store.sweep("", {_NAME}, 0)).removed == 0
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=1)
        assert await store.get_blob("", _NAME) == _DATA

    async def test_what_is_put_again_comes_back(self, store: Store) -> None:
        await store.put_blobs("", {_NAME: _DATA})
        await store.sweep("", (), 0)
        await store.put_blobs("", {_NAME: _DATA})
        assert (await store.sweep("", (), 3600)).removed == 0
        assert await store.sweep("", (), 0) == BlobSweep(quarantined=1)
        assert await store.get_blob("", _NAME) == _DATA
