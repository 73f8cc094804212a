"""Inbox: any process may post to a session; its holder appends each post exactly once.

Taking goes in three steps: the items are read and left where they are; their records enter the
log, with one that names them; once that is durable, the items are removed. After a kill
in between, the next holder reads the same items, skips those in the log, and continues.
Turns never wait for it: the store is asked while turns run, and the records
are appended between two of them.

What goes wrong is tried again later and later. A post that is refused each time (it cannot be
read, or not be appended) does not block later ones, and finally becomes a dead letter.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, final

import anyio
import msgspec

from perdure._lib.backoff import backoff
from perdure._lib.ids import random_id
from perdure._lib.logs import log_facts
from perdure.errors import (
    ConfigError,
    InvalidArgumentError,
    LeaseLostError,
    NotStorableError,
    SessionError,
)
from perdure.memory.documents import TAKEN_IDS, InboxTakenPayload
from perdure.records.json import encode
from perdure.records.keys import SessionKey, require_list
from perdure.records.posts import checked_key, key_of, new_posts, op_ids
from perdure.records.records import TAKEN, Entry
from perdure.session.base import entry_of
from perdure.session.contents import check_readable, check_sizes
from perdure.session.events import Posted
from perdure.session.runtime import Runtime, wait_idle
from perdure.store import DeadLetter, InboxLimit, PendingItem

if TYPE_CHECKING:
    from perdure.session.base import SessionBase


log: logging.Logger = logging.getLogger("perdure")

AT_ONCE = 100
"""Items that are asked for in one call, unless a single post has more."""


TRIES = 5
"""Attempts at a post before it is set aside."""

PAUSE = 0.25
LONGEST_PAUSE = 15.0
"""Seconds until the next try at most: after the first, and after many."""

MOST_REASON = 2000
"""Characters of why a post was refused."""


_ALL = ""
"""Name of the failure to take any post of a session; a post's key has characters."""


class _Failure(msgspec.Struct, frozen=True):
    """A failure to take posts: all of a session's, or one whole post."""

    tries: int
    """In a row."""
    reason: str
    due: float
    """Time of the next attempt."""
    items: tuple[PendingItem, ...] = ()
    """The post's items."""


class PostReceipt(msgspec.Struct, frozen=True):
    """Receipt of a durable post, whose records will be in the log once."""

    key: str
    """Post with the same key again, and nothing is posted twice."""
    new: int
    """Items that were not waiting already."""


@final
class Inbox:
    """The inboxes of the sessions that one manager holds, and the way to those of all others."""

    def __init__(self, runtime: Runtime, sessions: Mapping[SessionKey, SessionBase]) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._random = Random().random
        self._taking: dict[SessionKey, bool] = {}
        """Sessions whose posts are being taken, and whether to look again afterwards."""
        self._failures: dict[SessionKey, dict[str, _Failure]] = {}
        """Errors of posts that could not be taken at the last try, by session and post key."""
        self._timers: dict[SessionKey, float] = {}
        """Time of each one's next attempt without a new post."""
        self._dead: Counter[SessionKey] = Counter()
        """Items that were set aside here."""

    async def post(self, key: SessionKey, items: Sequence[Any], op: str | None) -> PostReceipt:
        """Leave items for a session, durably.

        Raises:
            InvalidArgumentError: The key is invalid, or there is nothing to post.
            NotStorableError: An item cannot be stored; nothing was posted.
            InboxFullError: Too much waits for the session; nothing was posted.

        """
        if not items:
            raise InvalidArgumentError(
                "post: there are no items: give at least one", option="items"
            )
        entries = tuple([entry_of(item, self._runtime.registry) for item in items])
        return await self.post_entries(key, entries, op)

    async def post_entries(
        self, key: SessionKey, entries: tuple[Entry, ...], op: str | None
    ) -> PostReceipt:
        """Leave encoded items for a session, as `post` does."""
        runtime = self._runtime
        op = random_id() if op is None else checked_key(op)
        check_sizes(key, entries, runtime.max_record_bytes, most=runtime.store_record_bytes)
        now = time.time()
        posted = [
            PendingItem(op_id, entry.kind, entry.payload, now)
            for op_id, entry in zip(op_ids(op, len(entries)), entries, strict=True)
        ]
        limit = InboxLimit(runtime.limits.inbox_items, runtime.limits.inbox_bytes)
        return PostReceipt(op, await runtime.store.enqueue(key, posted, limit=limit))

    # dead letters

    async def dead_letters(self, key: SessionKey) -> list[DeadLetter]:
        """Return a session's dead letters: by their times, those of one post together."""
        letters = await self._runtime.store.dead_letters(key)
        return sorted(letters, key=lambda letter: (letter.at, letter.item.key, letter.item.place))

    async def retry_dead_letters(self, key: SessionKey, keys: Collection[str] | None) -> int:
        """Post dead letters again, after the pending items; return how many items.

        Killed between the two steps, a letter is still there; its op id was posted, and the
        holder takes it once.

        Raises:
            ConfigError: There is none of a key, or it cannot be read.

        """
        letters = await self._letters(key, keys)
        for letter in letters:
            if letter.item.damage:
                raise ConfigError(
                    f"the dead letter {letter.item.key!r} of {key} cannot be read, so trying again "
                    f"would not help: {letter.item.damage}; drop it when it is not needed",
                    key=letter.item.key,
                )
        store = self._runtime.store
        for _, post in groupby(letters, lambda letter: letter.item.key):
            items = [letter.item for letter in post]
            await store.enqueue(key, items)
            await store.ack(key, None, [item.op_id for item in items])
        self._dead[key] = max(self._dead[key] - len(letters), 0)
        return len(letters)

    async def drop_dead_letters(self, key: SessionKey, keys: Collection[str] | None) -> int:
        """Remove dead letters; return how many items.

        Raises:
            ConfigError: There is none of a key.

        """
        letters = await self._letters(key, keys)
        if letters:
            await self._runtime.store.ack(key, None, [letter.item.op_id for letter in letters])
        self._dead[key] = max(self._dead[key] - len(letters), 0)
        return len(letters)

    async def _letters(self, key: SessionKey, keys: Collection[str] | None) -> list[DeadLetter]:
        letters = await self.dead_letters(key)
        if keys is None:
            return letters
        require_list("keys", keys)
        known_keys = {letter.item.key for letter in letters}
        for letter_key in keys:
            if letter_key not in known_keys:
                raise ConfigError(
                    f"session {key} has no dead letter {letter_key!r}: `perdure inbox` lists "
                    "those that there are",
                    key=letter_key,
                )
        return [letter for letter in letters if letter.item.key in keys]

    def undelivered(self) -> dict[str, str]:
        """Say for which sessions that are open here posts cannot be taken, and why."""
        reasons: dict[str, str] = {}
        for key, failures in self._failures.items():
            if key in self._sessions:
                name = _ALL if _ALL in failures else next(iter(failures))
                what = "posts" if name == _ALL else f"the post {name!r}"
                reasons[str(key)] = f"{what} cannot be taken: {failures[name].reason}"
        return reasons

    def set_aside(self) -> dict[str, int]:
        """Say how many dead letters each session has got here, as far as they are still there."""
        return {str(key): count for key, count in self._dead.items() if count}

    # the holder's side

    async def begin(self, session: SessionBase) -> None:
        """Take the pending items of a session that is being opened and not yet returned."""
        if await self._guarded(session, opening=True):
            self._runtime.host.spawn(self.attend, session.key)

    def again(self) -> None:
        """Try once more at once where the store failed: it answers again."""
        for key, failures in self._failures.items():
            if _ALL in failures:
                self._runtime.host.spawn(self.attend, key, True)

    async def attend(self, key: SessionKey, now: bool = False) -> None:  # noqa: FBT001, FBT002  # for spawn
        """Take what waits for a session that is open here, between two of its turns."""
        runtime = self._runtime
        await wait_idle(runtime.pending_loads, key)
        session = self._sessions.get(key)
        if session is None or runtime.draining:
            self._succeeded(key, [_ALL])
            return
        if key in self._taking:
            self._taking[key] = True  # what is under way may have looked before this was posted
            return
        failure = self._failures.get(key, {}).get(_ALL)
        if failure is not None and not now and runtime.clock() < failure.due:
            return  # its own retry comes
        self._taking[key] = False
        try:
            await self._guarded(session)
        finally:
            looks_again = self._taking.pop(key)
        if looks_again:
            runtime.host.spawn(self.attend, key)

    async def _guarded(self, session: SessionBase, *, opening: bool = False) -> bool:
        """Take what waits; what fails is tried again later. Return whether something came."""
        key = session.key
        try:
            came = await self._take_all(session, opening=opening)
        except (LeaseLostError, SessionError):
            self._succeeded(key, [_ALL])
            return False  # the next opener continues with it
        except Exception as error:  # noqa: BLE001  # reported by health(), and tried again
            failure = self._failed(key, _ALL, str(error) or type(error).__name__)
            log_facts(log, logging.WARNING, "taking posts failed", error, session=str(key))
            self._later(key, failure.due)
            return False
        self._succeeded(key, [_ALL])
        if key in self._failures:
            self._later(key, min(failure.due for failure in self._failures[key].values()))
        return came

    def _failed(
        self, key: SessionKey, name: str, reason: str, post: Sequence[PendingItem] = ()
    ) -> _Failure:
        """Note a failure: it is tried again later and later."""
        failures = self._failures.setdefault(key, {})
        tries = failures[name].tries + 1 if name in failures else 1
        pause = backoff(tries, base=PAUSE, cap=LONGEST_PAUSE, chance=self._random())
        failures[name] = _Failure(tries, reason, self._runtime.clock() + pause, tuple(post))
        return failures[name]

    def _succeeded(self, key: SessionKey, names: Iterable[str]) -> None:
        """Forget failures of posts that were taken, or of all."""
        failures = self._failures.get(key, {})
        for name in names:
            failures.pop(name, None)
        if not failures:
            self._failures.pop(key, None)

    def _later(self, key: SessionKey, due: float) -> None:
        """Attend to a session at a time, unless that is going to happen anyway by then."""
        if self._timers.get(key, inf) <= due:
            return
        self._timers[key] = due
        self._runtime.host.spawn(self._wait_and_attend, key, due)

    async def _wait_and_attend(self, key: SessionKey, due: float) -> None:
        await anyio.sleep(max(due - self._runtime.clock(), 0))
        if self._timers.get(key) == due:
            del self._timers[key]
        await self.attend(key)

    async def _take_all(self, session: SessionBase, *, opening: bool) -> bool:
        """Take what waits, in three steps each time; only begin, where a session is opened."""
        store, key = self._runtime.store, session.key
        now = self._runtime.clock()
        failures = self._failures.get(key, {})
        passed = {
            name: len(failure.items) for name, failure in failures.items() if failure.due > now
        }
        came = False
        while True:
            # 1. Read what waits, and leave it there.
            items, more = await self._waiting(session, passed)
            if not items:
                break
            # 2. Append it, with a record that names it.
            done = await self._enter(session, items, passed, opening=opening)
            if opening:
                return bool(done)
            if done:
                came = True
                # 3. Make that durable, and only then remove it from the inbox.
                await self._runtime.saver.save(session._tracked)
                # Not what was discarded while we waited: that is to be taken again.
                received, durable = session._contents.document.taken, session.durable_version
                done = [op_id for op_id in done if op_id in received and received[op_id] <= durable]
                await store.ack(key, session.epoch, done)
            if not more:
                break
        await self._reject(session)
        return came

    async def _waiting(
        self, session: SessionBase, passed: dict[str, int]
    ) -> tuple[list[PendingItem], bool]:
        """Return what waits and is not passed over, as whole posts; and whether there is more.

        A post of more items than are known after a kill is taken in parts.
        """
        store = self._runtime.store
        size = AT_ONCE
        while True:
            limit = size + sum(passed.values())
            pending = await store.receive(session.key, session.epoch, limit=limit)
            items = [item for item in pending if item.key not in passed]
            if len(pending) < limit:
                return items, False
            is_one_post = len(items) >= size and items[0].key == items[-1].key
            if size >= TAKEN_IDS or not is_one_post:  # else it may continue
                break
            size = min(2 * size, TAKEN_IDS)
        last = items[-1].key if items else None
        whole_posts = [item for item in items if item.key != last]
        return whole_posts or items, True

    async def _enter(
        self,
        session: SessionBase,
        items: Sequence[PendingItem],
        passed: dict[str, int],
        *,
        opening: bool,
    ) -> list[str]:
        """Append what is not in the log yet, and return the op ids of what is."""
        # No turn runs where a session is being opened; and what is in the log already adds nothing.
        if opening or all(item.op_id in session._contents.document.taken for item in items):
            return self._append(session, items, passed)
        await session._turns.enter(session.key)
        try:
            return self._append(session, items, passed)
        finally:
            session._turns.leave()

    def _append(
        self, session: SessionBase, items: Sequence[PendingItem], passed: dict[str, int]
    ) -> list[str]:
        received = session._contents.document.taken
        done = [item.op_id for item in items if item.op_id in received]
        keys: list[str] = []
        for post in new_posts(items, received):
            ops = [item.op_id for item in post]
            reason = self._refusal(session, post)
            if reason is not None:
                failure = self._failed(session.key, post[0].key, reason, post)
                log_facts(
                    log,
                    logging.WARNING,
                    "a post cannot be taken",
                    session=str(session.key),
                    post=post[0].key,
                    tries=failure.tries,
                    reason=reason,
                )
                passed[post[0].key] = len(post)
                continue
            done += ops
            keys.append(post[0].key)
        self._succeeded(session.key, map(key_of, done))
        if keys:
            posted = Posted(key=session.key, posts=tuple(keys), version=session.version)
            self._runtime.hooks.emit(posted)
        return done

    def _refusal(self, session: SessionBase, post: Sequence[PendingItem]) -> str | None:
        """Append a post, or return why it cannot be."""
        damaged = next((item for item in post if item.damage), None)
        if damaged is not None:
            return damaged.damage
        for item in post:
            try:
                check_readable(item.kind, item.payload, self._runtime.registry)
            except Exception as error:  # noqa: BLE001  # an upcast is the application's own code
                return f"a {item.kind} cannot be decoded: {type(error).__name__}: {error}"
        entries = [Entry(item.kind, item.payload) for item in post]
        ops = [item.op_id for item in post]
        try:
            session._accept(
                (*entries, Entry(TAKEN, encode(InboxTakenPayload(ops, at=time.time()))))
            )
        except NotStorableError as error:  # accepted elsewhere, under other limits
            return str(error)
        return None

    async def _reject(self, session: SessionBase) -> None:
        """Set aside what was tried often enough."""
        key = session.key
        for name, failure in [*self._failures.get(key, {}).items()]:
            if failure.tries < TRIES or not failure.items:
                continue
            reason, now = failure.reason[:MOST_REASON], time.time()
            letters = [DeadLetter(item, reason, failure.tries, now) for item in failure.items]
            await self._runtime.store.ack(key, session.epoch, dead=letters)
            self._succeeded(key, [name])
            self._dead[key] += len(letters)
            log_facts(
                log,
                logging.ERROR,
                "a post was set aside as a dead letter",
                session=str(key),
                post=name,
                tries=failure.tries,
                reason=reason,
            )
