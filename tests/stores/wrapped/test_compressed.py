"""Compression: smaller, the same again, and no bomb."""

from __future__ import annotations

import base64
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard

from perdure import Message, Shutdown, connect, store_for
from perdure._connect import unwrap_url
from perdure.errors import ConfigError, CorruptRecordError, MissingExtraError, TooLargeError
from perdure.records.chunks import name_of
from perdure.records.records import MESSAGE, Entry
from perdure.store import PendingItem
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore, MasterKeys
from perdure.stores.wrapped.compressed import Compression
from perdure.testing.conformance._kit import (
    KEY,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)


async def test_what_is_large_becomes_smaller() -> None:
    inner = MemoryStore()
    store = CompressedStore(inner)
    await store.open()
    grant = await take(store)
    large = Entry(MESSAGE, b'"' + b"the same again " * 1000 + b'"')
    await append_ok(store, grant, 2, large)
    (_, kept) = await read(inner)
    assert len(kept.payload) < len(large.payload) / 10
    assert entries(await read(store)) == [large]
    data = b"x" * 100_000
    await store.put_blobs("", {name_of(data): data})
    (name,) = await inner.blob_names("")
    assert len(await inner.get_blob("", name) or b"") < 1000
    assert await store.get_blob("", name_of(data)) == data


async def test_nobodys_data_is_taken_for_packed() -> None:
    store = CompressedStore(MemoryStore())
    await store.open()
    grant = await take(store)
    hostile = [
        Entry(MESSAGE, text)
        for text in (b'"~zstd~"', b'"~zstd~AAAA"', b'"~zstd~%b"' % (b"A" * 999), b'"~zstd~')
    ]
    head = await append_ok(store, grant, 2, *hostile)
    assert entries(await read(store)) == hostile
    assert head == 5


@pytest.mark.parametrize("size", [0, 1, 199, 200, 100_000])
def test_bytes_come_back(size: int) -> None:
    compression = Compression()
    for data in (b"a" * size, bytes(range(256)) * (size // 256)):
        packed = compression.compress(data)
        assert compression.decompress(packed, "it") == data
        assert len(packed) <= len(data) + 1
        assert compression.compress(data) == packed


def test_a_bomb_is_given_up_at_the_limit() -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    with pytest.raises(CorruptRecordError, match="limit of 1000000"):
        Compression(1_000_000).decompress(b"\x01" + bomb, "it")
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5_000_000))
    with pytest.raises(CorruptRecordError, match="limit"):
        Compression(1_000_000).decompress(b"\x01" + streamed, "it")


def test_a_bomb_is_given_up_before_it_fills_the_memory() -> None:
    bomb = b"\x01" + zstandard.ZstdCompressor(level=3).compress(bytes(50_000_000))
    compression = Compression(1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match="limit"):
            compression.decompress(bomb, "it")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_what_is_above_the_limit_stays_plain() -> None:
    compression = Compression(1000)
    data = b"a" * 1001
    assert compression.compress(data) == b"\x00" + data
    assert compression.decompress(compression.compress(data), "it") == data


def test_damage_is_found() -> None:
    compression = Compression()
    whole = compression.compress(b"some text " * 100)
    for broken in (b"", b"\x07abc", whole[:-3], whole[:5], b"\x01" + b"no zstandard"):
        with pytest.raises(CorruptRecordError, match="it"):
            compression.decompress(broken, "it")


async def test_a_store_may_be_packed_from_now_on(tmp_path: Path) -> None:
    plain = FileStore(tmp_path / "kept")
    await plain.open()
    grant = await take(plain)
    large = "long " * 500
    head = await append_ok(plain, grant, 2, *group(large))
    documents = {"session.json": b'{"text": "old"}'}
    await plain.write_documents(KEY, documents, manifest_of(grant, head, documents))
    await plain.put_blobs("", {name_of(b"old"): b"old"})
    await plain.aclose()
    store = CompressedStore(FileStore(tmp_path / "kept"))
    await store.open()
    assert (await store.read_documents(KEY)).found["session.json"].data == b'{"text": "old"}'
    grant = await take(store)
    head = await append_ok(store, grant, grant.head + 1, *group(large))
    assert tuple(entries(await read(store))) == group(large) + group(large)
    assert await store.get_blob("", name_of(b"old")) == b"old"
    await store.put_blobs("", {name_of(b"new"): b"new"})
    assert await store.blob_names("") == sorted([name_of(b"old"), name_of(b"new")])
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    assert (await store.read_documents(KEY)).found["session.json"].as_of_seq == head
    await store.aclose()


def test_urls_say_what_is_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_KEY", MasterKeys.new())
    assert isinstance(store_for("sqlite:///x.db?compression=zstd"), CompressedStore)
    assert isinstance(store_for("file:~/x?compression=zstd"), CompressedStore)
    assert isinstance(store_for("memory:?compression=zstd"), CompressedStore)
    for url in ("encrypted+memory:", "encrypted+sqlite:///x.db?compression=zstd"):
        assert isinstance(store_for(url), EncryptedStore)
    assert isinstance(store_for("sqlite:///x.db"), SqliteStore)
    inner, _ = unwrap_url("postgresql://h/d?sslmode=require&compression=zstd&application_name=x")
    assert inner == "postgresql://h/d?sslmode=require&application_name=x"
    assert unwrap_url("redis://h/0?x=compression")[0] == "redis://h/0?x=compression"
    for url in ("memory:?compression=gzip", "encrypted+x", "encrypted+memory:?compression=no"):
        with pytest.raises(ConfigError):
            store_for(url)
    monkeypatch.delenv("PERDURE_KEY")
    with pytest.raises(ConfigError, match="PERDURE_KEY"):
        store_for("encrypted+memory:")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[compression\]'"):
        CompressedStore(MemoryStore())


def planted(root: Path, size: int) -> None:
    """Put a small record in place of the second message that unpacks to a large one."""
    folder = root / "agents" / "victim"
    (log,) = (folder / "log").iterdir()
    large = b'{"role":"user","content":"%b"}' % (b"x" * size)
    packed = zstandard.ZstdCompressor(level=3).compress(large)
    crc, lines, messages = 0, [], 0
    for line in log.read_bytes().splitlines():
        body = line[:-16]
        if b'"k":"message"' in body[:60]:
            messages += 1
            if messages == 2:
                start = body.index(b'"r":') + 4
                body = body[:start] + b'"~zstd~%b"' % base64.b64encode(b"\x01" + packed)
                assert len(body) < 20_000
        crc = zlib.crc32(body, crc)
        lines.append(b'%b,"c":"%08x"}\n' % (body, crc))
    log.write_bytes(b"".join(lines))
    for name in folder.glob("*.json"):
        if not name.name.startswith("lease"):
            name.unlink()


async def test_a_small_record_does_not_become_a_large_message(tmp_path: Path) -> None:
    quiet = Shutdown(signals=False)
    url = f"file:{tmp_path}/store?compression=zstd"
    async with connect(url, shutdown=quiet) as sessions, sessions.open("victim") as session:
        for text in ("a", "b", "c"):
            session.append(Message.user(text * 5000))
    planted(tmp_path / "store", 250 * 2**20)
    tracemalloc.start()
    try:
        async with connect(url, shutdown=quiet) as sessions:
            with pytest.raises(CorruptRecordError, match=r"session victim record 3 .* limit of 16"):
                await sessions.load("victim")
            with pytest.raises(CorruptRecordError, match="restore the session from a copy"):
                await sessions.open("victim")
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


async def test_the_largest_record_and_post_come_back() -> None:
    """Packed they are small; the limit is that of what is packed, and the same both ways."""
    store = CompressedStore(MemoryStore())
    await store.open()
    most = store.capabilities.max_record_bytes
    grant = await take(store)
    largest = b'"%b"' % (b"x" * (most - 2))
    await append_ok(store, grant, 2, Entry(MESSAGE, largest))
    assert entries(await read(store))[-1].payload == largest
    assert await store.enqueue(KEY, [PendingItem("op", MESSAGE, largest, 1.0)]) == 1
    (item,) = await store.receive(KEY, grant.epoch)
    assert (item.payload, item.damage) == (largest, "")
    with pytest.raises(TooLargeError, match=f"the limit is {most}"):
        await store.enqueue(KEY, [PendingItem("op2", MESSAGE, largest + b" ", 1.0)])


async def test_a_plain_blob_of_before_is_renewed_and_not_called_missing() -> None:
    backing, data, gone = MemoryBacking(), b"from before", "0" * 64
    plain = MemoryStore(backing=backing)
    await plain.open()
    await plain.put_blobs("", {name_of(data): data})
    await plain.aclose()
    store = CompressedStore(MemoryStore(backing=backing))
    await store.open()
    assert await store.renew("", {name_of(data), gone}) == {gone}
    await store.aclose()
