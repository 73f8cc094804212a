"""``python -m tests.integration.read_only FOLDER KIND``: stores that cannot be written to are read.

``mounted`` is a disk that is mounted read-only, ``full`` one without a free page; run them in a
mount namespace of their own (``unshare -rm``). ``modes`` is a folder without the right to write,
which root has only where it may pass over modes: see `without_override`. Prints what was seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Message, Shutdown
from perdure.cli import main
from perdure.errors import PerdureError

KEY = "0f" * 32
STORES = {
    "file": "file:{}/file",
    "encrypted": "encrypted+file:{}/encrypted",
    "sqlite": "sqlite:///{}/sqlite/a.db",
    "killed": "sqlite:///{}/killed/a.db",
    "copied": "sqlite:///{}/copied/a.db",
    "encrypted-killed": "encrypted+sqlite:///{}/encrypted-killed/a.db",
}
"""``killed`` has a write-ahead log with commits, ``copied`` that without its shared memory."""

COMMANDS = {
    "ls": ("ls",),
    "show": ("show", "ada"),
    "log": ("show", "ada", "--log"),
    "plan": ("show", "ada", "--restore-plan"),
    "check": ("check",),
    "export": ("export", "ada"),
    "checkpoints": ("checkpoints", "ada", "--verify"),
    "diff": ("diff", "ada", "1", "2"),
    "replay": ("replay", "ada"),
    "rebuild": ("rebuild", "ada", "--dry-run"),
    "waiting": ("ls", "--waiting"),
}
_PR_CAPBSET_DROP, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2


def without_override() -> None:
    """Have root be stopped by modes like everybody, once another program runs."""
    if os.geteuid() == 0:
        for one in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            if ctypes.CDLL(None, use_errno=True).prctl(_PR_CAPBSET_DROP, one, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")


async def _fill(url: str, *, die: bool) -> None:
    sessions = await perdure.connect(url, shutdown=Shutdown(signals=False))
    async with sessions.open("ada", owner="lovelace", tags=["x"]) as ada:
        async with ada.turn():
            ada.append(Message.user("What is 2 + 3?"), Message.assistant("5"))
        await ada.checkpoints.create("one")
        async with ada.turn():
            ada.append(Message.user("And 2 + 4?"), Message.assistant("6"))
        await ada.checkpoints.create("two")
        if die:
            os._exit(0)
    await sessions.aclose()


def prepare(folder: Path) -> None:
    """Make the stores, as their users left them."""
    for name, url in STORES.items():
        (folder / name).mkdir(mode=0o700)
        child = os.fork()
        if not child:
            die = name in {"killed", "copied", "encrypted-killed"}
            anyio.run(lambda: _fill(url.format(folder), die=die))  # noqa: B023  # ends with this child
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    (folder / "copied" / "a.db-shm").unlink()
    assert (folder / "copied" / "a.db-wal").stat().st_size > 0


def shut(folder: Path, kind: str) -> None:
    """Take away the right, or the room, to write."""
    if kind == "mounted":
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    elif kind == "full":
        with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
    else:
        for place, _, files in os.walk(folder):
            for path in [Path(place, name) for name in files] + [Path(place)]:
                path.chmod(0o550 if path.is_dir() else 0o440)
                if os.geteuid() == 0:
                    os.chown(path, 65534, 0)  # somebody else's, whose group may read it


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what lies there."""
    found = [path for path in folder.rglob("*") if path.name != "ballast"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(found)}


def run(*tokens: str) -> tuple[int, str]:
    """Run a command in this process; return its status and all that it said."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(list(tokens))
    return status, out.buffer.getvalue().decode()  # type: ignore[attr-defined]


async def use(url: str) -> dict[str, Any]:
    """Read through a manager, and try to write."""
    seen: dict[str, Any] = {}
    off = Shutdown(signals=False)
    async with perdure.connect(url, read_only=True, shutdown=off) as sessions:
        view = await sessions.load("ada")
        seen["said"] = [message.text for message in view.context()] if view else None
        seen["exists"] = await sessions.exists("ada"), await sessions.exists("bob")
        seen["listed"] = [(info.key.agent, info.owner) for info in await sessions.list()]
        seen["open"] = await refused(sessions.open("ada"))
        seen["new"] = await refused(sessions.open("bob"))
        seen["post"] = await refused(sessions.post("ada", Message.user("psst")))
        seen["forget"] = await refused(sessions.forget(id="ada"))
    return seen


async def use_to_write(url: str) -> None:
    """Connect as to a store that can be written to."""
    async with perdure.connect(url, shutdown=Shutdown(signals=False)):
        pass


async def refused(act: Any) -> tuple[str, str]:
    try:
        await act
    except PerdureError as error:
        return type(error).__name__, str(error)
    except BaseException as error:  # noqa: BLE001  # told to whoever judges
        return type(error).__name__, "".join(traceback.format_exception(error))
    return "nothing", ""


def look(folder: Path, kind: str) -> dict[str, Any]:
    """Read each store in every way."""
    seen: dict[str, Any] = {}
    for name, template in STORES.items():
        url = template.format(folder)
        before = files_of(folder / name)
        ran = {what: run(*tokens, "--store", url) for what, tokens in COMMANDS.items()}
        here = Path(folder.parent, f"{name}.bundle")
        ran["bundle"] = run(
            "export", "ada", "--layout", "bundle", "--out", str(here), "--store", url
        )
        here.unlink(missing_ok=True)
        # A disk that is only full can still be opened to write, and migrate does so.
        for what in ("backup",) if kind == "full" else ("backup", "migrate"):
            there = Path(folder.parent, f"{name}.{what}")
            encrypted = "encrypted+" if url.startswith("encrypted+") else ""
            ran[what] = run(what, url, f"{encrypted}{there.as_uri()}", "--json")
            shutil.rmtree(there, ignore_errors=True)
        used = anyio.run(use, url)
        changed = sorted(set(before.items()) ^ set(files_of(folder / name).items()))
        seen[name] = {"ran": ran, "used": used, "changed": changed}
        seen[name]["to write"] = anyio.run(lambda: refused(use_to_write(url)))  # noqa: B023  # now
    return seen


def act(folder: Path, kind: str) -> None:
    logging.disable()
    if kind == "modes-shut":
        print(json.dumps(look(folder, kind)))
        return
    os.environ["PERDURE_KEY"] = KEY
    if kind != "modes":
        options = "size=8m,mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    prepare(folder)
    shut(folder, kind)
    if kind == "modes":  # another program, so that root loses what it was born with
        command = [sys.executable, "-m", "tests.integration.read_only", str(folder), "modes-shut"]
        subprocess.run(command, check=True, preexec_fn=without_override)
    else:
        print(json.dumps(look(folder, kind)))


if __name__ == "__main__":
    act(Path(sys.argv[1]), sys.argv[2])
