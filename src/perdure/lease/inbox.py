"""What was posted to a session, and what its holder still has to take: pure decisions.

Each item of a post has an op id of its own, made of the post's key and the item's place. Records
of one post enter the log as one group, and the group's last record names the op ids, so that
whoever reads the log knows what was taken: it is in the log with it, or neither is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from perdure.errors import ConfigError
from perdure.store import Posted

__all__ = ["MAX_KEY_BYTES", "checked_key", "key_of", "op_ids", "to_take"]

MAX_KEY_BYTES = 512
"""The longest key of a post, in UTF-8 bytes."""


def checked_key(key: str) -> str:
    """Return the key of a post.

    Raises:
        ConfigError: It is no text, empty, or too long.

    """
    try:
        size = len(key.encode())
    except (AttributeError, UnicodeEncodeError):
        size = 0
    if 0 < size <= MAX_KEY_BYTES:
        return key
    message = (
        f"post: key={key!r:.80} does not fit: use text of 1 to {MAX_KEY_BYTES} bytes, the same at "
        "each try, such as the id of a request"
    )
    raise ConfigError(message, option="key")


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


def to_take(items: Sequence[Posted], taken: Collection[str]) -> Iterator[list[Posted]]:
    """Give what is not in the log yet, oldest first, a post at a time."""
    new = (item for item in items if item.op_id not in taken)
    for _, post in groupby(new, lambda item: key_of(item.op_id)):
        yield list(post)
