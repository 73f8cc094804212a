"""Who is alive: one locked file, one heartbeat and one letter box for each owner.

``owners/<id>.lock`` is locked as long as its process lives, which tells the dead from the
living at once to everybody on the machine. ``<id>.json`` has the heartbeat's counter,
for those who cannot ask for the lock. Into ``<id>.wanted/`` others drop their letters.

An owner makes its files before it takes anything, so an id without a lock file belongs
to nobody alive. Blocking; each method is one hop into a thread.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref

import msgspec

from perdure._lib.files import TEMPORARY, Folder
from perdure._lib.platform import boot_id, host_name, try_lock
from perdure.errors import ConfigError
from perdure.model.keys import SessionKey
from perdure.store import Asked
from perdure.stores.file.layout import OWNERS, encode_name
from perdure.stores.file.mailbox import WANTED, Mailbox, send
from perdure.stores.file.sealed import sealed, unsealed

__all__ = ["Owner", "Owners"]

_LOCK = ".lock"
_BEAT = ".json"
_TRIES = 50
_STALE = 600.0
"""Seconds after which nobody goes on writing a file that was begun."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who somebody is, as leases say it."""

    owner: str
    host: str
    pid: int
    boot: str
    """The machine's boot: a lock of another one says nothing here."""


class _Beat(msgspec.Struct, frozen=True):
    owner: str
    beat: int


class Owners:
    """This store's own place among the owners, and its look at the others."""

    def __init__(self, root: Folder, owner: str, *, local: bool) -> None:
        self.me: Owner = Owner(owner=owner, host=host_name(), pid=os.getpid(), boot=boot_id())
        self._local = local
        self._name = encode_name(owner)
        self._beat = 0
        self._folder = root.make(OWNERS)
        self._mailbox: Mailbox | None = None
        try:
            self._lock: int | None = self._take_lock()
            self._write_beat()
            self._mailbox = Mailbox(self._folder, owner)
            self._sweep()
        except BaseException:
            self.close()
            raise
        _open_owners.add(self)

    def _take_lock(self) -> int:
        name = self._name + _LOCK
        for _ in range(_TRIES):  # a prober holds the lock for a moment
            fd = self._folder.open(name, os.O_RDWR | os.O_CREAT)
            if try_lock(fd) is not False:
                found = self._folder.stat(name)
                if found is not None and found.st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)
        message = (
            f"owner id {self.me.owner!r} is in use by another process or store object at "
            f"{self._folder.path}: leave owner out, or give each its own"
        )
        raise ConfigError(message, owner=self.me.owner)

    def close(self) -> None:
        """Let go: from here on this owner counts as dead."""
        _open_owners.discard(self)
        fd, self._lock = getattr(self, "_lock", None), None
        if self._mailbox is not None:
            self._mailbox.close()
        if fd is not None:
            with contextlib.suppress(OSError):  # what stays is swept by the next one who opens
                self._forget(self._name, fd)
        self._folder.close()

    def forked(self) -> None:
        """Close the inherited lock in a forked child, which must not keep its parent alive."""
        fd, self._lock = self._lock, None
        if fd is not None:
            os.close(fd)
        if self._mailbox is not None:
            self._mailbox.close()

    # heartbeat and letters

    def heartbeat(self) -> Asked:
        """Renew the counter, and empty the letter box."""
        self._beat += 1
        self._write_beat()
        return Asked() if self._mailbox is None else self._mailbox.empty()

    async def wait_letter(self, at_most: float) -> None:
        """Return when there may be a letter, or after ``at_most`` seconds."""
        if self._mailbox is not None:
            await self._mailbox.wait(at_most)

    def hush(self) -> None:
        """Wake whoever waits for a letter; on the event loop, before `close`."""
        if self._mailbox is not None:
            self._mailbox.hush()

    def ask(self, owner: str, key: SessionKey) -> None:
        """Ask another owner for a session."""
        send(self._folder, owner, key, "handover")

    def tell(self, owner: str, key: SessionKey) -> None:
        """Tell another owner that something was posted for a session."""
        send(self._folder, owner, key, "mail")

    def _write_beat(self) -> None:
        beat = sealed(_Beat(self.me.owner, self._beat))
        self._folder.replace(self._name + _BEAT, beat, durable=False)

    # the others

    def beat_of(self, owner: str) -> int:
        """Return an owner's heartbeat counter, 0 if it has none."""
        found = unsealed(self._folder.read(encode_name(owner) + _BEAT), _Beat)
        return found.beat if found else 0

    def alive(self, owner: str, boot: str) -> bool | None:
        """Say whether an owner lives, None where only its heartbeat can tell."""
        if owner == self.me.owner:
            return True
        if not owner:
            return None
        same_boot = bool(boot) and boot == self.me.boot
        if not same_boot and not self._local:
            return None
        if boot and self.me.boot and not same_boot:
            return False  # this machine has been started anew since
        return self._locked(encode_name(owner))

    def _locked(self, name: str) -> bool | None:
        try:
            fd = self._folder.open(name + _LOCK, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            # Shared, so that two who ask at once do not take each other for the owner.
            free = try_lock(fd, shared=True)
        finally:
            os.close(fd)
        return None if free is None else not free

    def tidy(self) -> None:
        """Remove what heartbeats that were cut short have left half-written."""
        before = time.time() - _STALE
        for name in self._folder.names():
            if name.startswith(".") and name.endswith(TEMPORARY):
                found = self._folder.stat(name)
                if found is not None and found.st_mtime < before:
                    self._folder.remove(name)

    def _sweep(self) -> None:
        """Remove the files of owners that are dead for certain."""
        self.tidy()
        if not self._local:
            return
        for lock in self._folder.names():
            name = lock.removesuffix(_LOCK)
            if name in {lock, self._name}:
                continue
            with contextlib.suppress(FileNotFoundError):  # somebody else sweeps as well
                fd = self._folder.open(lock, os.O_RDWR)
                # Held while its name goes: a new owner of that name finds out and retries.
                if try_lock(fd) is True:
                    self._forget(name, fd)
                else:
                    os.close(fd)

    def _forget(self, name: str, lock: int) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                with self._folder.enter(name + WANTED) as box:
                    for letter in box.names():
                        box.remove(letter)
                self._folder.remove_folder(name + WANTED)
            self._folder.remove(name + _BEAT)
        except BaseException:
            os.close(lock)
            raise
        self._folder.remove_held(name + _LOCK, lock)


_open_owners: weakref.WeakSet[Owners] = weakref.WeakSet()


def _after_fork() -> None:
    for owners in list(_open_owners):
        owners.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
