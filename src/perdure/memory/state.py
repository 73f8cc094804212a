"""Named states: JSON values that an application keeps with a session, one document each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from perdure.codec.json import decode, encode
from perdure.codec.registry import Registry
from perdure.codec.values import decode_value, encode_value
from perdure.errors import ConfigError
from perdure.memory.documents import StateSet, fold_state, typed
from perdure.memory.working import Accept, Read
from perdure.model.records import STATE, Entry

__all__ = ["States"]

FOLDER = "state/"


class States:
    """A session's named states: ``session.state``. Each loads when it is first awaited."""

    __slots__ = ("_accept", "_names", "_read", "_registry")

    def __init__(
        self,
        read: Read,
        names: Callable[[], Awaitable[set[str]]],
        accept: Accept,
        registry: Registry,
    ) -> None:
        self._read = read
        self._names = names
        self._accept = accept
        self._registry = registry

    async def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        for name in (_name(key), typed(_name(key))):
            data, records = await self._read(name)
            folded = fold_state(name, data, records)
            if folded is None:
                continue
            if name == _name(key):
                return decode_value(folded, None, self._registry)
            change = decode(folded, StateSet)
            return decode_value(bytes(change.value), change.types, self._registry)
        return default

    def set(self, key: str, value: Any) -> int:
        """Keep a value under a key, and return the session's version.

        Raises:
            NotStorableError: The value cannot be stored; the error names path and type.

        """
        data, types = encode_value(value, self._registry)
        change = StateSet(_name(key), msgspec.Raw(data), types)
        return self._accept((Entry(STATE, encode(change)),))

    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""
        return self._accept((Entry(STATE, encode(StateSet(_name(key), dropped=True))),))

    async def keys(self) -> list[str]:
        """Return the keys in order."""
        names = {name.removeprefix("typed/") for name in await self._names()}
        found = {name for name in names if name.startswith(FOLDER)}
        return sorted(name[len(FOLDER) : -len(".json")] for name in found)


def _name(key: str) -> str:
    if not key or not isinstance(key, str):
        message = f"a state's key must be a string with at least one character, not {key!r}"
        raise ConfigError(message)
    return f"{FOLDER}{key}.json"
