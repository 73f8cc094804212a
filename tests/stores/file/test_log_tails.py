"""What does not count at a log's end: a write that a crash cut is kept and told, all else raises."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure._lib.files import MAX_BYTES
from perdure.errors import ConfigError, CorruptRecordError
from perdure.records import records
from perdure.records.records import RETRACT, Entry
from perdure.store import past_damage
from perdure.stores.file import FileStore
from perdure.testing.conformance._kit import append_ok, entries, group, manifest_of, read, take
from tests.stores.file.kit import KEY, contents, log_folder


async def killed(store: FileStore, *texts: str) -> Path:
    """Write, end without a release, and return the log's file."""
    grant = await take(store)
    head = grant.head
    for text in texts:
        head = await append_ok(store, grant, head + 1, *group(text))
    await store.aclose()
    return log_folder(Path(store.location)) / "1-0.jsonl"


def last_line(data: bytes) -> int:
    return data.rfind(b"\n", 0, -1) + 1


CUT: dict[str, Callable[[bytes], bytes]] = {
    "no newline": lambda data: data[:-1],
    "half a line": lambda data: data[:-20],
    "zeros": lambda data: data[: last_line(data)] + bytes(len(data) - last_line(data)),
    "zeros in a line": lambda data: data[:-60] + bytes(40) + data[-20:],
    "zeros over several": lambda data: data[:150] + bytes(len(data) - 150),
}


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
async def test_what_a_crash_may_leave_of_a_write_is_kept_and_told(
    store, open_store, root: Path, cut: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = await killed(store, "a", "b", "c")
    whole = path.read_bytes()
    path.write_bytes(cut(whole))
    other = await open_store("other")
    before = contents(root)
    left = await read(other)
    (tail,) = await other.log_tails(KEY)
    assert (tail.path, tail.is_kept) == (str(path), False)
    assert contents(root) == before
    assert (await other.read_documents(KEY)).cut == ()

    assert (await take(other)).head == len(left) + 1
    (kept,) = await other.log_tails(KEY)
    assert (kept.bytes, kept.is_kept) == (tail.bytes, True)
    assert Path(kept.path).read_bytes() == cut(whole)[-tail.bytes :]
    assert path.read_bytes() == cut(whole)
    assert (await other.read_documents(KEY, ())).cut == (str(kept),)
    (message,) = [text for text in caplog.messages if "do not count" in text]
    assert f"{tail.bytes} bytes" in message
    assert kept.path in message


async def test_a_tail_is_told_until_somebody_accepts_or_removes_it(
    store, open_store, root: Path
) -> None:
    path = await killed(store, "a")
    path.write_bytes(path.read_bytes()[:-1])
    other = await open_store("other")
    grant = await take(other)
    await other.release(KEY, grant.epoch)
    again = await take(other)
    (tail,) = await other.log_tails(KEY)
    kept = Path(tail.path)
    data = kept.read_bytes()
    assert await other.accept_log(KEY)
    assert await other.log_tails(KEY) == []
    assert (await other.read_documents(KEY)).cut == ()
    assert [file.read_bytes() for file in kept.parent.iterdir()] == [data]
    assert not await other.accept_log(KEY)

    await append_ok(other, again, again.head + 1, *group("b"))
    await other.aclose()
    path = log_folder(root) / "3-0.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    third = await open_store("third")
    await take(third)
    (tail,) = await third.log_tails(KEY)
    os.unlink(tail.path)
    assert await third.log_tails(KEY) == []


async def test_the_end_of_a_log_that_is_written_to_is_not_judged(store, open_store) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    path = log_folder(Path(store.location)) / "1-0.jsonl"
    with path.open("ab") as file:
        file.write(b'{"n":')
    other = await open_store("other")
    assert await other.log_tails(KEY) == []


async def test_a_file_of_which_nothing_came_to_the_disk_is_told(
    store, open_store, root: Path
) -> None:
    await killed(store, "a")
    second = await open_store("second")
    grant = await take(second)
    await append_ok(second, grant, grant.head + 1, *group("b", "c"))
    await second.aclose()
    path = log_folder(root) / "2-0.jsonl"
    path.write_bytes(bytes(path.stat().st_size))
    other = await open_store("other")
    assert tuple(entries(await read(other))) == group("a")
    (tail,) = await other.log_tails(KEY)
    assert (tail.path, tail.bytes) == (str(path), path.stat().st_size)
    assert (await take(other)).head == grant.head
    (kept,) = await other.log_tails(KEY)
    assert Path(kept.path).read_bytes() == path.read_bytes()


async def test_a_file_that_a_kill_left_empty_is_nothing(
    store, open_store, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = await killed(store, "a")
    path.with_name("1-1.jsonl").touch()
    other = await open_store("other")
    assert await other.log_tails(KEY) == []
    grant = await take(other)
    assert await other.log_tails(KEY) == []
    assert (await other.read_documents(KEY, ())).cut == ()
    assert caplog.messages == []
    await append_ok(other, grant, grant.head + 1, *group("b"))
    assert tuple(entries(await read(other))) == group("a") + group("b")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the last line": lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:],
    "the last line's end": lambda data: data[:-2] + b"\r\n",
    "CR LF": lambda data: data.replace(b"\n", b"\r\n"),
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "a line behind it": lambda data: data + b"garbage\n",
    "zeros before a sound line": lambda data: (
        data[: last_line(data) - 60] + bytes(40) + data[last_line(data) - 20 :]
    ),
    "no first line": lambda data: data[data.index(b"\n") + 1 :],
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
async def test_a_whole_line_that_is_not_the_next_record_is_damage(
    store, open_store, root: Path, change: Callable[[bytes], bytes]
) -> None:
    path = await killed(store, "a", "b", "c")
    bad = change(path.read_bytes())
    path.write_bytes(bad)
    other = await open_store("other")
    for _ in range(2):
        for attempt in (read(other), other.head(KEY), take(other)):
            with pytest.raises(CorruptRecordError, match=r"1-0\.jsonl is damaged at byte \d+; it"):
                await attempt
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == bad
    assert not (root / "agents/agent/quarantine").exists()


async def test_zeros_below_what_was_folded_are_damage(store, open_store) -> None:
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("a", "b"))
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    await append_ok(store, grant, head + 1, *group("c"))
    path = log_folder(Path(store.location)) / "1-0.jsonl"
    data = path.read_bytes()
    await store.aclose()
    path.write_bytes(data[:-200] + bytes(200))
    other = await open_store("other")
    for attempt in (read(other), take(other)):
        with pytest.raises(CorruptRecordError, match=f"from record {head}"):
            await attempt


async def test_a_conversion_below_a_seal_is_damage_and_salvaged(
    store, open_store, root: Path
) -> None:
    path = await killed(store, "a", "b")
    other = await open_store("other")
    grant = await take(other)
    await append_ok(other, grant, grant.head + 1, *group("c"))
    whole = await read(other)
    await other.release(KEY, grant.epoch)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    third = await open_store("third")
    with pytest.raises(CorruptRecordError, match="CR LF"):
        await read(third)
    token = past_damage.set(True)
    try:
        assert await read(third) == whole
    finally:
        past_damage.reset(token)


@pytest.mark.parametrize("size", [1000, 4000])
async def test_what_is_longer_than_any_write_is_damage_at_a_bounded_cost(
    store, open_store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = await killed(store, "a")
    os.truncate(path, path.stat().st_size + size)
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 2000)
    other = await open_store("other")
    if size < 2000:
        assert tuple(entries(await read(other))) == group("a")
        return
    with pytest.raises(CorruptRecordError):
        await read(other)


async def test_a_hole_without_an_end_is_damage_where_it_begins(
    store, open_store, root: Path
) -> None:
    """It takes no room on the disk, and would take seconds and the memory of a whole write."""
    path = await killed(store, "a")
    begin = path.stat().st_size
    os.truncate(path, 2**40)
    other = await open_store("other")
    tracemalloc.start()
    try:
        for attempt in (read(other), other.head(KEY), take(other)):
            with pytest.raises(CorruptRecordError, match=f"damaged at byte {begin}"):
                await attempt
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    finally:
        tracemalloc.stop()


async def test_a_log_that_was_begun_anew_over_another_is_salvaged_with_it(
    store, open_store, root: Path
) -> None:
    path = await killed(store, "a", "b")
    whole = path.read_bytes()
    path.unlink()
    other = await open_store("other")
    # It took back what its own log had; by the places of both together that is something else.
    retract = Entry(RETRACT, b'{"after":1}')
    await append_ok(other, await take(other), 2, *group("c"), retract)
    path.write_bytes(whole)
    token = past_damage.set(True)
    try:
        assert [one.payload for one in entries(await read(other))] == [
            b'{"text":"a"}',
            b'{"text":"b"}',
            b'{"text":"c"}',
        ]
        assert (await other.read_documents(KEY)).manifest is None
    finally:
        past_damage.reset(token)


async def test_a_pipe_in_the_place_of_a_log_is_refused(store, open_store) -> None:
    path = await killed(store, "a")
    path.unlink()
    os.mkfifo(path, 0o600)
    other = await open_store("other")
    for attempt in (read(other), take(other)):
        with pytest.raises(ConfigError, match=r"1-0\.jsonl is a pipe"):
            await attempt


@pytest.mark.parametrize("name", ["lease-1.json", "manifest-1.json", "session.json"])
async def test_a_file_of_holes_is_refused_unread(store, open_store, root: Path, name: str) -> None:
    grant = await take(store)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    await store.aclose()
    os.truncate(root / "agents/agent" / name, 2 * MAX_BYTES)
    other = await open_store("other")
    with pytest.raises(CorruptRecordError, match=f"{name} has {2 * MAX_BYTES} bytes"):
        await other.read_documents(KEY)
