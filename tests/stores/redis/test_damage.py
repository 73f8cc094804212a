"""Damage on the server is found and named: never wrong data, never an empty session."""

from __future__ import annotations

import pytest

from perdure import Message, Shutdown, connect
from perdure.errors import CorruptRecordError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.store import DeadLetter, PendingItem, Status, Taken, take_after
from perdure.stores.redis import RedisStore
from perdure.stores.redis.layout import KeyNames
from perdure.testing.conformance._kit import (
    KEY,
    append,
    append_ok,
    entries,
    group,
    manifest_of,
    read,
    take,
)
from tests.servers.valkey import Valkey


def names_of(url: str) -> KeyNames:
    return KeyNames(url.partition("prefix=")[2])


async def written(store: RedisStore) -> int:
    """Write three batches behind the epoch record; return the epoch."""
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a", "b"))
    await append_ok(store, grant, 4, *group("c"))
    await append_ok(store, grant, 5, *group("d", "e"))
    return grant.epoch


def bulks(answer: bytes) -> list[bytes]:
    """Return the strings of an answer, however they are nested."""
    found = []
    while answer:
        line, _, answer = answer.partition(b"\r\n")
        if line.startswith(b"$"):
            size = int(line[1:])
            found.append(answer[:size])
            answer = answer[size + 2 :]
    return found


def rewrite(server: Valkey, log: bytes, change: object) -> None:
    """Write the whole stream anew, with one entry changed or left out."""
    parts = bulks(server.ask("XRANGE", log, "-", "+"))
    server.say("DEL", log)
    for place, at in enumerate(range(0, len(parts), 3)):
        entry = change(place, *parts[at : at + 3])  # type: ignore[operator]
        if entry is not None:
            assert server.say("XADD", log, *entry).startswith(b"$")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("at", [5, 40, -20, -3])
async def test_a_flipped_bit_in_an_entry_is_named(
    store: RedisStore, server: Valkey, url: str, at: int
) -> None:
    await written(store)
    log = names_of(url).session_keys(KEY).log

    def change(place: int, id: bytes, epoch: bytes, data: bytes) -> tuple[bytes, ...]:
        return id, epoch, flipped(data, at % len(data)) if place == 1 else data

    rewrite(server, log, change)
    for reverse in (False, True):
        with pytest.raises(CorruptRecordError, match=r"entry 3-2 .* of session agent"):
            await read(store, reverse=reverse)
    assert entries(await read(store, after=3)) == [*group("c"), *group("d", "e")]


async def test_an_entry_that_is_cut_is_named(store: RedisStore, server: Valkey, url: str) -> None:
    await written(store)
    log = names_of(url).session_keys(KEY).log

    def change(place: int, id: bytes, epoch: bytes, data: bytes) -> tuple[bytes, ...]:
        return id, epoch, data[: data.index(b"\n") + 1] if place == 3 else data

    rewrite(server, log, change)
    with pytest.raises(CorruptRecordError, match="entry 6-5"):
        await read(store)


async def test_a_missing_entry_is_named(store: RedisStore, server: Valkey, url: str) -> None:
    await written(store)
    server.say("XDEL", names_of(url).session_keys(KEY).log, "4-4")
    for reverse in (False, True):
        with pytest.raises(CorruptRecordError, match="missing"):
            await read(store, reverse=reverse)


async def test_an_entry_of_another_session_is_not_taken_for_ones_own(
    store: RedisStore, server: Valkey, url: str
) -> None:
    other = SessionKey("other")
    await written(store)
    grant = await take(store, other)
    await append_ok(store, grant, 2, *group("A", "B"))
    foreign = bulks(server.ask("XRANGE", names_of(url).session_keys(other).log, "3-2", "3-2"))[2]

    def change(place: int, id: bytes, epoch: bytes, data: bytes) -> tuple[bytes, ...]:
        return id, epoch, foreign if place == 1 else data

    rewrite(server, names_of(url).session_keys(KEY).log, change)
    with pytest.raises(CorruptRecordError, match="entry 3-2"):
        await read(store)


@pytest.mark.parametrize("what", ["log", "session", "tail", "head", "epoch", "front"])
async def test_a_part_that_is_lost_is_not_an_empty_session(
    store: RedisStore, server: Valkey, url: str, what: str
) -> None:
    epoch = await written(store)
    places = names_of(url).session_keys(KEY)
    damage = {
        "log": ("DEL", places.log),
        "session": ("DEL", places.session),
        "tail": ("XDEL", places.log, "6-5"),
        "front": ("XDEL", places.log, "1-1"),
        "head": ("HSET", places.session, "h", "7"),
        "epoch": ("HSET", places.session, "e", "3"),
    }[what]
    server.say(*damage)
    with pytest.raises(CorruptRecordError, match="agent"):
        await store.head(KEY)
    with pytest.raises(CorruptRecordError):
        await read(store)
    with pytest.raises(CorruptRecordError):
        await take_after(store, KEY, after={"session": 0, "epoch": 3}.get(what, epoch))


@pytest.mark.parametrize("what", ["log", "head"])
async def test_nothing_is_appended_to_a_log_that_is_gone(
    store: RedisStore, server: Valkey, url: str, what: str
) -> None:
    epoch = await written(store)
    places = names_of(url).session_keys(KEY)
    server.say(*(("DEL", places.log) if what == "log" else ("HSET", places.session, "h", "9")))
    outcome = await append(store, Taken(KEY, epoch, 1, created=False), 7, *group("f"))
    assert outcome.status is Status.PERMANENT
    assert isinstance(outcome.error, CorruptRecordError)


async def test_a_flipped_bit_in_the_servers_file_is_named(own_server: Valkey) -> None:
    store = RedisStore(own_server.url)
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("here", "is the text"))
    await append_ok(store, grant, 4, *group("behind it"))
    own_server.kill()
    (file,) = (own_server.folder / "appendonlydir").glob("*.incr.aof")
    data = file.read_bytes()
    file.write_bytes(flipped(data, data.index(b"is the text")))
    own_server.start()
    with pytest.raises(CorruptRecordError, match="entry 3-2"):
        await read(store)
    assert entries(await read(store, after=3)) == [*group("behind it")]
    await store.aclose()


async def test_damaged_documents_are_told_and_the_log_is_left(
    store: RedisStore, server: Valkey, url: str
) -> None:
    grant = await take(store)
    documents = {"session.json": b"one", "memory.json": b"two"}
    await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    places = names_of(url).session_keys(KEY)
    server.say("HSET", places.documents, "memory.json", "twO")
    found = await store.read_documents(KEY)
    assert (list(found.found), found.damaged) == (["session.json"], ("memory.json",))
    sealed = bulks(server.ask("HGET", places.session, "m"))[0]
    server.say("HSET", places.session, "m", flipped(sealed, sealed.index(b"as_of_seq")))
    found = await store.read_documents(KEY)
    assert found.manifest is None
    assert found.found == {}
    assert found.damaged == ("memory.json", "session.json")
    assert len(await read(store)) == 1
    assert [info.damaged for info in await store.sessions()] == [True]  # as `ls` shows it
    await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    assert [info.damaged for info in await store.sessions()] == [False]


async def test_a_damaged_item_is_named(store: RedisStore, server: Valkey, url: str) -> None:
    grant = await take(store)
    await store.enqueue(KEY, [PendingItem("op", "message", b'{"text":"a"}', 1.0)])
    places = names_of(url).session_keys(KEY)
    data = bulks(server.ask("HGET", places.items, "op"))[0]
    other = PendingItem("other", "message", b"1", 1.0)
    await store.enqueue(KEY, [other])
    foreign = bulks(server.ask("HGET", places.items, "other"))[0]
    for wrong in (flipped(data, 9), data[:-1], b"", foreign):
        server.say("HSET", places.items, "op", wrong)
        bad, good = await store.receive(KEY, grant.epoch)
        assert (bad.op_id, bad.payload, good) == ("op", wrong, other)
        assert "damaged" in bad.damage
    await store.ack(KEY, grant.epoch, dead=[DeadLetter(bad, bad.damage, 5, 1.0)])
    assert await store.receive(KEY, grant.epoch) == [other]
    assert [one.item for one in await store.dead_letters(KEY)] == [bad]


async def test_a_damaged_blob_is_named(store: RedisStore, server: Valkey, url: str) -> None:
    data = b"a large result"
    await store.put_blobs("t", {name_of(data): data})
    server.say("SETRANGE", names_of(url).blob("t", name_of(data)), "3", "X")
    with pytest.raises(CorruptRecordError, match=name_of(data)):
        await store.get_blob("t", name_of(data))
    await store.put_blobs("t", {name_of(data): data})
    assert await store.get_blob("t", name_of(data)) == data


async def test_something_foreign_in_a_sessions_place_is_named(
    store: RedisStore, server: Valkey, url: str
) -> None:
    server.say("SET", names_of(url).session_keys(KEY).session, "foreign")
    with pytest.raises(CorruptRecordError, match="prefix"):
        await store.head(KEY)
    with pytest.raises(CorruptRecordError, match="prefix"):
        await take_after(store, KEY, after=0)


async def test_a_damaged_session_hides_no_other(
    store: RedisStore, server: Valkey, url: str
) -> None:
    other = await take(store, SessionKey("other"))
    await written(store)
    places = names_of(url).session_keys(KEY)
    for field in ("e", "h", "c", "u", "k"):
        server.say("HSET", places.session, field, "x")
    found = await store.sessions()
    assert [(one.key, one.epoch) for one in found] == [(KEY, 0), (other.key, other.epoch)]
    server.say("DEL", names_of(url).directory(""))
    assert await store.rebuild_directory() == 2
    assert await store.sessions() == found
    with pytest.raises(CorruptRecordError):
        await store.head(KEY)


async def test_the_checksum_of_the_epoch_record_is_made_on_the_server(store: RedisStore) -> None:
    await take(store)
    (record,) = await read(store)  # verified by zlib
    assert record.payload == b'{"owner":"one"}'


@pytest.mark.parametrize("act", ["delete", "forget"])
@pytest.mark.parametrize("damaged", [0, 1, 2])
async def test_a_damaged_session_is_deleted(
    server: Valkey, url: str, damaged: int, act: str
) -> None:
    quiet = Shutdown(signals=False)
    async with connect(RedisStore(url), shutdown=quiet) as sessions:
        async with sessions.open("ada") as session:
            for text in ("one", "two"):
                session.append(Message.user(text))
                await session.save()
    keys = names_of(url).session_keys(SessionKey("ada"))

    def change(place: int, id: bytes, epoch: bytes, data: bytes) -> tuple[bytes, ...]:
        return id, epoch, flipped(data, 10) if place == damaged else data

    rewrite(server, keys.log, change)
    assert server.say("HDEL", keys.session, "m").startswith(b":1")  # its manifest
    async with connect(RedisStore(url), shutdown=quiet) as sessions:
        assert await getattr(sessions, act)("ada")
        assert await sessions.list() == []
