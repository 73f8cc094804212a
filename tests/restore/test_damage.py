"""Every document lost or damaged in every way: what comes back is the same, and is told."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure import (
    CorruptRecordError,
    Limits,
    Message,
    Retention,
    SessionKey,
    SessionManager,
    Shutdown,
    ToolCall,
    UnsupportedVersionError,
    connect,
    store_for,
)
from perdure.cli.check import audit
from perdure.memory.compaction import EpisodicItem, SemanticItem, item_entry
from perdure.memory.context import SNAPSHOT
from perdure.providers import render
from perdure.restore.report import RestorePlan
from perdure.session.internals import accept, contents_of, store_below
from perdure.session.session import Session
from perdure.store import Store, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import CompressedStore, EncryptedStore
from perdure.types import RestoreReport

KEY = SessionKey("ada")
QUIET = Shutdown(signals=False)

DOCUMENTS = (
    "session.json",
    SNAPSHOT,
    "memory.json",
    "episodic.jsonl",
    "semantic.jsonl",
    "state/mood.json",
    "plugins/counter.json",
)
State = dict[str, Any]


class Counter:
    """A plugin's state."""

    name = "counter"
    version = 1

    async def capture(self) -> Any:
        return {"count": 3}

    async def restore(self, state: Any, context: Any) -> None:
        self.state = state


def manager(root: Path) -> SessionManager:
    return connect(root, autosave=None, shutdown=QUIET)


async def write(session: Session, who: str) -> None:
    """Leave something in every document."""
    session.describe(title=f"Of {who}", tags=["ship"])
    await session.attach(Counter())
    async with session.turn(f"{who}-1"):
        session.append(Message.system("Be kind."), Message.user(f"hello from {who}"))
        session.append(Message.assistant("Let me see.", tool_calls=[ToolCall("c1", "look")]))
        session.append(Message.tool("c1", {"depth": 4}), Message.assistant("4 m"))
    episode = EpisodicItem(id="e1", ts=1.0, summary=f"{who} was met.")
    accept(session, (item_entry(episode),))
    accept(session, (item_entry(SemanticItem(id="s1", ts=1.0, fact=f"{who} likes herring.")),))
    session.memory.set("harbor", f"{who}'s harbor")
    session.state.set("mood", {"is": who})
    await session.save()


async def prepare(root: Path) -> None:
    """Leave two sessions with all documents, and of one what an earlier fold wrote."""
    async with manager(root) as sessions:
        async with sessions.open("bob") as bob:
            await write(bob, "bob")
        async with sessions.open("ada") as ada:
            await write(ada, "ada")
    shutil.copytree(root / "agents" / "ada", root / "earlier")
    async with manager(root) as sessions, sessions.open("ada") as ada:
        async with ada.turn("ada-2"):
            ada.append(Message.user("and now?"), Message.assistant("Now we sail."))
        accept(ada, (item_entry(EpisodicItem(id="e2", ts=2.0, summary="They sailed.")),))
        accept(ada, (item_entry(SemanticItem(id="s2", ts=2.0, fact="The wind is west.")),))
        ada.memory.set("wind", "west")
        ada.state.set("mood", {"is": "bright"})
        attachment = await ada.attach(changed := Counter())
        changed.capture = seven  # type: ignore[method-assign]
        attachment.changed()
        await ada.save()


async def seven() -> Any:
    return {"count": 7}


async def look(session: Session) -> State:
    """Return everything that a restore brings back."""
    counter = Counter()
    await session.attach(counter)
    return {
        "context": session.context("openai"),
        "turns": session.info.turns,
        "messages": session.info.messages,
        "title": session.info.metadata.title,
        "tags": session.info.metadata.tags,
        "memory": {key: await session.memory.get(key) for key in await session.memory.keys()},
        "states": {key: await session.state.get(key) for key in await session.state.keys()},
        "counter": counter.state,
        "episodic": await contents_of(session).lines("episodic.jsonl"),
        "semantic": await contents_of(session).lines("semantic.jsonl"),
        "history": len(await session.history(limit=1000)),
        "known turns": [await known_turn(session, f"ada-{number}") for number in (1, 2)],
    }


async def known_turn(session: Session, id: str) -> tuple[bool, int]:
    """Return whether a turn of this id has ended before, and its number."""
    async with session.turn(id) as turn:
        return turn.replayed, turn.number


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, State]]:
    root = tmp_path_factory.mktemp("healthy")

    async def run() -> State:
        await prepare(root)
        copy = root.with_name("looked at")
        shutil.copytree(root, copy)
        async with manager(copy) as sessions, sessions.open("ada") as ada:
            assert ada.restore_report.source == "snapshot"
            return await look(ada)

    yield root, anyio.run(run)
    shutil.rmtree(root)


@pytest.fixture
def root(healthy: tuple[Path, State], tmp_path: Path) -> Path:
    shutil.copytree(healthy[0], tmp_path / "store")
    return tmp_path / "store"


# the ways to damage a file


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def deleted(path: Path) -> None:
    path.unlink()


def foreign(path: Path) -> None:
    path.write_bytes(Path(str(path).replace("/ada/", "/bob/")).read_bytes())


def newer(path: Path) -> None:
    text = path.read_text()
    value = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    path.write_text(json.dumps(value | {"version": 9, "schema_version": 9}))


def stale(path: Path) -> None:
    old = Path(str(path).replace("/agents/ada/", "/earlier/")).read_bytes()
    assert old != path.read_bytes()
    path.write_bytes(old)


WAYS = (truncated, emptied, flipped, deleted, foreign, newer, stale)


async def come_back(root: Path) -> tuple[State, RestoreReport, RestorePlan, list[str]]:
    """Plan, open, look, change something and close; return all that was told."""
    async with manager(root) as sessions:
        plan = await sessions.plan_restore("ada")
        async with sessions.open("ada") as ada:
            state = await look(ada)
            report = ada.restore_report
            ada.append(Message.user("on we go"))
            await ada.aclose()
    store = store_for(str(root))
    await store.open()
    left = [finding.detail for finding in (await audit(store, KEY)).problems]
    await store.aclose()
    return state, report, plan, left


@pytest.mark.parametrize("damage", WAYS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_damaged_document_is_made_anew_and_the_state_is_the_same(
    healthy: tuple[Path, State], root: Path, name: str, damage: Callable[[Path], None]
) -> None:
    """S0-1, S0-4, S0-26, C8, defect a: never a failed start, never a changed context."""
    path = root / "agents" / "ada" / name
    damage(path)
    evidence = path.read_bytes() if path.exists() else None
    state, report, plan, left = anyio.run(come_back, root)
    assert state == healthy[1]
    assert name in report.damaged
    assert any(step.what == "damaged" and name in step.detail for step in report.steps)
    assert report.source == ("rebuild" if name == SNAPSHOT else "snapshot")
    assert {one.name for one in plan.documents if one.fate == "rebuild"} == {name}
    assert render(plan.messages, "openai").messages == state["context"]
    # It is sound again, and what lay there is kept.
    assert left == []
    kept = root / "agents" / "ada" / "quarantine"
    assert evidence is None or evidence in [one.read_bytes() for one in kept.iterdir()]


@pytest.mark.parametrize("damage", [truncated, emptied, flipped, deleted], ids=lambda f: f.__name__)
def test_without_its_manifest_everything_is_made_anew(
    healthy: tuple[Path, State], root: Path, damage: Callable[[Path], None]
) -> None:
    """S0-1, C8."""
    (path,) = (root / "agents" / "ada").glob("manifest-*.json")
    damage(path)
    evidence = path.read_bytes() if path.exists() else None
    state, report, _, left = anyio.run(come_back, root)
    assert state == healthy[1]
    assert report.source == "rebuild"
    assert {SNAPSHOT, "session.json"} <= set(report.damaged) or damage is deleted
    assert left == []
    kept = root / "agents" / "ada" / "quarantine"
    assert evidence is None or evidence in [one.read_bytes() for one in kept.iterdir()]


def test_documents_of_an_earlier_fold_are_caught_up_with_the_log(
    healthy: tuple[Path, State], root: Path
) -> None:
    """S1-G1: a stale copy of everything that is folded is never trusted as it is."""
    folder = root / "agents" / "ada"
    for path in folder.glob("manifest-*.json"):
        path.unlink()
    for path in (root / "earlier").glob("manifest-*.json"):
        shutil.copy(path, folder)
    for name in DOCUMENTS:
        stale(folder / name)
    state, report, plan, left = anyio.run(come_back, root)
    assert state == healthy[1]
    assert (report.source, plan.source) == ("catch_up", "catch_up")
    assert report.damaged == ()
    assert {one.fate for one in plan.documents} == {"catch up"}
    assert left == []


def test_another_sessions_manifest_is_refused_and_stays(root: Path) -> None:
    (own,) = (root / "agents" / "ada").glob("manifest-*.json")
    (other,) = (root / "agents" / "bob").glob("manifest-*.json")
    shutil.copy(other, own)
    with pytest.raises(CorruptRecordError, match="belongs to session bob"):
        anyio.run(come_back, root)
    assert own.read_bytes() == other.read_bytes()


def test_a_manifest_of_a_newer_format_is_refused_and_stays(root: Path) -> None:
    from perdure.stores.file.layout import sealed

    (own,) = (root / "agents" / "ada").glob("manifest-*.json")
    own.write_bytes(sealed({"format": 9}))
    with pytest.raises(UnsupportedVersionError, match="format 9"):
        anyio.run(come_back, root)
    assert own.read_bytes() == sealed({"format": 9})


@pytest.mark.parametrize(
    "written",
    [
        (SNAPSHOT,),
        ("session.json",),
        ("session.json", SNAPSHOT),
        (SNAPSHOT, "memory.json", "state/mood.json"),
        DOCUMENTS,
    ],
    ids=len,
)
def test_a_fold_that_was_killed_half_way_doubles_and_loses_nothing(
    healthy: tuple[Path, State], root: Path, written: tuple[str, ...]
) -> None:
    """S0-1: some documents are of the fold that was announced, the others of the one before."""
    folder = root / "agents" / "ada"
    (new,) = folder.glob("manifest-*.json")
    new.rename(new.with_suffix(".next"))
    for path in (root / "earlier").glob("manifest-*.json"):
        shutil.copy(path, folder)
    for name in set(DOCUMENTS) - set(written):
        stale(folder / name)
    state, report, _, left = anyio.run(come_back, root)
    assert state == healthy[1]
    assert report.damaged == ()
    assert left == []


async def test_a_message_that_is_the_last_one_of_a_killed_fold_comes_once(tmp_path: Path) -> None:
    """The snapshot has it already, and all that is read for the other documents has it again."""
    root = tmp_path / "store"
    folder = root / "agents" / "ada"
    async with manager(root) as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("one"))
    earlier = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    async with manager(root) as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("two"))
    (new,) = folder.glob("manifest-*.json")
    new.rename(new.with_suffix(".next"))
    for name, data in earlier.items():
        if name != SNAPSHOT and not name.startswith("lease"):
            (folder / name).write_bytes(data)
    async with manager(root) as sessions, sessions.open("ada") as ada:
        assert [one.text for one in ada.context()] == ["one", "two"]
        assert ada.info.messages == 2


# right checksums


async def put(root: Path, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """Write a changed document as a fold would, its checksum and all; return the bytes."""
    import hashlib

    import msgspec

    from perdure.records.manifest import FoldedDocument

    store = store_for(str(root))
    await store.open()
    holder = await store.holder(KEY)
    assert holder is not None
    grant = await take_after(store, KEY, after=holder.epoch)
    have = await store.read_documents(KEY)
    manifest = have.manifest
    assert manifest is not None
    data = change(have.found[name].data)
    listed = manifest.documents[name]
    folded = FoldedDocument(listed.as_of_seq, hashlib.sha256(data).hexdigest(), len(data))
    documents = {**manifest.documents, name: folded}
    new = msgspec.structs.replace(manifest, epoch=grant.epoch, documents=documents)
    await store.write_documents(KEY, {name: data}, new)
    await store.release(KEY, grant.epoch)
    await store.aclose()
    return data


def with_version(data: bytes) -> bytes:
    return json.dumps(json.loads(data) | {"version": 9, "schema_version": 9}).encode()


def with_agent(data: bytes) -> bytes:
    value = json.loads(data)
    return json.dumps(
        value | {key: "bob" for key in ("agent_id", "agentId") if key in value}
    ).encode()


def with_session(data: bytes) -> bytes:
    value = json.loads(data)
    return json.dumps(value | {"session_id": "other", "sessionId": "other"}).encode()


def of_an_older_version(data: bytes) -> bytes:
    return json.dumps(json.loads(data) | {"version": 0, "schema_version": 0}).encode()


def ahead(data: bytes) -> bytes:
    value = json.loads(data)
    return json.dumps(value | {"seq": value["seq"] + 1}).encode()


def behind(data: bytes) -> bytes:
    value = json.loads(data)
    return json.dumps(value | {"seq": value["seq"] - 1}).encode()


def with_fewer_seqs(data: bytes) -> bytes:
    value = json.loads(data)
    return json.dumps(value | {"message_seqs": value["message_seqs"][:-1]}).encode()


def half(data: bytes) -> bytes:
    return data[:-9]


UNUSABLE = [
    *((name, half) for name in DOCUMENTS),
    *((name, with_version) for name in ("session.json", SNAPSHOT, "memory.json")),
    *((name, of_an_older_version) for name in ("session.json", SNAPSHOT, "memory.json")),
    *((name, with_agent) for name in ("session.json", SNAPSHOT)),
    *((name, with_session) for name in ("session.json", SNAPSHOT)),
    *((SNAPSHOT, change) for change in (ahead, behind, with_fewer_seqs)),
]


@pytest.mark.parametrize(
    ("name", "change"), UNUSABLE, ids=lambda one: getattr(one, "__name__", one)
)
def test_a_document_with_a_right_checksum_that_says_nothing_to_us_is_made_anew(
    healthy: tuple[Path, State], root: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    """S0-4, S0-26: another version, another agent, not well-formed."""
    data = anyio.run(put, root, name, change)
    state, report, plan, left = anyio.run(come_back, root)
    assert state == healthy[1]
    assert name in report.damaged
    assert {one.name for one in plan.documents if one.fate == "rebuild"} == {name}
    assert all(one.why for one in plan.documents if one.fate == "rebuild")
    assert left == []
    blobs = [path.read_bytes() for path in (root / "blobs").rglob("*") if path.is_file()]
    assert data in blobs


def lied(data: bytes) -> bytes:
    """Change what a document says, and leave its form."""
    for old, new in ((b"ada", b"eva"), (b"sailed", b"sunk!!"), (b"west", b"east"), (b"7", b"8")):
        data = data.replace(old, new) if b"agent" not in data else data.replace(b"sail", b"sink")
    return data.replace(b"Of ada", b"Of eva").replace(b"bright", b"gloomy")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_check_proves_each_document_by_the_log(
    healthy: tuple[Path, State], root: Path, name: str
) -> None:
    """S0-Q3: a checksum that is right proves nothing; the log does, and a rebuild mends it."""
    before = (root / "agents" / "ada" / name).read_bytes()
    lie = anyio.run(put, root, name, lied)
    assert lie != before

    async def run() -> tuple[list[str], State]:
        store = store_for(str(root))
        await store.open()
        found = [one.detail for one in (await audit(store, KEY)).problems]
        await store.aclose()
        async with manager(root) as sessions:
            planned = await sessions.rebuild_working_context("ada", dry_run=True)
            assert (list(planned.wrong), planned.rebuilt) == (found, ())
            done = await sessions.rebuild_working_context("ada")
            assert set(done.rebuilt) >= set(DOCUMENTS)
            assert (await sessions.rebuild_working_context("ada", dry_run=True)).wrong == ()
            async with sessions.open("ada") as ada:
                return found, await look(ada)

    found, state = anyio.run(run)
    assert found == [found[0]]
    assert found[0].startswith(f"{name} differs from a fresh fold of the log")
    assert state == healthy[1]
    blobs = [path.read_bytes() for path in (root / "blobs").rglob("*") if path.is_file()]
    assert lie in blobs


async def test_a_pruned_session_goes_on_from_what_it_has_kept(tmp_path: Path) -> None:
    """S0-4: where the log's beginning is gone, what a document began with is not."""
    root = tmp_path / "store"
    async with manager(root) as sessions:
        async with sessions.open("ada") as ada:
            for number in range(4):
                async with ada.turn():
                    ada.append(Message.user(f"turn {number}"))
            ada.memory.set("harbor", "north")
        await sessions.prune(Retention(keep_turns=1), id="ada")
        async with sessions.open("ada") as ada:
            before = ada.context()
            assert len(before) == 4
            await ada.aclose()
    await put(root, SNAPSHOT, with_version)
    async with manager(root) as sessions, sessions.open("ada") as ada:
        assert SNAPSHOT in ada.restore_report.damaged
        assert ada.context() == before
        assert await ada.memory.get("harbor") == "north"


async def test_what_cannot_be_used_is_not_what_a_pruned_session_keeps(tmp_path: Path) -> None:
    """S0-1, S0-26: a newer release's snapshot is no beginning for a log that is cut."""
    root = tmp_path / "store"
    async with manager(root) as sessions, sessions.open("ada") as ada:
        ada.memory.set("harbor", "north")
        for number in range(4):  # the last turn's end is what is folded, and where it is cut
            async with ada.turn():
                ada.append(Message.user(f"turn {number}"))
        before = ada.context()
        await ada.aclose()
    await put(root, SNAPSHOT, with_version)
    async with manager(root) as sessions, sessions.open("ada") as ada:
        async with ada.turn():
            ada.append(Message.user("one more"))
        expected = ada.context()
        assert expected[:4] == before
        await sessions.prune(Retention(keep_turns=1), id="ada")
        await ada.aclose()
    (root / "agents" / "ada" / SNAPSHOT).unlink()  # so that it is made of what was kept
    async with manager(root) as sessions, sessions.open("ada") as ada:
        assert ada.context() == expected
        assert await ada.memory.get("harbor") == "north"


# strict


@pytest.mark.parametrize("name", DOCUMENTS)
async def test_strict_raises_and_changes_nothing(root: Path, name: str) -> None:
    """C8: whoever wants to know first is told, and what lies there stays."""
    path = root / "agents" / "ada" / name
    truncated(path)
    left = path.read_bytes()
    async with manager(root) as sessions:
        with pytest.raises(CorruptRecordError, match="perdure rebuild ada") as caught:
            await sessions.open("ada", strict=True)
        assert name in str(caught.value)
        assert path.read_bytes() == left
        # Nobody is locked out by that.
        async with sessions.open("ada") as ada:
            assert len(ada.context()) == 7
            await ada.aclose()
        await sessions.rebuild_working_context("ada")
        async with sessions.open("ada", strict=True) as ada:
            assert ada.restore_report.damaged == ()


@pytest.mark.parametrize("kind", ["file", "fork", "pruned", "compressed", "sqlite"])
async def test_strict_raises_for_a_damaged_manifest(kind: str, tmp_path: Path) -> None:
    """C8: without its manifest, no document can be used; that is told, and not only mended."""
    path = tmp_path / "store"

    def store() -> Store | Path:
        if kind == "sqlite":
            return SqliteStore(path)
        return CompressedStore(FileStore(path)) if kind == "compressed" else path

    async with connect(store(), autosave=None, shutdown=QUIET) as sessions:
        async with sessions.open("eve" if kind == "fork" else "ada") as first, first.turn():
            first.append(Message.user("hello"))
            accept(first, (item_entry(EpisodicItem(id="e1", ts=1.0, summary="They met.")),))
        if kind == "fork":
            await sessions.fork("eve", "ada")
            async with sessions.open("ada", owner="ada") as ada:
                await ada.aclose()
        if kind == "pruned":
            await sessions.prune(Retention(keep_turns=0), id="ada")
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(path)) as con, con:
            con.execute("UPDATE manifest SET data = ?", (b'{"epoch": 7}',))
    else:
        (manifest,) = (path / "agents" / "ada").glob("manifest-*.json")
        manifest.write_text('{"epoch": 7}')  # JSON, and no manifest
    async with connect(store(), autosave=None, shutdown=QUIET) as sessions:
        with pytest.raises(CorruptRecordError, match="perdure rebuild ada"):
            await sessions.open("ada", strict=True)
        plan = await sessions.plan_restore("ada")
        assert {SNAPSHOT, "session.json"} <= {one.name for one in plan.documents}
        assert not plan.is_sound
        assert (await sessions.rebuild_working_context("ada", dry_run=True)).wrong
        async with sessions.open("ada") as ada:
            assert {SNAPSHOT, "session.json"} <= set(ada.restore_report.damaged)
            assert [message.text for message in ada.context()] == ["hello"]
            assert len(await contents_of(ada).lines("episodic.jsonl")) == 1
            await ada.aclose()
        assert (await sessions.plan_restore("ada")).is_sound


async def test_a_damaged_log_raises_whether_strict_or_not(root: Path) -> None:
    """C8: a bad cache is made anew, bad truth is not."""
    log = next((root / "agents" / "ada" / "log").glob("1-0.jsonl"))
    flipped(log)
    for path in (root / "agents" / "ada").glob("manifest-*.json"):
        path.unlink()
    async with manager(root) as sessions:
        with pytest.raises(CorruptRecordError, match="is damaged at byte"):
            await sessions.open("ada")
        with pytest.raises(CorruptRecordError, match="is damaged at byte"):
            await sessions.rebuild_working_context("ada")


async def test_the_context_is_cut_the_same_however_it_comes_back(tmp_path: Path) -> None:
    """S0-2: by the cache, by catching up, and by a rebuild."""
    limits = Limits(context_bytes=2000)
    root = tmp_path / "store"
    async with connect(root, autosave=None, shutdown=QUIET, limits=limits) as sessions:
        async with sessions.open("ada") as ada:
            for number in range(60):
                ada.append(Message.user(f"message {number} " + "x" * number))
            before = ada.context()
    assert 1 < len(before) < 60
    for lose in ((), (SNAPSHOT,), (SNAPSHOT, "session.json")):
        for name in lose:
            (root / "agents" / "ada" / name).unlink(missing_ok=True)
        async with connect(root, autosave=None, shutdown=QUIET, limits=limits) as sessions:
            async with sessions.open("ada") as ada:
                assert ada.context() == before


# other stores: what lay there is a blob afterwards


def damage_backing(backing: MemoryBacking) -> bytes:
    documents = backing.sessions[KEY].documents
    documents[SNAPSHOT] = documents[SNAPSHOT][:-9]
    return documents[SNAPSHOT]


def damage_database(path: Path) -> bytes:
    with contextlib.closing(sqlite3.connect(path)) as con, con:
        (data,) = con.execute("SELECT data FROM document WHERE name = ?", (SNAPSHOT,)).fetchone()
        con.execute("UPDATE document SET data = ? WHERE name = ?", (data[:-9], SNAPSHOT))
    return data[:-9]


@pytest.mark.parametrize("kind", ["memory", "sqlite", "encrypted"])
async def test_what_lay_in_a_database_is_kept_as_a_blob(kind: str, tmp_path: Path) -> None:
    """C8: bytes that are not those of their manifest are kept, and made anew."""
    backing, path = MemoryBacking(), tmp_path / "sessions.db"

    def store() -> Store:
        if kind == "sqlite":
            return SqliteStore(path)
        inner = MemoryStore(backing=backing)
        return EncryptedStore(inner, "5a" * 32) if kind == "encrypted" else inner

    async with connect(store(), autosave=None, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as ada:
            ada.append(Message.user("hello"))
    evidence = damage_database(path) if kind == "sqlite" else damage_backing(backing)
    async with connect(store(), autosave=None, shutdown=QUIET) as sessions:
        async with sessions.open("ada") as ada:
            assert SNAPSHOT in ada.restore_report.damaged
            assert [message.text for message in ada.context()] == ["hello"]
            ada.append(Message.user("on"))
            await ada.aclose()
        kept = store_below(sessions)
        whose = KEY.blobs
        blobs = [await kept.get_blob(whose, name) for name in await kept.blob_names(whose)]
        assert evidence in blobs
        assert (await sessions.plan_restore("ada")).is_sound


async def test_the_tail_is_loaded_by_whole_groups(tmp_path: Path) -> None:
    """S0-2, C8: of a group that was cut anywhere by a kill, nothing comes back, or all of it."""
    seen: set[int] = set()
    root = tmp_path / "store"
    async with manager(root) as sessions, sessions.open("ada") as ada:
        ada.append(Message.user("first"))
        await ada.save()
        whole = sum(one.stat().st_size for one in (root / "agents" / "ada" / "log").iterdir())
        asks = Message.assistant("Let me see.", tool_calls=[ToolCall("c1", "look")])
        ada.append(asks, Message.tool("c1", {"depth": 4}), Message.assistant("4 m"))
        await ada.save()
        shutil.copytree(root, tmp_path / "left")
    (name,) = [one.name for one in (tmp_path / "left" / "agents" / "ada" / "log").iterdir()]
    size = (tmp_path / "left" / "agents" / "ada" / "log" / name).stat().st_size
    for cut in (*range(whole, size, 97), size - 1, size):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "left", copy)
        with (copy / "agents" / "ada" / "log" / name).open("r+b") as file:
            file.truncate(cut)
        async with manager(copy) as sessions, sessions.open("ada") as ada:
            seen.add(len(ada.context()))
            assert ada.context()[0].text == "first"
    assert seen == {1, 4}
