"""What a checkpoint costs: of a long session over a short one, on disk, and of a state given.

All on the file store. A session is one agent's chat; folds are off while bytes and times are
taken, as for a turn's save. ``bytes`` counts a turn and the checkpoint behind it, over the turn's
JSON; times are those of the checkpoint alone, and sessions take turns. A session's first checkpoint
reads its log once: that is reported by itself, and not in the others. ``disk`` compares all files
of a session with a checkpoint behind every turn, folded and closed, with those of the same session
without. ``given_bytes`` is all that is written for a state that has got one more item, over that
item's JSON. What a fork costs is measured by ``forks``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import anyio

import perdure
from benchmarks.chat import Chat
from benchmarks.figures import Report, Row
from benchmarks.timing import count_writes, quartile
from perdure import Limits, Session, SessionManager, Shutdown

__all__ = ["Options", "run"]

TURN = 4
"""Messages of one turn."""
NO_FOLDS = Limits(fold_ratio=float("inf"))
ITEM_BYTES = 1000


class Options(NamedTuple):
    """How much to measure, and where."""

    messages: int = 50_000
    few: int = 500
    rounds: int = 60
    checkpoints: int = 1000
    items: int = 10_000
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure all of it on one store."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        found = anyio.run(_measure, Path(folder), options)
    rows = [Row(name, found[name], meaning) for name, meaning in MEANINGS.items()]
    return Report(rows, {**options._asdict(), "folder": None})


MEANINGS = {
    "checkpoints.bytes": "bytes written for a turn and a checkpoint, over the turn's JSON",
    "checkpoints.growth": "time of a checkpoint, the long session's over the short one's",
    "checkpoints.disk": "a session with a checkpoint a turn over the same one without",
    "checkpoints.given_bytes": "bytes written for a large state with one more item, over the item",
    "checkpoints.ms": "a checkpoint of the long session",
    "checkpoints.first_ms": "the long session's first checkpoint, which reads its log",
    "checkpoints.given_first_ms": "a checkpoint with the large state, the first time",
    "checkpoints.given_ms": "the same with one more item",
}


async def _measure(folder: Path, options: Options) -> dict[str, float]:
    return {
        **await _captured(folder / "captured", options),
        "checkpoints.disk": await _disk(folder, options),
        **await _given(folder / "given", options),
    }


def _manager(root: Path, limits: Limits) -> SessionManager:
    return perdure.connect(root, autosave=None, limits=limits, shutdown=Shutdown(signals=False))


# the session itself


Costs = dict[str, list[tuple[float, float]]]
"""By session, what each time was written over the turn's JSON, and how long it took."""


async def _captured(root: Path, options: Options) -> dict[str, float]:
    async with _manager(root, NO_FOLDS) as sessions:
        chats, opened = {}, {}
        for name, messages in (("long", options.messages), ("short", options.few)):
            opened[name], chats[name] = await sessions.open(name), Chat(messages)
            await _fill(opened[name], chats[name], messages)
        first = {name: await _timed(session) for name, session in opened.items()}
        made: Costs = {name: [] for name in opened}
        for number in range(options.rounds):
            for name, session in _by_turns(opened, number):
                made[name].append(await _checkpoint(session, chats[name]))
    return {
        "checkpoints.bytes": median(size for size, _ in made["long"]),
        "checkpoints.growth": _growth(made),
        "checkpoints.ms": median(seconds for _, seconds in made["long"]) * 1e3,
        "checkpoints.first_ms": first["long"] * 1e3,
    }


def _by_turns(opened: dict[str, Session], number: int) -> list[tuple[str, Session]]:
    """Return the sessions, another one first each time."""
    both = list(opened.items())
    return both[::-1] if number % 2 else both


def _growth(costs: Costs) -> float:
    long, short = ([seconds for _, seconds in costs[name]] for name in ("long", "short"))
    return quartile(long) / quartile(short)


async def _fill(session: Session, chat: Chat, messages: int) -> None:
    for number in range(messages // TURN):
        session.append(*chat.turn().messages)
        if number % 50 == 0:
            await session.save()
    await session.save()


async def _timed(session: Session) -> float:
    start = perf_counter()
    await session.checkpoints.create("timed")
    return perf_counter() - start


async def _checkpoint(session: Session, chat: Chat) -> tuple[float, float]:
    turn = chat.turn()
    with count_writes() as written:
        session.append(*turn.messages)
        await session.save()
        seconds = await _timed(session)
    return written.bytes / turn.size, seconds


# on disk


async def _disk(folder: Path, options: Options) -> float:
    sizes = {}
    for name in ("with", "without"):
        async with _manager(folder / name, Limits()) as sessions:
            session, chat = await sessions.open("growing"), Chat(7)
            for _ in range(options.checkpoints):
                session.append(*chat.turn().messages)
                if name == "with":
                    await session.checkpoints.create("after a turn")
                else:
                    await session.save()
        files = (folder / name).rglob("*")
        sizes[name] = sum(path.stat().st_size for path in files if path.is_file())
    return sizes["with"] / sizes["without"]


# a state that is given


async def _given(root: Path, options: Options) -> dict[str, float]:
    random = Random(11)
    state = {"items": [_item(random, number) for number in range(options.items)]}
    ratios, seconds = [], []
    async with _manager(root, NO_FOLDS) as sessions, sessions.open("given") as session:
        start = perf_counter()
        await session.checkpoints.create("first", state)
        first = perf_counter() - start
        for number in range(options.rounds):
            item = _item(random, options.items + number)
            state["items"].append(item)
            with count_writes() as written:
                start = perf_counter()
                await session.checkpoints.create("more", state)
                seconds.append(perf_counter() - start)
            ratios.append(written.bytes / len(json.dumps(item, separators=(",", ":"))))
    return {
        "checkpoints.given_bytes": sum(ratios) / len(ratios),
        "checkpoints.given_first_ms": first * 1e3,
        "checkpoints.given_ms": median(seconds) * 1e3,
    }


def _item(random: Random, number: int) -> dict[str, Any]:
    """Return an item with a text that nothing repeats."""
    return {"id": number, "text": random.randbytes(ITEM_BYTES // 2).hex(), "done": False}
