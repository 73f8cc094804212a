"""The working context's snapshot as a document of the store: where it is, not what it means.

All reading and writing goes through the store port, so that every backend keeps it the
same way. A session's fold writes it in the course of things; ``write`` is for tools. It
is a cache: whatever happens to it, the log is the truth.
"""

from __future__ import annotations

from typing import Any, final

import msgspec

from perdure.codec.json import decode, encode
from perdure.errors import ConfigError, CorruptRecordError, StoreError
from perdure.memory.context import SNAPSHOT
from perdure.model.keys import SessionKey
from perdure.model.manifest import FoldedDocument
from perdure.store import Store

__all__ = ["WorkingContextSnapshotStore"]

JSON = dict[str, Any]


@final
class WorkingContextSnapshotStore:
    """One session's snapshot document.

    Args:
        store: Where the session is.
        key: Which session.
        epoch: The holder's number, which ``write`` needs.

    """

    def __init__(self, store: Store, key: SessionKey, *, epoch: int | None = None) -> None:
        self._store = store
        self._key = key
        self._epoch = epoch

    async def exists(self, agent_id: str) -> bool:
        """Say whether there is a snapshot whose bytes are those that were folded."""
        self._check(agent_id)
        return SNAPSHOT in (await self._store.read_documents(self._key, {SNAPSHOT})).found

    async def read(self, agent_id: str) -> JSON | None:
        """Return the snapshot; None if there is none, or its bytes are no JSON object."""
        self._check(agent_id)
        found = (await self._store.read_documents(self._key, {SNAPSHOT})).found.get(SNAPSHOT)
        if found is None:
            return None
        try:
            payload = decode(found.data)
        except CorruptRecordError:  # a cache: whoever reads it makes a new one
            return None
        return payload if isinstance(payload, dict) else None

    async def write(self, agent_id: str, payload: JSON) -> None:
        """Replace the snapshot, at the record that the last fold was as of.

        Raises:
            StoreError: Nothing is folded yet, or the payload is as of another record.
            LeaseLostError: Another process holds the session.

        """
        self._check(agent_id)
        manifest = (await self._store.read_documents(self._key, ())).manifest
        folded = 0 if manifest is None else manifest.as_of_seq
        if manifest is None or self._epoch is None or payload.get("seq") != folded:
            message = (
                f"session {self._key}: a snapshot as of record {payload.get('seq')} cannot be "
                f"written, the last fold is as of {folded}: hold the session, and fold it first"
            )
            raise StoreError(message, key=str(self._key), folded=folded)
        data = encode(payload)
        documents = {**manifest.documents, SNAPSHOT: _folded(folded, data)}
        changed = msgspec.structs.replace(manifest, epoch=self._epoch, documents=documents)
        await self._store.write_documents(self._key, {SNAPSHOT: data}, changed)

    def _check(self, agent_id: str) -> None:
        if agent_id != self._key.agent:
            message = f"this is the snapshot of {self._key.agent!r}, not of {agent_id!r}"
            raise ConfigError(message, key=str(self._key))


def _folded(as_of_seq: int, data: bytes) -> FoldedDocument:
    import hashlib

    return FoldedDocument(as_of_seq, hashlib.sha256(data).hexdigest(), len(data))
