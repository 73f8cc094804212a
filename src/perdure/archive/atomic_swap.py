"""Atomic replacement of a home folder: after a crash the old or the new tree is there.

In the home's own folder ``.perdure``:
    lock                        held during a save or a restore
    home.json                   the archive that the home equals, or came from
    restore-<id>/new/…          the new tree, being written
    restoring.json              the commit: the new tree is complete and durable
    restore-<id>/old/…          what was replaced
    replaced/old/…              the same after the swap, until the next restore or save

Without ``restoring.json`` nothing was changed. With it, the next process completes the swap
(`recover`): each step is a rename that can be repeated. If the system refuses one, all of them are
undone. What an archive skips (links, hidden files) moves from the old tree to the same place in the
new one. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

from perdure._lib.files import Folder, write_all
from perdure._lib.ids import random_id
from perdure._lib.logs import log_facts
from perdure._lib.platform import sync_file, try_lock
from perdure.archive.limits import CONTROL, Selection
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    SessionError,
    StoreUnavailableError,
)
from perdure.records.archives import Entry, FileEntry, FolderEntry
from perdure.records.json import decoder_of, encode
from perdure.records.keys import SessionKey

# Removal of trees that are no longer needed. An agent may have made anything: trees deeper than any
# stack, folders without write permission. What cannot be removed does not fail a save or a restore:
# it stays, with a warning, and the next one tries again.


log: logging.Logger = logging.getLogger("perdure")

LEFT: Final = "restore-"
"""Prefix of names that may be removed, unless a journal says otherwise."""


def set_aside(control: Folder, name: str) -> None:
    """Rename a tree, if it exists, so that it counts as removable."""
    if control.stat(name) is not None:
        control.rename(name, f"{LEFT}{random_id()}")


def remove_left(control: Folder) -> None:
    """Remove trees that were set aside, or left by a crash; links are not followed."""
    for name in control.names():
        if name.startswith(LEFT):
            try:
                _remove_tree(control, name)
            except OSError as error:
                log_facts(
                    log,
                    logging.WARNING,
                    "replaced files not removed: %(reason)s",
                    path=f"{control.path}/{name}",
                    reason=error,
                )


def _remove_tree(control: Folder, name: str) -> None:
    """Remove a tree of any depth: its subfolders move up next to it, one by one."""
    pending = [name]
    while pending:
        path = pending.pop()
        if not _is_folder(control, path):
            control.remove(path)
            continue
        set_mode(control, path, 0o700)
        with control.enter(path) as folder:
            for inner in folder.names():
                if _is_folder(folder, inner):
                    set_mode(folder, inner, 0o700)  # it says where it lies: a move writes it
                    pending.append(f"{LEFT}{random_id()}")
                    folder.rename(inner, pending[-1], to=control)
                else:
                    folder.remove(inner)
        control.remove_folder(path)


def _is_folder(folder: Folder, name: str) -> bool:
    status = folder.stat(name)
    return status is not None and stat.S_ISDIR(status.st_mode)


def set_mode(parent: Folder, name: str, mode: int) -> None:
    """Set a folder's permissions, if the platform has them."""
    if os.name == "posix":  # elsewhere they cannot be opened, either
        fd = parent.open(name, getattr(os, "O_DIRECTORY", 0))
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)


LOCK: Final = "lock"
MARKER: Final = "home.json"
JOURNAL: Final = "restoring.json"
REPLACED: Final = "replaced"
NEW: Final = "new"
OLD: Final = "old"


class BusyError(SessionError):
    """Another process saves or restores this home."""


class ArchiveMarker(msgspec.Struct, frozen=True):
    """The archive that a home equals, or came from."""

    key: SessionKey
    archive: str
    """The archive's id; empty for an archive file."""
    newer_than: tuple[str, ...] = ()
    """Other archives that the home is newer than: one being saved, or the newest at a restore."""

    def is_of(self, key: SessionKey) -> bool:
        """Say whether the home belongs to the same agent, in any session."""
        return (self.key.agent, self.key.tenant) == (key.agent, key.tenant)


class _Journal(msgspec.Struct, frozen=True):
    stage: str
    puts: tuple[str, ...]
    takes: tuple[str, ...]
    selection: Selection


@contextlib.contextmanager
def entered(path: str) -> Iterator[tuple[Folder, Folder]]:
    """Open a home, created if missing, and its own folder; complete a restore that was killed.

    Raises:
        ConfigError: It is the root folder, or not a folder.
        SessionError: Another process is saving or restoring it.

    """
    if Path(path).parent == Path(path):
        raise ConfigError(f"{path} is no home folder: choose one below it", option="home")
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(
            f"the home {path} is no folder: choose another", option="home", path=path
        ) from error
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(Folder.root(path))
        control = stack.enter_context(home.make(CONTROL))
        fd = control.open(LOCK, os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, fd)
        if try_lock(fd) is False:
            raise BusyError(
                f"the home {path} is just being saved or restored: try again when that is done",
                path=path,
            )
        refused = recover(home, control)
        if refused is not None:
            message = "restore undone: %(reason)s"
            log_facts(log, logging.WARNING, message, home=path, reason=refused)
        yield home, control


# the marker


def marker_of(control: Folder) -> ArchiveMarker | None:
    """Return the archive that a home equals, or came from; None if unknown."""
    data = control.read(MARKER)
    with contextlib.suppress(msgspec.DecodeError, ConfigError):
        return None if data is None else decoder_of(ArchiveMarker).decode(data)
    return None  # damaged: as if it had none, which keeps what is in the home


def mark(control: Folder, marker: ArchiveMarker) -> None:
    """Record durably which archive a home equals."""
    control.replace(MARKER, encode(marker))
    control.sync()


# the swap


def commit(home: Folder, control: Folder, stage: str, selection: Selection) -> list[str]:
    """Replace the home's contents with a durable stage; return the paths that were replaced.

    Raises:
        StoreUnavailableError: The system refuses to move a path, for example one that is another
            file system; nothing was changed.

    """
    with control.enter(stage, NEW) as new:
        units = selection.units({*new.names(), *_movable(home)})
        puts = tuple(unit for unit in units if _stat(new, unit) is not None)
    takes = tuple(unit for unit in units if unit not in puts and _stat(home, unit) is not None)
    journal = _Journal(stage, tuple(map(_written, puts)), tuple(map(_written, takes)), selection)
    is_first = control.publish(JOURNAL, encode(journal))
    assert is_first  # whoever holds the lock has completed what was there
    refused = recover(home, control)
    if refused is not None:
        raise StoreUnavailableError(
            f"{refused.filename!r} in {home.path} cannot be moved: {refused.strerror}: mend its "
            "rights, or unmount it; nothing was changed",
            path=home.path,
            errno=refused.errno,
        ) from refused
    return sorted({*puts, *takes})


def occupied_by(home: Folder, selection: Selection) -> list[str]:
    """Return the paths in a home that a restore would replace."""
    units = selection.units(_movable(home))
    return [unit for unit in units if _stat(home, unit) is not None]


def _movable(home: Folder) -> Iterator[str]:
    """Yield the names in a home that a restore may replace: no links, devices or mounts."""
    root = home.stat(".")
    for name in home.names():
        status = home.stat(name)
        if status is None or root is None or status.st_dev != root.st_dev:
            continue
        if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
            yield name


def recover(home: Folder, control: Folder) -> OSError | None:
    """Complete a restore that was committed, and remove one that was not.

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
        raise CorruptRecordError(
            f"{path} is damaged ({error}): the new tree is beside it; move it by hand", path=path
        ) from None
    puts, takes = tuple(map(_named, journal.puts)), tuple(map(_named, journal.takes))
    inside = all(map(_is_inside, (*puts, *takes)))
    if not inside or not journal.stage.startswith(LEFT) or "/" in journal.stage:
        raise CorruptRecordError(f"{path} was not written by perdure: remove it", path=path)
    return _Journal(journal.stage, puts, takes, journal.selection)


def _written(path: str) -> str:
    """Encode a path for JSON; its names may have any bytes."""
    return os.fsencode(path).decode("latin-1")


def _named(written: str) -> str:
    """Decode a path that was encoded for JSON; "" for none."""
    try:
        return os.fsdecode(written.encode("latin-1"))
    except UnicodeError:
        return ""


def _is_inside(path: str) -> bool:
    """Say whether a path, including ones that no archive may have, is below a home."""
    steps = path.split("/")
    return steps[0] != CONTROL and "\0" not in path and not {"", ".", ".."} & {*steps}


def _roll_forward(home: Folder, control: Folder, journal: _Journal) -> None:
    """Perform the steps that are not done yet; a crash may have come after any of them."""
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
    """Undo the steps that are done; after a crash, the next process completes or undoes them."""
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
    """Move a path from one tree to another, durably; a taken name gets a suffix."""
    *above, name = path.split("/")
    with source.enter(*above) as origin, target.make(*above) as destination:
        free = name
        while destination.stat(free) is not None:
            free += "~"
        origin.rename(name, free, to=destination)
        destination.sync()
        origin.sync()


def _carry(old: Folder, home: Folder, path: str, selection: Selection) -> None:
    """Move what archives skip from a replaced folder to the same place in the new one."""
    before, now = _stat(old, path), _stat(home, path)
    if before is None or now is None:
        return
    if not (stat.S_ISDIR(before.st_mode) and stat.S_ISDIR(now.st_mode)):
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


def _stat(folder: Folder, path: str) -> os.stat_result | None:
    *above, name = path.split("/")
    try:
        with folder.enter(*above) as parent:
            return parent.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return None


# Staging tree next to the old one: files written through open folders, durable when complete


SPARE: Final = 16 * 1024 * 1024
"""Bytes that a disk has to have left behind a restore."""


@final
class StagingTree:
    """A tree that is being written into a home's own folder.

    Args:
        control: The home's own folder, which is open and ours alone.
        description: What it comes from, for errors.

    """

    def __init__(self, control: Folder, description: str) -> None:
        self.name: str = f"{LEFT}{random_id()}"
        self.files: list[str] = []
        """Paths of the files that are complete, to be given to `sync` in parts."""
        self.bytes: int = 0
        """Bytes written so far."""
        self._description = description
        self._root = control.make(self.name, NEW)
        self._folders: list[FolderEntry] = []
        self._above: str = ""
        self._parent = self._root.enter()
        self._file: _File | None = None

    def add(self, entry: Entry, data: bytes = b"") -> None:
        """Make a folder, or write the next piece of a file, which its last piece completes.

        The folder above it is there.

        Raises:
            CorruptRecordError: The file before, or this one, is not as its entry says.

        """
        file = self._file
        if file is None or file.entry is not entry:
            self._require_complete()
            parent, name = self._at(entry.path)
            if isinstance(entry, FolderEntry):
                parent.make(name).close()
                self._folders.append(entry)
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            file = self._file = _File(entry, parent.open(name, flags))
        file.size += len(data)
        if file.size > file.entry.size:
            raise self._corrupt(file.entry, "there is more of it than its size")
        file.hash.update(data)
        self.bytes += write_all(file.fd, data)
        if file.size == file.entry.size:
            self._end(file)

    def _end(self, file: _File) -> None:
        entry = file.entry
        if file.hash.hexdigest() != entry.sha256:
            raise self._corrupt(entry, "its bytes do not match their hash")
        if hasattr(os, "fchmod"):
            os.fchmod(file.fd, entry.mode)
        if os.utime in os.supports_fd:
            os.utime(file.fd, ns=(entry.mtime, entry.mtime))
        self._file = None
        os.close(file.fd)
        self.files.append(entry.path)

    def _require_complete(self) -> None:
        if self._file is not None:
            entry = self._file.entry
            raise self._corrupt(entry, f"{self._file.size} bytes of {entry.size}")

    def sync(self, paths: Sequence[str]) -> None:
        """Make files durable; several threads may do it, whose syncs a disk takes together."""
        for path in paths:
            *above, name = path.split("/")
            with self._root.enter(*above) as parent:
                fd = parent.open(name)
                try:
                    sync_file(fd)
                finally:
                    os.close(fd)

    def finish(self) -> None:
        """Give the folders their modes, and make their entries durable."""
        for entry in reversed(self._folders):
            with self._root.enter(*entry.path.split("/")) as folder:
                folder.sync()
            parent, name = self._at(entry.path)
            set_mode(parent, name, entry.mode)
        self._root.sync()

    def close(self) -> None:
        """Close what is open; the tree stays until it is committed, or removed by `recover`."""
        if self._file is not None:
            os.close(self._file.fd)
            self._file = None
        self._parent.close()
        self._root.close()

    def _at(self, path: str) -> tuple[Folder, str]:
        """Return the open parent folder of a path, and its name there."""
        above, _, name = path.rpartition("/")
        if above != self._above:
            parent = self._root.enter(*above.split("/")) if above else self._root.enter()
            self._parent.close()
            self._parent, self._above = parent, above
        return self._parent, name

    def _corrupt(self, entry: FileEntry, reason: str) -> CorruptRecordError:
        return CorruptRecordError(
            f"{self._description}: {entry.path!r} is damaged: {reason}; nothing was changed",
            where=self._description,
            path=entry.path,
        )


class _File:
    """A file that is being written."""

    def __init__(self, entry: FileEntry, fd: int) -> None:
        self.entry = entry
        self.fd = fd
        self.hash = hashlib.sha256()
        self.size = 0


def require_room(home: Folder, wanted: int) -> None:
    """Refuse what the disk has no room for.

    Raises:
        StoreUnavailableError: The files would not fit; nothing was changed.

    """
    if not hasattr(os, "statvfs"):
        return
    status = os.statvfs(home.path)
    free = status.f_bavail * status.f_frsize
    if wanted + SPARE > free:
        raise StoreUnavailableError(
            f"the archive's files take {wanted} bytes, and {home.path} has {free} left: make room, "
            "or restore into a folder on another disk; nothing was changed",
            path=home.path,
            size=wanted,
            errno=errno.ENOSPC,
        )
