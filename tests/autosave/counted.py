"""Counted saves: for each setting and way of changing, what it promises and what it does.

    python -m tests.autosave.counted                  # on files, by the real clock, for two minutes
    python -m tests.autosave.counted --seconds 60 --store FOLDER

All eighteen run at once in one process, under a plain ``asyncio.run``. It prints what was promised
and counted, and exits with 1 if a save began too early or too late, if there were more or fewer
than the setting allows, if the setting that is read back is another one, or if `health` ever said
that saving had stalled.

What a setting promises is written here once more, from its description and without the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, final

import anyio

import perdure
from perdure import Autosave, Message, Session, SessionManager, Shutdown
from perdure._lib.loop import loop_clock
from perdure.autosave.events import Saved
from perdure.records.keys import SessionKey

SETTINGS: dict[str, Autosave | None] = {
    "the default": Autosave(),
    "server": Autosave.server(),
    "write-through": Autosave.write_through(),
    "5 / 15": Autosave(debounce=5, max_delay=15),
    "10 / 120": Autosave(debounce=10, max_delay=120),
    "off": None,
}
DEFAULT = (0.1, 2.0)
"""The shortest and the longest debounce where none is given."""
EARLY = 0.1
"""A save begins up to this share of its delay early, so that many do not come at once."""
SLOT = 0.05
"""And up to so many seconds."""


class Change(NamedTuple):
    """A record that was appended; the last one of a turn, whose end saves it."""

    at: float
    ends_turn: bool = False


class Save(NamedTuple):
    """A save as it was counted."""

    began: float
    took: float
    durable: int


@final
class Watched:
    """A session, and what was seen of it."""

    def __init__(self, session: Session, clock: Callable[[], float]) -> None:
        self.session = session
        self.clock = clock
        self.base = session.version
        self.changes: list[Change] = []
        self.saves: list[Save] = []

    def append(self, message: Message) -> None:
        """Append a message, and note when."""
        self.changes.append(Change(self.clock()))
        self.session.append(message)

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Run a turn, whose begin and end are records, too."""
        self.changes.append(Change(self.clock()))
        async with self.session.turn():
            yield
            self.changes.append(Change(self.clock(), ends_turn=True))

    def saved(self, event: Saved) -> None:
        """Note a save that is done."""
        self.saves.append(Save(self.clock() - event.took, event.took, event.durable - self.base))


async def steadily(watched: Watched, until: float) -> None:
    """A change each 3 s."""
    while watched.clock() < until:
        watched.append(Message.user("x"))
        await anyio.sleep(3)


async def in_bursts(watched: Watched, until: float) -> None:
    """Five changes 0.3 s apart, each 12 s."""
    while watched.clock() < until:
        for _ in range(5):
            watched.append(Message.user("x"))
            await anyio.sleep(0.3)
        await anyio.sleep(10.5)


async def in_turns(watched: Watched, until: float) -> None:
    """A turn of three messages and 2 s, each 8 s."""
    while watched.clock() < until:
        async with watched.turn():
            watched.append(Message.user("x"))
            for text in ("y", "z"):
                await anyio.sleep(1)
                watched.append(Message.assistant(text))
        await anyio.sleep(6)


PATTERNS: dict[str, Callable[[Watched, float], Awaitable[None]]] = {
    "a change each 3 s": steadily,
    "bursts": in_bursts,
    "turns": in_turns,
}


def promised(
    changes: Sequence[Change],
    debounce: float | None,
    max_delay: float,
    *,
    until: float,
    takes: float = 0.0,
    apart: bool = False,
) -> int:
    """Return how many saves a setting makes of these changes.

    Args:
        changes: What was appended when.
        debounce: The quiet time; None for no timers.
        max_delay: The longest time.
        until: When counting ends.
        takes: How long each save takes.
        apart: Whether changes of one moment are saved apart.

    """
    saves, free, first, last = 0, float("-inf"), float("inf"), 0.0
    hurry = False
    for change in [*changes, Change(until)]:
        while first < float("inf"):
            due = first + max_delay if debounce is None else min(last + debounce, first + max_delay)
            due = max(last if hurry else due, free)
            if (
                (debounce is None and not hurry)
                or due > change.at
                or (due == change.at and not apart)
            ):
                break
            saves, free, first, hurry = saves + 1, due + takes, float("inf"), False
        first, last = min(first, change.at), change.at
        hurry = hurry or change.ends_turn
    return saves


def bounds(
    changes: Sequence[Change], setting: Autosave | None, *, until: float, late: float
) -> tuple[int, int]:
    """Return the fewest and the most saves that the setting allows.

    Args:
        changes: What was appended when.
        setting: The setting.
        until: When counting ends.
        late: How late a save may be answered, since the store or the loop is slow.

    """
    if setting is None:
        delays: list[tuple[float | None, float]] = [(None, 0.0)]
    else:
        quiet = DEFAULT if setting.debounce is None else (setting.debounce, setting.debounce)
        shares = [share / 20 for share in range(21)]
        delays = [
            (early(quiet[0] + (quiet[1] - quiet[0]) * n, share), early(setting.max_delay, share))
            for n in shares
            for share in shares
        ]
    counts = [
        count
        for delay in delays
        for count in (
            promised(changes, *delay, until=until - late, takes=late),
            promised(changes, *delay, until=until, apart=True),
        )
    ]
    return min(counts), max(counts)


def early(delay: float, share: float) -> float:
    """Return a delay that is shorter by a share of what it may be early."""
    return max(delay - (delay * EARLY + SLOT) * share, 0.0)


def broken(
    changes: Sequence[Change],
    saves: Sequence[Save],
    setting: Autosave | None,
    *,
    until: float,
    late: float,
) -> Iterator[str]:
    """Say of each save what it did not wait for, and of each by how much it was late."""
    done = 0
    for save in saves:
        captured = changes[done : save.durable]
        done = save.durable
        if not captured:
            continue
        first = captured[0].at
        ends = [change.at for change in captured if change.ends_turn]
        if setting is None:
            if not ends:
                yield f"a save at {save.began:.2f} without timers"
            continue
        quiet = DEFAULT if setting.debounce is None else (setting.debounce, setting.debounce)
        soonest = min(
            quiet_after(captured, early(quiet[0], 1)),
            first + early(setting.max_delay, 1),
            *ends,
            until,
        )
        latest = min(quiet_after(captured, quiet[1]), first + setting.max_delay, *ends, until)
        if save.began < soonest - 1e-3:
            yield f"a save at {save.began:.2f}, due at {soonest:.2f} at the earliest"
        if save.began > latest + late:
            yield f"a save at {save.began:.2f}, due at {latest:.2f} at the latest"


def quiet_after(changes: Sequence[Change], debounce: float) -> float:
    """Return when it was quiet for so long; others may have come after it, or at that moment."""
    following = [*(change.at for change in changes[1:]), float("inf")]
    quiet = [change.at + debounce for change in changes]
    return next(at for at, before in zip(quiet, following, strict=True) if at <= before)


class Row(NamedTuple):
    """What came of one setting and one way of changing."""

    setting: str
    pattern: str
    least: int
    most: int
    counted: int
    problems: tuple[str, ...]


async def count(place: str, name: str, seconds: float, lag: Callable[[], float]) -> list[Row]:
    """Change sessions in each way with one setting, and count their saves."""
    setting, clock = SETTINGS[name], loop_clock()
    quiet = Shutdown(signals=False)
    rows: list[Row] = []
    async with perdure.connect(place, autosave=setting, shutdown=quiet) as sessions:
        opened = {pattern: await sessions.open(pattern.replace(" ", "-")) for pattern in PATTERNS}
        for session in opened.values():
            await session.save()
        watched = {pattern: Watched(session, clock) for pattern, session in opened.items()}
        by_key: dict[SessionKey, Watched] = {one.session.key: one for one in watched.values()}
        sessions.on("saved", lambda event: by_key[event.key].saved(event))
        problems: dict[str, None] = {}
        until = clock() + seconds
        async with anyio.create_task_group() as group:
            for pattern, act in PATTERNS.items():
                group.start_soon(act, watched[pattern], until)
            while clock() < until:
                problems |= dict.fromkeys(unlike(sessions, opened.values(), setting))
                await anyio.sleep(min(0.5, max(until - clock(), 0.01)))
            # What ends after it does not count, but is let end: a turn is not to be cut.
        for pattern, one in watched.items():
            changes = [change for change in one.changes if change.at <= until]
            saves = [save for save in one.saves if save.began <= until]
            late = 0.1 + lag() + 2 * max([save.took for save in saves], default=0.0)
            least, most = bounds(changes, setting, until=until, late=late)
            told = [*problems, *broken(one.changes, saves, setting, until=until, late=late)]
            if not least <= len(saves) <= most:
                told.append(f"{len(saves)} saves, and {least} to {most} are promised")
            rows.append(Row(name, pattern, least, most, len(saves), tuple(told)))
    return rows


def unlike(
    sessions: SessionManager, opened: Iterable[Session], setting: Autosave | None
) -> Iterator[str]:
    """Say where the setting in force is not the one that was given, or saving is not well."""
    health = sessions.health()
    if health.status != "ok":
        yield f"health is {health.status}: {health.reasons}"
    for status in (sessions.autosave, *(session.autosave for session in opened)):
        force = status.in_force
        if status.setting != setting or (force is None) is not (setting is None):
            yield f"{status} is read back"
        elif setting is not None and force is not None:
            fits = force == setting
            if setting.debounce is None:
                least, most = DEFAULT
                fits = least <= (force.debounce or 0.0) <= most
                fits = fits and force.max_delay == setting.max_delay
            if not fits:
                yield f"{force} is in force"


async def count_all(place: Callable[[str], str], seconds: float) -> list[Row]:
    """Count with all settings at once; *place* is where the sessions of one are kept."""
    rows: list[Row] = []
    worst, clock = 0.0, loop_clock()

    async def watch_loop() -> None:
        nonlocal worst
        while True:
            at = clock()
            await anyio.sleep(0.05)
            worst = max(worst, clock() - at - 0.05)

    async def one(name: str) -> None:
        rows.extend(await count(place(name), name, seconds, lambda: worst))

    async with anyio.create_task_group() as group:
        group.start_soon(watch_loop)
        async with anyio.create_task_group() as counting:
            for name in SETTINGS:
                counting.start_soon(one, name)
        group.cancel_scope.cancel()
    names = list(SETTINGS)
    return sorted(rows, key=lambda row: names.index(row.setting))


def folder_of(name: str) -> str:
    return name.replace(" / ", "-").replace(" ", "-")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.autosave.counted", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--store", help="a folder; left out, a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-counted-") as folder:
        top = Path(given.store or folder)
        rows = asyncio.run(count_all(lambda name: str(top / folder_of(name)), given.seconds))
    print(f"{'setting':14} {'pattern':18} {'promised':>9} {'counted':>8}")
    for row in rows:
        span = f"{row.least}" if row.least == row.most else f"{row.least}-{row.most}"
        print(f"{row.setting:14} {row.pattern:18} {span:>9} {row.counted:8}")
        for problem in row.problems:
            print(f"    {problem}")
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
