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
and records whose blobs it has. A fork of before 0.1.0 begins with its parent's records, which the
importer names.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from typing import final

import msgspec

from perdure.errors import TooLargeError
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest, Origin, origin_in
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, HOLDER_KINDS, Record
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


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line: of one kind, whose fields it has; the others are left out."""

    perdure_bundle: int | None = None
    tenant: str | None = None
    agent: str | None = None
    session: str | None = None
    dead_letter: DeadLetter | None = None
    blob: str | None = None
    document: str | None = None
    as_of: int | None = None
    text: str | None = None
    data: str | None = None
    n: int | None = None
    k: str = ""
    r: msgspec.Raw = msgspec.Raw(b"null")
    end: int | bool = False
    manifest: Manifest | None = None
    sha256: str | None = None


def header_line(key: SessionKey, format: int = 1) -> Line:
    """Return the first line, which names the session."""
    return Line(perdure_bundle=format, tenant=key.tenant, agent=key.agent, session=key.session)


def blob_line(name: str, data: bytes) -> Line:
    """Return the line of a blob, which is named by the SHA-256 of its bytes."""
    return Line(blob=name, data=base64.b64encode(data).decode())


def record_line(record: Record) -> Line:
    """Return the line of a record."""
    return Line(n=record.seq, k=record.kind, r=msgspec.Raw(record.payload), end=record.end)


def document_line(name: str, document: Document) -> Line:
    """Return the line of a document: as text, if it is."""
    line = Line(document=name, as_of=document.as_of_seq)
    try:
        line.text = document.data.decode()
    except UnicodeDecodeError:
        line.data = base64.b64encode(document.data).decode()
    return line


def manifest_line(manifest: Manifest) -> Line:
    """Return the line of the documents' manifest."""
    return Line(manifest=neutral(manifest))


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


@final
class KeptItems:
    """Counts what an import holds in memory until the end."""

    def __init__(self) -> None:
        self._bytes = Counter[str]()
        self._number = Counter[str]()

    def excess(self, line: Line, size: int) -> str:
        """Return what there is too much of with a line of so many bytes; empty for nothing."""
        if line.document is None and line.dead_letter is None:
            return ""
        what = "dead letters" if line.document is None else "documents"
        self._bytes[what] += size
        self._number[what] += 1
        if self._number[what] > MOST_ITEMS:
            return f"more than {MOST_ITEMS} {what}"
        return f"more than {MOST_KEPT} bytes of {what}" if self._bytes[what] > MOST_KEPT else ""


@final
class BundleWriter:
    """Encoder of lines, with the running checksum."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lines = 0

    def line(self, line: Line) -> bytes:
        """Return a line's bytes, its end included.

        Raises:
            TooLargeError: It is longer than a bundle's line may be.

        """
        data = encode(line) + b"\n"
        if len(data) > MOST_LINE:
            raise TooLargeError(
                f"line {self._lines + 1} takes {len(data)} bytes, and a bundle's may have "
                f"{MOST_LINE}: copy the session with `perdure migrate` or `perdure backup`",
                size=len(data),
                limit=MOST_LINE,
            )
        self._hash.update(data)
        self._lines += 1
        return data

    def end(self) -> bytes:
        """Return the last line, by which a bundle is complete."""
        return self.line(Line(end=self._lines, sha256=self._hash.hexdigest()))


def record_of(line: Line) -> Record:
    """Return the record of a line."""
    return Record(line.n or 0, 0, line.k, bytes(line.r), line.end is True)


def data_of(line: Line) -> bytes:
    """Return the bytes of a blob's or a document's line.

    Raises:
        ValueError: They are not base64.

    """
    if line.text is not None:
        return line.text.encode()
    return base64.b64decode(line.data or "", validate=True)
