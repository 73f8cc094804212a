"""Sessions and blobs as plain values, with the rules of the port: nothing here waits.

For stores that keep a session as one value, such as the one in memory, or whole states in files:
they add where the values are, the epochs' atomic steps and the time. Each value can be encoded by
msgspec.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from perdure.errors import LeaseLostError
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.manifest import (
    About,
    Batch,
    BlobSweep,
    Documents,
    Draft,
    LeaseState,
    Manifest,
    Outcome,
    RestoreData,
    SessionInfo,
    Status,
    Taken,
    Terms,
    epoch_payload,
    lease_lost,
    matching_documents,
    new_entries,
    refusal_of,
    require_logged,
    session_info,
)
from perdure.records.posts import DeadLetter, InboxLimit, PendingItem, acked_ids, oldest_first
from perdure.records.records import EPOCH, Entry, Record

_TAIL = 1024
"""Records that are read together with documents; a longer log is read by chunks."""


class StoredSession(msgspec.Struct):
    """One session: its lease, its log, its documents and its inbox.

    Before anyone held it, it has the epoch 0; deleted, it keeps its epoch. Its methods
    do what those of `Store` with these names say, for one session; a step that raises, or answers
    with anything but OK, has changed nothing. Lists are replaced where records are removed: who
    reads the old ones reads on.
    """

    key: SessionKey
    epoch: int = 0
    owner: str = ""
    released: bool = False
    deleted: bool = False
    draft: Draft | None = None
    published: bool = True
    first: int = 1
    """The seq of ``entries[0]``."""
    entries: list[Entry] = []
    epochs: list[int] = []
    epoch_starts: list[int] = []
    """The seq of each epoch's record."""
    documents: dict[str, bytes] = {}
    manifest: Manifest | None = None
    created_at: float | None = None
    updated_at: float | None = None
    turns: int | None = None
    """Words of saves for the directory, as ``about``."""
    about: About | None = None
    inbox: dict[str, PendingItem] = {}
    """By op id, oldest first."""
    dead_letters: dict[str, DeadLetter] = {}

    @property
    def is_public(self) -> bool:
        """True if there is a session for readers: begun, not deleted, and no draft."""
        return self.epoch > 0 and self.published and not self.deleted

    @property
    def head(self) -> int:
        """The seq of the last record, 0 before the first."""
        return self.first - 1 + len(self.entries) if self.epochs else 0

    @property
    def info(self) -> SessionInfo:
        """Its entry in a listing."""
        return session_info(
            self.key,
            self.manifest,
            epoch=self.epoch,
            head=self.head,
            created_at=self.created_at,
            updated_at=self.updated_at,
            turns=self.turns,
            about=self.about,
        )

    # the lease

    def lease(self, *, alive: bool | None = None, beat: int = 0) -> LeaseState | None:
        """Return the state of the lease, with what the store knows of its owner."""
        if self.epoch == 0:
            return None
        return LeaseState(
            epoch=self.epoch,
            owner=self.owner,
            released=self.released,
            alive=alive,
            beat=beat,
            deleted=not self.is_public,
            draft=self.draft,
        )

    def require_held(self, epoch: int) -> None:
        """Raise unless the holder of this epoch may write.

        Raises:
            LeaseLostError: The epoch is not the newest, or the session was deleted.

        """
        if self.epoch != epoch or self.deleted or epoch == 0:
            raise lease_lost(self.key, epoch, self.epoch, deleted=self.deleted)

    def acquire(self, terms: Terms, at: float) -> Taken:
        """Begin the next epoch by its record: the terms have allowed it."""
        documents = self.read_documents(terms.names)
        # A draft that is taken over counts for nothing: its next holder begins again.
        if not self.published:
            self._clear()
        new, created = terms.beginning, not self.epochs
        if created:
            self.first, self.draft, self.published = new.first, new.draft, new.draft is None
            self.created_at = self.updated_at = at
            if new.about is not None:
                self.turns, self.about = 0, new.about
        self.epoch, self.owner = self.epoch + 1, terms.me
        self.released = self.deleted = False
        payload = epoch_payload(terms.me, new.base if created else None, at=at)
        self.entries.append(Entry(EPOCH, payload))
        self.epochs.append(self.epoch)
        self.epoch_starts.append(self.head)
        found = self.restore_data(documents)
        return Taken(self.key, self.epoch, self.head, created, payload, found)

    def publish(self, epoch: int) -> None:
        """Make a draft a session."""
        self.require_held(epoch)
        self.published = True

    def release(self, epoch: int) -> None:
        """Say that the epoch's holder writes no more."""
        self.released = self.released or self.epoch == epoch

    def delete(self, epoch: int, *, keep_posts: bool = False) -> None:
        """Remove all but the epoch, and what was posted to a draft."""
        self.require_held(epoch)
        if self.published and not keep_posts:
            self.inbox = {}
        self._clear()
        self.deleted = self.released = True

    def _clear(self) -> None:
        self.first, self.entries, self.epochs, self.epoch_starts = 1, [], [], []
        self.draft, self.published = None, True
        self.documents, self.manifest = {}, None
        self.created_at = self.updated_at = self.turns = self.about = None
        self.dead_letters = {}

    # the log

    def append(self, batch: Batch, at: float, *, max_bytes: int = MAX_RECORD_BYTES) -> Outcome:
        """Append what the log does not have yet, and note what the save says."""
        try:
            self.require_held(batch.epoch)
        except LeaseLostError as error:
            return Outcome(Status.CONFLICT, error)
        place = batch.first - self.first
        logged = self.entries[place:] if place >= 0 else ()
        new = refusal_of(batch, max_bytes) or new_entries(
            batch, self.head, self.epoch_starts[-1], logged
        )
        if isinstance(new, Exception):
            return Outcome(Status.PERMANENT, new)
        self.entries.extend(new)
        self.updated_at = at
        self.turns = self.turns if batch.turns is None else batch.turns
        self.about = batch.about or self.about
        return Outcome(Status.OK, written=sum([len(entry.payload) for entry in new]))

    def read_log(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> Iterator[Record]:
        """Return the records for a reader as of now, without later appends."""
        end = self.head + 1 if self.is_public else 0
        seqs = range(max(after + 1, self.first), end if before is None else min(before, end))
        return self._records((seqs[::-1] if reverse else seqs)[:limit])

    def records(self, after: int = 0) -> Iterator[Record]:
        """Return the records after one, of a draft too."""
        return self._records(range(max(after + 1, self.first), self.head + 1))

    def _records(self, seqs: range) -> Iterator[Record]:
        # An epoch is found by the starts of the epochs.
        entries, first, starts, epochs = self.entries, self.first, self.epoch_starts, self.epochs
        for seq in seqs:
            kind, payload, end = entries[seq - first]
            epoch = epochs[bisect_right(starts, seq) - 1]
            yield Record(seq, epoch, kind, payload, end)

    def trim(self, epoch: int, below: int) -> int:
        """Remove the records below a seq, and return how many bytes they had."""
        self.require_held(epoch)
        count = min(max(below - self.first, 0), len(self.entries))
        freed = sum([len(entry.payload) for entry in self.entries[:count]])
        self.entries = self.entries[count:]
        self.first += count
        return freed

    # documents

    def read_documents(self, names: Collection[str] | None) -> Documents:
        """Return the documents for a reader, each checked against the manifest's hash."""
        if not self.is_public:
            return Documents()
        return matching_documents(self.manifest, self.documents, names)

    def write_documents(self, documents: Mapping[str, bytes], manifest: Manifest) -> None:
        """Replace the documents and the manifest."""
        self.require_held(manifest.epoch)
        require_logged(manifest, self.head)
        merged = {**self.documents, **documents}
        self.documents = {name: merged[name] for name in manifest.documents if name in merged}
        self.manifest = manifest
        if manifest.as_of_seq >= self.head:
            self.turns = self.about = None  # the manifest knows as much

    def restore_data(self, documents: Documents) -> RestoreData:
        """Return documents with the log after them, unless that is long."""
        after, records = documents.log_after, None
        if after is not None and self.head - after <= _TAIL:
            records = tuple(self.records(after))
        data = RestoreData(documents, after or 0, records, may_have_items=bool(self.inbox))
        return data.with_low(self.first)

    # the inbox

    def enqueue(self, items: Sequence[PendingItem], limit: InboxLimit | None) -> int:
        """Add items, and return how many were new."""
        new: dict[str, PendingItem] = {}
        for item in items:
            if item.op_id not in self.inbox:
                new.setdefault(item.op_id, item)
        if limit is not None:
            limit.require_room(
                self.key,
                waiting=len(self.inbox),
                size=sum([len(item.payload) for item in self.inbox.values()]),
                new=len(new),
                added=sum([len(item.payload) for item in new.values()]),
            )
        self.inbox.update(new)
        return len(new)

    def receive(self, epoch: int, limit: int) -> list[PendingItem]:
        """Return what waits, oldest first, for who knows the newest epoch, 0 for none."""
        if self.epoch != epoch:
            raise lease_lost(self.key, epoch, self.epoch, deleted=self.deleted)
        return [*self.inbox.values()][:limit]

    def ack(
        self, epoch: int | None, op_ids: Collection[str], dead: Sequence[DeadLetter] = ()
    ) -> None:
        """Remove items, and keep dead letters; without an epoch, remove dead letters."""
        if epoch is not None:
            self.require_held(epoch)
        self.dead_letters.update({letter.item.op_id: letter for letter in dead})
        items: dict[str, Any] = self.dead_letters if epoch is None else self.inbox
        for op_id in acked_ids(op_ids, dead):
            items.pop(op_id, None)

    def letters(self) -> list[DeadLetter]:
        """Return the dead letters in the order of their times."""
        return oldest_first([*self.dead_letters.values()])


class StoredBlob(msgspec.Struct):
    """A blob: its bytes, and its age."""

    data: bytes
    renewed_at: float
    """Time of the last put or renewal."""
    quarantined_at: float | None = None
    """Time when a sweep set it aside."""


def sweep_blobs(
    blobs: dict[str, StoredBlob],
    reachable: Collection[str],
    older_than: float,
    *,
    now: float,
    among: Collection[str] | None = None,
) -> BlobSweep:
    """Sweep a tenant's blobs by name, as ``Store.sweep`` says."""
    quarantined = removed = freed = 0
    for name, blob in list(blobs.items()):
        if among is not None and name not in among:
            continue
        if name in reachable:
            blob.quarantined_at = None
        elif blob.quarantined_at is None:
            if now - blob.renewed_at >= older_than:
                blob.quarantined_at = now
                quarantined += 1
        elif now - blob.quarantined_at >= older_than:
            del blobs[name]
            removed += 1
            freed += len(blob.data)
    return BlobSweep(quarantined, removed, freed)


def renew_blobs(blobs: dict[str, StoredBlob], names: Collection[str], *, now: float) -> set[str]:
    """Make a tenant's blobs young again, as ``Store.renew`` says, and return those not there."""
    for name in blobs.keys() & names:
        blobs[name].renewed_at, blobs[name].quarantined_at = now, None
    return set(names) - blobs.keys()


def remove_blobs(blobs: dict[str, StoredBlob], names: Collection[str]) -> int:
    """Remove a tenant's blobs, as ``Store.remove_blobs`` says, and return how many bytes went."""
    return sum([len(blobs.pop(name).data) for name in blobs.keys() & names])
