"""What was left for a session: a file for each post, below the session's own folder.

``inbox-<life>/<number>-<tags>.json`` holds the items of one post, so that all of them are there
or none. *number* is their order; each tag is the short hash of an op id, so that one that is
waiting is found without opening a file. A *life* of a session ends with its deletion, and
what was posted for it ends with it.

Who posts needs no lease, and waits for nobody. Two who post one op id at the same moment may both
be told that it is new; it is taken once all the same. Blocking: one hop into a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Collection, Sequence

import msgspec

from perdure._lib.files import Folder
from perdure.errors import CorruptRecordError, FormatError
from perdure.model.keys import SessionKey
from perdure.store import Posted
from perdure.stores.file.layout import QUARANTINE, inbox_life, inbox_name, session_path
from perdure.stores.file.leases import LeaseFile, newest_epoch, read_lease, require_key
from perdure.stores.file.owners import Owners
from perdure.stores.file.sealed import sealed, unsealed
from perdure.stores.file.writing import Writer, lost

__all__ = ["look", "post", "settle", "take", "waits_in"]

_log = logging.getLogger("perdure")

_NAME = re.compile(r"([0-9]{12})-([0-9a-f.]+|many)\.json\Z")
_TAG = 16
_MOST_TAGS = 8
"""More items than this are found by opening the file: a name has only so much room."""
_TRIES = 100


class _Item(msgspec.Struct, frozen=True):
    op_id: str
    kind: str
    payload: msgspec.Raw
    at: float


class _Post(msgspec.Struct, frozen=True):
    """What one file holds."""

    key: SessionKey
    items: tuple[_Item, ...]


def post(root: Folder, owners: Owners, key: SessionKey, items: Sequence[Posted]) -> int:
    """Leave items durably, and tell the holder; return how many were new."""
    wanted = {item.op_id: item for item in reversed(items)}  # the first of each id
    path = session_path(key)
    with root.make(*path) as folder:
        inbox = inbox_name(_life(folder, key))
        with folder.make(inbox) as box:
            new = _leave(box, key, [one for one in items if wanted[one.op_id] is one])
        if new:
            # Whoever made these folders may have died before they were durable.
            root.sync_path(*path, inbox)
        lease = read_lease(folder, newest_epoch(folder))  # now, so that no holder is missed
    if lease is not None and not lease.deleted:
        owners.tell(lease.owner, key)
    return new


def _leave(box: Folder, key: SessionKey, items: Sequence[Posted]) -> int:
    for _ in range(_TRIES):
        names = _names(box)
        waiting = {tag for name in names for tag in _tags(box, name)}
        new = [item for item in items if _tag(item.op_id) not in waiting]
        if not new:
            return 0
        number = max(map(_number, names), default=0) + 1
        post = _Post(key, tuple(map(_stored, new)))
        if box.publish(_name(number, post), sealed(post)):
            return len(new)
    message = f"{box.path}: others were faster {_TRIES} times"
    raise OSError(message)


def take(writer: Writer, limit: int) -> list[Posted]:
    """Return what waits, oldest first, as the session's holder."""
    with writer.lock:
        writer.require_mine()
        found: dict[str, Posted] = {}
        with contextlib.suppress(FileNotFoundError), _box(writer) as box:
            for name in _names(box):
                for item in _read(writer, box, name):
                    found.setdefault(item.op_id, _posted(item))
                if len(found) >= limit:
                    break
        writer.rest()
    return list(found.values())[:limit]


def look(root: Folder, key: SessionKey, epoch: int, limit: int) -> list[Posted]:
    """Return what waits, to somebody who only reads: a damaged post stays where it is.

    Raises:
        LeaseLostError: The epoch is not the newest.
        CorruptRecordError: A post is damaged.

    """
    found: dict[str, Posted] = {}
    try:
        folder = root.enter(*session_path(key))
    except FileNotFoundError:
        raise lost(key, epoch) from None
    with folder:
        lease = read_lease(folder, newest_epoch(folder))
        if lease is None or lease.epoch != epoch or lease.deleted:
            raise lost(key, epoch)
        with (
            contextlib.suppress(FileNotFoundError),
            folder.enter(inbox_name(_life(folder, key))) as box,
        ):
            for name in _names(box):
                for item in _readable(key, box, name):
                    found.setdefault(item.op_id, _posted(item))
                if len(found) >= limit:
                    break
    return list(found.values())[:limit]


def _readable(key: SessionKey, box: Folder, name: str) -> tuple[_Item, ...]:
    data = box.read(name)
    if data is None:
        return ()
    post = unsealed(data, _Post)
    if post is None:
        path = f"{box.path}/{name}"
        message = f"{path} is damaged: open the session once, and it is put into quarantine"
        raise CorruptRecordError(message, key=str(key), path=path)
    return post.items


def settle(writer: Writer, op_ids: Collection[str]) -> None:
    """Remove items, as the session's holder."""
    done = frozenset(op_ids)
    tags = frozenset(map(_tag, done))
    with writer.lock:
        writer.require_mine()
        with contextlib.suppress(FileNotFoundError), _box(writer) as box:
            for name in _names(box):
                if not tags.isdisjoint(_tags(box, name)):
                    _settle(writer, box, name, done)
        writer.rest()


def waits_in(folder: Folder) -> SessionKey | None:
    """Return the session of a folder if something waits for it; the posts say whose they are."""
    with contextlib.suppress(OSError, FormatError):  # one bad session hides no other
        for name in filter(inbox_life, folder.names()):
            with folder.enter(name) as box:
                posts = (unsealed(box.read(one), _Post) for one in _names(box))
                key = next((post.key for post in posts if post is not None), None)
            if key is not None and inbox_name(_life(folder, key)) == name:
                return key
    return None


def _settle(writer: Writer, box: Folder, name: str, done: Collection[str]) -> None:
    items = _read(writer, box, name)
    left = tuple(item for item in items if item.op_id not in done)
    if len(left) == len(items):
        return
    post = _Post(writer.key, left)
    rest = _name(_number(name), post)
    if left and rest == name:
        box.replace(name, sealed(post))
        return
    if left:  # first the rest under its own name: what is there twice is taken once
        box.publish(rest, sealed(post))
    box.remove(name)


def _box(writer: Writer) -> Folder:
    folder = writer.folder()
    return folder.enter(inbox_name(_life(folder, writer.key)))


def _life(folder: Folder, key: SessionKey) -> int:
    """Return the epoch that a session's life begins with: the present one's, or the next."""
    lease: LeaseFile | None = read_lease(folder, newest_epoch(folder))
    if lease is None:
        return 1
    require_key(folder, key, lease)
    return lease.since


def _read(writer: Writer, box: Folder, name: str) -> tuple[_Item, ...]:
    data = box.read(name)
    if data is None:
        return ()
    post = unsealed(data, _Post)
    if post is not None:
        return post.items
    path = f"{box.path}/{name}"
    _log.warning("a post is damaged, it was put into quarantine", extra={"path": path})
    with writer.folder().make(QUARANTINE) as quarantine:
        box.rename(name, f"{box.path.rpartition('/')[2]}.{name}", quarantine)
    return ()


# names


def _names(box: Folder) -> list[str]:
    return sorted(filter(_NAME.match, box.names()))


def _name(number: int, post: _Post) -> str:
    many = len(post.items) > _MOST_TAGS
    tags = "many" if many else ".".join(_tag(item.op_id) for item in post.items)
    return f"{number:012d}-{tags}.json"


def _number(name: str) -> int:
    return int(name[:12])


def _tag(op_id: str) -> str:
    return hashlib.sha256(op_id.encode("utf-8", "surrogatepass")).hexdigest()[:_TAG]


def _tags(box: Folder, name: str) -> list[str]:
    found = _NAME.match(name)
    if found is not None and found[2] != "many":
        return found[2].split(".")
    post = unsealed(box.read(name), _Post)
    return [] if post is None else [_tag(item.op_id) for item in post.items]


# items


def _stored(item: Posted) -> _Item:
    return _Item(item.op_id, item.kind, msgspec.Raw(item.payload), item.posted_at)


def _posted(item: _Item) -> Posted:
    return Posted(item.op_id, item.kind, bytes(item.payload), item.at)
