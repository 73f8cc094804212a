"""Wrappers named in a store URL: the prefix ``encrypted+`` and the option ``compression=``."""

from __future__ import annotations

from collections.abc import Callable

from perdure.errors import ConfigError
from perdure.store import Store
from perdure.stores.wrapped.compressed import CompressedStore, compression_for
from perdure.stores.wrapped.encrypted import EncryptedStore
from perdure.stores.wrapped.keys import MasterKeys

ENCRYPTED = "encrypted+"
OPTION = "compression="


def unwrap_url(url: str, keys: MasterKeys | None = None) -> tuple[str, Callable[[Store], Store]]:
    """Return the inner store's URL, and the function that wraps that store.

    With *keys* the store is encrypted with them, whether or not the URL asks for encryption.

    >>> unwrap_url("sqlite:///x.db?compression=zstd")[0]
    'sqlite:///x.db'

    Raises:
        ConfigError: The key or the compression is invalid.
        MissingExtraError: A package that a wrapper needs is not installed.

    """
    is_encrypted = url.lower().startswith(ENCRYPTED)
    inner = url[len(ENCRYPTED) :] if is_encrypted else url
    inner, compression = _without_option(inner)
    compression_for(compression)  # refuse an unknown name before reading any key
    if is_encrypted or keys is not None:
        if is_encrypted and ":" not in inner:
            raise ConfigError(
                f"{ENCRYPTED} has no store after it: use encrypted+file:PATH, for example",
                option="url",
            )
        masters = keys or MasterKeys.from_environment()
        return inner, lambda store: EncryptedStore(store, masters, compression=compression)
    return inner, CompressedStore if compression is not None else lambda store: store


def _without_option(url: str) -> tuple[str, str | None]:
    base, question_mark, query = url.rpartition("?")
    if not question_mark:
        return url, None
    options = query.split("&")
    values = [option.removeprefix(OPTION) for option in options if option.startswith(OPTION)]
    if not values:
        return url, None
    others = "&".join(option for option in options if not option.startswith(OPTION))
    return (f"{base}?{others}" if others else base), values[-1]
