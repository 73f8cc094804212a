"""``python -m tests.integration.releases [REVISION]``: an older release and this one on one store.

The older one is the source tree of a git revision of this repository, by default the last tag, else
the last commit before SQLite's format 2. Both open the same session in turn, as in a rolling
deployment, then the older one is started anew. Says what happens at each step, on files and
on SQLite, and exits with 1 unless every record that was acknowledged is there once, in its order.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
BEFORE_FORMAT_2 = "src/perdure/stores/sqlite/sql/schema_2.sql"
GUARD = 60

CHILD = """
import asyncio, json, logging, sys
import perdure
from perdure import Message, Shutdown
logging.disable()

async def act(sessions, what, value):
    if what == "say":
        async with sessions.open("ada") as session:
            session.append(Message.user(value))
            await session.save()
        return "ok"
    if what == "hold":
        held.append(await sessions.open("ada"))
        return "ok"
    if what == "say held":
        held[0].append(Message.user(value))
        await held[0].save()
        return "ok"
    if what == "read":
        view = await sessions.load("ada")
        return [one.text for one in view.context()]
    if what == "post":
        await sessions.post("ada", Message.user(value), key=value)
        return "ok"
    if what == "letter":
        from perdure.store import DeadLetter, PendingItem, take_after
        from perdure.records.keys import SessionKey
        store, key = perdure.store_for(sys.argv[1]), SessionKey("gone")
        await store.open()
        grant = await take_after(store, key, after=0)
        item = PendingItem("post/0", "message", b"{}", 1.0)
        await store.ack(key, grant.epoch, dead=[DeadLetter(item, "no", 5, 2.0)])
        await store.release(key, grant.epoch)
        await store.aclose()
        return "ok"
    if what == "letters":
        return len(await sessions.dead_letters("gone"))
    if what == "forget":
        async with sessions.open("gone"):
            pass
        return await sessions.delete("gone")
    raise ValueError(what)

held = []

async def main():
    try:
        manager = perdure.connect(sys.argv[1], shutdown=Shutdown(signals=False))
        async with manager as sessions:
            print(json.dumps({"answer": "connected"}), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                what, value = json.loads(line)
                try:
                    told = {"answer": await asyncio.wait_for(act(sessions, what, value), 30)}
                except Exception as error:
                    told = {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(told), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)

asyncio.run(main())
"""


MISTAKES = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "TypeError")
"""Errors of the program that acts, not answers of a release."""


class Release:
    """A process of one release, connected to a store."""

    def __init__(self, name: str, source: Path, url: str) -> None:
        self.name = name
        env = {**os.environ, "PYTHONPATH": str(source)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, url],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        """What it was told is durable."""
        self.connected = self._answer("connects")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(GUARD)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def do(self, what: str, value: str = "") -> Any:
        """Have it do something; return the answer, None if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, value]) + "\n")
        self._process.stdin.flush()
        return self._answer(f"{what} {value}".strip())

    def _answer(self, what: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told = json.loads(line) if line else {"error": f"ended, status {self._process.wait()}"}
        print(f"  {self.name:<5} {what:<14} {told.get('error', told.get('answer'))}")
        if self.name == "new" and told.get("error", "").startswith(MISTAKES):
            raise AssertionError(f"this program does not know the new release: {told['error']}")
        return told.get("answer")


def default_revision() -> str:
    """Return the last tag, else the last commit before SQLite's format 2."""
    tags = _git("tag", "--list", "v*", "--sort=-version:refname").split()
    if tags:
        return tags[0]
    added = _git("log", "--diff-filter=A", "--format=%H", "--", BEFORE_FORMAT_2).split()
    if not added:
        raise SystemExit("there is neither a tag nor that commit here: name a revision")
    return f"{added[-1]}^"


def _git(*tokens: str) -> str:
    return subprocess.run(
        ["git", *tokens], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def unpacked(revision: str, folder: Path) -> Path:
    """Unpack the sources of a revision."""
    data = subprocess.run(
        ["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def beside(url: str, old_source: Path) -> bool:
    """Have both work on a store in turn; say whether it has what both were told is durable."""
    new_source = ROOT / "src"
    said: list[str] = []

    def say(release: Release, text: str, how: str = "say") -> None:
        if release.do(how, text) == "ok":
            said.append(text)

    with ExitStack() as stack:
        old = stack.enter_context(Release("old", old_source, url))
        say(old, "old 1")
        new = stack.enter_context(Release("new", new_source, url))
        for number in range(2, 4):
            say(new, f"new {number}")
            say(old, f"old {number}")
        old.do("hold")
        say(old, "old held", "say held")
        say(new, "new after")  # a hand-over
        if old.do("post", "old post") == "ok":
            said.append("old post")
        say(new, "new last")
        new.do("letter")
        old.do("forget")
        new.do("letters")
        again = stack.enter_context(Release("old", old_source, url))
        if again.connected:
            say(again, "old again")
        found = new.do("read")
        wanted = [text for text in said if text != "old post"]
        got = [text for text in found or () if text != "old post"]
        whole = got == wanted and (found or []).count("old post") == said.count("old post")
    check = [sys.executable, "-m", "perdure", "check", "--store", url]
    done = subprocess.run(check, env={**os.environ, "PYTHONPATH": str(new_source)}, check=False)
    print(f"  {len(said)} acknowledged, {'all there once, in order' if whole else 'NOT ALL THERE'}")
    return whole and done.returncode == 0


def main(revision: str | None) -> int:
    chosen = revision or default_revision()
    print(f"old: {_git('log', '-1', '--format=%h %s', chosen).strip()}")
    with tempfile.TemporaryDirectory(prefix="pd-releases-") as folder:
        place = Path(folder)
        place.chmod(0o700)
        source = unpacked(chosen, place / "old")
        fine = []
        for url in (f"file:{place}/files", f"sqlite:///{place}/a.db"):
            print(url.partition(":")[0])
            fine.append(beside(url, source))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
