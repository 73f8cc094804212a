"""Values of LangGraph's channels as what a thread's log stores of them, and back.

What is read back is data: classes that are not allowed are not imported, and never called.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast, final

import msgspec

from perdure.adapters.items import import_sdk
from perdure.adapters.thread_log import (
    JOINED,
    LIST,
    PART,
    SNAPSHOT,
    Leaf,
    ThreadIndex,
    Value,
    name_of,
    name_of_items,
)
from perdure.errors import CorruptRecordError, FormatError, InvalidArgumentError, NotStorableError
from perdure.records.values import is_plain

if TYPE_CHECKING:
    import ormsgpack
    import pydantic
    from langgraph.checkpoint.serde import _msgpack as sdk_msgpack
    from langgraph.checkpoint.serde import jsonplus
    from langgraph.checkpoint.serde import types as sdk_types
    from langgraph.checkpoint.serde.base import SerializerProtocol
else:
    ABOUT = {"used_by": "PerdureSaver", "name": "LangGraph", "extra": "langgraph"}
    jsonplus = import_sdk("langgraph.checkpoint.serde.jsonplus", **ABOUT)
    sdk_msgpack = import_sdk("langgraph.checkpoint.serde._msgpack", **ABOUT)
    sdk_types = import_sdk("langgraph.checkpoint.serde.types", **ABOUT)
    ormsgpack = import_sdk("ormsgpack", **ABOUT)
    pydantic = import_sdk("pydantic", **ABOUT)

COPIES_BYTES: Final = 32 * 1024 * 1024
"""What is kept of values that were read, to give copies of them out again."""

K = TypeVar("K")
V = TypeVar("V")


class NotAllowedError(FormatError):
    """A stored value is of a class that was not allowed."""


@final
class Recent(Generic[K, V]):
    """What was used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._room = max_bytes

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return a value, which then was used last."""
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value, and let go of those that were not used for longest."""
        self.drop(key)
        self._values[key] = value, size
        self._room -= size
        while self._room < 0 and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self._room += freed

    def drop(self, key: K) -> None:
        """Let go of a value."""
        _, freed = self._values.pop(key, (None, 0))
        self._room += freed


# Data, and no code

_CONSTRUCTORS = frozenset(
    {
        jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG,
        jsonplus.EXT_CONSTRUCTOR_POS_ARGS,
        jsonplus.EXT_CONSTRUCTOR_KW_ARGS,
        jsonplus.EXT_PYDANTIC_V1,
        jsonplus.EXT_PYDANTIC_V2,
    }
)
_Hook = Callable[[int, bytes], Any]


@final
class DataSerializer(jsonplus.JsonPlusSerializer):
    """LangGraph's serializer, which reads its own safe classes and those that you name.

    Anything else that is stored raises, instead of becoming a dict or None.

    Args:
        types: Classes, or their modules and names.

    """

    def __init__(self, types: Iterable[type | tuple[str, ...]] = ()) -> None:
        super().__init__(allowed_msgpack_modules=tuple(types) or None)
        self.guard()

    def with_msgpack_allowlist(
        self, extra_allowlist: Iterable[tuple[str, ...] | type]
    ) -> DataSerializer:
        """Return a serializer that allows more classes."""
        clone = cast("DataSerializer", super().with_msgpack_allowlist(extra_allowlist))
        if clone is not self:
            clone.guard()
        return clone

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return a value.

        Raises:
            FormatError: It is of a class that is not allowed, or cannot be rebuilt.

        """
        try:
            return super().loads_typed(data)
        except Exception:
            if self._refused:  # what a hook raises does not come through ormsgpack
                raise self._refused.pop() from None
            raise

    def guard(self) -> None:
        """Check what is read from now on."""
        refused: list[FormatError] = []
        self._refused: list[FormatError] = refused
        inner: _Hook = self._unpack_ext_hook
        allowed = cast("set[tuple[str, ...]] | None", self._allowed_msgpack_modules) or ()

        def check(code: int, data: bytes) -> None:
            inside = ormsgpack.unpackb(data, ext_hook=check, option=ormsgpack.OPT_NON_STR_KEYS)
            if code in _CONSTRUCTORS:
                names: tuple[str, ...] = tuple(inside[:2])
                is_safe = names in sdk_msgpack.SAFE_MSGPACK_TYPES or names in allowed
            elif code == jsonplus.EXT_METHOD_SINGLE_ARG:
                names = inside[0], inside[1], inside[3]
                is_safe = names in sdk_msgpack.SAFE_MSGPACK_METHODS
            else:
                return
            if not is_safe:
                raise _not_allowed(names)

        def load(code: int, data: bytes) -> Any:
            refused.clear()
            try:
                check(code, data)
            except NotAllowedError as error:
                refused.append(error)
                raise
            value = inner(code, data)
            if value is None:
                message = f"its msgpack extension of type {code} cannot be rebuilt here"
                refused.append(FormatError(message))
                raise refused[-1]
            return value

        self._unpack_ext_hook = load


def _not_allowed(names: tuple[str, ...]) -> NotAllowedError:
    dotted = ".".join(names)
    message = (
        f"it is a {dotted}, which is not allowed: if it is yours, give "
        f"PerdureSaver(types=[{names[1]}]) the class"
    )
    return NotAllowedError(message, type=dotted)


# Values as they are stored


class Copied(NamedTuple):
    """What a value is copied from."""

    cls: type
    data: bytes
    fields: frozenset[str]


_DeltaSnapshot: Any = sdk_types._DeltaSnapshot  # noqa: SLF001  # a value of a channel, as stored
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, list, tuple, set, frozenset})


@final
class ValueCodec:
    """Encode and decode values by a serializer, each item of a list by itself.

    An item that was read before is copied, which costs a fraction of decoding it again. Nobody gets
    an object that somebody else has.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        self._copies: Recent[str, Copied] = Recent(COPIES_BYTES)

    def encode(self, value: Any, at: str, known: Collection[str] = ()) -> Value:
        """Return a value as it is stored.

        Args:
            value: What.
            at: Its channel, for the error.
            known: Names of what is stored already.

        Raises:
            NotStorableError: The serializer does not take it.

        """
        try:
            return self._encode(value, known)
        except Exception as error:
            message = f"the value of channel {at!r} cannot be stored: {error}"
            raise NotStorableError(message, path=at) from error

    def _encode(self, value: Any, known: Collection[str]) -> Value:
        if isinstance(value, _DeltaSnapshot) and _is_divided(value.value):
            return self._list(SNAPSHOT, value.value, known)
        if _is_divided(value):
            return self._list(LIST, value, known)
        return self._leaf(value, known)

    def _leaf(self, value: Any, known: Collection[str] = ()) -> Value:
        kind, data = self._serde.dumps_typed(value)
        if len(data) <= PART:
            name = name_of(kind, data)
            leaf = {} if name in known else {name: Leaf(name, kind, b64encode(data).decode())}
            return Value(name, "", (), leaf)
        leaves: dict[str, Leaf] = {}
        names = []
        for at in range(0, len(data), PART):
            part = data[at : at + PART]
            names.append(name_of("part", part))
            leaves[names[-1]] = Leaf(names[-1], "part", b64encode(part).decode())
        items = tuple(names)
        return Value(name_of_items(JOINED + kind, items), JOINED + kind, items, leaves)

    def _list(self, kind: str, values: list[Any], known: Collection[str]) -> Value:
        names: list[str] = []
        leaves: dict[str, Leaf] = {}
        for value in values:
            item = self._leaf(value, known)
            if item.kind:  # too large for one record: the list is stored as one value
                return self._leaf(_DeltaSnapshot(values) if kind == SNAPSHOT else values)
            names.append(item.name)
            leaves |= item.leaves
        items = tuple(names)
        return Value(name_of_items(kind, items), kind, items, leaves)

    def pin(self, name: str) -> Copied | None:
        """Return what is known of a leaf from which it can be copied without its data."""
        return self._copies.get(name)

    def load(
        self,
        index: ThreadIndex,
        name: str,
        leaves: Mapping[str, Leaf],
        pinned: Mapping[str, Copied],
    ) -> Any:
        """Return a stored value.

        Args:
            index: Of the thread that has it.
            name: Its name.
            leaves: What it is made of,
            pinned: apart from what `pin` returned.

        Raises:
            FormatError: It cannot be read, or is of a class that is not allowed.

        """
        node = index.items.get(name)
        if node is None:
            return self._read(name, leaves, pinned)
        names = index.names_in(name)
        if node.kind.startswith(JOINED):
            data = b"".join(b64decode(_leaf(part, leaves).data) for part in names)
            return self._decode(node.kind.removeprefix(JOINED), data)
        values = [self._read(item, leaves, pinned) for item in names]
        return _DeltaSnapshot(values) if node.kind == SNAPSHOT else values

    def _read(self, name: str, leaves: Mapping[str, Leaf], pinned: Mapping[str, Copied]) -> Any:
        known = pinned.get(name)
        if known is not None:
            return _copy(known)
        stored = _leaf(name, leaves)
        value = self._decode(stored.kind, b64decode(stored.data))
        copied = _copied(value)
        if copied is not None:
            self._copies.put(name, copied, len(copied.data) + 400)
        return value

    def _decode(self, kind: str, data: bytes) -> Any:
        try:
            return self._serde.loads_typed((kind, data))
        except FormatError:
            raise
        except Exception as error:
            message = f"its {kind} cannot be read: {error}"
            raise CorruptRecordError(message, type=kind) from error


def _leaf(name: str, leaves: Mapping[str, Leaf]) -> Leaf:
    if name not in leaves:
        message = f"the value {name} is not stored"
        raise CorruptRecordError(message, value=name)
    return leaves[name]


def require_data_only(serde: Any) -> None:
    """Refuse a serializer that reads pickles, which are code.

    Raises:
        InvalidArgumentError: It does.

    """
    inner = getattr(serde, "serde", serde)
    if getattr(inner, "pickle_fallback", False):
        message = "serde: pickle_fallback=True would run stored code: give types=[…] instead"
        raise InvalidArgumentError(message, option="serde")


def _is_divided(value: Any) -> bool:
    """Whether a value is a list of which each item is worth a name of its own."""
    return type(value) is list and bool(value) and all(type(item) not in _PLAIN for item in value)


# Copies, only of what has JSON's own types inside


def _fields_of(value: Any) -> bytes | None:
    """Return all that a dict or a pydantic object holds as bytes, None if it is not plain."""
    held = value
    if isinstance(value, pydantic.BaseModel) and value.__pydantic_private__ is None:
        held = {"fields": value.__dict__, "extra": value.__pydantic_extra__}
    elif type(value) is not dict:
        return None
    if not is_plain(held):
        return None
    try:
        return msgspec.msgpack.encode(held)
    except (OverflowError, UnicodeEncodeError):
        return None


def _copied(value: Any) -> Copied | None:
    data = _fields_of(value)
    if data is None:
        return None
    fields = () if type(value) is dict else value.__pydantic_fields_set__
    return Copied(type(value), data, frozenset(fields))


def _copy(known: Copied) -> Any:
    held = msgspec.msgpack.decode(known.data)
    if known.cls is dict:
        return held
    value: Any = object.__new__(known.cls)
    put = object.__setattr__
    put(value, "__dict__", held["fields"])
    put(value, "__pydantic_extra__", held["extra"])
    put(value, "__pydantic_fields_set__", set(known.fields))
    put(value, "__pydantic_private__", None)
    return value
