"""Files of others, made hostile: bundles, exports, folders, databases of SDKs and backups.

Each is a sound one that was changed: in its values, its lines, its bytes, its schema. What has a
checksum gets it anew, mostly, so that what is behind the checksum is tried as well.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio

import perdure
from perdure import Message, PerdureError, Shutdown, ToolCall
from perdure.cli.app import run
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import EPOCH, Entry
from perdure.store import Batch, Status, Store, take_after
from perdure.stores.memory import MemoryStore
from perdure.transfer import backup, restore_backup, verify_backup
from perdure.transfer.backup_view import JOURNAL
from perdure.transfer.migration import keys_of

QUIET: Final = Shutdown(signals=False)
STRANGE: Final[list[Any]] = [
    *(0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 10**18, 10**30, 1e308, -0.0, True, False, None),
    *("", "x", "a" * 2000, "\x00", "é😀", "../../x", "perdure:keyring", "perdure:scope", "default"),
    *([], {}, [[]], {"": {}}, [None] * 50, {"key": "value", "types": {"/x": "bytes"}}),
    *(
        "message",
        "turn",
        "base",
        "state",
        "memory_set",
        "retract",
        "taken",
        "context",
        "gap",
        "epoch",
    ),
]
DEEP: Final = "[" * 300 + "]" * 300


class Samples:
    """Sound files in a folder, to be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundles: list[bytes] = []
        self.state: bytes = b""
        self.databases: dict[str, Path] = {}
        self.backup: list[tuple[SessionKey, list[Entry], Any]] = []
        self.blobs: dict[str, bytes] = {}

    @classmethod
    def made(cls, folder: Path, *, sdks: bool = True) -> Samples:
        """Write them."""
        samples = cls(folder)
        store = folder / "sample"
        anyio.run(_fill, store)
        for number, id in enumerate(("ada", "copy", "fork")):
            path = folder / f"{number}.bundle"
            ran("export", id, "--layout", "bundle", "--out", path, "--store", store)
            samples.bundles.append(path.read_bytes())
        ran("export", "ada", "--out", folder / "state.json", "--store", store)
        samples.state = (folder / "state.json").read_bytes()
        ran("export", "ada", "--layout", "files", "--out", folder / "files", "--store", store)
        anyio.run(samples._back_up, store)
        if sdks:
            for sdk, write in (
                ("openai-agents", _openai),
                ("langgraph", _langgraph),
                ("adk", _adk),
            ):
                path = folder / f"{sdk}.db"
                with contextlib.suppress(ModuleNotFoundError):  # an SDK that is not installed
                    anyio.run(write, path, backend="asyncio")
                    samples.databases[sdk] = path
        return samples

    async def _back_up(self, place: Path) -> None:
        source, target = perdure.store_for(place), MemoryStore()
        for store in (source, target):
            await store.open()
        assert not (await backup(source, target)).failed
        for key in await keys_of(target, [""]):
            entries = []
            async for chunk in target.read_log(key):
                entries += [Entry(one.kind, one.payload, one.end) for one in chunk.records]
            documents = await target.read_documents(key)
            kept = [entry for entry in entries if entry.kind != EPOCH]
            self.backup.append((key, kept, documents))
        for name in await target.blob_names(""):
            self.blobs[name] = await target.get_blob("", name) or b""
        await source.aclose()


async def _fill(place: Path) -> None:
    for _ in range(3):
        async with perdure.connect(place, shutdown=QUIET) as sessions:
            async with sessions.open("ada", owner="o", tags=["t"]) as session:
                async with session.turn():
                    call = ToolCall("c", "look", {"q": 1})
                    session.append(Message.user("what"), Message.assistant("I", tool_calls=[call]))
                    session.append(Message.tool("c", {"found": "x" * 300}, name="look"))
                    session.append(Message.assistant("that"))
                session.memory.set("big", "v" * 20_000)
                session.state.set("app", {"n": [1, {"deep": b"bytes"}]})
                await session.checkpoints.create("here")
    async with perdure.connect(place, shutdown=QUIET) as sessions:
        await sessions.fork("ada", "fork")
        await sessions.copy("ada", "copy")
        await sessions.post("ada", Message.user("posted"), key="op-1")


async def _openai(path: Path) -> None:
    from agents import SQLiteSession

    for id in ("one", "two"):
        session = SQLiteSession(id, path)
        await session.add_items([{"role": "user", "content": "hi"}, {"type": "x", "n": [1]}])
        session.close()


async def _langgraph(path: Path) -> None:
    from langgraph.checkpoint.base import empty_checkpoint
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        for thread in ("one", "two"):
            config = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
            checkpoint = {**empty_checkpoint(), "channel_values": {"n": [1, "x"]}}
            at = await saver.aput(config, checkpoint, {"step": 1}, {"n": 1})  # type: ignore[arg-type]
            await saver.aput_writes(at, [("n", 2)], "task")


async def _adk(path: Path) -> None:
    from google.adk.events import Event
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    service = SqliteSessionService(str(path))
    session = await service.create_session(
        app_name="app", user_id="ada", session_id="one", state={"a": 1, "user:b": 2, "app:c": 3}
    )
    await service.append_event(session, Event(author="user", invocation_id="i"))


# How a sound thing is changed


def changed_value(value: Any, random: Random) -> Any:
    """Change a JSON value in some places."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        places = list(_places(value))
        if not places:
            return random.choice(STRANGE)
        within, at = random.choice(places)
        act = random.randrange(6)
        if act == 0:
            del within[at]
        elif act == 1 and isinstance(within, list):
            within.insert(at, json.loads(json.dumps(random.choice(STRANGE))))
        elif act == 2:
            other, there = random.choice(places)
            with contextlib.suppress(LookupError):
                within[at] = json.loads(json.dumps(other[there]))
        elif act == 3 and isinstance(within, dict):
            within[str(random.choice(STRANGE))] = within.pop(at)
        elif act == 4 and isinstance(within[at], int):
            within[at] += random.choice([-1, 1, 17, 1000, 10**6])
        else:
            within[at] = json.loads(json.dumps(random.choice(STRANGE)))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for at, item in items:
            yield value, at
            yield from _places(item)


def changed_bytes(data: bytes, random: Random) -> bytes:
    """Change some bytes, or cut or repeat a part."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 3, 20])):
        at = random.randrange(len(changed) + 1)
        act = random.randrange(5)
        if act == 0:
            del changed[at : at + random.choice([1, 10, 10_000])]
        elif act == 1:
            changed[at:at] = random.randbytes(random.choice([1, 8]))
        elif act == 2:
            changed[at:at] = changed[: random.randrange(2000)] * random.choice([1, 50])
        elif act == 3:
            changed[at:at] = random.choice(
                [DEEP.encode(), b'"', b"\n", b"\xff", b"\\ud800", b"9" * 5000]
            )
        elif at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
    return bytes(changed)


def hostile_bundle(samples: Samples, random: Random) -> bytes:
    """Return a bundle that was changed."""
    sound = random.choice(samples.bundles)
    if random.random() < 0.1:
        return changed_bytes(sound, random)
    lines = [json.loads(line) for line in sound.splitlines()[:-1]]
    for _ in range(random.choice([0, 1, 1, 3])):
        at = random.randrange(len(lines))
        lines[at] = changed_value(lines[at], random)
    for _ in range(random.choice([0, 0, 1, 2])):
        one, other = (random.randrange(len(lines)) for _ in range(2))
        lines[one], lines[other] = lines[other], lines[one]
    if random.random() < 0.2:  # numbers that leave out more and more
        gap, first = random.choice([1, 17, 100, 5000]), 2
        filler = [{"n": first + n * gap, "k": "message", "end": True, "r": {}} for n in range(2000)]
        lines[1:] = filler[: random.choice([1, 50, 2000])]
    if random.random() < 0.3:
        random.choice([_with_origin, _with_media, _with_documents])(lines, random)
    encoded = [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines]
    encoded = [line.replace(b'"@', b'"\\u0070') for line in encoded]  # as no encoder spells it
    if random.random() < 0.2:
        at = random.randrange(len(encoded))
        encoded[at] = changed_bytes(encoded[at][:-1], random).replace(b"\n", b" ") + b"\n"
    seal = {"end": len(encoded), "sha256": hashlib.sha256(b"".join(encoded)).hexdigest()}
    return b"".join(encoded) + json.dumps(seal).encode() + b"\n"


def _with_origin(lines: list[Any], random: Random) -> None:
    """Let it begin with its own history, another's, or none."""
    keys = [{"agent": agent} for agent in ("ada", "copy", "fork", "nobody")] + [None]
    number: list[int] = [0, 1, 2, 3, 17, 10**15, 2**53, 2**63, -1]
    blobs = [line["blob"] for line in lines if isinstance(line, dict) and "blob" in line]
    names: list[Any] = ["", "", *blobs[:3], "0" * 64, "../x"]
    base = {name: random.choice(keys) for name in ("parent", "moved")}
    base |= {name: random.choice(number) for name in ("at", "cut", "epoch")}
    base |= {name: random.choice(names) for name in ("kept", "folded")}
    kept = {name: value for name, value in base.items() if random.random() < 0.6}
    places = [line for line in lines if isinstance(line, dict) and {"n", "manifest"} & line.keys()]
    if places:
        place = random.choice([places[0], places[-1], random.choice(places)])
        if isinstance(place.get("manifest"), dict):
            place["manifest"]["base"] = kept
        else:
            place |= {"k": "base", "r": kept}


def _with_media(lines: list[Any], random: Random) -> None:
    """Let records refer to one blob, often, and say another size of it."""
    data = bytes(random.choice([1000, 100_000, 1024 * 1024]))
    name = hashlib.sha256(data).hexdigest()
    size = random.choice([len(data), len(data), 0, 1, 10**11])
    text = f"@erdure:media:url:image/png:{size}:1x1:{name}"
    times = random.choice([1, 11, 400, 5000])
    said = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": text}}] * times,
    }
    records = [line for line in lines if isinstance(line, dict) and "n" in line]
    for record in random.sample(records, min(len(records), random.choice([1, 1, 5]))):
        record |= {"k": random.choice(["message", "message", "context"]), "r": said}
    if random.random() < 0.8:
        lines.insert(1, {"blob": name, "data": base64.b64encode(data).decode()})


def _with_documents(lines: list[Any], random: Random) -> None:
    """Let it have many documents; how large they may be is tried without their making."""
    count, size = random.choice([(11_000, 1), (3, 1_000_000), (50, 1000)])
    documents = [{"document": f"d{n}.json", "as_of": 2, "text": "x" * size} for n in range(count)]
    at = len(lines) - 1 if random.random() < 0.7 else len(lines)
    lines[at:at] = documents


def hostile_state(samples: Samples, random: Random) -> bytes:
    """Return a whole session as JSON that was changed."""
    state = json.loads(samples.state)
    if random.random() < 0.5:
        state.pop("perdure", None)  # as other programs write it
    if random.random() < 0.2:
        return changed_bytes(json.dumps(state).encode(), random)
    return json.dumps(changed_value(state, random)).encode()


def hostile_folder(samples: Samples, random: Random, folder: Path) -> Path:
    """Return a folder with an export's files, some of them changed."""
    shutil.copytree(samples.folder / "files", folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in random.sample(paths, min(len(paths), random.choice([1, 1, 2, 4]))):
        data = path.read_bytes()
        act = random.randrange(4)
        if act == 0:
            path.write_bytes(changed_bytes(data, random))
        elif act == 1:
            path.unlink()
        elif path.suffix == ".jsonl":
            lines = [changed_value(json.loads(line), random) for line in data.splitlines()]
            path.write_text("\n".join(map(json.dumps, lines)))
        else:
            with contextlib.suppress(ValueError):
                path.write_text(json.dumps(changed_value(json.loads(data), random)))
    if random.random() < 0.05:  # a hole takes no room
        with random.choice(paths).open("ab") as file:
            file.truncate(2**33)
    return folder


def hostile_database(samples: Samples, random: Random, path: Path) -> str:
    """Write an SDK's database that was changed, and return which SDK's."""
    sdk, sound = random.choice(sorted(samples.databases.items()))
    shutil.copyfile(sound, path)
    if random.random() < 0.2:
        path.write_bytes(changed_bytes(path.read_bytes(), random))
        return sdk
    with (
        contextlib.closing(sqlite3.connect(path)) as connection,
        contextlib.suppress(sqlite3.Error),
    ):
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        for _ in range(random.choice([1, 2, 4])):
            table = random.choice(tables)
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            column, act = random.choice(columns), random.randrange(8)
            if act == 0:
                grown = random.choice(
                    ["printf('%.*c', 900000000, 'x')", "zeroblob(900000000)", "1/0"]
                )
                connection.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO was")
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} AS ({grown})")
                break  # whoever reads it here waits, too
            if act == 1:
                connection.execute(f"ALTER TABLE {table} RENAME TO was")
                endless = (
                    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x FROM n"
                )
                connection.execute(f"CREATE VIEW {table} AS SELECT w.* FROM was w, ({endless})")
                break
            if act == 2:
                connection.execute(f"UPDATE {table} SET {column} = zeroblob(1000000)")
            elif act == 3:
                connection.execute(f"INSERT INTO {table} SELECT * FROM {table}")
            else:
                value = random.choice(STRANGE)
                stored = value if isinstance(value, str | float | None) else json.dumps(value)
                if act == 4:
                    stored = random.choice([DEEP, "{}", "[", b"\xff", random.randbytes(30)])
                elif act == 5:
                    (kept,) = connection.execute(f"SELECT {column} FROM {table}").fetchone() or (
                        None,
                    )
                    with contextlib.suppress(ValueError, TypeError):
                        stored = json.dumps(changed_value(json.loads(kept), random))
                connection.execute(f"UPDATE {table} SET {column} = ?", (stored,))
        connection.commit()
    return sdk


async def hostile_backup(samples: Samples, random: Random) -> Store:
    """Return a backup that was changed."""
    store = MemoryStore()
    await store.open()
    await store.put_blobs(
        "", {name: data for name, data in samples.blobs.items() if random.random() > 0.05}
    )
    for key, kept, documents in samples.backup:
        entries = list(kept)
        for _ in range(random.choice([0, 0, 1, 3])):
            at = random.randrange(len(entries))
            entry, act = entries[at], random.randrange(5)
            if act == 0:
                del entries[at]
            elif act == 1:
                entries.insert(random.randrange(len(entries)), entry)
            elif act == 2:
                entries[at] = entry._replace(
                    kind=random.choice(["kept", "anew", "point", "made", "x"])
                )
            else:
                payload = changed_value(json.loads(entry.payload), random)
                entries[at] = entry._replace(payload=json.dumps(payload).encode())
            if not entries:
                break
        if random.random() < 0.1 and key != JOURNAL:
            key = SessionKey(random.choice(["perdure:keyring", "perdure:scope", "z"]), "tenant")  # noqa: PLW2901
        grant = await take_after(store, key, after=0)
        if entries:
            batch = Batch(key, grant.epoch, grant.head + 1, tuple(entries))
            if (await store.append_many([batch]))[0].status is not Status.OK:
                continue  # a payload that no store takes
        if documents.manifest is not None:
            manifest: Manifest = documents.manifest
            found = {name: document.data for name, document in documents.found.items()}
            if found and random.random() < 0.2:
                name = random.choice(sorted(found))
                found[name] = changed_bytes(found[name], random)
            with contextlib.suppress(PerdureError):
                await store.write_documents(key, found, manifest)
        await store.release(key, grant.epoch)
    return store


# What reads it


def ran(*tokens: object) -> str:
    """Run a command in this process, and return what it said; its errors are raised."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        run([*map(str, tokens), "--debug"])
    return out.getvalue()


def _imported(folder: Path, random: Random, *what: object) -> None:
    """Import, and look at what has come: into a store in memory, or one that is checked then."""
    if random.random() < 0.7:
        said = ran("import", *what, "--store", "memory:")
    else:
        place = random.choice([folder / "to", f"sqlite:///{folder}/to.db"])
        said = ran("import", *what, "--store", place)
        ran("check", "--store", place)
        with contextlib.suppress(PerdureError):
            ran("show", "ada", "--store", place)
        with contextlib.suppress(PerdureError):
            anyio.run(_opened, place)
    assert "MemoryError" not in said


async def _opened(place: object) -> None:
    async with perdure.connect(str(place), shutdown=QUIET) as sessions:
        async with sessions.open("ada", create=False) as session:
            await session.history(limit=1000)
            session.context()


def bundles(samples: Samples, random: Random, folder: Path) -> None:
    """Import a bundle."""
    path = folder / "x.bundle"
    path.write_bytes(hostile_bundle(samples, random))
    if random.random() < 0.03:
        with path.open("ab") as file:
            file.truncate(2**33)
    _imported(folder, random, path)


def states(samples: Samples, random: Random, folder: Path) -> None:
    """Import a session as one JSON value."""
    path = folder / "x.json"
    path.write_bytes(hostile_state(samples, random))
    if random.random() < 0.03:
        with path.open("ab") as file:
            file.truncate(2**33)
    _imported(folder, random, path)


def folders(samples: Samples, random: Random, folder: Path) -> None:
    """Import a folder of files."""
    _imported(folder, random, hostile_folder(samples, random, folder / "x"))


def databases(samples: Samples, random: Random, folder: Path) -> None:
    """Import an SDK's database."""
    sdk = hostile_database(samples, random, folder / "x.db")
    _imported(folder, random, sdk, folder / "x.db")


def backups(samples: Samples, random: Random, folder: Path) -> None:
    """Verify a backup, and restore it."""

    async def read() -> None:
        source, target = await hostile_backup(samples, random), MemoryStore()
        await target.open()
        await verify_backup(source)
        await restore_backup(source, target)
        for key in await keys_of(target, [""]):
            assert not key.agent.startswith("perdure:k")
            with contextlib.suppress(PerdureError):
                async with perdure.connect(target, shutdown=QUIET) as sessions:
                    await sessions.load(key.agent, session=key.session)

    anyio.run(read)


TARGETS: Final[dict[str, Callable[[Samples, Random, Path], None]]] = {
    one.__name__: one for one in (bundles, states, folders, databases, backups)
}


def attempt(target: str, samples: Samples, random: Random, folder: Path) -> bool:
    """Read one hostile thing in an empty folder; False if it was refused. All else is a fault."""
    try:
        TARGETS[target](samples, random, folder)
    except PerdureError:
        return False
    return True
