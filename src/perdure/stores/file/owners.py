"""Registry of the owners of a file store: a locked file, a heartbeat and a mailbox for each.

``owners/<id>.lock`` is locked as long as its process lives, which separates live owners from dead
ones at once for every process on the machine. ``<id>.json`` has the heartbeat's counter, for
observers that cannot test the lock. ``<id>.wanted/`` is the mailbox: at most one file for each
session and kind of request, so a repeated request rewrites the same file.

An owner creates its files before it acquires anything, so an id without a lock file belongs to no
live owner. Blocking, except for `Mailbox.wait`; each method is one call into a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from typing import Literal, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import TEMPORARY, Folder, FolderWatch, watch_folder
from perdure._lib.ids import first_beat
from perdure._lib.locks import LockedFile, is_held, unheld
from perdure._lib.platform import boot_id, host_name
from perdure.errors import ConfigError
from perdure.records.keys import SessionKey
from perdure.store import HeartbeatRequests
from perdure.stores.file.layout import OWNERS, encode_name, sealed, unsealed

RequestKind = Literal["handover", "mail"]

_MAILBOX = ".wanted"
_MAIL = "mail-"
_MIN_POLL, _MAX_POLL = 0.02, 0.25
"""Seconds between two polls without a folder watch: right after a request, and when idle."""


def send(owners: Folder, owner: str, key: SessionKey, kind: RequestKind) -> None:
    """Put a request into an owner's mailbox; a dead owner may have none."""
    data = sealed(key)
    digest = hashlib.sha256(data).hexdigest()
    name = f"{_MAIL if kind == 'mail' else ''}{digest}.json"
    with (
        contextlib.suppress(FileNotFoundError),
        owners.enter(encode_name(owner) + _MAILBOX) as folder,
    ):
        folder.replace(name, data, durable=False)


@final
class Mailbox:
    """This owner's own mailbox."""

    def __init__(self, owners: Folder, owner: str) -> None:
        self._folder = owners.make(encode_name(owner) + _MAILBOX)
        self._watch: FolderWatch | None = watch_folder(self._folder.path)
        self._pause = _MIN_POLL

    def drain(self) -> HeartbeatRequests:
        """Remove all requests, and return them."""
        if self._watch is not None:
            self._watch.drain()  # first: a request that arrives meanwhile wakes us again
        handovers: list[SessionKey] = []
        mail: list[SessionKey] = []
        for name in self._requests():
            key = unsealed(self._folder.read(name), SessionKey)
            self._folder.remove(name)
            if key is not None:
                (mail if name.startswith(_MAIL) else handovers).append(key)
        return HeartbeatRequests(tuple(handovers), tuple(mail))

    def _requests(self) -> list[str]:
        return [name for name in self._folder.names() if not name.startswith(".")]

    async def wait(self, timeout: float) -> None:
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
        """Wake the waiting task; on the event loop, before `close`."""
        if self._watch is not None:
            self._watch.close()

    def close(self) -> None:
        """Close the folder, which stays on disk."""
        if self._watch is not None:
            self._watch.drop()
        self._folder.close()


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
        self._mailbox: Mailbox | None = None
        self._lock_file: LockedFile | None = None
        if read_only:
            return
        try:
            self._lock_file = self._lock()
            self._write_beat()
            self._mailbox = Mailbox(self._folder, owner)
            self._sweep()
        except BaseException:
            self.close()
            raise
        _open_owners.add(self)

    def _lock(self) -> LockedFile:
        try:
            return LockedFile(self._folder, self._name + _LOCK)
        except BlockingIOError:
            raise ConfigError(
                f"owner id {self.me.owner!r} is in use by another process or store object at "
                f"{self._folder.path}: leave owner out, or give each its own",
                owner=self.me.owner,
            ) from None

    def close(self) -> None:
        """Remove this owner's files: from now on it counts as dead."""
        _open_owners.discard(self)
        lock_file, self._lock_file = self._lock_file, None
        if self._mailbox is not None:
            self._mailbox.close()
        if lock_file is not None:
            try:
                self._remove_files(self._name)
            except OSError:
                lock_file.let_go()  # the next store to open removes what is left
            else:
                lock_file.remove()
        self._folder.close()

    def close_inherited(self) -> None:
        """Close inherited files in a forked child, which must not keep its parent alive."""
        lock_file, self._lock_file = self._lock_file, None
        if lock_file is not None:
            lock_file.let_go()
        if self._mailbox is not None:
            self._mailbox.close()

    # heartbeat and mailbox

    def heartbeat(self) -> HeartbeatRequests:
        """Increment the counter, drain the mailbox, and read the other owners' counters."""
        self._beat += 1
        self._write_beat()
        requests = HeartbeatRequests() if self._mailbox is None else self._mailbox.drain()
        return msgspec.structs.replace(requests, beats=self._others_beats())

    def _others_beats(self) -> dict[str, int]:
        own_name = self._name + _HEARTBEAT
        names = [
            name for name in self._folder.names() if name.endswith(_HEARTBEAT) and name != own_name
        ]
        beats = [unsealed(self._folder.read(name), _Beat) for name in names[:_MAX_BEATS]]
        return {beat.owner: beat.beat for beat in beats if beat}

    async def wait_for_request(self, timeout: float) -> None:
        """Return when there may be a request, or after ``timeout`` seconds."""
        if self._mailbox is not None:
            await self._mailbox.wait(timeout)

    def wake_waiter(self) -> None:
        """Wake the task in `wait_for_request`; on the event loop, before `close`."""
        if self._mailbox is not None:
            self._mailbox.wake_waiter()

    def request_handover(self, owner: str, key: SessionKey) -> None:
        """Ask another owner to hand over a session."""
        send(self._folder, owner, key, "handover")

    def notify_mail(self, owner: str, key: SessionKey) -> None:
        """Notify another owner that items were posted for a session."""
        send(self._folder, owner, key, "mail")

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
            if self._remove_mailbox(name + _MAILBOX):
                break
        self._folder.remove(name + _HEARTBEAT)

    def _remove_mailbox(self, mailbox_name: str) -> bool:
        with contextlib.suppress(FileNotFoundError), self._folder.enter(mailbox_name) as mailbox:
            for name in mailbox.names():
                mailbox.remove(name)
        return self._folder.remove_folder(mailbox_name)


def _owners_folder(root: Folder) -> Folder:
    """Return the owners' folder; in a copy that lacks it, a folder without owners."""
    try:
        return root.enter(OWNERS)
    except FileNotFoundError:
        return root.enter()


_open_owners: weakref.WeakSet[Owners] = weakref.WeakSet()


def _after_fork() -> None:
    for owners in list(_open_owners):
        owners.close_inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
