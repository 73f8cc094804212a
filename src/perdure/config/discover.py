"""Discovery of an agent's files: persistence.yaml and agent.yaml next to its code.

Everything here blocks.

Arguments come first, then the environment, then the file, then the defaults. Paths in the file are
relative to its folder.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from perdure.config.schema import Declaration, KeySource, StorePlace, declaration_of, name_of
from perdure.config.yaml_reader import MAX_BYTES, read, read_top
from perdure.errors import ConfigError

if TYPE_CHECKING:
    from perdure.stores.wrapped.keys import MasterKeys


FILE: Final = "persistence.yaml"
AGENT_FILE: Final = "agent.yaml"


class Declared(msgspec.Struct, frozen=True):
    """What was found."""

    declaration: Declaration = Declaration()
    path: Path | None = None
    """The persistence.yaml; None if there is none."""
    agent_name: str | None = None
    """The name in the agent.yaml next to it."""


def declared_at(path: str | os.PathLike[str]) -> Declared:
    """Read a persistence.yaml, and the agent.yaml next to it.

    Raises:
        ConfigError: It does not exist, or is invalid.
        MissingExtraError: PyYAML is not installed.

    """
    file = Path(path).expanduser().absolute()
    data = _bytes(file)
    if data is None:
        raise ConfigError(
            f"there is no {file}: name another file, or none if nothing is declared",
            path=str(file),
        )
    return _declared(file, data)


def declared_beside(folder: str | os.PathLike[str] | None) -> Declared:
    """Read the persistence.yaml of a folder; nothing is declared where there is none.

    Raises:
        ConfigError: It is invalid.
        MissingExtraError: PyYAML is not installed.

    """
    if folder is None:
        return Declared()
    file = Path(folder).expanduser().absolute() / FILE
    data = _bytes(file)
    return Declared() if data is None else _declared(file, data)


def _declared(file: Path, data: bytes) -> Declared:
    declaration = declaration_of(read(data, str(file)), str(file))
    beside = file.with_name(AGENT_FILE)
    about = _bytes(beside)
    name = None if about is None else name_of(read_top(about, str(beside)), str(beside))
    return Declared(declaration, file, name)


def _bytes(file: Path) -> bytes | None:
    """Return what a file holds, at most a byte more than fits; None if it is not there."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigError(
                f"{file} is no file: move it away, or put the declarations there", path=str(file)
            )
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror or error}", path=str(file)
        ) from error


def program_dir() -> Path | None:
    """Return the folder of the program that runs, None in an interpreter or a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else Path(file).absolute().parent


# The settings that a persistence.yaml gives to ``connect``


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
            raise ConfigError(
                f"{declared.path}: store: the variable {place.url_env} is not set: set it",
                variable=place.url_env,
            )
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
    scheme, colon, path = url.partition(":")
    if not colon or len(scheme) == 1:
        local = _from(folder, url)
        return f"file:{local}" if ":" in local else local  # the folder's own name has a colon
    if scheme.lower() == "file" and not path.startswith("//"):
        return f"{scheme}:{_from(folder, path)}"
    if scheme.lower() == "sqlite" and path.startswith("///"):
        return f"{scheme}:///{_from(folder, path[3:])}"
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
        raise ConfigError(
            f"{file}: encryption: the variable {name} is not set: set it to the master key",
            variable=name,
        )
    return {KEY_VARIABLE: key}
