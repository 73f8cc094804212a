"""``persistent_session``: the short way to say that an agent is kept, and where."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from perdure.autosave.options import Autosave
from perdure.errors import InvalidArgumentError
from perdure.formats.state import StateStorage
from perdure.memory.working_memory import MemoryStorage
from perdure.store import Store

if TYPE_CHECKING:
    pass


class PersistentSession(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent's session is kept.

    Args:
        storage: Where: a URL, a path, a store, or a storage of whole states; None for the
            sessions that the agent is given, or the default store.
        autosave_interval: The longest time from a change to the start of its save; 0 for
            no timers. Turns are saved when they end in either case.
        save_on_close: Whether closing saves what came after the last turn.
        load_on_create: Whether the agent goes on with the stored conversation; if not, it
            begins a new one with its first message, unless ``load_persisted_session`` comes first.
        memory: Where ``agent.memory_storage`` keeps its entries; None for the session.

    Raises:
        InvalidArgumentError: A value is invalid.

    """

    storage: str | os.PathLike[str] | Store | StateStorage | None = None
    autosave_interval: float = 30.0
    save_on_close: bool = True
    load_on_create: bool = True
    memory: MemoryStorage | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.autosave_interval < float("inf"):
            message = (
                f"persistent_session: invalid autosave_interval={self.autosave_interval!r}: "
                "give seconds, or 0 for no timers"
            )
            raise InvalidArgumentError(message, autosave_interval=self.autosave_interval)


Persistence = bool | PersistentSession | None


def persistence_of(given: Persistence, configured: Persistence) -> Persistence:
    """Return which of two settings counts: an object before True or False, either before None.

    Raises:
        InvalidArgumentError: Both are there, of one kind, and say different things.

    >>> persistence_of(True, PersistentSession(autosave_interval=5.0)).autosave_interval
    5.0
    """
    if given is None or configured is None:
        return configured if given is None else given
    objects = [
        candidate for candidate in (given, configured) if isinstance(candidate, PersistentSession)
    ]
    if len(objects) == 1 and True in (given, configured):
        return objects[0]
    if given == configured:
        return given
    message = (
        "persistent_session is given twice, and not the same: "
        "give it in the config or to create, not both"
    )
    raise InvalidArgumentError(message)


def memory_of(
    persistence: PersistentSession, configured: MemoryStorage | None
) -> MemoryStorage | None:
    """Return the storage of memory that counts.

    Raises:
        InvalidArgumentError: There are two.

    """
    if (
        persistence.memory is not None
        and configured is not None
        and persistence.memory is not configured
    ):
        message = (
            "the storage of memory is given twice: give it in the config or in "
            "PersistentSession, not both"
        )
        raise InvalidArgumentError(message, option="memory_storage")
    return configured if persistence.memory is None else persistence.memory


def autosave_of(persistence: PersistentSession) -> Autosave | None:
    """Return the timers of a session that is kept so."""
    interval = persistence.autosave_interval
    return None if interval == 0 else Autosave(debounce=min(2.0, interval), max_delay=interval)
