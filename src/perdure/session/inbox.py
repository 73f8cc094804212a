"""The inbox: anybody may post to a session; its holder takes what was posted, exactly once.

Taking goes in three steps: the items are read and left where they are; their records enter the
log, with one that names them; once that is durable, the items are removed. Whatever is killed
in between, the next holder reads the same items, finds in the log which it has, and goes on.
Nothing of it holds a turn up: the store is asked while turns go on, and the records
are appended between two of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import msgspec

from perdure._lib.ids import random_id
from perdure.codec.json import encode
from perdure.errors import ConfigError, LeaseLostError, NotStorableError, PerdureError, SessionError
from perdure.lease.inbox import checked_key, key_of, op_ids, to_take
from perdure.memory.documents import TAKEN_IDS, Taken
from perdure.model.keys import SessionKey
from perdure.model.records import TAKEN, Entry
from perdure.session.entries import check_sizes, entry_of
from perdure.session.events import SessionPosted
from perdure.session.flights import landed
from perdure.session.runtime import Runtime
from perdure.store import Posted

if TYPE_CHECKING:
    from perdure.session.session import Session

__all__ = ["Inbox", "PostReceipt"]

log: logging.Logger = logging.getLogger("perdure")

AT_ONCE = 100
"""Items that are asked for in one call, unless a single post has more."""


class PostReceipt(msgspec.Struct, frozen=True):
    """How a post went: it is durable, and its records will be in the log once."""

    key: str
    """Post with the same key again, and nothing is posted twice."""
    new: int
    """Items that were not waiting already."""


@final
class Inbox:
    """The inboxes of the sessions that one manager holds, and the way to those of all others."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._taking: set[SessionKey] = set()
        self._again: set[SessionKey] = set()

    async def post(self, key: SessionKey, items: Sequence[Any], op: str | None) -> PostReceipt:
        """Leave items for a session, durably.

        Raises:
            ConfigError: The key does not fit, or there is nothing to post.
            NotStorableError: An item cannot be stored; nothing was posted.

        """
        runtime = self._runtime
        op = random_id() if op is None else checked_key(op)
        if not items:
            raise ConfigError("post: there are no items: give at least one", option="items")
        entries = tuple([entry_of(item, runtime.registry) for item in items])
        check_sizes(key, entries, runtime.max_record_bytes)
        now = time.time()
        posted = [
            Posted(op_id, entry.kind, entry.payload, now)
            for op_id, entry in zip(op_ids(op, len(entries)), entries, strict=True)
        ]
        return PostReceipt(op, await runtime.store.post(key, posted))

    # the holder's side

    async def begin(self, session: Session) -> None:
        """Take what waits for a session that is being opened; nobody has it yet."""
        if await self._take(session, opening=True):
            self._runtime.host.spawn(self.attend, session.key)

    def again(self) -> None:
        """Try once more where something went wrong."""
        for key in self._again:
            self._runtime.host.spawn(self.attend, key)
        self._again.clear()

    async def attend(self, key: SessionKey) -> None:
        """Take what waits for a session that is open here, between two of its turns."""
        runtime = self._runtime
        await landed(runtime.flights, key)
        session = runtime.sessions.get(key)
        if session is None or runtime.draining:
            return
        if key in self._taking:
            self._again.add(key)  # what is under way may have looked before this was posted
            return
        self._taking.add(key)
        try:
            while await self._take(session):
                pass
        finally:
            self._taking.discard(key)
        if key in self._again:
            self.again()

    async def _take(self, session: Session, *, opening: bool = False) -> bool:
        """Take what waits, in three steps; return whether to go on."""
        store, key = self._runtime.store, session.key
        try:
            items, more = await self._waiting(session)
            if not items:
                return False
            done = await self._enter(session, items, opening=opening)
            if opening:
                return True
            await self._runtime.saver.save(session.tracked)
            # Not what was discarded while we waited: that is to be taken again.
            taken, durable = session._contents.taken, session.durable_version
            done = [op_id for op_id in done if op_id in taken and taken[op_id] <= durable]
            await store.settle(key, session.epoch, done)
        except (LeaseLostError, SessionError):
            return False  # whoever opens it next goes on with it
        except PerdureError as error:
            log.warning("taking posts failed", extra={"session": str(key)}, exc_info=error)
            self._again.add(key)
            return False
        return bool(done) and more

    async def _waiting(self, session: Session) -> tuple[list[Posted], bool]:
        """Return what waits, as whole posts, and whether there may be more.

        A post of more items than are known after a kill is taken in parts.
        """
        store, limit = self._runtime.store, AT_ONCE
        items = await store.take(session.key, session.epoch, limit=limit)
        while _is_cut(items, limit) and limit < TAKEN_IDS:
            limit = min(2 * limit, TAKEN_IDS)
            items = await store.take(session.key, session.epoch, limit=limit)
        if len(items) < limit:
            return items, False
        last = key_of(items[-1].op_id)
        whole = [item for item in items if key_of(item.op_id) != last]
        return whole or items, True

    async def _enter(
        self, session: Session, items: Sequence[Posted], *, opening: bool
    ) -> list[str]:
        """Append what is not in the log yet, and return the op ids of what is."""
        if opening or all(item.op_id in session._contents.taken for item in items):
            return self._append(session, items)
        await session._turns.enter(str(session.key))
        try:
            return self._append(session, items)
        finally:
            session._turns.leave()

    def _append(self, session: Session, items: Sequence[Posted]) -> list[str]:
        taken = session._contents.taken
        done = [item.op_id for item in items if item.op_id in taken]
        keys: list[str] = []
        for post in to_take(items, taken):
            ops = [item.op_id for item in post]
            entries = [Entry(item.kind, item.payload, end=False) for item in post]
            note = Entry(TAKEN, encode(Taken(ops, at=time.time())))
            try:
                session.accept((*entries, note))
            except NotStorableError as error:  # accepted elsewhere, under other limits
                extra = {"session": str(session.key), "post": key_of(ops[0])}
                log.exception("a post stays where it is", extra=extra, exc_info=error)
                continue
            done += ops
            keys.append(key_of(ops[0]))
        if keys:
            facts = SessionPosted(str(session.key), tuple(keys), session.version)
            self._runtime.hooks.emit("posted", facts)
        return done


def _is_cut(items: Sequence[Posted], limit: int) -> bool:
    """Say whether all that was asked for is of one post, which may go on."""
    full = len(items) == limit
    return full and key_of(items[0].op_id) == key_of(items[-1].op_id)
