"""The working context's snapshot as a document of the store: its place, not its meaning.

All access is through the store port, so that every backend stores it the same way. A session's fold
writes it; ``write`` is for tools. It is a cache: the log is the truth.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol, cast, final

import msgspec

from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    FormatError,
    StoreError,
)
from perdure.memory.context import (
    SNAPSHOT,
    Snapshot,
    WorkingContext,
)
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import FoldedDocument
from perdure.restore.ladder import snapshot_of
from perdure.store import Store

JSON = dict[str, Any]


_ALL: Final = 2**62


class RunExclusively(Protocol):
    """Runs a job while nothing else writes a session's documents."""

    async def __call__(self, job: Callable[[], Awaitable[None]], *, fold: bool = False) -> None:
        """Run the job, after a fold if requested."""


@final
class WorkingContextSnapshotStore:
    """One session's snapshot document.

    Args:
        store: The store.
        key: The session.
        epoch: The holder's epoch, which ``write`` needs.
        exclusively: Runs a job while nothing else writes the session's documents; with ``fold``,
            after a fold.
        primed: Returns the snapshot's bytes where the session's open has read it, none of them
            where it knows that there is none, and None where it has to be read. It is asked until
            the first ``read``.

    """

    def __init__(
        self,
        store: Store,
        key: SessionKey,
        *,
        epoch: int | None = None,
        exclusively: RunExclusively | None = None,
        primed: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self._store = store
        self._key = key
        self._epoch = epoch
        self._exclusively = exclusively
        self._primed: Callable[[], bytes | None] = primed

    async def exists(self, agent_id: str) -> bool:
        """Return whether there is an undamaged snapshot.

        Raises:
            ConfigError: This is the store of another agent's snapshot.

        """
        self._check(agent_id)
        if (known := self._primed()) is not None:
            return bool(known)
        return SNAPSHOT in (await self._store.read_documents(self._key, {SNAPSHOT})).found

    async def read(self, agent_id: str) -> JSON | None:
        """Return the snapshot; None if there is none, or its bytes are no JSON object.

        Raises:
            ConfigError: This is the store of another agent's snapshot.

        """
        self._check(agent_id)
        known, self._primed = self._primed(), lambda: None  # it may be large
        if known:
            return cast("JSON", decode(known))
        document = (await self._store.read_documents(self._key, {SNAPSHOT})).found.get(SNAPSHOT)
        if document is None:
            return None
        try:
            payload = decode(document.data)
        except CorruptRecordError:  # a cache: the reader rebuilds it
            return None
        return payload if isinstance(payload, dict) else None

    async def write(self, agent_id: str, payload: JSON) -> None:
        """Replace the snapshot, as of the record of the last fold.

        It is a cache, read by the next restore; ``reset_working_context_snapshot`` changes the
        context of the running session. A payload without ``seq`` is as of the newest record, which
        is folded first.

        Raises:
            StoreError: The session is not held here, or the payload is as of another record.
            CorruptRecordError: The payload is no snapshot of this agent.
            LeaseLostError: Another process holds the session.

        """
        self._check(agent_id)
        write = partial(self._write, payload)
        if self._exclusively is None:
            await write()
        else:
            await self._exclusively(write, fold="seq" not in payload)

    async def _write(self, payload: JSON) -> None:
        manifest = (await self._store.read_documents(self._key, ())).manifest
        folded = 0 if manifest is None else manifest.as_of_seq
        seq = payload.get("seq", folded)
        if manifest is None or self._epoch is None or seq != folded:
            raise StoreError(
                f"session {self._key}: a snapshot as of record {seq} cannot be written, the last "
                f"fold is as of {folded}: write it by "
                "MemoryManager(session).working_context_snapshot_store, and leave seq out",
                key=str(self._key),
                folded=folded,
            )
        data = _shaped(encode({**payload, "session_id": self._key.session, "seq": folded}))
        problem = snapshot_of(data, self._key, folded)
        if isinstance(problem, str):
            raise CorruptRecordError(
                f"session {self._key}: this is no snapshot of {self._key.agent!r}, {problem}: "
                "create one with WorkingContextSnapshotSerializer",
                key=str(self._key),
            )
        documents = {**manifest.documents, SNAPSHOT: FoldedDocument.of(folded, data)}
        changed = msgspec.structs.replace(manifest, epoch=self._epoch, documents=documents)
        await self._store.write_documents(self._key, {SNAPSHOT: data}, changed)

    def _check(self, agent_id: str) -> None:
        if agent_id != self._key.agent:
            raise ConfigError(
                f"this is the snapshot of {self._key.agent!r}, not of {agent_id!r}",
                key=str(self._key),
            )


def _shaped(data: bytes) -> bytes:
    """Return a snapshot with seqs and atoms for its messages; other data unchanged."""
    try:
        snapshot = decode(data, Snapshot)
    except FormatError:
        return data
    if snapshot.message_seqs or not snapshot.messages:
        return data
    context = WorkingContext.of_snapshot(snapshot, _ALL)
    shaped = decode(context.snapshot(snapshot.agent_id, snapshot.session_id))
    return encode({**decode(data), **{name: shaped[name] for name in ("message_seqs", "atoms")}})
