"""Head of a session: its only object that is replaced, by compare-and-swap. Pure.

It has the holder (for listings and other processes; the log decides), the floor up to which the
log was merged into segments, and the current documents. All other objects are written once.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from perdure.errors import ConfigError, FormatError
from perdure.records import json
from perdure.records.keys import SessionKey
from perdure.records.manifest import FORMAT as MANIFEST_FORMAT, Manifest
from perdure.records.records import open_sealed, seal
from perdure.records.refusals import newer_format
from perdure.stores.objects.layout import damage_error

T = TypeVar("T")

FORMAT = 1

_NONE = msgspec.Raw(b"null")


class ReadMark(msgspec.Struct, frozen=True, array_like=True):
    """A position in a segment where reading may begin."""

    seq: int
    """The last record before the position."""
    offset: int
    crc: int
    """That record's checksum."""


class MergedSegment(msgspec.Struct, frozen=True):
    """Merged commits: their record lines, concatenated."""

    object: str
    last: int
    size: int
    marks: tuple[ReadMark, ...]
    """The first one is its beginning."""

    @property
    def first(self) -> int:
        """The seq of its first record."""
        return self.marks[0].seq + 1


class DocumentRef(msgspec.Struct, frozen=True, array_like=True):
    """Position of a document in an object."""

    object: str
    offset: int
    size: int


class SessionHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session's head, as stored."""

    format: int = FORMAT
    key: SessionKey
    epoch: int
    owner: str
    host: str = ""
    pid: int = 0
    generation: int = msgspec.field(name="life")
    """The epoch that began it; each generation's log has its own names."""
    released: bool = False
    deleted: bool = False
    floor: int = 0
    """The last record that is in a segment."""
    crc: int
    """That record's checksum, or the seed of the first record."""
    segments: tuple[MergedSegment, ...] = ()
    manifest: msgspec.Raw = _NONE
    documents: dict[str, DocumentRef] = {}
    trash: tuple[str, ...] = ()
    """Objects that this head no longer needs, and that must not be removed earlier."""
    created_at: float = 0.0
    updated_at: float = 0.0
    newest: int = 0
    """The first record of the newest commit, if the session was released; 0: not known."""
    nonce: str = ""
    """Identifies a replacement whose response was lost."""


class _Folded(msgspec.Struct):
    as_of_seq: int = 0


class _Format(msgspec.Struct):
    format: int = FORMAT


def decode(name: str, data: bytes, key: SessionKey | None) -> SessionHead:
    """Return the head in an object's bytes, of the session *key* if one is given.

    Raises:
        CorruptRecordError: They are damaged, or another session's.
        UnsupportedVersionError: A newer release wrote them.

    """
    body = open_sealed(data)
    if body is None:
        raise damage_error(name, "its checksum does not match")
    number = _decoded(body, _Format)
    if number is not None and number.format > FORMAT:
        raise newer_format(name, number.format, object=name)
    head = _decoded(body, SessionHead)
    if head is None:
        raise damage_error(name, "it is not what this release writes")
    if key is not None and head.key != key:
        raise damage_error(name, f"it belongs to {head.key}, not to {key}")
    return head


def manifest_of(name: str, head: SessionHead) -> Manifest | None:
    """Return the manifest in a head, None if nothing was folded.

    Raises:
        CorruptRecordError: It does not have the shape that this release writes.
        UnsupportedVersionError: It has a newer format.

    """
    body = bytes(head.manifest)
    if body == b"null":
        return None
    number = _decoded(body, _Format)
    if number is not None and number.format > MANIFEST_FORMAT:
        raise newer_format(f"the manifest in {name}", number.format, object=name)
    manifest = _decoded(body, Manifest)
    if manifest is None:
        raise damage_error(name, "its manifest is not what this release writes")
    return manifest


def folded_up_to(head: SessionHead) -> int:
    """Return the last record that the documents include, 0 for none."""
    known = _decoded(bytes(head.manifest), _Folded)
    return 0 if known is None else known.as_of_seq


def referenced_objects(head: SessionHead) -> set[str]:
    """Return the names of the objects that a head references: documents and segments."""
    documents = {ref.object for ref in head.documents.values()}
    return documents | {segment.object for segment in head.segments}


def with_checksum(value: msgspec.Struct) -> bytes:
    """Return the bytes of a small object: JSON with a checksum."""
    return seal(msgspec.json.encode(value))


def decode_object(name: str, data: bytes, type_: type[T]) -> T:
    """Return the value of a small object.

    Raises:
        CorruptRecordError: It is damaged, or has another shape.

    """
    body = open_sealed(data)
    value = None if body is None else _decoded(body, type_)
    if value is None:
        raise damage_error(name, "it is not what was written")
    return value


def _decoded(body: bytes, type_: type[T]) -> T | None:
    try:
        return json.decode(body, type_)
    except (FormatError, ConfigError):  # ConfigError: invalid ids in a key
        return None
