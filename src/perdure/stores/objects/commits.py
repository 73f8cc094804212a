"""Commits as objects: a sealed line that says what follows, then the records' lines. Pure.

The lines are `perdure.records.frames`, each sealed to the one before it and the first to the
session, so that a dropped, doubled, exchanged or foreign object fails as flipped bits do. The
first line has the number and the checksum of the others: a cut object is recognized too.

A *tombstone* is the first line alone. It holds a place in the log after its records were merged
into a segment, and still tells whose they were.

The lines are `perdure.records.frames`, each sealed to the one before it and the first to the
session, so that a dropped, doubled, exchanged or foreign object fails as flipped bits do. The
first line has the number and the checksum of the others: a cut object is recognized too.

A *tombstone* is the first line alone. It holds a place in the log after its records were merged
into a segment, and still tells whose they were.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from perdure.errors import ConfigError, CorruptRecordError, FormatError, UnsupportedVersionError
from perdure.records import frames, json
from perdure.records.frames import Position
from perdure.records.records import Entry, Record

FORMAT = 1

GONE = b'{"gone":true}\n'
"""Holds a place in the log of a session that was deleted."""

_EPOCH = b',"e":'


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A commit's first line."""

    perdure: int
    """The format."""
    first: int
    count: int
    epoch: int
    owner: str
    seed: int
    """The checksum of the record before it."""
    bytes: int
    """Of the lines that follow."""
    sum: int
    """Their CRC-32."""
    cut: bool = False
    """The lines were merged into a segment, or removed."""

    @property
    def last(self) -> int:
        """The seq of the last record."""
        return self.first + self.count - 1


class Commit(msgspec.Struct, frozen=True):
    """A commit that was read and whose checksums hold."""

    header: Header
    lines: bytes

    @property
    def crc(self) -> int:
        """The last record's checksum, which seeds the next one's."""
        return int(self.lines[-11:-3], 16)


def encode(
    entries: Sequence[Entry], *, first: int, epoch: int, owner: str, seed: int
) -> tuple[bytes, int]:
    """Return an object's bytes, and its last record's checksum.

    Raises:
        NotStorableError: A kind is no name, or a payload is not one line.

    """
    lines, crc = frames.encode(entries, first=first, epoch=epoch, crc=seed)
    header = Header(
        perdure=FORMAT,
        first=first,
        count=len(entries),
        epoch=epoch,
        owner=owner,
        seed=seed,
        bytes=len(lines),
        sum=zlib.crc32(lines),
    )
    return frames.seal(msgspec.json.encode(header)) + lines, crc


def tombstone(header: Header) -> bytes:
    """Return what is left of a commit whose records lie elsewhere."""
    return frames.seal(msgspec.json.encode(msgspec.structs.replace(header, cut=True)))


def cut_of(data: bytes) -> Header:
    """Return the header that the tombstone of a commit, just encoded, would have."""
    body = frames.open_sealed(data[: data.find(b"\n") + 1])
    assert body is not None
    return msgspec.structs.replace(json.decode(body, Header), cut=True)


def commit(name: str, first: int, data: bytes) -> Commit:
    """Return the commit in an object's bytes, its lines not parsed yet.

    Raises:
        CorruptRecordError: They are not what was written under that name.
        UnsupportedVersionError: A newer release wrote them.

    """
    end = data.find(b"\n") + 1
    body = frames.open_sealed(data[:end])
    try:
        header = None if body is None else json.decode(body, Header)
    except (FormatError, ConfigError):
        header = None
    if header is None or header.first != first:
        raise damaged(name, "its first line is not whole")
    if header.perdure > FORMAT:
        message = (
            f"{name} has format {header.perdure}, this release reads up to {FORMAT}: use a newer "
            "release of perdure"
        )
        raise UnsupportedVersionError(message, object=name, format=header.perdure)
    lines = data[end:]
    if not header.cut and (len(lines) != header.bytes or zlib.crc32(lines) != header.sum):
        raise damaged(name, f"it should hold {header.bytes} bytes of records, and they differ")
    return Commit(header, lines)


def records_of(name: str, lines: bytes, start: Position) -> tuple[list[Record], Position]:
    """Return the records of whole lines behind *start*, over epochs, and where they end.

    Raises:
        CorruptRecordError: A line is not exactly the next record.

    """
    records: list[Record] = []
    at = Position(0, start.seq, start.crc)
    epoch = 0
    while at.offset < len(lines):
        before, epoch = epoch, _epoch_at(lines, at.offset)
        rest = lines[at.offset :] if at.offset else lines
        found = frames.lines(rest, epoch=epoch, start=at) if epoch > before else None
        if found is None or not found.records:
            raise damaged(name, f"record {at.seq + 1} is not what was written")
        records += found.records
        at = found.end
    return records, at


def _epoch_at(lines: bytes, offset: int) -> int:
    """Return the epoch that a line claims; whether it is true, its checksum says."""
    begin = lines.find(_EPOCH, offset, offset + 64)
    digits = lines[begin + len(_EPOCH) : begin + len(_EPOCH) + 20].partition(b",")[0]
    return int(digits) if begin >= 0 and digits.isdigit() else 0


def damaged(name: str, what: str) -> CorruptRecordError:
    """Return the error for an object that is not what was written."""
    message = (
        f"object {name} is damaged: {what}; it was left where it is: restore it from an older "
        "version of the object or from a copy of the bucket"
    )
    return CorruptRecordError(message, object=name)
