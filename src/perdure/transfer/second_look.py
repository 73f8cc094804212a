"""Looking again before a session is called damaged.

What reads a session without a lease reads its documents, its log and its blobs one after the other.
A program that writes, prunes, renames or forgets it meanwhile can make them look as if they did not
fit together. So a look that found something wrong counts only if the session was the same before
and after it; otherwise it is taken again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio
import msgspec

from perdure.errors import PerdureError, StoreUnavailableError
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.store import Store, first_record
from perdure.transfer.bundle import neutral

T = TypeVar("T")

PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds before each further look."""


class Moment(msgspec.Struct, frozen=True):
    """State of a session that differs after every change, but not after posts and dead letters."""

    epoch: int
    """The newest one; 0 for a session that was never begun."""
    deleted: bool
    head: int
    manifest: Manifest | None
    """Without fields that only its store or its log gives."""
    newest: str = ""
    """Hash of record ``head``, if it was asked for: a store that went back to an earlier state may
    come to the same epoch and head with other records."""


async def moment_of(store: Store, key: SessionKey) -> Moment:
    """Return a session's moment."""
    manifest = (await store.read_documents(key, ())).manifest
    head, holder = await store.head(key), await store.holder(key)
    if manifest is not None:
        manifest = msgspec.structs.replace(neutral(manifest), base=None)
    if holder is None:
        return Moment(0, False, head, manifest)
    return Moment(holder.epoch, holder.deleted, head, manifest)


async def exact_moment_of(store: Store, key: SessionKey) -> Moment:
    """Return a session's moment with the hash of its newest record, which is read for it."""
    moment = await moment_of(store, key)
    log = store.read_log(key, before=moment.head + 1, limit=1, reverse=True)
    record = await first_record(log)
    if record is None:
        return moment
    data = encode([record.seq, record.epoch, record.kind]) + record.payload
    return msgspec.structs.replace(moment, newest=hashlib.sha256(data).hexdigest())


async def look_again(
    store: Store,
    key: SessionKey,
    look: Callable[[], Awaitable[T]],
    *,
    is_wrong: Callable[[T], bool] = lambda _: False,
) -> T:
    """Return what a look at a session saw, or raise what it raised, when nothing disturbed it.

    Args:
        store: The session's store.
        key: The session.
        look: Reads it, and changes nothing that a repetition would change again.
        is_wrong: Says whether what a look saw speaks against the session.

    """
    return await undisturbed(lambda: moment_of(store, key), look, is_wrong)


async def undisturbed(
    moment: Callable[[], Awaitable[object]],
    look: Callable[[], Awaitable[T]],
    is_wrong: Callable[[T], bool],
) -> T:
    """Look again at anything; *moment* returns what differs after every change of it."""
    for pause in PAUSES:
        before = await _seen(moment)
        try:
            seen = await look()
        except StoreUnavailableError:  # it may be in the middle of a takeover
            pass
        except PerdureError:
            if before == await _seen(moment):
                raise
        else:
            if not is_wrong(seen) or before == await _seen(moment):
                return seen
        await anyio.sleep(pause)
    return await look()


async def _seen(moment: Callable[[], Awaitable[object]]) -> object:
    try:
        return await moment()
    except PerdureError as error:
        return str(error)
