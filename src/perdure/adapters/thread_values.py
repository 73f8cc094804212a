"""Values of LangGraph's channels as what a thread's log stores of them, and back."""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple, TypeAlias, cast, final
from weakref import getweakrefcount

from perdure._lib.lazy import from_extra
from perdure.adapters.items import Recent
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

with from_extra(
    "langgraph", "pydantic", used_by="PerdureSaver", name="LangGraph", extra="langgraph"
):
    import pydantic
    from langgraph.checkpoint.serde import types as sdk_types
    from langgraph.checkpoint.serde.base import SerializerProtocol

COPIES_BYTES: Final = 32 * 1024 * 1024
"""Bytes of values that are kept to hand out copies of them again."""
ORIGINAL_BYTES: Final = 1500
"""Cost of keeping one of them, apart from its texts, and as much again for its copy."""
LENT: Final = 64
"""Items of a list whose copies are looked at together."""


# Values as they are stored


_references: Callable[[Any], int] = getattr(sys, "getrefcount", lambda _: 0)
_CAN_COUNT = hasattr(sys, "getrefcount") and getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether Python counts who has an object: not exactly, where threads run without a GIL."""


@final
class Original:
    """A plain value that was read, to make copies of."""

    __slots__ = ("_class", "_content", "_inner")

    def __init__(self, value: Any, held: dict[str, Any]) -> None:
        self._class: type = type(value)
        self._inner: list[str] = [key for key in held if type(held[key]) in (dict, list)]
        self._content: list[Any] = [_deep_copy(held)]
        if value is not held:
            self._content.append(frozenset(value.__pydantic_fields_set__))
            if value.__pydantic_extra__ is not None:
                self._content.append({})

    def copy(self) -> tuple[Any, list[Any]]:
        """Return a copy, and the containers in it: everything of it that can be changed."""
        held = self._content[0].copy()
        for key in self._inner:
            item = held[key]
            held[key] = _deep_copy(item) if item else item.copy()
        if self._class is dict:
            return held, list(_containers(held))
        _, fields, *extra = self._content
        content = [set(fields), *map(dict, extra)]
        value: Any = object.__new__(self._class)
        put = object.__setattr__
        put(value, "__dict__", held)
        put(value, "__pydantic_fields_set__", content[0])
        put(value, "__pydantic_extra__", content[1] if extra else None)
        put(value, "__pydantic_private__", None)
        return value, [*_containers(held), *content]


@final
class LentItems:
    """Copies of the items of a list, or of a part of one, that the last caller got.

    A copy that this caller has left as it was, and let go of with all that it has, is given
    again: copies of a long list for every run would keep the garbage collector busy. All of them
    are looked at together, which costs a fraction of a look at each.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.originals: dict[str, Original] = {}
        self._clear()

    def _clear(self) -> None:
        self._values: list[Any] = []
        self._types: list[type] = []
        self._models: list[Any] = []
        """Those that are pydantic's,"""
        self._extras: list[Any] = []
        """and what they have besides their fields."""
        self._containers: list[Any] = []
        self._views: list[Iterable[Any]] = []
        """What shows keys and values of the containers as they are now;"""
        self._sizes: list[int] = []
        self._flat: list[Any] = []
        """these as they were, in their order,"""
        self._counts: list[int] = []
        """and how many references the values and containers had."""

    def give(self, names: tuple[str, ...], originals: Iterable[Original]) -> list[Any]:
        """Return the values, each its caller's own then, after adding some at the end."""
        is_free = self._is_free()
        if not is_free:
            self._clear()
            for name in self.names:
                self._add(self.originals[name])
        for name, original in zip(names, originals, strict=True):
            self.originals[name] = original
            self._add(original)
        self.names += names
        if names or not is_free:
            self._counts = self._count()
        return self._values

    def _add(self, original: Original) -> None:
        value, containers = original.copy()
        self._values.append(value)
        self._types.append(type(value))
        if type(value) is not dict:
            self._models.append(value)
            self._extras.append(value.__pydantic_extra__)
        for part in containers:
            self._containers.append(part)
            self._sizes.append(len(part))
            if part:
                views = (part, part.values()) if type(part) is dict else (part,)
                self._views += views
                self._flat += chain.from_iterable(views)

    def _count(self) -> list[int]:
        return list(map(_references, chain(self._values, self._containers)))

    def _is_free(self) -> bool:
        """Whether nobody has what was given, and each part of it has what it had.

        That something equal took its place is not enough: True is equal to 1. And nothing is
        compared, since what a caller has put there may compare as it likes.
        """
        return (
            self._count() == self._counts
            and all(map(is_, map(type, self._values), self._types))
            and not any(map(getweakrefcount, self._values))
            and all(map(is_, map(_private_of, self._models), repeat(None)))
            and all(map(is_, map(_extra_of, self._models), self._extras))
            and list(map(len, self._containers)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._flat))
        )


_DeltaSnapshot: Any = sdk_types._DeltaSnapshot  # noqa: SLF001  # a value of a channel, as stored
_PLAIN = frozenset({str, int, float, bool, type(None), bytes, list, tuple, set, frozenset})
_UNKNOWN = object()
"""Equal to nothing that a list holds."""

Place: TypeAlias = tuple[str, str, str]
"""A thread, a namespace and a channel."""


class _Stored(NamedTuple):
    """The items of a list that was stored, as they were then."""

    types: list[type]
    held: list[Any]
    names: list[str]
    numbers: dict[int, str | None]
    """Those with numbers, exactly: 1, 1.0 and True are equal."""


class Pinned(NamedTuple):
    """Sources that values are copied from, while their data is read."""

    originals: dict[str, Original | None]
    lent: dict[str, list[LentItems]]
    """Of the lists, part by part."""


@final
class ValueCodec:
    """Encode and decode values by a serializer, each item of a list by itself.

    Of a list that grows, only items that are new or were changed are encoded. An item that was read
    before is copied, which costs a fraction of decoding it. Nobody gets an object that somebody
    else has.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        self._originals: Recent[str, Original] = Recent(COPIES_BYTES)
        self._lent: Recent[tuple[str, str], LentItems] = Recent(COPIES_BYTES)
        """By a thread and the first of the items."""
        self._stored: Recent[Place, _Stored] = Recent(COPIES_BYTES)

    def encode(self, value: Any, place: Place, known: Collection[str] = ()) -> Value:
        """Return a value as it is stored.

        Args:
            value: What.
            place: Where.
            known: Names of what is stored already.

        Raises:
            NotStorableError: The serializer does not take it.

        """
        try:
            if isinstance(value, _DeltaSnapshot) and _is_divided(value.value):
                return self._list(SNAPSHOT, value.value, place, known)
            if _is_divided(value):
                return self._list(LIST, value, place, known)
            return self._leaf(value, known)
        except Exception as error:
            message = f"the value of channel {place[-1]!r} cannot be stored: {error}"
            raise NotStorableError(message, path=place[-1]) from error

    def _leaf(self, value: Any, known: Collection[str]) -> Value:
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

    def _list(self, kind: str, values: list[Any], place: Place, known: Collection[str]) -> Value:
        types = list(map(type, values))
        held = _held(values, set(types))
        stored = self._stored.get(place) or _Stored([], [], [], {})
        same = _same(stored, types, held) if held is not None and known else 0
        names = stored.names[:same]
        if not all(map(known.__contains__, names)):
            same, names = 0, []
        # Before they are encoded: what another thread changes meanwhile counts as changed then.
        fresh = [_deep_copy(item) if is_plain(item) else _UNKNOWN for item in (held or ())[same:]]
        leaves: dict[str, Leaf] = {}
        for value in values[same:]:
            item = self._leaf(value, known)
            if item.kind:  # too large for one record: the list is stored as one value
                return self._leaf(_DeltaSnapshot(values) if kind == SNAPSHOT else values, known)
            names.append(item.name)
            leaves |= item.leaves
        if held is not None:
            self._stored.put(
                place, _remembered(stored, same, types, fresh, names), 1500 * len(names)
            )
        items = tuple(names)
        return Value(name_of_items(kind, items), kind, items, leaves)

    def pin(self, index: ThreadIndex, thread: str, names: Iterable[str]) -> Pinned:
        """Return what values can be copied from without their data."""
        pinned = Pinned({}, {})
        for name in names:
            items = index.names_in(name) if name in index.items else (name,)
            if name in index.items and not index.items[name].kind.startswith(JOINED):
                parts = [items[at : at + LENT] for at in range(0, len(items), LENT)]
                lent = [self._lent_items(thread, part) for part in parts]
                pinned.lent[name] = lent
                items = tuple(
                    chain.from_iterable(
                        part[len(each.names) :] for part, each in zip(parts, lent, strict=True)
                    )
                )
            for item in items:
                pinned.originals[item] = self._originals.get(item)
        return pinned

    def _lent_items(self, thread: str, names: tuple[str, ...]) -> LentItems:
        """Return the copies of some items that a list of a thread begins a part with."""
        lent = self._lent.get((thread, names[0]))
        if lent is None or not _begin_alike(lent.names, names):
            lent = LentItems()
        if len(lent.names) < len(names):
            self._lent.put((thread, names[0]), lent, len(names) * ORIGINAL_BYTES)
        return lent

    def load(
        self, index: ThreadIndex, name: str, leaves: Mapping[str, Leaf], pinned: Pinned
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
            return self._value(name, leaves, pinned)
        names = index.names_in(name)
        if node.kind.startswith(JOINED):
            data = b"".join(b64decode(_leaf(part, leaves).data) for part in names)
            return self._decode(node.kind.removeprefix(JOINED), data)
        values: list[Any] = []
        for at, lent in enumerate(pinned.lent[name]):
            values += self._given(names[at * LENT : (at + 1) * LENT], lent, leaves, pinned)
        return _DeltaSnapshot(values) if node.kind == SNAPSHOT else values

    def _given(
        self,
        names: tuple[str, ...],
        lent: LentItems,
        leaves: Mapping[str, Leaf],
        pinned: Pinned,
    ) -> list[Any]:
        """Return items of a list, copies that were given before among them."""
        if _CAN_COUNT and _begin_alike(lent.names, names):
            missing = names[len(lent.names) :]
            originals = [self._original(item, leaves, pinned) for item in missing]
            if None not in originals:
                given = lent.give(missing, cast("list[Original]", originals))
                return given if len(given) == len(names) else given[: len(names)]
        # Another caller has added others meanwhile, or there are some that are no plain ones.
        return [
            lent.originals[item].copy()[0]
            if item in lent.originals
            else self._value(item, leaves, pinned)
            for item in names
        ]

    def _original(self, name: str, leaves: Mapping[str, Leaf], pinned: Pinned) -> Original | None:
        """Return a value to copy; None if it is no plain one."""
        if pinned.originals[name] is None:
            self._value(name, leaves, pinned)
        return pinned.originals[name]

    def _value(self, name: str, leaves: Mapping[str, Leaf], pinned: Pinned) -> Any:
        original = pinned.originals[name]
        if original is not None:
            return original.copy()[0]
        stored = _leaf(name, leaves)
        value = self._decode(stored.kind, b64decode(stored.data))
        held = _held([value], {type(value)})
        if held is not None and is_plain(held[0]):
            original = pinned.originals[name] = Original(value, held[0])
            self._originals.put(name, original, len(stored.data) + ORIGINAL_BYTES)
        return value

    def _decode(self, kind: str, data: bytes) -> Any:
        try:
            return self._serde.loads_typed((kind, data))
        except FormatError:
            raise
        except Exception as error:
            message = f"its {kind} cannot be read: {error}"
            raise CorruptRecordError(message, type=kind) from error


def _begin_alike(names: tuple[str, ...], others: tuple[str, ...]) -> bool:
    size = min(len(names), len(others))
    return names[:size] == others[:size]


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
    return type(value) is list and bool(value) and _PLAIN.isdisjoint(map(type, value))


# What objects hold, if all of it is plain JSON: then it can be compared, and copied


def _held(values: list[Any], types: set[type]) -> list[dict[str, Any]] | None:
    """Return what dicts, or pydantic objects, hold; None if there are others."""
    if types == {dict}:
        return values
    if not all(map(_is_model, types)) or any(map(_extra_of, values)):
        return None
    return list(map(_dict_of, values))


_extra_of = attrgetter("__pydantic_extra__")
_private_of = attrgetter("__pydantic_private__")
_dict_of = attrgetter("__dict__")


@lru_cache(256)
def _is_model(cls: type) -> bool:
    """Whether all that an object has of its own is in its fields: not in private ones, or slots."""
    if not issubclass(cls, pydantic.BaseModel) or cls.__private_attributes__:
        return False
    own = (base for base in cls.__mro__ if base not in pydantic.BaseModel.__mro__)
    return not any(vars(base).get("__slots__") for base in own)


def _same(stored: _Stored, types: list[type], held: list[dict[str, Any]]) -> int:
    """Return how many items a list begins with as another one did when it was stored."""
    same = min(len(stored.names), len(types))
    try:
        if types[:same] != stored.types[:same] or held[:same] != stored.held[:same]:
            pairs = zip(types, held, stored.types, stored.held, strict=False)
            same = next(
                at
                for at, (cls, now, cls_then, then) in enumerate(pairs)
                if cls is not cls_then or now != then
            )
        numbers = stored.numbers.items()
        return next((at for at, then in numbers if at < same and _exact(held[at]) != then), same)
    except Exception:  # noqa: BLE001  # of a value that cannot be compared, such as an array
        return 0


def _remembered(
    stored: _Stored, same: int, types: list[type], fresh: list[Any], names: list[str]
) -> _Stored:
    """Return a list that is stored now, of which so many items were before."""
    numbers = {at: then for at, then in stored.numbers.items() if at < same}
    numbers |= {at: _exact(item) for at, item in enumerate(fresh, same) if _has_numbers(item)}
    return _Stored(types, stored.held[:same] + fresh, names, numbers)


def _exact(held: Any) -> str | None:
    """Return what differs if anything does, be it from 1 to True; None if it is no plain value."""
    return repr(held) if is_plain(held) else None


def _has_numbers(value: Any) -> bool:
    if type(value) in (dict, list):
        return any(map(_has_numbers, value.values() if type(value) is dict else value))
    return type(value) in (int, float, bool)


def _deep_copy(value: Any) -> Any:
    if type(value) is dict:
        return {key: _deep_copy(item) for key, item in value.items()}
    if type(value) is list:
        return [_deep_copy(item) for item in value]
    return value


def _containers(value: Any) -> Iterator[Any]:
    """Return a dict or list, and those in it."""
    yield value
    for item in value.values() if type(value) is dict else value:
        if type(item) in (dict, list):
            yield from _containers(item)
