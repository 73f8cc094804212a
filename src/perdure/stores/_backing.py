"""What the memory store's instances share: sessions, owners and blobs as plain values.

Nothing here waits. What a session does with a batch is decided here; `MemoryStore`
brings the epochs, the time and the checkpoints.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

from perdure.errors import NotStorableError, TooLargeError, UnsupportedVersionError
from perdure.model.keys import SessionKey
from perdure.model.manifest import FORMAT, Manifest
from perdure.model.records import Entry, Record
from perdure.store import Batch, Document, Documents

__all__ = ["Blob", "MemoryBacking", "Owner", "Session", "documents_of", "fresh", "sha256"]


class Session:
    """One session: its log, its documents and who writes it."""

    __slots__ = (
        "created_at",
        "deleted",
        "documents",
        "entries",
        "epoch",
        "epoch_starts",
        "epochs",
        "manifest",
        "owner",
        "released",
        "updated_at",
    )

    def __init__(self) -> None:
        self.epoch = 0
        self.owner = ""
        self.released = False
        self.deleted = False
        self.empty()

    def empty(self) -> None:
        # New containers: a reader that is under way keeps the old ones, whole.
        self.entries: list[Entry] = []
        self.epoch_starts: list[int] = []
        self.epochs: list[int] = []
        self.documents: dict[str, bytes] = {}
        self.manifest: Manifest | None = None
        self.created_at: float | None = None
        self.updated_at: float | None = None

    def records(self, seqs: range) -> Iterator[Record]:
        """Give entries their places; epochs lie in runs, so only their starts are kept."""
        entries, starts, epochs = self.entries, self.epoch_starts, self.epochs
        for seq in seqs:
            kind, payload, end = entries[seq - 1]
            epoch = epochs[bisect_right(starts, seq) - 1]
            yield Record(seq, epoch, kind, payload, end)


class Owner:
    """One store on the backing, as the others see it."""

    __slots__ = ("alive", "beat", "wanted")

    def __init__(self) -> None:
        self.alive = True
        self.beat = 0
        self.wanted: dict[SessionKey, None] = {}


class Blob:
    """A blob, since when it is there, and since when it is out of the way."""

    __slots__ = ("data", "quarantined_at", "renewed_at")

    def __init__(self, data: bytes, now: float) -> None:
        self.data = data
        self.renewed_at = now
        self.quarantined_at: float | None = None


@final
class MemoryBacking:
    """What the stores of several pretended processes share, as real ones share a disk.

    Example:
        >>> from perdure.stores.memory import MemoryBacking, MemoryStore
        >>> disk = MemoryBacking()
        >>> one, other = MemoryStore(owner="one", backing=disk), MemoryStore(backing=disk)
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        """Seconds since 1970; the ages of blobs and the directory's times come from it."""
        self.sessions: dict[SessionKey, Session] = {}
        self.owners: dict[str, Owner] = {}
        self.blobs: dict[tuple[str, str], Blob] = {}


def documents_of(key: SessionKey, session: Session, names: Collection[str] | None) -> Documents:
    """Return a session's documents, each checked against the manifest's hash.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    manifest = session.manifest
    if manifest is None:
        return Documents()
    if manifest.format > FORMAT:
        message = (
            f"the manifest of {key} has format {manifest.format}, this release reads up to "
            f"{FORMAT}: use a newer release of perdure"
        )
        raise UnsupportedVersionError(message, key=key, format=manifest.format)
    found: dict[str, Document] = {}
    damaged: list[str] = []
    for name, folded in manifest.documents.items():
        if names is not None and name not in names:
            continue
        data = session.documents.get(name)
        if data is None or sha256(data) != folded.sha256:
            damaged.append(name)
        else:
            found[name] = Document(data, folded.as_of_seq)
    return Documents(manifest, found, tuple(damaged))


def sha256(data: bytes) -> str:
    """Return the hash that names bytes."""
    return hashlib.sha256(data).hexdigest()


def fresh(session: Session, batch: Batch, max_record_bytes: int) -> Sequence[Entry] | Exception:
    """Return what of a batch the log does not hold yet, or why it will never be accepted."""
    head = len(session.entries)
    records = batch.records
    largest = max([len(entry.payload) for entry in records], default=0)
    if largest > max_record_bytes:
        message = (
            f"a record of {batch.key} has {largest} bytes, the limit is "
            f"{max_record_bytes}: keep large values as blobs"
        )
        return TooLargeError(message, key=batch.key, size=largest)
    if not 0 < batch.first <= head + 1 or (records and not records[-1].end):
        message = (
            f"a batch of {batch.key} begins at {batch.first} with the log's head at {head}, or "
            "ends within a group: send whole groups from the head on"
        )
        return NotStorableError(message, key=batch.key, first=batch.first, head=head)
    held = head + 1 - batch.first
    if not held:
        return records
    known = records[:held]
    # Idempotence is only for a sender that repeats itself: the same bytes, the same epoch.
    own = batch.first > session.epoch_starts[-1]
    if not own or session.entries[batch.first - 1 : batch.first - 1 + len(known)] != list(known):
        message = (
            f"the log of {batch.key} holds other records from {batch.first} on: read the head "
            "again and append behind it"
        )
        return NotStorableError(message, key=batch.key, first=batch.first, head=head)
    return records[held:]
