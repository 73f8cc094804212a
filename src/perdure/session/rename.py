"""Renaming a session: a copy that remembers the old name, then the end of the old one."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, final

from perdure.errors import (
    SessionError,
    SessionNotFoundError,
)
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.records import (
    FORK,
)
from perdure.session.delete import Forgetter
from perdure.session.exclusive import (
    ExclusiveAccess,
    HeldSession,
    Terms,
    require_different,
)
from perdure.store import DeadLetter, first_record

if TYPE_CHECKING:
    pass
from perdure.session.fork import _QUIET, Fork, ForkBuilder, exists


@final
class Renamer:
    """Give sessions other names."""

    def __init__(self, access: ExclusiveAccess, forker: ForkBuilder, forgetter: Forgetter) -> None:
        self._access = access
        self._forker = forker
        self._forgetter = forgetter
        self._store = access.store

    async def rename(self, old: SessionKey, new: SessionKey, terms: Terms) -> Fork:
        """Give a session another name; what is unsaved of it here is saved, and it is closed.

        Raises:
            SessionError: The new name is taken.
            SessionNotFoundError: There is no session of the old name.
            LeaseHeldError: Another process keeps holding it, or one of its forks.

        """
        require_different(old, new, "rename")
        session = self._access.runtime.sessions.get(old)
        if session is not None:
            await self._access.lifecycle.close(session)
        async with self._forgetter.settling(), AsyncExitStack() as stack:
            for key in sorted((old, new)):
                await stack.enter_async_context(self._access.exclusive(key))
            if new in self._access.runtime.sessions:
                raise exists(new)
            created = (await self._access.begun(new)).base
            if await self._store.inner.head(old) == 0:
                if created is None or created.moved != old:
                    raise SessionNotFoundError(f"there is no session {old}", key=str(old))
                return Fork(new, old, created.at)
            hold = await stack.enter_async_context(self._access.held(old, terms))
            base = await self._copied(hold, new, created)
            await self._forgetter.end(hold, terms, lambda: self._forward(hold, new))
            return Fork(new, old, base.at)

    async def _copied(self, old: HeldSession, new: SessionKey, created: Origin | None) -> Origin:
        """Return the base of the copy, made now or before."""
        begun = await self._access.begun(new)
        if begun.goes_on and (created is None or created.moved != old.key):
            raise exists(new)
        if created is not None:
            if created.moved != old.key:
                raise exists(new)
            if not await self._goes_on(old.key, created.at):
                return created
            if begun.goes_on:
                message = (
                    f"{old.key} was renamed to {new}, and somebody went on under both names: "
                    "delete the one that you do not need"
                )
                raise SessionError(message, key=str(old.key), new=str(new))
            async with self._access.held(new, Terms("raise", 0)) as hold:
                await hold.delete()
        base = await self._forker.own_base(old.key, old.head, moved=old.key)
        async with self._access.held(new, Terms("raise", 0)) as hold:
            await hold.rebase(base)
        return base

    async def _goes_on(self, key: SessionKey, after: int) -> bool:
        log = self._store.read_log(key, after=after)
        return await first_record(log, lambda record: record.kind not in _QUIET) is not None

    async def _forward(self, old: HeldSession, new: SessionKey) -> None:
        """Have what was posted to the old name wait at the new one."""
        waiting = await self._store.take(old.key, old.epoch, limit=1_000_000)
        mail = [item for item in waiting if item.kind != FORK and not item.damage]
        if mail:
            await self._store.post(new, mail)
        if not self._store.capabilities.dead_letters:
            return
        letters = await self._store.dead_letters(old.key)
        now = time.time()
        letters += [DeadLetter(item, item.damage, 0, now) for item in waiting if item.damage]
        if letters:
            async with self._access.held(new, Terms("raise", 0)) as hold:
                await self._store.reject(new, hold.epoch, letters)
