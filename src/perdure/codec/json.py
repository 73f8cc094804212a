"""The one door for JSON: stored bytes in and out, and only perdure's errors.

``decode`` takes bytes that a store returned. It measures their depth first, so that nothing
nested can crash the process, and whatever is wrong with them is a CorruptRecordError that
names the place. ``encode`` takes perdure's own structs and values that `perdure.codec.values`
has prepared, and gives one line of UTF-8. Messages hold paths, types and sizes, no content.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, overload

import msgspec

from perdure.codec.decoders import decoder_of
from perdure.codec.limits import MAX_DEPTH, check_depth, too_deep
from perdure.errors import CorruptRecordError, FormatError, NotStorableError

__all__ = ["decode", "decode_with", "encode"]

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

# The words of msgspec that quote what they found: they end before it.
_QUOTED = re.compile(r"(Invalid (?:enum )?value|unknown field) .*?(?= - at `|$)", re.DOTALL)


@overload
def decode(data: bytes, *, limit: int = MAX_DEPTH) -> Any: ...
@overload
def decode(data: bytes, type: type[T], *, limit: int = MAX_DEPTH) -> T: ...
@overload
def decode(data: bytes, type: Any, *, limit: int = MAX_DEPTH) -> Any: ...
def decode(data: bytes, type: Any = Any, *, limit: int = MAX_DEPTH) -> Any:  # msgspec's word
    """Decode stored JSON, as a type if one is given.

    Raises:
        CorruptRecordError: The bytes are not JSON, not UTF-8, too deep, or not of the type.

    """
    return decode_with(_ANY if type is Any else decoder_of(type), data, limit=limit)


def decode_with(decoder: msgspec.json.Decoder[T], data: bytes, *, limit: int = MAX_DEPTH) -> T:
    """Decode stored JSON with a decoder that is kept ready; errors as `decode`."""
    check_depth(data, limit)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise corrupt(error, len(data), sealed=data[:1] == b'"') from None
    except RecursionError:
        # The depth is within the limit: it is the caller who has no stack left.
        message = f"{len(data)} stored bytes cannot be decoded: the call stack is too deep here"
        raise FormatError(message, size=len(data)) from None


def corrupt(
    error: Exception, size: int, at: str = "", *, sealed: bool = False
) -> CorruptRecordError:
    """Return the error for stored bytes which ``error`` was raised for, without their content.

    Text, where everything that is stored is an object, is what encryption and compression write.
    """
    why = "they are not UTF-8" if isinstance(error, UnicodeDecodeError) else reason(error)
    where = f" at {at}" if at else ""
    cure = "; if the store is encrypted or compressed, its URL has to say so" if sealed else ""
    message = f"{size} stored bytes cannot be read{where}: {why}; they were left as they are{cure}"
    return CorruptRecordError(message, size=size, path=at)


def reason(error: Exception) -> str:
    """Return what msgspec says, without the values that it quotes.

    >>> reason(msgspec.ValidationError("Invalid enum value 'my key' - at `$.role`"))
    'Invalid enum value - at `$.role`'
    """
    return _QUOTED.sub(r"\1", str(error))


def encode(value: Any) -> bytes:
    """Encode a value as one line of JSON.

    Raises:
        NotStorableError: Something in it is not JSON; the error names path, type and cure.

    """
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        raise _blame(value) from None


def _blame(value: Any) -> NotStorableError:
    """Return the error for the innermost part of a value that cannot be encoded."""
    path = "$"
    for _ in range(MAX_DEPTH):
        for step, child in _children(value):
            if not _is_encodable(child):
                path, value = path + step, child
                break
        else:
            return not_storable(path, value, _why(value))
    return too_deep(path if len(path) < 80 else path[:80] + "…", MAX_DEPTH)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((step(key), child) for key, child in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{at}]", child) for at, child in enumerate(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{one.name}", getattr(value, one.name)) for one in fields(value))


def _is_encodable(value: Any) -> bool:
    try:
        _encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return False
    return True


def _why(value: Any) -> str:
    match value:
        case str():
            return LONE_SURROGATE
        case int():
            return "it has too many digits: store it as text"
        case dict():
            return "a key is not text: use str keys, without lone surrogates"
        case _:
            return "it is not JSON: convert it first"


LONE_SURROGATE = (
    "it holds a lone surrogate, which is not text: clean it with "
    "text.encode('utf-8', 'replace').decode()"
)


def not_storable(at: str, value: object, why: str) -> NotStorableError:
    """Return the error for a value at a path: it names the type and the cure, not the value."""
    name = type(value).__name__
    message = f"the {name} at {at} cannot be stored: {why}"
    return NotStorableError(message, path=at, type=name)


def step(key: object) -> str:
    """Return how a path goes on under a key.

    >>> step("a") + step("b c")
    '.a["b c"]'
    """
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    shown = key if isinstance(key, str) else repr(type(key).__name__)
    return f'["{shown[:64].encode("ascii", "backslashreplace").decode()}"]'
