"""Bundle format: one session as lines of JSON, in writing order.

    {"perdure_bundle":1,"tenant","agent","session"}  of format 2 if there are dead letters
    {"dead_letter":{…}}                             an item that could not be delivered
    {"blob":NAME,"data":BASE64}                     blobs that the lines below reference, by name
    {"n":SEQ,"k":KIND,"end":true?,"r":PAYLOAD}      the log, without records of the store itself
    {"document":NAME,"as_of":SEQ,"text":TEXT}       or "data":BASE64: a folded document, by name
    {"manifest":{…}}                                the documents' manifest, if there is one
    {"end":LINES,"sha256":HEX}                      checksum of all bytes before this line

Epochs and owners are left out; sequence numbers keep a gap where the store had a record of its own.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, TypeAlias, final

import msgspec

from perdure.errors import CorruptRecordError, UnsupportedVersionError
from perdure.records.chunks import name_of
from perdure.records.json import as_utf8, decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, Origin
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, EPOCH, Record
from perdure.store import Document

FORMAT = 2
"""The newest format. Bundles without dead letters use format 1, which every release reads."""
GAP = "gap"
"""Kind of the records that fill gaps in an imported log."""
MOST_MISSING = 10_000_000
"""Limit of sequence numbers missing before a record: an import fills them with gap records."""


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


def neutral(manifest: Manifest) -> Manifest:
    """Return a manifest without its store-specific fields."""
    base = manifest.base and msgspec.structs.replace(manifest.base, epoch=0)
    null = msgspec.Raw(b"null")
    return msgspec.structs.replace(manifest, epoch=0, base=base, position=null)


def neutral_record(record: Record) -> Record | None:
    """Return a record without store-specific fields; None for a store's own record."""
    if record.kind in {EPOCH, GAP}:
        return None
    payload = record.payload
    if record.kind == BASE:
        base = decode(payload, Origin)
        if base.epoch:
            payload = encode(msgspec.structs.replace(base, epoch=0))
    return Record(record.seq, 0, record.kind, payload, record.end)


class _Record(msgspec.Struct, omit_defaults=True):
    n: int
    k: str
    r: msgspec.Raw
    end: bool = False


@final
class BundleWriter:
    """Encoder of items to lines, with the running checksum."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lines = 0

    def line(self, item: Item) -> bytes:
        """Return an item's line, newline included."""
        line = encode(self._value(item)) + b"\n"
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


@final
class Reader:
    """Decoder of lines to items; detects missing and changed lines.

    Args:
        source: Name of the source, for error messages.

    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self._lines = 0
        self._seq = 1
        self.ended: bool = False
        """Whether the footer was read; until then the bundle is incomplete."""

    def item(self, data: bytes) -> Item:
        """Return a line's item.

        Raises:
            CorruptRecordError: It is not a line of a bundle, or an earlier line was changed.
            UnsupportedVersionError: A newer release wrote the bundle.

        """
        if self.ended:
            raise self._corrupt("there are lines after its end")
        try:
            if not self._lines:
                data = as_utf8(data)
            line = decode(data, _Line)
        except CorruptRecordError as error:
            raise self._corrupt(str(error)) from None
        item = self._item(line)
        if (self._lines == 0) != isinstance(item, BundleHeader):
            raise self._corrupt("a bundle begins with a line that names its session, once")
        self._hash.update(data)
        self._lines += 1
        return item

    def _item(self, line: _Line) -> Item:
        if line.perdure_bundle is not None:
            return self._head(line, line.perdure_bundle)
        if line.n is not None:
            return self._record(line, line.n)
        if line.dead_letter is not None:
            return line.dead_letter
        if line.blob is not None:
            return BundleBlob(line.blob, self._blob(line))
        if line.document is not None:
            return BundleDocument(line.document, Document(self._bytes(line), line.as_of))
        if line.manifest is not None:
            return line.manifest
        return self._end(line)

    def _record(self, line: _Line, seq: int) -> Record:
        if line.k in {EPOCH, GAP}:
            raise self._corrupt(f"a record of the kind {line.k} is a store's own")
        before, self._seq = self._seq, seq
        if seq <= before:
            raise self._corrupt(f"record {seq} is out of order after {before}")
        if seq - before > MOST_MISSING:
            raise self._corrupt(f"more than {MOST_MISSING} records are missing before {seq}")
        return Record(seq, 0, line.k, bytes(line.r), line.end is True)

    def _head(self, line: _Line, version: int) -> BundleHeader:
        if version > FORMAT:
            raise UnsupportedVersionError(
                f"{self._source} is a bundle of format {version}, this release reads up to "
                f"{FORMAT}: use a newer release",
                path=self._source,
            )
        return BundleHeader(SessionKey(line.agent, line.session, line.tenant), version)

    def _end(self, line: _Line) -> BundleFooter:
        if line.sha256 is None:
            raise self._corrupt("it is not a line of a bundle")
        if (line.end, line.sha256) != (self._lines, self._hash.hexdigest()):
            raise self._corrupt("what comes before it was changed, or lines are missing")
        self.ended = True
        return BundleFooter()

    def _blob(self, line: _Line) -> bytes:
        data = self._bytes(line)
        if name_of(data) != line.blob:
            raise self._corrupt(f"the blob {line.blob} does not match its name")
        return data

    def _bytes(self, line: _Line) -> bytes:
        if line.text is not None:
            return line.text.encode()
        try:
            return base64.b64decode(line.data or "", validate=True)
        except ValueError:
            raise self._corrupt("its data is not base64") from None

    def _corrupt(self, reason: str) -> CorruptRecordError:
        at = self._lines + 1
        return CorruptRecordError(
            f"{self._source}, line {at}: {reason}; export the session again",
            path=self._source,
            line=at,
        )
