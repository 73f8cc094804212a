"""How instances of a class come apart into data, and together again.

Dataclasses and msgspec Structs field by field, through msgspec's conversion by annotation;
enums by their value, or by their name where the value is neither text nor an integer;
pydantic models (known by their methods: pydantic is not imported) by their own JSON. The data
may hold whatever `perdure.codec.values` can store.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from perdure.errors import ConfigError

__all__ = ["Shape", "shape_of"]


class Shape(NamedTuple):
    """What to do with the instances of one class."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    """For classes without an ``__eq__``: whether two instances hold the same."""


def shape_of(cls: type) -> Shape | None:
    """Return the shape of a class's instances, None where there is none.

    Raises:
        ConfigError: An annotation of its fields cannot be understood.

    """
    if issubclass(cls, Enum):
        return _enum(cls)
    if issubclass(cls, msgspec.Struct):
        return _by_fields(cls, {one.name: one.encode_name for one in msgspec.structs.fields(cls)})
    if is_dataclass(cls):
        return _by_fields(cls, {one.name: one.name for one in fields(cls)})
    if hasattr(cls, "model_dump") and hasattr(cls, "model_validate"):
        return _pydantic(cls)
    return None


def _enum(cls: Any) -> Shape:
    def dump(one: Any) -> Any:
        return one.value if type(one.value) in (str, int) else {"name": one.name}

    def load(data: Any) -> Any:
        return cls[data["name"]] if isinstance(data, dict) else cls(data)

    return Shape(dump, load, lambda one, other: one is other)


def _by_fields(cls: type, names: dict[str, str]) -> Shape:
    def dump(one: Any) -> dict[str, Any]:
        pairs = ((stored, getattr(one, name)) for name, stored in names.items())
        return {stored: value for stored, value in pairs if value is not msgspec.UNSET}

    return Shape(dump, _loader(cls), lambda one, other: dump(one) == dump(other))


def _loader(cls: type) -> Callable[[Any], Any]:
    try:
        msgspec.json.Decoder(cls)
    except NameError as error:
        message = (
            f"types: an annotation of {cls.__name__} names {error.name!r}, which its module "
            "does not have at run time: import it there outside of TYPE_CHECKING"
        )
        raise ConfigError(message, option="types") from None
    except TypeError:
        # A union that msgspec cannot tell apart. Tags can: the fields come as instances.
        return lambda data: cls(**data)
    return lambda data: msgspec.convert(data, cls)


def _pydantic(cls: Any) -> Shape:
    def dump(one: Any) -> Any:
        return one.model_dump(mode="json", by_alias=True, round_trip=True)

    # Private attributes are no data: what counts is what the fields hold.
    return Shape(dump, cls.model_validate, lambda one, other: bool(vars(one) == vars(other)))
