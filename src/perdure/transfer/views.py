"""Read-only stores of sessions that are kept otherwise: in a bundle's file, or in a backup."""

from __future__ import annotations

import hashlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import open_regular, read_line
from perdure.errors import CorruptRecordError, StoreError
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument
from perdure.records.media import LIFTED_KINDS, severed
from perdure.records.posts import DeadLetter
from perdure.records.records import GAP, Record
from perdure.records.references import spelled
from perdure.store import Documents, LeaseState, LogChunk, Store
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


@final
class BundleFile:
    """A bundle that was read and checked once: what is few of it, and where the rest is."""

    def __init__(self, path: Path) -> None:
        self.path: str = str(path)
        self._file = open_regular(path)
        self._lock = threading.Lock()
        self._at = 0
        self._runs: list[_Run] = []
        self._blobs: dict[str, tuple[int, int]] = {}
        self.content: bundle.Reader = bundle.Reader(self.path)
        self.documents: Documents = Documents()
        """None unless all of them are there, as they were when they were folded."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, path: Path) -> AsyncGenerator[BundleFile, None]:
        """Open a bundle, and check all of it."""
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
                self._end()
                return False
            self._take(self.content.item(line), line or b"")
        return True

    def _take(self, item: bundle.Item, line: bytes) -> None:
        if isinstance(item, bundle.BundleBlob):
            self._blobs[item.name] = self._at, len(line)
        elif isinstance(item, Record):
            run = self._runs[-1] if self._runs else None
            if run is None or run.end != self._at or run.end - run.begin >= PART:
                after = item.seq - 1 if run is None else run.last
                run = _Run(after, item.seq, self._at, self._at, hashlib.sha256())
                self._runs.append(run)
            run.last, run.end = item.seq, self._at + len(line)
            run.sha256.update(line)
        self._at += len(line)

    def _end(self) -> None:
        content, manifest = self.content, self.content.manifest
        if not content.ended:
            raise CorruptRecordError(
                f"{self.path} is not a whole bundle: its end is missing; export the session again",
                path=self.path,
            )
        if self._runs:  # what was pruned is not filled
            self._runs[0].after = min(self._runs[0].after, content.cut)
        last = self._runs[-1].last if self._runs else 0
        end = content.cut + 1  # a copy takes up to one record at least
        end = end if manifest is None else max(manifest.as_of_seq, end)
        if end > last:
            self._runs.append(_Run(last, end, self._at, self._at, hashlib.sha256()))
        if manifest is not None and not content.is_severed:
            found = {name: content.documents.get(name) for name in manifest.documents}
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
            for letter in self.content.letters
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

    def _changed(self) -> StoreError:
        message = f"{self.path} was changed while it was read: import it again"
        return StoreError(message, path=self.path)


@final
class BundleView(SessionsView):
    """A bundle's session as a store has it, under any key.

    Args:
        store: The store that the session goes into, which has no such session.
        file: The bundle.

    """

    def __init__(self, store: Store, file: BundleFile) -> None:
        super().__init__(store)
        self._file = file

    def records(
        self, key: SessionKey, after: int, before: int, *, reverse: bool
    ) -> AsyncGenerator[Record, None]:
        return self._file.records(after, before, reverse=reverse)

    async def head(self, key: SessionKey) -> int:
        return self._file.head

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read documents: they have the bundle's own key in them, and are none's of another."""
        have = self._file.documents
        if have.manifest is None or key != self._file.content.key:
            return Documents()
        wanted = have.found if names is None else names
        return Documents(have.manifest, {n: d for n, d in have.found.items() if n in wanted})

    async def holder(self, key: SessionKey) -> LeaseState | None:
        return LeaseState(1, "", released=True)

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        return await self._file.blob(name)
