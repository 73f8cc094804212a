"""Named states: JSON values that an application stores with a session, one document each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, final

import msgspec

from perdure.errors import CorruptRecordError, InvalidArgumentError, NotStorableError
from perdure.memory.documents import StateSet, fold_state, typed
from perdure.memory.working_memory import Accept, Read
from perdure.records.json import decode, encode, reason
from perdure.records.records import STATE, Entry
from perdure.records.types import Registry
from perdure.records.values import OpaqueValue, Types, decode_value, encode_value

T = TypeVar("T")

FOLDER = "state/"


def state_of(bare: bytes | None, typed_data: bytes | None, types: Types) -> tuple[Any, int] | None:
    """Return a state and its version from its two documents, None if there is none."""
    typed_state = None if typed_data is None else decode(typed_data, StateSet)
    if typed_state is not None and typed_state.types:
        return decode_value(bytes(typed_state.value), typed_state.types, types), typed_state.version
    if bare is None:
        return None
    return decode_value(bare, None, types), 1 if typed_state is None else typed_state.version


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
        """Return the value under a key, or ``default``.

        Raises:
            CorruptRecordError: A value of a registered type does not match it; it stays unchanged.
            UnsupportedVersionError: There is no upcast from its version.

        """
        bare = await self._folded(_name(key))
        beside = await self._folded(typed(_name(key))) if bare is None else None
        stored = state_of(bare, beside, self._registry)
        return default if stored is None else stored[0]

    async def _stored(self, key: str) -> tuple[Any, int] | None:
        """Return the value under a key, and the version of its form."""
        while True:
            bare, beside = await self._folded(_name(key)), await self._folded(typed(_name(key)))
            # A value that was set between the two reads has a version that is not the old one's.
            if beside is None or bare == await self._folded(_name(key)):
                return state_of(bare, beside, self._registry)

    async def _folded(self, name: str) -> bytes | None:
        return fold_state(name, *await self._read(name))

    def set(self, key: str, value: Any) -> int:
        """Store a value under a key, and return the session's version.

        Raises:
            InvalidArgumentError: The key has an empty step between slashes, or is not text.
            NotStorableError: The value cannot be stored; the error names path and type.

        """
        return self._set(key, value)

    def _set(self, key: str, value: Any, version: int = 1) -> int:
        if not all(str(key).split("/")):  # no document can have such a name
            raise InvalidArgumentError(
                f"a state's key has no empty step between slashes, as {key!r} has: leave it out",
                option="key",
            )
        data, types = encode_value(value, self._registry)
        change = StateSet(_name(key), msgspec.Raw(data), types, version=version)
        return self._accept((Entry(STATE, encode(change)),))

    def drop(self, key: str) -> int:
        """Delete a key (no error if it does not exist), and return the session's version."""
        return self._accept((Entry(STATE, encode(StateSet(_name(key), dropped=True))),))

    def typed(self, key: str, type: type[T]) -> TypedState[T]:
        """Return one key's value as a type: ``session.state.typed("app", MyState)``.

        It is stored as plain JSON, and need not be registered. If it is, with
        ``connect(types=[register(MyState, version=2, upcasts={1: …})])``, its version is stored
        beside it, and an older one is upcast when it is read.

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

    __slots__ = ("_key", "_known", "_put", "_read", "_registry", "_states", "_type")

    def __init__(self, states: States, key: str, type: type[T]) -> None:
        _name(key)
        if not _is_pydantic(type):
            _check_readable(type)
        self._key = key
        self._type = type
        self._states = states
        self._registry = states._registry  # noqa: SLF001  # of this module, as the two below
        self._read = states._stored  # noqa: SLF001
        self._put = states._set  # noqa: SLF001
        self._known = self._registry.type_of(type)

    def __repr__(self) -> str:
        return f"<TypedState {self._key!r} {self._type.__name__}>"

    async def get(self) -> T | None:
        """Return the value, None if there is none.

        Raises:
            CorruptRecordError: The stored value does not match the type; it stays unchanged.
            UnsupportedVersionError: Its version is newer, or there is no upcast from it.

        """
        stored = await self._read(self._key)
        return None if stored is None or stored[0] is None else self._load(*stored)

    def set(self, value: T) -> int:
        """Store a value, and return the session's version.

        Raises:
            NotStorableError: It would not come back equal to itself.

        """
        version = 1 if self._known is None else self._known.registered.version
        try:
            if _is_pydantic(self._type):
                model: Any = value
                plain = model.model_dump(mode="json", by_alias=True)
            else:
                plain = decode(encode(value))
            same = self._load(plain, version) == value
        except (TypeError, ValueError, CorruptRecordError) as error:
            raise self._not_storable(value) from error
        if not same:
            raise self._not_storable(value)
        return self._put(self._key, plain, version)

    def drop(self) -> int:
        """Delete it (no error if it does not exist), and return the session's version."""
        return self._states.drop(self._key)

    def _load(self, stored: Any, version: int) -> T:
        known, of = self._known, f"the state {self._key!r}"
        if known is not None and type(stored) is self._type:  # from state.set(instance)
            loaded: T = stored
            return loaded
        if isinstance(stored, OpaqueValue):  # the same, where the class is not registered
            if known is None or not known.is_named(stored.tag):
                raise self._other(f"a {stored.tag!r} of version {stored.version}", stored.tag)
            version = stored.version
            stored = decode_value(bytes(stored.data), stored.types, self._registry)
        if known is not None:
            fresh: T = known.load(version, stored, of)
            return fresh
        try:
            return msgspec.convert(stored, self._type)
        except msgspec.ValidationError as error:
            why = reason(error)
        # Raised outside of the handler, so that no traceback shows the values that it quotes.
        raise CorruptRecordError(
            f"{of} does not match {self._type.__name__}: {why}; read it with state.get and set it "
            "again. It was left as it is",
            key=self._key,
            type=self._type.__name__,
        )

    def _other(self, what: str, tag: str) -> CorruptRecordError:
        name = self._type.__name__
        return CorruptRecordError(
            f"the state {self._key!r} is {what}, not a {name}: if that is what it was called "
            f"before, connect(types=[register({name}, aliases=[{tag!r}])]). It was left as it is",
            key=self._key,
            type=name,
            tag=tag,
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
