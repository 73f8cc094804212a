"""Lost sessions: what can still be done about records that were unsaved when a lease was lost.

The records stay in memory until the application decides about them, even if nothing refers to the
`Session` any more; `health` and the shutdown report name the session until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from perdure.records.keys import SessionKey
from perdure.records.messages import decode_message, kind_of
from perdure.records.records import (
    CONTEXT,
    ITEM,
    MEMORY_DROP,
    MEMORY_SET,
    META,
    STATE,
    Entry,
    Record,
)

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.session.base import SessionBase
    from perdure.session.fork import Fork
    from perdure.session.lifecycle import SessionLifecycle
    from perdure.session.runtime import Runtime


_MOVABLE = frozenset({ITEM, MEMORY_DROP, MEMORY_SET, META, STATE})
"""Kinds of records that mean the same under another number."""


@final
class LostSession:
    """A session that can be written no more, and the records of it that are only in memory.

    From ``sessions.lost``. Fork or discard them, or they are named when the manager stops.
    """

    __slots__ = ("_lifecycle", "_runtime", "_tracked")

    def __init__(self, runtime: Runtime, lifecycle: SessionLifecycle, tracked: Tracked) -> None:
        self._runtime = runtime
        self._lifecycle = lifecycle
        self._tracked = tracked

    def __repr__(self) -> str:
        unsaved = self.version - self.durable_version
        return f"<LostSession {self.key} epoch={self.epoch} unsaved={unsaved}>"

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._tracked.key

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self.key.agent

    @property
    def epoch(self) -> int:
        """The number of the lease that was lost."""
        return self._tracked.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._tracked.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that the store had acknowledged."""
        return self._tracked.durable

    @property
    def error(self) -> Exception | None:
        """What the store said when the session was lost."""
        return self._tracked.last_error

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are only in memory."""
        return self._tracked.pending_records()

    async def fork_unsaved(self, new_id: str, *, new_session: str | None = None) -> Fork:
        """Begin a session with what is durable of this one, and what is not; it is durable then.

        As `Session.fork_unsaved`. What was lost is decided with that.
        """
        return await fork_unsaved(
            self._runtime, self._lifecycle, self._tracked, new_id, new_session=new_session
        )

    async def discard_unsaved(self) -> int:
        """Drop the records that are only in memory, and return how many."""
        return self._runtime.saver.discard(self._tracked)


def rescued(session: SessionBase, after: int) -> tuple[list[Entry], Entry]:
    """Return what memory holds of a session's acknowledged records behind one, oldest first.

    That is messages of the working context, and what was changed since the last fold; and, as a
    record of its own, the working context as it is now.
    """
    contents, durable = session._contents, session._tracked.durable
    known = [
        (seq, Entry(_kind_of(payload), payload)) for seq, payload in contents.context.by_record()
    ]
    known += [
        (record.seq, Entry(record.kind, record.payload)) for record in contents.changes(_MOVABLE)
    ]
    known.sort(key=lambda record: record[0])
    context = Entry(CONTEXT, contents.context.as_record("rescue"))
    return [entry for seq, entry in known if after < seq <= durable], context


def _kind_of(payload: bytes) -> str:
    return kind_of(decode_message(payload))


async def fork_unsaved(
    runtime: Runtime,
    lifecycle: SessionLifecycle,
    tracked: Tracked,
    new_id: str,
    *,
    new_session: str | None,
) -> Fork:
    """Begin a session with what is durable of another one, and what is not."""
    from perdure.session.exclusive import ExclusiveAccess
    from perdure.session.fork import ForkBuilder

    key = tracked.key
    new = SessionKey(new_id, new_session or key.session, key.tenant)
    forker = ForkBuilder(ExclusiveAccess(runtime, lifecycle))

    async def fork() -> Fork:
        forked = await forker.fork_unsaved(tracked, new)
        runtime.saver.settle_lost(tracked)  # here: it goes on though the caller is cancelled
        return forked

    return await runtime.host.call(fork)
