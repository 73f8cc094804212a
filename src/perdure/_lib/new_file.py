"""A file that nobody sees before it is whole, and that replaces none. All of it blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from perdure._lib.files import Folder, write_all
from perdure._lib.ids import random_id
from perdure._lib.platform import sync_data
from perdure.errors import ConfigError

__all__ = ["NewFile"]


@final
class NewFile:
    """A file under a name of its own, until it is published."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[bytes] = []
        self._waiting = self._size = 0
        self._folder = Folder.root(str(path.absolute().parent))
        self._temporary = f".{random_id()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._fd = self._folder.open(self._temporary, flags)

    def add(self, data: bytes) -> int:
        """Take something in, and return how much waits to be written."""
        self._parts.append(data)
        self._waiting += len(data)
        return self._waiting

    def write(self) -> None:
        """Write what waits."""
        data, self._parts = b"".join(self._parts), []
        self._waiting = 0
        self._size += write_all(self._fd, data)

    def publish(self) -> int:
        """Make it durable, and give it its name; return its size in bytes.

        Raises:
            ConfigError: The name is taken.

        """
        self.write()
        sync_data(self._fd)
        if not self._folder.link(self._temporary, self._path.name):
            message = f"{self._path} is there already: choose a new file, or remove it"
            raise ConfigError(message, path=str(self._path))
        self._folder.sync()
        return self._size

    def close(self) -> None:
        """Close it; what was not published is gone."""
        os.close(self._fd)
        self._folder.remove(self._temporary)
        self._folder.close()
