"""The manifest: which documents are folded, as of which record of the log."""

from __future__ import annotations

import msgspec

from perdure.model.base import Base
from perdure.model.keys import SessionKey

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


class Folded(msgspec.Struct, frozen=True):
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
    base: Base | None = None
    """Where the history before this log is, if the log is not all of it."""
    position: msgspec.Raw = msgspec.Raw(b"null")
    """Where the log goes on behind ``as_of_seq``; the store's own, opaque to everybody else."""
