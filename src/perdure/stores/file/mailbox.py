"""An owner's letter box: what others want of it, a small file each.

``owners/<id>.wanted/`` holds at most one letter for each session and wish: who asks twice
writes the same file again. Blocking, except for the waiting.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Literal, final

import anyio
import anyio.to_thread

from perdure._lib.files import Folder
from perdure._lib.watching import FolderWatch, watch_folder
from perdure.model.keys import SessionKey
from perdure.store import Asked
from perdure.stores.file.layout import encode_name
from perdure.stores.file.sealed import sealed, unsealed

__all__ = ["WANTED", "Mailbox", "send"]

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

    def empty(self) -> Asked:
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
        return Asked(tuple(handovers), tuple(mail))

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
