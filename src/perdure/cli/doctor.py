"""``perdure doctor``: whether this machine can keep sessions the way it is set up.

It writes one probe session through the whole road, reads it back and removes it, and one
unnamed file to look at the clock and the locks. It touches nothing else, and makes no store.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import anyio

import perdure
from perdure import Message
from perdure._lib.platform import network_file_system, synced_by, try_lock
from perdure.autosave.events import SaveFailed
from perdure.autosave.options import Shutdown
from perdure.cli import diagnoses
from perdure.cli.diagnoses import Diagnosis
from perdure.cli.options import Stored
from perdure.cli.output import print_json, say
from perdure.errors import ConfigError, LeaseError, PerdureError
from perdure.session.manager import SessionManager
from perdure.session.session import Session
from perdure.store import Store
from perdure.stores.file import FileStore

__all__ = ["GRACE_VARIABLE", "doctor"]

GRACE_VARIABLE = "PERDURE_GRACE_PERIOD"
PROBE = "perdure-doctor"
"""The probe session's agent; one id for all probes, so that what stays of them does not grow."""
PATIENCE = 10.0
"""Seconds for the probe session."""
PACKAGES = ("anyio", "msgspec", "aiofiles", "trio")
NAMED_BY = ("PERDURE_URL", "PERDURE_HOME")


def doctor(
    *,
    grace: float | None = None,
    deadline: float | None = None,
    where: Stored = Stored(),  # noqa: B008  # frozen
) -> int:
    """Examine the store, this machine and the settings, and say what to mend.

    Saves a probe session, reads it back and removes it. Exits with 1 if there is a problem.

    Args:
        grace: Seconds between SIGTERM and SIGKILL. Default: PERDURE_GRACE_PERIOD.
        deadline: The application's Shutdown(deadline=…), to compare with. Default: 20.

    """
    shutdown = Shutdown() if deadline is None else _shutdown(deadline)
    found = [_versions(), diagnoses.of_settings(os.environ)]
    found += anyio.run(_examine, where.store)
    found.append(diagnoses.of_grace(_grace() if grace is None else grace, shutdown))
    problems = sum(one.level == "problem" for one in found)
    if where.json:
        warnings = sum(one.level == "warning" for one in found)
        print_json({"problems": problems, "warnings": warnings, "checks": found})
    else:
        for one in found:
            say(f"{one.level:8} {one.what:12} {one.detail}{': ' if one.cure else ''}{one.cure}")
    return 1 if problems else 0


def _shutdown(deadline: float) -> Shutdown:
    return Shutdown(deadline=deadline, turn_grace=min(Shutdown().turn_grace, deadline))


def _grace() -> float | None:
    text = os.environ.get(GRACE_VARIABLE)
    try:
        return float(text) if text else None
    except ValueError:
        message = f"{GRACE_VARIABLE}={text!r} does not fit: it must be seconds, such as 30"
        raise ConfigError(message, variable=GRACE_VARIABLE, value=text) from None


def _versions() -> Diagnosis:
    python = ".".join(map(str, sys.version_info[:3]))
    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    said = f"perdure {perdure.__version__}, Python {python} on {sys.platform}, {packages}"
    return Diagnosis("versions", "ok", said)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class _Place(NamedTuple):
    """Where to try things out."""

    store: Store
    folder: Path | None
    """The folder of a file store."""
    said: Diagnosis


async def _examine(url: str | None) -> list[Diagnosis]:
    try:
        with _place(url) as place:
            found = [place.said, *await _probe(place.store)]
            return found if place.folder is None else [*found, *_look_at(place.folder)]
    except PerdureError as error:
        return [Diagnosis("store", "problem", str(error))]
    except OSError as error:
        said = f"{os.fsdecode(error.filename or '')}: {error.strerror}"
        cure = "make the folder belong to this user (chown, chmod u+rwx), or choose another"
        return [Diagnosis("store", "problem", said, cure)]


@contextmanager
def _place(url: str | None) -> Iterator[_Place]:
    """Yield the store; for one that nobody has made yet, one beside it that is removed again."""
    store = perdure.store_for(url)
    if not isinstance(store, FileStore):
        yield _Place(store, None, Diagnosis("store", "ok", store.location))
        return
    folder = Path(store.location)
    parent = next(one for one in folder.parents if one.is_dir())
    named = url is not None or any(map(os.environ.get, NAMED_BY))
    if folder.exists() or (named and parent != folder.parent):  # opening it says what is wrong
        yield _Place(store, folder, Diagnosis("store", "ok", str(folder)))
        return
    said = f"there is no store at {folder} yet: the first connect makes it"
    cure = f"if that surprises you, look at --store, {' and '.join(NAMED_BY)}"
    with tempfile.TemporaryDirectory(prefix=".perdure-doctor-", dir=parent) as beside:
        trial = Path(beside) / "store"
        yield _Place(FileStore(trial), trial, Diagnosis("store", "warning", said, cure))


async def _probe(store: Store) -> list[Diagnosis]:
    """Take a session down the whole road and back.

    Raises:
        PerdureError: The store cannot be opened.

    """
    shutdown = Shutdown(deadline=1, turn_grace=0, signals=False)
    sessions = await perdure.connect(store, autosave=None, shutdown=shutdown)
    failures: list[SaveFailed] = []
    sessions.on("save_failed", failures.append)
    durability = store.capabilities.durability
    try:
        with anyio.fail_after(PATIENCE):
            probed = await _round_trip(store, sessions)
    except LeaseError:
        said = "another process has the probe session"
        probed = Diagnosis("probe", "warning", said, "let the other doctor end first")
    except TimeoutError:
        why = f": {failures[-1].error}" if failures else ""
        probed = Diagnosis("probe", "problem", f"nothing was saved within {PATIENCE} s{why}")
    except PerdureError as error:
        probed = Diagnosis("probe", "problem", str(error))
    finally:
        await sessions.aclose()
    return [diagnoses.of_durability(durability), probed]


async def _round_trip(store: Store, sessions: SessionManager) -> Diagnosis:
    session = await sessions.open(PROBE, wait=PATIENCE / 2)
    start = time.perf_counter()
    whole = await _write_and_read(store, session)
    took = (time.perf_counter() - start) * 1000
    await sessions.delete(PROBE)
    if whole:
        return Diagnosis("probe", "ok", f"saved, read back and removed, in {took:.1f} ms")
    said = "what was saved was not what could be read"
    return Diagnosis("probe", "problem", said, "do not trust this disk or mount")


async def _write_and_read(store: Store, session: Session) -> bool:
    """Save something that nobody can have written before, and see whether it is there."""
    token = secrets.token_hex(16)
    seq = session.append(Message.user(token))
    await session.save()
    async with aclosing(store.read_log(session.key, after=seq - 1)) as log:
        records = [record async for chunk in log for record in chunk.records]
    return [record.seq for record in records if token.encode() in record.payload] == [seq]


def _look_at(folder: Path) -> Iterator[Diagnosis]:
    yield from _modes(folder)
    by, folders = synced_by()
    yield diagnoses.of_syncs(by, folders=folders)
    yield diagnoses.of_network(network_file_system(str(folder)))
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder).f_favail if hasattr(os, "statvfs") else None
    inodes = os.statvfs(folder).f_files if files is not None else 0
    yield diagnoses.of_space(usage.free, usage.total, files if inodes else None)
    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"perdure")
        file.flush()
        yield diagnoses.of_clock(time.time(), os.fstat(file.fileno()).st_mtime, newest)
        yield diagnoses.of_locks(try_lock(file.fileno()))


def _modes(folder: Path) -> Iterator[Diagnosis]:
    """Judge the store's folders: each that is not well, or one line for all."""
    if sys.platform == "win32":
        return
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    judged = []
    for path in folders:
        found = path.lstat()
        mine = found.st_uid == os.geteuid()
        judged.append(diagnoses.of_mode(str(path), found.st_mode, mine=mine))
    yield from [one for one in judged if one.level != "ok"] or judged[:1]
