"""What people leave for a session, and what its holder hears of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from perdure.model.keys import SessionKey

__all__ = ["Asked", "Posted"]


class Posted(msgspec.Struct, frozen=True):
    """Something that anybody left for a session, until its holder takes it."""

    op_id: str
    """Who posts the same id again posts nothing."""
    kind: str
    """The kind of record that it becomes."""
    payload: bytes
    """That record's payload: JSON, encoded."""
    posted_at: float
    """Seconds since 1970, by the poster's clock; for people, never for the order."""


class Asked(msgspec.Struct, frozen=True):
    """What a heartbeat brings: what others want of this owner, since it was last asked."""

    handovers: tuple[SessionKey, ...] = ()
    """Sessions that somebody else wants to write."""
    mail: tuple[SessionKey, ...] = ()
    """Sessions for which something was posted."""
    beats: Mapping[str, int] | None = None
    """The heartbeat counters of other owners, as ``Holder.beat`` gives them; a thousand at most.
    None where they were not looked at, since that takes more than the heartbeat itself."""
    warnings: tuple[str, ...] = ()
    """What is wrong with how the store is set up by now, for people; saving goes on."""
