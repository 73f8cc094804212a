"""Named states in a folder: JSON under any key, for an agent without a session.

As an agent's ``save_state`` and ``load_state``, on ``$AGENT_STATE_DIR``.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, Final, cast, final

import anyio.to_thread

from perdure._lib.files import Folder
from perdure.config.locations import folder_trouble, made, text_of
from perdure.config.locations import state_dir as folder_for
from perdure.config.values import DOCUMENT
from perdure.errors import CorruptRecordError, InvalidArgumentError, NotStorableError
from perdure.records.json import decode
from perdure.records.keys import MAX_ID_BYTES
from perdure.records.values import encode_value
from perdure.stores.file.layout import decode_name, encode_name

_SUFFIX: Final = ".json"


def check_state_key(key: str, reserved: Collection[str] = (DOCUMENT,)) -> str:
    """Return a key that a state may have.

    Raises:
        InvalidArgumentError: It is empty, too long, no text, or reserved.

    """
    reason, given = None, cast("object", key)
    if not isinstance(given, str) or not all(given.split("/")):
        reason = "give text of at least one character, with no empty step between slashes"
    elif key in reserved:
        reason = "it is reserved"
    elif any("\ud800" <= char <= "\udfff" for char in key):
        reason = "it holds a lone surrogate, which is not text"
    elif len(key.encode()) > MAX_ID_BYTES:
        reason = f"it is longer than {MAX_ID_BYTES} bytes"
    if reason is not None:
        message = f"invalid key {str(key)[:60]!r} of a state: {reason}"
        raise InvalidArgumentError(message, option="key")
    return key


@final
class PersistentState:
    """Keep JSON values in a folder, each in a file of its own.

    A key of lower-case letters, digits, ``-`` and ``_`` is its file's name; all else is encoded,
    so that no key leads out of the folder, and no two are one file.

    Args:
        state_dir: The folder; None for ``$AGENT_STATE_DIR``.

    Raises:
        InvalidArgumentError: Neither is there.

    """

    def __init__(self, state_dir: str | os.PathLike[str] | None = None) -> None:
        self._path = folder_for(state_dir)

    async def save_state(self, key: str, data: Any) -> None:
        """Keep a value under a key, and return when it is durable.

        Raises:
            InvalidArgumentError: The key is invalid.
            NotStorableError: The value is not JSON.
            StoreUnavailableError: The folder cannot be written.

        """
        name = _file(key)
        encoded, types = encode_value(data)
        if types:
            message = f"state {key!r}: the {next(iter(types.values()))} in it is not JSON"
            raise NotStorableError(message, key=key)
        await anyio.to_thread.run_sync(self._write, name, text_of(decode(encoded)))

    async def load_state(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``.

        Raises:
            InvalidArgumentError: The key is invalid.
            CorruptRecordError: The file is damaged; it was left as it is.

        """
        name = _file(key)
        data = await anyio.to_thread.run_sync(self._read, name)
        if data is None:
            return default
        try:
            return decode(data)
        except CorruptRecordError as error:
            message = f"{self._path / name} is damaged: mend it, or move it away ({error})"
            raise CorruptRecordError(message, path=str(self._path / name)) from None

    async def list_state_keys(self) -> list[str]:
        """Return the keys that have a value, in order."""
        names = await anyio.to_thread.run_sync(self._names)
        keys = [decode_name(name.removesuffix(_SUFFIX)) for name in names if _is_state(name)]
        return sorted(key for key in keys if key is not None)

    async def delete_state(self, key: str) -> bool:
        """Forget a key durably; say whether it was there."""
        return await anyio.to_thread.run_sync(self._remove, _file(key))

    def _write(self, name: str, data: bytes) -> None:
        with folder_trouble(self._path, "written"), made(self._path) as folder:
            folder.replace(name, data)
            folder.sync()

    def _read(self, name: str) -> bytes | None:
        with folder_trouble(self._path, "read"):
            if not self._path.is_dir():
                return None
            with Folder.root(str(self._path)) as folder:
                return folder.read(name)

    def _names(self) -> list[str]:
        with folder_trouble(self._path, "read"):
            return [entry.name for entry in self._path.iterdir()] if self._path.is_dir() else []

    def _remove(self, name: str) -> bool:
        with folder_trouble(self._path, "written"):
            if not self._path.is_dir():
                return False
            with Folder.root(str(self._path)) as folder:
                was_there = folder.remove(name)
                folder.sync()
                return was_there


def _file(key: str) -> str:
    name = encode_name(check_state_key(key))
    if decode_name(name) is None:  # a hash stands for it, which cannot be listed
        message = f"invalid key {key[:60]!r} of a state: it is too long for a file's name"
        raise InvalidArgumentError(message, option="key")
    return name + _SUFFIX


def _is_state(name: str) -> bool:
    return name.endswith(_SUFFIX) and name != DOCUMENT + _SUFFIX and not name.startswith(".")
