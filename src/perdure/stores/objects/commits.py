"""Encoding of commits: an object with a header line, then the records' lines. Pure.

The lines are `perdure.records.records`: the checksum of each starts from the one before it, and the
first one from the session's seed. So a removed, duplicated, swapped or foreign object is detected
like flipped bits. The header has the number and the checksum of the record lines: a truncated
object is detected, too.

A *tombstone* is the header alone. It occupies a place in the log after its records were merged into
a segment, and still names their owner.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from perdure.errors import ConfigError, CorruptRecordError, FormatError, UnsupportedVersionError
from perdure.records import json
from perdure.records import records as frames
from perdure.records.records import Entry, Position, Record

FORMAT = 1

GONE = b'{"gone":true}\n'
"""Occupies a place in the log of a deleted session."""

_EPOCH = b',"e":'


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A commit's header: its first line."""

    perdure: int
    """The format's number."""
    first: int
    count: int
    epoch: int
    owner: str
    seed: int
    """The checksum of the record before it."""
    bytes: int
    """Size of the record lines."""
    sum: int
    """Their CRC-32."""
    cut: bool = False
    """Whether it is a tombstone: the lines were merged into a segment, or removed."""

    @property
    def last(self) -> int:
        """The seq of the last record."""
        return self.first + self.count - 1


class Commit(msgspec.Struct, frozen=True):
    """A commit with valid checksums."""

    header: Header
    lines: bytes

    @property
    def crc(self) -> int:
        """The last record's checksum, the seed of the next one."""
        return int(self.lines[-11:-3], 16)


def encode(
    entries: Sequence[Entry], *, first: int, epoch: int, owner: str, seed: int
) -> tuple[bytes, int]:
    """Return an object's bytes, and its last record's checksum.

    Raises:
        NotStorableError: A kind is not a valid name, or a payload is not one line.

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
    """Return the tombstone of a commit whose records are in a segment."""
    return frames.seal(msgspec.json.encode(msgspec.structs.replace(header, cut=True)))


def tombstone_header(data: bytes) -> Header:
    """Return the header of the tombstone of an encoded commit."""
    body = frames.open_sealed(data[: data.find(b"\n") + 1])
    assert body is not None
    return msgspec.structs.replace(json.decode(body, Header), cut=True)


def commit(name: str, first: int, data: bytes) -> Commit:
    """Decode a commit, without parsing its record lines.

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
        raise damage_error(name, "its first line is damaged")
    if header.perdure > FORMAT:
        message = (
            f"{name} has format {header.perdure}, this release reads up to {FORMAT}: use a newer "
            "release of perdure"
        )
        raise UnsupportedVersionError(message, object=name, format=header.perdure)
    lines = data[end:]
    if not header.cut and (len(lines) != header.bytes or zlib.crc32(lines) != header.sum):
        raise damage_error(name, f"its records are not the {header.bytes} bytes in its header")
    return Commit(header, lines)


def records_of(name: str, lines: bytes, start: Position) -> tuple[list[Record], Position]:
    """Return the records of lines after *start*, across epochs, and the position at their end.

    Raises:
        CorruptRecordError: A line is not exactly the next record.

    """
    records: list[Record] = []
    at = Position(0, start.seq, start.crc)
    epoch = 0
    while at.offset < len(lines):
        before, epoch = epoch, _epoch_at(lines, at.offset)
        remaining = lines[at.offset :] if at.offset else lines
        parsed = frames.lines(remaining, epoch=epoch, start=at) if epoch > before else None
        if parsed is None or not parsed.records:
            raise damage_error(name, f"record {at.seq + 1} is not what was written")
        records += parsed.records
        at = parsed.end
    return records, at


def _epoch_at(lines: bytes, offset: int) -> int:
    """Return the epoch in a line, which is not verified: the line's checksum covers it."""
    begin = lines.find(_EPOCH, offset, offset + 64)
    digits = lines[begin + len(_EPOCH) : begin + len(_EPOCH) + 20].partition(b",")[0]
    return int(digits) if begin >= 0 and digits.isdigit() else 0


def damage_error(name: str, what: str) -> CorruptRecordError:
    """Return the error for an object that is not what was written."""
    message = (
        f"object {name} is damaged: {what}; it was left unchanged: restore it from an older "
        "version of the object or from a copy of the bucket"
    )
    return CorruptRecordError(message, object=name)
