"""What a manager reports of its sessions, beside the autosave engine's own events."""

from __future__ import annotations

import msgspec

from perdure.restore.report import RestoreReport

__all__ = [
    "MemoryEvicted",
    "SessionClosed",
    "SessionFoldFailed",
    "SessionFolded",
    "SessionOpened",
    "SessionPosted",
]


class SessionOpened(msgspec.Struct, frozen=True):
    """A session was loaded."""

    session: str
    epoch: int
    report: RestoreReport


class SessionClosed(msgspec.Struct, frozen=True):
    """A session left memory: closed, hibernated, handed over or deleted."""

    session: str
    why: str
    version: int


class SessionFolded(msgspec.Struct, frozen=True):
    """Documents were folded as of a record."""

    session: str
    as_of_seq: int


class SessionFoldFailed(msgspec.Struct, frozen=True):
    """A fold failed; nothing is lost by it, the next one will do its work."""

    session: str
    error: Exception


class MemoryEvicted(msgspec.Struct, frozen=True):
    """Entries of a working memory went, to make room for a new value."""

    session: str
    keys: tuple[str, ...]
    """Least in priority first."""
    bytes: int
    """Of their values."""


class SessionPosted(msgspec.Struct, frozen=True):
    """What others posted has entered a session that is open here; autosave makes it durable."""

    session: str
    keys: tuple[str, ...]
    """The keys of the posts."""
    version: int
    """The seq of the newest record of it."""
