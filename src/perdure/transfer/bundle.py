"""The bundle's format: one session as lines of JSON, in the order in which it is put together.

    {"perdure_bundle":1,"tenant","agent","session"}  of format 2 if there are dead letters
    {"dead_letter":{…}}                             what was posted and could not be delivered
    {"blob":NAME,"data":BASE64}                     the blobs that the rest names, by name
    {"n":SEQ,"k":KIND,"end":true?,"r":PAYLOAD}      the log, without what stores write themselves
    {"document":NAME,"as_of":SEQ,"text":TEXT}       or "data":BASE64, what was folded, by name
    {"manifest":{…}}                                what the documents are as of, if there are any
    {"end":LINES,"sha256":HEX}                      of all bytes before this line

Epochs and owners are left out, and numbers keep their gaps where a store's own records stood.
Pure.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, TypeAlias, final

import msgspec

from perdure.errors import CorruptRecordError, UnsupportedVersionError
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, Origin
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, EPOCH, Record
from perdure.store import Document

FORMAT = 2
"""The newest; a bundle without dead letters has the one before, which every release reads."""
GAP = "gap"
"""The kind of records that stand where a moved log has none."""
MOST_MISSING = 10_000_000
"""Numbers that may be missing before a record: others stand for them, where it lands."""


class BundleHeader(msgspec.Struct, frozen=True):
    """Which session it is."""

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
    """That nothing is missing."""


Item: TypeAlias = (
    BundleHeader | DeadLetter | BundleBlob | Record | BundleDocument | Manifest | BundleFooter
)


def neutral(manifest: Manifest) -> Manifest:
    """Return a manifest without what depends on the store that it was in."""
    base = manifest.base and msgspec.structs.replace(manifest.base, epoch=0)
    null = msgspec.Raw(b"null")
    return msgspec.structs.replace(manifest, epoch=0, base=base, position=null)


def neutral_record(record: Record) -> Record | None:
    """Return a record without what depends on the store; None for one that says nothing else."""
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
    """Turn items into lines."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lines = 0

    def line(self, item: Item) -> bytes:
        """Return an item's line, its line break included."""
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
    """Whatever a line may hold."""

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
    """Turn lines back into items, and notice what is missing or was changed.

    Args:
        where: What the lines come from, for errors.

    """

    def __init__(self, source: str) -> None:
        self._where = source
        self._hash = hashlib.sha256()
        self._lines = 0
        self._seq = 1
        self.ended: bool = False
        """Whether the last line was read: only then nothing is missing."""

    def item(self, data: bytes) -> Item:
        """Return what a line holds.

        Raises:
            CorruptRecordError: It is no line of a bundle, or something before it was changed.
            UnsupportedVersionError: A newer release wrote the bundle.

        """
        if self.ended:
            raise self._corrupt("there is more behind its end")
        try:
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
            raise self._corrupt(f"record {seq} is not in order behind {before}")
        if seq - before > MOST_MISSING:
            raise self._corrupt(f"more than {MOST_MISSING} records are missing before {seq}")
        return Record(seq, 0, line.k, bytes(line.r), line.end is True)

    def _head(self, line: _Line, version: int) -> BundleHeader:
        if version > FORMAT:
            message = (
                f"{self._where} is a bundle of format {version}, this release reads up to "
                f"{FORMAT}: use a newer release"
            )
            raise UnsupportedVersionError(message, path=self._where)
        return BundleHeader(SessionKey(line.agent, line.session, line.tenant), version)

    def _end(self, line: _Line) -> BundleFooter:
        if line.sha256 is None:
            raise self._corrupt("it holds nothing that a bundle holds")
        if (line.end, line.sha256) != (self._lines, self._hash.hexdigest()):
            raise self._corrupt("what comes before it was changed, or lines are missing")
        self.ended = True
        return BundleFooter()

    def _blob(self, line: _Line) -> bytes:
        data = self._bytes(line)
        if hashlib.sha256(data).hexdigest() != line.blob:
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
        message = f"{self._where}, line {at}: {reason}; export the session again"
        return CorruptRecordError(message, path=self._where, line=at)
