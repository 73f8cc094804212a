"""Damage: a flipped bit or a missing row is named, and is never other data or an empty log."""

from __future__ import annotations

import pytest

from perdure import Message, Shutdown, connect
from perdure.errors import CorruptRecordError
from perdure.records.chunks import name_of
from perdure.records.records import MESSAGE
from perdure.store import DeadLetter, PendingItem, Status
from perdure.stores.postgres import PostgresStore
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
from tests.servers.postgres import Postgres

CHANGES = {
    "a flipped bit": "UPDATE {s}.commits SET lines = set_bit(lines, 77, 1 - get_bit(lines, 77)) "
    "WHERE first = 4",
    "a flipped bit in the last row": "UPDATE {s}.commits "
    "SET lines = set_bit(lines, 300, 1 - get_bit(lines, 300)) WHERE first = 8",
    "a truncated value": "UPDATE {s}.commits SET lines = substring(lines FROM 1 FOR 30) "
    "WHERE first = 4",
    "a value cut between two records": "UPDATE {s}.commits "
    "SET lines = substring(lines FROM 1 FOR position('\\x0a'::bytea IN lines)) WHERE first = 4",
    "an empty value": "UPDATE {s}.commits SET lines = '' WHERE first = 4",
    "bytes behind the end": "UPDATE {s}.commits SET lines = lines || 'x'::bytea WHERE first = 4",
    "a row that is gone": "DELETE FROM {s}.commits WHERE first = 4",
    "the first row gone": "DELETE FROM {s}.commits WHERE first = 1",
    "the last row gone": "DELETE FROM {s}.commits WHERE first = 8",
    "all rows gone": "DELETE FROM {s}.commits",
    "another row's bytes": "UPDATE {s}.commits SET lines = "
    "(SELECT lines FROM {s}.commits WHERE first = 6) WHERE first = 4",
    "another seed": "UPDATE {s}.commits SET seed = seed + 1 WHERE first = 4",
    "another epoch": "UPDATE {s}.commits SET epoch = 2 WHERE first = 4",
    "another end": "UPDATE {s}.commits SET last = 4 WHERE first = 4",
    "a head too high": "UPDATE {s}.sessions SET head = 10",
    "a head too low": "UPDATE {s}.sessions SET head = 8",
    "another checksum at the head": "UPDATE {s}.sessions SET crc = crc # 1",
}


async def written(store: PostgresStore) -> None:
    """Write rows that begin at 1, 2, 4, 6 and 8 and end at 9."""
    grant = await take(store)
    for first in (2, 4, 6, 8):
        await append_ok(store, grant, first, *group(f"{first}", f"{first + 1}"))


@pytest.mark.parametrize("change", CHANGES)
async def test_damage_to_the_log_is_named(
    store: PostgresStore, server: Postgres, schema: str, change: str
) -> None:
    await written(store)
    server.run(CHANGES[change].format(s=schema))
    for reverse in (False, True):
        with pytest.raises(CorruptRecordError, match="agent") as found:
            await read(store, reverse=reverse)
        assert found.value.facts["table"] == "commits"
        assert "restore" in str(found.value)


async def test_what_lies_beside_the_damage_can_be_read(
    store: PostgresStore, server: Postgres, schema: str
) -> None:
    await written(store)
    whole = await read(store)
    server.run(CHANGES["a flipped bit"].format(s=schema))
    with pytest.raises(CorruptRecordError, match="4 to 5"):
        await read(store)
    assert await read(store, after=5) == whole[5:]
    assert await read(store, before=4) == whole[:3]
    assert await read(store, after=6, reverse=True) == whole[:5:-1]


async def test_nothing_is_appended_behind_another_head(
    store: PostgresStore, server: Postgres, schema: str
) -> None:
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    server.run(f"DELETE FROM {schema}.commits WHERE first = 2")
    outcome = await append(store, grant, 2, *group("a"))
    assert outcome.status is Status.PERMANENT
    assert isinstance(outcome.error, CorruptRecordError)


async def test_a_damaged_manifest_counts_as_lost_and_the_log_is_there(
    store: PostgresStore, server: Postgres, schema: str
) -> None:
    await written(store)
    grant = await take(store)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, grant.head, documents))
    server.run(
        f"UPDATE {schema}.manifests SET sealed = set_bit(sealed, 99, 1 - get_bit(sealed, 99))"
    )
    assert (await store.read_documents(KEY)).manifest is None
    assert len(entries(await read(store))) == 8
    assert [info.damaged for info in await store.sessions()] == [True]  # as `ls` shows it
    await store.write_documents(KEY, documents, manifest_of(grant, grant.head, documents))
    assert [info.damaged for info in await store.sessions()] == [False]


async def test_a_damaged_document_is_named(
    store: PostgresStore, server: Postgres, schema: str
) -> None:
    grant = await take(store)
    documents = {"session.json": b'{"a":1}', "memory.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    server.run(f"UPDATE {schema}.documents SET data = '' WHERE name = 'session.json'")
    found = await store.read_documents(KEY)
    assert found.damaged == ("session.json",)
    assert set(found.found) == {"memory.json"}


async def test_a_log_that_ends_before_what_was_folded_is_named(
    store: PostgresStore, server: Postgres, schema: str
) -> None:
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("a"))
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    server.run(f"UPDATE {schema}.sessions SET head = 1")
    with pytest.raises(CorruptRecordError, match="ends at record 1"):
        await store.read_documents(KEY)


async def test_a_damaged_item_of_the_inbox_is_named(
    store: PostgresStore, server: Postgres, schema: str
) -> None:
    grant = await take(store)
    await store.enqueue(
        KEY, [PendingItem(f"op/{place}", MESSAGE, b'"a"', 1.0) for place in range(3)]
    )
    await store.enqueue(KEY, [PendingItem("alone", MESSAGE, b'"a"', 1.0)])
    flip = "SET item = set_bit(item, 99, 1 - get_bit(item, 99))"
    server.run(f"UPDATE {schema}.inbox {flip} WHERE id IN (2, 4)")
    items = await store.receive(KEY, grant.epoch)
    assert [item.op_id for item in items[:3]] == ["op/0", "op/1", "op/2"]  # it is of their post
    bad = [item for item in items if item.damage]
    assert bad == [items[1], items[3]]
    assert bad[1].op_id.startswith("damaged:")
    await store.ack(KEY, grant.epoch, dead=[DeadLetter(one, one.damage, 5, 1.0) for one in bad])
    assert await store.receive(KEY, grant.epoch) == [items[0], items[2]]
    assert [one.item for one in await store.dead_letters(KEY)] == bad
    await store.ack(KEY, None, [one.op_id for one in bad])


async def test_a_damaged_blob_is_named(store: PostgresStore, server: Postgres, schema: str) -> None:
    name = name_of(b"right")
    await store.put_blobs("", {name: b"right"})
    server.run(f"UPDATE {schema}.blobs SET data = 'wrong'")
    with pytest.raises(CorruptRecordError, match=name):
        await store.get_blob("", name)
    await store.put_blobs("", {name: b"right"})
    assert await store.get_blob("", name) == b"right"


@pytest.mark.parametrize("act", ["delete", "forget"])
@pytest.mark.parametrize("change", ["a flipped bit", "the first row gone", "all rows gone"])
async def test_a_damaged_session_is_deleted(
    server: Postgres, schema: str, change: str, act: str
) -> None:
    def place() -> PostgresStore:
        return PostgresStore(server.url, schema=schema)

    quiet = Shutdown(signals=False)
    async with connect(place(), shutdown=quiet) as sessions, sessions.open("ada") as session:
        for text in ("one", "two", "three"):
            session.append(Message.user(text))
            await session.save()
    server.run(CHANGES[change].format(s=schema).replace("= 4", "< 4"))
    server.run(f"DELETE FROM {schema}.manifests")
    async with connect(place(), shutdown=quiet) as sessions:
        assert await getattr(sessions, act)("ada")
        assert await sessions.list() == []
