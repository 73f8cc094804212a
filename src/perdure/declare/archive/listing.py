"""The list of a session's archives, as its log folds to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.codec.json import decode, encode
from perdure.declare.archive.entries import DOCUMENT, Archive
from perdure.memory.documents import StateSet
from perdure.model.records import STATE, Entry

__all__ = ["differ", "entry_of", "listed", "named"]


def listed(document: bytes | None) -> list[Archive]:
    """Return the archives of a document, newest first."""
    have = {} if document is None else decode(document, dict[str, Archive])
    return [*have.values()][::-1]


def named(have: Sequence[Archive], name: str | None) -> Archive | None:
    """Return the archive with an id, or the newest with a label; for None the newest."""
    by_id = [one for one in have if name in {None, one.id}]
    by_label = [one for one in have if one.label == name]
    return next(iter((*by_id, *by_label)), None)


def differ(archive: Archive, before: Archive) -> bool:
    """Say whether an archive is another one than the newest; a label of its own makes it one."""
    relabeled = archive.label not in {"", before.label}
    same = (archive.pages, archive.paths, archive.whole)
    return relabeled or same != (before.pages, before.paths, before.whole)


def entry_of(archive: Archive, gone: list[str]) -> Entry:
    """Return the record that lists an archive, and others no more."""
    value = msgspec.Raw(encode({archive.id: archive}))
    return Entry(STATE, encode(StateSet(DOCUMENT, value, partial=True, gone=gone)))
