"""The store port: what perdure asks of a place that keeps bytes by session.

Small, batch-first, and the same for every backend; ``perdure.testing.conformance``
is its definition. Everybody above holds a `Store` and never learns which one.

Rules that every backend keeps:

* ``append_many`` is idempotent by (key, seq) under one epoch: sending a record again that
  the log already holds changes nothing. It is fenced: a batch whose epoch is not
  the newest is answered with CONFLICT and changes nothing that anybody can read.
* OK means durable to ``capabilities.durability``, every record of the batch, in order.
* The log holds a prefix of whole groups, whatever was killed and whenever.
* Documents are written before the manifest that names them, and the manifest is
  replaced last and atomically; history that a manifest no longer needs stays readable.
* A method that is cancelled may still have its effect; it never has half of it.

Errors of a driver are mapped to `perdure.errors` with the driver's error as the cause.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.model.posts import Asked, Posted
from perdure.model.records import Entry, Record

__all__ = [
    "Asked",
    "Batch",
    "Capabilities",
    "Document",
    "Documents",
    "Grant",
    "Holder",
    "LogChunk",
    "Outcome",
    "Posted",
    "SessionInfo",
    "Status",
    "Store",
    "Swept",
]


class Status(enum.Enum):
    """How one session's part of an ``append_many`` ended."""

    OK = "ok"
    """Durable to the declared level."""
    CONFLICT = "conflict"
    """Another epoch has the session: nothing was written, and nothing will be."""
    PERMANENT = "permanent"
    """This batch will never be accepted: no use in trying again."""
    TRANSIENT = "transient"
    """Nothing was written; trying again may help."""
    IN_DOUBT = "in_doubt"
    """It may or may not have been written; sending the same again is safe."""


class Batch(msgspec.Struct, frozen=True):
    """Records of one session that are to become durable together."""

    key: SessionKey
    epoch: int
    """The sender's fencing token."""
    first: int
    """The seq of ``records[0]``; the others follow without a gap."""
    records: tuple[Entry, ...]
    """Whole groups: the last one has ``end``."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one batch."""

    status: Status
    error: Exception | None = None
    """Why not OK."""
    written: int = 0
    """Bytes handed to the storage for it."""


class LogChunk(msgspec.Struct, frozen=True):
    """A run of records from the log."""

    records: tuple[Record, ...]
    settled: bool = True
    """False when a takeover was under way, so that the newest records may be missing."""


class Document(msgspec.Struct, frozen=True):
    """A folded document whose hash was verified."""

    data: bytes
    as_of_seq: int


class Documents(msgspec.Struct, frozen=True):
    """What ``read_documents`` found."""

    manifest: Manifest | None = None
    found: dict[str, Document] = {}
    damaged: tuple[str, ...] = ()
    """Names that a manifest lists, and whose bytes are lost or match no manifest."""
    why: dict[str, str] = {}
    """What is wrong with a damaged one, where more is known than that."""
    remains: dict[str, bytes] = {}
    """What lies in a damaged one's place, where the store does not keep it as evidence itself."""


class Grant(msgspec.Struct, frozen=True):
    """The right to write one session."""

    key: SessionKey
    epoch: int
    head: int
    """The seq of the epoch record, which is the log's last."""
    created: bool
    """Whether the log was empty before."""


class Holder(msgspec.Struct, frozen=True):
    """Who has, or last had, the right to write a session."""

    epoch: int
    owner: str
    released: bool = False
    alive: bool | None = None
    """True or False where the store can tell at once, else None: then watch ``beat``."""
    beat: int = 0
    """The owner's heartbeat counter; unchanged for the lease's ttl means expired."""
    deleted: bool = False
    """The session was deleted under this epoch."""
    host: str = ""
    pid: int = 0


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session as the directory lists it; from its last fold, so it may lag."""

    key: SessionKey
    epoch: int = 0
    head: int = 0
    """The last record of the log that the directory knows of."""
    created_at: float | None = None
    """Seconds since 1970."""
    updated_at: float | None = None
    owner: str | None = None
    title: str | None = None
    tags: tuple[str, ...] = ()
    turns: int = 0


class Swept(msgspec.Struct, frozen=True):
    """What a blob sweep did."""

    quarantined: int = 0
    removed: int = 0
    bytes: int = 0
    """Bytes that were freed."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a store is, so that the engine can fit itself to it."""

    durability: str
    """What OK means: "fsync", "memory", …"""
    batch_max: int = 64
    """The most sessions in one ``append_many``."""
    batch_linger: float = 0.0
    """Seconds to wait for more sessions when several are due."""
    parallelism: int = 2
    """How many ``append_many`` may run at once."""
    max_record_bytes: int = 16 * 1024 * 1024
    shared: bool = False
    """Whether other machines can use it too."""
    memory_bound: bool = False
    """Whether what it holds must fit into memory."""
    blobs: bool = True
    """Whether it keeps blobs; if not, large values are read from the log."""


class Store(Protocol):
    """Keep logs, documents, blobs and leases. Open with ``open``, close with ``aclose``."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store is."""
        ...

    @property
    def owner(self) -> str:
        """The id of this process and store object as a holder of leases; unguessable."""
        ...

    @property
    def location(self) -> str:
        """Where it keeps things, for people; never a password in it."""
        ...

    async def open(self) -> None:
        """Make the store usable in this process and event loop.

        Raises StoreUnavailableError when it cannot be reached or written.
        """
        ...

    async def aclose(self) -> None:
        """Give up what the store holds open; leases that are not released expire."""
        ...

    # the log

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Make each batch durable; answer for each in the order given. Raise nothing."""
        ...

    def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read records with ``after < seq < before``, oldest first or, reversed, newest first.

        Needs no lease. An unknown session has no records.
        Raises CorruptRecordError for damage before the tail, with what was readable unread.
        """
        ...

    async def head(self, key: SessionKey) -> int:
        """Return the seq of the log's last record, 0 for an unknown session."""
        ...

    async def trim(self, key: SessionKey, epoch: int, below: int) -> int:
        """Remove records with ``seq < below``, as the holder, and return the bytes freed.

        It may keep more of them (whole segments, whole commits), never less, and what is left
        is whole up to the head: ``read_log`` begins with it, and all else goes on as before.
        Raises LeaseLostError when the epoch is not the newest.
        """
        ...

    # documents

    async def read_documents(
        self, key: SessionKey, names: Collection[str] | None = None
    ) -> Documents:
        """Read the documents of these names (all of them for None) and the manifest.

        Raises UnsupportedVersionError for a manifest of a newer format.
        """
        ...

    async def write_documents(
        self, key: SessionKey, documents: Mapping[str, bytes], manifest: Manifest
    ) -> None:
        """Make documents durable, then replace the manifest, fenced by ``manifest.epoch``.

        ``manifest.documents`` lists all documents, those that are unchanged included.
        Raises LeaseLostError when the epoch is not the newest.
        """
        ...

    # blobs

    async def put_blobs(self, tenant: str, blobs: Mapping[str, bytes]) -> None:
        """Make blobs durable under their names (the SHA-256 of their bytes, in hex)."""
        ...

    async def get_blob(self, tenant: str, name: str) -> bytes | None:
        """Return a blob, verified; None when there is none.

        Raises CorruptRecordError when its bytes do not match its name.
        """
        ...

    async def sweep(self, tenant: str, reachable: Collection[str], older_than: float) -> Swept:
        """Move unreachable blobs of at least ``older_than`` seconds of age out of the way, and
        remove those that were moved at least as long ago and still are not reachable."""
        ...

    async def blob_names(self, tenant: str) -> list[str]:
        """List the tenant's blobs that can be read, by name."""
        ...

    async def remove_blobs(self, tenant: str, names: Collection[str]) -> int:
        """Remove blobs at once, from quarantine too, and return how many bytes were freed.

        The caller knows that nothing reaches them; unknown names have no effect.
        """
        ...

    # leases

    async def holder(self, key: SessionKey) -> Holder | None:
        """Say who has the session; None when nobody ever had."""
        ...

    async def acquire(self, key: SessionKey, *, after: int) -> Grant:
        """Take the session with epoch ``after + 1``, if the newest epoch is ``after``.

        ``after`` is ``holder(key).epoch``, or 0 where that is None. Whether one may is the
        caller's decision; the store decides the race. Appends the epoch record.
        Raises LeaseHeldError when somebody else was faster.
        """
        ...

    async def release(self, key: SessionKey, epoch: int) -> None:
        """Say that the epoch's holder writes no more; not the newest epoch: no effect."""
        ...

    async def heartbeat(self) -> Asked:
        """Renew this owner's heartbeat, and return what others want since the last one."""
        ...

    async def news(self, at_most: float) -> None:
        """Return when the next heartbeat may have something to tell, or after ``at_most`` seconds.

        A store that is told (LISTEN, a subscription) returns early; any other just sleeps.
        """
        ...

    async def request_handover(self, key: SessionKey, holder: Holder) -> None:
        """Ask the holder for the session."""
        ...

    # inbox

    async def post(self, key: SessionKey, items: Sequence[Posted]) -> int:
        """Leave items for a session, durably, in order; no lease, and it need not exist.

        Returns how many were new: an ``op_id`` that is waiting already is not posted again.
        All of them are posted, or none. The holder, if there is one, hears of it by ``heartbeat``.
        """
        ...

    async def take(self, key: SessionKey, epoch: int, *, limit: int = 100) -> list[Posted]:
        """Return what waits for a session, oldest first, and leave it there until it is settled.

        Raises LeaseLostError when the epoch is not the newest.
        """
        ...

    async def settle(self, key: SessionKey, epoch: int, op_ids: Collection[str]) -> None:
        """Remove items whose records are durable in the log; unknown ids have no effect.

        Raises LeaseLostError when the epoch is not the newest.
        """
        ...

    async def waiting(self) -> list[SessionKey]:
        """List all tenants' sessions with something waiting, by key; they need not exist."""
        ...

    # directory

    async def sessions(
        self,
        *,
        tenant: str = "",
        owner: str | None = None,
        tag: str | None = None,
        prefix: str = "",
        after: SessionKey | None = None,
        limit: int = 100,
    ) -> list[SessionInfo]:
        """List a tenant's sessions, by key after ``after``, whose agent begins with ``prefix``.

        ``owner`` and ``tag`` keep those that have them, as of the last fold.
        """
        ...

    async def tenants(self) -> list[str]:
        """List the tenants that have anything here, by name."""
        ...

    async def delete(self, key: SessionKey, epoch: int) -> None:
        """Remove what the session owns, as its holder, its inbox included; its epochs never
        start again.

        Raises LeaseLostError when the epoch is not the newest.
        """
        ...

    async def scrub(self) -> None:
        """Leave nothing of what was removed where it can be found: free pages, old logs.

        As far as the backend can; docs/durability.md says how far that is.
        """
        ...
