"""Encryption: nothing readable anywhere, nothing swapped, no wrong key that looks like nothing."""

from __future__ import annotations

import base64
import logging
import random
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from perdure import Message, Shutdown, connect
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    MissingExtraError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import About
from perdure.records.records import MESSAGE, Entry, Record
from perdure.store import DeadLetter, PendingItem, SessionQuery, Status, Store, take_after
from perdure.stores.file import FileStore
from perdure.stores.file.layout import encode_name
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import EncryptedStore, MasterKeys, keys as keyring
from perdure.stores.wrapped.keys import DataKey
from perdure.stores.wrapped.transform import describe_place
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
from perdure.testing.faulty import FaultyStore, How
from tests._virtual import BACKENDS, run

OLD, NEW = MasterKeys.new(), MasterKeys.new()
CANARY = "CANARY-6f1b"

Inner = Callable[[], Store]


@pytest.fixture(params=["file", "sqlite"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Inner:
    if request.param == "file":
        return lambda: FileStore(tmp_path / "kept")
    return lambda: SqliteStore(tmp_path / "kept" / "x.db")


async def opened(inner: Inner, *keys: str) -> EncryptedStore:
    store = EncryptedStore(inner(), MasterKeys(*(keys or (OLD,))))
    await store.open()
    return store


def nothing_readable(folder: Path) -> None:
    files: dict[Path, bytes] = {}
    for one in folder.rglob("*"):
        assert encode_name(CANARY) not in str(one)
        with suppress(FileNotFoundError, IsADirectoryError):  # what is taken just now is gone
            files[one] = one.read_bytes()
    assert sum(map(len, files.values())) > 1000
    for one, data in files.items():
        assert CANARY.encode() not in data, one
        assert base64.b64encode(CANARY.encode() * 3)[4:20] not in data, one
        assert name_of(CANARY.encode()).encode() not in data, one
        assert encode_name(CANARY).encode() not in data, one


async def test_nothing_that_people_wrote_is_in_any_file(inner: Inner, tmp_path: Path) -> None:
    store = EncryptedStore(inner(), OLD)
    shutdown = Shutdown(signals=False)
    async with connect(store, shutdown=shutdown) as sessions:
        options = {"owner": f"{CANARY} owner", "tags": [f"{CANARY}-tag"]}
        async with sessions.open("agent", **options) as session, session.turn():
            session.append(Message.user(f"{CANARY} said " * 50))
            session.describe(title=f"{CANARY} title")
            session.state.set(f"{CANARY}/notes", {"text": f"{CANARY} state"})
        await sessions.post("agent", Message.user(f"{CANARY} posted"))
        await store.put_blobs("", {name_of(CANARY.encode()): CANARY.encode()})
        nothing_readable(tmp_path)  # in write-ahead logs, too
    nothing_readable(tmp_path)
    store = EncryptedStore(inner(), OLD)
    async with connect(store, shutdown=shutdown) as sessions:
        (info,) = await store.sessions(SessionQuery(owner=f"{CANARY} owner", tag=f"{CANARY}-tag"))
        assert (info.title, info.owner) == (f"{CANARY} title", f"{CANARY} owner")
        assert await store.sessions(SessionQuery(owner="somebody else")) == []
        async with sessions.open("agent") as session:
            assert CANARY in str(session.context())
            assert await session.state.get(f"{CANARY}/notes") == {"text": f"{CANARY} state"}


async def test_a_wrong_key_is_an_error_and_never_an_empty_session(inner: Inner) -> None:
    store = await opened(inner)
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("a"))
    documents = {"session.json": b"{}"}
    about = About(title="t", owner="o")
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents, about=about))
    await store.put_blobs("", {name_of(b"b"): b"b"})
    await store.aclose()
    wrong = await opened(inner, NEW)
    for call in (
        lambda: read(wrong),
        lambda: wrong.read_documents(KEY),
        lambda: wrong.get_blob("", name_of(b"b")),
        lambda: wrong.blob_names(""),
        wrong.sessions,
        lambda: take_after(wrong, KEY, after=1),
    ):
        with pytest.raises(ConfigError, match="master key"):
            await call()
    holder = await wrong.holder(KEY)
    assert holder is not None
    assert holder.epoch == 1  # not even taken
    await wrong.aclose()


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_a_wrong_key_begins_no_session(inner: Inner, tenant: str) -> None:
    store, new = await opened(inner), SessionKey("new", tenant=tenant)
    await take(store)
    await store.aclose()
    wrong = await opened(inner, NEW)
    with pytest.raises(ConfigError, match="master key"):
        await take(wrong, new)
    await wrong.aclose()
    store = await opened(inner)
    assert await store.holder(new) is None
    assert await store.sessions(SessionQuery(tenant=tenant, prefix="new")) == []
    assert tenant not in await store.tenants() or not tenant
    assert (await take(store, new)).created
    await store.aclose()


async def test_without_its_key_a_session_is_an_error_too(inner: Inner) -> None:
    store = EncryptedStore(inner(), OLD)
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("agent") as session, session.turn():
            session.append(Message.user("hello"))
    with pytest.raises(ConfigError, match=r"put encrypted\+"):
        await connect(inner(), shutdown=Shutdown(signals=False))
    store = EncryptedStore(inner(), NEW)
    async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
        for call in (sessions.open, sessions.load):
            with pytest.raises(ConfigError, match="master key"):
                await call("agent")


async def test_a_plain_session_among_encrypted_ones_is_not_taken_for_one(inner: Inner) -> None:
    store = await opened(inner)
    await take(store, SessionKey("other"))
    await store.aclose()
    plain = inner()
    await plain.open()  # a program of before the mark
    grant = await take(plain)
    await append_ok(plain, grant, 2, *group("a"))
    await plain.release(KEY, grant.epoch)
    await plain.aclose()
    store = await opened(inner)
    with pytest.raises(ConfigError, match="without encryption"):
        await read(store)
    with pytest.raises(ConfigError, match="without encryption"):
        await take(store)
    await store.aclose()


async def test_records_fit_only_their_own_place(inner: Inner) -> None:
    store, below = await opened(inner), inner()
    await below.open()
    other = SessionKey("other")
    for key in (KEY, other):
        grant = await take(store, key)
        await append_ok(store, grant, 2, *group("same"), *group("same"))
    records = await read(below)
    assert len({one.payload for one in records}) == len(records)
    spilled = store.transform_spill(KEY, 1, 1, group("same"))
    assert spilled is not None
    sealed = Record(2, 1, *spilled[0])
    for wrong in (
        (KEY, sealed.seq + 1, sealed.epoch, sealed.kind, sealed.end),
        (KEY, sealed.seq, sealed.epoch + 1, sealed.kind, sealed.end),
        (KEY, sealed.seq, sealed.epoch, "event", sealed.end),
        (KEY, sealed.seq, sealed.epoch, sealed.kind, not sealed.end),
    ):
        key, seq, epoch, kind, end = wrong
        moved = type(sealed)(seq, epoch, kind, sealed.payload, end)
        with pytest.raises(CorruptRecordError, match="another place"):
            await store.restore_session_records(key, [moved])
    with pytest.raises(CorruptRecordError, match="another place"):
        await store.restore_session_records(other, [sealed])
    assert [one.seq for one in await store.restore_session_records(KEY, [sealed])] == [2]
    for one in (store, below):
        await one.aclose()


async def test_a_nonce_comes_twice_only_for_the_same_bytes(tmp_path: Path) -> None:
    """One nonce for two contents gives both away, and the key that authenticates them."""
    inner = FileStore(tmp_path / "kept")
    heads: dict[bytes, set[bytes]] = {}
    for text in ("one", "two", "two", "three"):
        store = EncryptedStore(inner, MasterKeys(OLD))
        async with connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as session:
                session.memory.set("said", text)
                session.state.set("plan", {"said": text})
                session.append(Message.user(text))
        folder = tmp_path / "kept" / "agents" / "ada"
        documents = [path for path in folder.rglob("*.json") if not path.name.startswith("keys")]
        for path in documents:
            data = path.read_bytes()
            if data.startswith(b"\x01"):
                heads.setdefault(data[:21], set()).add(data[21:])
    assert len(heads) >= 6
    assert all(len(sealed) == 1 for sealed in heads.values())


def test_a_key_opens_only_what_was_sealed_for_its_owner() -> None:
    ours = DataKey(b"k" * 32, ("session", "", "ada", "default"), None)
    other = DataKey(b"k" * 32, ("session", "", "bob", "default"), None)
    sealed = ours.transform(("document", "memory.json"), b"mine")
    assert ours.restore(("document", "memory.json"), sealed) == b"mine"
    with pytest.raises(CorruptRecordError, match="another place"):
        other.restore(("document", "memory.json"), sealed)


@pytest.mark.parametrize("other", [("ada", "b", ""), ("bob", "a", ""), ("ada", "a", "t")])
def test_a_wrapped_key_opens_only_for_its_own_session(other: tuple[str, str, str]) -> None:
    masters, key = MasterKeys(OLD), SessionKey("ada", "a")
    _, data = keyring.wrap_key(key, b"k" * 32, masters)
    assert masters.unwrap(data, keyring.associated_data(key), "it").key == b"k" * 32
    with pytest.raises(CorruptRecordError):
        masters.unwrap(data, keyring.associated_data(SessionKey(*other)), "it")


def test_a_wrapped_key_that_is_damaged_or_of_a_newer_release_is_told() -> None:
    masters, key = MasterKeys(OLD), SessionKey("ada")
    _, data = keyring.wrap_key(key, b"k" * 32, masters, chained=1)
    place = keyring.associated_data(key)
    wrapped = msgspec.json.decode(data)
    assert wrapped["format"] == keyring.FORMAT
    for field, value in (("key", "%"), ("key", "AAAA"), ("key", 1), ("chained", 2), ("below", 1)):
        damaged = msgspec.json.encode({**wrapped, field: value})
        with pytest.raises(CorruptRecordError, match="wrapped key of ada is damaged"):
            masters.unwrap(damaged, place, "ada")
    with pytest.raises(CorruptRecordError):
        masters.unwrap(data[:-1], place, "ada")
    newer = msgspec.json.encode({**wrapped, "format": keyring.FORMAT + 1})
    with pytest.raises(UnsupportedVersionError, match="use a newer perdure"):
        masters.unwrap(newer, place, "ada")


async def test_a_flipped_bit_in_a_payload_is_named(inner: Inner) -> None:
    store, below = await opened(inner), inner()
    await below.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("some text"))
    (_, sealed) = await read(below)
    dice = random.Random(3)
    for _ in range(200):
        raw = bytearray(base64.b64decode(sealed.payload[1:-1]))
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
        payload = b'"%b"' % base64.b64encode(raw)
        flipped = type(sealed)(sealed.seq, sealed.epoch, sealed.kind, payload, sealed.end)
        with pytest.raises(CorruptRecordError, match="agent"):
            await store.restore_session_records(KEY, [flipped])
    for payload in (b'"%%%"', b"{}", b'""', sealed.payload[:-5] + b'"'):
        broken = type(sealed)(sealed.seq, sealed.epoch, sealed.kind, payload, sealed.end)
        with pytest.raises(PerdureError):
            await store.restore_session_records(KEY, [broken])
    for one in (store, below):
        await one.aclose()


async def test_a_new_master_key_wraps_anew(inner: Inner) -> None:
    store = await opened(inner, OLD)
    for name in ("released", "held", "opened again"):
        grant = await take(store, SessionKey(name))
        await append_ok(store, grant, 2, *group(name))
        if name != "held":
            await store.release(grant.key, 1)
    await store.put_blobs("", {name_of(b"b"): b"b"})
    both = await opened(inner, NEW, OLD)
    await take(both, SessionKey("opened again"))  # wraps its key anew by the way
    await both.release(SessionKey("opened again"), 2)
    done = await both.rewrap()
    assert done.left == (SessionKey("held"),)
    assert done.done == 2  # one session, and the tenant's key
    await store.aclose()  # whoever holds it has gone
    done = await both.rewrap()
    assert (done.done, done.left) == (1, ())
    assert (await both.rewrap()).done == 0
    await both.aclose()
    new = await opened(inner, NEW)
    tenant = await keyring.find(new.inner, keyring.keyring_of(""), MasterKeys(NEW))
    assert tenant is not None
    assert (tenant.is_current, tenant.chained) == (True, 0)  # its session has no log of its own
    for name in ("released", "held", "opened again"):
        assert tuple(entries(await read(new, SessionKey(name)))) == group(name)
    assert await new.get_blob("", name_of(b"b")) == b"b"
    await new.aclose()


async def test_deleting_a_session_destroys_its_key(inner: Inner, tmp_path: Path) -> None:
    store, below = await opened(inner), inner()
    await below.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("secret"))
    (_, sealed) = await read(below)
    await store.delete(KEY, grant.epoch)
    assert (await below.read_documents(KEY)).manifest is None
    again = await take(store)
    await append_ok(store, again, 2, *group("next life"))
    with pytest.raises(CorruptRecordError):
        await store.restore_session_records(KEY, [sealed])
    assert tuple(entries(await read(store))) == group("next life")
    for one in (store, below):
        await one.aclose()


async def test_a_holder_that_died_before_it_had_a_key_is_followed() -> None:
    backing = MemoryBacking()
    inner = MemoryStore(backing=backing)  # the first key is the tenant's
    faulty = FaultyStore(inner, fail_on="write_documents", nth=2, how="crash")
    store = EncryptedStore(faulty, OLD)
    await store.open()
    with pytest.raises(BaseException, match="made to fail"):
        await take(store)
    next_one = EncryptedStore(MemoryStore(backing=backing), OLD)
    await next_one.open()
    grant = await take(next_one)
    assert (grant.epoch, grant.created) == (2, False)
    await append_ok(next_one, grant, 3, *group("a"))
    assert tuple(entries(await read(next_one))) == group("a")


@pytest.mark.parametrize("how", ["transient", "hang"])
async def test_a_session_whose_key_could_not_be_written_is_let_go(how: How) -> None:
    """Whoever asked for it was told that it failed, or went away: others need not wait."""
    inner = FaultyStore(MemoryStore(), fail_on="write_documents", nth=2, how=how)
    store = EncryptedStore(inner, OLD)
    await store.open()

    async def acquire() -> None:
        with pytest.raises(StoreUnavailableError):
            await take_after(store, KEY, after=0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acquire)
        while not inner.injected:
            await anyio.lowlevel.checkpoint()
        if how == "hang":
            tasks.cancel_scope.cancel()
    holder = await store.holder(KEY)
    assert holder is not None
    assert (holder.epoch, holder.released) == (1, True)
    grant = await take_after(store, KEY, after=1)
    await append_ok(store, grant, grant.head + 1, *group("a"))


async def test_a_page_of_sessions_is_as_long_as_it_was_asked_for(inner: Inner) -> None:
    """Also the page from which the keys' own session is left out."""
    store = await opened(inner)
    names = ["A", "B", "x", "y", "z"]
    for name in names:
        grant = await take(store, SessionKey(name))
        await append_ok(store, grant, grant.head + 1, *group("a"))
    for limit in range(1, len(names) + 2):
        pages: list[list[str]] = []
        after = None
        while page := await store.sessions(SessionQuery(after=after, limit=limit)):
            pages.append([info.key.agent for info in page])
            after = page[-1].key
        assert sum(pages, []) == names
        assert {len(page) for page in pages[:-1]} <= {limit}
        assert len(pages[-1]) <= limit
    await store.aclose()


async def test_many_at_once_make_one_key_for_a_tenant(inner: Inner) -> None:
    stores = [await opened(inner) for _ in range(5)]
    names = [name_of(str(n).encode()) for n in range(5)]
    async with anyio.create_task_group() as tasks:
        for n, store in enumerate(stores):
            tasks.start_soon(store.put_blobs, "t", {names[n]: str(n).encode()})
    for store in stores:
        assert await store.blob_names("t") == sorted(names)
        assert await store.get_blob("t", names[4]) == b"4"
        assert (
            await store.sessions(SessionQuery(tenant="t")) == []
        )  # the keys' own session is not shown
    for store in stores:
        await store.aclose()


async def test_a_holder_that_dies_while_it_makes_a_tenants_key_is_followed() -> None:
    backing = MemoryBacking()
    faulty = FaultyStore(MemoryStore(backing=backing), fail_on="write_documents", how="transient")
    store = EncryptedStore(faulty, OLD)
    await store.open()
    with pytest.raises(PerdureError):
        await store.put_blobs("", {name_of(b"a"): b"a"})
    await store.put_blobs("", {name_of(b"a"): b"a"})
    assert await store.get_blob("", name_of(b"a")) == b"a"


async def test_the_keys_own_session_is_nobodys() -> None:
    store = EncryptedStore(MemoryStore(), OLD)
    await store.open()
    with pytest.raises(ConfigError, match="store's own"):
        await take_after(store, keyring.keyring_of(""), after=0)


async def test_a_lost_key_is_not_replaced() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, OLD)
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    await inner.write_documents(KEY, {}, manifest_of(grant, 2, {}))
    store = EncryptedStore(inner, OLD)
    for call in (lambda: read(store), lambda: take(store)):
        with pytest.raises(ConfigError, match="no key"):
            await call()
    outcome = await append(store, grant, 3, *group("b"))
    assert outcome.status is Status.CONFLICT


def damage_manifests(folder: Path) -> None:
    if (path := folder / "kept" / "x.db").exists():
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE manifest SET data = x'7b7d'")
        return
    for one in folder.rglob("manifest-*.json"):
        one.write_bytes(one.read_bytes().replace(b"as_of_seq", b"as_of_seQ"))


async def test_a_fold_over_a_damaged_manifest_keeps_the_key(inner: Inner, tmp_path: Path) -> None:
    """A manifest may be lost, since a fold makes it anew; what opens the session may not."""
    store = await opened(inner)
    grant = await take(store)
    head = await append_ok(store, grant, 2, *group("a"))
    damage_manifests(tmp_path)
    documents = {"session.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, head, documents))
    await store.aclose()
    again = await opened(inner)
    assert tuple(entries(await read(again))) == group("a")
    assert (await again.read_documents(KEY)).found["session.json"].data == b"{}"
    assert (await take(again)).epoch == 2
    await again.aclose()


async def test_a_damaged_manifest_is_not_a_lost_key(inner: Inner, tmp_path: Path) -> None:
    store, shutdown = EncryptedStore(inner(), OLD), Shutdown(signals=False)
    async with connect(store, shutdown=shutdown) as sessions:
        async with sessions.open("agent") as session, session.turn():
            session.append(Message.user("hello"))
        await store.put_blobs("", {name_of(b"kept"): b"kept"})
    for keys in ((OLD,), (NEW, OLD), (NEW,)):  # read; wrapped anew; not needed any more
        damage_manifests(tmp_path)
        store = EncryptedStore(inner(), MasterKeys(*keys))
        async with connect(store, shutdown=shutdown) as sessions:
            assert (await sessions.load("agent")).context()[0].text == "hello"
            async with sessions.open("agent") as session:
                assert session.context()[0].text == "hello"
            await store.put_blobs("", {name_of(keys[0].encode()): keys[0].encode()})
            assert await store.get_blob("", name_of(b"kept")) == b"kept"
            assert (await store.rewrap()).left == ()


async def test_nothing_comes_into_the_place_of_a_key() -> None:
    """As a bundle could bring it, that somebody made on purpose."""
    store = EncryptedStore(MemoryStore(), OLD)
    await store.open()
    grant = await take(store)
    await append_ok(store, grant, 2, *group("a"))
    documents = {"keys/x.json": b"{}"}
    with pytest.raises(NotStorableError, match="keys/x"):
        await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    again = EncryptedStore(store.inner, OLD)
    assert tuple(entries(await read(again))) == group("a")


async def test_a_key_is_no_evidence_of_damage(inner: Inner, tmp_path: Path) -> None:
    """Evidence is kept among the blobs, and outlasts its session: a key must not."""
    store = await opened(inner)
    grant = await take(store)
    documents = {"session.json": b"{}", "plugins/x.json": b"{}"}
    await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    damage_manifests(tmp_path)
    found = await store.read_documents(KEY)
    assert found.manifest is None
    assert set(found.damaged) == set(documents)
    assert set(found.remains) <= set(documents)
    await store.aclose()


async def test_much_is_opened_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    store = EncryptedStore(MemoryStore(), OLD)
    await store.open()
    grant = await take(store)
    large = b"x" * 1_000_000
    documents = {"session.json": large}
    await store.write_documents(KEY, documents, manifest_of(grant, 1, documents))
    await store.put_blobs("", {name_of(large): large})
    original, seen = DataKey.restore, set[int]()

    def open_there(self: DataKey, place: tuple[str | int | bool, ...], data: bytes) -> bytes:
        seen.add(threading.get_ident() if len(data) > len(large) else 0)
        return original(self, place, data)

    monkeypatch.setattr(DataKey, "restore", open_there)
    assert await store.get_blob("", name_of(large)) == large
    assert (await store.read_documents(KEY)).found["session.json"].data == large
    assert seen - {0}
    assert threading.get_ident() not in seen


async def test_equal_content_does_not_look_equal() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, OLD)
    await store.open()
    for tenant in ("a", "b"):
        await store.put_blobs(tenant, {name_of(b"x" * 99): b"x" * 99})
    (one,), (other,) = await inner.blob_names("a"), await inner.blob_names("b")
    assert one != other
    for tenant in ("a", "b"):
        grant = await take(store, SessionKey("s", tenant=tenant))
        await append_ok(store, grant, 2, *group("same"))
    first = await read(inner, SessionKey("s", tenant="a"))
    second = await read(inner, SessionKey("s", tenant="b"))
    assert first[1].payload != second[1].payload


async def test_a_record_as_large_as_is_said_fits() -> None:
    store = EncryptedStore(MemoryStore(), OLD)
    await store.open()
    grant = await take(store)
    most = store.capabilities.max_record_bytes
    large = Entry(MESSAGE, b'"' + random.Random(1).randbytes(most // 2 - 1).hex().encode() + b'"')
    await append_ok(store, grant, 2, large)
    assert entries(await read(store)) == [large]
    outcome = await append(store, grant, 3, Entry(MESSAGE, b'"' + b"x" * most + b'"'))
    assert isinstance(outcome.error, TooLargeError)


async def test_what_is_spilled_is_sealed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="perdure")
    backing, spill = MemoryBacking(), tmp_path / "spill"
    shutdown = Shutdown(deadline=0.2, turn_grace=0, hard_grace=0.2, signals=False, spill=str(spill))
    faulty = FaultyStore(
        MemoryStore(backing=backing), fail_on="append_many", nth=2, how="transient", times=None
    )
    sessions = await connect(EncryptedStore(faulty, OLD), autosave=None, shutdown=shutdown)
    session = await sessions.open("a")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user(f"{CANARY} spilled"))
    report = await sessions.aclose()
    assert [one.key.agent for one in report.spilled] == ["a"]
    (file,) = spill.iterdir()
    assert CANARY.encode() not in file.read_bytes()
    store = EncryptedStore(MemoryStore(backing=backing), OLD)
    async with connect(store, shutdown=shutdown) as again, again.open("a") as session:
        assert [one.content for one in session.context()] == ["saved", f"{CANARY} spilled"]
    assert list(spill.iterdir()) == []


async def test_an_item_of_an_inbox_fits_only_there() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, OLD)
    await store.open()
    grant, other = await take(store), await take(store, SessionKey("other"))
    await store.enqueue(KEY, [PendingItem("op", "message", b'"hidden by the key"', 1.0)])
    (sealed,) = await inner.receive(KEY, grant.epoch)
    assert b"hidden" not in sealed.payload
    await inner.enqueue(other.key, [sealed])
    (item,) = await store.receive(other.key, other.epoch)
    assert "encrypted for another place" in item.damage
    assert item.payload == sealed.payload


async def test_dead_letters_are_sealed_too() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, OLD)
    await store.open()
    grant = await take(store)
    plain = PendingItem("plain", "message", b'"hidden text"', 1.0)
    await inner.enqueue(KEY, [plain])  # past the keys
    (item,) = await store.receive(KEY, grant.epoch)
    assert item.damage
    letters = [
        DeadLetter(item, "because of hidden text", 5, 1.0),
        DeadLetter(PendingItem("op", "message", b'"hidden text, too"', 1.0), "large", 5, 2.0),
    ]
    await store.ack(KEY, grant.epoch, dead=letters)
    assert await store.dead_letters(KEY) == letters
    for kept in await inner.dead_letters(KEY):
        assert b"hidden" not in kept.item.payload
        assert "hidden" not in kept.reason


def test_keys_come_from_the_environment(tmp_path: Path) -> None:
    old, new = bytes(range(32)), bytes(range(1, 33))
    text = base64.b64encode(old).decode()
    assert MasterKeys(old).current == MasterKeys(text).current == MasterKeys(old.hex()).current
    keys = MasterKeys.from_environment({"PERDURE_KEY": f"{new.hex()}, {text}"})
    assert keys.current == MasterKeys(new).current
    file = tmp_path / "key"
    file.write_text(f"{text}\n{new.hex()}\n")
    file.chmod(0o600)
    keys = MasterKeys.from_environment({"PERDURE_KEY_FILE": str(file)})
    assert keys.current == MasterKeys(old).current
    for said in (repr(keys), str(keys)):
        assert text not in said
        assert old.hex() not in said
    for wrong in (
        {},
        {"PERDURE_KEY": "short"},
        {"PERDURE_KEY": "ä" * 44},
        {"PERDURE_KEY": "A" * 20},
        {"PERDURE_KEY_FILE": str(tmp_path / "none")},
    ):
        with pytest.raises(ConfigError) as caught:
            MasterKeys.from_environment(wrong)
        assert wrong.get("PERDURE_KEY", "no such key") not in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows a mode holds no rights")
@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o644, 0o777])
def test_a_key_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "the key"
    file.write_text(MasterKeys.new())
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}") as caught:
        MasterKeys.from_environment({"PERDURE_KEY_FILE": str(file)})
    cure = re.search(r"chmod 600 \S.*(?=,)", str(caught.value))
    assert cure is not None
    subprocess.run(shlex.split(cure[0]), check=True)  # what the message says works
    MasterKeys.from_environment({"PERDURE_KEY_FILE": str(file)})


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cryptography", "cryptography.hazmat.primitives.ciphers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[encryption\]'"):
        EncryptedStore(MemoryStore(), OLD)


def test_a_place_is_named_without_what_is_empty() -> None:
    assert describe_place(("", "a", "", "default", 3)) == "a default 3"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_that_another_process_is_about_to_write_is_waited_for(backend: str) -> None:
    """Two servers that start at once, one of them on a slow line: nobody is overtaken."""

    async def main() -> None:
        backing = MemoryBacking()
        first, second = (MemoryStore(backing=backing, owner=name) for name in ("one", "two"))
        write = first.write_documents

        async def slow(*args: Any, **options: Any) -> None:
            await anyio.sleep(0.08)
            await write(*args, **options)

        first.write_documents = slow  # type: ignore[method-assign]
        found: list[bytes] = []
        masters = MasterKeys(OLD)

        async def begin(store: MemoryStore) -> None:
            found.append(await keyring.tenant_key(store, "acme", masters))

        await first.open()
        await second.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(begin, first)
            await anyio.sleep(0.01)
            tasks.start_soon(begin, second)
        holder = await second.holder(keyring.keyring_of("acme"))
        assert holder is not None
        assert (len(set(found)), holder.epoch) == (1, 1)

    run(backend, main)
