"""The tar format, as far as an archive needs it: written by the book, and read with distrust.

Regular files and folders only. A reader gets the header of one member at a time, and refuses
all else: links, devices, sparse files, global headers, attributes, names that a long header hides.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from typing import Final

import msgspec

from perdure.archive.entries import Entry, FileEntry
from perdure.errors import CorruptRecordError

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
"""What an archive ends with."""
LONGEST: Final = 64 * 1024
"""Bytes of an extended header."""

Read = Callable[[int], bytes]

_FOLDER, _EXTENDED, _LONG_NAME = b"5", b"x", b"L"
_KINDS: Final = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"K": "a link",
    b"g": "a header for all that follows",
    b"V": "a volume's label",
    b"M": "a part of another archive",
    b"D": "a dump's folder",
}
_KEYS: Final = frozenset({"atime", "comment", "ctime", "gid", "gname", "mtime", "uid", "uname"})
"""What an extended header may say besides path and size, without any effect."""


class Member(msgspec.Struct, frozen=True):
    """A member's header."""

    path: str
    is_folder: bool
    size: int


def header_of(entry: Entry) -> bytes:
    """Return an entry's header; its bytes follow, and `padding_of` them."""
    info = tarfile.TarInfo(entry.path)
    info.mode = entry.mode
    if isinstance(entry, FileEntry):
        info.size = entry.size
        info.mtime = max(entry.mtime // 10**9, 0)
    else:
        info.type = _FOLDER
    return info.tobuf(format=tarfile.PAX_FORMAT)


def padding_of(size: int) -> bytes:
    """Return what fills a member up to whole blocks.

    >>> len(padding_of(1)), len(padding_of(512))
    (511, 0)
    """
    return bytes(-size % BLOCK)


class TarReader:
    """Read members, one after the other.

    Args:
        read: Returns exactly so many bytes, or fewer at the end.
        where: What they come from, for errors.

    """

    def __init__(self, read: Read, description: str) -> None:
        self._read = read
        self._description = description
        self._number = 0

    def next(self) -> Member | None:
        """Return the next member, whose bytes are to be read next; None at the end.

        Raises:
            CorruptRecordError: It is none that an archive of perdure's has.

        """
        self._number += 1
        extended: dict[str, str] = {}
        while True:
            block = self.exactly(BLOCK)
            if block == bytes(BLOCK):
                self._require_end(extended)
                return None
            kind = block[156:157]
            info = self._header(block)
            if kind not in {_EXTENDED, _LONG_NAME}:
                return self._member(kind, info, extended)
            if extended:
                raise self.refused("it has several headers")
            extended = self._extended(kind, info.size)

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self.refused(f"it is no tar header ({error})") from None

    def _extended(self, kind: bytes, size: int) -> dict[str, str]:
        if not 0 < size <= LONGEST:
            raise self.refused(f"its extended header has {size} bytes, the limit is {LONGEST}")
        data = self.exactly(size)
        self.exactly(-size % BLOCK)
        try:
            if kind == _LONG_NAME:
                return {"path": data.rstrip(b"\0").decode()}
            return dict(_pairs(data))
        except ValueError:
            raise self.refused("its extended header is damaged") from None

    def _member(self, kind: bytes, info: tarfile.TarInfo, extended: dict[str, str]) -> Member:
        if kind not in {b"0", b"\0", _FOLDER}:
            what = _KINDS.get(kind, f"of the unknown kind {kind!r}")
            raise self.refused(
                f"{info.name[:200]!r} is {what}; only files and folders are restored"
            )
        unknown = sorted(extended.keys() - _KEYS - {"path", "size"})
        if unknown:
            raise self.refused(f"its extended header says {unknown[0][:60]!r}")
        size = extended.get("size", str(info.size))
        if not size.isascii() or not size.isdecimal() or len(size) > 18:
            raise self.refused("its size is no number")
        path = extended.get("path", info.name)
        is_folder = kind == _FOLDER
        if is_folder:
            path = path.removesuffix("/")
        elif path.endswith("/"):
            raise self.refused("a file's name ends like a folder's")
        return Member(path, is_folder, int(size))

    def exactly(self, size: int) -> bytes:
        """Read so many bytes.

        Raises:
            CorruptRecordError: There are fewer.

        """
        data = self._read(size)
        if len(data) != size:
            raise self.refused("the file ends within it")
        return data

    def _require_end(self, extended: dict[str, str]) -> None:
        if extended or self._read(BLOCK) != bytes(BLOCK):
            raise self.refused("the archive ends within it")
        for _ in range(1024):  # tar fills up to whole records
            block = self._read(BLOCK)
            if not block:
                return
            if block.strip(b"\0"):
                break
        raise self.refused("there is more behind the archive's end")

    def refused(self, reason: str) -> CorruptRecordError:
        """Return the error for the member at hand."""
        message = f"{self._description}, member {self._number}: {reason}; nothing was changed"
        return CorruptRecordError(message, where=self._description, member=self._number)


def _pairs(data: bytes) -> list[tuple[str, str]]:
    """Return what an extended header says; raise ValueError where it is damaged."""
    pairs: list[tuple[str, str]] = []
    while data:
        length, _, _ = data.partition(b" ")
        size = int(length[:6])
        line, data = data[len(length) + 1 : size], data[size:]
        if size <= len(length) + 1 or not line.endswith(b"\n"):
            raise ValueError("no record")
        key, equals, value = line[:-1].partition(b"=")
        if not equals or key.decode() in dict(pairs):
            raise ValueError("no pair, or one that is there twice")
        pairs.append((key.decode(), value.decode()))
    return pairs
