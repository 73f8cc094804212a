"""Read-only stores of sessions that are kept otherwise: in a bundle's file, or in a backup."""

from __future__ import annotations

import hashlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final, final

import anyio.to_thread
import msgspec

from perdure._lib.files import open_regular, read_line
from perdure.errors import (
    CorruptRecordError,
    InvalidArgumentError,
    StoreError,
    UnsupportedVersionError,
)
from perdure.memory.documents import InboxTakenPayload
from perdure.records.chunks import name_of
from perdure.records.json import MAX_RECORD_BYTES, as_utf8, decode, encode, require_utf8
from perdure.records.keys import SessionKey, stored_key
from perdure.records.manifest import FoldedDocument, Manifest, Origin
from perdure.records.media import LIFTED_KINDS, filled_bytes, referred, severed
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, CONTEXT, GAP, HOLDER_KINDS, TAKEN, Record
from perdure.records.references import spelled
from perdure.store import Document, Documents, LeaseState, LogChunk, Store
from perdure.stores.delegate import DelegatingStore, ReadOnlyStore
from perdure.transfer import bundle

CHUNK = 500
PART = 1024 * 1024
"""Records, and their bytes, that are given at a time."""


class SessionsView(DelegatingStore, ABC):
    """Read-only store of which a subclass gives the records; all else is the store's below."""

    def __init__(self, store: Store) -> None:
        super().__init__(ReadOnlyStore(store))

    @abstractmethod
    def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        """Yield a session's records, ``after < seq < before``, also from the newest on."""

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read a session's records under their original sequence numbers.

        Raises:
            CorruptRecordError: One is missing, or they are in disorder.

        """
        remaining = sys.maxsize if limit is None else limit
        end = sys.maxsize if before is None else before
        some, size = list[Record](), 0
        async with aclosing(self.records(key, after, end, reverse=reverse)) as records:
            async for record in records:
                some.append(record)
                size += len(record.payload)
                if size >= PART or len(some) >= min(CHUNK, remaining):
                    yield LogChunk(tuple(some))
                    remaining -= len(some)
                    some, size = [], 0
                    if not remaining:
                        return
        if some:
            yield LogChunk(tuple(some))


# A bundle's file, and the view of its session


_NO_EXPORT: Final = "if it is your own, copy the session with `perdure migrate` instead"


class _Run(msgspec.Struct):
    """Records whose lines follow each other in the file."""

    after: int
    """The number before its first one: what is in between was left out."""
    last: int
    begin: int
    end: int
    """Place of its lines in the file."""
    sha256: Any
    """The hash of its lines, which must be the same when they are read again."""


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
        self._kept = bundle.KeptItems()
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
        self.base: Origin | None = None
        """The newest origin that its log names, else its manifest's."""
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
            line = read_line(self._file, bundle.MOST_LINE)
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
            raise self._corrupt(f"it is longer than {bundle.MOST_LINE} bytes", _NO_EXPORT)
        size = len(data)
        try:
            if not self._lines:
                data = as_utf8(data)
            require_utf8(data)
            line = decode(data, bundle.Line)
        except CorruptRecordError as error:
            raise self._corrupt(str(error)) from None
        if (self._lines == 0) != (line.perdure_bundle is not None):
            raise self._corrupt("a bundle begins with a line that names its session, once")
        try:
            self._take_item(line, size)
        except InvalidArgumentError as error:
            raise self._corrupt(str(error)) from None
        if excess := self._kept.excess(line, size):
            raise self._corrupt(f"there are {excess}", _NO_EXPORT)
        if line.n is not None:
            self._runs[-1].sha256.update(data)
        self._hash.update(data)
        self._lines += 1
        self._at += size

    def _take_item(self, line: bundle.Line, size: int) -> None:
        """Take in a line by its kind."""
        if line.perdure_bundle is not None:
            self._take_header(line, line.perdure_bundle)
        elif line.n is not None:
            self._take_record(line, line.n, size)
        elif line.dead_letter is not None:
            self._letters.append(line.dead_letter)
        elif line.blob is not None:
            data = self._bytes(line)
            if name_of(data) != line.blob:
                raise self._corrupt(f"the blob {line.blob} does not match its name")
            self._blobs[line.blob] = _Place(self._at, size, len(data))
        elif line.document is not None:
            document = Document(self._bytes(line), line.as_of or 0)
            self._require_media(document.data)
            self._documents[line.document] = document
        elif line.manifest is not None:
            self._take_manifest(line.manifest)
        else:
            self._take_footer(line)

    def _take_record(self, line: bundle.Line, seq: int, size: int) -> None:
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
        record = bundle.record_of(line)
        try:  # what an import reads of them
            if line.k == BASE:
                # A log that begins with documents has it at the number of the last removed one.
                self.base = self._origin(decode(record.payload, Origin), seq)
                self._cut = max(self.base.cut - self.base.at, 0)
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
            base = self._origin(manifest.base, manifest.as_of_seq)
            self.base = self.base or base  # a log's own is as new, or newer
        self._manifest = manifest

    def _origin(self, base: Origin, head: int) -> Origin:
        """Return an origin, and refuse one of a later record, or of blobs that are not there.

        Only a release before 0.1.0 wrote one with a number *at*: what comes before that is another
        session's, or kept in blobs, or was removed.
        """
        for name in filter(None, (base.kept, base.folded)):
            if name not in self._blobs:
                raise self._corrupt(f"the session begins with the blob {name}, which is not in it")
        is_there = base.parent is not None or bool(base.kept) or base.at <= base.cut
        is_one = self.base is None or self.base.at == base.at
        is_number = 0 <= base.at <= bundle.MOST_SEQ and 0 <= base.cut <= base.at + head
        if not (is_there and is_one and is_number):
            raise self._corrupt(f"its log does not begin after record {max(base.at, base.cut)}")
        return base if base.at else Origin(cut=base.cut, folded=base.folded)

    def _require_whole(self) -> None:
        if not self._is_whole:
            raise self._corrupt(f"the log ends within a group, at {self._seq}")

    def _leave_out(self, seq: int) -> None:
        """Count the numbers that are missing before *seq*."""
        self._missing += max(seq - self._seq - 1, 0)
        if self._missing > bundle.MOST_MISSING:
            raise self._corrupt(f"more than {bundle.MOST_MISSING} records are missing before {seq}")

    def _take_header(self, line: bundle.Line, version: int) -> None:
        if version > bundle.FORMAT:
            raise UnsupportedVersionError(
                f"{self.path} is a bundle of format {version}, this release reads up to "
                f"{bundle.FORMAT}: use a newer release",
                path=self.path,
            )
        self.key = stored_key(line.agent or "", line.session or "", line.tenant or "")

    def _take_footer(self, line: bundle.Line) -> None:
        if line.sha256 is None:
            raise self._corrupt("it is not a line of a bundle")
        if (line.end, line.sha256) != (self._lines, self._hash.hexdigest()):
            raise self._corrupt("what comes before it was changed, or lines are missing")
        self._require_whole()
        most = bundle.FREE_MISSING + bundle.MISSING_PER_BYTE * self._at
        if self._missing > most:
            raise self._corrupt(
                f"{self._missing} records are missing, and a bundle of {self._at} bytes "
                f"may leave out {most}",
                _NO_EXPORT,
            )
        self._has_ended = True

    def _bytes(self, line: bundle.Line) -> bytes:
        try:
            return bundle.data_of(line)
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
        line = await anyio.to_thread.run_sync(self._read, place.at, place.size)
        data = bundle.data_of(decode(line, bundle.Line))
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
        lines = [decode(line, bundle.Line) for line in data.split(b"\n") if line]
        records = map(bundle.record_of, lines)
        return {record.seq: self._severed(record) for record in records}

    def _read(self, at: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(at)
            return self._file.read(size)

    def _changed(self) -> StoreError:
        message = f"{self.path} was changed while it was read: import it again"
        return StoreError(message, path=self.path)


@final
class BundleView(SessionsView):
    """A store, and in it a bundle's session.

    Args:
        store: The store that the session goes into, which has no such session.
        file: The bundle.
        key: The session's key in the view.
        base: What comes before its log: that of a fork of before 0.1.0 is a session of the store.

    """

    def __init__(
        self, store: Store, file: BundleFile, key: SessionKey, base: Origin | None
    ) -> None:
        super().__init__(store)
        self._file = file
        self._key = key
        self._base = base

    def read_log(self, key: SessionKey, **span: Any) -> AsyncGenerator[LogChunk, None]:
        if key != self._key:
            return self.inner.read_log(key, **span)
        return super().read_log(key, **span)

    async def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        async with aclosing(self._file.records(after, before, reverse=reverse)) as records:
            async for record in records:
                if record.kind == BASE:  # only the newest counts
                    yield msgspec.structs.replace(record, payload=encode(self._base))
                else:
                    yield record

    async def head(self, key: SessionKey) -> int:
        return self._file.head if key == self._key else await self.inner.head(key)

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read documents: they have the bundle's own key in them, and are none's of another."""
        if key != self._key:
            return await self.inner.read_documents(key, names)
        have = self._file.documents
        if have.manifest is None or key != self._file.key:
            return Documents()
        wanted = have.found if names is None else names
        manifest = msgspec.structs.replace(have.manifest, base=have.manifest.base and self._base)
        return Documents(manifest, {n: d for n, d in have.found.items() if n in wanted})

    async def holder(self, key: SessionKey) -> LeaseState | None:
        is_file = key == self._key
        return LeaseState(1, "", released=True) if is_file else await self.inner.holder(key)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        parent = None if self._base is None else self._base.parent
        blob = await self._file.blob(name)
        if blob is None and parent is not None:
            return await self.inner.get_blob(parent.blobs, name)
        return blob
