"""Options of an agent that its parts share: what of it is kept, and where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from perdure._lib.designs import pointer
from perdure._lib.options import Options
from perdure.errors import InvalidArgumentError
from perdure.formats.state import StateStorage
from perdure.memory.working_memory import MemoryStorage
from perdure.store import Store


class PersistentSession(Options, frozen=True, kw_only=True):
    """Settings for keeping an agent's session.

    Args:
        storage: Where: a URL, a path, a store, or a storage of whole states; None for the
            sessions that the agent is given, or the default store.
        autosave_interval: The longest time from a change to the start of its save; 0 for
            no timers. Turns are saved when they end in either case.
        save_on_close: Whether closing saves what came after the last turn; if not, what no save
            has made durable by then is dropped, unless other callers use the session. Turns and
            posted messages are kept in either case.
        load_on_create: Whether the agent continues the stored conversation; if not, it
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
        for name in ("save_on_close", "load_on_create"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(
                    f"persistent_session: invalid {name}={getattr(self, name)!r}: give True or "
                    "False",
                    option=name,
                )
        interval: object = self.autosave_interval
        if not (isinstance(interval, int | float) and 0 <= interval < float("inf")):
            raise InvalidArgumentError(
                f"persistent_session: invalid autosave_interval={self.autosave_interval!r}: "
                "give seconds, or 0 for no timers",
                autosave_interval=self.autosave_interval,
            )


Persistence = bool | PersistentSession | Mapping[str, Any] | str | os.PathLike[str] | None
"""Whether, and how, an agent's session is kept: True, False, a `PersistentSession`, a mapping of
its options, or its storage's path or URL."""


def kept_as(given: Persistence) -> bool | PersistentSession | None:
    """Return a setting as True, False, None or a `PersistentSession`.

    Raises:
        InvalidArgumentError: It is nothing of the kind, or has an unknown or invalid option.

    >>> kept_as({"storage": "agents.db", "autosave_interval": 5.0}).storage
    'agents.db'
    """
    if given is None or isinstance(given, bool | PersistentSession):
        return given
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given):
        return PersistentSession(storage=given)
    options = PersistentSession.__struct_fields__
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in options]
        if not unknown:
            return PersistentSession(**given)
        raise InvalidArgumentError(
            f"persistent_session: {unknown[0]!r} is no option: choose {', '.join(options)}"
            f"{pointer(unknown[0])}",
            option="persistent_session",
        )
    raise InvalidArgumentError(
        f"invalid persistent_session={given!r}: give True, False, PersistentSession(…), a mapping "
        f"of its options ({', '.join(options)}), or a path or URL",
        option="persistent_session",
    )


def persistence_of(given: Persistence, configured: Persistence) -> bool | PersistentSession | None:
    """Return which of two settings counts: an object before True or False, either before None.

    Raises:
        InvalidArgumentError: Both are there, of one kind, and say different things; or one is
            invalid.

    >>> persistence_of(True, PersistentSession(autosave_interval=5.0)).autosave_interval
    5.0
    """
    given, configured = kept_as(given), kept_as(configured)
    if given is None or configured is None:
        return configured if given is None else given
    objects = [
        candidate for candidate in (given, configured) if isinstance(candidate, PersistentSession)
    ]
    if len(objects) == 1 and True in (given, configured):
        return objects[0]
    if given == configured:
        return given
    raise InvalidArgumentError(
        "persistent_session is given twice, and not the same: give it once, to create, in the "
        "config, or as a feature"
    )


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
        raise InvalidArgumentError(
            "the storage of memory is given twice: give it in the config or in "
            "PersistentSession, not both",
            option="memory_storage",
        )
    return configured if persistence.memory is None else persistence.memory


class Features(Options, frozen=True, kw_only=True):
    """Parts of an agent that are kept with its session.

    What is stored of a part stays stored while the part is off: it comes back when
    it is on again.

    Args:
        memory: The working memory: ``agent.working_memory``.
        in_context_memory: Notes that the model keeps for itself, and sees in each request.
        persistent_instructions: The agent's ``custom_instructions.md``, after the system
            prompt. The file is read, and never written.
        history: The conversation. Without it each run begins with an empty context, and
            what is said leaves no record.
        permissions: Which tools were allowed, blocked and approved.
        persistent_session: Another way to say ``persistent_session=True``; False says nothing.

    """

    memory: bool = True
    in_context_memory: bool = False
    persistent_instructions: bool = False
    history: bool = True
    permissions: bool = True
    persistent_session: bool = False
