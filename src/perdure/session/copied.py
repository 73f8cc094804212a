"""Records and documents of a session as a copy of it has them. Pure.

A copy's log has the source's records under their numbers, so that all that refers to a record does
so there, too. What belongs to the source's own store or log becomes a gap, which says nothing and
counts for no digest. The copy's own epoch record comes first. Its number is that of the source's
first epoch record, or of the last record that was removed from the source; of a fork that leaves
the history out, the next one after it. A fork ends what is in progress: see `Progress`. Posts
and dead letters are not copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from perdure.checkpoints.chain import CheckpointChain
from perdure.errors import FormatError
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import SESSION, TurnPayload, WholeSessionDocument
from perdure.memory.ledger import LEDGER_KINDS, OVER, Ledger, change_entry
from perdure.records.checkpoints import CHECKPOINTS
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument, Manifest, Origin
from perdure.records.records import (
    BASE,
    ENDING,
    EPOCH,
    FORK,
    GAP,
    TURN,
    Entry,
    GapPayload,
    Record,
)

OWN_KINDS = frozenset({BASE, ENDING, EPOCH, FORK})
"""Kinds of records that mean something in one log only."""


def as_copied(record: Record) -> Entry:
    """Return what has a record's number in a copy."""
    if record.kind not in OWN_KINDS:
        return Entry(record.kind, record.payload, record.end)
    is_fork = record.kind == BASE and decode(record.payload, Origin).begins_fork
    return Entry(GAP, encode(GapPayload(record.kind, is_fork)), record.end)


class Progress:
    """Work in progress at a record: by the ledger, and by the newest record of a turn."""

    __slots__ = ("_ledger", "_turn")

    def __init__(self, ledger: bytes | None = None, turn: bytes | None = None) -> None:
        self._ledger = Ledger(ledger)
        self._turn = turn

    def feed(self, entry: Entry) -> None:
        """Take in the next record."""
        if entry.kind == TURN:
            self._turn = entry.payload
        elif entry.kind in LEDGER_KINDS:
            self._ledger.feed(entry.kind, entry.payload)

    def endings(self, at: float) -> tuple[Entry, ...]:
        """Return the group of records that ends all of it."""
        entries = [
            change_entry(kind, name, state=OVER) for kind, name in self._ledger.open_entries()
        ]
        turn = None if self._turn is None else decode(self._turn, TurnPayload)
        if turn is not None and turn.phase == "begin":
            ended = msgspec.structs.replace(turn, phase="interrupted", at=at, request=None)
            entries.append(Entry(TURN, encode(ended)))
        return (*(entry._replace(end=False) for entry in entries[:-1]), *entries[-1:])


def renamed(name: str, data: bytes, key: SessionKey) -> bytes:
    """Return a document with the ids of another session, where it has any."""
    try:
        if name == SNAPSHOT:
            snapshot = decode(data, Snapshot)
            if (snapshot.agent_id, snapshot.session_id) != (key.agent, key.session):
                snapshot.agent_id, snapshot.session_id = key.agent, key.session
                return encode(snapshot)
        elif name == SESSION:
            described = decode(data, WholeSessionDocument)
            ids = (described.agent_id, described.session_id, described.tenant)
            if ids != (key.agent, key.session, key.tenant):
                described.agent_id, described.session_id = key.agent, key.session
                described.tenant = key.tenant
                return msgspec.json.format(encode(described), indent=2)
    except FormatError:
        pass  # the reader finds out, and rebuilds it
    return data


def without_history(documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return documents for a copy that leaves the history out.

    Its checkpoints of the session itself, which need that, become tombstones.
    """
    kept = dict(documents)
    if CHECKPOINTS in kept:
        chain = CheckpointChain.of(kept[CHECKPOINTS])
        chain.bury_captured()
        kept[CHECKPOINTS] = chain.document()
    return kept


def copied_manifest(
    manifest: Manifest, documents: Mapping[str, bytes], key: SessionKey, epoch: int, base: Origin
) -> Manifest:
    """Return the manifest of a copy's documents, which are as of the same record."""
    listed = {
        name: FoldedDocument.of(manifest.documents[name].as_of_seq, data)
        for name, data in documents.items()
    }
    return msgspec.structs.replace(
        manifest,
        key=key,
        epoch=epoch,
        documents=listed,
        base=None if base == Origin() else base,
        position=msgspec.Raw(b"null"),
    )
