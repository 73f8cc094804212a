"""The manifest of folded documents, and the origin of a log that has a history before it."""

from __future__ import annotations

import msgspec

from perdure.records.keys import SessionKey


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
