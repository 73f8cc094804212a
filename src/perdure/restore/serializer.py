"""The working context's snapshot as plain JSON values, and back.

The format is that of ``working_context_snapshot.json``, which a session's fold writes
(`perdure.memory.context.Snapshot`); there is one format, and this is its reading for
people and tools. Data in, data out: nothing here reads a file or knows where one is.
"""

from __future__ import annotations

from typing import Any, final

from perdure.errors import PerdureError, UnsupportedVersionError
from perdure.memory.context import SCHEMA_VERSION, Snapshot, WorkingContextSnapshot
from perdure.records.json import decode, encode
from perdure.records.messages import decode_message, encode_message
from perdure.records.values import NO_TYPES, Types
from perdure.restore.snapshot_store import JSON


@final
class WorkingContextSnapshotSerializer:
    """Converts a snapshot to its stored form and back.

    Args:
        types: The application's registered types, for tool arguments and results.

    """

    def __init__(self, types: Types = NO_TYPES) -> None:
        self._types = types

    def serialize(self, working_context_snapshot: WorkingContextSnapshot, metadata: JSON) -> JSON:
        """Return the stored form; ``metadata`` must name the ``agent_id``.

        Raises:
            NotStorableError: A message cannot be stored.

        """
        snapshot = working_context_snapshot
        return {
            **metadata,
            "schema_version": SCHEMA_VERSION,
            "agent_id": metadata["agent_id"],
            "epoch_id": snapshot.epoch_id,
            "last_compaction_ts": snapshot.last_compaction_ts,
            "messages": [
                decode(encode_message(message, self._types).payload)
                for message in snapshot.messages
            ],
        }

    def deserialize(self, payload: JSON) -> tuple[WorkingContextSnapshot, JSON]:
        """Return the snapshot, and the payload's other fields.

        Raises:
            UnsupportedVersionError: It has another schema version.
            CorruptRecordError: It is not well-formed.
            NotStorableError: It is not made of JSON values.

        """
        version = _field(payload, "schema_version")
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise UnsupportedVersionError(
                f"the snapshot has schema version {version}, not {SCHEMA_VERSION}: rebuild it",
                found=version,
            )
        # Through its bytes, so that there is one decoder of the format.
        stored = decode(encode(payload), Snapshot)
        messages = tuple(decode_message(bytes(raw), self._types) for raw in stored.messages)
        others = {name: value for name, value in payload.items() if name not in _OWN}
        snapshot = WorkingContextSnapshot(
            messages=messages,
            epoch_id=stored.epoch_id,
            last_compaction_ts=stored.last_compaction_ts,
        )
        return snapshot, others

    def validate(self, payload: Any, agent_id: str | None = None) -> bool:
        """Return whether a payload is valid: version, fields, messages and agent.

        Raises nothing, for any payload.
        """
        try:
            _, others = self.deserialize(payload)
        except (PerdureError, TypeError, ValueError, KeyError, RecursionError):
            return False
        return agent_id is None or others["agent_id"] == agent_id


_OWN = frozenset({"messages", "epoch_id", "last_compaction_ts"})


def _field(payload: Any, name: str) -> Any:
    return payload.get(name) if isinstance(payload, dict) else None
