"""Bundles that somebody made on purpose: their checksums hold, and nothing of them lands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from perdure.errors import CorruptRecordError, StoreError
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.records import BASE, EPOCH, GAP, MESSAGE, Record
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance._kit import append_ok, group, take
from perdure.transfer import read_bundle
from perdure.transfer.bundle import (
    FREE_MISSING,
    MOST_MISSING,
    BundleFooter,
    BundleHeader,
    BundleWriter,
    Item,
)

KEY = SessionKey("agent", tenant="theirs")


def bundle(path: Path, *items: Item) -> Path:
    writer = BundleWriter()
    path.write_bytes(b"".join(map(writer.line, (BundleHeader(KEY), *items, BundleFooter()))))
    return path


def said(seq: int, kind: str = MESSAGE) -> Record:
    return Record(seq, 0, kind, b'{"text":"x"}', end=True)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([said(2), said(4), said(3)], "order"),
        ([said(2), said(2)], "order"),
        ([said(1)], "order"),
        ([said(-5)], "order"),
        ([said(2), said(3 + MOST_MISSING)], "missing"),
        ([said(10**18)], "missing"),
        ([said(2), said(3, EPOCH)], "epoch"),
        ([said(2), said(3, GAP)], "gap"),
    ],
    ids=["swapped", "twice", "first", "negative", "far", "farther", "epoch", "gap"],
)
async def test_records_that_no_log_has_land_nothing(
    records: Sequence[Record], why: str, tmp_path: Path
) -> None:
    store = MemoryStore()
    await store.open()
    with pytest.raises(CorruptRecordError, match=why):
        await read_bundle(store, bundle(tmp_path / "one.jsonl", *records))
    assert await store.holder(KEY) is None


async def test_a_bundle_does_not_go_on_behind_another_tenants_session(tmp_path: Path) -> None:
    """Else whoever may import for one tenant could read what every other one said."""
    store = MemoryStore()
    await store.open()
    grant = await take(store, SessionKey("secret", tenant="others"))
    await append_ok(store, grant, 2, *group("not for them"))
    base = Origin(at=2, parent=grant.key, epoch=grant.epoch)
    path = bundle(tmp_path / "one.jsonl", Record(2, 0, BASE, encode(base), end=True), said(3))
    with pytest.raises(StoreError, match="tenant"):
        await read_bundle(store, path)
    assert await store.head(KEY) == 0
