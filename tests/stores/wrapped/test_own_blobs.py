"""Blobs of encrypted sessions: under each session's own key, so that they go with it."""

from __future__ import annotations

import base64
import contextlib
import copy
import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest

from perdure import Message, Shutdown, connect
from perdure.archive import Archives
from perdure.cli.check import audit
from perdure.errors import LeaseLostError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.session.session import Session
from perdure.session.stored import SessionStore
from perdure.store import Draft, Store, listed_blobs, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.wrapped import EncryptedStore, MasterKeys

OLD, NEW = MasterKeys.new(), MasterKeys.new()
QUIET = Shutdown(signals=False)
PICTURE = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"p" * 9000).decode()
LARGE = "large value " * 3000


async def fill(session: Session, home: Path) -> None:
    """Give a session blobs of each kind."""
    home.mkdir(exist_ok=True)
    (home / "diary.txt").write_text("a day " * 500)
    session.append(Message.user([{"type": "image_url", "image_url": {"url": PICTURE}}]))
    session.memory.set("large", LARGE)
    await session.checkpoints.create("given", {"many": [f"state {n}" for n in range(500)]})
    await Archives(session, home).save()


async def require_filled(store: Store, agent: str) -> None:
    """Check that all that a session's blobs hold can be read."""
    await store.open()
    assert (await audit(SessionStore(store), SessionKey(agent))).problems == []
    await store.aclose()
    async with connect(store, shutdown=QUIET, read_only=True) as sessions:
        view = await sessions.load(agent)
        assert view is not None
        assert await view.memory.get("large") == LARGE
        assert "data:image/png" in str(view.context())
        (given,) = await view.checkpoints.states()
        restored = await view.checkpoints.restore(given.id)
        assert restored is not None
        assert restored.state["many"][499] == "state 499"


def blobs_in(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (root / "blobs").rglob("*") if path.is_file()}


def put_back(files: dict[Path, bytes]) -> None:
    """Bring back what a forensic tool finds in blocks that were freed."""
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(data)
        path.chmod(0o600)


async def readable(store: EncryptedStore, names: Iterable[str]) -> list[str]:
    await store.open()
    found = [
        name
        for name in names
        for whose in ("", SessionKey("ada").blobs, SessionKey("eve").blobs)
        if await store.get_blob(whose, name) is not None
    ]
    await store.aclose()
    return found


async def test_no_blob_of_a_forgotten_session_is_readable_once_its_key_is_destroyed(
    tmp_path: Path,
) -> None:
    root = tmp_path / "kept"
    async with connect(EncryptedStore(FileStore(root), OLD), shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            await fill(session, tmp_path / "home")
        async with sessions.open("eve") as session:
            session.append(Message.user("stays"))
    remnants = blobs_in(root)
    assert len(remnants) > 5
    store = EncryptedStore(FileStore(root), OLD)
    await store.open()
    reached = (await audit(SessionStore(store), SessionKey("ada"))).reached
    assert len(reached) == len(remnants)
    await store.aclose()
    async with connect(EncryptedStore(FileStore(root), OLD), shutdown=QUIET) as sessions:
        report = await sessions.forget("ada")
    assert (report.blobs, report.kept) == (len(remnants), ())
    assert blobs_in(root) == {}
    store = EncryptedStore(FileStore(root), MasterKeys(NEW, OLD))
    await store.open()
    assert (await store.rewrap()).left == ()
    await store.aclose()
    put_back(remnants)
    assert await readable(EncryptedStore(FileStore(root), NEW), reached) == []
    async with connect(EncryptedStore(FileStore(root), NEW), shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:  # another life of the id
            session.append(Message.user("anew"))
    assert await readable(EncryptedStore(FileStore(root), NEW), reached) == []


async def test_a_copy_has_its_own_and_outlives_its_source(tmp_path: Path) -> None:
    root = tmp_path / "kept"
    async with connect(EncryptedStore(FileStore(root), OLD), shutdown=QUIET) as sessions:
        async with sessions.open("ada") as session:
            await fill(session, tmp_path / "home")
        before = blobs_in(root)
        await sessions.fork("ada", "eve")
        assert len(blobs_in(root)) >= 2 * len(before)
        await sessions.rename("eve", "bob")
        assert (await sessions.forget("ada")).kept == ()
        assert not before.keys() & blobs_in(root).keys()
    await require_filled(EncryptedStore(FileStore(root), OLD), "bob")


async def test_equal_content_of_two_sessions_does_not_look_equal() -> None:
    inner = MemoryStore()
    store, name = EncryptedStore(inner, OLD), name_of(b"x" * 99)
    await store.open()
    for agent in ("ada", "eve"):
        await take_after(store, SessionKey(agent), after=0)
        await store.put_blobs(SessionKey(agent).blobs, {name: b"x" * 99})
    names = await inner.blob_names("")
    assert len(names) == 2
    assert len({await inner.get_blob("", stored) for stored in names}) == 2
    for agent in ("ada", "eve"):
        key = SessionKey(agent)
        assert await store.blob_names(key.blobs) == [name]
        listed = await listed_blobs(store, key, [name])
        assert [stored for stored in listed if stored in names] == [
            stored for stored in names if stored in listed
        ]
    assert sorted(await store.blob_names("")) == sorted(names)


async def test_what_was_put_for_the_tenant_is_read_by_a_session_and_not_counted_as_its_own() -> (
    None
):
    """As earlier releases put all of them. A copy of it puts them anew."""
    store, name = EncryptedStore(MemoryStore(), OLD), name_of(b"before")
    await store.open()
    key = SessionKey("ada")
    await take_after(store, key, after=0)
    await store.put_blobs("", {name: b"before"})
    assert await store.get_blob(key.blobs, name) == b"before"
    assert await store.blob_names(key.blobs) == []
    assert await store.renew(key.blobs, [name]) == {name}
    listed = await listed_blobs(store, key, [name])
    for _ in range(2):
        await store.sweep("", listed, 0)
    assert await store.get_blob(key.blobs, name) == b"before"


async def test_a_session_that_is_not_there_gets_no_blob() -> None:
    """It would be under a key that outlasts it."""
    store = EncryptedStore(MemoryStore(), OLD)
    await store.open()
    with pytest.raises(LeaseLostError):
        await store.put_blobs(SessionKey("ada").blobs, {name_of(b"b"): b"b"})
    assert await store.get_blob(SessionKey("ada").blobs, name_of(b"b")) is None


async def test_another_process_reads_them_without_a_lease() -> None:
    backing = MemoryBacking()
    store, key = EncryptedStore(MemoryStore(backing=backing), OLD), SessionKey("ada")
    await store.open()
    await take_after(store, key, after=0)
    await store.put_blobs(key.blobs, {name_of(b"b"): b"b"})
    reader = EncryptedStore(MemoryStore(backing=backing), OLD)
    await reader.open()
    assert await reader.get_blob(key.blobs, name_of(b"b")) == b"b"
    assert await reader.get_blob("", name_of(b"b")) is None


def test_the_tenant_of_a_session_s_blobs_is_a_string_like_any_other() -> None:
    whose = SessionKey("ada", tenant="acme").blobs
    assert (whose, {whose: 1}["acme"]) == ("acme", 1)
    for copied in (copy.deepcopy(whose), pickle.loads(pickle.dumps(whose))):
        assert (copied, copied.key) == ("acme", SessionKey("ada", tenant="acme"))


async def test_no_listing_of_a_store_knows_the_session_that_a_blob_was_put_for() -> None:
    store = MemoryStore()
    await store.put_blobs(SessionKey("ada", tenant="acme").blobs, {name_of(b"b"): b"b"})
    assert [type(tenant) for tenant in await store.tenants()] == [str]


async def test_a_session_is_forgotten_beside_a_copy_of_another(tmp_path: Path) -> None:
    """A copy that is not whole can reach no blob that is this session's own."""
    master, quiet = MasterKeys.new(), Shutdown(signals=False)

    def store() -> EncryptedStore:
        return EncryptedStore(FileStore(tmp_path), master)

    async with connect(store(), shutdown=quiet) as sessions:
        for name in ("ada", "eve"):
            async with sessions.open(name) as session:
                session.append(Message.user("x"))
                session.memory.set("large", f"{name} " * 20_000)
    async with contextlib.AsyncExitStack() as stack:
        copying = store()
        await copying.open()
        stack.push_async_callback(copying.aclose)
        draft = Draft(source=SessionKey("eve"), generation=1, up_to=2, purpose="copy")
        await take_after(copying, SessionKey("copy-of-eve"), after=0, first=3, draft=draft)
        sessions = await stack.enter_async_context(connect(store(), shutdown=quiet))
        report = await sessions.forget("ada", wait=60)
    assert (report.blobs, report.kept) == (1, ())
