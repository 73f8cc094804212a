"""Leases of a file store, and their owners: the right to write a session, and who has it.

Acquiring publishes a higher epoch by a hard link, which only one process can create, and appends
an epoch record that seals the predecessor's log: a late append of the old holder lands after the
seal and does not count. No process waits for a stopped holder, and none writes to, truncates or
continues another epoch's segment.

The order matters, and is checked against a model (tests/properties). Fencing rests on two
facts: `lease-<E+1>.json` is published before anything of E is sealed, and a holder removes
lower leases in ascending order. So reading ``E+1 is absent``, then ``E is mine``, proves that no
takeover had happened at the first of the two reads.

A draft's lease says so. It is hidden until ``lease-<E>.published`` is there; its remover first
creates ``lease-<E>.dropped``, and only then looks for the other mark. Its holder looks the
other way around. So not both continue, and neither needs to wait.

``owners/<id>.lock`` is locked as long as its process lives, which separates live owners from dead
ones at once for every process on the machine. ``<id>.json`` has the heartbeat's counter, for
observers that cannot test the lock. ``<id>.wanted/`` is the mailbox: at most one file for each
session and kind of request, so a repeated request rewrites the same file. An owner creates its
files before it acquires anything, so an id without a lock file belongs to no live owner.

Blocking, except for `Owners.wait_for_request`: each function is part of one call into a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Collection
from typing import Literal, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import TEMPORARY, Folder, FolderWatch, watch_folder
from perdure._lib.ids import first_beat
from perdure._lib.locks import LockedFile, is_held, unheld
from perdure._lib.platform import boot_id, host_name
from perdure.errors import ConfigError, CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.manifest import newer_format
from perdure.store import Draft, HeartbeatRequests, LeaseState
from perdure.stores.file import segments
from perdure.stores.file.documents import remove_below, remove_owned
from perdure.stores.file.layout import (
    DRAFT,
    LEASE,
    LOG,
    MANIFESTS,
    MARKS,
    OWNERS,
    PUBLISHED,
    RELEASED,
    encode_name,
    epoch_in,
    sealed,
    segment_of,
    session_path,
    unsealed,
)

FORMAT = 2
"""The newest format of a lease: for sessions that are or were drafts, or begin elsewhere."""

RequestKind = Literal["handover", "mail"]

_MAILBOX = ".wanted"
_MAIL = "mail-"
_MIN_POLL, _MAX_POLL = 0.02, 0.25
"""Seconds between two polls without a folder watch: right after a request, and when idle."""
_LOCK = ".lock"
_HEARTBEAT = ".json"
_MAX_REMOVALS = 50
_MAX_BEATS = 1000
_STALE = 600.0
"""Seconds after which an unfinished file counts as abandoned."""


class FileOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of an owner, as leases record it."""

    owner: str
    host: str
    pid: int
    boot: str
    """The machine's boot id: the lock of an owner on another boot proves nothing here."""


class _Beat(msgspec.Struct, frozen=True):
    owner: str
    beat: int


class Owners:
    """This store's entry among the owners, and its view of the others.

    A read-only store has no entry of its own.
    """

    def __init__(self, root: Folder, owner: str, *, local: bool, read_only: bool = False) -> None:
        self.me: FileOwner = FileOwner(
            owner=owner, host=host_name(), pid=os.getpid(), boot=boot_id()
        )
        self._local = local
        self._name = encode_name(owner)
        self._beat = first_beat()
        self._folder = _owners_folder(root) if read_only else root.make(OWNERS)
        self._mailbox: Folder | None = None
        self._watch: FolderWatch | None = None
        self._pause = _MIN_POLL
        self._lock_file: LockedFile | None = None
        if read_only:
            return
        try:
            try:
                self._lock_file = LockedFile(self._folder, self._name + _LOCK)
            except BlockingIOError:
                raise ConfigError(
                    f"owner id {owner!r} is in use by another process or store object at "
                    f"{self._folder.path}: leave owner out, or give each its own",
                    owner=owner,
                ) from None
            self._write_beat()
            self._mailbox = self._folder.make(self._name + _MAILBOX)
            self._watch = watch_folder(self._mailbox.path)
            self._sweep()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove this owner's files: from now on it counts as dead."""
        lock_file, self._lock_file = self._lock_file, None
        if self._watch is not None:
            self._watch.drop()
        if self._mailbox is not None:
            self._mailbox.close()
        # The lock goes last: until then no other process cleans up after this owner.
        if lock_file is not None:
            try:
                self._remove_files(self._name)
            except OSError:
                lock_file.let_go()  # the next store to open removes what is left
            else:
                lock_file.remove()
        self._folder.close()

    # heartbeat and mailbox

    def heartbeat(self) -> HeartbeatRequests:
        """Increment the counter, drain the mailbox, and read the other owners' counters."""
        self._beat += 1
        self._write_beat()
        if self._watch is not None:
            self._watch.drain()  # first: a request that arrives meanwhile wakes us again
        handovers: list[SessionKey] = []
        mail: list[SessionKey] = []
        for name in self._requests():
            assert self._mailbox is not None  # it has a request
            key = unsealed(self._mailbox.read(name), SessionKey)
            # A request that is rewritten in between asks for the same: its name is made from its
            # content.
            self._mailbox.remove(name)
            if key is not None:
                (mail if name.startswith(_MAIL) else handovers).append(key)
        own_name = self._name + _HEARTBEAT
        names = [
            name for name in self._folder.names() if name.endswith(_HEARTBEAT) and name != own_name
        ]
        beats = [unsealed(self._folder.read(name), _Beat) for name in names[:_MAX_BEATS]]
        counters = {beat.owner: beat.beat for beat in beats if beat}
        return HeartbeatRequests(tuple(handovers), tuple(mail), counters)

    def _requests(self) -> list[str]:
        if self._mailbox is None:
            return []
        return [name for name in self._mailbox.names() if not name.startswith(".")]

    async def wait_for_request(self, timeout: float) -> None:
        """Return when there may be a request, or after ``timeout`` seconds."""
        with anyio.move_on_after(timeout):
            if self._watch is not None:
                with contextlib.suppress(anyio.BusyResourceError):  # another task waits as well
                    await self._watch.wait()
                    return
            while not await anyio.to_thread.run_sync(self._requests, abandon_on_cancel=True):
                await anyio.sleep(self._pause)
                self._pause = min(self._pause * 1.25, _MAX_POLL)
            self._pause = _MIN_POLL

    def wake_waiter(self) -> None:
        """Wake the task in `wait_for_request`; on the event loop, before `close`."""
        if self._watch is not None:
            self._watch.close()

    def send(self, owner: str, key: SessionKey, kind: RequestKind) -> None:
        """Put a request into an owner's mailbox; a dead owner may have none."""
        data = sealed(key)
        digest = hashlib.sha256(data).hexdigest()
        name = f"{_MAIL if kind == 'mail' else ''}{digest}.json"
        with (
            contextlib.suppress(FileNotFoundError),
            self._folder.enter(encode_name(owner) + _MAILBOX) as mailbox,
        ):
            mailbox.replace(name, data, durable=False)

    def _write_beat(self) -> None:
        beat = sealed(_Beat(self.me.owner, self._beat))
        self._folder.replace(self._name + _HEARTBEAT, beat, durable=False)

    # the others

    def heartbeat_of(self, owner: str) -> int:
        """Return an owner's heartbeat counter, 0 if it has none."""
        beat = unsealed(self._folder.read(encode_name(owner) + _HEARTBEAT), _Beat)
        return beat.beat if beat else 0

    def is_alive(self, owner: str, boot: str) -> bool | None:
        """Return whether an owner is alive, None if only its heartbeat can show it."""
        if owner == self.me.owner:
            return True
        if not owner:
            return None
        same_boot = bool(boot) and boot == self.me.boot
        if not same_boot and not self._local:
            return None
        if boot and self.me.boot and not same_boot:
            return False  # this machine has rebooted since
        return is_held(self._folder, encode_name(owner) + _LOCK)

    def remove_stale_temporary(self) -> None:
        """Remove unfinished files of interrupted heartbeats."""
        before = time.time() - _STALE
        for name in self._folder.names():
            if name.startswith(".") and name.endswith(TEMPORARY):
                status = self._folder.stat(name)
                if status is not None and status.st_mtime < before:
                    self._folder.remove(name)

    def _sweep(self) -> None:
        """Remove the files of owners that are known to be dead."""
        self.remove_stale_temporary()
        if not self._local:
            return
        own_name = self._name + _LOCK
        locks = [name for name in self._folder.names() if name.endswith(_LOCK) and name != own_name]
        for lock in unheld(self._folder, locks):
            self._remove_files(lock.removesuffix(_LOCK))

    def _remove_files(self, name: str) -> None:
        for _ in range(_MAX_REMOVALS):  # other owners may still write requests
            with (
                contextlib.suppress(FileNotFoundError),
                self._folder.enter(name + _MAILBOX) as mailbox,
            ):
                for request in mailbox.names():
                    mailbox.remove(request)
            if self._folder.remove_folder(name + _MAILBOX):
                break
        self._folder.remove(name + _HEARTBEAT)


def _owners_folder(root: Folder) -> Folder:
    """Return the owners' folder; in a copy that lacks it, a folder without owners."""
    try:
        return root.enter(OWNERS)
    except FileNotFoundError:
        return root.enter()


# Leases: acquiring, reading and fencing


class LeaseFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of ``lease-<epoch>.json``."""

    format: int
    key: SessionKey
    epoch: int
    owner: str
    host: str = ""
    pid: int = 0
    boot: str = ""
    at: float = 0.0
    since: int = 1
    """The epoch that this generation of the session began with; older ones were deleted."""
    deleted: bool = False
    """Read of a draft that is not published, it is True as well."""
    draft: Draft | None = None
    published: bool = False
    """True if the draft was published in an earlier epoch."""
    inbox: int = 0
    """The epoch that its inbox is named after, if that is not ``since``."""
    aside: bool = False
    """True if older generations were damaged: what they left is set aside, not removed."""

    @property
    def inbox_generation(self) -> int:
        """The epoch that its inbox is named after."""
        return self.inbox or self.since

    @property
    def is_draft(self) -> bool:
        """True for a draft that is not published."""
        return self.deleted and self.draft is not None


class Fence(msgspec.Struct, frozen=True):
    """The proof that an epoch is still the newest: the identity of this holder's lease file."""

    epoch: int
    own: str
    next: str
    inode: int
    modified: int

    def is_valid(self, folder: Folder) -> bool:
        """Return whether no takeover had happened when this was called."""
        if folder.has(self.next):
            return False
        own = folder.stat(self.own)
        # A suspended process may publish an epoch that was used before: that is another file.
        return own is not None and (own.st_ino, own.st_mtime_ns) == (self.inode, self.modified)


def newest_epoch(folder: Folder, names: Collection[str] | None = None) -> int:
    """Return the highest epoch ever published in a session's folder, 0 for none.

    *names* are those in the folder, if they were listed already.
    """
    names = folder.names() if names is None else names
    newest = max(map(LEASE.epoch, names), default=0)
    if newest:
        return newest
    # A copy made without the leases: its epochs still may not be reused.
    epochs = [epoch_in(name, MANIFESTS) for name in names]
    if LOG in names:
        with contextlib.suppress(FileNotFoundError), folder.enter(LOG) as log:
            epochs += [epoch for epoch, _ in filter(None, map(segment_of, log.names()))]
    return max(epochs, default=0)


class NewestLease(NamedTuple):
    """The newest lease of a session, as of a listing of its folder."""

    epoch: int
    """The highest one ever published, 0 for none."""
    lease: LeaseFile | None
    """None if it is missing or damaged."""
    names: list[str]

    @property
    def since(self) -> int:
        """The epoch that the session's current generation began with."""
        return 1 if self.lease is None else self.lease.since

    @property
    def deleted(self) -> bool:
        """True if there is no session for readers: it was deleted, or is a draft."""
        return self.lease is not None and self.lease.deleted


def newest_lease(folder: Folder, key: SessionKey | None = None) -> NewestLease:
    """Return a session's newest lease: the only way to learn which of its lives is the current one.

    Raises:
        CorruptRecordError: It is damaged, and is of a draft that is not published; or it is of
            another session than *key*.

    """
    while True:
        names = folder.names()
        epoch = newest_epoch(folder, names)
        lease = read_lease(folder, epoch, names) if epoch else None
        name = LEASE.name(epoch)
        if lease is not None or name not in names or folder.has(name):
            if lease is not None and key is not None:
                require_key(folder, key, lease)
            return NewestLease(epoch, lease, names)
        # Its successor removed it after we had listed it, and is there by now.


def read_lease(folder: Folder, epoch: int, names: Collection[str]) -> LeaseFile | None:
    """Return a lease, None if it is missing or damaged; *names* are those in the folder.

    Raises:
        CorruptRecordError: It is damaged, and is of a draft that is not published.

    """
    data = folder.read(LEASE.name(epoch))
    lease = unsealed(data, LeaseFile)
    if PUBLISHED.name(epoch) in names:
        return lease
    if lease is None and data is not None and DRAFT.name(epoch) in names:
        path = f"{folder.path}/{LEASE.name(epoch)}"
        raise CorruptRecordError(
            f"{path} is damaged: it is of a copy that was not finished; remove its folder, "
            "and copy again",
            path=path,
        )
    if lease is not None and lease.draft is not None and not lease.published:
        return msgspec.structs.replace(lease, deleted=True)
    return lease


def lease_state(root: Folder, key: SessionKey, owners: Owners) -> LeaseState | None:
    """Return who holds, or last held, a session; None if it never had a holder."""
    with contextlib.suppress(FileNotFoundError), root.enter(*session_path(key)) as folder:
        epoch, lease, names = newest_lease(folder)
        return state_of(folder, key, epoch, lease, names, owners)
    return None


def state_of(
    folder: Folder,
    key: SessionKey,
    epoch: int,
    lease: LeaseFile | None,
    names: Collection[str],
    owners: Owners,
) -> LeaseState | None:
    """Return who holds a session by its newest lease, and by the names in its folder."""
    if not epoch:
        return None
    released = RELEASED.name(epoch) in names
    if lease is None:
        return LeaseState(epoch, "", released=released or LEASE.name(epoch) not in names)
    require_key(folder, key, lease)
    released = released or (lease.deleted and not lease.is_draft)
    # Once it is released, its owner is not looked at.
    return LeaseState(
        epoch,
        lease.owner,
        released=released,
        alive=None if released else owners.is_alive(lease.owner, lease.boot),
        beat=0 if released else owners.heartbeat_of(lease.owner),
        deleted=lease.deleted,
        host=lease.host,
        pid=lease.pid,
        draft=lease.draft,
    )


def require_key(folder: Folder, key: SessionKey, lease: LeaseFile) -> None:
    """Raise unless a folder's lease is of this session, in a supported format."""
    if lease.format > FORMAT:
        raise newer_format(folder.path, lease.format, FORMAT, path=folder.path)
    segments.require_key(folder.path, lease.key, key)


def create_mark(folder: Folder, name: str) -> None:
    """Create an empty file: without a temporary one, which a successor could clean up."""
    os.close(folder.open(name, os.O_WRONLY | os.O_CREAT))


def release_unused(folder: Folder, epoch: int) -> None:
    """Release an epoch that this process published and will not use."""
    with contextlib.suppress(OSError):  # otherwise it expires
        folder.replace(RELEASED.name(epoch), b"", durable=False)


def publish(folder: Folder, lease: LeaseFile) -> tuple[Fence, list[str]] | None:
    """Publish an epoch; return its fence, and the names in the folder after that.

    None if another process published it, or a higher one.
    """
    epoch = lease.epoch
    lease = msgspec.structs.replace(lease, at=time.time())
    name, data = LEASE.name(epoch), sealed(lease)
    try:
        while not folder.publish(name, data):
            if newest_epoch(folder) != epoch - 1:
                return None
            # No rival: the previous holder's cleanup took our temporary file for a dead one's.
        status, names = folder.stat(name), folder.names()
        # A higher epoch was published in between: this one never held the session.
        if status is None or newest_epoch(folder, names) != epoch:
            return None
    except OSError:
        with contextlib.suppress(OSError):
            if folder.read(name) == data:  # published despite the error
                release_unused(folder, epoch)
        raise
    return Fence(epoch, name, LEASE.name(epoch + 1), status.st_ino, status.st_mtime_ns), names


def remove_lower_leases(folder: Folder, epoch: int, names: Collection[str]) -> None:
    """Remove the leases below this epoch, lowest first: fences rely on that order."""
    for lower in sorted(filter(None, map(LEASE.epoch, names))):
        if lower < epoch:
            folder.remove(LEASE.name(lower))
    remove_below(folder, names, epoch, MARKS)


def mark_deleted(
    folder: Folder, key: SessionKey, epoch: int, me: FileOwner, *, keep_posts: bool = False
) -> bool:
    """Publish the epoch that deletes a session, then remove what it owned.

    False if another epoch was published before: then nothing was removed.
    """
    end = epoch + 1
    lease = LeaseFile(
        format=1, key=key, epoch=end, since=end + 1, deleted=True, **msgspec.structs.asdict(me)
    )
    previous = read_lease(folder, epoch, folder.names())
    # Posts are to an id, and outlive a draft.
    if keep_posts or (previous is not None and previous.is_draft):
        inbox = 1 if previous is None else previous.inbox_generation
        lease = msgspec.structs.replace(lease, format=FORMAT, inbox=inbox)
    # First: where it is killed after this, the next holder finishes it.
    if publish(folder, lease) is None:
        return False
    remove_owned(folder, key, below=end, evidence=True, inbox=lease.inbox)
    remove_lower_leases(folder, end, folder.names())
    return True
