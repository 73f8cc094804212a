"""Names of the store's keys on the server.

All keys of a session share a hash tag in braces, so that a cluster keeps them in one slot and a
script accesses only that slot. Ids are escaped: none can break out of its part of a name, act as a
pattern, or collide with another id. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from sys import intern
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec

from perdure.records.keys import SessionKey

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
