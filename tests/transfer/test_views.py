"""What is kept in a bundle or a backup is read as from a store: any part, and from the end on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.records import GAP, Record
from perdure.store import LogChunk
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance._kit import append_ok, group, take
from perdure.transfer import backup, read_bundle, restore_backup, salvage, write_bundle
from perdure.transfer.backup_view import BackupView
from perdure.transfer.views import PART, BundleFile, BundleView

KEY, OTHER = SessionKey("ada"), SessionKey("eve")
SPANS = [(0, None), (3, None), (0, 9), (4, 7), (6, 6), (11, None), (0, 1)]


async def _filled() -> MemoryStore:
    """A store with a session of three holders: records 1, 6 and 9 are epochs."""
    store = MemoryStore()
    await store.open()
    for number in range(3):
        grant = await take(store, KEY)
        said = [entry for n in range(4 - number) for entry in group(f"{number} {n}")]
        await append_ok(store, grant, grant.head + 1, *said)
        await store.release(KEY, grant.epoch)
    return store


async def _read(store: Any, key: SessionKey, **span: Any) -> list[Record]:
    return [record async for chunk in store.read_log(key, **span) for record in chunk.records]


async def _alike(view: Any, key: SessionKey, expected: list[Record]) -> None:
    assert await view.head(key) == expected[-1].seq
    assert await _read(view, key) == expected
    for after, before in SPANS:
        end = 100 if before is None else before
        wanted = [record for record in expected if after < record.seq < end]
        for limit in (None, 1, 3):
            span: dict[str, Any] = {"after": after, "before": before, "limit": limit}
            assert await _read(view, key, **span) == wanted[:limit]
            assert await _read(view, key, **span, reverse=True) == wanted[::-1][:limit]


@pytest.mark.parametrize("part", [1, 100, PART])
async def test_a_bundles_session_is_read_as_from_a_store(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, target = await _filled(), MemoryStore()
    await target.open()
    await write_bundle(store, KEY, tmp_path / "one")
    monkeypatch.setattr("perdure.transfer.views.PART", part)
    expected = [
        Record(record.seq, 0, GAP, b"null", end=True)
        if record.kind == "epoch"
        else Record(record.seq, 0, record.kind, record.payload, record.end)
        for record in await _read(store, KEY)
    ]
    async with BundleFile.opened(tmp_path / "one") as file:
        view = BundleView(target, file, OTHER, file.base)
        await _alike(view, OTHER, expected)


async def test_a_backups_session_is_read_as_from_its_store() -> None:
    store, kept = await _filled(), MemoryStore()
    await kept.open()
    for _ in range(2):
        assert not (await backup(store, kept)).failed
        grant = await take(store, KEY)
        await append_ok(store, grant, grant.head + 1, *group("later"))
        await store.release(KEY, grant.epoch)
    assert not (await backup(store, kept)).failed
    expected = await _read(store, KEY)
    view = await BackupView.of(kept)
    read = await _read(view, KEY)
    assert [(r.seq, r.epoch, r.kind) for r in read] == [(r.seq, r.epoch, r.kind) for r in expected]
    await _alike(view, KEY, read)


class Lossy(DelegatingStore):
    """A store that has lost records, or cannot read them."""

    def __init__(self, store: Any, lost: set[int], *, damaged: bool) -> None:
        super().__init__(store)
        self._lost = lost
        self._damaged = damaged

    async def read_log(self, key: SessionKey, **span: Any) -> Any:
        for record in await _read(self.inner, key, **span):
            if key == KEY and record.seq in self._lost:
                if self._damaged:
                    raise CorruptRecordError(f"record {record.seq} is damaged; restore it")
                continue
            yield LogChunk((record,))


@pytest.mark.parametrize("lost", [{5}, {13}], ids=["in the middle", "the last"])
async def test_a_backup_that_has_lost_a_record_restores_no_session_without_it(
    lost: set[int],
) -> None:
    store, kept, new = await _filled(), MemoryStore(), MemoryStore()
    for one in (kept, new):
        await one.open()
    assert not (await backup(store, kept)).failed
    assert [entry.kind for entry in (await _read(kept, KEY))[-2:]] == ["kept", "point"]
    assert len(await _read(kept, KEY)) == 14
    lossy = Lossy(kept, lost, damaged=False)
    for reverse in (False, True):
        with pytest.raises(CorruptRecordError, match="is damaged after record"):
            await _read(await BackupView.of(lossy), KEY, reverse=reverse)
    restored = await restore_backup(lossy, new)
    assert "is damaged after record" in restored.failed["ada"]
    assert await new.head(KEY) == 0


@pytest.mark.parametrize(
    "lost",
    [[(10, 12), (14, 20)], [(3, 2500)], [(2, 2), (100, 1500), (2900, 3001)]],
    ids=["one between", "many", "some"],
)
async def test_a_salvage_finds_each_record_that_can_be_read(
    lost: list[tuple[int, int]], tmp_path: Path
) -> None:
    store, new = MemoryStore(), MemoryStore()
    for one in (store, new):
        await one.open()
    grant = await take(store, KEY)
    await append_ok(store, grant, 2, *[entry for n in range(3000) for entry in group(str(n))])
    numbers = {seq for first, last in lost for seq in range(first, last + 1)}
    damaged = Lossy(store, numbers, damaged=True)
    found = await salvage(damaged, KEY, tmp_path / "left")
    assert [(run.first, run.last) for run in found.missing] == lost
    assert found.records == 3000 - len(numbers)
    await read_bundle(new, tmp_path / "left")
    there = {record.seq: record.payload for record in await _read(new, KEY)}
    for record in await _read(store, KEY):
        if record.kind != "epoch" and record.seq not in numbers:
            assert there[record.seq] == record.payload
