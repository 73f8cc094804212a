"""The files beside an agent's code: persistence.yaml and agent.yaml, found and read.

Everything here blocks.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Final

import msgspec

from perdure.declare.reading import MAX_BYTES, read, read_top
from perdure.declare.schema import Declaration, declaration_of, name_of
from perdure.errors import ConfigError

__all__ = ["AGENT_FILE", "FILE", "Declared", "declared_at", "declared_beside", "program_dir"]

FILE: Final = "persistence.yaml"
AGENT_FILE: Final = "agent.yaml"


class Declared(msgspec.Struct, frozen=True):
    """What was found."""

    declaration: Declaration = Declaration()
    path: Path | None = None
    """The persistence.yaml; None if there is none."""
    agent_name: str | None = None
    """As agent.yaml beside it says."""


def declared_at(path: str | os.PathLike[str]) -> Declared:
    """Read a persistence.yaml, and the agent.yaml beside it.

    Raises:
        ConfigError: It is not there, or does not fit.
        MissingExtraError: PyYAML is not installed.

    """
    file = Path(path).expanduser().absolute()
    data = _bytes(file)
    if data is None:
        message = f"there is no {file}: leave the path out if nothing is declared"
        raise ConfigError(message, path=str(file))
    return _declared(file, data)


def declared_beside(folder: str | os.PathLike[str] | None) -> Declared:
    """Read the persistence.yaml of a folder; nothing is declared where there is none.

    Raises:
        ConfigError: It does not fit.
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
            message = f"{file} is no file: move it away, or put the declarations there"
            raise ConfigError(message, path=str(file))
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror or error}"
        raise ConfigError(message, path=str(file)) from error


def program_dir() -> Path | None:
    """Return the folder of the program that runs, None in an interpreter or a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else Path(file).absolute().parent
