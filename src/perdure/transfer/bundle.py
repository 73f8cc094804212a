"""Bundle format: one session as lines of JSON, in writing order.

    {"perdure_bundle":1,"tenant","agent","session"}  of format 2 if there are dead letters
    {"dead_letter":{…}}                             an item that could not be delivered
    {"blob":NAME,"data":BASE64}                     blobs that the lines below reference, by name
    {"n":SEQ,"k":KIND,"end":true?,"r":PAYLOAD}      the log, without records of the store itself
    {"document":NAME,"as_of":SEQ,"text":TEXT}       or "data":BASE64: a folded document, by name
    {"manifest":{…}}                                the documents' manifest, if there is one
    {"end":LINES,"sha256":HEX}                      checksum of all bytes before this line

Epochs and owners are left out; sequence numbers keep a gap where the store had a record of its own.

A bundle is a file from anywhere. What it may cost is limited while it is read: a line's bytes, the
numbers that it leaves out, which an import fills, a record's bytes with its media in place, and
what an import holds until it writes it at once. Its log begins with nothing, or with documents
whose blobs it has.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from typing import Any, Final, TypeAlias, final

import msgspec

from perdure.errors import (
    CorruptRecordError,
    InvalidArgumentError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.memory.documents import InboxTakenPayload
from perdure.records.chunks import name_of
from perdure.records.json import MAX_RECORD_BYTES, as_utf8, decode, encode, require_utf8
from perdure.records.keys import SessionKey, stored_key
from perdure.records.manifest import Manifest, Origin, origin_in
from perdure.records.media import LIFTED_KINDS, filled_bytes, referred
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, CONTEXT, HOLDER_KINDS, TAKEN, Record
from perdure.session.copied import OWN_KINDS
from perdure.store import Document

FORMAT = 2
"""The newest format. Bundles without dead letters use format 1, which every release reads."""
MOST_LINE = 64 * 1024 * 1024
"""Limit of a line's bytes: a record of 16 MiB, or a blob of 48 MiB."""
MOST_KEPT = 64 * 1024 * 1024
MOST_ITEMS = 10_000
"""Limits of the bytes, as lines, and of the number of a bundle's documents, and of its dead
letters: an import writes each of them at once."""
MOST_MISSING = 10_000_000
"""Limit of sequence numbers that a bundle leaves out: an import fills them with gap records."""
MOST_SEQ = 2**53
"""Limit of a record's number."""
FREE_MISSING = 20_000
MISSING_PER_BYTE = 4
"""Limit of numbers that it may leave out: so many, and so many more for each of its bytes."""


class BundleHeader(msgspec.Struct, frozen=True):
    """First line: the session's key."""

    key: SessionKey
    format: int = 1


class BundleBlob(msgspec.Struct, frozen=True):
    """A blob, by the SHA-256 of its bytes."""

    name: str
    data: bytes


class BundleDocument(msgspec.Struct, frozen=True):
    """A document."""

    name: str
    document: Document


class BundleFooter(msgspec.Struct, frozen=True):
    """Last line: the bundle is complete."""


Item: TypeAlias = (
    BundleHeader | DeadLetter | BundleBlob | Record | BundleDocument | Manifest | BundleFooter
)


_KEPT: Final[dict[type, str]] = {BundleDocument: "documents", DeadLetter: "dead letters"}


def neutral(manifest: Manifest) -> Manifest:
    """Return a manifest without its store-specific fields."""
    return msgspec.structs.replace(manifest, epoch=0, position=msgspec.Raw(b"null"))


def neutral_record(record: Record) -> Record | None:
    """Return a record without store-specific fields; None for a store's own record.

    What the log begins with becomes a ``base`` record, unless a release before 0.1.0 wrote it.
    """
    origin = origin_in(record)
    if origin is not None and not origin.at:
        return base_record(origin, record.seq)
    if record.kind in HOLDER_KINDS or record.kind in OWN_KINDS:
        return None
    return Record(record.seq, 0, record.kind, record.payload, record.end)


def base_record(origin: Origin, seq: int) -> Record:
    """Return the record that names what a log begins with."""
    return Record(seq, 0, BASE, encode(Origin(cut=origin.cut, folded=origin.folded)), end=True)


class _Record(msgspec.Struct, omit_defaults=True):
    n: int
    k: str
    r: msgspec.Raw
    end: bool = False


@final
class KeptItems:
    """Counts what an import holds in memory until the end."""

    def __init__(self) -> None:
        self._bytes: Counter[type] = Counter()
        self._number: Counter[type] = Counter()

    def excess(self, item: Item, size: int) -> str:
        """Return what there is too much of with an item of so many bytes; empty for nothing."""
        kind = type(item)
        if kind not in _KEPT:
            return ""
        self._bytes[kind] += size
        self._number[kind] += 1
        if self._number[kind] > MOST_ITEMS:
            return f"more than {MOST_ITEMS} {_KEPT[kind]}"
        return (
            f"more than {MOST_KEPT} bytes of {_KEPT[kind]}" if self._bytes[kind] > MOST_KEPT else ""
        )


@final
class BundleWriter:
    """Encoder of items to lines, with the running checksum."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lines = 0

    def line(self, item: Item) -> bytes:
        """Return an item's line, newline included.

        Raises:
            TooLargeError: It is longer than a bundle's line may be.

        """
        line = encode(self._value(item)) + b"\n"
        if len(line) > MOST_LINE:
            raise TooLargeError(
                f"a {type(item).__name__} takes a line of {len(line)} bytes, and a bundle's may "
                f"have {MOST_LINE}: copy the session with `perdure migrate` or `perdure backup`",
                size=len(line),
                limit=MOST_LINE,
            )
        self._hash.update(line)
        self._lines += 1
        return line

    def _value(self, item: Item) -> Any:
        match item:
            case BundleFooter():
                return {"end": self._lines, "sha256": self._hash.hexdigest()}
            case BundleHeader(key, format_):
                names = {"tenant": key.tenant, "agent": key.agent, "session": key.session}
                return {"perdure_bundle": format_, **names}
            case DeadLetter():
                return {"dead_letter": item}
            case BundleBlob(name, data):
                return {"blob": name, "data": base64.b64encode(data).decode()}
            case Record():
                return _Record(item.seq, item.kind, msgspec.Raw(item.payload), item.end)
            case BundleDocument(name, document):
                return {"document": name, "as_of": document.as_of_seq, **_text(document.data)}
            case Manifest():
                return {"manifest": neutral(item)}


def _text(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"data": base64.b64encode(data).decode()}


class _Line(msgspec.Struct, kw_only=True):
    """Union of the fields of all kinds of lines."""

    perdure_bundle: int | None = None
    tenant: str = ""
    agent: str = ""
    session: str = ""
    dead_letter: DeadLetter | None = None
    blob: str | None = None
    data: str | None = None
    n: int | None = None
    k: str = ""
    r: msgspec.Raw = msgspec.Raw(b"null")
    end: int | bool = False
    document: str | None = None
    as_of: int = 0
    text: str | None = None
    manifest: Manifest | None = None
    sha256: str | None = None


def record_of(line: bytes) -> Record:
    """Return the record of a line that a `Reader` has read before."""
    return _record(decode(line, _Line))


def blob_of(line: bytes) -> bytes:
    """Return the bytes of a blob's line that a `Reader` has read before."""
    return _data(decode(line, _Line))


def _record(line: _Line) -> Record:
    return Record(line.n or 0, 0, line.k, bytes(line.r), line.end is True)


def _data(line: _Line) -> bytes:
    if line.text is not None:
        return line.text.encode()
    return base64.b64decode(line.data or "", validate=True)


_NO_EXPORT: Final = "if it is your own, copy the session with `perdure migrate` instead"


@final
class Reader:
    """Decoder of lines to items; detects missing and changed lines, and keeps what is few.

    Args:
        source: Name of the source, for error messages.

    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._kept = KeptItems()
        self._hash = hashlib.sha256()
        self._lines = 0
        self._bytes_read = 0
        self._is_whole = True
        """True if the last record ends its group."""
        self._missing = 0
        """Sequence numbers that were left out so far."""
        self.key: SessionKey
        """Key in its first line."""
        self.blobs: dict[str, int] = {}
        """The sizes of its blobs."""
        self.letters: list[DeadLetter] = []
        self.documents: dict[str, Document] = {}
        self.manifest: Manifest | None = None
        self.cut: int = 0
        """Number of records that were removed from the beginning of its log, as the log says."""
        self.seq: int = 1
        """The last record."""
        self.count: int = 0
        """Number of its records."""
        self.is_severed: bool = False
        """True if something refers to media that are not in it: lost ones, or another session's."""
        self.ended: bool = False
        """True once the footer was read; until then the bundle is incomplete."""

    def item(self, data: bytes | None) -> Item:
        """Return a line's item; None is a line of more than `MOST_LINE` bytes.

        Raises:
            CorruptRecordError: It is not a line of a bundle, or an earlier line was changed.
            UnsupportedVersionError: A newer release wrote the bundle.

        """
        if self.ended:
            raise self._corrupt("there are lines after its end")
        if data is None:
            raise self._corrupt(f"it is longer than {MOST_LINE} bytes", _NO_EXPORT)
        try:
            if not self._lines:
                data = as_utf8(data)
            require_utf8(data)
            line = decode(data, _Line)
        except CorruptRecordError as error:
            raise self._corrupt(str(error)) from None
        try:
            item = self._item(line)
        except InvalidArgumentError as error:
            raise self._corrupt(str(error)) from None
        if (self._lines == 0) != isinstance(item, BundleHeader):
            raise self._corrupt("a bundle begins with a line that names its session, once")
        if excess := self._kept.excess(item, len(data)):
            raise self._corrupt(f"there are {excess}", _NO_EXPORT)
        self._hash.update(data)
        self._lines += 1
        self._bytes_read += len(data)
        return item

    def _item(self, line: _Line) -> Item:
        if line.perdure_bundle is not None:
            return self._head(line, line.perdure_bundle)
        if line.n is not None:
            return self._record(line, line.n)
        if line.dead_letter is not None:
            self.letters.append(line.dead_letter)
            return line.dead_letter
        if line.blob is not None:
            data = self._blob(line)
            self.blobs[line.blob] = len(data)
            return BundleBlob(line.blob, data)
        if line.document is not None:
            document = Document(self._bytes(line), line.as_of)
            self._require_media(document.data)
            self.documents[line.document] = document
            return BundleDocument(line.document, document)
        if line.manifest is not None:
            return self._manifest(line.manifest)
        return self._end(line)

    def _record(self, line: _Line, seq: int) -> Record:
        if line.k in HOLDER_KINDS:
            raise self._corrupt(f"a record of the kind {line.k} is a store's own")
        before = self.seq
        if seq <= before:
            raise self._corrupt(f"record {seq} is out of order after {before}")
        self._leave_out(seq)
        if seq > before + 1 and not self._is_whole:
            raise self._corrupt(f"an epoch is within a group, before {seq}")
        self.seq, self._is_whole = seq, line.end is True
        self.count += 1
        record = _record(line)
        try:  # what an import reads of them
            if line.k == BASE:
                # A log that begins with documents has it at the number of the last removed one.
                self.cut = self._origin(decode(record.payload, Origin), seq).cut
            elif line.k == TAKEN:
                decode(record.payload, InboxTakenPayload)
        except CorruptRecordError as error:
            raise self._corrupt(str(error)) from None
        if line.k in LIFTED_KINDS:
            self._require_media(record.payload)
            if line.k != CONTEXT and filled_bytes(record.payload) > MAX_RECORD_BYTES:
                raise self._corrupt(
                    f"with its media in place, record {seq} has more than {MAX_RECORD_BYTES} bytes"
                )
        return record

    def _require_media(self, data: bytes) -> None:
        """Refuse references that say another size of a blob than it has."""
        for medium in referred(data):
            size = self.blobs.get(medium.name)
            self.is_severed = self.is_severed or size is None
            if size not in {None, medium.bytes}:
                raise self._corrupt(f"a medium of {medium.bytes} bytes is a blob of {size}")

    def _manifest(self, manifest: Manifest) -> Manifest:
        self._require_whole()
        self._leave_out(manifest.as_of_seq + 1)
        if manifest.base is not None:
            self._origin(manifest.base, manifest.as_of_seq)
        self.manifest = manifest
        return manifest

    def _origin(self, base: Origin, head: int) -> Origin:
        """Return an origin, and refuse one that names more than documents, or a later record."""
        if base.at or base.parent or base.kept or base.moved:
            raise self._corrupt(
                "it is of a fork, copy or rename of a release before 0.1.0",
                "make the session plain with `perdure migrate`, and export it there",
            )
        if base.folded and base.folded not in self.blobs:
            raise self._corrupt(
                f"the session begins with the blob {base.folded}, which is not in it"
            )
        if not 0 <= base.cut <= head:
            raise self._corrupt(f"its log does not begin after record {base.cut}")
        return base

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise self._corrupt(f"the log ends within a group, at {self.seq}")

    def _leave_out(self, seq: int) -> None:
        """Count the numbers that are missing before *seq*."""
        self._missing += max(seq - self.seq - 1, 0)
        if self._missing > MOST_MISSING:
            raise self._corrupt(f"more than {MOST_MISSING} records are missing before {seq}")

    def _head(self, line: _Line, version: int) -> BundleHeader:
        if version > FORMAT:
            raise UnsupportedVersionError(
                f"{self._source} is a bundle of format {version}, this release reads up to "
                f"{FORMAT}: use a newer release",
                path=self._source,
            )
        self.key = stored_key(line.agent, line.session, line.tenant)
        return BundleHeader(self.key, version)

    def _end(self, line: _Line) -> BundleFooter:
        if line.sha256 is None:
            raise self._corrupt("it is not a line of a bundle")
        if (line.end, line.sha256) != (self._lines, self._hash.hexdigest()):
            raise self._corrupt("what comes before it was changed, or lines are missing")
        self._require_whole()
        most = FREE_MISSING + MISSING_PER_BYTE * self._bytes_read
        if self._missing > most:
            raise self._corrupt(
                f"{self._missing} records are missing, and a bundle of {self._bytes_read} bytes "
                f"may leave out {most}",
                _NO_EXPORT,
            )
        self.ended = True
        return BundleFooter()

    def _blob(self, line: _Line) -> bytes:
        data = self._bytes(line)
        if name_of(data) != line.blob:
            raise self._corrupt(f"the blob {line.blob} does not match its name")
        return data

    def _bytes(self, line: _Line) -> bytes:
        try:
            return _data(line)
        except ValueError:
            raise self._corrupt("its data is not base64") from None

    def _corrupt(self, reason: str, cure: str = "export the session again") -> CorruptRecordError:
        at = self._lines + 1
        return CorruptRecordError(
            f"{self._source}, line {at}: {reason}; {cure}",
            path=self._source,
            line=at,
        )
