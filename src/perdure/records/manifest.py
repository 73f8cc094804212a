"""Values that stores are given, return and refuse: manifests, batches, origins of logs, leases."""

from __future__ import annotations

import enum
import hashlib
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

from perdure.errors import (
    AcknowledgedRecordsLostError,
    ConfigError,
    FormatError,
    LeaseHeldError,
    LeaseLostError,
    NotStorableError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.records.json import MAX_RECORD_BYTES, decode
from perdure.records.keys import SessionKey
from perdure.records.records import BASE, EPOCH, Entry, Record


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The history before a log."""

    at: int = 0
    """The last record before the log's own first one."""
    parent: SessionKey | None = None
    """The session whose history it is, up to ``at``; None if it is kept here, or was removed."""
    epoch: int = 0
    """The epoch of the record ``at``: another one means another generation of the parent."""
    kept: str = ""
    """The blob with the `HistoryIndex` of the history that this session keeps itself."""
    cut: int = 0
    """History up to here was removed."""
    folded: str = ""
    """The blob with the documents as of an early record: `FoldedDocuments`."""
    moved: SessionKey | None = None
    """The name that the session had before, if it was renamed."""

    @property
    def begins_fork(self) -> bool:
        """True if it is the origin of a fork; later origins have more fields."""
        return self.parent is not None and not (self.kept or self.folded or self.cut)


class _EpochPayload(msgspec.Struct):
    base: Origin | None = None


def origin_in(record: Record) -> Origin | None:
    """Return the history before a log that a record of it names: a base, or the first epoch's."""
    if record.kind == BASE:
        return decode(record.payload, Origin)
    if record.kind != EPOCH:
        return None
    try:
        return decode(record.payload, _EpochPayload).base
    except FormatError:  # only the store can read it
        return None


class HistorySegment(msgspec.Struct, frozen=True):
    """A run of records in a blob."""

    first: int
    last: int
    blob: str


class HistoryIndex(msgspec.Struct, frozen=True):
    """The segments of a history, oldest first, without a gap."""

    pieces: tuple[HistorySegment, ...]


class ForkNote(msgspec.Struct, frozen=True):
    """The payload of a parent's note that a fork begins."""

    child: SessionKey


FORMAT = 2
"""The newest format of a session that this release reads: its messages refer to media in blobs.
Sessions without such messages are of format 1, which every release reads."""

KEYS = "keys/"
"""The prefix of documents with an encrypted session's keys; a store with the key hides them."""


class FoldedDocument(msgspec.Struct, frozen=True):
    """One document, as the manifest lists it."""

    as_of_seq: int
    """The last record that is folded into it."""
    sha256: str
    """The hash of its bytes, in hex."""
    size: int

    @classmethod
    def of(cls, as_of_seq: int, data: bytes) -> Self:
        """Return the entry of a document with these bytes."""
        return cls(as_of_seq, hashlib.sha256(data).hexdigest(), len(data))


class About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a session that a listing shows without opening it."""

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
    """The documents that a fold has made of the log up to a record."""

    format: int = 1
    key: SessionKey
    epoch: int
    """The holder that folded."""
    as_of_seq: int
    """The last record of this fold. Every document's is at most this."""
    counters: dict[str, int] = {}
    """Counters that continue after a restore: turns, messages, compactions."""
    documents: dict[str, FoldedDocument] = {}
    about: About = About()
    base: Origin | None = None
    """The history before this log, if there is any."""
    position: msgspec.Raw = msgspec.Raw(b"null")
    """Place where the log continues after ``as_of_seq``; the store's own, opaque to others."""


class _Format(msgspec.Struct):
    format: int = 1


def decode_manifest(body: bytes | None, what: str, **facts: Any) -> Manifest | None:
    """Return a manifest of its JSON, None if that is damaged or missing: then it counts as lost.

    Raises:
        UnsupportedVersionError: It has a newer format, and may have another shape.

    """
    if body is None:
        return None
    try:
        number = decode(body, _Format).format
        if number <= FORMAT:
            return decode(body, Manifest)
    except (FormatError, ConfigError):  # ConfigError: ids that are not valid
        return None
    raise newer_format(what, number, **facts)


class Status(enum.Enum):
    """The result of one session's part of an ``append_many``."""

    OK = "ok"
    """Durable to the declared level."""
    CONFLICT = "conflict"
    """Another epoch has the session: what was sent is not in its log, and will not be."""
    PERMANENT = "permanent"
    """This batch will never be accepted: do not retry."""
    TRANSIENT = "transient"
    """Nothing was written; a retry may help."""
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
    turns: int | None = None
    """The session's turns with them, for the directory; None: as before."""
    about: About | None = None
    """Its labels with them, for the directory; None: as before."""


class Outcome(msgspec.Struct, frozen=True):
    """The store's answer for one batch."""

    status: Status
    error: Exception | None = None
    """The reason, if not OK."""
    written: int = 0
    """Bytes passed to the storage for it."""


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
    """The result of ``read_documents``."""

    manifest: Manifest | None = None
    found: dict[str, Document] = {}
    damaged: tuple[str, ...] = ()
    """Listed names whose bytes are lost or do not match the manifest; if the manifest itself is
    damaged, the requested names that exist."""
    why: dict[str, str] = {}
    """Reason why a document counts as damaged, if more is known."""
    remains: dict[str, bytes] = {}
    """The bytes of damaged documents, unless the store keeps them as evidence itself."""
    unproven_tail: str = ""
    """Reason why records may be missing from the log's end; empty without such a sign."""
    cut: tuple[str, ...] = ()
    """The bytes that were cut from the log's end, since they were no whole records, and are kept:
    how many, and where."""

    @property
    def log_after(self) -> int | None:
        """The record after which a restore needs the log; None where a document is damaged."""
        if self.damaged:
            return None
        folded = [document.as_of_seq for document in self.found.values()]
        return 0 if self.manifest is None else min([self.manifest.as_of_seq, *folded])


class RestoreData(msgspec.Struct, frozen=True):
    """Parts that a restore needs: all of one moment."""

    documents: Documents
    after: int = 0
    """The record that ``records`` come after."""
    records: tuple[Record, ...] | None = None
    """The log after the documents, up to its end; None if it has to be read."""
    may_have_items: bool = True
    """True if something may be waiting in the inbox."""
    may_have_removed: bool = True
    """True if the log may still have records that the manifest's base says were removed."""
    newest: tuple[Record, ...] = ()
    """The newest records of the log, newest first, if they were asked for and could be read."""

    def with_low(self, low: int) -> RestoreData:
        """Return it for a log whose first record is *low*."""
        base = None if self.documents.manifest is None else self.documents.manifest.base
        may_have_removed = base is not None and low <= base.cut
        return msgspec.structs.replace(self, may_have_removed=may_have_removed)


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Which session another one is a copy of. Until it is published, readers see no session."""

    source: SessionKey
    """Possibly of another store."""
    generation: int
    """The epoch of the source's record ``up_to``: another one means another life of that id."""
    up_to: int
    """The last record that is copied."""
    purpose: str
    """"fork", "copy", "rename", "migrate", "restore" or "import"."""


class DraftInfo(msgspec.Struct, frozen=True):
    """A draft that is not published."""

    key: SessionKey
    epoch: int
    draft: Draft
    owner: str
    """Process that writes it, or did: its holder."""


class Beginning(msgspec.Struct, frozen=True):
    """Beginning of a new log: the arguments of ``acquire``."""

    first: int = 1
    base: Origin | None = None
    draft: Draft | None = None
    about: About | None = None
    """The labels that the directory has of it until a save brings others."""


class Taken(msgspec.Struct, frozen=True):
    """The right to write one session, and what was read with it."""

    key: SessionKey
    epoch: int
    head: int
    """The seq of the epoch record, which is the log's last."""
    created: bool
    """True if a log begins with it."""
    record: bytes = b""
    """The epoch record's payload, where a log begins with it: no one can read a draft's."""
    found: RestoreData | None = None
    """The documents that the terms name, and the log after them; None if they have to be read."""


class LeaseState(msgspec.Struct, frozen=True):
    """The current or last holder of the right to write a session."""

    epoch: int
    owner: str
    released: bool = False
    alive: bool | None = None
    """True or False if the store knows at once, else None: then watch ``beat``. Where no one
    holds the session, a store need not look."""
    beat: int = 0
    """The owner's heartbeat counter: changes with each heartbeat, and with a restart of the owner;
    unchanged for the lease's ttl means expired. 0 if the store has no heartbeat of it."""
    deleted: bool = False
    """There is no session: it was deleted under this epoch, or is a ``draft``."""
    host: str = ""
    pid: int = 0
    listed: str = ""
    """The owner's name in ``HeartbeatRequests.beats``, if that is not ``owner``."""
    draft: Draft | None = None
    """Source that the session copies, until it is deleted; unpublished while ``deleted``."""


class Held(msgspec.Struct, frozen=True):
    """The answer where the terms do not allow to take a session."""

    holder: LeaseState | None
    """Current or last holder; None for a session that never was."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms an owner wants a session: all that a store needs to decide by itself."""

    me: str
    """The owner's id."""
    create: bool = True
    """True if a session may begin where there is none."""
    new: bool = False
    """True if there must be none."""
    given: int = 0
    """The epoch in which this owner handed the session over, while the requester comes first."""
    silent: Mapping[str, int] = {}
    """Owners that stopped renewing their heartbeat, with the counter that proved it."""
    after: int | None = None
    """Take it from any holder, if this is the newest epoch (0: none): the caller has decided."""
    beginning: Beginning = Beginning()
    """Beginning of a log where there is no session."""
    names: frozenset[str] | None = frozenset()
    """The documents to read with it, all of them for None."""
    set_aside: bool = False
    """Begin a log in place of the one that is there, which was found damaged, and keep what that
    has for people to look at. A store that cannot do that takes the session as it is."""

    def allows(self, holder: LeaseState | None) -> bool:
        """Return whether the session may be taken from its newest holder now.

        >>> Terms(me="me").allows(None)
        True
        >>> Terms(me="me").allows(LeaseState(epoch=1, owner="other", alive=True))
        False
        """
        is_there = holder is not None and not holder.deleted
        if is_there and (self.new or self.beginning.draft is not None):
            return False
        if self.after is not None:
            return self.after == (0 if holder is None else holder.epoch)
        if not (is_there or self.create):
            return False
        if holder is None or (holder.deleted and holder.draft is None):
            return True
        if holder.released:
            return holder.epoch != self.given
        # Ours: an earlier open was abandoned half-way.
        is_over = holder.owner == self.me or holder.alive is False
        return is_over or self.silent.get(holder.listed or holder.owner) == holder.beat


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session as the directory lists it: as of its last save, on files and buckets see
    docs/stores.md; as of its last fold where it was not saved by this release yet."""

    key: SessionKey
    epoch: int = 0
    head: int = 0
    """The last record of the log that the directory knows of."""
    created_at: float | None = None
    """Seconds since 1970."""
    updated_at: float | None = None
    """Time of the last save: the last activity."""
    owner: str | None = None
    title: str | None = None
    tags: tuple[str, ...] = ()
    turns: int = 0
    damaged: bool = False
    """True if the fold cannot be read."""

    @property
    def last_used(self) -> tuple[float, SessionKey]:
        """Key by which listings with the newest activity first are ordered."""
        return self.updated_at or 0.0, self.key


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Selection, order and page of a listing."""

    tenant: str = ""
    owner: str | None = None
    tag: str | None = None
    prefix: str = ""
    """Prefix of the agent's id."""
    without: tuple[str, ...] = ()
    """Agents that are left out."""
    since: float | None = None
    """The earliest last activity, in seconds since 1970."""
    before: float | None = None
    """The time that the last activity is before."""
    newest_first: bool = False
    """By the last activity, the newest first (of the same time by key, backward); else by key."""
    after: SessionKey | None = None
    """The last session of the page before."""
    after_at: float | None = None
    """Its last activity: where ``newest_first`` is, a page begins after both."""
    limit: int = 100

    def after_page(self, last: SessionInfo) -> SessionQuery:
        """Return the query of the page after the one with this last session."""
        return msgspec.structs.replace(self, after=last.key, after_at=last.updated_at or 0.0)

    def matches(self, info: SessionInfo) -> bool:
        """Return whether a session of this tenant is chosen, on any page."""
        at = info.updated_at or 0.0
        return (
            info.key.agent.startswith(self.prefix)
            and info.key.agent not in self.without
            and self.owner in (None, info.owner)
            and (self.tag is None or self.tag in info.tags)
            and (self.since is None or at >= self.since)
            and (self.before is None or at < self.before)
        )

    def is_next(self, info: SessionInfo) -> bool:
        """Return whether a session comes after the page before."""
        if self.after is None:
            return True
        if self.newest_first:
            return info.last_used < (self.after_at or 0.0, self.after)
        return info.key > self.after

    def page(self, infos: Iterable[SessionInfo]) -> list[SessionInfo]:
        """Return the page that is made of sessions of this tenant, in any order."""
        chosen = [info for info in infos if self.matches(info) and self.is_next(info)]
        limit = max(self.limit, 0)
        if self.newest_first:
            return heapq.nlargest(limit, chosen, key=lambda info: info.last_used)
        return heapq.nsmallest(limit, chosen, key=lambda info: info.key)


def session_info(
    key: SessionKey,
    manifest: Manifest | None,
    *,
    turns: int | None = None,
    about: About | None = None,
    **facts: Any,
) -> SessionInfo:
    """Return a session's entry in a listing.

    Args:
        key: The session.
        manifest: Of its last fold: it says what no save has said.
        turns: What the last save said; None if none did.
        about: The labels that a save or its beginning has said.
        facts: Further fields.

    """
    if manifest is not None:
        turns = manifest.counters.get("turns", 0) if turns is None else turns
        about = manifest.about if about is None else about
    about = about or About()
    turns = turns or 0
    named = {"owner": about.owner, "title": about.title, "tags": about.tags, "turns": turns}
    return SessionInfo(key=key, **{**named, **facts})


class BlobSweep(msgspec.Struct, frozen=True):
    """The result of a blob sweep."""

    quarantined: int = 0
    removed: int = 0
    bytes: int = 0
    """Bytes that were freed."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a store, to which the engine adapts."""

    durability: str
    """Meaning of OK: "fsync", "memory", …"""
    batch_max: int = 64
    """The most sessions in one ``append_many``."""
    batch_linger: float = 0.0
    """Seconds to wait for more sessions when several are due."""
    parallelism: int = 2
    """Number of ``append_many`` calls that run at once."""
    queue_depth: int = 0
    """Number of calls that may wait in the store's own queue: it then has its next one at once. One
    waits only if it is at least half full, and if the last call took 50 ms at most."""
    max_record_bytes: int = 16 * 1024 * 1024
    shared: bool = False
    """True if other machines can use it too."""
    memory_bound: bool = False
    """True if its data must fit into memory."""
    blobs: bool = True
    """True if it keeps blobs; if not, large values are read from the log."""


def matching_documents(
    manifest: Manifest | None, stored: Mapping[str, bytes], names: Collection[str] | None
) -> Documents:
    """Return the documents of these names (None: all) that a manifest lists; none without one.

    A document that is missing, or whose hash differs, is damaged.

    Raises:
        UnsupportedVersionError: The manifest has a newer format.

    """
    if manifest is None:
        return Documents()
    if manifest.format > FORMAT:
        key = manifest.key
        raise newer_format(f"the manifest of {key}", manifest.format, key=str(key))
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


def epoch_payload(owner: str, base: Origin | None, **facts: object) -> bytes:
    """Return the payload of an epoch record; *base* is the history before a log that it begins."""
    begun = {"owner": owner, **facts}
    return msgspec.json.encode(begun if base is None else {**begun, "base": base})


# What every store refuses, and in which words


def lease_lost(
    key: SessionKey, epoch: int, newest: int | None = None, *, deleted: bool = False
) -> LeaseLostError:
    """Return the error for a write under an epoch that is not the *newest*, if that is known."""
    reason = "" if newest is None else f": the newest is {newest}"
    return LeaseLostError(
        f"epoch {epoch} of {key} may not write{reason}{', and it was deleted' if deleted else ''}; "
        "open the session again",
        key=str(key),
        epoch=epoch,
        newest=newest,
    )


def require_logged(manifest: Manifest, head: int) -> None:
    """Raise unless the log has the records that a manifest is as of.

    Raises:
        AcknowledgedRecordsLostError: The store went back to an earlier state.

    """
    if manifest.as_of_seq > head:
        raise AcknowledgedRecordsLostError(
            f"documents of session {manifest.key} as of record {manifest.as_of_seq} were not "
            f"stored: the store has only the first {head} records, so it went back to an earlier "
            "state (a failover, a restart without its data, an older backup)",
            key=str(manifest.key),
            durable=manifest.as_of_seq,
            kept=head,
        )


def lease_held(key: SessionKey, after: int, newest: int) -> LeaseHeldError:
    """Return the error for an acquire after epoch *after* that lost a race."""
    return LeaseHeldError(
        f"{key} is at epoch {newest}, not {after}: another process was faster; read its holder "
        "again, then request a handover or wait",
        key=str(key),
        epoch=newest,
        after=after,
    )


def published_already(key: SessionKey, epoch: int) -> LeaseHeldError:
    """Return the error for a draft in the place of a session."""
    return LeaseHeldError(
        f"{key} exists: a copy takes the place of no session; choose another id, or delete it "
        "first",
        key=str(key),
        epoch=epoch,
    )


def newer_format(
    what: str, number: int, supported: int = FORMAT, **facts: object
) -> UnsupportedVersionError:
    """Return the error for data of a newer format."""
    return UnsupportedVersionError(
        f"{what} has format {number}, this release reads up to {supported}: use a newer release "
        "of perdure",
        format=number,
        **facts,
    )


def too_large(
    key: SessionKey, size: int, limit: int = MAX_RECORD_BYTES, what: str = "a record of"
) -> TooLargeError:
    """Return the error for a payload of more than *limit* bytes."""
    return TooLargeError(
        f"{what} {key} has {size} bytes, the limit is {limit}: keep large values as blobs",
        key=str(key),
        size=size,
    )


def refusal_of(batch: Batch, limit: int = MAX_RECORD_BYTES) -> NotStorableError | None:
    """Return why no log can ever accept a batch; None if one can."""
    records = batch.records
    largest = max([len(entry.payload) for entry in records], default=0)
    if largest > limit:
        return too_large(batch.key, largest, limit)
    if batch.first < 1 or (records and not records[-1].end):
        return misplaced(batch)
    return None


def misplaced(batch: Batch, head: int | None = None) -> NotStorableError:
    """Return the error for a batch that does not continue the log, or ends within a group."""
    place = "" if head is None else f" with the log's head at {head}"
    return NotStorableError(
        f"a batch of {batch.key} begins at {batch.first}{place}, or ends within a group: send "
        "whole groups from the head on",
        key=str(batch.key),
        first=batch.first,
        head=head,
    )


def other_records(batch: Batch, head: int) -> NotStorableError:
    """Return the error for a batch that repeats records which differ from the log's."""
    return NotStorableError(
        f"the log of {batch.key} holds other records from {batch.first} on: read the head again "
        "and append after it",
        key=str(batch.key),
        first=batch.first,
        head=head,
    )


def new_entries(
    batch: Batch, head: int, begun: int, logged: Sequence[Entry]
) -> tuple[Entry, ...] | NotStorableError:
    """Return the entries that a log does not have yet, or why it will never accept the batch.

    Args:
        batch: Whole groups.
        head: The log's last record.
        begun: The epoch record of the batch's epoch. Only a repeated send is idempotent: the same
            bytes, in the same epoch.
        logged: What the log has from the batch's first record on; more of it does no harm.

    """
    known = head + 1 - batch.first
    if known < 0:
        return misplaced(batch, head)
    sent = batch.records[:known]
    if known and (batch.first <= begun or list(sent) != list(logged[: len(sent)])):
        return other_records(batch, head)
    return batch.records[known:]
