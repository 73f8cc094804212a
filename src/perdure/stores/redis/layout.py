"""Where things stand on the server: one key for each thing, one slot for each session.

All keys of a session share a hash tag in braces, so that a cluster keeps them together and a
script touches one slot. Ids are escaped: none can leave its place, look like a pattern, or be
another's. Pure.
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
"""A byte that no UTF-8 text has: behind all of it."""


class SessionKeys(NamedTuple):
    """The keys of one session."""

    session: bytes
    """A hash: epoch, owner, head, manifest, and what a listing shows."""
    log: bytes
    """A stream: one entry for each batch."""
    documents: bytes
    items: bytes
    """The inbox: a hash of what waits."""
    order: bytes
    """The inbox: a sorted set of what waits, oldest first."""
    segments: bytes
    """A stream: one entry for each part of the log that another store keeps."""
    dead: bytes
    """A hash of the dead letters, by op id."""
    seed: int
    """What the checksum of each batch begins with, so that it proves whose it is."""


class KeyNames:
    """The keys under one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.places: Callable[[SessionKey], SessionKeys] = lru_cache(_CACHED)(self._places)
        self.tenants: bytes = f"{prefix}:tenants".encode()
        """A sorted set of all tenants that were ever here."""
        self.beats: bytes = f"{prefix}:beats".encode()
        """A hash of the owners' heartbeat counters."""
        self.posted: bytes = f"{prefix}:posted".encode()
        """A sorted set of all sessions in which a post or a dead letter may be, as JSON."""
        self.every_session: str = f"{prefix}:{{*}}:s"
        """A pattern that fits the hash of each session, and nothing else's."""
        self.every_inbox: str = f"{prefix}:{{*}}:q"
        """And one for the inboxes in which something waits."""
        self.every_dead: str = f"{prefix}:{{*}}:u"
        """And one for the dead letters."""

    def _places(self, key: SessionKey) -> SessionKeys:
        tag = ":".join(quote(part, safe="") for part in (key.tenant, key.agent, key.session))
        base = f"{self._prefix}:{{{tag}}}:"
        session, log, documents, items, order, segments, dead = [
            (base + name).encode() for name in "sldiqxu"
        ]
        seed = zlib.crc32(tag.encode())
        return SessionKeys(session, log, documents, items, order, segments, dead, seed)

    def every_history(self, tenant: str) -> str:
        """Return a pattern that fits what names the old history of a tenant's sessions."""
        return f"{self._prefix}:{{{quote(tenant, safe='')}:*}}:x"

    def directory(self, tenant: str) -> bytes:
        """Return the key of a tenant's directory: a sorted set of its sessions."""
        return f"{self._prefix}:{{@{quote(tenant, safe='')}}}:sessions".encode()

    def owner(self, owner: str) -> tuple[bytes, bytes, bytes]:
        """Return an owner's keys: what it is, what is asked of it; and its channel."""
        base = f"{self._prefix}:{{={quote(owner, safe='')}}}:"
        return (base + "owner").encode(), (base + "asks").encode(), (base + "news").encode()

    def shelf(self, tenant: str, digit: str) -> tuple[bytes, bytes]:
        """Return the keys of a shelf of blobs: since when each is there, and out of the way.

        A tenant's blobs lie on 17 shelves, by what their names begin with.
        """
        base = self._shelf(tenant, digit)
        return (base + "ages").encode(), (base + "away").encode()

    def blob(self, tenant: str, name: str) -> bytes:
        """Return a blob's key."""
        return (self._shelf(tenant, name[:1]) + "blob:" + quote(name, safe="")).encode()

    def _shelf(self, tenant: str, digit: str) -> str:
        return f"{self._prefix}:{{#{quote(tenant, safe='')}:{quote(digit, safe='')}}}:"


def member_of(key: SessionKey) -> bytes:
    r"""Return a session's name in its tenant's directory, which sorts as the keys do.

    >>> member_of(SessionKey("a", "s"))
    b'a\x00s'
    """
    return f"{key.agent}\0{key.session}".encode()


def key_of(member: bytes, tenant: str) -> SessionKey:
    """Return the session that a directory names."""
    agent, _, session = member.decode().partition("\0")
    # The default one as everybody writes it: msgspec leaves a default out by identity.
    return SessionKey(agent, intern(session), tenant)


def members_between(prefix: str, after: SessionKey | None) -> tuple[bytes, bytes]:
    """Return the bounds of a listing, as ZRANGEBYLEX takes them."""
    begin = prefix.encode(errors="surrogatepass")
    low = b"[" + begin
    if after is not None and member_of(after) >= begin:
        low = b"(" + member_of(after)
    return low, b"(" + begin + _END


def key_in(name: bytes) -> SessionKey:
    r"""Return the session that a key of the server belongs to.

    >>> key_in(b"perdure:{acme:a%2Fb:default}:q")
    SessionKey(agent='a/b', session='default', tenant='acme')
    """
    tag = name.decode().partition("{")[2].rpartition("}")[0]
    tenant, agent, session = map(unquote, tag.split(":"))
    return SessionKey(agent, intern(session), tenant)


def written_key(key: SessionKey) -> bytes:
    """Return a key as JSON: what an ask names, and what a session's hash says of itself."""
    return msgspec.json.encode(key)
