"""Reading without a lease: damage is told, evidence stays, and a restore reads only the tail."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import anyio.from_thread
import pytest

from benchmarks.counts import count_asked
from perdure.errors import (
    CorruptRecordError,
    PerdureError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.records.keys import SessionKey
from perdure.records.records import seal
from perdure.store import Draft, LeaseState, Taken, Terms, past_damage, take_after
from perdure.stores.file import (
    FileStore,
    documents as folding,
    leases,
    log as writing,
    reader as reading,
    reader as streaming,
    segments as chain,
)
from perdure.stores.file.leases import FileOwner
from perdure.testing.conformance._kit import (
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)
from tests.stores.file.kit import KEY, contents, lease_of, log_folder, segments


async def test_a_page_of_the_newest_is_one_call_over_any_number_of_epochs(tmp_path: Path) -> None:
    with count_asked() as asked:
        store = FileStore(tmp_path / "kept")
        await store.open()
        for number in range(12):
            grant = await take_after(store, KEY, after=number)
            head = await append_ok(store, grant, grant.head + 1, *group(f"{number}", "b"))
            await store.release(KEY, grant.epoch)
        whole = await read(store, KEY)
        assert len(whole) == head
        asked.take()
        for before, limit in ((None, 10), (None, 1), (14, 5), (3, 9), (head + 1, head)):
            stop = head + 1 if before is None else before
            chunks = store.read_log(KEY, before=before, limit=limit, reverse=True)
            page = [record async for chunk in chunks for record in chunk.records]
            assert page == whole[: stop - 1][::-1][:limit]
            assert asked.take().hops == 1
        await store.aclose()


async def write(store, grant, *texts: str) -> int:
    head = await store.head(KEY)
    for text in texts:
        head = await append_ok(store, grant, head + 1, *group(text, text))
    return head


def small_parts(patch: pytest.MonkeyPatch, size: int) -> None:
    """Make files look large."""
    patch.setattr(streaming, "PART", size)
    patch.setattr(reading, "SMALL", 0)


@pytest.mark.parametrize("part", [40, 137, 1000])
async def test_a_large_log_is_read_in_parts_either_way(
    store, open_store, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    small_parts(monkeypatch, part)
    monkeypatch.setattr(writing, "SEGMENT_BYTES", 1500)
    for owner in ("a", "b"):
        writer = await open_store(owner)
        await write(writer, await take(writer), *[f"{owner}{n}" * (n + 1) for n in range(12)])
    whole = await read(store)
    assert len(whole) == 2 + 2 * 24
    assert [record.seq for record in whole] == list(range(1, 51))
    assert await read(store, reverse=True) == whole[::-1]
    for after, before, limit in ((0, 30, None), (7, 44, 5), (49, None, None), (3, 4, None)):
        wanted = [one for one in whole if after < one.seq < (before or 99)]
        got = await read(store, after=after, before=before, limit=limit)
        assert got == wanted[:limit]
        got = await read(store, after=after, before=before, limit=limit, reverse=True)
        assert got == wanted[::-1][:limit]


def find_closely(patch: pytest.MonkeyPatch, near: int) -> None:
    """Look for a record until its place is known this closely, in windows that are too small."""
    small_parts(patch, 4 * near + 2000)
    patch.setattr(streaming, "_FIRST_PART", near + 200)
    patch.setattr(chain, "_NEAR", near)
    patch.setattr(chain, "_PROBE", 7)


@pytest.mark.parametrize("near", [1, 90, 600])
async def test_a_page_anywhere_is_the_same_as_in_the_whole_log(
    store, open_store, monkeypatch: pytest.MonkeyPatch, near: int
) -> None:
    find_closely(monkeypatch, near)
    monkeypatch.setattr(writing, "SEGMENT_BYTES", 3000)
    for owner in ("a", "b"):
        writer = await open_store(owner)
        await write(writer, await take(writer), *["x" * (n * n * 7 % 400) for n in range(20)])
    whole = await read(store)
    for seq in range(0, len(whole) + 2, 3):
        assert (
            await read(store, before=seq, limit=3, reverse=True)
            == whole[: max(seq - 1, 0)][: -4 if seq else None : -1]
        )
        assert await read(store, after=seq, limit=3) == whole[seq : seq + 3]
        assert await read(store, after=seq, before=seq + 3) == whole[seq : seq + 2]


async def test_a_page_anywhere_reads_little_of_the_log(
    store, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_closely(monkeypatch, 2000)
    grant = await take(store)
    head = 1
    for n in range(20):
        head = await append_ok(store, grant, head + 1, *group(*[f"{n}" * 50] * 100))
    size = 0
    read_part = streaming.read_part

    async def counted(opener, start: int, stop: int) -> bytes:
        nonlocal size
        size += stop - start
        return await read_part(opener, start, stop)

    monkeypatch.setattr(streaming, "read_part", counted)
    page = await read(store, before=700, limit=5, reverse=True)
    assert [record.seq for record in page] == [699, 698, 697, 696, 695]
    assert size < 10_000


async def test_a_page_is_found_above_damage_and_not_in_it(
    store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_closely(monkeypatch, 300)
    await write(store, await take(store), *[f"{n}" * 60 for n in range(40)])
    whole = await read(store)
    (name,) = segments(root)
    file = log_folder(root) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1  # where the search looks first
    file.write_bytes(data)
    damaged = data[: len(data) // 2].count(b"\n") + 1
    for seq in (len(whole) - 4, len(whole)):
        assert await read(store, before=seq, limit=1, reverse=True) == [whole[seq - 2]]
    with pytest.raises(CorruptRecordError):
        await read(store, before=damaged + 1, limit=1, reverse=True)


async def test_a_chunk_is_never_much_larger_than_a_part(store) -> None:
    grant = await take(store)
    head = 1
    for _ in range(40):
        head = await append_ok(store, grant, head + 1, *group(*["x" * 10_000] * 4))
    sizes = []
    async for chunk in store.read_log(KEY):
        sizes.append(sum(len(record.payload) for record in chunk.records))
    assert len(sizes) > 4
    assert max(sizes) < 2 * streaming.PART


async def test_a_restore_reads_the_tail_and_not_the_history(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await take(store)
    head = await write(store, grant, *["x" * 5000] * 60)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    await append_ok(store, grant, head + 1, *group("new"))
    other = await open_store("other")
    counted = [0]
    real = os.read

    def count(fd: int, size: int) -> bytes:
        data = real(fd, size)
        counted[0] += len(data)
        return data

    monkeypatch.setattr(os, "read", count)
    assert tuple(entries(await read(other, after=head))) == group("new")
    assert counted[0] < 80_000  # of 600,000: the first line of the segment, and the tail
    counted[0] = 0
    assert await other.head(KEY) == head + 1
    assert counted[0] < 80_000


async def test_a_fold_of_less_than_everything_still_finds_its_place(store, open_store) -> None:
    grant = await take(store)
    first = await write(store, grant, "a", "b")
    documents = {"session.json": b"1", "memory.json": b"2"}
    before = manifest_of(grant, first, documents)
    await store.write_documents(KEY, documents, before)
    head = await write(store, grant, "c", "d", "e")
    one = {"session.json": b"3"}
    manifest = manifest_of(grant, head, one)
    manifest.documents["memory.json"] = before.documents["memory.json"]
    await store.write_documents(KEY, one, manifest)
    whole = await read(store)
    other = await open_store("other")
    found = (await other.read_documents(KEY)).manifest
    assert found is not None
    known = folding.position_of(found)
    assert known is not None
    assert known.at.seq == first
    for after in range(head + 1):
        assert await read(other, after=after) == whole[after:]


async def test_a_position_of_another_release_is_passed_over(store) -> None:
    import msgspec

    manifest = manifest_of(await take(store), 1, {})
    for raw in (b"null", b"7", b'{"somewhere":1}', b'"x"'):
        other = msgspec.structs.replace(manifest, position=msgspec.Raw(raw))
        assert folding.position_of(other) is None


# damage


async def damaged_store(store, open_store, root: Path) -> list[bytes]:
    """Make a log of two epochs, and return what it holds."""
    await write(store, await take(store), "a", "b", "c")
    other = await open_store("other")
    await write(other, await take(other), "d", "e")
    return [record.payload for record in await read(store)]


async def test_any_flipped_bit_is_told_or_cuts_the_tail(
    store, open_store, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    payloads = await damaged_store(store, open_store, root)
    reader = await open_store("reader")
    for name in segments(root):
        path = log_folder(root) / name
        good = path.read_bytes()
        for place in range(0, len(good), 13):
            bad = bytearray(good)
            bad[place] ^= 1 << (place % 8)
            path.write_bytes(bad)
            seen = contents(root)
            for reverse in (False, True):
                try:
                    got = [one.payload for one in await read(reader, reverse=reverse)]
                except CorruptRecordError as error:
                    told = (error.facts["path"], str(path) in str(error))
                    offset = error.facts["offset"]
                    assert (told, offset <= place) == ((str(path), True), True)  # noqa: PT017
                else:
                    assert name == segments(root)[-1]
                    assert sorted(got[::-1] if reverse else got) == sorted(payloads[: len(got)])
                    assert len(got) >= len(payloads) - 2
            assert contents(root) == seen
        path.write_bytes(good)
    assert [one.payload for one in await read(reader)] == payloads


async def test_a_file_that_is_cut_anywhere_is_told_or_cuts_the_tail(
    store, open_store, root: Path
) -> None:
    payloads = await damaged_store(store, open_store, root)
    reader = await open_store("reader")
    first, last = [log_folder(root) / name for name in segments(root)]
    good = first.read_bytes()
    for length in range(0, len(good), 11):
        first.write_bytes(good[:length])
        with pytest.raises(CorruptRecordError, match="restore the file"):
            await read(reader)
        with pytest.raises(CorruptRecordError):
            await read(reader, reverse=True)
    first.write_bytes(good)
    good = last.read_bytes()
    begin = good.index(b"\n") + 1
    for length in range(begin, len(good)):
        last.write_bytes(good[:length])
        got = [one.payload for one in await read(reader)]
        assert got == payloads[: len(got)]
        assert len(got) in (8, 10, 12)
    last.write_bytes(good)
    assert len(await read(reader)) == len(payloads)


async def test_a_log_that_lost_its_beginning_is_told_by_what_was_folded(
    store, open_store, root: Path
) -> None:
    grant = await take(store)
    head = await write(store, grant, "a")
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    reader = await open_store("reader")
    for lost in (b"", b"\0" * 300, b'{"n":1,"e":1,"k":"ep'):
        (log_folder(root) / "1-0.jsonl").write_bytes(lost)
        with pytest.raises(CorruptRecordError, match=f"from record {head}"):
            await reader.head(KEY)
    shutil.rmtree(log_folder(root))
    with pytest.raises(CorruptRecordError, match=f"from record {head}"):
        await read(reader)


async def test_a_missing_segment_is_told(store, open_store, root: Path) -> None:
    await damaged_store(store, open_store, root)
    (log_folder(root) / "1-0.jsonl").unlink()
    with pytest.raises(CorruptRecordError, match=r"1-0\.jsonl"):
        await read(store)
    assert [one.epoch for one in await read(store, after=7)] == [2] * 5


async def test_damage_is_not_taken_over(store, open_store, root: Path) -> None:
    await damaged_store(store, open_store, root)
    path = log_folder(root) / "2-0.jsonl"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    for owner in ("next", "one after"):
        taker = await open_store(owner)
        with pytest.raises(CorruptRecordError, match=r"2-0\.jsonl"):
            await take(taker)
        holder = await store.holder(KEY)
        assert holder is not None
        assert holder.released  # nobody waits for who gave up
    assert path.read_bytes() == data


async def test_a_log_that_ends_before_what_was_folded_is_not_taken_over(
    store, open_store, root: Path
) -> None:
    grant = await take(store)
    head = await write(store, grant, "a", "b", "c")
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    path = log_folder(root) / "1-0.jsonl"
    good = path.read_bytes()
    path.write_bytes(good[: good.rindex(b"\n", 0, -1) - 40])
    other = await open_store("other")
    with pytest.raises(CorruptRecordError, match=f"record {head}"):
        await take(other)
    with pytest.raises(CorruptRecordError):
        await read(other, after=head)
    path.write_bytes(good)
    assert (await take(other)).head == head + 1


async def test_a_torn_tail_is_copied_by_the_next_holder_and_stays_where_it_is(
    store, open_store, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await write(store, await take(store), "a", "b")
    path = log_folder(root) / "1-0.jsonl"
    good = path.read_bytes()
    torn = good + b'{"n":6,"e":1,"k":"mess'
    path.write_bytes(torn)
    other = await open_store("other")
    assert len(await read(other)) == 5
    assert not (root / "agents/agent/quarantine").exists()
    assert (await take(other)).head == 6
    assert path.read_bytes() == torn
    (copy,) = (root / "agents/agent/quarantine").iterdir()
    assert copy.read_bytes() == b'{"n":6,"e":1,"k":"mess'
    assert any("unfinished write" in message for message in caplog.messages)
    assert len(await read(other)) == 6


async def test_half_a_group_at_the_end_does_not_count(store, open_store, root: Path) -> None:
    await write(store, await take(store), "a")
    path = log_folder(root) / "1-0.jsonl"
    good = path.read_bytes()
    path.write_bytes(good[: good.rindex(b"\n", 0, -1) + 1])
    other = await open_store("other")
    assert len(await read(other)) == 1
    grant = await take(other)
    assert grant.head == 2
    await append_ok(other, grant, 3, *group("b"))
    assert tuple(entries(await read(other))) == group("b")


async def test_a_folder_of_another_session_is_told_with_both_names(store, root: Path) -> None:
    await write(store, await take(store), "a")
    shutil.copytree(root / "agents/agent", root / "agents/copy")
    for call in (
        lambda key: read(store, key),
        store.read_documents,
        store.holder,
        lambda key: take_after(store, key, after=1),
    ):
        with pytest.raises(CorruptRecordError, match=r"belongs to session agent, not to copy"):
            await call(SessionKey("copy"))
    for lease in (root / "agents/copy").glob("lease-*"):
        lease.unlink()
    with pytest.raises(CorruptRecordError, match=r"belongs to session agent, not to copy"):
        await read(store, SessionKey("copy"))


async def test_a_copy_without_leases_can_be_read_and_its_epochs_go_on(
    store, open_store, root: Path
) -> None:
    await write(store, await take(store), "a")
    await store.aclose()
    (root / "agents/agent/lease-1.json").unlink()
    other = await open_store("other")
    assert tuple(entries(await read(other))) == group("a", "a")
    assert await other.holder(KEY) == LeaseState(1, "", released=True)
    assert (await take(other)).epoch == 2


async def test_a_session_of_a_newer_format_is_refused_and_left(store, root: Path) -> None:
    await write(store, await take(store), "a")
    path = root / "agents/agent/lease-1.json"
    import msgspec

    from perdure.records.records import open_sealed, seal

    lease = msgspec.json.decode(open_sealed(path.read_bytes()) or b"")
    path.write_bytes(seal(msgspec.json.encode({**lease, "format": 99})))
    seen = contents(root)
    for call in (read(store), store.read_documents(KEY), store.holder(KEY)):
        with pytest.raises(UnsupportedVersionError, match="99"):
            await call
    assert contents(root) == seen


# a takeover under way


async def test_a_reader_waits_for_a_takeover_and_then_says_so(
    store, open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.stores.file import store as module

    monkeypatch.setattr(module, "_SETTLE", 0.0)
    await write(store, await take(store), "a")
    other = await open_store("other")
    with store._root.enter("agents", "agent") as folder:
        assert leases.publish(folder, lease_of(other._owners.me))
    chunks = [chunk async for chunk in store.read_log(KEY)]
    assert not any(chunk.settled for chunk in chunks)
    assert tuple(entries([one for chunk in chunks for one in chunk.records])) == group("a", "a")
    chunks = [chunk async for chunk in store.read_log(KEY, after=99)]
    assert [(chunk.records, chunk.settled) for chunk in chunks] == [((), False)]


async def test_nobody_waits_for_a_taker_that_is_dead(store) -> None:
    await write(store, await take(store), "a")
    dead = FileOwner(owner="dead", host="", pid=0, boot=store._owners.me.boot)
    with store._root.enter("agents", "agent") as folder:
        assert leases.publish(folder, lease_of(dead))
    assert tuple(entries(await read(store))) == group("a", "a")


async def test_readers_write_nothing_at_all(store, open_store, root: Path) -> None:
    grant = await take(store)
    head = await write(store, grant, "a")
    documents = {"session.json": b"{}", "memory.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    (root / "agents/agent/memory.json").write_bytes(b"damaged")
    path = log_folder(root) / "1-0.jsonl"
    path.write_bytes(path.read_bytes() + b"torn")
    reader = await open_store("reader")
    before = contents(root)
    for key in (KEY, SessionKey("nobody"), SessionKey("agent", "none")):
        with contextlib.suppress(CorruptRecordError):
            await read(reader, key)
        await reader.head(key)
        await reader.read_documents(key)
        await reader.holder(key)
    await reader.sessions()
    assert contents(root) == before


# planted files


async def read_anything(store, key: SessionKey) -> None:
    async for _ in store.read_log(key):
        pass


PLANTED = [
    b"",
    b"\n",
    b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",  # a pickle
    b"\x00" * 5000,
    b"[" * 200_000 + b"\n",
    seal(b"[" * 100_000 + b"]" * 100_000),
    seal(b"{}"),
    seal(b'{"format":1,"key":{"agent":"\\n","session":"x"},"epoch":1,"owner":"x"}'),
    seal(b'{"format":"1"}'),
    b'{"n":1,"e":1,"k":"epoch","end":true,"r":{},"c":"00000000"}\n',
]


@pytest.mark.parametrize("planted", PLANTED, ids=range(len(PLANTED)))
async def test_what_somebody_planted_raises_nothing_but_our_errors(
    store, open_store, root: Path, planted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.stores.file import store as module

    monkeypatch.setattr(module, "_SETTLE", 0.0)
    grant = await take(store)
    head = await write(store, grant, "a")
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    (root / "owners/one.wanted/letter").write_bytes(planted)
    reader = await open_store("reader")
    files = [root / "agents/agent" / name for name in contents(root / "agents/agent")]
    for path in [*files, root / "owners/one.json"]:
        good = path.read_bytes()
        path.write_bytes(planted)
        for call in (read_anything, FileStore.head, FileStore.read_documents, FileStore.holder):
            with contextlib.suppress(PerdureError):
                await call(reader, KEY)
        await reader.sessions()
        path.write_bytes(good)
    asked = await store.heartbeat()
    assert (asked.handovers, asked.mail) == ((), ())
    assert len(await read(reader)) == 3


def test_a_large_log_is_read_on_asyncio_where_trio_is_not_there(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from perdure import Message, Shutdown, connect
from perdure.stores.file import FileStore
async def main():
    async with connect(sys.argv[1], shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            session.append(*(Message.user(f"{n}" + "x" * 400_000) for n in range(10)))
    store = FileStore(sys.argv[1], owner="reader")
    await store.open()
    for reverse in (False, True):
        chunks = [chunk async for chunk in store.read_log(session.key, reverse=reverse)]
        assert sum(len(one.records) for one in chunks) == 11, chunks
        assert len(chunks) > 1, chunks
    await store.aclose()
    assert "trio" not in sys.modules
    print("all of it is there")
asyncio.run(main())
"""
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all of it is there\n"), done.stderr


async def test_reading_leaves_no_file_open(store, open_store) -> None:
    grant = await take(store)
    await write(store, grant, "a")
    reader = await open_store("reader")
    await read(reader)
    before = len(os.listdir("/dev/fd"))
    for _ in range(30):
        await read(reader)
        await read(reader, reverse=True)
        await reader.head(KEY)
    assert len(os.listdir("/dev/fd")) < before + 10


# a holder who trims beside readers


async def long_log(store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(reading, "SMALL", 0)
    grant = await take(store)
    for seq in range(2, 42):
        await append_ok(store, grant, seq, *group(str(seq).ljust(100, ".")))
    return grant


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("place", ["find_tip", "walk"])
async def test_a_trim_while_a_reader_looks_is_no_damage(
    store, open_store, monkeypatch: pytest.MonkeyPatch, place: str, again: bool
) -> None:
    """Whatever goes while somebody looks: no false alarm, and no log that seems empty."""
    grant = await long_log(store, monkeypatch)
    reader = await open_store("reader")
    if again:
        await store.trim(KEY, grant.epoch, 10)
    open_first, loop = chain._open_first, anyio.lowlevel.current_token()

    def trimmed_meanwhile(log, epoch, number, key, flags):
        if number == (0 if place == "find_tip" else 3):
            monkeypatch.setattr(chain, "_open_first", open_first)
            anyio.from_thread.run(store.trim, KEY, grant.epoch, 30, token=loop)
            anyio.from_thread.run(store.release, KEY, grant.epoch, token=loop)
        return open_first(log, epoch, number, key, flags)

    monkeypatch.setattr(chain, "_open_first", trimmed_meanwhile)
    seqs = [record.seq for record in await read(reader, after=5)]
    assert seqs == list(range(seqs[0], 42))
    assert 10 < seqs[0] <= 30


async def test_a_fold_while_its_own_process_reads_is_no_damage(
    store, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = await take(store)
    first = await write(store, grant, "a")
    await store.write_documents(KEY, {}, manifest_of(grant, first, {}))
    reached, go, read_manifests = threading.Event(), threading.Event(), folding.read_manifests

    def slowly(*args, **options):
        monkeypatch.setattr(folding, "read_manifests", read_manifests)
        reached.set()
        assert go.wait(20)
        return read_manifests(*args, **options)

    monkeypatch.setattr(folding, "read_manifests", slowly)
    found: list[object] = []

    async def look() -> None:
        found.extend(await read(store))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        while not reached.is_set():
            await anyio.sleep(0)
        head = await write(store, grant, "b")
        await store.write_documents(KEY, {}, manifest_of(grant, head, {}))
        go.set()
    assert found == await read(store)


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_trim_under_a_reader_is_no_damage(
    store, open_store, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    grant = await long_log(store, monkeypatch)
    reader = await open_store("reader")
    seqs: list[int] = []

    async def read_on() -> None:
        async for chunk in reader.read_log(KEY, reverse=reverse):
            if not seqs:
                await store.trim(KEY, grant.epoch, 30)
            seqs.extend(record.seq for record in chunk.records)

    if reverse:  # what is older is not there any more, and that is all
        await read_on()
        assert seqs == list(range(41, seqs[-1] - 1, -1))
        assert 10 < seqs[-1] <= 30
    else:  # the next records are gone: neither a gap nor damage
        with pytest.raises(StoreUnavailableError, match="read it again"):
            await read_on()
        assert (await read(reader))[-1].seq == 41


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
async def test_a_deletion_under_a_reader_is_no_damage(
    store, open_store, monkeypatch: pytest.MonkeyPatch, reverse: bool, again: bool
) -> None:
    grant = await long_log(store, monkeypatch)
    reader = await open_store("reader")
    seqs: list[int] = []

    async def read_on() -> None:
        async for chunk in reader.read_log(KEY, reverse=reverse):
            if not seqs:
                await store.delete(KEY, grant.epoch)
                if again:
                    await take(store)
            seqs.extend(record.seq for record in chunk.records)

    if reverse:
        await read_on()
        assert 1 < seqs[-1] < 41
    else:
        with pytest.raises(StoreUnavailableError, match="read it again"):
            await read_on()


async def test_what_a_trim_was_to_remove_is_not_salvaged(
    store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed behind its mark, and its files are still there."""
    grant = await long_log(store, monkeypatch)
    first = log_folder(root) / "1-0.jsonl"
    data = first.read_bytes()
    await store.trim(KEY, grant.epoch, 20)
    assert not first.exists()
    reset = past_damage.set(True)
    try:
        whole = await read(store)
        first.write_bytes(data)
        first.chmod(0o600)
        assert await read(store) == whole
    finally:
        past_damage.reset(reset)


async def test_what_is_salvaged_is_read_backwards_as_any_other_log(store) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a", "b", "c"))
    reset = past_damage.set(True)
    try:
        forwards = [one.seq for one in await read(store)]
        backwards = [one.seq for one in await read(store, reverse=True)]
    finally:
        past_damage.reset(reset)
    assert backwards == forwards[::-1] == [4, 3, 2, 1]


@pytest.mark.parametrize("first", [1, 501], ids=["a session", "a copy"])
async def test_who_takes_a_session_over_is_given_what_came_after_its_fold(
    store, first: int
) -> None:
    """Also where the fold is of an earlier holder's part of the log, and where there is none."""
    if first > 1:
        draft = Draft(source=SessionKey("source"), generation=1, up_to=600, purpose="fork")
        grant = await take_after(store, KEY, after=0, first=first, draft=draft)
        await store.publish(KEY, grant.epoch)
    for fold in (False, True):
        for text in ("a", "b"):
            grant = await take(store)
            head = await append_ok(store, grant, grant.head + 1, *group(text))
        if fold:
            documents = {"session.json": b"{}"}
            await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
        grant = await take(store)
        await append_ok(store, grant, grant.head + 1, *group("after"))
        terms = Terms(me=store.owner, after=grant.epoch, names=frozenset())
        answer = await store.acquire(KEY, terms)
        assert isinstance(answer, Taken)
        assert answer.found is not None
        assert answer.found.after == (head if fold else 0)
        assert list(answer.found.records or ()) == await read(store, after=answer.found.after)
