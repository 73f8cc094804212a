"""Layout of a bucket: names of objects, and the encodings of commits and heads. Pure.

    s/<folder>/head                        holder, manifest, segments of the log
    s/<folder>/log/<generation>/<seq>      one commit, named by its first seq
    s/<folder>/seg/<epoch>-<first>-<id>    a segment of merged commits
    s/<folder>/doc/<epoch>-<id>            documents of one fold
    inbox/<folder>/<number>                the items of one ``enqueue``
    dead-letters/<folder>/<hash>           a dead letter
    dir/<tenant>/<agent>/<session>-<gen.>  the directory: names in the order of their keys, written
                                           at most once a minute while the session is saved
    drafts/<tenant>/<agent>/<session>-<gen.>  a draft, as the directory has sessions
    tenants/<tenant>                       a tenant whose name is too long for an object's name
    blobs/<tenant>/<name>                  a blob
    quarantine/<tenant>/<name>             an unreachable blob
    owners/<owner>                         an owner's heartbeat
    asks/<owner>/<what>-<folder>           a request to an owner

A folder is a hash of the full key, so no id can reach another session's objects; the key itself is
in the head and is verified. A generation is the number of a session's first epoch since it was
created, or created again. Names in the directory are hex, which keeps the order of ids; for a long
id they have its first 100 bytes and a hash, since some services allow only 255 characters between
two slashes.

The head is a session's only object that is replaced, by compare-and-swap. It has the holder (for
listings and other processes; the log decides), the floor up to which the log was merged into
segments, and the current documents. All other objects are written once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from perdure.errors import ConfigError, CorruptRecordError, FormatError
from perdure.records import json, records as frames
from perdure.records.keys import SessionKey
from perdure.records.manifest import About, Draft, Manifest, decode_manifest, newer_format
from perdure.records.records import Entry, Position, Record, open_sealed, seal

_MAX_BYTES = 100
"""Bytes of an id up to which its name contains all of it."""
_DIGITS = 16
INBOX = "inbox/"
OWNERS = "owners/"
DEAD_LETTERS = "dead-letters/"


def folder_of(key: SessionKey) -> str:
    """Return the folder of a session's objects; ids contain no NUL, so it is unique."""
    full_key = f"{key.tenant}\0{key.agent}\0{key.session}".encode()
    return f"s/{hashlib.sha256(full_key).hexdigest()[:40]}"


def log_prefix(folder: str, generation: int) -> str:
    """Return the prefix of a generation's commits."""
    return f"{folder}/log/{generation:010d}/"


def log_name(folder: str, generation: int, seq: int) -> str:
    """Return the name of the commit whose first record is *seq*."""
    return f"{log_prefix(folder, generation)}{seq:0{_DIGITS}d}"


def first_of(name: str) -> int:
    """Return the seq in a commit's name, or the number in a post's; -1 for another name."""
    last = name.rpartition("/")[2]
    return int(last) if len(last) == _DIGITS and last.isdecimal() else -1


def generation_seed(folder: str, generation: int) -> int:
    """Return the checksum seed of a generation's first record, which ties it to its session."""
    return zlib.crc32(f"{folder}/{generation}".encode())


def inbox_prefix(folder: str) -> str:
    """Return the prefix of a session's posts."""
    return f"{INBOX}{folder[2:]}/"


def inbox_name(folder: str, number: int) -> str:
    """Return the name of a post."""
    return f"{inbox_prefix(folder)}{number:0{_DIGITS}d}"


def dead_letters_prefix(folder: str) -> str:
    """Return the prefix of a session's dead letters."""
    return f"{DEAD_LETTERS}{folder[2:]}/"


def dead_letter_name(folder: str, op_id: str) -> str:
    """Return the name of a dead letter."""
    digest = hashlib.sha256(op_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{dead_letters_prefix(folder)}{digest}"


def encode_id(text: str) -> str:
    """Return a name for an id: names are in the order of ids, except for those over 100 bytes."""
    data = text.encode()
    if len(data) <= _MAX_BYTES:
        return data.hex()
    return f"{data[:_MAX_BYTES].hex()}~{hashlib.sha256(data).hexdigest()[:32]}"


def tenant_name(tenant: str) -> str:
    """Return the name of a tenant; the unnamed tenant has one, too."""
    return f"t{encode_id(tenant)}"


def tenant_of(name: str) -> str | None:
    """Return the tenant of a name, None if the name does not contain all of it."""
    return None if "~" in name else bytes.fromhex(name[1:]).decode()


def directory_prefix(tenant: str) -> str:
    """Return the prefix of a tenant's sessions in the directory."""
    return f"dir/{tenant_name(tenant)}/"


def directory_name(key: SessionKey, generation: int) -> str:
    """Return a session's name in the directory; each generation has its own."""
    names = f"{encode_id(key.agent)}/{encode_id(key.session)}"
    return f"{directory_prefix(key.tenant)}{names}-{generation:010d}"


def draft_name(key: SessionKey, generation: int) -> str:
    """Return a draft's name among the drafts."""
    return f"drafts/{directory_name(key, generation)[4:]}"


def drafts_prefix(tenant: str) -> str:
    """Return the prefix of a tenant's drafts."""
    return f"drafts/{tenant_name(tenant)}/"


def key_of(name: str, tenant: str) -> SessionKey | None:
    """Return the key in a name of the directory, None if the name does not contain all of it."""
    agent, last = name.split("/")[-2:]
    session = last.partition("-")[0]
    if "~" in agent or "~" in session:
        return None
    return SessionKey(bytes.fromhex(agent).decode(), bytes.fromhex(session).decode(), tenant)


def epoch_of(name: str) -> int:
    """Return the epoch in the name of a document's or a segment's object."""
    return int(name.rpartition("/")[2].partition("-")[0])


def owner_name(owner: str) -> str:
    """Return the name of an owner's heartbeat."""
    return f"{OWNERS}{hashlib.sha256(owner.encode()).hexdigest()[:32]}"


def requests_prefix(owner: str) -> str:
    """Return the prefix of the requests to an owner."""
    return f"asks/{owner_name(owner).removeprefix(OWNERS)}/"


def request_name(owner: str, what: str, folder: str) -> str:
    """Return the name of a request to an owner; equal requests have the same name."""
    return f"{requests_prefix(owner)}{what}-{folder[2:]}"


# Encoding of commits: an object with a header line, then the records' lines. Pure


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
    """True for a tombstone: the lines were merged into a segment, or removed."""

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
        raise newer_format(name, header.perdure, FORMAT, object=name)
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
    return CorruptRecordError(
        f"object {name} is damaged: {what}; it was left unchanged: restore it from an older "
        "version of the object or from a copy of the bucket",
        object=name,
    )


# The head of a session: what it holds, and its encoding


T = TypeVar("T")

HEAD_FORMAT = 1

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

    format: int = HEAD_FORMAT
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
    hidden: bool = False
    """True if no one reads it yet: a draft, or a log whose epoch record is about to be created. It
    is ``deleted``, too."""
    draft: Draft | None = None
    """The session that this one is a copy of."""
    posts: int = 0
    """The last post that a deleted session owned: later ones are to the id, and wait."""

    @property
    def is_over(self) -> bool:
        """True if it was deleted, and has no holder any more."""
        return self.deleted and not self.hidden


class _Folded(msgspec.Struct):
    as_of_seq: int = 0


class _Format(msgspec.Struct):
    format: int = HEAD_FORMAT


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
    if number is not None and number.format > HEAD_FORMAT:
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
    manifest = decode_manifest(body, f"the manifest in {name}", object=name)
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


class DirectoryEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session in the directory: its key, and what its holder has said since the last fold."""

    agent: str
    session: str
    tenant: str
    seq: int = 0
    """The record that the rest is as of: a fold as of a later one knows better."""
    turns: int = 0
    about: About = About()


def directory_entry(
    key: SessionKey, seq: int = 0, turns: int = 0, about: About | None = None
) -> bytes:
    """Return the bytes of a session in the directory."""
    entry = DirectoryEntry(
        agent=key.agent,
        session=key.session,
        tenant=key.tenant,
        seq=seq,
        turns=turns,
        about=about or About(),
    )
    return with_checksum(entry)


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
