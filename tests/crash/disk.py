"""A disk that remembers what was synced, and can say what a cut of power may leave of it.

`Recorder` runs in the child and reports each call that changes the disk. `Disk` replays
the reports. The model is strict: without a sync nothing is promised, and nothing is
ordered. Of a file, the writes since its last sync may be there, or a prefix of them, behind which
the last write may have left zeros: its length came to the disk, its pages did not; of a
folder, each change of an entry since its last sync may be there or not, by itself.
A rename is one change: both names or none.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.forks import Event, Report
from tests.crash.hooks import CHANGING, Real, install

FOLDER = "folder"


class Recorder:
    """Report every change below a folder, in the order in which the calls returned."""

    def __init__(self, top: Path, report: Report) -> None:
        self._top = os.path.realpath(top)
        self._report = report
        self._ids = itertools.count(1)
        self._by_path: dict[str, int] = {}
        self._by_inode: dict[int, int] = {}

    def install(self) -> None:
        """Record from now on."""
        install(CHANGING, self)

    def __call__(self, name: str, real: Real, *args: Any, **kwargs: Any) -> Any:
        if name in ("write", "fsync", "fdatasync", "ftruncate"):
            return self._on_descriptor(name, real, *args)
        if name == "open":
            return self._open(real, *args, **kwargs)
        if name in ("link", "rename", "replace"):
            return self._two_names(name, real, *args, **kwargs)
        if name in ("mkdir", "unlink", "remove", "rmdir"):
            return self._one_name(name, real, *args, **kwargs)
        message = f"os.{name} is not recorded: teach the model what it does"
        raise NotImplementedError(message)

    # paths, relative to the top; None for what lies elsewhere

    def _path(self, path: Any, dir_fd: int | None) -> str | None:
        base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
        parent, name = os.path.split(os.path.join(base, os.fspath(path)))
        found = os.path.relpath(os.path.join(os.path.realpath(parent), name), self._top)
        return None if found.startswith("..") else found

    def _entries(self, changes: dict[str, Any]) -> None:
        """Report one change of one folder's entries."""
        (folder,) = {os.path.dirname(path) for path in changes}
        names = {os.path.basename(path): target for path, target in changes.items()}
        self._report("entries", folder, names)

    def _open(self, real: Real, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        place = self._path(path, kwargs.get("dir_fd")) if flags & os.O_CREAT else None
        known = place is None or place in self._by_path
        fd = real(path, flags, *args, **kwargs)
        if place is not None and not known:
            id_ = self._by_path[place] = next(self._ids)
            self._by_inode[os.fstat(fd).st_ino] = id_  # A number may come back: the newest counts.
            self._entries({place: id_})
        if place is not None and known and flags & os.O_TRUNC:
            self._report("truncate", self._by_path[place], 0)
        return fd

    def _two_names(self, name: str, real: Real, old: Any, new: Any, **kwargs: Any) -> Any:
        source = self._path(old, kwargs.get("src_dir_fd"))
        target = self._path(new, kwargs.get("dst_dir_fd"))
        result = real(old, new, **kwargs)
        if source is None or target is None:
            return result
        id_ = self._by_path[source]  # A folder that is moved is not modeled: KeyError.
        changes: dict[str, Any] = {target: id_}
        self._by_path[target] = id_
        if name != "link":
            del self._by_path[source]
            changes[source] = None
        if os.path.dirname(source) == os.path.dirname(target):
            self._entries(changes)
        else:  # Into another folder: a cut may leave it under both names, or under none.
            for path, value in changes.items():
                self._entries({path: value})
        return result

    def _one_name(self, name: str, real: Real, path: Any, *args: Any, **kwargs: Any) -> Any:
        place = self._path(path, kwargs.get("dir_fd"))
        result = real(path, *args, **kwargs)
        if place is not None:
            self._by_path.pop(place, None)
            self._entries({place: FOLDER if name == "mkdir" else None})
        return result

    def _on_descriptor(self, name: str, real: Real, fd: int, *args: Any) -> Any:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            result = real(fd, *args)
            place = self._path(os.readlink(f"/proc/self/fd/{fd}"), None)
            if place is not None:
                self._report("sync folder", "" if place == "." else place)
            return result
        id_ = self._by_inode.get(found.st_ino)
        offset = os.lseek(fd, 0, os.SEEK_CUR) if id_ and name == "write" else 0
        result = real(fd, *args)
        if id_ and name == "write":
            offset = os.lseek(fd, 0, os.SEEK_CUR) - result  # Right with O_APPEND too.
            self._report("write", id_, offset, bytes(args[0])[:result].decode("latin-1"))
        elif id_ and name == "ftruncate":
            self._report("truncate", id_, args[0])
        elif id_:
            self._report("sync file", id_)
        return result


class Tree(NamedTuple):
    """What could be on the disk: files by path, and folders."""

    files: tuple[tuple[str, bytes], ...]
    folders: tuple[str, ...]

    def write(self, top: Path) -> None:
        """Make it so."""
        for folder in self.folders:
            (top / folder).mkdir(mode=0o700, exist_ok=True)
        for path, data in self.files:
            target = top / path
            target.write_bytes(data)
            target.chmod(0o600)


class _File:
    def __init__(self) -> None:
        self.synced = b""
        self.states = [b""]
        """What it was since the last sync, a write at a time."""

    def write(self, offset: int, data: bytes) -> None:
        now = self.states[-1].ljust(offset, b"\0")
        half, size = len(data) // 2, len(data)
        parts = (bytes(size), data[:half], data[:half].ljust(size, b"\0"), data)
        for part in parts if half else (data,):
            self.states.append(now[:offset] + part + now[offset + len(part) :])

    def truncate(self, size: int) -> None:
        self.states.append(self.states[-1][:size].ljust(size, b"\0"))

    def sync(self) -> None:
        self.states = [self.states[-1]]


class _Folder:
    def __init__(self) -> None:
        self.synced: dict[str, Any] = {}
        self.pending: list[dict[str, Any]] = []

    def sync(self) -> None:
        self.synced = self.kept(range(len(self.pending)))
        self.pending = []

    def kept(self, places: Any) -> dict[str, Any]:
        """Return the entries with these changes made, and not the others."""
        names = dict(self.synced)
        for place in places:
            names.update(self.pending[place])
        return {name: target for name, target in names.items() if target is not None}

    def choices(self) -> list[tuple[int, ...]]:
        """Return sets of changes that a cut may let through."""
        places = range(len(self.pending))
        if len(places) <= 4:
            return [c for n in range(len(places) + 1) for c in itertools.combinations(places, n)]
        prefixes = [tuple(places[:n]) for n in range(len(places) + 1)]
        without_one = [tuple(p for p in places if p != gone) for gone in places]
        return [*prefixes, *without_one, *[(place,) for place in places]]


class Disk:
    """Replay what a `Recorder` said."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._folders: dict[str, _Folder] = {"": _Folder()}

    def replay(self, event: Event) -> bool:
        """Take one report; say whether it changed the disk."""
        match event:
            case ["entries", folder, names]:
                for name, target in names.items():
                    self._entry(os.path.join(folder, name), target)
                self._folders[folder].pending.append(names)
            case ["write", id_, offset, data]:
                self._files[id_].write(offset, data.encode("latin-1"))
            case ["truncate", id_, size]:
                self._files[id_].truncate(size)
            case ["sync file", id_]:
                self._files[id_].sync()
            case ["sync folder", folder]:
                self._folders[folder].sync()
            case _:
                return False
        return True

    def _entry(self, path: str, target: Any) -> None:
        if target == FOLDER:
            self._folders[path] = _Folder()
        elif target is not None:
            self._files.setdefault(target, _File())

    def cuts(self) -> Iterator[Tree]:
        """Yield what a cut of power at this moment may leave; may yield the same twice.

        With all else whole or all else gone, every choice of each single file and folder;
        that is what one missing sync needs to be seen.
        """
        most = self._choice(whole=True)
        least = self._choice(whole=False)
        yield self._tree(most)
        yield self._tree(least)
        for base in (most, least):
            for thing, options in self._options():
                for option in options:
                    yield self._tree({**base, thing: option})

    def _options(self) -> Iterator[tuple[Any, list[Any]]]:
        for path, folder in self._folders.items():
            if folder.pending:
                yield path, folder.choices()
        for id_, file in self._files.items():
            if len(file.states) > 1:
                yield id_, list(range(len(file.states)))

    def _choice(self, *, whole: bool) -> dict[Any, Any]:
        return {
            thing: max(options, key=lambda o: o if isinstance(o, int) else len(o))
            if whole
            else options[0]
            for thing, options in self._options()
        }

    def _tree(self, choice: dict[Any, Any]) -> Tree:
        files: list[tuple[str, bytes]] = []
        folders: list[str] = []
        ahead = [""]
        while ahead:
            path = ahead.pop()
            if path:
                folders.append(path)
            folder = self._folders[path]
            for name, target in sorted(folder.kept(choice.get(path, ())).items()):
                below = os.path.join(path, name)
                if target == FOLDER:
                    ahead.append(below)
                else:
                    file = self._files[target]
                    files.append((below, file.states[choice.get(target, 0)]))
        return Tree(tuple(sorted(files)), tuple(folders))
