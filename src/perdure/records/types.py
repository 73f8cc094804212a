"""The type registry: an application's own types, their stable tags, versions and adapters."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import msgspec

from perdure.errors import (
    CorruptRecordError,
    InvalidArgumentError,
    NotStorableError,
    UnsupportedVersionError,
)
from perdure.records import json
from perdure.records.records import Entry
from perdure.records.values import UNKNOWN, OpaqueValue, Tags, label_of, lift, lower, parse_label


class TypeAdapter(NamedTuple):
    """Encoding, decoding and comparison of one class's instances."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    """For classes without an ``__eq__``: whether two instances have equal fields."""


def shape_of(cls: type) -> TypeAdapter | None:
    """Return the adapter of a class, None if it cannot be registered.

    Raises:
        InvalidArgumentError: An annotation of its fields cannot be understood.

    """
    if issubclass(cls, Enum):
        return _enum(cls)
    if issubclass(cls, msgspec.Struct):
        return _by_fields(
            cls, {field.name: field.encode_name for field in msgspec.structs.fields(cls)}
        )
    if is_dataclass(cls):
        return _by_fields(cls, {field.name: field.name for field in fields(cls)})
    if hasattr(cls, "model_dump") and hasattr(cls, "model_validate"):
        return _pydantic(cls)
    return None


def _enum(cls: Any) -> TypeAdapter:
    def dump(member: Any) -> Any:
        return member.value if type(member.value) in (str, int) else {"name": member.name}

    def load(data: Any) -> Any:
        return cls[data["name"]] if isinstance(data, dict) else cls(data)

    return TypeAdapter(dump, load, lambda member, other: member is other)


def _by_fields(cls: type, names: dict[str, str]) -> TypeAdapter:
    def dump(member: Any) -> dict[str, Any]:
        pairs = ((stored, getattr(member, name)) for name, stored in names.items())
        return {stored: value for stored, value in pairs if value is not msgspec.UNSET}

    return TypeAdapter(dump, _loader(cls), lambda member, other: dump(member) == dump(other))


def _loader(cls: type) -> Callable[[Any], Any]:
    try:
        msgspec.json.Decoder(cls)
    except NameError as error:
        raise InvalidArgumentError(
            f"types: an annotation of {cls.__name__} names {error.name!r}, which its module "
            "does not have at run time: import it there outside of TYPE_CHECKING",
            option="types",
        ) from None
    except TypeError:
        # A union that msgspec cannot distinguish. Tags can: the fields come as instances.
        return partial(_by_keywords, cls)
    return lambda data: msgspec.convert(data, cls)


def _by_keywords(cls: Callable[..., Any], data: Any) -> Any:
    try:
        inspect.signature(cls).bind(**data)
    except TypeError as error:  # it names fields only; values come with the call
        raise msgspec.ValidationError(str(error).replace("'", "`")) from None
    return cls(**data)


def _pydantic(cls: Any) -> TypeAdapter:
    def dump(value: Any) -> Any:
        return value.model_dump(mode="json", by_alias=True, round_trip=True)

    # Private attributes are no data: only the fields are compared.
    return TypeAdapter(
        dump, cls.model_validate, lambda value, other: bool(vars(value) == vars(other))
    )


# A registered dataclass, msgspec Struct, enum or pydantic model can be a part of any stored value,
# or a record by itself (kind ``x:<tag>``), and comes back as itself. Stored are a tag that
# the application chose, never an import path, and the fields: reading cannot run anything but the
# registered types and their upcasts.
# A type that changes its fields gets a higher version, and an upcast for each older version that
# may be stored. Data whose tag is not registered, or whose version is newer, comes back as an
# `OpaqueValue` and is written again unchanged.


log: logging.Logger = logging.getLogger("perdure.records")

Upcast = Callable[[dict[str, Any]], dict[str, Any]]

KIND_PREFIX = "x:"
"""The prefix of the kinds of records of registered types."""
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,47}")
_ALIAS = re.compile(r"[A-Za-z_][\w.-]*")


class Registered(msgspec.Struct, frozen=True):
    """A type with its tag, version and upcasts; created by `register`."""

    cls: type
    tag: str
    version: int = 1
    upcasts: Mapping[int, Upcast] = {}
    aliases: tuple[str, ...] = ()


def register(
    cls: type,
    *,
    tag: str | None = None,
    version: int = 1,
    upcasts: Mapping[int, Upcast] | None = None,
    aliases: Sequence[str] = (),
) -> Registered:
    """Return a type for ``types=[…]`` with a tag, a version and upcasts of its own.

    Args:
        cls: A dataclass, a msgspec Struct, an enum, or a pydantic model.
        tag: Its permanent name in stored data; the class's name by default.
        version: Raise it when stored fields change their meaning or shape.
        upcasts: By version, the function from its fields to those of the next version.
        aliases: Names under which it was stored before: other tags, and for LangGraph's
            checkpoints the module and class from which it was moved, ``"app.models.Place"``.

    Raises:
        InvalidArgumentError: An argument is invalid.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Place:
    ...     town: str
    >>> renamed = {1: lambda fields: {"town": fields["name"]}}
    >>> register(Place, tag="place", version=2, upcasts=renamed, aliases=["Location"]).version
    2
    """
    name = cls.__name__ if tag is None else tag
    if not _TAG.fullmatch(name):
        raise InvalidArgumentError(
            f"invalid tag={name!r} of {cls.__name__}: use 1 to 48 letters, digits, "
            "'_', '.', '-', a letter first",
            option="tag",
            tag=name,
        )
    given: Any = aliases
    if isinstance(given, str) or not all(
        isinstance(alias, str) and _ALIAS.fullmatch(alias) for alias in given
    ):
        raise InvalidArgumentError(
            f"invalid aliases={aliases!r} of {name!r}: give a list of earlier tags, or of modules "
            "and classes such as 'app.models.Place'",
            option="aliases",
            tag=name,
        )
    if version < 1:
        raise InvalidArgumentError(
            f"invalid version={version!r} of {name!r}: it is a whole number from 1",
            option="version",
            tag=name,
        )
    steps = dict(upcasts or {})
    gap = sorted(set(range(min(steps, default=version), version)) ^ set(steps))
    if gap:
        raise InvalidArgumentError(
            f"the upcasts of {name!r} do not lead to version {version}: they lack, or should "
            f"not have, one from version {gap[0]}",
            option="upcasts",
            tag=name,
            version=gap[0],
        )
    return Registered(cls, name, version, steps, tuple(aliases))


class StoredType(msgspec.Struct, frozen=True):
    """A type that stored data is read as: the one way back from fields to an instance."""

    registered: Registered
    shape: TypeAdapter
    label: str

    @classmethod
    def of(cls, registered: Registered) -> StoredType | None:
        """Return the type of a registration; None if the class cannot be registered."""
        shape = shape_of(registered.cls)
        if shape is None:
            return None
        return cls(registered, shape, label_of(registered.tag, registered.version))

    def is_named(self, tag: str) -> bool:
        """Return whether data with this tag is of this type."""
        return tag == self.registered.tag or tag in self.registered.aliases

    def load(self, version: int, data: Any, of: str = "stored data") -> Any:
        """Return the instance that data of a version is.

        Args:
            version: The version that was stored.
            data: Its fields, or an enum's value.
            of: What holds it, for errors.

        Raises:
            CorruptRecordError: The data does not match the type, or an upcast raises.
            UnsupportedVersionError: The version is newer, or there is no upcast from it.

        """
        registered = self.registered
        name, tag, newest = registered.cls.__name__, registered.tag, registered.version
        if version > newest:
            raise UnsupportedVersionError(
                f"{of} of {tag!r} has version {version}, and {name} is registered with version "
                f"{newest}: use the newer program, or register({name}, version={version}, …)",
                tag=tag,
                version=version,
                type=name,
            )
        data = upcast(registered, version, data, of)
        try:
            return self.shape.load(data)
        except Exception as error:  # noqa: BLE001  # the user's own constructors and validators
            reason, field = _mismatch(registered.cls, error)
        cure = (
            f"have its upcasts return the fields of version {newest}"
            if version < newest
            else f"if its fields have changed since, register({name}, version={version + 1}, "
            f"upcasts={{{version}: …}})"
        )
        # Raised outside of the handler, so that no traceback shows the values that it quotes.
        raise CorruptRecordError(
            f"{of} of {tag!r} version {version} does not match {name}: {reason}; {cure}. It was "
            "left as it is",
            tag=tag,
            version=version,
            type=name,
            field=field,
        )


def _mismatch(cls: type, error: Exception) -> tuple[str, str | None]:
    """Return why data does not match its type, without values of it, and the field's name."""
    if isinstance(error, msgspec.ValidationError):
        reason = json.reason(error)
        _, _, place = reason.partition(" - at `$.")
        named = re.search(r"(?:field|argument:?) `([^`]+)`", reason)
        steps = [place.rstrip("`"), "" if named is None else named[1]]
        return reason, ".".join(filter(None, steps)) or None
    model_fields: Any = getattr(cls, "model_fields", None)
    if model_fields is not None and hasattr(error, "errors"):  # pydantic's ValidationError
        names = {*model_fields, *(field.alias for field in model_fields.values())}
        found = []
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            # Deeper places may be keys of the data, and so may the names of unknown fields.
            field = next((name for name in problem["loc"][:1] if name in names), None)
            kind = str(problem["type"]).replace("_", " ")
            found.append((field, kind if field is None else f"field `{field}`: {kind}"))
        return ", ".join(said for _, said in found[:3]), found[0][0]
    return f"its type raises {type(error).__name__}", None


class _Wire(msgspec.Struct, omit_defaults=True):
    """The payload of a record of a registered type."""

    v: int
    data: msgspec.Raw
    types: Tags | None = None


class Registry:
    """The registered types of one application; immutable.

    Raises:
        InvalidArgumentError: A type cannot be stored, or a tag or a type occurs twice.

    """

    __slots__ = ("_by_tag", "_by_type", "_parts", "_warned")

    def __init__(self, types: Iterable[type | Registered] = ()) -> None:
        self._by_type: dict[type, StoredType] = {}
        self._by_tag: dict[str, StoredType] = {}
        self._parts: dict[type, TypeAdapter | None] = {}
        self._warned: set[str] = set()
        for cls in types:
            self._add(cls if isinstance(cls, Registered) else register(cls))

    def _add(self, registered: Registered) -> None:
        cls, tag = registered.cls, registered.tag
        taken = [name for name in (tag, *registered.aliases) if name in self._by_tag]
        if taken or cls in self._by_type:
            tag = (*taken, tag)[0]
            raise InvalidArgumentError(
                f"types: {cls.__name__} is registered twice, or another type has its tag {tag!r}: "
                "register each once, with register(cls, tag=…) to distinguish them",
                option="types",
                tag=tag,
            )
        known = StoredType.of(registered)
        if known is None:
            raise InvalidArgumentError(
                f"types: {cls.__name__} cannot be registered: use a dataclass, a msgspec "
                "Struct, an enum or a pydantic model",
                option="types",
                tag=tag,
            )
        self._by_type[cls] = self._by_tag[tag] = known
        for alias in registered.aliases:
            self._by_tag[alias] = known

    @property
    def tags(self) -> tuple[str, ...]:
        """The registered tags, in the order of registration."""
        return tuple(known.registered.tag for known in self._by_type.values())

    def type_of(self, cls: Any) -> StoredType | None:
        """Return how instances of a class are read: as registered, else under its own name.

        None if it cannot be registered.
        """
        known = self._by_type.get(cls)
        if known is None and isinstance(cls, type) and _TAG.fullmatch(cls.__name__):
            known = StoredType.of(Registered(cls, cls.__name__))
        return known

    def encode_record(self, value: Any) -> Entry:
        """Return an instance of a registered type, or an `OpaqueValue`, as a record by itself.

        Raises:
            NotStorableError: Its type is not registered, or some part of it cannot be stored.

        """
        known = self._by_type.get(type(value))
        if not isinstance(value, OpaqueValue) and known is None:
            name, cure = type(value).__name__, "put it into a Message, such as Message.user(…)"
            if type(value).__module__ != "builtins":
                cure = "register the type, connect(types=[…]), or put it into a Message"
            raise NotStorableError(
                f"an instance of {name} cannot be stored as a record: {cure}",
                path="$",
                type=type(value).__name__,
            )
        data, tags = lower(value, self)
        label = (tags or {}).pop("", "")
        tag, version = parse_label(label)
        wire = {"v": version, "data": data}
        if tags:
            wire["types"] = tags
        return Entry(KIND_PREFIX + tag, json.encode(wire))

    def decode_record(self, kind: str, payload: bytes) -> Any:
        """Return the instance that a record of kind ``x:<tag>`` holds, or an `OpaqueValue`.

        Raises:
            CorruptRecordError: The payload is damaged, or does not match the type.
            UnsupportedVersionError: There is no upcast from its version.

        """
        wire = json.decode(payload, _Wire)
        label = label_of(kind.removeprefix(KIND_PREFIX), wire.v)
        if not self.knows(label):
            data = msgspec.Raw(bytes(wire.data))  # a copy: it does not keep the payload alive
            return OpaqueValue(kind.removeprefix(KIND_PREFIX), wire.v, data, wire.types or {})
        return lift(json.decode(bytes(wire.data)), {**(wire.types or {}), "": label}, self)

    # The protocol `perdure.records.values.Types`.

    def dump(self, value: Any) -> tuple[str, Any] | None:
        """Return label and data of an instance of a registered type, else None."""
        known = self._by_type.get(type(value))
        return None if known is None else (known.label, known.shape.dump(value))

    def part(self, value: Any) -> Any:
        """Return the data of an instance that only occurs inside of registered types."""
        cls = type(value)
        if cls not in self._parts:
            self._parts[cls] = shape_of(cls)
        shape = self._parts[cls]
        return UNKNOWN if shape is None else shape.dump(value)

    def knows(self, label: str) -> bool:
        """Return whether a stored value with this label can be read; warn if it is newer."""
        tag, version = parse_label(label)
        known = self._by_tag.get(tag) if version else None
        if known is None:
            return False
        newest = known.registered.version
        if version > newest and label not in self._warned:
            self._warned.add(label)
            log.warning(
                "stored data has a newer version of a type than is registered; it is kept as it is",
                extra={"tag": tag, "stored_version": version, "registered_version": newest},
            )
        return version <= newest

    def load(self, label: str, data: Any) -> Any:
        """Return the instance that has this data; raises as `decode_record`."""
        tag, version = parse_label(label)
        return self._by_tag[tag].load(version, data)

    def same(self, left: Any, right: Any) -> bool:
        """Return whether an instance came back equal to itself."""
        if type(left) is not type(right):
            return False
        if isinstance(left, Enum):
            return left is right
        return bool(left == right) or self._by_type[type(left)].shape.same(left, right)


def upcast(registered: Registered, version: int, data: Any, of: str) -> Any:
    """Return data of a version as the registered one has it; *of* says whose, for errors.

    Raises:
        CorruptRecordError: An upcast raises.
        UnsupportedVersionError: There is no upcast from a version.

    """
    for at in range(version, registered.version):
        step = registered.upcasts.get(at)
        if step is None:
            raise UnsupportedVersionError(
                f"{of} of {registered.tag!r} has version {at}, and there is no upcast "
                f"from it: add one, register({registered.cls.__name__}, upcasts={{{at}: …}})",
                tag=registered.tag,
                version=at,
                type=registered.cls.__name__,
            )
        try:
            data = step(data)
        except Exception as error:  # the user's code: any error may come
            raise CorruptRecordError(
                f"the upcast of {registered.tag!r} from version {at} raises "
                f"{type(error).__name__}: fix it; {of} was left as it is",
                tag=registered.tag,
                version=at,
                type=registered.cls.__name__,
            ) from error
    return data
