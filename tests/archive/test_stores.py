"""Archives on every kind of store, and with what moves, copies, forgets and tidies sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

import perdure
from perdure.archive import Archives
from perdure.cli.check import audit, collect, garbage
from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.session.internals import accept
from perdure.session.manager import SessionManager
from perdure.session.retention import Retention
from perdure.store import Store
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.transfer import migrate, read_bundle, write_bundle
from tests.archive.trees import Tree, look, make

FILES = {"data/a.txt": "one", "data/empty": None, "b.bin": bytes(range(256)) * 8192}
SECRET = b"what nobody else may read"


async def save(sessions: SessionManager, tmp_path: Path, id: str = "agent") -> Tree:
    home = make(tmp_path / "home", FILES)
    async with sessions.open(id) as session:
        await Archives(session, home).save()
    return look(home)


async def restored(sessions: SessionManager, place: Path, id: str = "agent") -> Tree:
    async with sessions.open(id, create=False) as session:
        await Archives(session, place).restore()
    return look(place)


@pytest.mark.parametrize("kind", ["sqlite", "encrypted", "compressed", "memory"])
async def test_every_kind_of_store_keeps_archives(tmp_path: Path, kind: str) -> None:
    """S4-17: what holds of sessions holds of their files, whichever store has them."""
    store: Store | str = f"sqlite:///{tmp_path}/x.db"
    if kind == "encrypted":
        store = perdure.stores.EncryptedStore(FileStore(tmp_path / "x"), b"k" * 32)
    elif kind == "compressed":
        store = f"file:{tmp_path}/x?compression=zstd"
    elif kind == "memory":
        store = "memory:"
    async with perdure.connect(store) as sessions:
        wanted = await save(sessions, tmp_path)
        make(tmp_path / "home", {"secret": SECRET})
        async with sessions.open("agent") as session:
            await Archives(session, tmp_path / "home").save()
            (tmp_path / "home/secret").unlink()
            await Archives(session, tmp_path / "home").save()
        assert await restored(sessions, tmp_path / "new") == wanted
    if kind == "encrypted":
        assert not any(
            SECRET in one.read_bytes() for one in (tmp_path / "x").rglob("*") if one.is_file()
        )


async def test_a_bundle_and_a_migration_take_the_files_along(tmp_path: Path) -> None:
    one, two, three = (FileStore(tmp_path / name) for name in ("one", "two", "three"))
    async with perdure.connect(one) as sessions:
        wanted = await save(sessions, tmp_path)
    for source, target in ((one, two), (two, three)):
        await source.open()
        await target.open()
        if target is two:
            await write_bundle(source, SessionKey("agent"), tmp_path / "bundle")
            await read_bundle(target, tmp_path / "bundle")
        else:
            assert (await migrate(source, target)).copied == 1
        await source.aclose()
        await target.aclose()
    async with perdure.connect(three) as sessions:
        assert await restored(sessions, tmp_path / "new") == wanted


async def test_a_fork_and_a_copy_have_the_files_when_the_other_is_forgotten(tmp_path: Path) -> None:
    async with perdure.connect(f"file:{tmp_path}/store") as sessions:
        wanted = await save(sessions, tmp_path)
        await sessions.fork("agent", "fork")
        await sessions.copy("agent", "copy")
        await sessions.forget(id="agent")
        for id in ("fork", "copy"):
            assert await restored(sessions, tmp_path / id, id) == wanted


async def test_forgetting_a_session_removes_its_files_and_no_others(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    async with perdure.connect(store) as sessions:
        wanted = await save(sessions, tmp_path)
        make(tmp_path / "home", {"own": "of the other alone"})
        async with sessions.open("other") as session:
            await Archives(session, tmp_path / "home").save()
        report = await sessions.forget(id="other")
        assert report.blobs >= 2  # its manifest, and the file that nobody else has
        assert await restored(sessions, tmp_path / "new") == wanted
        await sessions.forget(id="agent")
    assert [one for one in (tmp_path / "store/blobs").rglob("*") if one.is_file()] == []


async def test_a_sweep_keeps_what_an_archive_names(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    async with perdure.connect(store) as sessions:
        wanted = await save(sessions, tmp_path)
        await store.put_blobs("", {perdure_name(b"nobody's"): b"nobody's"})
        for _ in range(2):
            found, reached = await garbage(
                store,
                "",
                set(await store.blob_names("")),
                [await audit(store, SessionKey("agent"))],
            )
            await collect(store, found, reached, 0.0)
        assert await store.get_blob("", perdure_name(b"nobody's")) is None
        assert await restored(sessions, tmp_path / "new") == wanted


def perdure_name(data: bytes) -> str:
    from perdure.records.chunks import name_of

    return name_of(data)


async def test_pruned_history_leaves_the_listed_archives(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    async with perdure.connect(store) as sessions:
        wanted = await save(sessions, tmp_path)
        async with sessions.open("agent") as session:
            for number in range(6):
                async with session.turn():
                    session.append(perdure.Message.user(str(number)))
        await sessions.prune(Retention(keep_turns=1), id="agent")
        for _ in range(2):
            found, reached = await garbage(
                store,
                "",
                set(await store.blob_names("")),
                [await audit(store, SessionKey("agent"))],
            )
            await collect(store, found, reached, 0.0)
        assert await restored(sessions, tmp_path / "new") == wanted


async def test_an_archive_that_names_what_it_must_not_is_refused(tmp_path: Path) -> None:
    """S4-G7: who can write the store cannot write outside of the home, either."""
    import msgspec

    from perdure.archive.archives import entry_of
    from perdure.archive.limits import line_of
    from perdure.records.archives import Archive, FileEntry
    from perdure.records.chunks import name_of

    data = b"x"
    for path in ("../evil", "/tmp/perdure-evil", ".perdure/restoring.json", "a/../../b"):
        page = line_of(FileEntry(path, 1, name_of(data)))
        archive = Archive(id=path, at=0.0, files=1, bytes=1, pages=(name_of(page),))
        store = MemoryStore()
        async with perdure.connect(store) as sessions, sessions.open("agent") as session:
            archives = Archives(session, tmp_path / "home")
            await store.put_blobs("", {name_of(page): page, name_of(data): data})
            accept(session, (entry_of(archive, []),))
            with pytest.raises(CorruptRecordError, match="is refused"):
                await archives.restore()
            wrong = msgspec.structs.replace(archive, id="counts", files=2)
            accept(session, (entry_of(wrong, []),))
            with pytest.raises(CorruptRecordError):
                await archives.restore()
    assert sorted(one.name for one in tmp_path.iterdir()) in ([], ["home"])
