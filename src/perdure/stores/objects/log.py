"""One session's writer: it puts commits behind the log's end, one at a time.

**Why a late append finds its place taken.** A commit is created under the seq of its first
record, and only if no object has that name. Let a holder know the log up to *h*; then the only
name that it ever tries is *h* + 1.

* As long as that name is free, nobody has written behind *h*: every later object begins behind
  an object at *h* + 1. So no later epoch exists, and the append is the holder's to make.
* A takeover puts its epoch record under the name that follows the log's end. If the old holder
  wrote up to *h*, that name is *h* + 1. If it wrote further without hearing so (the answer was
  lost), *h* + 1 is its own commit, which it recognizes by epoch and bytes.
* Merging commits into segments must not make such a name free again. So two kinds of names are
  kept for good: those of epoch records, and of the last commit before each of them, which
  shrinks to its first line (a tombstone). Any other merged commit is followed by one of the same
  epoch, whose writer had heard of both; nobody tries its name again. The newest commit is
  never merged.

So each append is one request, and needs no look at who holds the lease. A request that was given
up and arrives late can fill a name that merging made free; such a stray lies below the head's
``floor``, where nobody reads, and nobody was told that it was written.

**A bucket that went back** to an earlier state lets a holder go on behind records that are gone.
Its heartbeat notices that at no cost; then one listing, and a look at its newest commit, tell
whether what it was told is durable is there.

Blocking; runs in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from perdure.errors import (
    FormatError,
    LeaseLostError,
    NotStorableError,
    StoreUnavailableError,
    TooLargeError,
)
from perdure.records.keys import SessionKey
from perdure.records.records import Entry
from perdure.store import Batch, Outcome, Status
from perdure.stores.objects import commits, layout, reader
from perdure.stores.objects.bucket import Bucket
from perdure.stores.objects.head import SessionHead

MAX_RECORD_BYTES = 16 * 1024 * 1024
_MOST = 1024
"""Commits that are remembered before those that were merged are sorted out."""


class ObjectLogWriter:
    """What this process knows of a session that it holds."""

    __slots__ = (
        "_bucket",
        "_firsts",
        "begun",
        "crc",
        "epoch",
        "folder",
        "folding",
        "head",
        "is_doubted",
        "key",
        "life",
        "lock",
        "loose",
        "over",
        "owner",
        "seen",
    )

    def __init__(
        self, bucket: Bucket, key: SessionKey, seen: tuple[SessionHead, str], begun: int, crc: int
    ) -> None:
        head = seen[0]
        self._bucket = bucket
        self.key: SessionKey = key
        self.folder: str = layout.folder_of(key)
        self.owner: str = head.owner
        self.epoch: int = head.epoch
        self.life: int = head.life
        self.begun: int = begun
        """The seq of the epoch record."""
        self.head: int = begun
        self.crc: int = crc
        self.loose: int = 0
        """Commits since the log was merged last."""
        self._firsts: list[int] = [begun]
        """The first records of the commits that were made here, and are not merged."""
        self.is_doubted: bool = False
        """Whether the bucket may have gone back to an earlier state."""
        self.lock: threading.Lock = threading.Lock()
        """Of the log's end."""
        self.folding: threading.Lock = threading.Lock()
        """Of the head."""
        self.over: bool = False
        """Somebody else has the session."""
        self.seen: tuple[SessionHead, str] | None = seen
        """The head as it was written last, with its tag."""

    def append(self, batch: Batch) -> Outcome:
        """Append a batch, or say why not; raise nothing that can be said."""
        with self.lock:
            if self.over:
                return Outcome(Status.CONFLICT, lost(self.key, batch.epoch))
            try:
                if self.is_doubted:
                    self._require_commits()
                return self._append(batch)
            except LeaseLostError as error:
                self.over = True
                return Outcome(Status.CONFLICT, error)
            except (NotStorableError, FormatError) as error:
                return Outcome(Status.PERMANENT, error)
            except StoreUnavailableError as error:
                sure = bool(error.facts.get("unwritten"))
                return Outcome(Status.TRANSIENT if sure else Status.IN_DOUBT, error)

    def _append(self, batch: Batch) -> Outcome:
        _check(batch, self.head)
        while True:
            known = self.head + 1 - batch.first
            rest = self._rest(batch, known) if known else batch.records
            if not rest:
                return Outcome(Status.OK)
            name = layout.log_name(self.folder, self.life, self.head + 1)
            data, crc = commits.encode(
                rest, first=self.head + 1, epoch=self.epoch, owner=self.owner, seed=self.crc
            )
            if self._bucket.create(name, data) is not None:
                self._note(self.head + 1)
                self.head += len(rest)
                self.crc = crc
                self.loose += 1
                return Outcome(Status.OK, written=len(data))
            if self._adopt(name, data):
                return Outcome(Status.OK)

    def _note(self, first: int) -> None:
        self._firsts.append(first)
        if len(self._firsts) > _MOST and self.seen is not None:
            floor = self.seen[0].floor
            self._firsts = [one for one in self._firsts if one > floor]

    def _require_commits(self) -> None:
        """Raise LeaseLostError if commits that were acknowledged are not there any more."""
        prefix = layout.log_prefix(self.folder, self.life)
        there = {layout.first_of(one.name) for one in self._bucket.listed(prefix)}
        # Behind the listing: what was merged meanwhile lies below the floor by now.
        seen = self.seen or reader.look(self._bucket, self.key)
        floor = 0 if seen is None else seen[0].floor
        gone = [first for first in self._firsts if first > floor and first not in there]
        last = self._commit(self._firsts[-1])
        if not gone and (last is None or last.crc != self.crc):
            gone = self._firsts[-1:]  # somebody else has begun anew
        if gone:
            self._take_away([one for one in self._firsts if one > min(gone) and one in there])
            raise lost(self.key, self.epoch, gone=min(gone))
        self.is_doubted = False

    def _commit(self, first: int) -> commits.Commit | None:
        """Return a commit as it lies there, if it is one."""
        name = layout.log_name(self.folder, self.life, first)
        found = self._bucket.get(name)
        if found is None or found.data == commits.GONE:
            return None
        return commits.commit(name, first, found.data)

    def _take_away(self, firsts: Sequence[int]) -> None:
        """Keep aside what was taken behind the gap: it would damage the log for everybody.

        It goes with the session, or when somebody scrubs the store under a later epoch.
        """
        for first in firsts:
            there = self._commit(first)
            if there is None or there.header.epoch != self.epoch:
                continue
            if there.header.owner == self.owner:
                name = layout.log_name(self.folder, self.life, first)
                aside = f"{self.folder}/doc/{self.epoch:010d}-behind-{first:020d}"
                if self._bucket.copy(name, aside):
                    self._bucket.remove([name])

    def _adopt(self, name: str, data: bytes) -> bool:
        """Go on behind a commit that an attempt of ours made, whose answer was lost.

        Returns True where its records were merged by a later holder, and are these.
        Raises LeaseLostError where it is another's.
        """
        found = self._bucket.get(name)
        if found is None:  # two writers at one moment: the service let neither win
            message = f"{name} can be neither made nor read: trying again may help"
            raise StoreUnavailableError(message, object=name, unwritten=True)
        if found.data == commits.GONE:
            raise lost(self.key, self.epoch)
        there = commits.commit(name, self.head + 1, found.data)
        if there.header.epoch != self.epoch or there.header.owner != self.owner:
            raise lost(self.key, self.epoch, newest=there.header.epoch)
        if not there.header.cut:
            self._note(self.head + 1)
            self.head, self.crc = there.header.last, there.crc
            return False
        self.over = True
        if there.header == commits.cut_of(data):
            return True
        raise lost(self.key, self.epoch)

    def _rest(self, batch: Batch, known: int) -> Sequence[Entry]:
        """Return what of a batch the log does not hold, if it holds the other part."""
        sent = batch.records[:known]
        last = batch.first + len(sent) - 1
        there = reader.entries(self._bucket, self.key, batch.first, last)
        # Only for a sender that repeats itself: the same bytes, the same epoch.
        if batch.first <= self.begun or list(sent) != there:
            seen = reader.look(self._bucket, self.key)
            if seen is None or seen[0].epoch != self.epoch or seen[0].deleted:
                raise lost(self.key, self.epoch, newest=seen[0].epoch if seen else None)
            message = (
                f"the log of {self.key} holds other records from {batch.first} on: read the head "
                "again and append behind it"
            )
            raise NotStorableError(message, key=self.key, first=batch.first, head=self.head)
        return batch.records[known:]


def _check(batch: Batch, head: int) -> None:
    records = batch.records
    largest = max([len(entry.payload) for entry in records], default=0)
    if largest > MAX_RECORD_BYTES:
        message = (
            f"a record of {batch.key} has {largest} bytes, the limit is {MAX_RECORD_BYTES}: keep "
            "large values as blobs"
        )
        raise TooLargeError(message, key=batch.key, size=largest)
    if not 0 < batch.first <= head + 1 or (records and not records[-1].end):
        message = (
            f"a batch of {batch.key} begins at {batch.first} with the log's head at {head}, or "
            "ends within a group: send whole groups from the head on"
        )
        raise NotStorableError(message, key=batch.key, first=batch.first, head=head)


def lost(
    key: SessionKey, epoch: int, *, newest: int | None = None, gone: int | None = None
) -> LeaseLostError:
    """Return the error for an epoch that may not write any more; *gone*, if its records are."""
    said = f": the newest is {newest}" if newest else ""
    said = said if gone is None else f": its records from {gone} on are not there any more"
    message = f"epoch {epoch} of {key} may not write{said}; open the session again"
    return LeaseLostError(message, key=key, epoch=epoch, newest=newest, gone=gone)
