"""Damage one file at a time, by a bit, by its length or as a whole, and read what is left.

Whatever is damaged: what is returned is right, as far as it goes, or there is an error that
says so; what is cut from a log's end is kept and told; and the session next to it is as it was. In a database, where sessions share pages, that
one may be refused as well. Every way to read ends with data or one of perdure's own errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from perdure.errors import CorruptRecordError, PerdureError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Record
from perdure.store import PendingItem, SessionQuery, Store
from perdure.stores.file import FileStore
from tests.crash import places
from tests.crash.forks import Child, Report
from tests.crash.scratch import scratch
from tests.crash.work import AGENT, Lost, Writer, read, roll, run, texts_of

OTHER = SessionKey("other")
PAGE, SECTOR = 4096, 512


async def prepare(store: Store, report: Report) -> None:
    """Leave a session with several segments, epochs and documents, and one beside it."""
    await roll(store, report)
    writer = await Writer.take(store, AGENT, report)
    await writer.append(2)
    await writer.fold()
    await writer.append(1)
    other = await Writer.take(store, OTHER, report)
    await other.append(2)
    await other.fold()
    for key in (AGENT, OTHER):
        await store.enqueue(key, [PendingItem("op", MESSAGE, b'"posted"', 1.0)])
    data = b"blob" * 500
    await store.put_blobs("", {hashlib.sha256(data).hexdigest(): data})


def damage(path: Path, dice: random.Random) -> str:
    """Damage a file, and say how."""
    data = bytearray(path.read_bytes())
    place = dice.randrange(len(data))
    if path.suffix == ".db" and dice.random() < 0.75:
        return _damage_pages(path, data, dice)
    how = dice.random()
    if how < 0.25:
        path.write_bytes(data[:place])
        return f"{path.name} cut at {place} of {len(data)}"
    if how < 0.35:  # what git's autocrlf, FTP in text mode and editors do
        path.write_bytes(data.replace(b"\n", b"\r\n") if b"\n" in data else b"\r\n")
        return f"{path.name} with CR LF for LF"
    if how < 0.45:
        path.write_bytes(data[:place] + bytes(len(data) - place))
        return f"{path.name} with zeros from {place} of {len(data)} on"
    if how < 0.55:
        place = (
            data.rfind(b"\n", 0, -1) + 1 + dice.randrange(len(data) - data.rfind(b"\n", 0, -1) - 1)
        )
    bit = dice.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name} with bit {bit} of byte {place} of {len(data)} turned"


def _damage_pages(path: Path, data: bytearray, dice: random.Random) -> str:
    """Damage a database as disks do, in whole sectors, or where its pages say what they are."""
    page = dice.randrange(len(data) // PAGE) * PAGE
    how = dice.choice(("bytes", "head", "zeros", "another's", "noise"))
    if how == "bytes":
        for _ in range(dice.randint(2, 9)):
            data[page + dice.randrange(PAGE)] = dice.randrange(256)
    elif how == "head":  # what kind of page it is, and where its cells lie
        data[page + dice.randrange(40)] = dice.randrange(256)
    elif how == "zeros":
        at = page + dice.randrange(PAGE // SECTOR) * SECTOR
        data[at : at + SECTOR] = bytes(SECTOR)
    elif how == "another's":
        other = dice.randrange(len(data) // PAGE) * PAGE
        data[page : page + PAGE] = data[other : other + PAGE]
    else:
        at = page + dice.randrange(PAGE - 64)
        data[at : at + 64] = dice.randbytes(64)
    path.write_bytes(data)
    return f"{path.name} with {how} in page {page // PAGE + 1}"


async def read_all(store: Store) -> list[str]:
    """Read in every way there is; return what is not one of perdure's own errors."""

    async def log(**how: Any) -> None:
        async with contextlib.aclosing(store.read_log(AGENT, **how)) as chunks:
            async for _ in chunks:
                pass

    async def blobs() -> None:
        for name in await store.blob_names(""):
            await store.get_blob("", name)

    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "sessions": store.sessions,
        "newest": lambda: store.sessions(SessionQuery(newest_first=True)),
        "by owner": lambda: store.sessions(SessionQuery(owner="somebody", tag="x")),
        "tenants": store.tenants,
        "waiting": store.sessions_with_pending_items,
        "head": lambda: store.head(AGENT),
        "holder": lambda: store.holder(AGENT),
        "backwards": lambda: log(reverse=True),
        "tail": lambda: log(after=4, limit=2),
        "documents": lambda: store.read_documents(AGENT, ["session.json"]),
        "blobs": blobs,
        "heartbeat": store.heartbeat,
        "post": lambda: store.enqueue(OTHER, [PendingItem("again", MESSAGE, b'"more"', 1.0)]),
        "sweep": lambda: store.sweep("", (), 0.0),
    }
    for name in ("integrity_problems", "readable_keys"):
        if hasattr(store, name):
            ways[name] = getattr(store, name)
    problems = []
    for name, way in ways.items():
        try:
            await way()
        except PerdureError:
            continue
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            problems.append(f"{name}: {error!r} at {where.filename}:{where.lineno}")
    return problems


async def is_told(store: Store, what: str) -> bool:
    """Return whether the store says that the end of its log was cut.

    A file that ends with a whole group is a log: nobody can know that it was longer.
    """
    return (
        " cut at " in what or not isinstance(store, FileStore) or bool(await store.log_tails(AGENT))
    )


async def look(store: Store, whole: list[Record], what: str) -> tuple[list[str], bool]:
    """Read a session; return what is wrong with that, and whether the damage was seen."""
    problems: list[str] = []
    seen = False
    try:
        records = await read(store, AGENT)
        if records != whole[: len(records)]:
            problems.append(f"a log of {len(records)} that never was")
        seen = len(records) < len(whole)
        if seen and not await is_told(store, what):
            problems.append(f"{len(whole) - len(records)} records are cut, and nothing says so")
    except CorruptRecordError:
        seen = True
    try:
        found = await store.read_documents(AGENT)
    except PerdureError:
        return problems, True
    for name, document in found.found.items():
        texts = texts_of(whole[: document.as_of_seq])
        if json.loads(document.data) not in (texts, len(texts)):
            problems.append(f"{name} as of {document.as_of_seq} is not the log")
    return problems, seen or bool(found.damaged) or not found.found


async def write_on(store: Store, whole: list[Record], what: str) -> list[str]:
    """Take the damaged session over, if that is possible, and append."""
    told: list[str] = []
    try:
        writer = await Writer.take(store, AGENT, lambda *event: told.append(str(event)))
        await writer.append(1)
        after = texts_of(await read(store, AGENT))
    except (PerdureError, Lost):
        return []
    kept, old = after[:-1], texts_of(whole)
    if kept != old[: len(kept)]:
        return [f"a log of {after} that never was"]
    if kept != old and not await is_told(store, what):
        return [f"{len(old) - len(kept)} records were cut, and nothing says so"]
    return []


def flip(*, cycles: int, seed: int = 0) -> dict[str, object]:
    """Damage that many times, always from the same healthy root."""
    dice = random.Random(seed)

    def program(report: Report) -> None:
        with scratch() as top:
            run(top / "healthy", prepare, lambda *_: None)
            is_database = places.chosen() == "sqlite"
            whole: list[Record] = []
            beside: list[Record] = []

            async def remember(store: Store, _: Report) -> None:
                whole.extend(await read(store, AGENT))
                beside.extend(await read(store, OTHER))

            run(top / "healthy", remember, lambda *_: None)
            session = top / "healthy" / "agents" / AGENT.agent
            files = [path for path in session.rglob("*") if path.is_file()]
            files = [top / "healthy" / "store.db"] if is_database else files
            names = sorted(
                path.relative_to(top / "healthy") for path in files if path.stat().st_size
            )
            for number in range(cycles):
                root = top / str(number)
                shutil.copytree(top / "healthy", root)
                what = damage(root / names[number % len(names)], dice)

                async def judge(store: Store, tell: Report, what: str = what) -> None:
                    problems, seen = await look(store, whole, what)
                    problems += await read_all(store) if is_database else []
                    try:
                        if await read(store, OTHER) != beside:
                            problems.append("the session beside it is not as it was")
                    except CorruptRecordError:
                        if not is_database:
                            raise
                        seen = True
                    tell("flipped", seen)
                    for problem in problems + await write_on(store, whole, what):
                        tell("problem", f"{what}: {problem}")

                try:
                    run(root, judge, report)
                except (PerdureError, Lost):
                    if not is_database:  # of which not even the first page may be right
                        raise
                    report("flipped", True)
                except Exception as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    report("problem", f"{what}: {error!r} at {where.filename}:{where.lineno}")
                shutil.rmtree(root)

    child = Child(program)
    events = child.wait()
    seen = [event[1] for event in events if event[0] == "flipped"]
    problems = [event[1] for event in events if event[0] == "problem"]
    if child.status and not problems:
        problems.append(f"the child ended with status {child.status}")
    return {"cycles": len(seen), "noticed": sum(seen), "problems": problems, "seed": seed}
