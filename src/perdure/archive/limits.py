"""Contents of an archive: its entries, and what is selected, within limits. Pure.

A manifest lists every folder and file, parents first, one line of JSON each. It is cut into pages
and files are cut into chunks; both are blobs under their hashes. What has not changed since an
earlier archive has the same names and is not stored again.

The same rules hold for what is saved, what is restored, and what a file from elsewhere says of
itself, so everything that was saved can be restored.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, final

import msgspec

from perdure._lib.options import Options
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    InvalidArgumentError,
    PerdureError,
    TooLargeError,
)
from perdure.records.archives import Entry, FileEntry, FolderEntry, entry_of
from perdure.records.json import encode

CHUNK_BYTES: Final = 1024 * 1024
"""Bytes of each chunk of a file; the last one may have fewer."""
PAGE_BYTES: Final = 1024 * 1024

_FILE_MODES, _FILE_OWNER = 0o755, 0o600
_FOLDER_OWNER = 0o700


def mode_of(mode: int, *, folder: bool) -> int:
    """Return the permissions to archive: no set-user-id, not writable by others.

    >>> oct(mode_of(0o104777, folder=False)), oct(mode_of(0o40555, folder=True))
    ('0o755', '0o755')
    """
    bits = mode & _FILE_MODES
    return bits | (_FOLDER_OWNER if folder else _FILE_OWNER)


def line_of(entry: Entry) -> bytes:
    """Return an entry's line, with its line break."""
    return encode(entry) + b"\n"


def pages_of(entries: Iterable[Entry]) -> Iterator[bytes]:
    """Cut a manifest into pages.

    A page ends behind a folder's own line where that is near, so that a change in one place leaves
    the pages of others as they are.
    """
    lines: list[bytes] = []
    size = 0
    for entry in entries:
        ends = size >= PAGE_BYTES // 2 and isinstance(entry, FolderEntry)
        if lines and (ends or size >= PAGE_BYTES):
            yield b"".join(lines)
            lines, size = [], 0
        lines.append(line_of(entry))
        size += len(lines[-1])
    if lines:
        yield b"".join(lines)


CONTROL: Final = ".perdure"
"""The folder in a home that is perdure's own; no archive has it."""

GIB: Final = 1024**3
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_FOREIGN = re.compile(
    r"""^(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?\Z|[<>:"|?*]|[. ]\Z""", re.IGNORECASE
)
_LATEST: Final = 2**63 - 1


class ArchiveLimits(Options, frozen=True, kw_only=True):
    """Largest size of an archive, when it is saved and when it is restored.

    Raises:
        InvalidArgumentError: A limit is not above 0.

    """

    entries: int = 200_000
    """Files and folders."""
    total_bytes: int = 16 * GIB
    """Of all files together."""
    file_bytes: int = 4 * GIB
    depth: int = 64
    """Steps in a path."""
    name_bytes: int = 255
    """Of one step, in UTF-8."""
    path_bytes: int = 2048
    ratio: int = 200
    """Largest ratio of unpacked to compressed bytes, checked beyond 256 MiB."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0:
                raise InvalidArgumentError(
                    f"ArchiveLimits: invalid {name}={value!r}: give a number above 0",
                    option=name,
                    value=value,
                )


def fault_of_path(path: str, limits: ArchiveLimits, *, windows: bool = False) -> str | None:
    """Say what is wrong with a path inside a home folder; None if nothing is.

    >>> fault_of_path("data/notes.txt", ArchiveLimits()) is None
    True
    >>> fault_of_path("../x", ArchiveLimits())
    'it leaves the folder'
    """
    steps = path.split("/")
    for fault, holds in (
        ("it is empty", not path),
        ("it has control characters, or bytes that are not UTF-8", _CONTROLS.search(path)),
        ("it is absolute", path.startswith("/")),
        ("it has a backslash, which is a separator elsewhere", "\\" in path),
        ("it leaves the folder", ".." in steps),
        ("it has an empty step", "" in steps or "." in steps),
        (f"{CONTROL} is perdure's own", steps[0].casefold() == CONTROL),
        ("Windows cannot have such a name", windows and any(map(_FOREIGN.search, steps))),
    ):
        if holds:
            return fault
    return _fault_of_length(path, steps, limits)


def _fault_of_length(path: str, steps: list[str], limits: ArchiveLimits) -> str | None:
    if len(steps) > limits.depth:
        return f"it has {len(steps)} steps, over the limit of ArchiveLimits(depth={limits.depth})"
    longest = max(len(step.encode()) for step in steps)
    if longest > limits.name_bytes:
        return f"a name has {longest} bytes, over ArchiveLimits(name_bytes={limits.name_bytes})"
    if (size := len(path.encode())) > limits.path_bytes:
        return f"it has {size} bytes, over ArchiveLimits(path_bytes={limits.path_bytes})"
    return None


def too_large(description: str, what: str, value: int, option: str, limit: int) -> TooLargeError:
    """Return the error for what is over a limit."""
    return TooLargeError(
        f"{description}: {what} {value}, over the limit of {limit}: nothing was changed; if it is "
        f"what you want, raise ArchiveLimits({option}=…)",
        where=description,
        option=option,
        value=value,
        limit=limit,
    )


@final
class Checker:
    """Judge a manifest, entry by entry, in its order.

    Args:
        where: What it is of, for errors.
        limits: How large it may be.
        chunked: Whether files name the blobs that they are cut into.
        refusal: The error for what must not be in an archive.

    """

    def __init__(
        self,
        description: str,
        limits: ArchiveLimits,
        *,
        chunked: bool = True,
        refusal: type[PerdureError] = CorruptRecordError,
    ) -> None:
        self._description = description
        self._limits = limits
        self._chunked = chunked
        self._refusal = refusal
        self._folders: set[str] = set()
        self._folded: dict[str, str] = {}
        self.files: int = 0
        self.bytes: int = 0

    @property
    def folders(self) -> int:
        """Folders so far."""
        return len(self._folders)

    def add(self, entry: Entry) -> None:
        """Take an entry.

        Raises:
            CorruptRecordError: It must not be in an archive; or what ``refusal`` says.
            TooLargeError: It is over a limit.

        """
        self.require_path(entry.path)
        fault = self._fault_of_place(entry.path)
        if fault is None and entry.mode != mode_of(
            entry.mode, folder=isinstance(entry, FolderEntry)
        ):
            fault = f"its mode {entry.mode:#o} is none that an archive gives"
        if fault is None and isinstance(entry, FileEntry):
            fault = self._fault_of_file(entry)
        self._refuse(entry.path, fault)
        self._count(entry)

    def read(self, lines: Iterable[bytes]) -> list[Entry]:
        """Take the entries of a manifest's lines, and return them; errors as `add`."""
        entries: list[Entry] = []
        for line in lines:
            entry = entry_of(line, self._description)
            self.add(entry)
            entries.append(entry)
        return entries

    def require_path(self, path: str) -> None:
        """Refuse a path that no archive can have; errors as `add`."""
        self._refuse(path, fault_of_path(path, self._limits, windows=sys.platform == "win32"))

    def _refuse(self, path: str, fault: str | None) -> None:
        if fault is None:
            return
        shown = ascii(path[:200])
        raise self._refusal(
            f"{self._description}: {shown} is refused: {fault}; nothing was changed",
            where=self._description,
            path=shown,
        )

    def _fault_of_place(self, path: str) -> str | None:
        folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())
        other = self._folded.get(folded)
        if other is not None:
            if other == path:
                return "it is there twice"
            return f"on some disks it is the same as {other[:200]!r}: rename one of them"
        self._folded[folded] = path
        parent = path.rpartition("/")[0]
        if parent and parent not in self._folders:
            return "no folder for it comes before it"
        return None

    def _fault_of_file(self, entry: FileEntry) -> str | None:
        if entry.size < 0 or not _HASH.match(entry.sha256):
            return "its size or its hash is none"
        if not -_LATEST <= entry.mtime <= _LATEST:
            return "its time is none"
        if not self._chunked:
            return None if not entry.chunks else "it names chunks"
        wanted = -(-entry.size // CHUNK_BYTES)
        if len(entry.chunks) != (wanted if wanted > 1 else 0):
            return f"{len(entry.chunks)} chunks do not make {entry.size} bytes"
        return None if all(map(_HASH.match, entry.chunks)) else "a chunk's hash is none"

    def _count(self, entry: Entry) -> None:
        limits = self._limits
        if isinstance(entry, FolderEntry):
            self._folders.add(entry.path)
        else:
            if entry.size > limits.file_bytes:
                what = f"the bytes of {entry.path[:200]!r} are"
                raise too_large(
                    self._description, what, entry.size, "file_bytes", limits.file_bytes
                )
            self.files += 1
            self.bytes += entry.size
        if (count := self.files + self.folders) > limits.entries:
            raise too_large(
                self._description, "files and folders:", count, "entries", limits.entries
            )
        if self.bytes > limits.total_bytes:
            what = "bytes of all files:"
            raise too_large(self._description, what, self.bytes, "total_bytes", limits.total_bytes)


# Selection: what is visible in a home folder, and what ``persist_paths`` names


MAX_PATHS: Final = 100


SYSTEM: Final = frozenset(
    {"$recycle.bin", "__pycache__", "lost+found", "node_modules", "snap"}
    | {"system volume information"}
)
"""Folders that a machine makes for itself, in lower case."""


Fate = Literal["taken", "entered", "hidden", "system", "unnamed"]
"""``entered``: only since something below is taken."""


class Selection(msgspec.Struct, frozen=True):
    """Selection of a home folder's paths."""

    paths: tuple[str, ...] = ()
    """Named on their own, without slashes at the end."""
    whole: bool = True
    """True if everything visible belongs to it, named or not."""

    def fate(self, path: str) -> Fate:
        """Say what becomes of an entry.

        >>> selection_of([".config/"]).fate(".config/app/.x"), selection_of([]).fate(".bashrc")
        ('taken', 'hidden')
        """
        within = [selected for selected in self.paths if _covers(selected, path)]
        hidden = [step for step in path.split("/") if is_hidden(step)]
        is_selected = bool(within) or self.whole
        if is_selected and (
            not hidden
            or any(is_hidden(step) for selected in within for step in selected.split("/"))
        ):
            return "taken"
        if self.leads_through(path):
            return "entered"
        if not is_selected:
            return "unnamed"
        return "hidden" if any(step.startswith(".") for step in hidden) else "system"

    def leads_through(self, path: str) -> bool:
        """Say whether a named path is this one, or below it."""
        return any(_covers(path, selected) for selected in self.paths)

    def hidden_beyond(self, other: Selection) -> list[str]:
        """Return the hidden paths that are named here, and that another selection leaves out.

        >>> selection_of([".config", "data"]).hidden_beyond(selection_of([]))
        ['.config']
        """
        hidden = (path for path in self.paths if any(map(is_hidden, path.split("/"))))
        return [path for path in hidden if other.fate(path) != "taken"]

    def units(self, top: Iterable[str]) -> list[str]:
        """Return the paths that a restore replaces as a whole.

        Args:
            top: The names that are in the home folder, or are to be.

        """
        named = [path for path in self.paths if not self.whole or is_hidden(path.split("/")[0])]
        least = [path for path in named if not any(_covers(o, path) and o != path for o in named)]
        visible = [name for name in top if not is_hidden(name)] if self.whole else []
        return sorted({*least, *visible})


def is_hidden(step: str) -> bool:
    """Say whether a name is left out unless it is named."""
    return step.startswith(".") or step.casefold() in SYSTEM


def selection_of(paths: Sequence[str], *, whole: bool = True) -> Selection:
    """Return what these ``persist_paths`` select.

    Raises:
        InvalidArgumentError: A path is absolute, leaves the home folder, or cannot be a path; or
            there are more than 100.

    """
    if isinstance(paths, str):
        raise _config("give a list of paths, not one text", paths)
    if len(paths) > MAX_PATHS:
        raise _config(f"{len(paths)} of them are over the limit of {MAX_PATHS}", paths[0])
    selected: list[str] = []
    for given in paths:
        if not isinstance(given, str):
            raise _config("give paths as text", given)
        path = given.removeprefix("./")
        path = path if path == "/" else path.rstrip("/")
        fault = fault_of_path(path, ArchiveLimits())
        if fault is not None:
            raise _config(f"{fault}; name folders below the agent's home, such as data/", given)
        if path not in selected:
            selected.append(path)
    return Selection(tuple(selected), whole)


def _config(reason: str, value: object) -> ConfigError:
    return InvalidArgumentError(
        f"persist_paths: invalid {value!r}: {reason}", option="persist_paths", value=value
    )


def _covers(above: str, path: str) -> bool:
    return path == above or path.startswith(above + "/")
