"""JSON of the store: encode and decode stored bytes with limits, raising perdure's errors only.

Depth and size are checked on the bytes, before anything is decoded, so that nested data cannot
crash the process. Error messages hold paths, types and sizes, no content.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, Final, TypeVar, overload

import msgspec

from perdure.errors import CorruptRecordError, FormatError, NotStorableError, TooLargeError

MAX_DEPTH = 200
"""The most levels of anything stored: a line of the log, a document."""
MAX_PAYLOAD_DEPTH = 192
"""The most levels of a record's payload; the rest is for its wrapper."""
MAX_VALUE_DEPTH = 184
"""The most levels of a value inside a payload."""
MAX_RECORD_BYTES = 16 * 1024 * 1024
"""The largest payload by default."""
MAX_CONTAINERS = 250_000
"""The most lists and dicts in a value, counted as often as each is written: a value with shared
parts can be small in memory, and endless when it is encoded."""

# A string that never ends swallows the rest, as it does for a decoder.
_STRING = re.compile(rb'"[^"]*+(?:"|\Z)')
_NO_SIGNS = bytes(set(range(256)) - set(b'[]{}"'))
_PLAIN_BRACKETS = bytes.maketrans(b"{}", b"[]")
_SIGNS = bytes.maketrans(b"[]", b"\x01\xff")
_ESCAPE = re.compile(rb'\\["\\]')
_COLLAPSES = 4
_LONG = 64 * 1024
"""Bytes from which on two passes over them are worth avoiding."""
_SAMPLE = 4 * 1024


def depth_of(data: bytes) -> int:
    """Return how many levels of arrays and objects JSON has.

    For bytes that are not JSON it is at least the depth that a decoder reaches before it fails.

    >>> depth_of(b'{"a": [1, "[[["]}')
    2
    """
    # Two quotes in a row are an empty string, or join two strings: most are gone by that.
    signs = _signs(data).replace(b'""', b"")
    brackets = _STRING.sub(b"", signs)
    for height in range(_COLLAPSES):  # most JSON is wide and shallow: this empties it
        if not brackets:
            return height
        brackets = brackets.replace(b"[]", b"")
    deepest = max(accumulate(array("b", brackets.translate(_SIGNS))), default=0)
    return _COLLAPSES + max(deepest, 0)


def _signs(data: bytes) -> bytes:
    """Return the brackets and quotes of JSON, all brackets as square ones."""
    if b"\\" in data:  # escaped quotes begin and end no string
        # A pattern passes by line breaks several times as fast as `replace`, which is faster only
        # where there are many escapes to remove.
        few = len(data) // 256
        data, removed = _ESCAPE.subn(b"", data, few)
        if removed == few:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return data.translate(_PLAIN_BRACKETS, _NO_SIGNS)


def is_deeper(data: bytes, limit: int) -> bool:
    """Return whether JSON has more than ``limit`` levels."""
    size = len(data)
    if size > _LONG:
        sample = data[size // 2 : size // 2 + _SAMPLE]
        begun = 2 * _SAMPLE - len(sample.replace(b"[", b"")) - len(sample.replace(b"{", b""))
        if begun * size > 4 * limit * _SAMPLE:  # a long list, as it seems: not one long text
            return depth_of(data) > limit
    # `replace` finds the few brackets of long text several times faster than `count`.
    plain = len(data.replace(b"[", b"")) + len(data.replace(b"{", b""))
    return 2 * size - plain > limit and depth_of(data) > limit


def check_depth(data: bytes, limit: int = MAX_DEPTH) -> None:
    """Raise for stored bytes that nest too deep to be decoded safely.

    Raises:
        CorruptRecordError: They have more than ``limit`` levels: perdure did not write them.

    """
    if is_deeper(data, limit):
        raise CorruptRecordError(
            f"{len(data)} stored bytes nest deeper than {limit} levels: perdure never writes "
            "such data, so they are damaged or foreign; restore them from a copy",
            size=len(data),
            limit=limit,
        )


def check_size(size: int, limit: int = MAX_RECORD_BYTES, *, at: str = "$") -> None:
    """Raise for a value of ``size`` encoded bytes that is above ``limit``.

    Raises:
        TooLargeError: It is.

    """
    if size > limit:
        raise TooLargeError(
            f"the value at {at} takes {size} bytes, the limit is {limit}: split it, or keep large "
            "content elsewhere and store a reference",
            path=at,
            size=size,
            limit=limit,
        )


def too_deep(at: str, limit: int) -> NotStorableError:
    """Return the error for a value that nests deeper than ``limit`` levels."""
    return TooLargeError(
        f"the value at {at} nests deeper than {limit} levels: store it flatter, or as text",
        path=at,
        limit=limit,
    )


# One thread at a time may introduce a type to msgspec: it inspects a struct's fields at the first
# decode, calls Python code meanwhile, and exposes the half-built state to every other thread, which
# then crashes the process with a segmentation fault. So types that threads decode get their
# decoder here.


T = TypeVar("T")

_MOST = 4096
_ready: dict[Any, msgspec.json.Decoder[Any]] = {}
_learning = threading.RLock()


@overload
def decoder_of(type: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def decoder_of(type: Any) -> msgspec.json.Decoder[Any]: ...
def decoder_of(type: Any) -> msgspec.json.Decoder[Any]:  # msgspec's word
    """Return the decoder of a type, which any thread may use.

    >>> decoder_of(list[int]).decode(b"[1,2]")
    [1, 2]
    """
    decoder = _ready.get(type)
    if decoder is None:
        with _learning:
            decoder = _ready.get(type) or msgspec.json.Decoder(type)
            if len(_ready) < _MOST:
                _ready[type] = decoder
    return decoder


_encode = msgspec.json.Encoder().encode
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

# Messages of msgspec that quote a value: cut before the quotation.
_QUOTED = re.compile(r"(Invalid (?:enum )?value|unknown field) .*?(?= - at `|$)", re.DOTALL)


BOM: Final = b"\xef\xbb\xbf"
"""Byte-order mark that some editors write at the beginning of UTF-8; it is no JSON."""
_UTF_16: Final = re.compile(rb"\xff\xfe|\xfe\xff|\0[^\0]|[^\0]\0")


def as_utf8(data: bytes) -> bytes:
    """Return the beginning of a file that people may have edited, without a byte-order mark.

    Raises:
        CorruptRecordError: It is UTF-16, as some editors and shells write text.

    """
    if _UTF_16.match(data):
        raise CorruptRecordError("it is UTF-16: save the file as UTF-8", size=len(data))
    return data.removeprefix(BOM)


def require_utf8(data: bytes) -> None:
    """Raise CorruptRecordError for bytes that are no UTF-8; a decoder passes raw parts by."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise corrupt(error, len(data)) from None


@overload
def decode(data: bytes, type: type[T], *, limit: int = MAX_DEPTH) -> T: ...
@overload
def decode(data: bytes, type: Any = Any, *, limit: int = MAX_DEPTH) -> Any: ...
def decode(data: bytes, type: Any = Any, *, limit: int = MAX_DEPTH) -> Any:  # msgspec's word
    """Decode stored JSON, as a type if one is given.

    Raises:
        CorruptRecordError: The bytes are not JSON, not UTF-8, too deep, or not of the type.

    """
    return decode_with(_ANY if type is Any else decoder_of(type), data, limit=limit)


def decode_with(decoder: msgspec.json.Decoder[T], data: bytes, *, limit: int = MAX_DEPTH) -> T:
    """Decode stored JSON with a given decoder; errors as `decode`."""
    check_depth(data, limit)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise corrupt(error, len(data), sealed=data[:1] == b'"') from None
    except RecursionError:
        # The depth is within the limit: the caller has no stack left.
        raise FormatError(
            f"{len(data)} stored bytes cannot be decoded: the call stack is too deep here",
            size=len(data),
        ) from None


def corrupt(
    error: Exception, size: int, at: str = "", *, sealed: bool = False
) -> CorruptRecordError:
    """Return the error for stored bytes that raised ``error``, without their content.

    ``sealed`` bytes are a JSON string where an object is due: encryption and compression write
    such.
    """
    cause = "they are not UTF-8" if isinstance(error, UnicodeDecodeError) else reason(error)
    place = f" at {at}" if at else ""
    cure = "; if the store is encrypted or compressed, its URL has to say so" if sealed else ""
    return CorruptRecordError(
        f"{size} stored bytes cannot be read{place}: {cause}; they were left as they are{cure}",
        size=size,
        path=at,
    )


def reason(error: Exception) -> str:
    """Return the message of msgspec, without the values that it quotes.

    >>> reason(msgspec.ValidationError("Invalid enum value 'my key' - at `$.role`"))
    'Invalid enum value - at `$.role`'
    """
    return _QUOTED.sub(r"\1", str(error))


def encode(value: Any) -> bytes:
    """Encode perdure's own structs, and values from `lower`, as one line of JSON.

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
        yield from ((f".{field.name}", getattr(value, field.name)) for field in fields(value))


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


def not_storable(at: str, value: object, reason: str) -> NotStorableError:
    """Return the error for a value at a path: it names the type and the cure, not the value."""
    name = type(value).__name__
    return NotStorableError(f"the {name} at {at} cannot be stored: {reason}", path=at, type=name)


def step(key: object) -> str:
    """Return the part of a path for a key.

    >>> step("a") + step("b c")
    '.a["b c"]'
    """
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    shown = key if isinstance(key, str) else repr(type(key).__name__)
    return f'["{shown[:64].encode("ascii", "backslashreplace").decode()}"]'
