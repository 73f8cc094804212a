"""What a URL says of wrappers: ``encrypted+`` before it, ``compression=`` in its query."""

from __future__ import annotations

from collections.abc import Callable

from perdure.errors import ConfigError
from perdure.store import Store
from perdure.stores.wrapped.compressed import CompressedStore, packing_of
from perdure.stores.wrapped.encrypted import EncryptedStore
from perdure.stores.wrapped.keys import MasterKeys

ENCRYPTED = "encrypted+"
OPTION = "compression="


def peeled(url: str, keys: MasterKeys | None = None) -> tuple[str, Callable[[Store], Store]]:
    """Return the inner store's URL, and what to put around that store.

    With *keys* the store is encrypted, whether the URL says so or not, and by these.

    >>> peeled("sqlite:///x.db?compression=zstd")[0]
    'sqlite:///x.db'

    Raises:
        ConfigError: The key or the compression does not fit.
        MissingExtraError: What a wrapper needs is not installed.

    """
    is_encrypted = url.lower().startswith(ENCRYPTED)
    inner = url[len(ENCRYPTED) :] if is_encrypted else url
    inner, compression = _without_option(inner)
    packing_of(compression)  # a name that nobody knows is refused before any key is read
    if is_encrypted or keys is not None:
        if is_encrypted and ":" not in inner:
            message = f"{ENCRYPTED} stands before no store: use encrypted+file:PATH, for example"
            raise ConfigError(message, option="url")
        master = keys or MasterKeys.from_environment()
        return inner, lambda store: EncryptedStore(store, master, compression=compression)
    return inner, CompressedStore if compression is not None else _plain


def _plain(store: Store) -> Store:
    return store


def _without_option(url: str) -> tuple[str, str | None]:
    before, mark, query = url.rpartition("?")
    if not mark:
        return url, None
    parts = query.split("&")
    found = [part.removeprefix(OPTION) for part in parts if part.startswith(OPTION)]
    if not found:
        return url, None
    rest = "&".join(part for part in parts if not part.startswith(OPTION))
    return (f"{before}?{rest}" if rest else before), found[-1]
