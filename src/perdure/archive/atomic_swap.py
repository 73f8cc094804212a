"""Replacing a tree atomically: after a kill at any moment the old tree or the new one is there."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from perdure._lib.files import Folder
from perdure._lib.ids import random_id
from perdure._lib.platform import try_lock
from perdure.archive.limits import CONTROL
from perdure.archive.selection import Selection
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    SessionError,
    StoreError,
    StoreUnavailableError,
)
from perdure.records.json import decoder_of, encode
from perdure.records.keys import SessionKey

log: logging.Logger = logging.getLogger("perdure")

LEFT: Final = "restore-"
"""How the names of what may be removed begin, unless a journal says otherwise."""


def set_aside(control: Folder, name: str) -> None:
    """Give what is to go, if it is there, a name that says so."""
    if control.stat(name) is not None:
        control.rename(name, f"{LEFT}{random_id()}")


def remove_left(control: Folder) -> None:
    """Remove whatever was set aside, or left by a kill; no link is followed."""
    for name in control.names():
        if name.startswith(LEFT):
            try:
                _remove_tree(control, name)
            except OSError as error:
                facts = {"path": f"{control.path}/{name}", "error": str(error)}
                log.warning("replaced files not removed", extra=facts)


def _remove_tree(control: Folder, name: str) -> None:
    """Remove a tree, whose folders come up beside it one by one: its depth needs no stack."""
    not_removed = [name]
    while not_removed:
        child = not_removed.pop()
        if not _is_folder(control, child):
            control.remove(child)
            continue
        set_mode(control, child, 0o700)
        with control.enter(child) as folder:
            for inner in folder.names():
                if _is_folder(folder, inner):
                    set_mode(folder, inner, 0o700)  # it says where it lies: a move writes it
                    not_removed.append(f"{LEFT}{random_id()}")
                    folder.rename(inner, not_removed[-1], to=control)
                else:
                    folder.remove(inner)
        control.remove_folder(child)


def _is_folder(folder: Folder, name: str) -> bool:
    status = folder.stat(name)
    return status is not None and stat.S_ISDIR(status.st_mode)


def set_mode(parent: Folder, name: str, mode: int) -> None:
    """Set a folder's rights, where folders have any."""
    if os.name == "posix":  # elsewhere they cannot be opened, either
        fd = parent.open(name, getattr(os, "O_DIRECTORY", 0))
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)


# A new tree in the place of an old one, so that a kill at any moment leaves the old or the new
#
# In the home's own folder ``.perdure``:
#     lock                        held while somebody saves or restores
#     home.json                   which archive the home is, or came from
#     restore-<id>/new/…          the new tree, being written
#     restoring.json              it is whole and durable, and takes its place: the commit
#     restore-<id>/old/…          what was replaced
#     replaced/old/…              the same, once all is done; until the next restore or save
# Without ``restoring.json`` nothing was changed. With it whoever comes next finishes the work
# (`recover`): each step is a rename that can be repeated. One that the system refuses has all of
# them undone. What an archive passes over (links, hidden files) moves from the old tree to the
# same place in the new one. All of it blocks.


LOCK: Final = "lock"
MARKER: Final = "home.json"
JOURNAL: Final = "restoring.json"
REPLACED: Final = "replaced"
NEW: Final = "new"
OLD: Final = "old"


class BusyError(SessionError):
    """Somebody else saves or restores this home."""


class ArchiveMarker(msgspec.Struct, frozen=True):
    """Which archive a home is, or came from."""

    key: SessionKey
    archive: str
    """Its id; empty for a file's."""
    newer_than: tuple[str, ...] = ()
    """Others that it is newer than: the one that is being saved, or the newest at a restore."""

    def goes_on_from(self, archive: str) -> bool:
        """Say whether the home is an archive, or newer than it."""
        return archive == self.archive or archive in self.newer_than

    def is_of(self, key: SessionKey) -> bool:
        """Say whether it is of the same agent, in whichever session."""
        return (self.key.agent, self.key.tenant) == (key.agent, key.tenant)


class _Journal(msgspec.Struct, frozen=True):
    stage: str
    puts: tuple[str, ...]
    takes: tuple[str, ...]
    selection: Selection


@contextlib.contextmanager
def entered(path: str) -> Iterator[tuple[Folder, Folder]]:
    """Open a home, made if it is missing, and its own folder; finish what a killed restore began.

    Raises:
        ConfigError: It is the root of all, or no folder.
        SessionError: Somebody else saves or restores it just now.

    """
    if Path(path).parent == Path(path):
        raise ConfigError(f"{path} is no home folder: choose one below it", option="home")
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        message = f"the home {path} is no folder: choose another"
        raise ConfigError(message, option="home", path=path) from error
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(Folder.root(path))
        control = stack.enter_context(home.make(CONTROL))
        fd = control.open(LOCK, os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, fd)
        if try_lock(fd) is False:
            message = (
                f"the home {path} is just being saved or restored: try again when that is done"
            )
            raise BusyError(message, path=path)
        refused = recover(home, control)
        if refused is not None:
            log.warning("restore undone", extra={"home": path, "error": str(refused)})
        yield home, control


# which archive it is


def marker_of(control: Folder) -> ArchiveMarker | None:
    """Return which archive a home is, or came from; None if none is known."""
    data = control.read(MARKER)
    with contextlib.suppress(msgspec.DecodeError, ConfigError):
        return None if data is None else decoder_of(ArchiveMarker).decode(data)
    return None  # damaged: as if it had none, which keeps what is in the home


def mark(control: Folder, marker: ArchiveMarker) -> None:
    """Say which archive a home is, durably."""
    control.replace(MARKER, encode(marker))
    control.sync()


# the swap


def commit(home: Folder, control: Folder, stage: str, selection: Selection) -> list[str]:
    """Put a stage, which is durable, in the place of what the home has; return what was replaced.

    Raises:
        StoreError: Something of it cannot be moved; nothing was changed.
        StoreUnavailableError: The system refuses to move it; nothing was changed.

    """
    with control.enter(stage, NEW) as new:
        units = selection.units({*new.names(), *_movable(home)})
        puts = tuple(unit for unit in units if _stat(new, unit) is not None)
    takes = tuple(unit for unit in units if unit not in puts and _stat(home, unit) is not None)
    _require_movable(home, (*puts, *takes))
    journal = _Journal(stage, tuple(map(_written, puts)), tuple(map(_written, takes)), selection)
    if not control.publish(JOURNAL, encode(journal)):
        raise StoreError(f"{control.path}/{JOURNAL} is there: a restore is under way")
    refused = recover(home, control)
    if refused is not None:
        message = (
            f"{refused.filename!r} in {home.path} cannot be moved: {refused.strerror}: mend its "
            "rights, or unmount it; nothing was changed"
        )
        raise StoreUnavailableError(message, path=home.path, errno=refused.errno) from refused
    return sorted({*puts, *takes})


def occupied_by(home: Folder, selection: Selection) -> list[str]:
    """Return what a home has that a restore would replace."""
    units = selection.units(_movable(home))
    return [unit for unit in units if _stat(home, unit) is not None]


def _movable(home: Folder) -> Iterator[str]:
    """Give the names in a home that a restore may replace: no links, devices or mounts."""
    folder = home.stat(".")
    for name in home.names():
        status = home.stat(name)
        if status is None or folder is None or status.st_dev != folder.st_dev:
            continue
        if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
            yield name


def _require_movable(home: Folder, units: tuple[str, ...]) -> None:
    folder = home.stat(".")
    for unit in units:
        status = _stat(home, unit)
        if status is not None and folder is not None and status.st_dev != folder.st_dev:
            message = (
                f"{home.path}/{unit} is another file system, and the archive has something of "
                "this name: unmount it, or restore into another folder; nothing was changed"
            )
            raise StoreError(message, path=f"{home.path}/{unit}")


def recover(home: Folder, control: Folder) -> OSError | None:
    """Finish a restore that was committed, and remove one that was not.

    Return why the system refused one that was committed: then it was undone.
    """
    data, refused = control.read(JOURNAL), None
    if data is not None:
        journal = _journal_of(data, control)
        try:
            _roll_forward(home, control, journal)
        except OSError as error:
            _roll_back(home, control, journal)
            refused = error
        control.remove(JOURNAL)
        control.sync()
    remove_left(control)
    control.remove_temporary()
    return refused


def _journal_of(data: bytes, control: Folder) -> _Journal:
    path = f"{control.path}/{JOURNAL}"
    try:
        journal = decoder_of(_Journal).decode(data)
    except msgspec.DecodeError as error:
        message = f"{path} is damaged ({error}): the new tree is beside it; move it by hand"
        raise CorruptRecordError(message, path=path) from None
    puts, takes = tuple(map(_named, journal.puts)), tuple(map(_named, journal.takes))
    inside = all(map(_is_inside, (*puts, *takes)))
    if not inside or not journal.stage.startswith(LEFT) or "/" in journal.stage:
        raise CorruptRecordError(f"{path} was not written by perdure: remove it", path=path)
    return _Journal(journal.stage, puts, takes, journal.selection)


def _written(path: str) -> str:
    """Return a path as JSON can hold it, whatever bytes its names have."""
    return os.fsencode(path).decode("latin-1")


def _named(written: str) -> str:
    """Return the path that was written so; "" for none."""
    try:
        return os.fsdecode(written.encode("latin-1"))
    except UnicodeError:
        return ""


def _is_inside(path: str) -> bool:
    """Say whether a path, one that no archive could have among them, is one below a home."""
    steps = path.split("/")
    return steps[0] != CONTROL and "\0" not in path and not {"", ".", ".."} & {*steps}


def _roll_forward(home: Folder, control: Folder, journal: _Journal) -> None:
    """Do what is not done yet; each step may have been the last one before a kill."""
    if control.stat(journal.stage) is None:
        return  # all is done, but for the journal
    with control.enter(journal.stage) as stage, stage.make(OLD) as old, stage.enter(NEW) as new:
        for unit in journal.takes:
            if _stat(old, unit) is None and _stat(home, unit) is not None:
                _move(home, old, unit)
        for unit in journal.puts:
            if _stat(new, unit) is None:
                continue
            if _stat(home, unit) is not None:
                _move(home, old, unit)
            _move(new, home, unit)
        for unit in journal.puts:
            _carry(old, home, unit, journal.selection)
    _keep_old(control, journal.stage)


def _keep_old(control: Folder, stage: str) -> None:
    set_aside(control, REPLACED)
    control.rename(stage, REPLACED)
    control.sync()


def _roll_back(home: Folder, control: Folder, journal: _Journal) -> None:
    """Undo what is done already; a kill in between has it done, or undone, by who comes next."""
    with control.enter(journal.stage) as stage, stage.enter(NEW) as new, stage.make(OLD) as old:
        for unit in reversed(journal.puts):
            if _stat(new, unit) is None and _stat(home, unit) is not None:
                _carry(home, old, unit, journal.selection)
                _move(home, new, unit)
        for unit in (*journal.puts, *journal.takes):
            if _stat(old, unit) is not None and _stat(home, unit) is None:
                _move(old, home, unit)
        is_kept = bool(old.names())
    if is_kept:  # what came up in its place meanwhile
        _keep_old(control, journal.stage)


def _move(source: Folder, target: Folder, path: str) -> None:
    """Rename a path from one tree into another, durably, beside what has its name there."""
    *above, name = path.split("/")
    with source.enter(*above) as source_folder, target.make(*above) as target_folder:
        free = name
        while target_folder.stat(free) is not None:
            free += "~"
        source_folder.rename(name, free, to=target_folder)
        target_folder.sync()
        source_folder.sync()


def _carry(old: Folder, home: Folder, path: str, selection: Selection) -> None:
    """Move what archives pass over from a replaced folder to the same place in the new one."""
    entry_found, now = _stat(old, path), _stat(home, path)
    if entry_found is None or now is None:
        return
    if not (stat.S_ISDIR(entry_found.st_mode) and stat.S_ISDIR(now.st_mode)):
        return
    steps = path.split("/")
    with old.enter(*steps) as source, home.enter(*steps) as target:
        for name in source.names():
            inner = f"{path}/{name}"
            if not _is_passed_over(source, name, selection.fate(inner)):
                _carry(old, home, inner, selection)
            elif target.stat(name) is None:
                source.rename(name, name, to=target)
        target.sync()


def _is_passed_over(folder: Folder, name: str, fate: str) -> bool:
    if fate in {"hidden", "system", "unnamed"}:
        return True
    status = folder.stat(name)
    return status is not None and not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode))


def drop_replaced(control: Folder) -> None:
    """Remove what the last restore replaced."""
    set_aside(control, REPLACED)
    remove_left(control)


def _stat(folder: Folder, path: str) -> os.stat_result | None:
    *above, name = path.split("/")
    try:
        with folder.enter(*above) as parent:
            return parent.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
