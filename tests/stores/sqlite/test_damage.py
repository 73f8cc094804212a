"""Damage to the database: found and named, never wrong data, never an empty session."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path

import pytest

import perdure
from perdure.errors import CorruptRecordError, PerdureError, UnsupportedVersionError
from perdure.records import records as frames
from perdure.records.keys import SessionKey
from perdure.records.records import Record
from perdure.store import DeadLetter, PendingItem, Status, Store, past_damage, take_after
from perdure.stores.sqlite import SqliteStore
from perdure.testing.conformance._kit import (
    append,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)

KEYS = [SessionKey(f"agent-{n}", "s", "tenant") for n in range(6)]


async def filled(path: Path) -> dict[SessionKey, list[Record]]:
    store = SqliteStore(path)
    await store.open()
    for key in KEYS:
        grant = await take(store, key)
        head = grant.head
        for n in range(5):
            head = await append_ok(store, grant, head + 1, *group(f"{key} {n}", "x" * 40 * n))
        documents = {"session.json": f'"{key}"'.encode()}
        await store.write_documents(key, documents, manifest_of(grant, head, documents))
        await store.enqueue(key, [PendingItem("op", "message", b'"posted"', 1.0)])
        await store.release(key, grant.epoch)
    logs = {key: await read(store, key) for key in KEYS}
    await store.aclose()
    return logs


async def look(store: Store, key: SessionKey, sound: list[Record]) -> bool:
    """Read everything of a session: what is not refused must be right."""
    try:
        holder = await store.holder(key)
        records = await read(store, key)
        head = await store.head(key)
        backward = await read(store, key, reverse=True)
        tail = await read(store, key, after=7)
        documents = await store.read_documents(key)
    except PerdureError:
        return False
    assert holder is not None
    assert holder.epoch == 1
    assert records == sound
    assert backward == sound[::-1]
    assert tail == sound[7:]
    assert head == len(sound)
    for name, document in documents.found.items():
        assert (name, document.data) == ("session.json", f'"{key}"'.encode())
    return True


@pytest.mark.deep
async def test_a_flipped_bit_is_never_wrong_data(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "x.db"
    logs = await filled(path)
    whole = path.read_bytes()
    dice = random.Random(7)
    noticed = refused = 0
    for _ in range(200):
        data = bytearray(whole)
        at = dice.randrange(len(data))
        data[at] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        store = SqliteStore(path)
        try:
            await store.open()
        except PerdureError:
            refused += 1
            continue
        seen = [await look(store, key, logs[key]) for key in KEYS]
        noticed += not all(seen)
        await store.aclose()
    assert noticed + refused > 20


def change(path: Path, statement: str) -> None:
    con = sqlite3.connect(path)
    assert con.execute(statement).rowcount > 0
    con.commit()
    con.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log SET data = substr(data, 1, length(data) - 1) WHERE first = 4",
        "UPDATE log SET epoch = 2 WHERE first = 4",
        "UPDATE log SET last = last + 1 WHERE first = 4",
        "UPDATE log SET seed = seed + 1 WHERE first = 4",
        "UPDATE log SET data = 'text' WHERE first = 4",
        "DELETE FROM log WHERE first = 4",
        "DELETE FROM log WHERE first = 1",
        "DELETE FROM log WHERE first = 10",
        "DELETE FROM session",
        "UPDATE session SET head = 9",
        "UPDATE session SET epoch = epoch + 1",
        "UPDATE session SET epoch = epoch - 1",
        "UPDATE session SET state = 2",
        "UPDATE session SET agent = 'x' || agent",
        "UPDATE session SET owner = x'ff'",
        "UPDATE session SET low = 4",
    ],
)
async def test_damage_is_named_and_changes_nothing(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "kept" / "x.db"
    await filled(path)
    change(path, statement)
    store = SqliteStore(path)
    await store.open()
    damaged = 0
    for key in KEYS:
        with pytest.raises(CorruptRecordError) as caught:
            await store.head(key)
            await read(store, key)
        assert str(key) in str(caught.value)
        damaged += 1
        with pytest.raises(PerdureError):
            await take_after(store, key, after=0)
    assert damaged == len(KEYS)
    await store.aclose()


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM session", "UPDATE session SET head = 9", "UPDATE session SET low = 9"],
)
async def test_past_damage_a_session_is_read_without_its_row(
    tmp_path: Path, statement: str
) -> None:
    path = tmp_path / "kept" / "x.db"
    logs = await filled(path)
    store = SqliteStore(path)
    await store.open()
    pruned = await take(store, KEYS[0])
    await store.trim(KEYS[0], pruned.epoch, 4)
    logs[KEYS[0]] = await read(store, KEYS[0])
    assert logs[KEYS[0]][0].seq > 1
    change(path, statement)
    token = past_damage.set(True)
    for key, records in logs.items():
        assert await read(store, key) == records
        assert await store.head(key) == records[-1].seq
        assert set((await store.read_documents(key)).found) == {"session.json"}
    assert await store.head(SessionKey("nobody")) == 0
    past_damage.reset(token)
    await store.aclose()


async def test_a_log_that_was_cut_is_damaged_though_nothing_was_folded(tmp_path: Path) -> None:
    """No manifest says how far it went: the session's own row does."""
    path = tmp_path / "x.db"
    async with perdure.connect(f"sqlite:///{path}", shutdown=perdure.Shutdown(signals=False)) as s:
        async with s.open("ada") as session:
            for text in ("one", "two", "three"):
                async with session.turn():
                    session.append(perdure.Message.user(text))
    change(path, "DELETE FROM log WHERE first = (SELECT max(first) FROM log)")
    change(path, "DELETE FROM manifest")
    change(path, "DELETE FROM document")
    async with perdure.connect(f"sqlite:///{path}", shutdown=perdure.Shutdown(signals=False)) as s:
        with pytest.raises(CorruptRecordError, match="rows are missing"):
            await s.load("ada")
        with pytest.raises(CorruptRecordError, match="log of ada"):
            await s.open("ada")


async def test_a_newest_row_that_was_exchanged_does_not_fit(tmp_path: Path) -> None:
    """Sound by itself, and sealed to the row before it: but not what the session's row names."""
    path = tmp_path / "kept" / "x.db"
    await filled(path)
    con = sqlite3.connect(path)
    rows = con.execute("SELECT rowid, first, last, epoch, seed FROM log WHERE last = 11").fetchall()
    assert len(rows) == len(KEYS)
    for rowid, first, last, epoch, seed in rows:
        forged = group(*["forged"] * (last - first + 1))
        data, _ = frames.encode(forged, first=first, epoch=epoch, crc=seed)
        con.execute("UPDATE log SET data = ? WHERE rowid = ?", (data, rowid))
    con.commit()
    con.close()
    store = SqliteStore(path)
    await store.open()
    for key in KEYS:
        with pytest.raises(CorruptRecordError):
            await read(store, key)
        with pytest.raises(CorruptRecordError):
            await read(store, key, reverse=True)
    await store.aclose()


async def test_a_seal_that_was_changed_behind_the_holder_is_not_written_over(
    tmp_path: Path,
) -> None:
    """The head and the epoch are the holder's; what they stand for is not."""
    path = tmp_path / "kept" / "x.db"
    store = SqliteStore(path)
    await store.open()
    grant = await take(store, KEYS[0])
    head = await append_ok(store, grant, grant.head + 1, *group("one"))
    change(path, "UPDATE session SET sum = sum + 1")
    outcome = await append(store, grant, head + 1, *group("two"))
    assert outcome.status is Status.PERMANENT
    assert isinstance(outcome.error, CorruptRecordError)
    await store.aclose()


async def test_of_a_damaged_list_of_sessions_those_are_found_whose_ids_can_be_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kept" / "x.db"
    await filled(path)
    store = SqliteStore(path)
    await store.open()
    gone = await take(store, KEYS[1])
    await store.delete(KEYS[1], gone.epoch)
    only_posted = SessionKey("posted")
    await store.enqueue(only_posted, [PendingItem("op", "message", b'"x"', 1.0)])
    await store.aclose()
    change(path, f"UPDATE session SET agent = x'ff' WHERE agent = '{KEYS[0].agent}'")
    store = SqliteStore(path)
    await store.open()
    assert await store.readable_keys() == KEYS[2:]
    await store.aclose()


async def test_a_letter_that_was_told_goes(tmp_path: Path) -> None:
    """With the heartbeat after the one that told it."""
    path = tmp_path / "kept" / "x.db"
    store, other = SqliteStore(path, owner="one"), SqliteStore(path, owner="two")
    for one in (store, other):
        await one.open()
    await take(store, KEYS[0])
    holder = await other.holder(KEYS[0])
    assert holder is not None
    await other.request_handover(KEYS[0], holder)
    left = []
    for _ in range(3):
        await store.heartbeat()
        with contextlib.closing(sqlite3.connect(path)) as con:
            left += con.execute("SELECT count(*) FROM letter").fetchone()
    assert left[1:] == [0, 0]
    for one in (store, other):
        await one.aclose()


async def test_a_row_of_another_session_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "x.db"
    await filled(path)
    con = sqlite3.connect(path)
    rows = con.execute("SELECT rowid, seed, data FROM log WHERE first = 4").fetchall()
    moved = [(*one[1:], other[0]) for one, other in zip(rows, rows[1:] + rows[:1], strict=True)]
    con.executemany("UPDATE log SET seed = ?, data = ? WHERE rowid = ?", moved)
    con.commit()
    con.close()
    store = SqliteStore(path)
    await store.open()
    for key in KEYS:
        with pytest.raises(CorruptRecordError):
            await read(store, key)
        with pytest.raises(CorruptRecordError):
            await read(store, key, after=3)
    await store.aclose()


async def test_one_sessions_damage_is_not_the_others(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "x.db"
    logs = await filled(path)
    con = sqlite3.connect(path)
    con.execute(
        "UPDATE log SET data = x'00' WHERE session = (SELECT id FROM session "
        "WHERE agent = 'agent-3')"
    )
    con.commit()
    con.close()
    store = SqliteStore(path)
    await store.open()
    for key in KEYS:
        assert await look(store, key, logs[key]) is (key.agent != "agent-3")
    grant = await take(store, KEYS[0])
    outcome = await append(store, grant, grant.head + 1, *group("more"))
    assert outcome.status is Status.OK
    assert len(entries(await read(store, KEYS[0]))) == 11
    await store.aclose()


@pytest.mark.parametrize(
    "change_it",
    ["payload = x'22222222'", "op_id = CAST(x'ff' AS TEXT)", "kind = x'ff'", "posted_at = 'x'"],
)
async def test_a_damaged_item_of_an_inbox_says_so_and_hinders_none(
    tmp_path: Path, change_it: str
) -> None:
    path = tmp_path / "kept" / "x.db"
    await filled(path)
    change(path, f"UPDATE inbox SET {change_it}")
    store = SqliteStore(path)
    await store.open()
    grant = await take(store, KEYS[0])
    good = PendingItem("good", "message", b'"x"', 1.0)
    await store.enqueue(KEYS[0], [good])
    *bad, last = await store.receive(KEYS[0], grant.epoch)
    assert last == good
    assert bad
    assert all("inbox" in one.damage for one in bad)
    await store.ack(KEYS[0], grant.epoch, dead=[DeadLetter(one, "x", 5, 1.0) for one in bad])
    assert await store.receive(KEYS[0], grant.epoch) == [good]
    assert [one.item for one in await store.dead_letters(KEYS[0])] == bad
    await store.aclose()


async def test_a_damaged_manifest_is_as_none(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "x.db"
    logs = await filled(path)
    change(path, "UPDATE manifest SET data = x'7b7d'")
    store = SqliteStore(path)
    await store.open()
    assert (await store.read_documents(KEYS[0])).manifest is None
    assert await read(store, KEYS[0]) == logs[KEYS[0]]
    await store.aclose()


async def test_a_manifest_of_a_newer_release_is_refused_and_left(tmp_path: Path) -> None:
    """It may have any shape: counted as lost, it would be replaced by the next fold."""
    path = tmp_path / "kept" / "x.db"
    await filled(path)
    newer = frames.seal(b'{"format":99,"parts":[]}')
    change(path, f"UPDATE manifest SET data = x'{newer.hex()}'")
    store = SqliteStore(path)
    await store.open()
    with pytest.raises(UnsupportedVersionError):
        await store.read_documents(KEYS[0])
    with pytest.raises(UnsupportedVersionError):
        await take(store, KEYS[0])
    await store.aclose()
    with contextlib.closing(sqlite3.connect(path)) as con:
        assert con.execute("SELECT DISTINCT data FROM manifest").fetchall() == [(newer,)]
