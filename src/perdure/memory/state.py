"""Named states: JSON values that an application stores with a session, one document each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, final

import msgspec

from perdure.errors import CorruptRecordError, InvalidArgumentError, NotStorableError
from perdure.memory.documents import StateSet, fold_state, typed
from perdure.memory.working_memory import Accept, Read
from perdure.records.json import decode, encode
from perdure.records.records import STATE, Entry
from perdure.records.types import Registry
from perdure.records.values import decode_value, encode_value

T = TypeVar("T")

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

    def __repr__(self) -> str:
        return "<States: `await states.keys()` lists them>"

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
        """Store a value under a key, and return the session's version.

        Raises:
            InvalidArgumentError: The key has an empty step between slashes, or is not text.
            NotStorableError: The value cannot be stored; the error names path and type.

        """
        if not all(str(key).split("/")):  # no document can have such a name
            raise InvalidArgumentError(
                f"a state's key has no empty step between slashes, as {key!r} has: leave it out",
                option="key",
            )
        data, types = encode_value(value, self._registry)
        change = StateSet(_name(key), msgspec.Raw(data), types)
        return self._accept((Entry(STATE, encode(change)),))

    def drop(self, key: str) -> int:
        """Delete a key (no error if it does not exist), and return the session's version."""
        return self._accept((Entry(STATE, encode(StateSet(_name(key), dropped=True))),))

    def typed(self, key: str, type: type[T]) -> TypedState[T]:
        """Return one key's value as a type: ``session.state.typed("app", MyState)``.

        It is stored as plain JSON, so it need not be registered.

        Args:
            key: The key of the state.
            type: A dataclass, a msgspec Struct, or another type that msgspec decodes from JSON;
                or a pydantic model.

        Raises:
            InvalidArgumentError: It cannot be read from JSON.

        """
        return TypedState(self, key, type)

    async def keys(self) -> list[str]:
        """Return the keys in order."""
        names = {name.removeprefix("typed/") for name in await self._names()}
        stored_names = {name for name in names if name.startswith(FOLDER)}
        return sorted(name[len(FOLDER) : -len(".json")] for name in stored_names)


@final
class TypedState(Generic[T]):
    """One named state as a type; created by ``session.state.typed``."""

    __slots__ = ("_key", "_states", "_type")

    def __init__(self, states: States, key: str, type: type[T]) -> None:
        _name(key)
        if not _is_pydantic(type):
            _check_readable(type)
        self._states = states
        self._key = key
        self._type = type

    def __repr__(self) -> str:
        return f"<TypedState {self._key!r} {self._type.__name__}>"

    async def get(self) -> T | None:
        """Return the value, None if there is none.

        Raises:
            CorruptRecordError: The stored value does not match the type; it stays unchanged.

        """
        stored = await self._states.get(self._key)
        return None if stored is None else self._load(stored)

    def set(self, value: T) -> int:
        """Store a value, and return the session's version.

        Raises:
            NotStorableError: It would not come back equal to itself.

        """
        try:
            if _is_pydantic(self._type):
                model: Any = value
                plain = model.model_dump(mode="json", by_alias=True)
            else:
                plain = decode(encode(value))
            same = self._load(plain) == value
        except (TypeError, ValueError, CorruptRecordError) as error:
            raise self._not_storable(value) from error
        if not same:
            raise self._not_storable(value)
        return self._states.set(self._key, plain)

    def drop(self) -> int:
        """Delete it (no error if it does not exist), and return the session's version."""
        return self._states.drop(self._key)

    def _load(self, stored: Any) -> T:
        cls: Any = self._type
        try:
            if _is_pydantic(cls):
                loaded: T = cls.model_validate(stored)
                return loaded
            return msgspec.convert(stored, self._type)
        except (msgspec.ValidationError, ValueError):
            pass
        # Raised outside of the handler, so that no traceback shows the values that it quotes.
        raise CorruptRecordError(
            f"the state {self._key!r} does not match {self._type.__name__}: give the new fields "
            "defaults, or read it with state.get and set it again; it was left as it is",
            key=self._key,
            type=self._type.__name__,
        )

    def _not_storable(self, value: object) -> NotStorableError:
        return NotStorableError(
            f"the {type(value).__name__} for state {self._key!r} would not come back from JSON as "
            "it is: use state.set with a registered type, connect(types=[…])",
            key=self._key,
            type=type(value).__name__,
        )


def _is_pydantic(cls: Any) -> bool:
    return hasattr(cls, "model_dump") and hasattr(cls, "model_validate")


def _check_readable(cls: type) -> None:
    try:
        info: object = msgspec.inspect.type_info(cls)
    except (TypeError, NameError) as error:
        info = error
    if isinstance(info, msgspec.inspect.CustomType | Exception):
        raise InvalidArgumentError(
            f"state.typed: {cls.__name__} cannot be read from JSON: use a dataclass, a msgspec "
            "Struct or a pydantic model",
            option="type",
            type=cls.__name__,
        )


def _name(key: str) -> str:
    if not key or not isinstance(key, str):
        raise InvalidArgumentError(
            f"a state's key must be a string with at least one character, not {key!r}"
        )
    return f"{FOLDER}{key}.json"
