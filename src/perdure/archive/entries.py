"""Entries of an archive: files and folders by path, and the summary that is in the log.

An archive's manifest lists every folder and file, parents first, one line of JSON each. It is cut
into pages and files are cut into chunks; both are blobs under their hashes. What has not changed
since an earlier archive has the same names and is not stored again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.json import decoder_of, encode

DOCUMENT: Final = "archives.json"
"""The document that lists a session's archives, by id."""
CHUNK_BYTES: Final = 1024 * 1024
"""Bytes of each chunk of a file; the last one may have fewer."""
PAGE_BYTES: Final = 1024 * 1024

_FILE_MODES, _FILE_OWNER = 0o755, 0o600
_FOLDER_OWNER = 0o700


class FolderEntry(msgspec.Struct, frozen=True, tag="folder", tag_field="is"):
    """A folder, empty or not."""

    path: str
    """Path relative to the home folder, with slashes."""
    mode: int = 0o700


class FileEntry(msgspec.Struct, frozen=True, tag="file", tag_field="is", omit_defaults=True):
    """A regular file."""

    path: str
    size: int
    """In bytes."""
    sha256: str
    """Of all its bytes."""
    mode: int = 0o600
    mtime: int = 0
    """Nanoseconds since 1970."""
    chunks: tuple[str, ...] = ()
    """Names of its blobs; omitted if there is one, named by the file's own hash."""


Entry = FileEntry | FolderEntry


class Archive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Summary of an archive, as the session's log has it."""

    id: str
    at: float
    """When it was taken, in seconds since 1970."""
    label: str = ""
    """A name that the user gave it, to restore it by."""
    paths: tuple[str, ...] = ()
    """The ``persist_paths`` that it was taken with."""
    whole: bool = True
    """Whether it has all visible files of the home folder, not only these paths."""
    files: int = 0
    folders: int = 0
    bytes: int = 0
    """Of the files' contents."""
    pages: tuple[str, ...] = ()
    """Names of the blobs with its manifest."""


def mode_of(mode: int, *, folder: bool) -> int:
    """Return the permissions to archive: no set-user-id, not writable by others.

    >>> oct(mode_of(0o104777, folder=False)), oct(mode_of(0o40555, folder=True))
    ('0o755', '0o755')
    """
    bits = mode & _FILE_MODES
    return bits | (_FOLDER_OWNER if folder else _FILE_OWNER)


def blobs_of(entry: Entry) -> tuple[str, ...]:
    """Return the names of an entry's chunks, in order."""
    if isinstance(entry, FolderEntry) or not entry.size:
        return ()
    return entry.chunks or (entry.sha256,)


def line_of(entry: Entry) -> bytes:
    """Return an entry's line, with its line break."""
    return encode(entry) + b"\n"


def entry_of(line: bytes, description: str) -> Entry:
    """Return the entry of a line.

    Raises:
        CorruptRecordError: The line is not an entry.

    """
    try:
        entry: Entry = decoder_of(Entry).decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecordError(
            f"{description}: a line of its manifest is damaged: {error}; nothing was changed",
            where=description,
        ) from None
    return entry


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


def name_of(data: bytes) -> str:
    """Return the name of bytes as a blob."""
    return hashlib.sha256(data).hexdigest()
