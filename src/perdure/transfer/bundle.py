"""Bundles: the format, its writer, and a file that is read as a session.

One session as lines of JSON, in writing order:

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
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import anyio.to_thread
import msgspec

from perdure._lib.files import open_regular, read_line
from perdure.errors import (
    CorruptRecordError,
    InvalidArgumentError,
    StoreError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.memory.documents import InboxTakenPayload
from perdure.records.chunks import name_of
from perdure.records.json import MAX_RECORD_BYTES, as_utf8, decode, encode, require_utf8
from perdure.records.keys import SessionKey, stored_key
from perdure.records.manifest import FoldedDocument, Manifest, Origin, origin_in
from perdure.records.media import LIFTED_KINDS, filled_bytes, referred, severed
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, CONTEXT, GAP, HOLDER_KINDS, TAKEN, Record
from perdure.records.references import spelled
from perdure.session.copied import OWN_KINDS
from perdure.store import Document, Documents

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
PART = 1024 * 1024
"""Bytes that are read at a time."""
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
        self._bytes = Counter[str]()
        self._number = Counter[str]()

    def excess(self, what: str, size: int) -> str:
        """Return what there is too much of with one more of so many bytes; empty for nothing."""
        self._bytes[what] += size
        self._number[what] += 1
        if self._number[what] > MOST_ITEMS:
            return f"more than {MOST_ITEMS} {what}"
        return f"more than {MOST_KEPT} bytes of {what}" if self._bytes[what] > MOST_KEPT else ""


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


def _record(line: _Line) -> Record:
    return Record(line.n or 0, 0, line.k, bytes(line.r), line.end is True)


def _data(line: _Line) -> bytes:
    if line.text is not None:
        return line.text.encode()
    return base64.b64decode(line.data or "", validate=True)


_NO_EXPORT: Final = "if it is your own, copy the session with `perdure migrate` instead"


class _Run(msgspec.Struct):
    """Records whose lines follow each other in the file."""

    after: int
    """The number before its first one: what lies in between was left out."""
    last: int
    begin: int
    end: int
    """Place of its lines in the file."""
    sha256: Any
    """The hash of its lines, which nobody may have changed when they are read again."""


class _Place(msgspec.Struct, frozen=True):
    """Place of a blob's line in the file, and the size of the blob."""

    at: int
    size: int
    bytes: int


@final
class BundleFile:
    """A bundle that was read and checked once: what is few of it, and where the rest is."""

    def __init__(self, path: Path) -> None:
        self.path: str = str(path)
        self._file = open_regular(path)
        self._lock = threading.Lock()
        self._at = 0
        """Bytes that were read so far."""
        self._lines = 0
        self._hash = hashlib.sha256()
        self._kept = KeptItems()
        self._is_whole = True
        """True if the last record ends its group."""
        self._missing = 0
        """Sequence numbers that were left out so far."""
        self._seq = 1
        """The last record that was read."""
        self._cut = 0
        """Number of records that were removed from the beginning of its log, as the log says."""
        self._runs: list[_Run] = []
        self._blobs: dict[str, _Place] = {}
        self._letters: list[DeadLetter] = []
        self._documents: dict[str, Document] = {}
        self._manifest: Manifest | None = None
        self._is_severed = False
        """True if something refers to media that are not in it: lost ones, or another session's."""
        self._has_ended = False
        self.key: SessionKey
        """Key in its first line."""
        self.count: int = 0
        """Number of its records."""
        self.documents: Documents = Documents()
        """None unless all of them are there, as they were when they were folded."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, path: Path) -> AsyncGenerator[BundleFile, None]:
        """Open a bundle, and check all of it.

        Raises:
            CorruptRecordError: A line is none of a bundle, or was changed, or lines are missing.
            UnsupportedVersionError: A newer release wrote the bundle.

        """
        run = anyio.to_thread.run_sync
        with closing(await run(cls, path)) as file:
            while await run(file.scan):
                pass
            yield file

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def scan(self) -> bool:
        """Read and check about a part, and return whether there is more. Blocking."""
        stop = self._at + PART
        while self._at < stop:
            line = read_line(self._file, MOST_LINE)
            if line == b"":
                self._complete()
                return False
            self._take(line)
        return True

    def _take(self, data: bytes | None) -> None:
        """Take in a line; None is one of more than `MOST_LINE` bytes."""
        if self._has_ended:
            raise self._corrupt("there are lines after its end")
        if data is None:
            raise self._corrupt(f"it is longer than {MOST_LINE} bytes", _NO_EXPORT)
        size = len(data)
        try:
            if not self._lines:
                data = as_utf8(data)
            require_utf8(data)
            line = decode(data, _Line)
        except CorruptRecordError as error:
            raise self._corrupt(str(error)) from None
        if (self._lines == 0) != (line.perdure_bundle is not None):
            raise self._corrupt("a bundle begins with a line that names its session, once")
        try:
            excess = self._take_item(line, size)
        except InvalidArgumentError as error:
            raise self._corrupt(str(error)) from None
        if excess:
            raise self._corrupt(f"there are {excess}", _NO_EXPORT)
        if line.n is not None:
            self._runs[-1].sha256.update(data)
        self._hash.update(data)
        self._lines += 1
        self._at += size

    def _take_item(self, line: _Line, size: int) -> str:
        """Take in a line by its kind, and return what there is too much of."""
        if line.perdure_bundle is not None:
            self._take_header(line, line.perdure_bundle)
        elif line.n is not None:
            self._take_record(line, line.n, size)
        elif line.dead_letter is not None:
            self._letters.append(line.dead_letter)
            return self._kept.excess("dead letters", size)
        elif line.blob is not None:
            data = self._bytes(line)
            if name_of(data) != line.blob:
                raise self._corrupt(f"the blob {line.blob} does not match its name")
            self._blobs[line.blob] = _Place(self._at, size, len(data))
        elif line.document is not None:
            document = Document(self._bytes(line), line.as_of)
            self._require_media(document.data)
            self._documents[line.document] = document
            return self._kept.excess("documents", size)
        elif line.manifest is not None:
            self._take_manifest(line.manifest)
        else:
            self._take_footer(line)
        return ""

    def _take_record(self, line: _Line, seq: int, size: int) -> None:
        if line.k in HOLDER_KINDS:
            raise self._corrupt(f"a record of the kind {line.k} is a store's own")
        before = self._seq
        if seq <= before:
            raise self._corrupt(f"record {seq} is out of order after {before}")
        self._leave_out(seq)
        if seq > before + 1 and not self._is_whole:
            raise self._corrupt(f"an epoch is within a group, before {seq}")
        self._seq, self._is_whole = seq, line.end is True
        self.count += 1
        run = self._runs[-1] if self._runs else None
        if run is None or run.end != self._at or run.end - run.begin >= PART:
            after = seq - 1 if run is None else run.last
            run = _Run(after, seq, self._at, self._at, hashlib.sha256())
            self._runs.append(run)
        run.last, run.end = seq, self._at + size
        record = _record(line)
        try:  # what an import reads of them
            if line.k == BASE:
                # A log that begins with documents has it at the number of the last removed one.
                self._cut = self._origin(decode(record.payload, Origin), seq).cut
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

    def _require_media(self, data: bytes) -> None:
        """Refuse references that say another size of a blob than it has."""
        for medium in referred(data):
            place = self._blobs.get(medium.name)
            if place is None:
                self._is_severed = True
            elif place.bytes != medium.bytes:
                raise self._corrupt(f"a medium of {medium.bytes} bytes is a blob of {place.bytes}")

    def _take_manifest(self, manifest: Manifest) -> None:
        self._require_whole()
        self._leave_out(manifest.as_of_seq + 1)
        if manifest.base is not None:
            self._origin(manifest.base, manifest.as_of_seq)
        self._manifest = manifest

    def _origin(self, base: Origin, head: int) -> Origin:
        """Return an origin, and refuse one that names more than documents, or a later record."""
        if base.at or base.parent or base.kept or base.moved:
            raise self._corrupt(
                "it is of a fork, copy or rename of a release before 0.1.0",
                "make the session plain with `perdure migrate`, and export it there",
            )
        if base.folded and base.folded not in self._blobs:
            raise self._corrupt(
                f"the session begins with the blob {base.folded}, which is not in it"
            )
        if not 0 <= base.cut <= head:
            raise self._corrupt(f"its log does not begin after record {base.cut}")
        return base

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise self._corrupt(f"the log ends within a group, at {self._seq}")

    def _leave_out(self, seq: int) -> None:
        """Count the numbers that are missing before *seq*."""
        self._missing += max(seq - self._seq - 1, 0)
        if self._missing > MOST_MISSING:
            raise self._corrupt(f"more than {MOST_MISSING} records are missing before {seq}")

    def _take_header(self, line: _Line, version: int) -> None:
        if version > FORMAT:
            raise UnsupportedVersionError(
                f"{self.path} is a bundle of format {version}, this release reads up to "
                f"{FORMAT}: use a newer release",
                path=self.path,
            )
        self.key = stored_key(line.agent, line.session, line.tenant)

    def _take_footer(self, line: _Line) -> None:
        if line.sha256 is None:
            raise self._corrupt("it is not a line of a bundle")
        if (line.end, line.sha256) != (self._lines, self._hash.hexdigest()):
            raise self._corrupt("what comes before it was changed, or lines are missing")
        self._require_whole()
        most = FREE_MISSING + MISSING_PER_BYTE * self._at
        if self._missing > most:
            raise self._corrupt(
                f"{self._missing} records are missing, and a bundle of {self._at} bytes "
                f"may leave out {most}",
                _NO_EXPORT,
            )
        self._has_ended = True

    def _bytes(self, line: _Line) -> bytes:
        try:
            return _data(line)
        except ValueError:
            raise self._corrupt("its data is not base64") from None

    def _corrupt(self, reason: str, cure: str = "export the session again") -> CorruptRecordError:
        at = self._lines + 1
        return CorruptRecordError(
            f"{self.path}, line {at}: {reason}; {cure}",
            path=self.path,
            line=at,
        )

    def _complete(self) -> None:
        """Require the end of the bundle, and see which documents it has."""
        manifest = self._manifest
        if not self._has_ended:
            raise CorruptRecordError(
                f"{self.path} is not a whole bundle: its end is missing; export the session again",
                path=self.path,
            )
        if self._runs:  # what was pruned is not filled
            self._runs[0].after = min(self._runs[0].after, self._cut)
        last = self._runs[-1].last if self._runs else 0
        end = self._cut + 1  # a copy takes up to one record at least
        end = end if manifest is None else max(manifest.as_of_seq, end)
        if end > last:
            self._runs.append(_Run(last, end, self._at, self._at, hashlib.sha256()))
        if manifest is not None and not self._is_severed:
            found = {name: self._documents.get(name) for name in manifest.documents}
            listed = {n: d and FoldedDocument.of(d.as_of_seq, d.data) for n, d in found.items()}
            if listed == manifest.documents:
                self.documents = Documents(manifest, {n: d for n, d in found.items() if d})

    @property
    def head(self) -> int:
        """The last record."""
        return self._runs[-1].last

    @property
    def letters(self) -> list[DeadLetter]:
        """The dead letters; no post refers to media."""
        return [
            msgspec.structs.replace(
                letter,
                item=msgspec.structs.replace(letter.item, payload=spelled(letter.item.payload)),
            )
            for letter in self._letters
        ]

    def _severed(self, record: Record) -> Record:
        """Return a record without references to media that are not in the bundle."""
        payload = record.payload
        if record.kind in LIFTED_KINDS:
            payload = severed(payload, self._blobs)
        is_same = payload == record.payload
        return record if is_same else msgspec.structs.replace(record, payload=payload)

    async def blob(self, name: str) -> bytes | None:
        """Return a blob, None if the bundle does not have it."""
        if name not in self._blobs:
            return None
        place = self._blobs[name]
        data = _data(
            decode(await anyio.to_thread.run_sync(self._read, place.at, place.size), _Line)
        )
        if name_of(data) != name:
            raise self._changed()
        return data

    async def records(
        self, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        """Yield records, and gaps for the numbers that were left out."""
        runs = [run for run in self._runs if run.last > after and run.after + 1 < before]
        for run in reversed(runs) if reverse else runs:
            known = await anyio.to_thread.run_sync(self._records_of, run)
            numbers = range(max(run.after, after) + 1, min(run.last + 1, before))
            for seq in reversed(numbers) if reverse else numbers:
                yield known[seq] if seq in known else Record(seq, 0, GAP, b"null", end=True)

    def _records_of(self, run: _Run) -> dict[int, Record]:
        data = self._read(run.begin, run.end - run.begin)
        if hashlib.sha256(data).digest() != run.sha256.digest():
            raise self._changed()
        records = [_record(decode(line, _Line)) for line in data.split(b"\n") if line]
        return {record.seq: self._severed(record) for record in records}

    def _read(self, at: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(at)
            return self._file.read(size)

    def _changed(self) -> StoreError:
        message = f"{self.path} was changed while it was read: import it again"
        return StoreError(message, path=self.path)
