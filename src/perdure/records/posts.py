"""Inbox items and dead letters, as values and as stored bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from perdure.errors import ConfigError, FormatError, InboxFullError, InvalidArgumentError
from perdure.records import json
from perdure.records.keys import SessionKey
from perdure.records.records import open_sealed, seal

# What people leave for a session, and what its holder hears of it


UNREADABLE = "damaged:"
"""What a store's own id of an item begins with whose op id cannot be read any more."""


class PendingItem(msgspec.Struct, frozen=True, omit_defaults=True):
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

    item: PendingItem
    reason: str
    """Why it was not delivered."""
    tries: int
    """How often that was tried."""
    at: float
    """When it was set aside, in seconds since 1970, by the holder's clock."""


class HeartbeatRequests(msgspec.Struct, frozen=True):
    """What a heartbeat brings: what others want of this owner, since it was last asked."""

    handovers: tuple[SessionKey, ...] = ()
    """Sessions that somebody else wants to write."""
    mail: tuple[SessionKey, ...] = ()
    """Sessions for which something was posted."""
    beats: Mapping[str, int] | None = None
    """Other owners' heartbeat counters, as ``LeaseState.beat`` gives them; a thousand at most.
    None where they were not looked at, since that takes more than the heartbeat itself."""
    warnings: tuple[str, ...] = ()
    """What is wrong with how the store is set up by now, for people; saving goes on."""


# Dead letters as stores keep them: JSON with a checksum, bound to its session


class _Stored(msgspec.Struct, frozen=True):
    key: SessionKey
    letter: DeadLetter


def encode_dead_letter(key: SessionKey, letter: DeadLetter) -> bytes:
    """Return a dead letter of a session as bytes."""
    return seal(msgspec.json.encode(_Stored(key, letter)))


def key_of_dead_letter(data: bytes) -> SessionKey | None:
    """Return whose dead letter it is, None if it is damaged."""
    stored = _stored(data)
    return None if stored is None else stored.key


def decode_dead_letter(key: SessionKey, op_id: str, data: bytes) -> DeadLetter:
    """Return the dead letter of `encode_dead_letter`; one that is damaged says so."""
    stored = _stored(data)
    if stored is not None and stored.key == key:
        return stored.letter
    damage = "what the store keeps of the dead letter does not fit its checksum, or its session"
    return DeadLetter(PendingItem(op_id, "", data, 0.0, damage), "unknown: it is damaged", 0, 0.0)


def oldest_first(letters: list[DeadLetter]) -> list[DeadLetter]:
    """Return dead letters in the order of their times; those of one time stay in theirs."""
    return sorted(letters, key=lambda letter: letter.at)


def _stored(data: bytes) -> _Stored | None:
    body = open_sealed(data)
    try:
        return None if body is None else json.decode(body, _Stored)
    except (FormatError, ConfigError):  # ConfigError: ids that nobody could have given
        return None


# What was posted to a session, and what its holder still has to take: pure decisions
#
# Each item of a post has an op id of its own, made of the post's key and the item's place. Records
# of one post enter the log as one group, and the group's last record names the op ids, so that
# whoever reads the log knows what was taken: it is in the log with it, or neither is.


MAX_KEY_BYTES = 512
"""The longest key of a post, in UTF-8 bytes."""


def checked_key(key: str) -> str:
    """Return the key of a post.

    Raises:
        InvalidArgumentError: It is no text, empty, or too long.

    """
    try:
        size = len(key.encode())
    except (AttributeError, UnicodeEncodeError):
        size = 0
    if 0 < size <= MAX_KEY_BYTES:
        return key
    message = (
        f"post: invalid key={key!r:.80}: use text of 1 to {MAX_KEY_BYTES} bytes, the same at "
        "each try, such as the id of a request"
    )
    raise InvalidArgumentError(message, option="key")


def op_ids(key: str, count: int) -> tuple[str, ...]:
    """Return the op ids of a post's items.

    >>> op_ids("req-7", 2)
    ('req-7/0', 'req-7/1')
    """
    return tuple(f"{key}/{place}" for place in range(count))


def key_of(op_id: str) -> str:
    """Return the key of the post that an item belongs to.

    >>> key_of("req-7/1")
    'req-7'
    """
    return op_id.rpartition("/")[0] or op_id


def to_take(items: Sequence[PendingItem], received: Collection[str]) -> Iterator[list[PendingItem]]:
    """Give what is not in the log yet, oldest first, a post at a time."""
    new = (item for item in items if item.op_id not in received)
    for _, post in groupby(new, lambda item: key_of(item.op_id)):
        yield list(post)
