"""Names of the store's keys on the server, and encodings of what is under them. Pure.

All keys of a session share a hash tag in braces, so that a cluster keeps them in one slot and a
script accesses only that slot. Ids are escaped: none can break out of its part of a name, act as a
pattern, or collide with another id.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from sys import intern
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from perdure._lib.logs import log_facts
from perdure.errors import CorruptRecordError
from perdure.records import records as frames
from perdure.records.json import decoder_of
from perdure.records.keys import SessionKey, salvage_cure
from perdure.records.manifest import (
    About,
    Documents,
    Draft,
    Manifest,
    SessionInfo,
    decode_manifest,
    lease_lost,
    matching_documents,
)
from perdure.records.posts import UNREADABLE, PendingItem
from perdure.records.records import Position, Record, open_sealed

_log: logging.Logger = logging.getLogger("perdure")

_CACHED = 16_384
_END = b"\xff"
"""A byte that no UTF-8 text contains, so it sorts after all of them."""


class SessionKeys(NamedTuple):
    """The keys of one session."""

    session: bytes
    """A hash: epoch, owner, head, manifest, and the fields that listings show."""
    log: bytes
    """A stream: one entry for each batch."""
    documents: bytes
    items: bytes
    """The inbox: a hash of the pending items."""
    order: bytes
    """The inbox: a sorted set of the pending items' ids, oldest first."""
    segments: bytes
    """A stream: one entry for each segment of the log that was moved to another store."""
    dead: bytes
    """A hash of the dead letters, by op id."""
    seed: int
    """Start value of each batch's checksum, which ties the batch to its session."""


class KeyNames:
    """The names of all keys under one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.session_keys: Callable[[SessionKey], SessionKeys] = lru_cache(_CACHED)(
            self._session_keys
        )
        self.tenants: bytes = f"{prefix}:tenants".encode()
        """A sorted set of all tenants that ever had data."""
        self.beats: bytes = f"{prefix}:beats".encode()
        """A hash of the owners' heartbeat counters."""
        self.posted: bytes = f"{prefix}:posted".encode()
        """A sorted set of all sessions that may have pending items or dead letters, as JSON."""
        self.every_session: str = f"{prefix}:{{*}}:s"
        """A pattern that matches the hash of each session, and no other key."""
        self.every_inbox: str = f"{prefix}:{{*}}:q"
        """A pattern for the inboxes that have pending items."""
        self.every_dead: str = f"{prefix}:{{*}}:u"
        """A pattern for the dead letters."""

    def _session_keys(self, key: SessionKey) -> SessionKeys:
        tag = ":".join(quote(part, safe="") for part in (key.tenant, key.agent, key.session))
        base = f"{self._prefix}:{{{tag}}}:"
        session, log, documents, items, order, segments, dead = [
            (base + name).encode() for name in "sldiqxu"
        ]
        seed = zlib.crc32(tag.encode())
        return SessionKeys(session, log, documents, items, order, segments, dead, seed)

    def every_history(self, tenant: str) -> str:
        """Return a pattern for the segment streams of a tenant's sessions."""
        return f"{self._prefix}:{{{quote(tenant, safe='')}:*}}:x"

    def directory(self, tenant: str) -> bytes:
        """Return the key of a tenant's directory: a sorted set of its sessions."""
        return f"{self._prefix}:{{@{quote(tenant, safe='')}}}:sessions".encode()

    def recent(self, tenant: str) -> bytes:
        """Return the key of a tenant's sessions by their last activity, in steps of `STEP`."""
        return f"{self._prefix}:{{@{quote(tenant, safe='')}}}:recent".encode()

    def owned(self, tenant: str) -> bytes:
        """Return the key of a tenant's sessions by their owner's label."""
        return f"{self._prefix}:{{@{quote(tenant, safe='')}}}:owned".encode()

    def owner(self, owner: str) -> tuple[bytes, bytes, bytes]:
        """Return an owner's keys: its hash and its requests; and its channel."""
        base = f"{self._prefix}:{{={quote(owner, safe='')}}}:"
        return (base + "owner").encode(), (base + "asks").encode(), (base + "news").encode()

    def shelf(self, tenant: str, digit: str) -> tuple[bytes, bytes]:
        """Return the keys of a shelf of blobs: their ages, and those in quarantine.

        A tenant's blobs are divided among 17 shelves, by the first character of their names.
        """
        base = self._shelf(tenant, digit)
        return (base + "ages").encode(), (base + "away").encode()

    def blob(self, tenant: str, name: str) -> bytes:
        """Return a blob's key."""
        return (self._shelf(tenant, name[:1]) + "blob:" + quote(name, safe="")).encode()

    def _shelf(self, tenant: str, digit: str) -> str:
        return f"{self._prefix}:{{#{quote(tenant, safe='')}:{quote(digit, safe='')}}}:"


def member_of(key: SessionKey) -> bytes:
    r"""Return a session's member in its tenant's directory, which sorts like the keys.

    >>> member_of(SessionKey("a", "s"))
    b'a\x00s'
    """
    return f"{key.agent}\0{key.session}".encode()


def key_of_member(member: bytes, tenant: str) -> SessionKey:
    """Return the session of a directory's member."""
    agent, _, session = member.decode().partition("\0")
    # Interned, since msgspec omits a default value only if it is the same object.
    return SessionKey(agent, intern(session), tenant)


STEP = 64
"""Seconds: a session's place among the recent ones is written at most so often."""


def owned_member(owner: str, member: bytes) -> bytes:
    r"""Return a session's member in the index by owners.

    >>> owned_member("ada", b"a\x00s")
    b'ada\x00a\x00s'
    """
    return quote(owner, safe="").encode() + b"\0" + member


def members_between(prefix: str, after: SessionKey | None) -> tuple[bytes, bytes]:
    """Return the bounds of a listing, as ZRANGEBYLEX takes them."""
    begin = prefix.encode(errors="surrogatepass")
    low = b"[" + begin
    if after is not None and member_of(after) >= begin:
        low = b"(" + member_of(after)
    return low, b"(" + begin + _END


def key_of_name(name: bytes) -> SessionKey:
    r"""Return the session that a key on the server belongs to.

    >>> key_of_name(b"perdure:{acme:a%2Fb:default}:q")
    SessionKey(agent='a/b', session='default', tenant='acme')
    """
    tag = name.decode().partition("{")[2].rpartition("}")[0]
    tenant, agent, session = map(unquote, tag.split(":"))
    return SessionKey(agent, intern(session), tenant)


def encode_key(key: SessionKey) -> bytes:
    """Return a session's key as JSON, as requests and the session's hash contain it."""
    return msgspec.json.encode(key)


def require_held(key: SessionKey, epoch: int, reply: Any) -> None:
    """Raise LeaseLostError if a script has found another epoch than the caller's."""
    if isinstance(reply, list) and reply[0] == b"lost":
        raise lease_lost(key, epoch, reply[1], deleted=bool(reply[2]))


# Documents


def documents_of(
    key: SessionKey,
    names: Collection[str] | None,
    encoded: bytes | None,
    parts: Sequence[bytes],
) -> Documents:
    """Return documents from a manifest, and a name and bytes of each."""
    documents = dict(zip(map(bytes.decode, parts[::2]), parts[1::2], strict=True))
    manifest = None if encoded is None else _manifest_of(key, encoded)
    if manifest is None:  # lost or damaged, so no document can be verified
        return Documents(damaged=tuple(sorted(documents)), remains=documents)
    return matching_documents(manifest, documents, names)


def _manifest_of(key: SessionKey, encoded: bytes) -> Manifest | None:
    """Return a manifest; None for a damaged one, which counts as lost."""
    manifest = decode_manifest(open_sealed(encoded), f"the manifest of {key}", key=str(key))
    if manifest is None:
        message = "the manifest of session %(session)s is damaged"
        log_facts(_log, logging.WARNING, message, session=str(key))
        return None
    if manifest.key != key:
        raise damage_error(key, "the manifest", f"it is the one of {manifest.key}")
    return manifest


# What listings show of a session


class ListedFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a session that listings show, stored apart so that listings read no manifests."""

    owner: str | None = None
    title: str | None = None
    tags: tuple[str, ...] = ()
    turns: int = 0


def shown_of(about: About, turns: int = 0) -> bytes:
    """Return what listings show, as a session's hash has it."""
    shown = ListedFields(owner=about.owner, title=about.title, tags=about.tags, turns=turns)
    return msgspec.json.encode(shown)


def listed_fields(shown: object) -> ListedFields:
    """Return what listings show; nothing where that is missing or damaged: a fold rewrites it."""
    try:
        return decoder_of(ListedFields).decode(shown) if type(shown) is bytes else ListedFields()
    except msgspec.DecodeError:
        return ListedFields()


LISTED: Final = (b"e", b"d", b"h", b"c", b"u", b"a", b"m", b"t")
"""The fields of a session's hash that `listed_session` reads."""


def listed_session(key: SessionKey, fields: Sequence[Any]) -> SessionInfo | None:
    """Return a session as listings show it; None if there is none."""
    epoch, deleted, head, created, updated, shown, manifest, turns = fields
    if epoch is None or deleted is not None:
        return None
    listed = listed_fields(shown)
    return SessionInfo(
        key=key,
        epoch=_int_or_zero(epoch),
        head=_int_or_zero(head),
        created_at=float_or_none(created),
        updated_at=float_or_none(updated),
        owner=listed.owner,
        title=listed.title,
        tags=listed.tags,
        turns=listed.turns if turns is None else _int_or_zero(turns),
        damaged=manifest is not None and open_sealed(manifest) is None,
    )


def _int_or_zero(text: bytes | None) -> int:
    """Return a number; 0 for a damaged one, which is reported when the session is opened."""
    return int(text) if text is not None and text.isdigit() else 0


def float_or_none(text: bytes | None) -> float | None:
    """Return a number, None for a damaged one."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


# Items of an inbox, each with a checksum


_CRC = 4
_items: msgspec.msgpack.Decoder[PendingItem] = msgspec.msgpack.Decoder(PendingItem)


def encode_item(item: PendingItem, seed: int) -> bytes:
    """Return an item's bytes, tied to its session by the seed of their checksum."""
    data = msgspec.msgpack.encode(item)
    return zlib.crc32(data, seed).to_bytes(_CRC, "big") + data


def decode_item(seed: int, op_id: bytes, data: bytes) -> PendingItem:
    """Return the item of an id; of a damaged one, an item that reports the damage."""
    body = data[_CRC:]
    damage = "it does not match its checksum"
    if zlib.crc32(body, seed).to_bytes(_CRC, "big") == data[:_CRC]:
        try:
            item = _items.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            damage = "it cannot be read"
        else:
            if item.op_id.encode() == op_id:
                return item
            damage = "it is stored under another id"
    return PendingItem(
        op_id_of(op_id), "", data, 0.0, f"an item on the server is damaged: {damage}"
    )


def op_id_of(field: bytes) -> str:
    """Return the op id of a field; of one that is damaged, a name for it."""
    try:
        return field.decode()
    except UnicodeDecodeError:
        return f"{UNREADABLE}{field.hex()}"


def field_of(op_id: str) -> bytes:
    """Return the field of an op id, or of the name of a damaged one."""
    if op_id.startswith(UNREADABLE):
        try:
            return bytes.fromhex(op_id.removeprefix(UNREADABLE))
        except ValueError:
            pass  # an op id that a caller chose
    return op_id.encode()


# Entries of the log's stream: one batch of records each, under an id that contains its seqs


class LogState(NamedTuple):
    """State of a session's log: its hash, checked against the stream."""

    epoch: int
    head: int
    deleted: bool = False
    base: int = 0
    """The last seq that was trimmed."""
    moved: int = 0
    """The last seq that was moved to another store."""
    draft: bool = False
    """True for a draft that is not published."""

    @property
    def is_hidden(self) -> bool:
        """True if readers see no session."""
        return self.deleted or self.draft


def draft_of(data: bytes | None) -> Draft | None:
    """Return what a session is a copy of; None if it is none, or that cannot be read."""
    try:
        return None if data is None else decoder_of(Draft).decode(data)
    except msgspec.DecodeError:
        return None


DRAFT = b"draft"
"""Value of a draft's field ``d``, which is 1 for a deleted session."""


def damage_error(key: SessionKey, part: str, reason: str) -> CorruptRecordError:
    """Return the error for a damaged part of a session."""
    return CorruptRecordError(
        f"{part} of session {key} is damaged on the server ({reason}): it was left unchanged; "
        f"restore the session from a backup, or {salvage_cure(key)}",
        key=str(key),
        where=part,
    )


def span_of(id: bytes) -> tuple[int, int]:
    """Return the first and the last seq of an entry.

    >>> span_of(b"12-10")
    (10, 12)
    """
    last, _, first = id.partition(b"-")
    return int(first), int(last)


def records_of(key: SessionKey, seed: int, entry: Any) -> list[Record]:
    """Return the records of an entry, as the server returned it.

    Raises:
        CorruptRecordError: It is not exactly what was appended under its id.

    """
    name, fields = entry
    first, last = span_of(name)
    part = f"entry {name.decode('ascii', 'replace')} of the log"
    if len(fields) != 2 or not fields[0].isdigit():
        raise damage_error(key, part, "it has foreign fields")
    epoch, data = int(fields[0]), fields[1]
    lines = frames.lines(data, epoch=epoch, start=Position(seq=first - 1, crc=seed))
    if not lines.sound or lines.end.offset != len(data):
        reason = f"the line at byte {lines.end.offset} of {len(data)} does not match its checksum"
        raise damage_error(key, part, reason)
    if lines.end.seq != last or not lines.records or not lines.records[-1].end:
        raise damage_error(key, part, f"it ends at record {lines.end.seq}")
    return lines.records


def records_after(
    key: SessionKey, seed: int, after: int, head: int, entries: Sequence[Any]
) -> tuple[Record, ...] | None:
    """Return the rest of a log; None if the entries do not have all of it, or are damaged."""
    try:
        found = [record for entry in entries for record in records_of(key, seed, entry)]
    except CorruptRecordError:  # raised when the log is read
        return None
    records = [record for record in found if record.seq > after]
    is_whole = [record.seq for record in records] == list(range(after + 1, head + 1))
    return tuple(records) if is_whole else None


def log_state(key: SessionKey, reply: Sequence[Any]) -> LogState:
    """Return the state of a session's log, from the reply of ``look.lua``.

    Raises:
        CorruptRecordError: The session's hash and its log contradict each other.

    """
    epoch, head, deleted, base, moved, first, last, of = reply
    if epoch is None:
        if last is not None:
            raise damage_error(key, "the hash", "it is missing, but the log exists")
        return LogState(0, 0)
    try:
        newest, length = int(epoch), int(head or 0)
        trimmed, cold = int(base or 0), 0 if deleted == DRAFT else int(moved or 0)
    except ValueError:
        raise damage_error(key, "the hash", "a field is not a number") from None
    if last is None:
        if length:
            raise damage_error(key, "the log", f"it is missing, but should have {length} records")
        return LogState(newest, 0, deleted is not None)
    if span_of(last)[1] != length or int(of) != newest:
        reason = f"it ends with entry {last.decode()} of epoch {of.decode()}"
        raise damage_error(
            key, "the log", f"{reason}, and the session is at record {length} of epoch {newest}"
        )
    if span_of(first)[0] != max(trimmed, cold) + 1:
        reason = f"it begins with entry {first.decode()}, not at record {max(trimmed, cold) + 1}"
        raise damage_error(key, "the log", reason)
    is_draft = deleted == DRAFT
    return LogState(newest, length, deleted is not None and not is_draft, trimmed, cold, is_draft)
