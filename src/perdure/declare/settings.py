"""The settings that a persistence.yaml gives to ``connect``.

Arguments come first, then the environment, then the file, then the defaults. Paths in the file are
relative to its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perdure.declare.sections import KeySource, StorePlace
from perdure.errors import ConfigError

if TYPE_CHECKING:
    from perdure.declare.found import Declared
    from perdure.stores.wrapped.keys import MasterKeys

__all__ = ["anchored", "keys_of", "url_of"]

_ENCRYPTED: Final = "encrypted+"


def url_of(declared: Declared, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the store, None if the file names none.

    Raises:
        ConfigError: The variable that should hold it is not set.

    """
    place = declared.declaration.store or StorePlace()
    if place.url_env is not None:
        url = environment.get(place.url_env)
        if not url:
            message = f"{declared.path}: store: the variable {place.url_env} is not set: set it"
            raise ConfigError(message, variable=place.url_env)
        return url
    if place.url is None or declared.path is None:
        return place.url
    return anchored(place.url, declared.path.parent)


def anchored(url: str, folder: Path) -> str:
    """Return a URL whose path, if it is relative, begins at a folder.

    >>> anchored("./data", Path("/agents/gus")), anchored("redis://h", Path("/x"))
    ('/agents/gus/data', 'redis://h')
    """
    if url.lower().startswith(_ENCRYPTED):
        return url[: len(_ENCRYPTED)] + anchored(url[len(_ENCRYPTED) :], folder)
    scheme, colon, rest = url.partition(":")
    if not colon or len(scheme) == 1:
        path = _from(folder, url)
        return f"file:{path}" if ":" in path else path  # where the folder's own name has a colon
    if scheme.lower() == "file" and not rest.startswith("//"):
        return f"{scheme}:{_from(folder, rest)}"
    if scheme.lower() == "sqlite" and rest.startswith("///"):
        return f"{scheme}:///{_from(folder, rest[3:])}"
    return url


def _from(folder: Path, path: str) -> str:
    return path if path.startswith("~") or not path else str(folder / path)


def keys_of(declared: Declared, environment: Mapping[str, str]) -> MasterKeys | None:
    """Return the master keys; None if the file asks for no encryption.

    Raises:
        ConfigError: There is no key where the file says.
        MissingExtraError: cryptography is not installed.

    """
    from perdure.stores.wrapped.keys import KEY_FILE_VARIABLE, KEY_VARIABLE, MasterKeys

    source = declared.declaration.encryption
    if source is None or declared.path is None:
        return None
    if environment.get(KEY_VARIABLE) or environment.get(KEY_FILE_VARIABLE):
        return MasterKeys.from_environment(environment)
    return MasterKeys.from_environment(_standing_in(source, declared.path, environment))


def _standing_in(source: KeySource, file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that would say the same."""
    from perdure.stores.wrapped.keys import KEY_FILE_VARIABLE, KEY_VARIABLE

    if source.key_file is not None:
        return {KEY_FILE_VARIABLE: _from(file.parent, source.key_file)}
    name = source.key_env or ""
    key = environment.get(name)
    if not key:
        message = f"{file}: encryption: the variable {name} is not set: set it to the master key"
        raise ConfigError(message, variable=name)
    return {KEY_VARIABLE: key}
