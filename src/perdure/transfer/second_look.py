"""Looking again before a session is called damaged.

What reads a session without a lease reads its documents, its log and its blobs one after the other.
A program that writes, prunes, renames or forgets it meanwhile can make them look as if they did not
fit together. So a look that found something wrong counts only if the session, and those that it was
forked from, were the same before and after it; otherwise it is taken again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio

from perdure.errors import PerdureError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.session.stored import followed
from perdure.store import Store

T = TypeVar("T")

PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds before each further look."""


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
    for pause in PAUSES:
        before = await moment_of(store, key)
        try:
            seen = await look()
        except StoreUnavailableError:  # it may be in the middle of a takeover
            pass
        except PerdureError:
            if before == await moment_of(store, key):
                raise
        else:
            if not is_wrong(seen) or before == await moment_of(store, key):
                return seen
        await anyio.sleep(pause)
    return await look()


async def moment_of(store: Store, key: SessionKey) -> list[Any]:
    """Return marks that change with every change of a session, or of one that it is a fork of."""
    marks: list[Any] = []
    above: SessionKey | None = key
    try:
        while above is not None and above not in marks:  # a damaged store's may be a circle
            holder = await store.holder(above)
            manifest = (await store.read_documents(above, ())).manifest
            lease = None if holder is None else (holder.epoch, holder.deleted)
            marks += [above, lease, manifest, await store.head(above)]
            base = await followed(store).base_of(above)
            above = None if base is None else base.parent
    except PerdureError as error:
        marks.append(str(error))
    return marks
