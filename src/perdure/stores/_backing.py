"""What the memory store's instances share: sessions, owners and blobs as plain values.

Nothing here waits. What a session does with a batch is decided here; `MemoryStore`
brings the epochs, the time and the checkpoints.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import final

import anyio
import msgspec

from perdure.codec.matching import matched
from perdure.errors import (
    LeaseHeldError,
    LeaseLostError,
    NotStorableError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.model.keys import SessionKey
from perdure.model.manifest import FORMAT, About, Manifest
from perdure.model.records import EPOCH, Entry, Record
from perdure.store import Batch, DeadLetter, Documents, Posted, SessionInfo

__all__ = [
    "Blob",
    "MemoryBacking",
    "Owner",
    "Session",
    "documents_of",
    "fits",
    "fresh",
    "held",
    "info_of",
    "listed",
    "lost",
    "too_late",
]


_GONE = Entry("", b"")


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
        "first",
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
        self.first = 1  # the records before it were removed
        self.epoch_starts: list[int] = []
        self.epochs: list[int] = []
        self.documents: dict[str, bytes] = {}
        self.manifest: Manifest | None = None
        self.created_at: float | None = None
        self.updated_at: float | None = None

    def seqs(self, after: int, before: int | None, *, reverse: bool) -> range:
        """Return the places of what is asked for, in that order."""
        end = len(self.entries) + 1
        seqs = range(max(after + 1, self.first), end if before is None else min(before, end))
        return seqs[::-1] if reverse else seqs

    def begin(self, epoch: int, owner: str, at: float) -> int:
        """Begin an epoch with its record, and return where that stands."""
        self.epoch, self.owner = epoch, owner
        self.released = self.deleted = False
        begun = msgspec.json.encode({"owner": owner, "at": at})
        self.entries.append(Entry(EPOCH, begun))
        self.epoch_starts.append(len(self.entries))
        self.epochs.append(epoch)
        return len(self.entries)

    def fold(self, documents: Mapping[str, bytes], manifest: Manifest) -> None:
        """Replace the documents and the manifest."""
        kept = {**self.documents, **documents}
        self.documents = {name: kept[name] for name in manifest.documents if name in kept}
        self.manifest = manifest

    def trim(self, below: int) -> int:
        """Forget the records before one, and return how many bytes they had."""
        gone = range(self.first - 1, min(below - 1, len(self.entries)))
        freed = sum(len(self.entries[place].payload) for place in gone)
        # A new list: a reader that is under way keeps the old one, whole.
        self.entries = [_GONE] * gone.stop + self.entries[gone.stop :]
        self.first = max(self.first, gone.stop + 1)
        return freed

    def records(self, seqs: range) -> Iterator[Record]:
        """Give entries their places; epochs lie in runs, so only their starts are kept."""
        entries, starts, epochs = self.entries, self.epoch_starts, self.epochs
        for seq in seqs:
            kind, payload, end = entries[seq - 1]
            epoch = epochs[bisect_right(starts, seq) - 1]
            yield Record(seq, epoch, kind, payload, end)


class Owner:
    """One store on the backing, as the others see it."""

    __slots__ = ("alive", "beat", "bell", "mail", "wanted")

    def __init__(self) -> None:
        self.alive = True
        self.beat = 0
        self.wanted: dict[SessionKey, None] = {}
        self.mail: dict[SessionKey, None] = {}
        self.bell: anyio.Event | None = None
        """There while somebody waits for news."""

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Leave out who waits: a copy of the backing is what another process would find."""
        kept = (name for name in self.__slots__ if name != "bell")
        return None, {"bell": None, **{name: getattr(self, name) for name in kept}}

    def ring(self) -> None:
        """Wake whoever waits for news."""
        if self.bell is not None:
            self.bell.set()


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
        self.inboxes: dict[SessionKey, dict[str, Posted]] = {}
        """What waits for each session, by op id, oldest first."""
        self.dead_letters: dict[SessionKey, dict[str, DeadLetter]] = {}
        """What was set aside, by op id."""


def held(key: SessionKey, epoch: int, session: Session | None) -> Session:
    """Return a session to the holder of its newest epoch.

    Raises:
        LeaseLostError: The epoch is not the newest, or the session was deleted.

    """
    if session is None or session.epoch != epoch or session.deleted:
        raise lost(key, epoch, session)
    return session


def lost(key: SessionKey, epoch: int, session: Session | None) -> LeaseLostError:
    """Return the error for a write under an epoch that is over."""
    newest = session.epoch if session else 0
    message = (
        f"epoch {epoch} of {key} may not write: the newest is {newest}"
        f"{', and it was deleted' if session and session.deleted else ''}; open the session again"
    )
    return LeaseLostError(message, key=key, epoch=epoch, newest=newest)


def too_late(key: SessionKey, after: int, newest: int) -> LeaseHeldError:
    """Return the error for an acquire that somebody else was faster with."""
    message = (
        f"{key} is at epoch {newest}, not {after}: look again who holds it, then ask for a "
        "handover or wait"
    )
    return LeaseHeldError(message, key=key, epoch=newest)


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
    return matched(manifest, session.documents, names)


def fits(info: SessionInfo, owner: str | None, tag: str | None) -> bool:
    """Say whether a session is one of those that are listed."""
    return owner in (None, info.owner) and (tag is None or tag in info.tags)


def listed(
    backing: MemoryBacking, tenant: str, prefix: str, after: SessionKey | None
) -> Iterator[SessionInfo]:
    """Give a tenant's sessions by key."""
    for key in sorted(key for key in backing.sessions if key.tenant == tenant):
        session = backing.sessions[key]
        if key.agent.startswith(prefix) and not session.deleted and (not after or key > after):
            yield info_of(key, session)


def info_of(key: SessionKey, session: Session) -> SessionInfo:
    """Return what a listing says of a session."""
    counters = session.manifest.counters if session.manifest else {}
    about = session.manifest.about if session.manifest else About()
    return SessionInfo(
        key=key,
        epoch=session.epoch,
        head=len(session.entries),
        created_at=session.created_at,
        updated_at=session.updated_at,
        owner=about.owner,
        title=about.title,
        tags=about.tags,
        turns=counters.get("turns", 0),
    )


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
