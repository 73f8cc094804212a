"""Access of the commands to a store: it must exist, and is opened to read unless they write."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import perdure
from perdure.autosave.options import Shutdown
from perdure.cli.output import SessionOption
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    SessionNotFoundError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey, keyring_of
from perdure.session.internals import parts_of
from perdure.session.manager import SessionManager
from perdure.session.options import require_no_backup
from perdure.session.session import SessionView
from perdure.store import (
    Store,
    SupportsIntegrityCheck,
    SupportsLocalPath,
    capability,
    open_read_only,
)
from perdure.stores.delegate import DelegatingStore
from perdure.stores.wrapped.encrypted import EncryptedStore

C = TypeVar("C")


def existing(url: str | None) -> Store:
    """Return the store of a URL, not open yet.

    Raises:
        StoreUnavailableError: The store does not exist yet.

    """
    store = perdure.store_for(url)
    local = capability(store, SupportsLocalPath)
    place = None if local is None else local.local_path
    if place is not None and not Path(place).exists():
        cure = (
            "name one (--help says how), or set PERDURE_URL"
            if url is None
            else "see that the path is right"
        )
        raise StoreUnavailableError(
            f"there is no store at {place}, where the first connect makes one: {cure}", path=place
        )
    return store


@asynccontextmanager
async def opened(
    url: str | None, *, write: bool = False, make: bool = False
) -> AsyncGenerator[Store, None]:
    """Open a store, read-only unless *write*, and close it; one that exists, unless *make*."""
    store = perdure.store_for(url) if make else existing(url)
    await (store.open() if write else open_read_only(store))
    try:
        await require_key(store)
        await require_no_backup(store)
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def managed(store: Store, *, write: bool = False) -> AsyncGenerator[SessionManager, None]:
    """Connect a manager for a command, read-only unless *write*.

    It has no autosave and no signal handlers: commands save explicitly, and Ctrl-C ends them.
    """
    manager = perdure.connect(
        store, autosave=None, shutdown=Shutdown(signals=False), read_only=not write
    )
    async with manager as sessions:
        await require_key(store)
        try:
            yield sessions
        except SessionNotFoundError as error:  # with a cure for the command line
            raise no_session(error.facts["key"], store) from error


async def require_key(store: Store) -> None:
    """Refuse to read an encrypted store without its key.

    Its blobs would count as garbage, and its keys as documents that no log accounts for.

    Raises:
        ConfigError: The store is encrypted, and was opened without a key.

    """
    if any(isinstance(layer, EncryptedStore) for layer in layers(store)):
        return
    for tenant in sorted({"", *await _tenants(store)}):
        if await is_there(store, keyring_of(tenant)):
            raise ConfigError(
                f"{store.location} is encrypted: put encrypted+ before its URL, and set "
                "PERDURE_KEY or PERDURE_KEY_FILE",
                option="store",
            )


async def _tenants(store: Store) -> list[str]:
    try:
        return await store.tenants()
    except CorruptRecordError:
        tenants = await found_keys(store)
        if tenants is None:
            raise
        return [key.tenant for key in tenants]


def layers(store: Store) -> Iterator[Store]:
    """Yield a store and the stores that it wraps, outermost first."""
    inner: Store | None = store
    while inner is not None:
        yield inner
        inner = (
            inner.inner if isinstance(inner, DelegatingStore) else getattr(inner, "_store", None)
        )


def below(store: Store, protocol: type[C]) -> C | None:
    """Return the outermost store of the wrapped ones that has a protocol; None if none has it."""
    found = (capability(layer, protocol) for layer in layers(store))
    return next((layer for layer in found if layer is not None), None)


async def found_keys(store: Store) -> list[SessionKey] | None:
    """List the sessions that are readable although the listing is damaged; None if unsupported."""
    database = below(store, SupportsIntegrityCheck)
    return None if database is None else await database.readable_keys()


async def is_there(store: Store, key: SessionKey) -> bool:
    """Return whether the session exists, damaged or not."""
    try:
        return await store.head(key) > 0
    except CorruptRecordError:
        return True


def no_session(key: object, store: Store) -> SessionNotFoundError:
    """Return the error for a session that does not exist."""
    return SessionNotFoundError(
        f"there is no session {key} in {store.location}: `perdure ls` lists what is there",
        key=str(key),
    )


async def load_view(sessions: SessionManager, id: str, where: SessionOption) -> SessionView:
    """Load a session's view, without a lease.

    Raises:
        SessionNotFoundError: The session does not exist.

    """
    view = await parts_of(sessions).load(where.key(id))
    if view is None:
        raise no_session(where.key(id), existing(where.store))
    return view
