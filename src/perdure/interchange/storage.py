"""A person's own place for whole states: six methods, and no word about files.

`perdure.stores.StateStore` makes a store of it.
"""

from __future__ import annotations

import datetime
from typing import Protocol

from perdure.interchange.state import FullAgentState

__all__ = ["StateStorage"]


class StateStorage(Protocol):
    """Keep one agent's state: in a database, a bucket, a file."""

    async def save(self, state: FullAgentState) -> None:
        """Replace the stored state, in one step; return when it is durable.

        ``perdure.interchange.write_state`` makes bytes of it.
        """
        ...

    async def load(self) -> FullAgentState | None:
        """Return the stored state, None if there is none.

        ``perdure.interchange.read_state`` makes it of bytes.
        """
        ...

    async def exists(self) -> bool:
        """Say whether there is one."""
        ...

    async def delete(self) -> None:
        """Remove it; no error if there is none."""
        ...

    def get_path(self) -> str:
        """Say where it is kept, for people: a path, a URL, a name; never a password."""
        ...

    async def get_last_modified(self) -> datetime.datetime | None:
        """Return when it was last saved; None if there is none, or if that is not known.

        It has to differ after each save, for another writer to be noticed.
        """
        ...
