"""What people leave for a session, and what its holder hears of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from perdure.errors import InboxFullError
from perdure.model.keys import SessionKey

__all__ = ["UNREADABLE", "Asked", "DeadLetter", "InboxLimit", "Posted"]

UNREADABLE = "damaged:"
"""What a store's own id of an item begins with whose op id cannot be read any more."""


class Posted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that anybody left for a session, until its holder takes it."""

    op_id: str
    """Who posts the same id again posts nothing."""
    kind: str
    """The kind of record that it becomes."""
    payload: bytes
    """That record's payload: JSON, encoded."""
    posted_at: float
    """Seconds since 1970, by the poster's clock; for people, never for the order."""
    damage: str = ""
    """Why the item cannot be read; then ``payload`` is what lies there of it, and no JSON."""

    @property
    def key(self) -> str:
        """The key of the post that it belongs to."""
        return self.op_id.rpartition("/")[0] or self.op_id

    @property
    def place(self) -> int:
        """Its place in that post; 0 where the op id does not say."""
        last = self.op_id.rpartition("/")[2]
        return int(last) if last.isascii() and last.isdecimal() and len(last) < 10 else 0


class InboxLimit(msgspec.Struct, frozen=True):
    """How much may wait for one session: so that nobody can fill a store by posting to it."""

    items: int
    bytes: int
    """Of what the store keeps of them."""

    def require_room(
        self, key: SessionKey, *, waiting: int, size: int, new: int, added: int
    ) -> None:
        """Refuse a post for which there is no room.

        Args:
            key: The session.
            waiting: Items that wait already, without the new ones.
            size: Bytes that they take.
            new: Items that are to wait as well.
            added: Bytes that these take.

        Raises:
            InboxFullError: There is not.

        """
        if new == 0 or (waiting + new <= self.items and size + added <= self.bytes):
            return
        message = (
            f"the inbox of {key} has no room for a post of {new} items and {added} bytes: "
            f"{waiting} items and {size} bytes wait, the limit is {self.items} items and "
            f"{self.bytes} bytes; open the session, which takes what waits, or forget it if nobody "
            "needs it; Limits(inbox_items=…, inbox_bytes=…) of who posts allow more"
        )
        raise InboxFullError(message, key=str(key), items=waiting, bytes=size)


class DeadLetter(msgspec.Struct, frozen=True):
    """An item that was posted, could not be delivered, and was set aside."""

    item: Posted
    reason: str
    """Why it was not delivered."""
    tries: int
    """How often that was tried."""
    at: float
    """When it was set aside, in seconds since 1970, by the holder's clock."""


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
