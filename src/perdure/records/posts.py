"""Inbox items and dead letters, as values and as stored bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from perdure.errors import ConfigError, FormatError, InboxFullError, InvalidArgumentError
from perdure.records import json
from perdure.records.keys import SessionKey
from perdure.records.records import open_sealed, seal

UNREADABLE = "damaged:"
"""The prefix of a store's own id for an item whose op id cannot be read any more."""


class PendingItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An item posted to a session, until its holder receives it."""

    op_id: str
    """Posting the same id again has no effect."""
    kind: str
    """The kind of its future record."""
    payload: bytes
    """That record's payload: JSON, encoded."""
    posted_at: float
    """Seconds since 1970, by the poster's clock; for people, never for the order."""
    damage: str = ""
    """Reason why the item cannot be read; then ``payload`` is its stored bytes, and not JSON."""

    @property
    def key(self) -> str:
        """The key of the post that it belongs to."""
        return key_of(self.op_id)

    @property
    def place(self) -> int:
        """Its place in that post; 0 if the op id has none."""
        last = self.op_id.rpartition("/")[2]
        return int(last) if last.isascii() and last.isdecimal() and len(last) < 10 else 0


class InboxLimit(msgspec.Struct, frozen=True):
    """Most that may wait for one session, so that posts cannot fill a store."""

    items: int
    bytes: int
    """Bytes of the items as stored."""

    def require_room(
        self, key: SessionKey, *, waiting: int, size: int, new: int, added: int
    ) -> None:
        """Raise for a post for which there is no room.

        Args:
            key: The session.
            waiting: Items that wait already, without the new ones.
            size: Their bytes.
            new: Items to add.
            added: Their bytes.

        Raises:
            InboxFullError: There is none.

        """
        if new == 0 or (waiting + new <= self.items and size + added <= self.bytes):
            return
        raise InboxFullError(
            f"the inbox of {key} has no room for a post of {new} items and {added} bytes: "
            f"{waiting} items and {size} bytes wait, the limit is {self.items} items and "
            f"{self.bytes} bytes; open the session, which receives what waits, or forget it if it "
            "is not needed; Limits(inbox_items=…, inbox_bytes=…) of the poster allow more",
            key=str(key),
            items=waiting,
            bytes=size,
        )


class DeadLetter(msgspec.Struct, frozen=True):
    """A posted item that could not be delivered."""

    item: PendingItem
    reason: str
    """Reason why it was not delivered."""
    tries: int
    """Number of deliveries that were tried."""
    at: float
    """Time when it became a dead letter, in seconds since 1970, by the holder's clock."""


class HeartbeatRequests(msgspec.Struct, frozen=True):
    """Requests of other processes that a heartbeat returns, since the previous one."""

    handovers: tuple[SessionKey, ...] = ()
    """Sessions that another process wants to write."""
    mail: tuple[SessionKey, ...] = ()
    """Sessions with new posts."""
    beats: Mapping[str, int] | None = None
    """Other owners' heartbeat counters, as ``LeaseState.beat`` gives them; a thousand at most.
    None if they were not read, since that costs more than the heartbeat itself."""
    warnings: tuple[str, ...] = ()
    """Problem with the store's current settings, for people; saving continues."""


class _Stored(msgspec.Struct, frozen=True):
    key: SessionKey
    letter: DeadLetter


def encode_dead_letter(key: SessionKey, letter: DeadLetter) -> bytes:
    """Return a dead letter as bytes: JSON with a checksum, bound to its session."""
    return seal(msgspec.json.encode(_Stored(key, letter)))


def key_of_dead_letter(data: bytes) -> SessionKey | None:
    """Return the session of a dead letter, None if it is damaged."""
    stored = _stored(data)
    return None if stored is None else stored.key


def decode_dead_letter(key: SessionKey, op_id: str, data: bytes) -> DeadLetter:
    """Return the dead letter of `encode_dead_letter`; a damaged one has the reason in its item."""
    stored = _stored(data)
    if stored is not None and stored.key == key:
        return stored.letter
    damage = "the stored dead letter does not match its checksum, or its session"
    return DeadLetter(PendingItem(op_id, "", data, 0.0, damage), "unknown: it is damaged", 0, 0.0)


def acked_ids(op_ids: Collection[str], dead: Sequence[DeadLetter]) -> list[str]:
    """Return the op ids of what leaves an inbox: delivered, or set aside."""
    return [*op_ids, *(letter.item.op_id for letter in dead)]


def oldest_first(letters: list[DeadLetter]) -> list[DeadLetter]:
    """Return dead letters sorted by time; equal times keep their order."""
    return sorted(letters, key=lambda letter: letter.at)


def _stored(data: bytes) -> _Stored | None:
    body = open_sealed(data)
    try:
        return None if body is None else json.decode(body, _Stored)
    except (FormatError, ConfigError):  # ConfigError: ids that are not valid
        return None


# Each item of a post has an op id of its own, made of the post's key and the item's place. Records
# of one post enter the log as one group, and the group's last record names the op ids, so that
# the log itself says what was received: items and op ids are in it together, or not at all.


MAX_KEY_BYTES = 512
"""The longest key of a post, in UTF-8 bytes."""


def checked_key(key: str) -> str:
    """Return the key of a post.

    Raises:
        InvalidArgumentError: It is not text, empty, or too long.

    """
    try:
        size = len(key.encode())
    except (AttributeError, UnicodeEncodeError):
        size = 0
    if 0 < size <= MAX_KEY_BYTES:
        return key
    raise InvalidArgumentError(
        f"post: invalid key={key!r:.80}: use text of 1 to {MAX_KEY_BYTES} bytes, the same at "
        "each try, such as the id of a request",
        option="key",
    )


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


def new_posts(
    items: Sequence[PendingItem], received: Collection[str]
) -> Iterator[list[PendingItem]]:
    """Yield the items that are not in the log yet, oldest first, one post at a time."""
    new = (item for item in items if item.op_id not in received)
    for _, post in groupby(new, lambda item: key_of(item.op_id)):
        yield list(post)
