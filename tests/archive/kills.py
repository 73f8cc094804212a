"""Kill a process at each call by which a restore, or a save, changes the disk; or fill the disk.

``python -m tests.archive.kills`` runs all of them, and prints what it found as JSON.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure.archive import Archives
from perdure.archive.atomic_swap import entered
from tests.archive.trees import Tree, look, make
from tests.crash.forks import Child, Report
from tests.crash.hooks import CHANGING, Real, Tripwire, changes, install
from tests.crash.scratch import scratch

PATHS = ["data/", ".config/app", "gone/"]
HIDDEN = {"data/.cache": "kept", ".bashrc": "kept", ".config/other": "kept"}
OLD = {
    "data/a.txt": "old",
    "data/deep/b.txt": "old",
    "data/old-only.txt": "old",
    "gone/c.txt": "old",
    ".config/app/x": "old",
    "top.txt": "old",
    **HIDDEN,
}
NEW = {
    "data/a.txt": "new",
    "data/deep/b.txt": "new",
    "data/empty": None,
    "data/new-only.txt": "new",
    ".config/app/x": "new",
    "other/d.txt": "new",
    "top.txt": "new",
}


def both() -> tuple[Tree, Tree]:
    """Return the two trees that may be there: the old one, and the new one with what is hidden."""
    with scratch() as top:
        old = look(make(top / "old", OLD))
        new = look(make(top / "new", {**NEW, **HIDDEN}))
    return old, new


def file_of(top: Path) -> Path:
    """Return a file with the new tree."""

    async def write() -> Path:
        async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
            archives = Archives(session, make(top / "source", NEW), paths=PATHS)
            await archives.save()
            await archives.write(top / "new.tar")
        return top / "new.tar"

    return anyio.run(write)


def was_killed(at: int, work: Callable[[], object]) -> bool:
    """Run something in a child that is killed at its k-th call; False if it came to its end."""

    def program(report: Report) -> None:
        Tripwire(at, "kill").install()
        work()

    child = Child(program)
    events = child.wait()
    if not child.was_killed and child.status:
        raise RuntimeError(f"the child ended with {child.status}: {events}")
    return child.was_killed


def restores() -> Iterator[str | None]:
    """Kill a restore at each call; say of each what is wrong with what is left."""
    old, new = both()
    with scratch() as outer:
        path = file_of(outer)

        async def restore(home: Path) -> None:
            async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
                await Archives(session, home, paths=PATHS).read(path, force=True)

        for at in itertools.count(1):
            with scratch() as top:
                home = make(top / "home", OLD)
                killed = was_killed(at, partial(anyio.run, restore, home))
                yield judge(home, old, new, killed=killed)
                if not killed:
                    return


def faults() -> Iterator[str | None]:
    """Have a full disk at each call of a restore; it says so, and leaves one of the trees."""
    old, new = both()
    with scratch() as outer:
        path = file_of(outer)

        async def restore(home: Path, said: Path, at: int) -> None:
            async with perdure.connect("memory:") as sessions, sessions.open("agent") as session:
                full = Full(at)
                full.install()
                try:
                    await Archives(session, home, paths=PATHS).read(path, force=True)
                except perdure.PerdureError:
                    said.touch()
                if full.disarm():
                    (said.parent / "end").touch()

        for at in itertools.count(1):
            with scratch() as top:
                home, said = make(top / "home", OLD), top / "said"
                was_killed(0, partial(anyio.run, restore, home, said, at))
                left = judge(home, old, new, killed=said.exists())
                yield left
                if (top / "end").exists():
                    return


class Full:
    """Fail the k-th call that changes the disk, as a full disk does."""

    def __init__(self, at: int) -> None:
        self._left = at

    def disarm(self) -> bool:
        """Fail no more; say whether the k-th call was not reached."""
        left, self._left = self._left, 0
        return left > 0

    def install(self) -> None:
        install(CHANGING, self)

    def __call__(self, name: str, real: Real, *args: Any, **kwargs: Any) -> Any:
        if changes(name, args):
            self._left -= 1
            if self._left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)


def judge(home: Path, old: Tree, new: Tree, *, killed: bool) -> str | None:
    """Say what is wrong with a home whose restore was killed, before and after it is finished."""
    for path, value in look(home).items():
        if value is not None and value not in {old.get(path), new.get(path)}:
            return f"{path} has {value!r}"
    with entered(str(home)):
        pass
    left = look(home)
    if left not in ((old, new) if killed else (new,)):
        return f"neither tree: {left}"
    names = {one.name for one in (home / ".perdure").iterdir()}
    if names - {"lock", "home.json", "replaced"}:
        return f"left behind: {names}"
    replaced = home / ".perdure/replaced/old"
    if left == new and not (replaced / "gone/c.txt").exists():
        return "what was replaced is not kept"
    return None


def saves() -> Iterator[str | None]:
    """Kill a save at each call; the session lists the old archive or the new one, whole.

    A start then leaves the home as it is, with what was written in it after that archive.
    """

    async def save(root: Path, home: Path, report: Callable[[], object]) -> None:
        async with perdure.connect(f"file:{root}") as sessions, sessions.open("agent") as session:
            await Archives(session, home, paths=PATHS).save()
            report()

    async def there(root: Path, home: Path, mine: Path) -> tuple[int, Tree]:
        async with perdure.connect(f"file:{root}") as sessions, sessions.open("agent") as session:
            archives = Archives(session, home, paths=PATHS)
            listed = await archives.all()
            for one in listed:
                await archives.verify(one.id)
            await archives.restore(force=True)
            await Archives(session, mine, paths=PATHS).resume()
            return len(listed), look(home)

    wanted = {1: look_of(OLD), 2: look_of({**NEW, "gone": None})}
    for at in itertools.count(1):
        with scratch() as top:
            root, home, said = top / "store", top / "home", top / "said"
            anyio.run(save, root, make(home, OLD), int)
            for path in (*OLD.keys() - NEW.keys() - HIDDEN.keys(),):
                (home / path).unlink()
            make(home, NEW)
            killed = was_killed(at, partial(anyio.run, save, root, home, said.touch))
            make(home, {"data/late.txt": "late"})
            count, tree = anyio.run(there, root, top / "again", home)
            if not (home / "data/late.txt").exists():
                yield "what was written after the kill was replaced at the next start"
            elif tree != wanted.get(count):
                yield f"{count} archives, and the newest has {tree}"
            elif said.exists() and count != 2:
                yield "it was said to be saved, and is not there"
            else:
                yield None
            if not killed:
                return


def look_of(files: dict[str, str | None]) -> Tree:
    """Return what an archive has of files."""
    with scratch() as top:
        return look(make(top, {path: one for path, one in files.items() if path not in HIDDEN}))


def main() -> int:
    acts = (("restores", restores), ("saves", saves), ("faults", faults))
    found = {name: list(act()) for name, act in acts}
    problems = {name: [text for text in all if text] for name, all in found.items()}
    counts = {name: len(all) - 1 for name, all in found.items()}
    print(json.dumps({"kills": counts, "problems": problems}))
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    os.environ.setdefault("PERDURE_HOME", "/nonexistent")
    raise SystemExit(main())
