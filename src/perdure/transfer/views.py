"""Read-only stores of sessions that are kept otherwise: in a bundle's file, or in a backup."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import open_regular, read_line
from perdure.errors import CorruptRecordError
from perdure.records.chunks import name_of
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest, Origin
from perdure.records.media import LIFTED_KINDS, holds_references, severed
from perdure.records.posts import DeadLetter
from perdure.records.records import BASE, GAP, Record
from perdure.records.references import spelled
from perdure.store import Document, Documents, LeaseState, LogChunk, Store
from perdure.stores.delegate import DelegatingStore, ReadOnlyStore
from perdure.transfer import bundle

CHUNK = 500
PART = 1024 * 1024
"""Records, and their bytes, that are given at a time."""


class SessionsView(DelegatingStore):
    """Read-only store of which a subclass gives the records; all else is the store's below."""

    def __init__(self, store: Store) -> None:
        super().__init__(ReadOnlyStore(store))

    def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        """Yield a session's records, ``after < seq < before``, also from the newest on."""
        raise NotImplementedError

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


class _Run(msgspec.Struct):
    """Records whose lines follow each other in the file."""

    after: int
    """The number before its first one: what lies in between was left out."""
    last: int
    begin: int
    end: int
    """Where its lines are."""
    sha256: Any
    """The hash of its lines, which nobody may have changed when they are read again."""


@final
class BundleFile:
    """A bundle that was read and checked once: some of it, and where the rest is in the file."""

    def __init__(self, path: Path, target: SessionKey | None) -> None:
        self.path: str = str(path)
        self._file = open_regular(path)
        self._lock = threading.Lock()
        self._reader = bundle.Reader(self.path, target)
        self._at = 0
        self._runs: list[_Run] = []
        self._begun: Origin | None = None
        """The newest origin in its log."""
        self._blobs: dict[str, tuple[int, int]] = {}
        self._listed: dict[str, Document] = {}
        self._manifest: Manifest | None = None
        self._is_severed = False
        """Whether something refers to media that are not in it: lost ones, or another session's."""
        self.key: SessionKey
        self.letters: list[DeadLetter] = []
        self.documents = Documents()
        """None unless all of them are there, as they were when they were folded."""
        self.count: int = 0
        """How many records it has."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, path: Path, target: SessionKey | None = None
    ) -> AsyncGenerator[BundleFile, None]:
        """Open a bundle, and check all of it; *target* is what its session becomes."""
        run = anyio.to_thread.run_sync
        with closing(await run(cls, path, target)) as file:
            while await run(file.scan):
                pass
            yield file

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def base(self) -> Origin | None:
        """What precedes its log."""
        return self._reader.base

    @property
    def head(self) -> int:
        """Its last record."""
        return self._runs[-1].last if self._runs else 0

    def scan(self) -> bool:
        """Read and check about a part, and return whether there is more. Blocking."""
        stop = self._at + PART
        while self._at < stop:
            line = read_line(self._file, bundle.MOST_LINE)
            if line == b"":
                self._end()
                return False
            self._take(self._reader.item(line), line or b"")
        return True

    def _take(self, item: bundle.Item, line: bytes) -> None:
        match item:
            case bundle.BundleHeader(key):
                self.key = key
            case DeadLetter():
                self.letters.append(_without_references(item))
            case bundle.BundleBlob(name):  # they come before the records
                self._blobs[name] = self._at, len(line)
            case Record():
                self._take_record(item, line)
            case bundle.BundleDocument(name, document):
                self._listed[name] = document
                self._is_severed |= severed(document.data, self._blobs) != document.data
            case Manifest():
                self._manifest = item
        self._at += len(line)

    def _take_record(self, record: Record, line: bytes) -> None:
        run = self._runs[-1] if self._runs else None
        if run is None or run.end != self._at or run.end - run.begin >= PART:
            after = self.head if self._runs else record.seq - 1
            run = _Run(after, record.seq, self._at, self._at, hashlib.sha256())
            self._runs.append(run)
        run.last, run.end = record.seq, self._at + len(line)
        run.sha256.update(line)
        self.count += 1
        self._is_severed |= self._severed(record) is not record
        if record.kind == BASE:
            self._begun = self.base

    def _end(self) -> None:
        if not self._reader.ended:
            raise CorruptRecordError(
                f"{self.path} is not a whole bundle: its end is missing; export the session again",
                path=self.path,
            )
        manifest, begun = self._manifest, self._begun
        if self._runs:  # what was pruned is not filled
            cut = 0 if begun is None else max(begun.cut - begun.at, 0)
            self._runs[0].after = min(self._runs[0].after, cut)
        end = 1 if manifest is None else max(manifest.as_of_seq, 1)
        if end > self.head:
            self._runs.append(_Run(self.head, end, self._at, self._at, hashlib.sha256()))
        if manifest is not None and not self._is_severed:
            found = {n: self._listed[n] for n in manifest.documents if n in self._listed}
            listed = {name: FoldedDocument.of(d.as_of_seq, d.data) for name, d in found.items()}
            if listed == manifest.documents:
                self.documents = Documents(manifest, found)

    def _severed(self, record: Record) -> Record:
        """Return a record without references to media that are not in the bundle."""
        payload = record.payload
        if record.kind in LIFTED_KINDS and holds_references(payload):
            payload = severed(payload, self._blobs)
        is_same = payload == record.payload
        return record if is_same else msgspec.structs.replace(record, payload=payload)

    async def blob(self, name: str) -> bytes | None:
        """Return a blob, None if the bundle does not have it."""
        if name not in self._blobs:
            return None
        line = await anyio.to_thread.run_sync(self._read, *self._blobs[name])
        data = bundle.blob_of(line)
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
        records = map(bundle.record_of, filter(None, data.split(b"\n")))
        return {record.seq: self._severed(record) for record in records}

    def _read(self, at: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(at)
            return self._file.read(size)

    def _changed(self) -> CorruptRecordError:
        return CorruptRecordError(f"{self.path} was changed while it was read", path=self.path)


def _without_references(letter: DeadLetter) -> DeadLetter:
    if not holds_references(letter.item.payload):  # no post has any
        return letter
    post = msgspec.structs.replace(letter.item, payload=spelled(letter.item.payload))
    return msgspec.structs.replace(letter, item=post)


@final
class BundleView(SessionsView):
    """A store, and in it a bundle's session, which may continue one of the store's.

    Args:
        store: The store.
        key: The session's key there; the store has no such session.
        file: The bundle.
        epoch: That of the record that the session continues, 0 if it continues none.

    """

    def __init__(self, store: Store, key: SessionKey, file: BundleFile, epoch: int) -> None:
        super().__init__(store)
        self._key = key
        self._file = file
        self._epoch = epoch

    def read_log(self, key: SessionKey, **span: Any) -> AsyncGenerator[LogChunk, None]:
        if key != self._key:
            return self.inner.read_log(key, **span)
        return super().read_log(key, **span)

    async def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        async with aclosing(self._file.records(after, before, reverse=reverse)) as records:
            async for record in records:
                if record.kind == BASE and self._epoch:
                    origin = msgspec.structs.replace(
                        decode(record.payload, Origin), epoch=self._epoch
                    )
                    yield msgspec.structs.replace(record, payload=encode(origin))
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
        return Documents(have.manifest, {n: d for n, d in have.found.items() if n in wanted})

    async def holder(self, key: SessionKey) -> LeaseState | None:
        is_file = key == self._key
        return LeaseState(1, "", released=True) if is_file else await self.inner.holder(key)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        blob = await self._file.blob(name)
        return await self.inner.get_blob(tenant, name) if blob is None else blob
