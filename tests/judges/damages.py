"""Damage planted in sound stores and backups, and which commands find it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import perdure
from perdure.archive import Archives
from perdure.checkpoints.chain import node_of
from perdure.memory.index import MEMORY, MemoryIndex
from perdure.records.archives import blobs_of, entry_of
from perdure.records.checkpoints import ExplicitState
from perdure.records.json import decode
from perdure.records.manifest import FoldedDocuments
from perdure.records.media import referred
from perdure.records.messages import RESULT_REF
from perdure.session.internals import store_of, working_context
from perdure.session.stored import followed
from perdure.transfer import verify_backup
from tests.crash.scratch import scratch
from tests.judges.commands import Ran, run
from tests.judges.writers import fill

KINDS = ("file", "sqlite")


class Place:
    """A store of a kind, whose bytes can be changed."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path if kind == "file" else path.with_suffix(".db")
        self.url = str(self.path) if kind == "file" else f"sqlite:///{self.path}"

    def copied(self, path: Path) -> Place:
        """Return a copy at another path."""
        other = Place(self.kind, path)
        if self.kind == "file":
            shutil.copytree(self.path, other.path)
        else:
            shutil.copy(self.path, other.path)
        return other

    def blob(self, name: str, change: Callable[[bytes], bytes | None]) -> None:
        """Change or lose a blob."""
        if self.kind == "file":
            [path] = [path for path in self.path.rglob(name) if path.is_file()]
            _change(path, change)
        else:
            self._row("blob", f"name = '{name}'", change)

    def record(self, id: str, change: Callable[[bytes], bytes | None]) -> None:
        """Change or lose some of a session's records, amid its log."""
        if self.kind == "file":
            [path] = (self._folder(id) / "log").iterdir()
            lines = path.read_bytes().splitlines(keepends=True)
            middle = len(lines) // 2
            changed = change(lines[middle])
            lines[middle : middle + 1] = [] if changed is None else [changed]
            path.write_bytes(b"".join(lines))
        else:
            where = f"session = {self._number(id)} order by first limit 1 offset 1"
            self._row("log", where, change)

    def document(self, id: str, name: str, change: Callable[[bytes], bytes | None]) -> None:
        """Change or lose one of a session's documents."""
        if self.kind == "file":
            _change(self._folder(id) / name, change)
        else:
            self._row("document", f"session = {self._number(id)} and name = '{name}'", change)

    def manifest(self, id: str, change: Callable[[bytes], bytes | None]) -> None:
        """Change or lose the manifest of a session's documents."""
        if self.kind == "file":
            [path] = self._folder(id).glob("manifest-*.json")
            _change(path, change)
        else:
            self._row("manifest", f"session = {self._number(id)}", change)

    def _folder(self, id: str) -> Path:
        return self.path / "agents" / id

    def _number(self, id: str) -> int:
        with self._database() as database:
            found = database.execute("select id from session where agent = ?", [id]).fetchone()
        return int(found[0])

    def _row(self, table: str, where: str, change: Callable[[bytes], bytes | None]) -> None:
        with self._database() as database:
            query = f"select rowid, data from {table} where {where}"
            row, data = database.execute(query).fetchone()
            changed = change(data)
            if changed is None:
                database.execute(f"delete from {table} where rowid = ?", [row])
            else:
                database.execute(f"update {table} set data = ? where rowid = ?", [changed, row])

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self.path)
        with database:
            yield database
        database.close()


def _change(path: Path, change: Callable[[bytes], bytes | None]) -> None:
    changed = change(path.read_bytes())
    path.unlink() if changed is None else path.write_bytes(changed)


def lost(_: bytes) -> None:
    """Leave nothing."""


def flipped(data: bytes) -> bytes:
    """Change one bit."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class Names(NamedTuple):
    """Blobs of a sound store, one for each way in which a session reaches them."""

    value: str
    """A memory value that the log has, too."""
    only_value: str
    """One that only its blob has."""
    result: str
    image: str
    root: str
    node: str
    leaf: str
    page: str
    file: str
    folded: str
    document: str


async def names_of(url: str) -> Names:
    """Find a blob for each way in which the sessions that `fill` makes reach them."""
    async with perdure.connect(url, read_only=True) as sessions:
        ada = await sessions.load("ada")
        pruned = await sessions.load("pruned")
        assert ada is not None
        assert pruned is not None
        store = followed(store_of(ada))

        async def blob(name: str, view: Any = ada) -> bytes:
            data = await store.get_blob(view.key.blobs, name)
            assert data is not None, name
            return data

        async def value(view: Any, *, upto: int) -> str:
            documents = await store.read_documents(view.key)
            index = MemoryIndex.of_document(documents.found[MEMORY].data)
            large = [one for one in index.entries.values() if isinstance(one.sha256, str)]
            chosen = [one for one in large if isinstance(one.seq, int) and one.seq <= upto]
            return str(chosen[0].sha256)

        base = await store.base_of(pruned.key)
        assert base is not None
        result = next(
            message.tool_result.extra[RESULT_REF]
            for message in ada.context()
            if message.tool_result is not None
        )
        image = next(
            medium.name
            for payload in working_context(ada).messages()
            for medium in referred(payload)
        )
        [state] = [one.state for one in await ada.checkpoints.states() if one.label == "large"]
        assert isinstance(state, ExplicitState)
        root = node_of(await blob(state.root))
        assert root.level == 2
        node = node_of(await blob(root.below[0].name))
        archive = await Archives(ada).find()
        entries = [entry_of(line, "") for line in (await blob(archive.pages[0])).splitlines()]
        folded = decode(await blob(base.folded, pruned), FoldedDocuments)
        return Names(
            value=await value(ada, upto=2**62),
            only_value=await value(pruned, upto=base.cut),
            result=decode(bytes(result))["sha256"],
            image=image,
            root=state.root,
            node=root.below[0].name,
            leaf=node.below[0].name,
            page=archive.pages[0],
            file=next(name for entry in entries for name in blobs_of(entry)),
            folded=base.folded,
            document=folded.documents["working_context_snapshot.json"].sha256,
        )


CHECK, CHECKPOINTS, BACKUP, MIGRATE, EXPORT = "check", "checkpoints", "backup", "migrate", "export"
COPIES = (BACKUP, MIGRATE, EXPORT)
ALL = (CHECK, *COPIES)


class Damage(NamedTuple):
    """Damage to a store."""

    what: str
    id: str
    """The session that has it."""
    plant: Callable[[Place, Names], None]
    found_by: tuple[str, ...] = ALL
    """The commands that look at it. What the others make without it is whole."""


def _document(name: str, change: Callable[[bytes], bytes | None]) -> Callable[[Place, Names], None]:
    return lambda at, _: at.document("ada", name, change)


STATES = (*ALL, CHECKPOINTS)
REBUILT = (CHECK, MIGRATE, EXPORT)
"""A backup leaves documents out that the log folds to."""
STORE = [
    Damage("a record changed", "ada", lambda at, _: at.record("ada", flipped), STATES),
    Damage("a record lost", "ada", lambda at, _: at.record("ada", lost), STATES),
    Damage("a document flipped", "ada", _document("session.json", flipped), REBUILT),
    Damage("a document lost", "ada", _document("memory.json", lost), REBUILT),
    Damage(
        "the manifest flipped",
        "ada",
        lambda at, _: at.manifest("ada", flipped),
        REBUILT,
    ),
    Damage("a memory value lost", "ada", lambda at, n: at.blob(n.value, lost), (CHECK,)),
    Damage("a memory value flipped", "ada", lambda at, n: at.blob(n.value, flipped), (CHECK,)),
    Damage("a memory value lost, and pruned", "pruned", lambda at, n: at.blob(n.only_value, lost)),
    Damage(
        "a memory value flipped, and pruned",
        "pruned",
        lambda at, n: at.blob(n.only_value, flipped),
    ),
    Damage("a tool result lost", "ada", lambda at, n: at.blob(n.result, lost)),
    Damage("a tool result flipped", "ada", lambda at, n: at.blob(n.result, flipped)),
    Damage("an image lost", "ada", lambda at, n: at.blob(n.image, lost)),
    Damage("an image flipped", "ada", lambda at, n: at.blob(n.image, flipped)),
    Damage("the root of a state lost", "ada", lambda at, n: at.blob(n.root, lost), STATES),
    Damage("a node of a state lost", "ada", lambda at, n: at.blob(n.node, lost), STATES),
    Damage("a chunk of a state lost", "ada", lambda at, n: at.blob(n.leaf, lost), STATES),
    Damage("a chunk of a state flipped", "ada", lambda at, n: at.blob(n.leaf, flipped), STATES),
    Damage("a page of an archive lost", "ada", lambda at, n: at.blob(n.page, lost)),
    Damage("a file of an archive lost", "ada", lambda at, n: at.blob(n.file, lost)),
    Damage("the documents at a cut lost", "pruned", lambda at, n: at.blob(n.folded, lost)),
    Damage("a document at a cut flipped", "pruned", lambda at, n: at.blob(n.document, flipped)),
    Damage("a record of a copy changed", "copied", lambda at, _: at.record("copied", flipped)),
]

VERIFY, RESTORE = "backup --verify", "restore-backup"
BOTH = (VERIFY, RESTORE)
BACKUPS = [
    Damage("a record changed", "ada", lambda at, _: at.record("ada", flipped), BOTH),
    Damage("a record lost", "ada", lambda at, _: at.record("ada", lost), BOTH),
    Damage(
        "a document flipped", "ada", lambda at, _: at.document("ada", "memory.json", flipped), BOTH
    ),
    Damage("the manifest flipped", "ada", lambda at, _: at.manifest("ada", flipped), (VERIFY,)),
    Damage("a memory value lost", "ada", lambda at, n: at.blob(n.value, lost), (VERIFY,)),
    Damage("a memory value lost, and pruned", "pruned", lambda at, n: at.blob(n.only_value, lost)),
    Damage("a tool result lost", "ada", lambda at, n: at.blob(n.result, lost)),
    Damage("the root of a state lost", "ada", lambda at, n: at.blob(n.root, lost)),
    Damage("a chunk of a state flipped", "ada", lambda at, n: at.blob(n.leaf, flipped)),
    Damage("a file of an archive lost", "ada", lambda at, n: at.blob(n.file, lost)),
    Damage("a record of a copy lost", "copied", lambda at, _: at.record("copied", lost), BOTH),
]
BACKUPS = [one._replace(found_by=BOTH) if one.found_by == ALL else one for one in BACKUPS]


def judge(place: Place, id: str, top: Path) -> dict[str, Ran]:
    """Run each command that judges a store, or makes a copy that it calls whole."""
    url = place.url
    return {
        CHECK: run(["check", "--store", url]),
        CHECKPOINTS: run(["checkpoints", id, "--verify", "--store", url]),
        BACKUP: run(["backup", url, str(top / "new backup"), "--verify"]),
        MIGRATE: run(["migrate", url, str(top / "new copy")]),
        EXPORT: run(
            ["export", id, "--layout", "bundle", "--out", str(top / "bundle"), "--store", url]
        ),
    }


async def verified(url: str) -> Ran:
    """Verify a backup as it is: ``backup --verify`` first writes again what it finds damaged."""
    store = perdure.store_for(url)
    await store.open()
    try:
        report = await verify_backup(store)
    finally:
        await store.aclose()
    said = [f"{name}: {problem}" for name, problem in report.problems.items()]
    return Ran([VERIFY, url], int(bool(said)), "\n".join(said))


def judge_backup(backup: Place, top: Path) -> dict[str, Ran]:
    """Run what judges a backup."""
    return {
        VERIFY: asyncio.run(verified(backup.url)),
        RESTORE: run(["restore-backup", backup.url, str(top / "restored")]),
    }


class Sound(NamedTuple):
    """A sound store and its backup, to be copied and damaged."""

    store: Place
    backup: Place
    names: Names


def make(kind: str, top: Path) -> Sound:
    """Fill a store, and back it up."""
    store, backup = Place(kind, top / "store"), Place(kind, top / "backup")
    asyncio.run(fill(store.url))
    assert run(["backup", store.url, backup.url]).status == 0
    return Sound(store, backup, asyncio.run(names_of(store.url)))


def found(sound: Sound, damage: Damage, top: Path, *, in_backup: bool) -> dict[str, Ran]:
    """Plant damage in a copy, and return what each command says."""
    if not in_backup:
        store = sound.store.copied(top / "store")
        damage.plant(store, sound.names)
        return judge(store, damage.id, top)
    backup = sound.backup.copied(top / "backup")
    damage.plant(backup, sound.names)
    return judge_backup(backup, top)


def missed(damage: Damage, ran: dict[str, Ran]) -> list[str]:
    """Return which commands should have found it, or should have found nothing."""
    names = [name for name in ran if name != CHECKPOINTS or name in damage.found_by]
    return [
        name for name in names if (name in damage.found_by) != is_found(name, damage, ran[name])
    ]


def is_found(name: str, damage: Damage, said: Ran) -> bool:
    """Say whether a command found it, and named the session unless it was given that one alone."""
    return said.status == 1 and (name in {CHECKPOINTS, EXPORT} or f"{damage.id}: " in said.said)


def show(kind: str) -> int:
    """Print a table of damages and commands; return 1 if any was missed."""
    bad = 0
    with scratch() as top:
        (top / "sound").mkdir()
        sound = make(kind, top / "sound")
        for title, damages, in_backup in (("store", STORE, False), ("backup", BACKUPS, True)):
            print(f"\n{'damage to a ' + title:<44} found by")
            for number, damage in enumerate(damages):
                place = top / f"{title} {number}"
                place.mkdir()
                ran = found(sound, damage, place, in_backup=in_backup)
                wrong = missed(damage, ran)
                words = [name for name, said in ran.items() if said.status]
                print(f"{damage.what:<44} {', '.join(words) or 'none'}", end="")
                print(f"   WRONG: {', '.join(wrong)}" if wrong else "")
                for name in wrong:
                    print("    ", ran[name].line)
                bad += bool(wrong)
                shutil.rmtree(place)
    return 1 if bad else 0
