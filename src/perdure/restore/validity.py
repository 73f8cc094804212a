"""Whether a working context's snapshot may be used: pure, and never raising."""

from __future__ import annotations

from perdure.codec.json import decode
from perdure.errors import FormatError
from perdure.memory.context import SCHEMA_VERSION, Snapshot
from perdure.model.keys import SessionKey

__all__ = ["snapshot_of"]


def snapshot_of(data: bytes, key: SessionKey, as_of_seq: int) -> Snapshot | str:
    """Return the snapshot, or why it cannot be used.

    Valid means: well-formed, of this schema version, of this very session, and as of the record
    that the manifest says. Everything else is rebuilt from the log.
    """
    try:
        snapshot = decode(data, Snapshot)
    except FormatError as error:
        return f"it is not well-formed ({error})"
    if snapshot.schema_version != SCHEMA_VERSION:
        return f"its schema version is {snapshot.schema_version}, not {SCHEMA_VERSION}"
    if (snapshot.agent_id, snapshot.session_id) != (key.agent, key.session):
        return f"it belongs to {snapshot.agent_id}/{snapshot.session_id}"
    if snapshot.seq != as_of_seq:
        return f"it is as of record {snapshot.seq}, the manifest says {as_of_seq}"
    return _shape_problem(snapshot) or snapshot


def _shape_problem(snapshot: Snapshot) -> str | None:
    behind = len(snapshot.messages) - snapshot.pinned
    if behind < 0 or len(snapshot.message_seqs) != len(snapshot.messages):
        return "its messages and their seqs differ in number"
    if sum(snapshot.atoms) != behind or any(length < 1 for length in snapshot.atoms):
        return "its atoms do not add up to its messages"
    return None
