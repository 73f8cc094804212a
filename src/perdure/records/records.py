"""The log's records, and their frames: each record as one line with a checksum.

A session's only truth is an append-only log of immutable records, numbered by ``seq`` from 1
without a gap. Records that belong together form a group, whose last record carries ``end``. A
reader carries kinds that it does not know through untouched.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from perdure.errors import NotStorableError
from perdure.records.json import decode_with, decoder_of

MESSAGE = "message"
TOOL_CALL = "tool_call"
TOOL_RESULT = "tool_result"
CONTEXT = "context"
"""A working context that replaces the previous one (compaction, reset, repair)."""
RETRACT = "retract"
"""A retraction of messages after a record, or in a turn that was cut; nothing is erased."""
TURN = "turn"
"""A turn's begin, end or interruption."""
OUTSIDE = "outside"
"""In a group that was appended while a named turn ran, and that is no part of it."""
MEMORY_SET = "memory_set"
MEMORY_DROP = "memory_drop"
ITEM = "item"
"""An episodic or semantic memory."""
STATE = "state"
"""A named state: a plugin's, or one that the application stores under a key."""
META = "meta"
"""Changes to a session's title, tags, owner and metadata."""
EVENT = "event"
"""A kernel event: what an agent did, on the session's logical clock."""
CHECKPOINT = "checkpoint"
"""A labelled point of the session, chained to the previous one by its hash."""
CHECKPOINTS_PRUNED = "checkpoints_pruned"
"""Removal of checkpoints; their links in the chain stay."""
BASE = "base"
"""The history before this log: its place, or that it was removed; the newest counts."""
FORK = "fork"
"""Another session begins with this one's history."""
ENDING = "ending"
"""The holder is about to delete the session: no fork of it begins after this record."""
TAKEN = "taken"
"""The op ids of the posted items in the same group."""
ADMITTED = "admitted"
"""A message posted to an agent: when admitted, when its turn begins, when it ends."""
EFFECT = "effect"
"""A call of a tool with side effects: before it, and its result."""
APPROVAL = "approval"
"""A tool call that waits for approval, and the answer."""
MISSING = "missing"
"""Records were lost to damage from here on; the payload says which."""
FOREIGN = "foreign"
"""An adapter's own record that is no message: an envelope names the SDK."""
EPOCH = "epoch"
"""A new holder of the session; written by the store when a lease is taken."""
GAP = "gap"
"""A placeholder for the number of a record that belonged to another log, in a copy of that log."""

HOLDER_KINDS = frozenset({EPOCH, GAP})
"""Kinds that say nothing of what a session holds."""

MESSAGE_KINDS = frozenset({MESSAGE, TOOL_CALL, TOOL_RESULT})


class Entry(NamedTuple):
    """A record that was accepted, before it has a place in the log."""

    kind: str
    payload: bytes
    """One JSON value in one line, UTF-8."""
    end: bool = True
    """True if the group ends with it."""


class Record(msgspec.Struct, frozen=True):
    """A record at its place in the log."""

    seq: int
    epoch: int
    kind: str
    payload: bytes
    end: bool


class GapPayload(msgspec.Struct, omit_defaults=True):
    """The payload of a gap; none, in a log that an earlier release copied, is an epoch record's."""

    was: str = EPOCH
    """The kind of the record that had this number."""
    is_fork: bool = False
    """True if that was the origin of a fork, which began with no work in progress."""


_GAP = decoder_of(GapPayload | None)


def gap_in(payload: bytes) -> GapPayload:
    """Return what had the number of a gap."""
    return decode_with(_GAP, payload) or GapPayload()


def begins_epoch(record: Record) -> bool:
    """Return whether a new holder began here, or in the log that this one is a copy of."""
    return record.kind == EPOCH or (record.kind == GAP and gap_in(record.payload).was == EPOCH)


MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line counts as damage, and no crash leaves more of a write: several times the largest
record."""

# Length of ``,"c":"8 digits"}``, the end of each line without its newline.
_TAIL = 16

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_:.\-]{0,63}\Z")
_HEAD = re.compile(
    rb'\{"n":(0|[1-9][0-9]{0,17}),"e":([1-9][0-9]{0,17})'
    rb',"k":"([A-Za-z][A-Za-z0-9_:.\-]{0,63})"(,"end":true)?,"r":'
)
_CHECK = re.compile(rb',"c":"([0-9a-f]{8})"\}\Z')

# The bytes between epoch and payload, by kind and end; kinds are few.
_heads: dict[tuple[str, bool], bytes] = {}
_kinds: dict[bytes, tuple[str, bool]] = {}
_MAX_HEADS = 1024
_BEFORE_PAYLOAD = b'"r":'
_LONGEST_HEAD = 100
"""Of 64 letters, and what is around them."""


class Position(msgspec.Struct, frozen=True):
    """A place between two lines: the offset, and the checksum that the next line continues."""

    offset: int = 0
    """Bytes of the file up to here."""
    seq: int = 0
    """The last record before it."""
    crc: int = 0
    """That record's checksum, which seeds the next one's."""


def encode(records: Iterable[Entry], *, first: int, epoch: int, crc: int) -> tuple[bytes, int]:
    """Return the lines of *records*, numbered from *first*, and the last one's checksum.

    Raises:
        NotStorableError: A kind is invalid, or a payload is not one line.

    """
    parts: list[bytes] = []
    add = parts.append
    crc32 = zlib.crc32
    middle = b',"e":%d' % epoch
    seq = first
    for kind, payload, end in records:
        if b"\n" in payload:
            raise NotStorableError(
                f"the payload of record {seq} holds a line break: encode it as one line",
                seq=seq,
                kind=kind,
            )
        line = b'{"n":%d%b%b%b' % (
            seq,
            middle,
            _heads.get((kind, end)) or _head(kind, end),
            payload,
        )
        crc = crc32(line, crc)
        add(line)
        add(b',"c":"%08x"}\n' % crc)
        seq += 1
    return b"".join(parts), crc


def _head(kind: str, end: bool) -> bytes:  # noqa: FBT001  # a key, not an option
    if not _KIND.match(kind):
        raise NotStorableError(
            f"{kind!r} is no kind of record: use a letter, then letters, digits and _ : . - "
            "up to 64 in all",
            kind=kind,
        )
    head = b',"k":"%b"%b,"r":' % (kind.encode(), b',"end":true' if end else b"")
    if len(_heads) < _MAX_HEADS:
        _heads[kind, end] = head
        _kinds[head] = (kind, end)
    return head


class FramedRecords(msgspec.Struct):
    """The records of a run of lines."""

    records: list[Record]
    end: Position
    """After the last sound line."""
    sound: bool = True
    """False if the line at ``end`` is whole, but not the next record."""


def lines(data: bytes, *, epoch: int, start: Position) -> FramedRecords:
    """Return the records of the whole lines in *data*, which begins at *start*."""
    records: list[Record] = []
    offset, seq, crc = start.offset, start.seq, start.crc
    begin = 0
    sound = True
    view, find, crc32 = memoryview(data), data.find, zlib.crc32
    middle, kinds = b',"e":%d' % epoch, _kinds if epoch > 0 else {}
    while (stop := find(b"\n", begin)) >= 0:
        # Nearly every line begins with these bytes and a known head, which need not be parsed.
        front, cut = b'{"n":%d%b' % (seq + 1, middle), stop - _TAIL
        at = begin + len(front)
        to = find(_BEFORE_PAYLOAD, at, at + _LONGEST_HEAD) + len(_BEFORE_PAYLOAD)
        known = kinds.get(data[at:to]) if to < cut and data.startswith(front, begin) else None
        sum_ = crc32(view[begin:cut], crc) if known is not None else 0
        if known is not None and data.startswith(b',"c":"%08x"}' % sum_, cut):
            kind, end = known
            records.append(Record(seq + 1, epoch, kind, data[to:cut], end))
            crc = sum_
        else:
            parsed = _record(data, begin, stop, seq + 1, epoch, crc)
            if parsed is None:
                sound = False
                break
            record, crc = parsed
            records.append(record)
            _head(record.kind, record.end)
        seq += 1
        begin = stop + 1
    return FramedRecords(records, Position(offset + begin, seq, crc), sound)


class Scanner:
    """Read records from the bytes of one epoch's file, chunk by chunk.

    Feed it the file's bytes in order from *start*. It returns whole groups; `end` is the position
    after the last of them. At the first invalid line it sets `damage` to that line's offset and
    reads no further.
    """

    __slots__ = ("_epoch", "_group", "_rest", "damage", "end", "next")

    def __init__(self, epoch: int, start: Position) -> None:
        self._epoch = epoch
        self._group: list[Record] = []
        self._rest = b""
        # Where the next line begins: after `end` while a group is not whole.
        self.next: Position = start
        # After the last record that ends a group.
        self.end: Position = start
        # The offset of the first invalid line.
        self.damage: int | None = None

    def feed(self, data: bytes) -> list[Record]:
        """Read the next bytes; return the records of the groups that are now whole."""
        if self.damage is not None:
            return []
        start, fresh = self.next, len(data)
        data = self._rest + data if self._rest else data
        records_found = lines(data, epoch=self._epoch, start=start)
        self.next = records_found.end
        self._rest = data[records_found.end.offset - start.offset :]
        # No line that has zeros is sound, no matter what follows: maybe a hole without an end.
        has_zeros = _LOST_PAGE in self._rest[-fresh:]
        if not records_found.sound or has_zeros or len(self._rest) > MAX_LINE_BYTES:
            self.damage = records_found.end.offset
        return self._whole(data, start, records_found.records)

    def _whole(self, data: bytes, start: Position, records: list[Record]) -> list[Record]:
        """Hold back records whose group has not ended yet."""
        open_ = 0
        while open_ < len(records) and not records[-1 - open_].end:
            open_ += 1
        done = len(records) - open_
        if not done:
            self._group += records
            return []
        offset = self.next.offset - start.offset
        for _ in range(open_):
            offset = data.rindex(b"\n", 0, offset - 1) + 1
        crc = int(data[offset - 11 : offset - 3], 16)
        self.end = Position(start.offset + offset, records[done - 1].seq, crc)
        lines_whole = [*self._group, *records[:done]]
        self._group = records[done:]
        return lines_whole


def _record(
    data: bytes, begin: int, stop: int, seq: int, epoch: int, crc: int
) -> tuple[Record, int] | None:
    """Return the record of a line and its checksum, None unless it is exactly the next one."""
    cut = stop - _TAIL
    check = _CHECK.match(data, cut, stop) if cut > begin else None
    if check is None:
        return None
    sum_ = int(check[1], 16)
    if zlib.crc32(memoryview(data)[begin:cut], crc) != sum_:
        return None
    head = _HEAD.match(data, begin, cut)
    if head is None or int(head[1]) != seq or int(head[2]) != epoch:
        return None
    payload = data[head.end() : cut]
    if not payload:
        return None
    return Record(seq, epoch, head[3].decode(), payload, head[4] is not None), sum_


def first_payload(line: bytes) -> bytes | None:
    """Return the payload of a file's first line, whose checksum is not verified yet.

    It contains what the file follows, and so the seed for verifying the line.
    """
    head = _HEAD.match(line)
    if head is None or len(line) - head.end() <= _TAIL:
        return None
    return line[head.end() : -_TAIL]


def verify(line: bytes, *, seq: int, epoch: int, seed: int) -> tuple[Record, int] | None:
    """Return a line's record and checksum, None unless it has this seq, epoch and seed."""
    return _record(line, 0, len(line), seq, epoch, seed)


SEED_BYTES = 11
"""The last bytes of a line that hold its checksum: 8 digits, ``"}`` and the newline."""


def seed_of(data: bytes) -> int | None:
    """Return the checksum at the end of *data*, which seeds the next line; None without one."""
    try:
        return int(data[-SEED_BYTES:-3], 16)
    except ValueError:
        return None


def number_of(line: bytes) -> int:
    """Return the number that a line states, which is not verified yet; 0 for no record."""
    head = _HEAD.match(line)
    return 0 if head is None else int(head[1])


# UTF-16 and UTF-32 have shorter runs of zeros.
_LOST_PAGE = bytes(4)


def is_cut_write(data: bytes) -> bool:
    """Return whether *data* may be what a crash has left of a write at the end of a file.

    *data* begins with the first line that is not the next record, and reaches to the file's end.
    A write that was cut leaves a last line without its newline, or zeros where a page never came
    to the disk, which no record contains. Any other complete line was whole once: it is damage.
    """
    return all(_LOST_PAGE in line for line in data.split(b"\n")[:-1])


_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig", "an editor has put a byte order mark in front of it"),
    (codecs.BOM_UTF16_LE, "utf-16", "an editor has saved it as UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16", "an editor has saved it as UTF-16"),
)


def conversion_of(data: bytes) -> str:
    """Return what a tool for text has done to a file, of which *data* is a part; else nothing."""
    for mark, _, what in _MARKS:
        if data.startswith(mark):
            return what
    if data.partition(b"\n")[0].endswith(b"\r"):
        return "git's autocrlf, FTP in text mode or an editor has turned its line ends into CR LF"
    return ""


def unconverted(data: bytes) -> bytes:
    """Return a file as it was before a tool for text has converted it. Records hold no CR."""
    for mark, encoding, _ in _MARKS:
        if data.startswith(mark):
            data = data.decode(encoding, "replace").encode()
    return data.replace(b"\r\n", b"\n")


def salvaged(data: bytes, *, epoch: int, seq: int, crc: int) -> list[Record]:
    """Return all records of a file's lines that can be proven, also those after damage.

    A line is proven by the checksum of the previous line: the stated one, or the one computed
    from its bytes.

    Args:
        data: The file from a line's beginning on; bytes after the last newline do not count.
        epoch: The epoch of the file.
        seq: The record before the first line.
        crc: That record's checksum.

    """
    runs: list[Record] = []
    seeds = {crc}
    for line in data.split(b"\n")[:-1]:
        content = line[:-_TAIL]
        check, head = _CHECK.search(line), _HEAD.match(line)
        stated = None if check is None else int(check[1], 16)
        # Once lines are lost, only a line's own number identifies it.
        number = int(head[1]) if head is not None else 0
        proofs = [seed for seed in seeds if number > seq and zlib.crc32(content, seed) == stated]
        parsed = _record(line, 0, len(line), number, epoch, proofs[0]) if proofs else None
        if parsed is not None:
            runs.append(parsed[0])
            seq = number
            seeds = {stated} if stated is not None else set()
        else:
            seeds = {zlib.crc32(content, seed) for seed in seeds}
            seeds |= set() if stated is None else {stated}
    return runs


def seal(document: bytes) -> bytes:
    """Return a JSON object with its checksum as the last member, and a newline."""
    body = document[:-1]
    return b'%b,"c":"%08x"}\n' % (body, zlib.crc32(body))


def open_sealed(data: bytes) -> bytes | None:
    """Return the JSON object of `seal`, None if it is not intact."""
    line = data[:-1]
    check = _CHECK.search(line) if data.endswith(b"\n") else None
    if check is None or zlib.crc32(line[:-_TAIL]) != int(check[1], 16):
        return None
    return line[:-_TAIL] + b"}"
