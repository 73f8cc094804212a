"""Names of the files and folders below a file store's root, and their small codec; no I/O.

Any text becomes one safe path component: `[a-z0-9_-]` stay as they are, every other byte and
all upper case become ``=xx``. So no two ids share a name, even on a file system that ignores
case or normalizes Unicode, and no id escapes its folder. Names that would be longer than 150
bytes end in their SHA-256 instead; the files inside hold the real ids.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from typing import TypeVar, final

import msgspec

from perdure.errors import ConfigError, FormatError, NotStorableError
from perdure.records import json
from perdure.records.keys import DEFAULT_SESSION, SessionKey
from perdure.records.records import open_sealed, seal

AGENTS = "agents"
BLOBS = "blobs"
LOG = "log"
OWNERS = "owners"
QUARANTINE = "quarantine"
ASIDE = ".damaged"
"""The end of the name of a segment in quarantine."""
SESSIONS = "sessions"
TENANTS = "tenants"

MAX_NAME_BYTES = 150
_PREFIX_CHARACTERS = 60

_RESERVED_FIRST_STEPS = frozenset({LOG, QUARANTINE, SESSIONS, "files"})
"""Names that a document's first path component may not have."""
_SUFFIXES = (".jsonl", ".json")
_DOCUMENT_CLASH = re.compile(r"(dead-letters|inbox|labels|lease|manifest)-")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])\Z")
_PLAIN = re.compile(r"[a-z0-9_\-]{1,150}\Z")
_UNSAFE = re.compile(rb"[^a-z0-9_\-]")
_ESCAPED = re.compile(rb"=([0-9a-f]{2})")


def encode_name(text: str) -> str:
    """Return the path component for *text*; no other text has the same one.

    >>> encode_name("My agent")
    '=4dy=20agent'
    >>> encode_name("con")
    '=63on'
    """
    name = _UNSAFE.sub(lambda match: b"=%02x" % match[0][0], text.encode()).decode()
    if _RESERVED.match(name):
        return _escape_first(name)
    if len(name) <= MAX_NAME_BYTES:
        return name
    digest = base64.b32encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"{name[:_PREFIX_CHARACTERS]}~{digest.rstrip('=').lower()}"


def decode_name(name: str) -> str | None:
    """Return the text that *name* encodes, None if only the files inside hold it.

    >>> decode_name("=4dy=20agent")
    'My agent'
    """
    if _PLAIN.match(name):  # most names are: a listing decodes all of them
        return None if _RESERVED.match(name) else name
    try:
        text = _ESCAPED.sub(lambda match: bytes((int(match[1], 16),)), name.encode()).decode()
    except UnicodeError:  # not a name that perdure wrote
        return None
    return text if "~" not in name and encode_name(text) == name else None


def _escape_first(name: str) -> str:
    return f"={ord(name[0]):02x}{name[1:]}"


def tenant_path(tenant: str) -> tuple[str, ...]:
    """Return the path components from the root to a tenant's folder."""
    return (TENANTS, encode_name(tenant)) if tenant else ()


def agents_of(tenant: str) -> tuple[str, ...]:
    """Return the path components to a tenant's agents."""
    return (*tenant_path(tenant), AGENTS)


def blobs_of(tenant: str) -> tuple[str, ...]:
    """Return the path components to a tenant's blobs."""
    return (*tenant_path(tenant), BLOBS)


def session_path(key: SessionKey) -> tuple[str, ...]:
    """Return the path components to a session; the default session is the agent's own folder."""
    agent = (*agents_of(key.tenant), encode_name(key.agent))
    if key.session == DEFAULT_SESSION:
        return agent
    return (*agent, SESSIONS, encode_name(key.session))


def document_path(name: str) -> tuple[str, ...]:
    """Return the path components from a session to a document.

    >>> document_path("plugins/In context.json")
    ('plugins', '=49n=20context.json')

    Raises:
        NotStorableError: The name has an empty component.

    """
    *folders, last = name.split("/")
    if not last or not all(folders):
        raise NotStorableError(
            f"{name!r} names no document: use steps that are not empty, divided by one /", name=name
        )
    suffix = next((end for end in _SUFFIXES if last.endswith(end) and last != end), "")
    # A name without a suffix gets an ending that no folder has, so the two never collide.
    steps = [*map(encode_name, folders), encode_name(last.removesuffix(suffix)) + (suffix or "=")]
    if steps[0] in _RESERVED_FIRST_STEPS or _DOCUMENT_CLASH.match(steps[0]):
        steps[0] = _escape_first(steps[0])
    return tuple(steps)


# The files of a session


@final
class Numbered:
    """Names of a session's files of one kind, each with an epoch in it."""

    def __init__(self, prefix: str, suffix: str = "") -> None:
        self._prefix = prefix
        self._suffix = suffix
        self._pattern = re.compile(rf"{prefix}([1-9][0-9]{{0,17}}){re.escape(suffix)}\Z")

    def name(self, epoch: int) -> str:
        """Return the name of an epoch's file."""
        return f"{self._prefix}{epoch}{self._suffix}"

    def epoch(self, name: str) -> int:
        """Return the epoch in a file's name, 0 for any other file."""
        match = self._pattern.match(name)
        return int(match[1]) if match else 0


LEASE = Numbered("lease-", ".json")
"""Files that record an epoch's holder."""
RELEASED = Numbered("lease-", ".released")
"""Marks of epochs that their holders released."""
DRAFT = Numbered("lease-", ".draft")
"""Marks of epochs of drafts, in addition to their leases."""
DROPPED = Numbered("lease-", ".dropped")
"""Marks of drafts that are about to be removed."""
PUBLISHED = Numbered("lease-", ".published")
"""Marks of drafts that were published."""
MARKS = (RELEASED, DRAFT, DROPPED, PUBLISHED)
LABELS = Numbered("labels-", ".json")
"""The labels that an epoch's holder saved last."""
MANIFEST = Numbered("manifest-", ".json")
"""Manifests that folds have completed."""
NEXT_MANIFEST = Numbered("manifest-", ".next")
"""Manifests that folds announce before they write."""
MANIFESTS = (MANIFEST, NEXT_MANIFEST)
INBOX = Numbered("inbox-")
"""The folder of posts of the generation that began with this epoch."""
DEAD_LETTERS = Numbered("dead-letters-")
"""The folder of dead letters of the generation that began with this epoch."""


def epoch_in(name: str, kinds: Iterable[Numbered]) -> int:
    """Return the epoch in the name of a file of one of these kinds, 0 for any other file."""
    return max(kind.epoch(name) for kind in kinds)


_PLACE = r"([1-9][0-9]{0,17})-(0|[1-9][0-9]{0,8})"
_START = re.compile(rf"{_PLACE}\.start\Z")
_SEGMENT = re.compile(rf"{_PLACE}\.jsonl\Z")
_TAIL = re.compile(rf"{_PLACE}\.(0|[1-9][0-9]{{0,17}})\.tail\Z")
_ASIDE = re.compile(rf"{_PLACE}\.damaged\Z")


def segment_name(epoch: int, number: int) -> str:
    """Return the name of a log segment."""
    return f"{epoch}-{number}.jsonl"


def start_name(epoch: int, number: int) -> str:
    """Return the name of the mark that a log begins with this segment: older ones were removed."""
    return f"{epoch}-{number}.start"


def start_of(name: str) -> tuple[int, int] | None:
    """Return the segment that a start mark names, None for any other file."""
    match = _START.match(name)
    return (int(match[1]), int(match[2])) if match else None


def segment_of(name: str) -> tuple[int, int] | None:
    """Return a segment's epoch and number, None for any other file."""
    match = _SEGMENT.match(name)
    return (int(match[1]), int(match[2])) if match else None


def tail_name(segment: str, offset: int) -> str:
    """Return the name, in quarantine, of the bytes that were cut from the end of a segment."""
    return f"{segment.removesuffix('.jsonl')}.{offset}.tail"


def aside_name(segment: str) -> str:
    """Return the name, in quarantine, of a segment of a damaged log that was set aside."""
    return f"{segment.removesuffix('.jsonl')}{ASIDE}"


def is_tail(name: str) -> bool:
    """Return whether a file in quarantine was cut from a log, or is one, and not accepted yet."""
    return _TAIL.match(name) is not None or _ASIDE.match(name) is not None


# Codec of the store's small files: JSON with a checksum, decoded as a whole value or None


T = TypeVar("T")


def sealed(value: msgspec.Struct) -> bytes:
    """Return the bytes to write for a value."""
    return seal(msgspec.json.encode(value))


def unsealed(data: bytes | None, type_: type[T]) -> T | None:
    """Return the value of a file's bytes, None if they are incomplete or damaged."""
    body = None if data is None else open_sealed(data)
    return None if body is None else decoded(body, type_)


def decoded(body: bytes | msgspec.Raw, type_: type[T]) -> T | None:
    """Return a value decoded from JSON, None if it is not JSON or has another shape."""
    try:
        return json.decode(bytes(body), type_)
    except (FormatError, ConfigError):  # ConfigError: an id that is not valid
        return None
