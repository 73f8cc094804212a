"""An owner's letter box: what others want of it, a small file each.

``owners/<id>.wanted/`` holds at most one letter for each session and wish: who asks twice
writes the same file again. Blocking, except for the waiting.
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

from perdure._lib.files import TEMPORARY, Folder
from perdure._lib.ids import first_beat
from perdure._lib.locks import LockedFile, is_held, unheld
from perdure._lib.platform import boot_id, host_name
from perdure._lib.watch import FolderWatch, watch_folder
from perdure.errors import ConfigError
from perdure.records.keys import SessionKey
from perdure.store import HeartbeatRequests
from perdure.stores.file.layout import OWNERS, encode_name
from perdure.stores.file.sealed import sealed, unsealed

# An owner's letter box: what others want of it, a small file each


Wish = Literal["handover", "mail"]

WANTED = ".wanted"
_MAIL = "mail-"
_SOON, _LATE = 0.02, 0.25
"""Seconds between two looks where nobody tells: after a letter, and when all is quiet."""


def send(owners: Folder, owner: str, key: SessionKey, wish: Wish) -> None:
    """Drop a letter into an owner's box; one who is gone has none."""
    letter = sealed(key)
    digest = hashlib.sha256(letter).hexdigest()
    name = f"{_MAIL if wish == 'mail' else ''}{digest}.json"
    with contextlib.suppress(FileNotFoundError), owners.enter(encode_name(owner) + WANTED) as box:
        box.replace(name, letter, durable=False)


@final
class Mailbox:
    """This owner's own box."""

    def __init__(self, owners: Folder, owner: str) -> None:
        self._box = owners.make(encode_name(owner) + WANTED)
        self._watch: FolderWatch | None = watch_folder(self._box.path)
        self._pause = _SOON

    def empty(self) -> HeartbeatRequests:
        """Take all letters out, and return what they say."""
        if self._watch is not None:
            self._watch.drain()  # first: a letter that comes while we look is told again
        handovers: list[SessionKey] = []
        mail: list[SessionKey] = []
        for name in self._letters():
            key = unsealed(self._box.read(name), SessionKey)
            self._box.remove(name)
            if key is not None:
                (mail if name.startswith(_MAIL) else handovers).append(key)
        return HeartbeatRequests(tuple(handovers), tuple(mail))

    def _letters(self) -> list[str]:
        return [name for name in self._box.names() if not name.startswith(".")]

    async def wait(self, at_most: float) -> None:
        """Return when there may be a letter, or after ``at_most`` seconds."""
        with anyio.move_on_after(at_most):
            if self._watch is not None:
                with contextlib.suppress(anyio.BusyResourceError):  # somebody else waits as well
                    await self._watch.wait()
                    return
            while not await anyio.to_thread.run_sync(self._letters, abandon_on_cancel=True):
                await anyio.sleep(self._pause)
                self._pause = min(self._pause * 1.25, _LATE)
            self._pause = _SOON

    def hush(self) -> None:
        """Wake whoever waits; on the event loop, before `close`."""
        if self._watch is not None:
            self._watch.close()

    def close(self) -> None:
        """Let go of the folder, which stays."""
        if self._watch is not None:
            self._watch.drop()
        self._box.close()


# Who is alive: one locked file, one heartbeat and one letter box for each owner
#
# ``owners/<id>.lock`` is locked as long as its process lives, which tells the dead from the living
# at once to everybody on the machine. ``<id>.json`` has the heartbeat's counter, for those who
# cannot ask for the lock. Into ``<id>.wanted/`` others drop their letters.
# An owner makes its files before it takes anything, so an id without a lock file belongs to nobody
# alive. Blocking; each method is one hop into a thread.


_LOCK = ".lock"
_BEAT = ".json"
_TRIES = 50
_OTHERS = 1000
_STALE = 600.0
"""Seconds after which nobody goes on writing a file that was begun."""


class FileOwner(msgspec.Struct, frozen=True, kw_only=True):
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
    """This store's own place among the owners, and its look at the others.

    Whoever only reads has no place of its own.
    """

    def __init__(self, root: Folder, owner: str, *, local: bool, read_only: bool = False) -> None:
        self.me: FileOwner = FileOwner(
            owner=owner, host=host_name(), pid=os.getpid(), boot=boot_id()
        )
        self._local = local
        self._name = encode_name(owner)
        self._beat = first_beat()
        self._folder = _found(root) if read_only else root.make(OWNERS)
        self._mailbox: Mailbox | None = None
        self._held: LockedFile | None = None
        if read_only:
            return
        try:
            self._held = self._take()
            self._write_beat()
            self._mailbox = Mailbox(self._folder, owner)
            self._sweep()
        except BaseException:
            self.close()
            raise
        _open_owners.add(self)

    def _take(self) -> LockedFile:
        try:
            return LockedFile(self._folder, self._name + _LOCK)
        except BlockingIOError:
            message = (
                f"owner id {self.me.owner!r} is in use by another process or store object at "
                f"{self._folder.path}: leave owner out, or give each its own"
            )
            raise ConfigError(message, owner=self.me.owner) from None

    def close(self) -> None:
        """Let go: from here on this owner counts as dead."""
        _open_owners.discard(self)
        held, self._held = self._held, None
        if self._mailbox is not None:
            self._mailbox.close()
        if held is not None:
            try:
                self._forget(self._name)
            except OSError:
                held.let_go()  # what stays is swept by the next one who opens
            else:
                held.remove()
        self._folder.close()

    def forked(self) -> None:
        """Close what was inherited in a forked child, which must not keep its parent alive."""
        held, self._held = self._held, None
        if held is not None:
            held.let_go()
        if self._mailbox is not None:
            self._mailbox.close()

    # heartbeat and letters

    def heartbeat(self) -> HeartbeatRequests:
        """Renew the counter, empty the letter box, and look at the counters of others."""
        self._beat += 1
        self._write_beat()
        asked = HeartbeatRequests() if self._mailbox is None else self._mailbox.empty()
        return msgspec.structs.replace(asked, beats=self._beats())

    def _beats(self) -> dict[str, int]:
        mine = self._name + _BEAT
        names = [name for name in self._folder.names() if name.endswith(_BEAT) and name != mine]
        found = [unsealed(self._folder.read(name), _Beat) for name in names[:_OTHERS]]
        return {one.owner: one.beat for one in found if one}

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
        return is_held(self._folder, encode_name(owner) + _LOCK)

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
        mine = self._name + _LOCK
        locks = [name for name in self._folder.names() if name.endswith(_LOCK) and name != mine]
        for lock in unheld(self._folder, locks):
            self._forget(lock.removesuffix(_LOCK))

    def _forget(self, name: str) -> None:
        for _ in range(_TRIES):  # others may be writing letters still
            if self._remove_box(name + WANTED):
                break
        self._folder.remove(name + _BEAT)

    def _remove_box(self, box: str) -> bool:
        with contextlib.suppress(FileNotFoundError), self._folder.enter(box) as letters:
            for letter in letters.names():
                letters.remove(letter)
        return self._folder.remove_folder(box)


def _found(root: Folder) -> Folder:
    """Return the owners' folder to look at; in a copy that left it out, one without them."""
    try:
        return root.enter(OWNERS)
    except FileNotFoundError:
        return root.enter()


_open_owners: weakref.WeakSet[Owners] = weakref.WeakSet()


def _after_fork() -> None:
    for owners in list(_open_owners):
        owners.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
