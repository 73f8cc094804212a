"""Inbox and dead letters of a session: a file for each post, in the session's own folder.

``inbox-<generation>/<number>-<tags>.json`` holds the items of one post, so that a post is visible
completely or not at all. *number* is their order; each tag is the short hash of an op id, so that
a pending op id is found without opening a file. A generation of a session ends with its deletion,
and its posts with it. ``dead-letters-<generation>/<hash of the op id>.json`` is an item that could
not be delivered.

Posting needs no lease and waits for no other process. If two processes post one op id at the same
moment, both may count it as new; it is delivered once all the same. Blocking: each public
function is one call into a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Sequence

import msgspec

from perdure._lib.files import Folder, skip_unreadable
from perdure.errors import FormatError
from perdure.records.keys import SessionKey
from perdure.records.posts import (
    UNREADABLE,
    acked_ids,
    decode_dead_letter,
    encode_dead_letter,
    oldest_first,
)
from perdure.store import DeadLetter, InboxLimit, PendingItem
from perdure.stores.file.layout import (
    DEAD_LETTERS,
    INBOX,
    sealed,
    session_path,
    unsealed,
)
from perdure.stores.file.leases import Owners, newest_epoch, newest_lease
from perdure.stores.file.log import LogWriter, lease_lost_error

_NAME = re.compile(r"([0-9]{12})-([0-9a-f.]+|many)\.json\Z")
_DEAD_NAME = re.compile(r"[0-9a-f]{64}\.json\Z")
_TAG = 16
_MAX_TAGS = 8
"""With more items than this, the file has to be opened: a name has only so much room."""
_TRIES = 100


class _Item(msgspec.Struct, frozen=True):
    op_id: str
    kind: str
    payload: msgspec.Raw
    at: float


class _Post(msgspec.Struct, frozen=True):
    """Content of one file."""

    key: SessionKey
    items: tuple[_Item, ...]


def enqueue(
    root: Folder,
    owners: Owners,
    key: SessionKey,
    items: Sequence[PendingItem],
    limit: InboxLimit | None,
) -> int:
    """Make items durable, and notify the holder; return how many were new.

    Raises:
        InboxFullError: The new items would go over the limit.

    """
    first_of_id = {item.op_id: item for item in reversed(items)}
    path = session_path(key)
    with root.make(*path) as folder:
        inbox = _inbox_name(folder, key)
        with folder.make(inbox) as box:
            new = _add(box, key, [item for item in items if first_of_id[item.op_id] is item], limit)
        if new:
            # The process that created these folders may have died before they were durable.
            root.sync_path(*path, inbox)
        lease = newest_lease(folder).lease  # now, so that no holder is missed
    if lease is not None and not lease.deleted:
        owners.send(lease.owner, key, "mail")
    return new


def _add(
    box: Folder, key: SessionKey, items: Sequence[PendingItem], limit: InboxLimit | None
) -> int:
    for _ in range(_TRIES):
        names = _names(box)
        tags = {name: _tags(box, name) for name in names}
        pending = {tag for tags_of_post in tags.values() for tag in tags_of_post}
        new = [item for item in items if _tag(item.op_id) not in pending]
        if not new:
            return 0
        number = max(map(_number, names), default=0) + 1
        post = _Post(
            key,
            tuple(
                _Item(item.op_id, item.kind, msgspec.Raw(item.payload), item.posted_at)
                for item in new
            ),
        )
        data = sealed(post)
        if limit is not None:
            statuses = [box.stat(name) for name in names]
            limit.require_room(
                key,
                waiting=sum(max(len(tags_of_post), 1) for tags_of_post in tags.values()),
                size=sum(status.st_size for status in statuses if status is not None),
                new=len(new),
                added=len(data),
            )
        # Of several posters of one number one succeeds; the others look again.
        if box.publish(_name(number, post), data):
            return len(new)
    raise OSError(f"{box.path}: other processes were faster {_TRIES} times")


def receive(writer: LogWriter, limit: int) -> list[PendingItem]:
    """Return the pending items, oldest first, as the session's holder."""
    with writer.held() as folder:
        return _oldest(folder, writer.key, limit)


def peek(root: Folder, key: SessionKey, epoch: int, limit: int) -> list[PendingItem]:
    """Return the pending items to a reader.

    Raises:
        LeaseLostError: The epoch is not the newest.

    """
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        if epoch:
            raise lease_lost_error(key, epoch) from None
        return []
    with folder:
        if newest_epoch(folder) != epoch:
            raise lease_lost_error(key, epoch)
        return _oldest(folder, key, limit)


def ack(writer: LogWriter, op_ids: Collection[str], dead: Sequence[DeadLetter]) -> None:
    """Remove items, as the session's holder; dead letters are kept first."""
    done = frozenset(acked_ids(op_ids, dead))
    tags = frozenset(map(_tag, done))
    key = writer.key
    with writer.held() as folder:
        if dead:
            with folder.make(_dead_letters_name(folder, key)) as box:
                for letter in dead:
                    box.replace(_dead_name(letter.item.op_id), encode_dead_letter(key, letter))
            folder.sync()
        with contextlib.suppress(FileNotFoundError), folder.enter(_inbox_name(folder, key)) as box:
            for name in _names(box):
                if f"{UNREADABLE}{name}" in done:
                    box.remove(name)
                elif not tags.isdisjoint(_tags(box, name)):
                    _settle(key, box, name, done)


def session_with_items(folder: Folder) -> SessionKey | None:
    """Return the key of a folder's session if it has pending items; the posts hold the key."""
    with skip_unreadable(), contextlib.suppress(FormatError):  # one bad session hides no other
        for name in filter(INBOX.epoch, folder.names()):
            with folder.enter(name) as box:
                posts = (unsealed(box.read(post_name), _Post) for post_name in _names(box))
                key = next((post.key for post in posts if post is not None), None)
            if key is not None and _inbox_name(folder, key) == name:
                return key
    return None


def dead_letters(root: Folder, key: SessionKey) -> list[DeadLetter]:
    """Return a session's dead letters."""
    letters: list[DeadLetter] = []
    with (
        contextlib.suppress(FileNotFoundError),
        root.enter(*session_path(key)) as folder,
        folder.enter(_dead_letters_name(folder, key)) as dead,
    ):
        for name in _dead_names(dead):
            data = dead.read(name)
            if data is not None:
                letters.append(decode_dead_letter(key, f"{UNREADABLE}{name}", data))
    return oldest_first(letters)


def drop_dead_letters(root: Folder, key: SessionKey, op_ids: Collection[str]) -> None:
    """Remove dead letters."""
    with (
        contextlib.suppress(FileNotFoundError),
        root.enter(*session_path(key)) as folder,
        folder.enter(_dead_letters_name(folder, key)) as dead,
    ):
        for name in {*_dead_names(dead)} & {*map(_dead_name, op_ids)}:
            dead.remove(name)
        dead.sync()


def session_with_dead_letters(folder: Folder) -> SessionKey | None:
    """Return the key of a folder's session if it has dead letters."""
    with skip_unreadable(), contextlib.suppress(FormatError):  # one bad session hides no other
        if not any(map(DEAD_LETTERS.epoch, folder.names())):  # most have none
            return None
        lease = newest_lease(folder).lease
        if lease is not None and not lease.deleted:
            with folder.enter(DEAD_LETTERS.name(lease.since)) as dead:
                return lease.key if _dead_names(dead) else None
    return None


def _dead_names(dead: Folder) -> list[str]:
    return sorted(filter(_DEAD_NAME.match, dead.names()))


def _dead_name(op_id: str) -> str:
    file_name = op_id.removeprefix(UNREADABLE)
    if file_name != op_id and _DEAD_NAME.match(file_name):
        return file_name  # a damaged dead letter, by the id that it was listed with
    return f"{hashlib.sha256(op_id.encode('utf-8', 'surrogatepass')).hexdigest()}.json"


def _settle(key: SessionKey, box: Folder, name: str, done: Collection[str]) -> None:
    """Remove the items of a post that are done."""
    stored = unsealed(box.read(name), _Post)
    items = () if stored is None else stored.items
    remaining = tuple(item for item in items if item.op_id not in done)
    if len(remaining) == len(items):
        return
    post = _Post(key, remaining)
    new_name = _name(_number(name), post)
    if remaining:  # first, under a new name: a duplicate is delivered once
        box.replace(new_name, sealed(post))
        box.sync()
    if new_name != name:
        box.remove(name)


def _inbox_name(folder: Folder, key: SessionKey) -> str:
    """Return the name of the inbox of a session's generation: the current one, or the next."""
    lease = newest_lease(folder, key).lease
    return INBOX.name(1 if lease is None else lease.inbox_generation)


def _dead_letters_name(folder: Folder, key: SessionKey) -> str:
    return DEAD_LETTERS.name(newest_lease(folder, key).since)


def _oldest(folder: Folder, key: SessionKey, limit: int) -> list[PendingItem]:
    items: dict[str, PendingItem] = {}
    with contextlib.suppress(FileNotFoundError), folder.enter(_inbox_name(folder, key)) as box:
        for name in _names(box):
            for item in _waiting(box, name):
                items.setdefault(item.op_id, item)
            if len(items) >= limit:
                break
    return list(items.values())[:limit]


def _waiting(box: Folder, name: str) -> Sequence[PendingItem]:
    """Return a post's items; of a damaged post, its bytes as one damaged item."""
    data = box.read(name)
    post = unsealed(data, _Post)
    if post is not None:
        return [
            PendingItem(item.op_id, item.kind, bytes(item.payload), item.at) for item in post.items
        ]
    if data is None:
        return ()
    damage = f"the post in {box.path}/{name} does not match its checksum"
    return (PendingItem(f"{UNREADABLE}{name}", "", data, 0.0, damage),)


# names


def _names(box: Folder) -> list[str]:
    return sorted(filter(_NAME.match, box.names()))


def _name(number: int, post: _Post) -> str:
    many = len(post.items) > _MAX_TAGS
    tags = "many" if many else ".".join(_tag(item.op_id) for item in post.items)
    return f"{number:012d}-{tags}.json"


def _number(name: str) -> int:
    return int(name[:12])


def _tag(op_id: str) -> str:
    return hashlib.sha256(op_id.encode("utf-8", "surrogatepass")).hexdigest()[:_TAG]


def _tags(box: Folder, name: str) -> list[str]:
    match = _NAME.match(name)
    if match is not None and match[2] != "many":
        return match[2].split(".")
    post = unsealed(box.read(name), _Post)
    return [] if post is None else [_tag(item.op_id) for item in post.items]
