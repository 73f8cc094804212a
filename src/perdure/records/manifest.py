"""The manifest of folded documents, the origin of a log with earlier history, and stored forms."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Mapping

import msgspec

from perdure.records.keys import SessionKey
from perdure.records.records import Entry, Record


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What comes before a log."""

    at: int = 0
    """The last record before the log's own first one."""
    parent: SessionKey | None = None
    """Whose history it is, up to ``at``; None where it is kept here, or was removed."""
    epoch: int = 0
    """The epoch of the record ``at``: another one means another life of the parent's."""
    kept: str = ""
    """The blob with the `HistoryIndex` of the history in this session's own keeping."""
    cut: int = 0
    """History up to here was removed."""
    folded: str = ""
    """The blob with the documents as of an early record: `FoldedDocuments`."""
    moved: SessionKey | None = None
    """The name that the session had before, if it was renamed."""

    @property
    def begins_fork(self) -> bool:
        """Whether a session begins with it as another one's fork; what it gets later says more."""
        return self.parent is not None and not (self.kept or self.folded or self.cut)


class HistorySegment(msgspec.Struct, frozen=True):
    """A run of records in a blob."""

    first: int
    last: int
    blob: str


class HistoryIndex(msgspec.Struct, frozen=True):
    """The pieces of a history, oldest first, without a gap."""

    pieces: tuple[HistorySegment, ...]


class ForkNote(msgspec.Struct, frozen=True):
    """The payload of a parent's note that a fork begins."""

    child: SessionKey


# The manifest: which documents are folded, as of which record of the log


FORMAT = 1
"""The store format that this release writes."""

KEYS = "keys/"
"""Where the documents are that hold an encrypted session's key; who has it does not see them."""


class FoldedDocument(msgspec.Struct, frozen=True):
    """One document as the manifest knows it."""

    as_of_seq: int
    """The last record that is folded into it."""
    sha256: str
    """Of its bytes, in hex."""
    size: int
    """Bytes."""


class About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a listing shows of a session without opening it."""

    title: str | None = None
    tags: tuple[str, ...] = ()
    owner: str | None = None
    created_at: float | None = None
    """Seconds since 1970."""
    updated_at: float | None = None


class FoldedDocuments(msgspec.Struct, frozen=True):
    """Documents as of an early record, each kept as the blob of its hash."""

    as_of_seq: int
    documents: dict[str, FoldedDocument]
    counters: dict[str, int] = {}
    about: About = About()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a fold has made of the log up to a record."""

    format: int = FORMAT
    key: SessionKey
    epoch: int
    """The holder that folded."""
    as_of_seq: int
    """The last record that this fold has seen. Every document's is at most this."""
    counters: dict[str, int] = {}
    """Counters that go on after a restore: turns, messages, compactions."""
    documents: dict[str, FoldedDocument] = {}
    about: About = About()
    base: Origin | None = None
    """Where the history before this log is, if the log is not all of it."""
    position: msgspec.Raw = msgspec.Raw(b"null")
    """Where the log goes on behind ``as_of_seq``; the store's own, opaque to everybody else."""


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
    """Names that a manifest lists, and whose bytes are lost or match no manifest; where the
    manifest itself is damaged, what lies there of those that were asked for."""
    why: dict[str, str] = {}
    """What is wrong with a damaged one, where more is known than that."""
    remains: dict[str, bytes] = {}
    """What lies in a damaged one's place, where the store does not keep it as evidence itself."""
    unproven_tail: str = ""
    """Why records may have been cut off from the log's end; empty where nothing says so."""


class HeldLease(msgspec.Struct, frozen=True):
    """The right to write one session."""

    key: SessionKey
    epoch: int
    head: int
    """The seq of the epoch record, which is the log's last."""
    created: bool
    """Whether the log was empty before."""


class LeaseState(msgspec.Struct, frozen=True):
    """Who has, or last had, the right to write a session."""

    epoch: int
    owner: str
    released: bool = False
    alive: bool | None = None
    """True or False where the store can tell at once, else None: then watch ``beat``."""
    beat: int = 0
    """The owner's heartbeat counter: another one after each heartbeat, and after the owner began
    anew; unchanged for the lease's ttl means expired. 0 where the store knows of no heartbeat."""
    deleted: bool = False
    """The session was deleted under this epoch."""
    host: str = ""
    pid: int = 0
    listed: str = ""
    """The owner's name in ``HeartbeatRequests.beats``, where that is not ``owner``."""


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
    damaged: bool = False
    """What was folded cannot be read, so owner, title, tags and turns are not known."""


class BlobSweep(msgspec.Struct, frozen=True):
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
    dead_letters: bool = False
    """Whether it keeps dead letters; if not, posts that cannot be delivered stay in the inbox."""


# Documents against the manifest that lists them: only bytes with the right hash count. Pure


def matched(
    manifest: Manifest, stored: Mapping[str, bytes], names: Collection[str] | None
) -> Documents:
    """Return the documents of these names (None: all) that a manifest lists.

    Where there is nothing, or something else, they are damaged.
    """
    documents: dict[str, Document] = {}
    damaged: list[str] = []
    for name, folded in manifest.documents.items():
        if names is not None and name not in names:
            continue
        data = stored.get(name)
        if data is not None and hashlib.sha256(data).hexdigest() == folded.sha256:
            documents[name] = Document(data, folded.as_of_seq)
        else:
            damaged.append(name)
    remains = {name: stored[name] for name in damaged if name in stored}
    return Documents(manifest, documents, tuple(damaged), remains=remains)
