"""Blobs as files: verified, shared, and swept in two steps with time between them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from perdure._lib.files import Folder
from perdure.errors import CorruptRecordError, NotStorableError
from perdure.store import BlobSweep
from perdure.stores.file import documents
from tests.stores.file.kit import contents

DATA = b"a large tool result"
NAME = hashlib.sha256(DATA).hexdigest()
DAY = 86400.0


async def test_a_blob_lies_readable_on_its_shelf(store, root: Path) -> None:
    await store.put_blobs("", {NAME: DATA})
    await store.put_blobs("T", {NAME: DATA})
    assert contents(root) == {
        f"blobs/{NAME[:2]}/{NAME}": DATA,
        f"tenants/=54/blobs/{NAME[:2]}/{NAME}": DATA,
    }


async def test_a_wrong_name_is_refused_and_nothing_written(store, root: Path) -> None:
    for name in ("0" * 64, "../../x", "", NAME.upper()):
        with pytest.raises(NotStorableError):
            await store.put_blobs("", {name: DATA})
    assert contents(root) == {}
    for name in ("../../owners/one.json", "", "."):
        assert await store.get_blob("", name) is None


async def test_a_damaged_blob_is_told_and_mended_by_putting_it_again(store, root: Path) -> None:
    await store.put_blobs("", {NAME: DATA})
    (root / "blobs" / NAME[:2] / NAME).write_bytes(b"damaged")
    with pytest.raises(CorruptRecordError, match="put the right bytes again"):
        await store.get_blob("", NAME)
    await store.put_blobs("", {NAME: DATA})
    assert await store.get_blob("", NAME) == DATA


def sweep(store, now: float, *reachable: str) -> BlobSweep:
    return documents.sweep(store._root, "", reachable, DAY, now)


async def test_a_blob_that_was_put_in_the_millisecond_of_the_sweep_was_not_put_again(
    store,
) -> None:
    documents.put(store._root, "", {NAME: DATA}, 0.0)
    documents.put(store._root, "", {NAME: DATA}, 1_000_000.0004)  # sets its age
    assert documents.sweep(store._root, "", (), 0, 1_000_000.0006) == BlobSweep(quarantined=1)
    assert documents.sweep(store._root, "", (), 0, 1_000_001.0) == BlobSweep(0, 1, len(DATA))


async def test_a_blob_has_two_grace_periods(store) -> None:
    now = 1_000_000.0
    documents.put(store._root, "", {NAME: DATA}, now)
    documents.put(store._root, "", {NAME: DATA}, now)  # sets its age
    assert sweep(store, now + DAY - 1) == BlobSweep()
    assert sweep(store, now + DAY) == BlobSweep(quarantined=1)
    assert await store.get_blob("", NAME) == DATA
    assert sweep(store, now + 2 * DAY - 1) == BlobSweep()
    assert sweep(store, now + 2 * DAY) == BlobSweep(removed=1, bytes=len(DATA))
    assert await store.get_blob("", NAME) is None


async def test_a_put_beside_the_sweep_wins(store) -> None:
    now = 1_000_000.0
    for _ in range(2):
        documents.put(store._root, "", {NAME: DATA}, now)
    assert sweep(store, now + DAY).quarantined == 1
    documents.put(store._root, "", {NAME: DATA}, now + DAY + 5)
    assert sweep(store, now + 2 * DAY) == BlobSweep()
    assert await store.get_blob("", NAME) == DATA


async def test_a_put_between_looking_and_moving_is_noticed_later(store, root: Path) -> None:
    now = 1_000_000.0
    for _ in range(2):
        documents.put(store._root, "", {NAME: DATA}, now)
    sweep(store, now + DAY)
    (moved,) = (root / "blobs/quarantine").rglob(NAME)
    os.utime(moved, (now + DAY + 1, now + DAY + 1))  # renewed as it was moved
    assert sweep(store, now + 3 * DAY) == BlobSweep(quarantined=1)
    assert await store.get_blob("", NAME) == DATA


async def test_litter_of_killed_writers_goes_with_its_age(store, root: Path) -> None:
    await store.put_blobs("", {NAME: DATA})
    litter = root / "blobs" / NAME[:2] / ".abc.tmp"
    litter.write_bytes(b"half")
    (root / "blobs" / NAME[:2] / "note.txt").write_bytes(b"not ours")
    await store.sweep("", {NAME}, 3600)
    assert litter.exists()
    await store.sweep("", {NAME}, 0)
    assert not litter.exists()
    assert (root / "blobs" / NAME[:2] / "note.txt").exists()


async def test_a_damaged_copy_in_quarantine_does_not_come_back(store, root: Path) -> None:
    now = 1_000_000.0
    for _ in range(2):
        documents.put(store._root, "", {NAME: DATA}, now)
    sweep(store, now + DAY)
    (moved,) = (root / "blobs/quarantine").rglob(NAME)
    moved.write_bytes(b"damaged")
    documents.put(store._root, "", {NAME: DATA}, now + DAY)
    assert await store.get_blob("", NAME) == DATA
    assert not moved.exists()


async def test_two_who_sweep_at_once_do_not_hinder_each_other(
    store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    again = b"reached again"
    name = hashlib.sha256(again).hexdigest()
    for _ in range(2):
        documents.put(store._root, "", {NAME: DATA, name: again}, now)
    sweep(store, now + DAY)
    look = documents._stamps

    def overtaken(folder):
        stamps = look(folder)
        monkeypatch.setattr(documents, "_stamps", look)
        sweep(store, now + 2 * DAY, name)  # another process, from its beginning to its end
        return stamps

    monkeypatch.setattr(documents, "_stamps", overtaken)
    assert sweep(store, now + 2 * DAY, name) == BlobSweep()
    assert await store.get_blob("", NAME) is None
    assert await store.get_blob("", name) == again


async def test_a_blob_that_is_moved_away_while_it_is_put_is_there_again(
    store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    for _ in range(2):
        documents.put(store._root, "", {NAME: DATA}, now)
    touch = Folder.touch

    def late(self, name, modified):
        monkeypatch.setattr(Folder, "touch", touch)
        sweep(store, now + DAY)
        touch(self, name, modified)

    monkeypatch.setattr(Folder, "touch", late)
    documents.put(store._root, "", {NAME: DATA}, now + DAY)
    assert sweep(store, now + 2 * DAY - 1) == BlobSweep(removed=0)
    assert await store.get_blob("", NAME) == DATA
