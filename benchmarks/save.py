"""A turn's save, over a plain write and fdatasync of the very bytes that it wrote.

Both sides append to files that already hold the same bytes, on one file system, by one
hop into a thread. perdure is timed with everything that a user waits for: four appends of
messages, encoded within, and ``await session.save()``. The plain side gets its bytes ready
made; messages are made before the clock runs, too. Blocks of turns alternate; a figure is
the median over blocks of the ratio of 25th percentiles, so that a busy disk or neighbor
disturbs both sides or neither.

The 99th percentile compares a session that folds with one that does not: blocks of their turns
alternate, and a figure is the median over groups of blocks of the ratio.

Growth compares the turns behind the last one with the first turns of fresh sessions, block by
block as well. Bytes are all that is handed to ``write``, for whichever file, in a run of its
own without the plain side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

import perdure
from benchmarks.chat import Chat, Turn
from benchmarks.disk import Mirror, Piece, filesystem, write_through
from benchmarks.figures import Report, Row
from benchmarks.timing import count_writes, kernel_count, percentile, quartile, ratio
from perdure import Limits, Message, Session, SessionKey, SessionManager

__all__ = ["Options", "run"]

BLOCK = 25
GROWTH_BLOCK = 12
TAIL_GROUP = 500
"""Turns of which a percentile is taken."""
GROWTH_FROM = 4
"""A fresh session's turns before its measured ones: they surround the tenth."""
NO_FOLDS = Limits(fold_ratio=float("inf"))

Blocks = list[tuple[list[float], list[float]]]


class Options(NamedTuple):
    """What to measure, and where."""

    sessions: int = 1
    turns: int = 3000
    growth_blocks: int = 25
    backends: tuple[str, ...] = ("asyncio", "trio")
    folder: Path | None = None


class Lane:
    """One session, the chat that goes on in it, and its plain counterpart."""

    def __init__(self, session: Session, chat: Chat, mirror: Mirror) -> None:
        self.session = session
        self.mirror = mirror
        self._chat = chat
        self._next: tuple[Message, ...] = ()

    def prepare(self) -> None:
        """Make the next turn's messages, as an application does right before it appends them."""
        self._next = self._chat.turn().messages

    async def turn(self) -> None:
        """Append a turn's messages and save them: what is timed."""
        session = self.session
        for message in self._next:
            session.append(message)
        await session.save()


def run(options: Options) -> Report:
    """Measure on each event loop; a figure is the worst of them."""
    found = {}
    for backend in options.backends:
        with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
            kind = filesystem(Path(folder))
            found[backend] = anyio.run(_measure, Path(folder), options, backend=backend)
    figures = {name: max(one["figures"][name] for one in found.values()) for name in MEANINGS}
    rows = [Row(name, figures[name], meaning) for name, meaning in MEANINGS.items()]
    about = {"filesystem": kind, "sessions": options.sessions, "turns": options.turns}
    return Report(rows, {**about, "counted": "os.write of the process", "backends": found})


MEANINGS = {
    "save.over_limit": "a turn's save over write + fdatasync of the same bytes",
    "save.growth": "the last turn's save over the tenth's",
    "save.p99_with_folds_over_without": "99th percentile of a turn's save, folds on over folds off",
    "save.bytes": "bytes written in a turn over its JSON, folds off",
    "save.bytes_with_folds": "the same with folds: documents and manifests too",
}


async def _measure(folder: Path, options: Options) -> dict[str, Any]:
    timed = await _timed(folder, options)
    bare = await _bytes(folder / "bare", options, NO_FOLDS)
    folded = await _bytes(folder / "folded", options, Limits())
    blocks, growth = timed
    tails = await _tails(folder, options)
    return {
        "figures": {
            "save.over_limit": ratio(blocks),
            "save.growth": ratio(growth),
            "save.p99_with_folds_over_without": median(
                percentile(on, 0.99) / percentile(off, 0.99) for on, off in tails
            ),
            "save.bytes": bare["written"] / bare["json"],
            "save.bytes_with_folds": folded["written"] / folded["json"],
        },
        "save_us": median(quartile(ours) for ours, _ in blocks) * 1e6,
        "limit_us": median(quartile(theirs) for _, theirs in blocks) * 1e6,
        "over_limit_by_block": [round(quartile(a) / quartile(b), 3) for a, b in blocks],
        "growth_by_block": [round(quartile(a) / quartile(b), 3) for a, b in growth],
        "p99_us": [[percentile(one, 0.99) * 1e6 for one in pair] for pair in tails],
        "worst_us": [[max(one) * 1e6 for one in pair] for pair in tails],
        "bytes": bare,
        "bytes_with_folds": folded,
    }


# time


async def _timed(folder: Path, options: Options) -> tuple[Blocks, Blocks]:
    root, copies = folder / "timed", folder / "copies"
    copies.mkdir()
    async with perdure.connect(root) as sessions:
        lanes = [await _lane(sessions, root, copies, n) for n in range(options.sessions)]
        blocks: Blocks = []
        for done in range(0, options.turns, BLOCK):
            blocks.append(await _block(lanes, min(BLOCK, options.turns - done)))
        growth = [
            await _growth(lanes[0], await _lane(sessions, root, copies, 1000 + n))
            for n in range(options.growth_blocks)
        ]
        for lane in lanes:
            lane.mirror.close()
    return blocks, growth


async def _tails(folder: Path, options: Options) -> Blocks:
    """Time every turn of a session that folds and of one that does not, in groups of turns."""
    found: Blocks = []
    async with (
        perdure.connect(folder / "tails-on") as on,
        perdure.connect(folder / "tails-off", limits=NO_FOLDS) as off,
    ):
        pair = [(await sessions.open("chat"), Chat(7)) for sessions in (on, off)]
        for _ in range(max(1, options.turns // TAIL_GROUP)):
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(0, TAIL_GROUP, BLOCK):
                for (session, chat), one in zip(pair, times, strict=True):
                    one += [await _timed_turn(session, chat) for _ in range(BLOCK)]
            found.append(times)
    return found


async def _timed_turn(session: Session, chat: Chat) -> float:
    messages = chat.turn().messages
    start = perf_counter()
    for message in messages:
        session.append(message)
    await session.save()
    return perf_counter() - start


async def _lane(sessions: SessionManager, root: Path, copies: Path, number: int) -> Lane:
    name = f"chat-{number}"
    session = await sessions.open(name)
    mirror = Mirror(root, SessionKey(name), copies)
    mirror.catch_up()
    return Lane(session, Chat(number), mirror)


async def _block(lanes: list[Lane], turns: int) -> tuple[list[float], list[float]]:
    """Time some turns, then their bytes as plain writes."""
    ours: list[float] = []
    pieces: list[list[Piece]] = []
    for _ in range(turns):
        for lane in lanes:
            lane.prepare()
        ours.append(await _time([lane.turn for lane in lanes]))
        pieces.append([lane.mirror.mark() for lane in lanes])
    writes = [
        [(lane.mirror, piece, piece.read()) for lane, piece in zip(lanes, one, strict=True)]
        for one in pieces
    ]
    theirs = [
        await _time([_plain(mirror.copy_of(piece), data) for mirror, piece, data in one])
        for one in writes
    ]
    return ours, theirs


def _plain(fd: int, data: bytes) -> Callable[[], Awaitable[None]]:
    return lambda: anyio.to_thread.run_sync(write_through, fd, data)


async def _time(calls: list[Callable[[], Awaitable[None]]]) -> float:
    start = perf_counter()
    if len(calls) == 1:
        await calls[0]()
    else:
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(call)
    return perf_counter() - start


async def _growth(old: Lane, fresh: Lane) -> tuple[list[float], list[float]]:
    """Time turns of the long session and of a fresh one, taking turns."""
    async with fresh.session:
        for _ in range(GROWTH_FROM):
            fresh.prepare()
            await fresh.turn()
        late, early = [], []
        for _ in range(GROWTH_BLOCK):
            for lane, times in ((old, late), (fresh, early)):
                lane.prepare()
                times.append(await _time([lane.turn]))
    fresh.mirror.close()
    return late, early


# bytes


async def _bytes(root: Path, options: Options, limits: Limits) -> dict[str, Any]:
    """Count what is written for as many turns; opening and closing aside."""
    async with perdure.connect(root, limits=limits) as sessions:
        chats = [Chat(n) for n in range(options.sessions)]
        opened = [await sessions.open(f"chat-{n}") for n in range(options.sessions)]
        json = 0
        before = kernel_count()
        with count_writes() as written:
            for _ in range(options.turns):
                for session, chat in zip(opened, chats, strict=True):
                    json += await _said(session, chat.turn())
            after = kernel_count()
    kernel = None if before is None or after is None else after - before
    return {"json": json, "written": written.bytes, "writes": written.calls, "kernel": kernel}


async def _said(session: Session, turn: Turn) -> int:
    for message in turn.messages:
        session.append(message)
    await session.save()
    return turn.size
