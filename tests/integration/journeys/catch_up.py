"""``python -m tests.integration.journeys.catch_up``: stores that are migrated while they are written.

At each hop a program writes to the source without a pause: new sessions and old ones, some opened
for each turn and some held all the while, forks, retractions, deletions, prunings, states, blobs,
checkpoints, posts. Beside it ``perdure migrate`` runs three times, the first of them killed on its
way. Then the program stops, and a last run brings the rest: both stores are equal, bundle by
bundle and inbox by inbox. The program goes on at the target, which is the next hop's source.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Message, Retention, Session, SessionManager, Shutdown
from perdure.records.keys import SessionKey
from perdure.store import Store
from tests.integration.journeys.backends import ENVIRONMENT, url_of
from tests.integration.journeys.chain import bundles, listed, waiting

HOPS = ("file", "sqlite", "postgres", "redis", "s3", "encrypted+file", "compressed+file", "file")
RUNS = 3
HELD = 4
"""Sessions that the program keeps open all the while."""


class Program:
    """Whoever uses the source: it says what it has been told is durable."""

    def __init__(self, sessions: SessionManager, hop: int, dice: random.Random) -> None:
        self._sessions = sessions
        self._hop = hop
        self._dice = dice
        self._held: list[Session] = []
        self._number = 0
        self.said: dict[str, list[str]] = {}
        self.deleted: set[str] = set()

    async def begin(self) -> None:
        """Open what is held all the while, and write some of everything."""
        for number in range(HELD):
            self._held.append(await self._sessions.open(f"held-{number}"))
        for _ in range(8 * HELD):
            await self.act()

    async def act(self) -> None:
        """Do one thing."""
        self._number += 1
        session = self._dice.choice(self._held)
        await self._turn(session)
        match self._dice.randrange(8):
            case 0:
                session.memory.set("big", self._text() * 900)
                session.state.set("app", {"n": self._number})
                await session.save()
            case 1:
                await session.retract(after=session.version - 2)
            case 2:
                await self._sessions.fork(session.id, f"fork-{self._hop}-{self._number}")
            case 3:
                await session.checkpoints.create(f"label-{self._hop}-{self._number}")
            case 4:
                await self._sessions.post(session.id, Message.user(self._text()))
                await self._sessions.post(f"new-{self._dice.randrange(9)}", Message.user("hello"))
            case 5 if self.said:
                gone = self._dice.choice(sorted(self.said))
                await self._sessions.delete(gone)
                del self.said[gone]
                self.deleted.add(gone)
            case _:
                await self._short(f"short-{self._dice.randrange(12)}")

    async def _short(self, name: str) -> None:
        owner = f"owner-{self._hop}"
        async with self._sessions.open(name, owner=owner, tags=[f"hop-{self._hop}"]) as session:
            await self._turn(session)
            self.said.setdefault(name, []).append(f"{self._hop}/{self._number}")
        if self._dice.randrange(6) == 0:
            await self._sessions.prune(Retention(keep_turns=2), id=name)

    async def _turn(self, session: Session) -> None:
        async with session.turn():
            session.append(Message.user(f"{self._hop}/{self._number}"))
            session.append(Message.assistant(self._text() * 20))

    def _text(self) -> str:
        return f"{self._hop} {self._number} {self._dice.random()} "


async def hop(source: str, target: str, number: int, seed: int) -> dict[str, Any]:
    """Migrate one store into the next while it is written; return what was seen."""
    seen: dict[str, Any] = {"runs": []}
    stop = anyio.Event()
    async with perdure.connect(source, shutdown=Shutdown(signals=False)) as sessions:
        program = Program(sessions, number, random.Random(seed + number))
        await program.begin()

        async def write() -> None:
            while not stop.is_set():
                await program.act()
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            seen["killed"] = await _migrate(source, target, kill_after=1.5) is None
            for _ in range(RUNS):
                seen["runs"].append(await _migrate(source, target))
            stop.set()
        await program.act()
    seen["last"] = await _migrate(source, target)
    seen["again"] = await _migrate(source, target)
    return seen


async def _migrate(source: str, target: str, *, kill_after: float | None = None) -> Any:
    """Run the command; return what it reports, None if it was killed."""
    command = [sys.executable, "-m", "perdure.cli", "migrate", source, target, "--json"]
    async with await anyio.open_process(
        [*command, "--wait", "60"], env={**os.environ, **ENVIRONMENT}, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        out = b""
        with anyio.move_on_after(float("inf") if kill_after is None else kill_after):
            async for part in process.stdout:
                out += part
            await process.wait()
        if process.returncode is None:
            process.kill()
            return None
    return json.loads(out)


async def differences(source: str, target: str, folder: Path) -> list[str]:
    """Compare two stores: their sessions, bundle by bundle, and their inboxes."""
    ours, theirs = perdure.store_for(source), perdure.store_for(target)
    await ours.open()
    await theirs.open()
    try:
        keys = await _said(ours)
        posted = set(await ours.sessions_with_pending_items())
        different = [f"{key}: in one store only" for key in set(keys) ^ set(await _said(theirs))]
        different += [
            f"{key}: posts" for key in posted ^ set(await theirs.sessions_with_pending_items())
        ]
        if different:
            return different
        folder.mkdir()
        before = await bundles(ours, keys, folder / "source")
        after = await bundles(theirs, keys, folder / "target")
        different += [f"{key}: bundle" for key in before if before[key] != after[key]]
        for key in sorted(posted):
            if await waiting(ours, key) != await waiting(theirs, key):
                different.append(f"{key}: other posts")
        return different
    finally:
        await theirs.aclose()
        await ours.aclose()


async def _said(store: Store) -> list[SessionKey]:
    """List the sessions with something in them."""
    return [key for key in await listed(store) if not key.agent.startswith("new-")]


async def catch_up(
    folder: Path, *, hops: Sequence[str] = HOPS, seed: int = 0
) -> list[dict[str, Any]]:
    """Go through the hops; return what was seen at each."""
    places = [folder / str(number) for number in range(len(hops))]
    for place in places:
        place.mkdir()
    urls = [url_of(kind, place) for kind, place in zip(hops, places, strict=True)]
    found = []
    for number, (source, target) in enumerate(zip(urls, urls[1:], strict=False)):
        seen = await hop(source, target, number, seed)
        seen["to"] = hops[number + 1]
        seen["different"] = await differences(source, target, folder / f"compared-{number}")
        runs = [*seen["runs"], seen["last"]]
        facts = ("copied", "continued", "there", "deleted", "posted", "open", "failed")
        short = [{name: run[name] for name in facts} for run in runs]
        line = {"to": seen["to"], "runs": short, "different": seen["different"]}
        print(json.dumps(line), file=sys.stderr, flush=True)
        found.append(seen)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.journeys.catch_up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hops", nargs="+", default=HOPS)
    options = vars(parser.parse_args())
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="pd-catch-up-") as folder:
        found = anyio.run(lambda: catch_up(Path(folder), **options))
    bad = [seen for seen in found if seen["different"] or seen["last"]["failed"]]
    print(f"{len(found)} hops, {len(bad)} of them with differences")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
