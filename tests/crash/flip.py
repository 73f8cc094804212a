"""Damage one file at a time, by a bit or by its length, and read what is left.

Whatever is damaged: what is returned is right, as far as it goes, or there is an error that
says so; and the session next to it is as it was.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from perdure.errors import CorruptRecordError, PerdureError
from perdure.model.keys import SessionKey
from perdure.model.records import Record
from perdure.store import Store
from tests.crash.forks import Child, Report
from tests.crash.scratch import scratch
from tests.crash.work import AGENT, Lost, Writer, read, roll, run, texts_of

OTHER = SessionKey("other")


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


def damage(path: Path, dice: random.Random) -> str:
    """Damage a file, and say how."""
    data = bytearray(path.read_bytes())
    place = dice.randrange(len(data))
    if dice.random() < 0.25:
        path.write_bytes(data[:place])
        return f"{path.name} cut at {place} of {len(data)}"
    bit = dice.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name} with bit {bit} of byte {place} of {len(data)} turned"


async def look(store: Store, whole: list[Record]) -> tuple[list[str], bool]:
    """Read a session; return what is wrong with that, and whether the damage was seen."""
    problems: list[str] = []
    seen = False
    try:
        records = await read(store, AGENT)
        if records != whole[: len(records)]:
            problems.append(f"a log of {len(records)} that never was")
        seen = len(records) < len(whole)
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


async def write_on(store: Store, whole: list[Record]) -> list[str]:
    """Take the damaged session over, if that is possible, and append."""
    told: list[str] = []
    try:
        writer = await Writer.take(store, AGENT, lambda *event: told.append(str(event)))
        await writer.append(1)
        after = texts_of(await read(store, AGENT))
    except (PerdureError, Lost):
        return []
    kept, old = after[:-1], texts_of(whole)
    return [] if kept == old[: len(kept)] else [f"a log of {after} that never was"]


def flip(*, cycles: int, seed: int = 0) -> dict[str, object]:
    """Damage that many times, always from the same healthy root."""
    dice = random.Random(seed)

    def program(report: Report) -> None:
        with scratch() as top:
            run(top / "healthy", prepare, lambda *_: None)
            whole: list[Record] = []
            beside: list[Record] = []

            async def remember(store: Store, _: Report) -> None:
                whole.extend(await read(store, AGENT))
                beside.extend(await read(store, OTHER))

            run(top / "healthy", remember, lambda *_: None)
            session = top / "healthy" / "agents" / AGENT.agent
            files = [path for path in session.rglob("*") if path.is_file()]
            names = sorted(
                path.relative_to(top / "healthy") for path in files if path.stat().st_size
            )
            for number in range(cycles):
                root = top / str(number)
                shutil.copytree(top / "healthy", root)
                what = damage(root / names[number % len(names)], dice)

                async def judge(store: Store, tell: Report, what: str = what) -> None:
                    problems, seen = await look(store, whole)
                    if await read(store, OTHER) != beside:
                        problems.append("the session beside it is not as it was")
                    tell("flipped", seen)
                    for problem in problems + await write_on(store, whole):
                        tell("problem", f"{what}: {problem}")

                run(root, judge, report)
                shutil.rmtree(root)

    child = Child(program)
    events = child.wait()
    seen = [event[1] for event in events if event[0] == "flipped"]
    problems = [event[1] for event in events if event[0] == "problem"]
    if child.status and not problems:
        problems.append(f"the child ended with status {child.status}")
    return {"cycles": len(seen), "noticed": sum(seen), "problems": problems, "seed": seed}
