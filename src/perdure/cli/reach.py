"""How commands reach a store: only one that is there, and without touching what it holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import perdure
from perdure.errors import CorruptRecordError, SessionNotFoundError, StoreUnavailableError
from perdure.model.keys import SessionKey
from perdure.session.manager import SessionManager
from perdure.session.options import Shutdown
from perdure.store import Holder, Store

__all__ = ["existing", "holder_of", "is_there", "managed", "no_session", "opened"]


def existing(url: str | None) -> Store:
    """Return the store of a URL, not open yet; one that would have to be made is refused.

    Raises:
        StoreUnavailableError: Nobody has made this store yet.

    """
    store = perdure.store_for(url)
    place: str | None = getattr(store, "local_path", None)
    if place is not None and not Path(place).exists():
        message = f"there is no store at {place}: name one with --store or PERDURE_URL"
        raise StoreUnavailableError(message, path=place)
    return store


@asynccontextmanager
async def opened(url: str | None) -> AsyncGenerator[Store, None]:
    """Open a store that is there, and close it in the end."""
    store = existing(url)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


def managed(store: Store) -> SessionManager:
    """Return a manager for a command: it saves when it is told to, and Ctrl-C ends it."""
    return perdure.connect(store, autosave=None, shutdown=Shutdown(signals=False))


async def is_there(store: Store, key: SessionKey) -> bool:
    """Say whether there is such a session, damaged or not."""
    try:
        return await store.head(key) > 0
    except CorruptRecordError:
        return True


def no_session(key: SessionKey, store: Store) -> SessionNotFoundError:
    """Return the error for an id that nobody has used."""
    message = f"there is no session {key} in {store.location}: `perdure ls` lists what is there"
    return SessionNotFoundError(message, key=str(key))


def holder_of(holder: Holder | None) -> str:
    """Say in words who may write a session."""
    if holder is None or holder.released:
        return "nobody"
    who = f"process {holder.pid} on {holder.host}" if holder.pid else f"owner {holder.owner}"
    if holder.alive is False:
        return f"nobody ({who} ended without releasing it)"
    return f"{who}" if holder.alive else f"{who}, or nobody if that has ended"
