"""The composition root: a URL in, a session manager out. Only here are backends chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure._lib.options import meant, names_options
from perdure.errors import ConfigError

if TYPE_CHECKING:
    from perdure.autosave.options import Autosave, EngineOptions, Shutdown
    from perdure.formats.state import StateStorage
    from perdure.lease import LeaseOptions
    from perdure.session.manager import SessionManager
    from perdure.session.options import Limits
    from perdure.session.retention import Retention
    from perdure.store import Store
    from perdure.stores.wrapped.keys import MasterKeys

__all__ = ["connect", "store_for"]

URL_VARIABLE = "PERDURE_URL"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*")
_LOGIN = re.compile(r"(?![A-Za-z]:[/\\])[^/\\]*:.*@", re.DOTALL)
"""A user and a password before a host; a drive letter is none."""
_OPTIONS = re.compile(r"\?[A-Za-z_]+=")
_ENCRYPTED = "encrypted+"
_COMPRESSION = "compression="


class _Default:
    """The marker of an option that was not given."""

    def __repr__(self) -> str:
        return "default"


DEFAULT: Any = _Default()


@names_options
def connect(
    url: str | os.PathLike[str] | Store | StateStorage | None = None,
    *,
    autosave: Autosave | None = DEFAULT,
    lease: LeaseOptions = DEFAULT,
    shutdown: Shutdown = DEFAULT,
    limits: Limits = DEFAULT,
    types: Sequence[Any] = (),
    engine: EngineOptions | None = None,
    config: str | os.PathLike[str] | None = None,
    read_only: bool = False,
    retention: Retention | None = None,
) -> SessionManager:
    """Return a session manager, to enter with ``async with`` or to await.

    Args:
        url: Where sessions are kept: a path or ``file:~/agents``, ``memory:``, a store
            object, or a storage of whole states for one session. None: the variable
            ``PERDURE_URL``, else a folder of the user's.
        autosave: When sessions save themselves; None switches the timers off, and turns,
            ``save`` and closing still save. Not given: the variables ``PERDURE_AUTOSAVE…``,
            else the defaults of `Autosave`.
        lease: How the lease of a session is acquired and kept.
        shutdown: How it stops.
        limits: How large things may become.
        types: The application's own types that may be stored.
        engine: Settings for rare needs.
        config: A persistence.yaml, for what neither arguments nor the environment say: its
            ``store``, ``autosave`` and ``encryption``. It is read at once.
        read_only: Only read: sessions are listed and loaded, and every call that would write raises
            a SessionError. A folder or a database is then neither made nor written to, so it may
            be on a disk that is full or mounted read-only.
        retention: What stays: within minutes, and then every hour or two, this process does what
            `SessionManager.prune` does, for every tenant. None: nothing is removed until that is
            called.

    Raises:
        ConfigError: The URL, an option, or the file is invalid.
        MissingExtraError: What the file asks for is not installed.

    """
    from perdure.autosave.options import Shutdown, autosave_from
    from perdure.lease import LeaseOptions
    from perdure.session.manager import SessionManager
    from perdure.session.options import Limits

    if read_only and retention is not None:
        message = "a retention removes what is stored: leave it out, or read_only"
        raise ConfigError(message, option="retention")
    store, declared = _declared(url, config)
    if read_only:
        from perdure.stores.delegate import ReadOnlyStore

        store = ReadOnlyStore(store)
    return SessionManager(
        store,
        autosave=autosave_from(os.environ, *declared) if autosave is DEFAULT else autosave,
        lease=LeaseOptions() if lease is DEFAULT else lease,
        shutdown=Shutdown() if shutdown is DEFAULT else shutdown,
        limits=Limits() if limits is DEFAULT else limits,
        types=types,
        engine=engine,
        retention=retention,
    )


def _declared(
    url: Any, config: str | os.PathLike[str] | None
) -> tuple[Store, tuple[Autosave | None, ...]]:
    """Return the store of a URL, or else of a file, and when that says that sessions save."""
    if config is None:
        return store_for(url), ()
    import msgspec

    from perdure.config.persistent_config import declared_at, keys_of, url_of

    declared = declared_at(config)
    place = url or os.environ.get(URL_VARIABLE) or url_of(declared, os.environ)
    autosave = declared.declaration.autosave
    store_said = () if isinstance(autosave, msgspec.UnsetType) else (autosave,)
    return _sealed(place, keys_of(declared, os.environ)), store_said


def _sealed(place: Any, keys: MasterKeys | None) -> Store:
    """Return the store of a place, encrypted if there are keys."""
    if keys is None:
        return store_for(place)
    from perdure.stores.wrapped.encrypted import EncryptedStore

    if isinstance(place, str):
        inner, around = unwrap_url(place, keys)
        return around(_store_at(inner))
    store = store_for(place)
    return store if isinstance(store, EncryptedStore) else EncryptedStore(store, keys)


def store_for(url: str | os.PathLike[str] | Store | StateStorage | None = None) -> Store:
    """Return the store that a URL names, not open yet.

    Raises:
        ConfigError: The URL names no store that perdure knows.

    """
    if url is None:
        url = os.environ.get(URL_VARIABLE) or None
    if url is None:
        return _file(None)
    if isinstance(url, os.PathLike):
        return _file(_no_database(os.fspath(url)))
    if not isinstance(url, str):
        return _object(url)
    if url.lower().startswith(_ENCRYPTED) or (":" in url and "?" in url):
        url, around = unwrap_url(url)
        return around(_store_at(url))
    return _store_at(url)


def _store_at(url: str) -> Store:
    before, slashes, _ = url.partition("//")
    if slashes and before.lower() in _SCHEMES:
        message = f"a colon is missing in {before + '//'!r}: did you mean {before + '://'!r}?"
        raise ConfigError(message, option="url")
    scheme, colon, location = url.partition(":")
    if not colon and scheme in _SCHEMES:
        message = (
            f"{scheme!r} is a kind of store, not a place: did you mean {scheme + ':'!r}? A folder "
            f"of that name is {'file:' + scheme!r}"
        )
        raise ConfigError(message, option="url")
    if not colon or len(scheme) == 1:  # a path, or one with a drive letter
        return _file(_no_database(_plain_path(url, "file:./")))
    make = _SCHEMES.get(scheme.lower())
    if make is None and scheme.lower().startswith(("redis", "valkey")):
        from perdure.stores.redis.connection import SEVERAL

        make = _redis(scheme) if SEVERAL.fullmatch(scheme.lower()) else None
    if make is None:
        is_shown = _SCHEME.fullmatch(scheme)  # else it may hold a password
        shown = repr(scheme) if is_shown else "what is before its colon"
        question = meant(scheme.lower(), [*_SCHEMES], cutoff=0.75) if is_shown else ""
        message = (
            f"no store is known by {shown}: {f'{question} Use' if question else 'use'} a path, or "
            "one of "
            f"{', '.join(f'{name}:' for name in _SCHEMES)} "
            "(for a path with a colon in it, file:PATH)"
        )
        raise ConfigError(message, option="url")
    return make(location)


def _no_database(path: str) -> str:
    """Return a path as it is; refuse one that names a database, unless it is a folder.

    Raises:
        ConfigError: It does.

    """
    if path.lower().endswith((".db", ".sqlite", ".sqlite3")) and not Path(path).is_dir():
        message = (
            f"a path names a folder of files, and {path!r} looks like a database: write "
            f"{'sqlite:///' + path!r}, or {'file:' + path!r} for a folder of that name"
        )
        raise ConfigError(message, option="url")
    return path


def _plain_path(path: str, plain: str) -> str:
    """Return a path as it is; refuse what looks like an address, without quoting it.

    Raises:
        ConfigError: It holds a login, or options.

    """
    if _LOGIN.match(path.lstrip("/")):
        message = (
            "this looks like the address of a server, with a password, and not like a path: begin "
            f"it with one of {', '.join(f'{name}:' for name in _SCHEMES)}, or write {plain}PATH "
            "where a file or folder has this name"
        )
        raise ConfigError(message, option="url")
    if _OPTIONS.search(path):
        message = (
            "a path has no options: leave out what is after the ?, or give a pathlib.Path "
            "where a file or folder has this name"
        )
        raise ConfigError(message, option="url")
    return path


def _object(place: Any) -> Store:
    if hasattr(place, "append_many"):
        store: Store = place
        return store
    if hasattr(place, "save") and hasattr(place, "load"):
        from perdure.stores.state import StateStore

        return StateStore(place)
    message = (
        f"{type(place).__name__} is no place for sessions: give a path, a URL, a store, or a "
        "storage with save, load, exists, delete, get_path and get_last_modified"
    )
    raise ConfigError(message, option="url", type=type(place).__name__)


def _file(path: str | None) -> Store:
    from perdure.stores.file import FileStore

    if path is not None and not path:
        raise ConfigError("the path of a file store is empty: use file:PATH, such as file:~/agents")
    return FileStore(path)


def _file_url(location: str) -> Store:
    path = location.removeprefix("//") if location.startswith("///") else location
    if path.startswith("//"):
        message = "this file: URL names a host: a file store is local, use file:/PATH or file:PATH"
        raise ConfigError(message, option="url")
    return _file(_plain_path(path, "file:/./" if path.startswith("/") else "file:./"))


def _memory(location: str) -> Store:
    from perdure.stores.memory import MemoryStore

    if location.strip("/"):
        raise ConfigError("memory: takes no path: what it holds ends with the process")
    return MemoryStore()


def _sqlite(location: str) -> Store:
    from perdure.stores.sqlite import SqliteStore

    path, mark, _ = location.partition("?")
    if not path.startswith("///"):
        message = (
            "this sqlite: URL names no file: write three slashes and a path, such as "
            "sqlite:///agents.db, four for an absolute one"
        )
        raise ConfigError(message, option="url")
    if mark:
        message = "a sqlite: URL takes no options: make a SqliteStore with them"
        raise ConfigError(message, option="url")
    place = path[3:]
    return SqliteStore(_plain_path(place, f"sqlite:///{'/' if place.startswith('/') else ''}./"))


def _redis(scheme: str) -> Callable[[str], Store]:
    def make(location: str) -> Store:
        from perdure.stores.redis import RedisStore
        from perdure.stores.redis.connection import settings_from

        url = f"{scheme}:{location}"
        history = settings_from(url).history
        return RedisStore(url, history=store_for(history) if history else None)

    return make


def _postgres(location: str) -> Store:
    from perdure.stores.postgres import PostgresStore

    return PostgresStore(f"postgresql:{location}")


def _s3(location: str) -> Store:
    from perdure.stores.s3 import S3Store

    return S3Store.at(location)


_SCHEMES: dict[str, Callable[[str], Store]] = {"file": _file_url, "memory": _memory}
_SCHEMES["sqlite"] = _sqlite
_SCHEMES |= {name: _redis(name) for name in ("redis", "rediss", "valkey", "valkeys", "unix")}
_SCHEMES |= {"postgresql": _postgres, "postgres": _postgres}
_SCHEMES["s3"] = _s3


def unwrap_url(url: str, keys: MasterKeys | None = None) -> tuple[str, Callable[[Store], Store]]:
    """Return the inner store's URL, and the function that wraps that store.

    With *keys* the store is encrypted with them, whether or not the URL asks for encryption.

    >>> unwrap_url("sqlite:///x.db?compression=zstd")[0]
    'sqlite:///x.db'

    Raises:
        ConfigError: The key or the compression is invalid.
        MissingExtraError: A package that a wrapper needs is not installed.

    """
    # Imported when used: most stores are not wrapped.
    from perdure.stores.wrapped.compressed import CompressedStore, compression_for
    from perdure.stores.wrapped.encrypted import EncryptedStore
    from perdure.stores.wrapped.keys import MasterKeys

    is_encrypted = url.lower().startswith(_ENCRYPTED)
    inner = url[len(_ENCRYPTED) :] if is_encrypted else url
    inner, compression = _without_option(inner)
    compression_for(compression)  # refuse an unknown name before reading any key
    if is_encrypted or keys is not None:
        if is_encrypted and ":" not in inner:
            raise ConfigError(
                f"{_ENCRYPTED} has no store after it: use encrypted+file:PATH, for example",
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
    values = [
        option.removeprefix(_COMPRESSION) for option in options if option.startswith(_COMPRESSION)
    ]
    if not values:
        return url, None
    others = "&".join(option for option in options if not option.startswith(_COMPRESSION))
    return (f"{base}?{others}" if others else base), values[-1]
