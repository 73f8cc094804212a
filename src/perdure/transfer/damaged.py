"""Salvage of a damaged session into a bundle.

A normal export is all or nothing; salvage reads past damage. It takes every run of records that
verifies, and the documents and blobs that are intact. A record of the kind ``missing`` replaces
each run of lost records and names its range.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import msgspec

from perdure.errors import CorruptRecordError, PerdureError, SessionNotFoundError
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.records import MISSING, Record
from perdure.session.reach import Reach, ReachedBlob
from perdure.store import Documents, Store, first_record, past_damage
from perdure.transfer import bundle
from perdure.transfer.bundle_files import (
    dead_letters_of,
    items_of,
    reached_blobs,
    with_history,
    write_items,
)

UNKNOWN: Final = 1000
"""Records that are tried after damage where nothing says how many there are."""


class MissingRecords(msgspec.Struct, frozen=True):
    """A run of records that cannot be read."""

    first: int
    last: int
    why: str = ""


class Salvage(msgspec.Struct, kw_only=True):
    """Result of a salvage: what was recovered, and what was lost."""

    key: SessionKey
    records: int = 0
    """Records in the bundle; a store's own records do not count."""
    head: int = 0
    """The last record that the store knows of."""
    missing: list[MissingRecords] = []
    """Records that are lost, oldest first."""
    documents: list[str] = []
    """Documents in the bundle; the others are rebuilt from the recovered log."""
    lost_documents: list[str] = []
    blobs: int = 0
    lost_blobs: list[str] = []
    """Referenced blobs that are damaged or missing."""
    dead_letters: int = 0
    lost_dead_letters: int = 0
    """Dead letters that are damaged."""
    unproven_tail: str = ""
    """Reason why more records may be missing at the log's end; empty where nothing says so."""
    bytes: int = 0
    """Size of the bundle."""

    @property
    def is_whole(self) -> bool:
        """True if nothing is missing."""
        lost = self.lost_documents or self.lost_blobs or self.lost_dead_letters
        return not (self.missing or lost)


async def salvage(store: Store, key: SessionKey, path: str | os.PathLike[str]) -> Salvage:
    """Write what can still be read of a session as a bundle into a new file.

    Reads without a lease, and changes nothing. The imported bundle opens as a session; a record of
    the kind ``missing`` is in each place where records are lost.

    Args:
        store: An open store.
        key: The session to salvage.
        path: A file that does not exist yet.

    Raises:
        SessionNotFoundError: There is no such session.
        CorruptRecordError: No part of it can be read.
        ConfigError: The file exists already.

    """
    token = past_damage.set(True)
    try:
        with suppress(CorruptRecordError):
            store = await with_history(store, key)
        salvaging = _Salvaging(store, key)
        salvaging.report.bytes = await write_items(Path(path), salvaging.items())
        return salvaging.report
    finally:
        past_damage.reset(token)


class _Salvaging:
    def __init__(self, store: Store, key: SessionKey) -> None:
        self._store = store
        self._key = key
        self.report = Salvage(key=key)

    async def items(self) -> AsyncGenerator[bundle.Line, None]:
        """Read all of the session once, and fill the report; then yield the bundle's lines."""
        report = self.report
        documents = await self._documents()
        damage: CorruptRecordError | None = None
        try:
            report.head = await self._store.head(self._key)
        except CorruptRecordError as error:
            damage = error
        if documents.manifest is not None:
            report.head = max(report.head, documents.manifest.as_of_seq)
        reach = Reach(self._store, self._key, documents)
        async with aclosing(self._log()) as log:
            async for entry in log:
                if isinstance(entry, MissingRecords):
                    report.missing.append(entry)
                    continue
                report.head = max(report.head, entry.seq)
                reach.feed(entry)
        if report.head == 0 and not report.missing:
            if damage is not None:
                raise CorruptRecordError(
                    f"nothing of session {self._key} can be read in {self._store.location}: "
                    "restore it from a copy",
                    key=str(self._key),
                ) from damage
            raise SessionNotFoundError(
                f"there is no session {self._key} in {self._store.location}", key=str(self._key)
            )
        lost: list[ReachedBlob] = []
        blobs = await reached_blobs(reach, lost)
        report.blobs, report.lost_blobs = len(blobs), sorted(blob.name for blob in lost)
        letters = await dead_letters_of(self._store, self._key)
        sound = [letter for letter in letters if not letter.item.damage]
        report.dead_letters, report.lost_dead_letters = len(sound), len(letters) - len(sound)
        records = self._records()
        items = items_of(self._store, self._key, sound, blobs, records, documents)
        async with aclosing(items):
            async for item in items:
                yield item

    async def _documents(self) -> Documents:
        """Return the intact documents, and the manifest of these alone."""
        try:
            have = await self._store.read_documents(self._key)
        except PerdureError as error:
            self.report.lost_documents.append(f"all of them: {error}")
            return Documents()
        self.report.lost_documents += have.damaged
        self.report.unproven_tail = have.unproven_tail
        if have.manifest is None:
            return Documents()
        self.report.documents = sorted(have.found)
        every = have.manifest.documents
        listed = {name: every[name] for name in every if name in have.found}
        return Documents(msgspec.structs.replace(have.manifest, documents=listed), have.found)

    async def _records(self) -> AsyncGenerator[Record, None]:
        """Yield the log in complete groups, with one ``missing`` record per lost run."""
        before: Record | None = None
        async with aclosing(self._log()) as log:
            async for entry in log:
                if isinstance(entry, MissingRecords):
                    if before is not None:  # the end of its group may be lost
                        yield msgspec.structs.replace(before, end=True)
                    # Sequence number 1 is the epoch record of the importing store.
                    first = max(entry.first, 2)
                    before = Record(first, 0, MISSING, encode(entry), end=True)
                    before = before if first <= entry.last else None
                    continue
                record = bundle.neutral_record(entry)
                if record is None:
                    continue
                self.report.records += 1
                if before is not None:
                    yield before
                before = record
        if before is not None:
            yield msgspec.structs.replace(before, end=True)

    async def _log(self) -> AsyncGenerator[Record | MissingRecords, None]:
        """Yield the log past damage, with a `MissingRecords` in place of each lost run."""
        at = 0
        reason = "the log ends before them"
        while True:
            try:
                async with aclosing(self._store.read_log(self._key, after=at)) as log:
                    async for chunk in log:
                        for record in chunk.records:
                            if at and record.seq > at + 1:  # a pruned log begins anywhere
                                yield MissingRecords(at + 1, record.seq - 1, "the cause is unknown")
                            at = record.seq
                            yield record
                break
            except CorruptRecordError as error:
                reason = str(error).partition("; ")[0]
                next_seq = error.facts.get("next")
                found = await self._next(next_seq - 1 if isinstance(next_seq, int) else at)
            if found is None:
                break
            if found.seq > at + 1:
                yield MissingRecords(at + 1, found.seq - 1, reason)
            at = found.seq
            yield found
        if at < self.report.head:
            yield MissingRecords(at + 1, self.report.head, reason)

    async def _next(self, at: int) -> Record | None:
        """Return the first readable record after *at*, None for none.

        Each is read alone: in a larger read, damage after it may hide it.
        """
        for after in range(at, self.report.head or at + UNKNOWN):
            with suppress(CorruptRecordError):
                log = self._store.read_log(self._key, after=after, limit=1)
                return await first_record(log)
        return None
