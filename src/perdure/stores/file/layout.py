"""Where things lie below a file store's root: names and nothing else.

Any text becomes one safe step of a path: `[a-z0-9_-]` stand for themselves, every other
byte and all upper case become ``=xx``, so that no two names are one, not on a disk that
ignores case or composes letters either, and no name leads elsewhere. Names that would be
longer than 150 bytes end in their SHA-256 instead; the real ids stand inside the files.

Pure.
"""

from __future__ import annotations

import base64
import hashlib
import re

from perdure.errors import NotStorableError
from perdure.records.keys import DEFAULT_SESSION, SessionKey

AGENTS = "agents"
BLOBS = "blobs"
LOG = "log"
OWNERS = "owners"
QUARANTINE = "quarantine"
SESSIONS = "sessions"
TENANTS = "tenants"

MAX_NAME_BYTES = 150
_KEPT = 60

_OURS = frozenset({LOG, QUARANTINE, SESSIONS, "files"})
"""What no document's first step may be."""
_SUFFIXES = (".jsonl", ".json")
_DOCUMENT_CLASH = re.compile(r"(dead-letters|inbox|lease|manifest)-")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])\Z")
_PLAIN = re.compile(r"[a-z0-9_\-]{1,150}\Z")
_UNSAFE = re.compile(rb"[^a-z0-9_\-]")
_ESCAPED = re.compile(rb"=([0-9a-f]{2})")


def encode_name(text: str) -> str:
    """Return the step of a path that stands for *text* and for no other text.

    >>> encode_name("My agent")
    '=4dy=20agent'
    >>> encode_name("con")
    '=63on'
    """
    name = _UNSAFE.sub(lambda found: b"=%02x" % found[0][0], text.encode()).decode()
    if _RESERVED.match(name):
        return _escape_first(name)
    if len(name) <= MAX_NAME_BYTES:
        return name
    digest = base64.b32encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"{name[:_KEPT]}~{digest.rstrip('=').lower()}"


def decode_name(name: str) -> str | None:
    """Return the text that *name* stands for, None where only the files inside know it.

    >>> decode_name("=4dy=20agent")
    'My agent'
    """
    if _PLAIN.match(name):  # most are: a listing decodes every name there is
        return None if _RESERVED.match(name) else name
    try:
        text = _ESCAPED.sub(lambda found: bytes((int(found[1], 16),)), name.encode()).decode()
    except UnicodeError:  # somebody else's: it is no text
        return None
    return text if "~" not in name and encode_name(text) == name else None


def _escape_first(name: str) -> str:
    return f"={ord(name[0]):02x}{name[1:]}"


def tenant_path(tenant: str) -> tuple[str, ...]:
    """Return the steps from the root to a tenant's part of it."""
    return (TENANTS, encode_name(tenant)) if tenant else ()


def agents_of(tenant: str) -> tuple[str, ...]:
    """Return the steps to a tenant's agents."""
    return (*tenant_path(tenant), AGENTS)


def blobs_of(tenant: str) -> tuple[str, ...]:
    """Return the steps to a tenant's blobs."""
    return (*tenant_path(tenant), BLOBS)


def session_path(key: SessionKey) -> tuple[str, ...]:
    """Return the steps to a session; an agent's default one lies at the agent itself."""
    agent = (*agents_of(key.tenant), encode_name(key.agent))
    if key.session == DEFAULT_SESSION:
        return agent
    return (*agent, SESSIONS, encode_name(key.session))


def document_path(name: str) -> tuple[str, ...]:
    """Return the steps from a session to a document.

    >>> document_path("plugins/In context.json")
    ('plugins', '=49n=20context.json')

    Raises:
        NotStorableError: The name has an empty step.

    """
    *folders, last = name.split("/")
    if not last or not all(folders):
        message = f"{name!r} names no document: use steps that are not empty, divided by one /"
        raise NotStorableError(message, name=name)
    suffix = next((end for end in _SUFFIXES if last.endswith(end) and last != end), "")
    # A name without a suffix gets an ending that no folder has, so that the two never meet.
    steps = [*map(encode_name, folders), encode_name(last.removesuffix(suffix)) + (suffix or "=")]
    if steps[0] in _OURS or _DOCUMENT_CLASH.match(steps[0]):
        steps[0] = _escape_first(steps[0])
    return tuple(steps)


# the files of a session

_INBOX = re.compile(r"inbox-([1-9][0-9]{0,17})\Z")
_DEAD_LETTERS = re.compile(r"dead-letters-([1-9][0-9]{0,17})\Z")
_LEASE = re.compile(r"lease-([1-9][0-9]{0,17})\.json\Z")
_MANIFEST = re.compile(r"manifest-([1-9][0-9]{0,17})\.(json|next)\Z")
_START = re.compile(r"([1-9][0-9]{0,17})-(0|[1-9][0-9]{0,8})\.start\Z")
_SEGMENT = re.compile(r"([1-9][0-9]{0,17})-(0|[1-9][0-9]{0,8})\.jsonl\Z")


def lease_name(epoch: int) -> str:
    """Return the file that says who has an epoch."""
    return f"lease-{epoch}.json"


def released_name(epoch: int) -> str:
    """Return the file that says that an epoch's holder writes no more."""
    return f"lease-{epoch}.released"


def lease_epoch(name: str) -> int:
    """Return the epoch of a lease's file, 0 for any other file."""
    found = _LEASE.match(name)
    return int(found[1]) if found else 0


def inbox_name(life: int) -> str:
    """Return the folder of what is posted for the session's life that an epoch began."""
    return f"inbox-{life}"


def inbox_life(name: str) -> int:
    """Return the life that an inbox is of, 0 for any other folder."""
    found = _INBOX.match(name)
    return int(found[1]) if found else 0


def dead_letters_name(life: int) -> str:
    """Return the folder of the dead letters of the session's life that an epoch began."""
    return f"dead-letters-{life}"


def dead_letters_life(name: str) -> int:
    """Return the life that dead letters are of, 0 for any other folder."""
    found = _DEAD_LETTERS.match(name)
    return int(found[1]) if found else 0


def manifest_name(epoch: int) -> str:
    """Return the file that says what is folded."""
    return f"manifest-{epoch}.json"


def next_manifest_name(epoch: int) -> str:
    """Return the file that says what a fold is about to write."""
    return f"manifest-{epoch}.next"


def manifest_epoch(name: str) -> tuple[int, bool] | None:
    """Return a manifest file's epoch, and whether it is what a fold is about to write."""
    found = _MANIFEST.match(name)
    return (int(found[1]), found[2] == "next") if found else None


def segment_name(epoch: int, number: int) -> str:
    """Return a segment of the log."""
    return f"{epoch}-{number}.jsonl"


def start_name(epoch: int, number: int) -> str:
    """Return the file that says that a log begins with a segment: older ones were removed."""
    return f"{epoch}-{number}.start"


def start_of(name: str) -> tuple[int, int] | None:
    """Return the segment that a log is said to begin with, None for any other file."""
    found = _START.match(name)
    return (int(found[1]), int(found[2])) if found else None


def segment_of(name: str) -> tuple[int, int] | None:
    """Return a segment's epoch and number, None for any other file."""
    found = _SEGMENT.match(name)
    return (int(found[1]), int(found[2])) if found else None
