"""The forms of an archive: its summary, and the entries of its manifest. Pure.

A manifest lists every folder and file, parents first, one line of JSON each. It is cut into pages
and files are cut into chunks; both are blobs under their hashes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.records.json import decoder_of

DOCUMENT: Final = "archives.json"
"""The document that lists a session's archives, by id."""


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
    """Time when it was taken, in seconds since 1970."""
    label: str = ""
    """A name that the user gave it, to restore it by."""
    paths: tuple[str, ...] = ()
    """The ``persist_paths`` that it was taken with."""
    whole: bool = True
    """True if it has all visible files of the home folder, not only these paths."""
    files: int = 0
    folders: int = 0
    bytes: int = 0
    """Of the files' contents."""
    pages: tuple[str, ...] = ()
    """Names of the blobs with its manifest."""


def blobs_of(entry: Entry) -> tuple[str, ...]:
    """Return the names of an entry's chunks, in order."""
    if isinstance(entry, FolderEntry) or not entry.size:
        return ()
    return entry.chunks or (entry.sha256,)


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
