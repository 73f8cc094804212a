"""How deep and how large stored JSON may be: checked on bytes, before anything decodes them.

A decoder that recurses can overflow the stack of its thread and take the process down, so
the depth is measured first, by a linear scan that never recurses. Input of any shape is
answered: what is not JSON at all passes here and is refused by the decoder.

Three depths nest, so that what was accepted stays readable in whatever wraps it: a value
(a tool's arguments, a state) sits in a record's payload, a payload sits in a line of the log
or in a document.

Pure.
"""

from __future__ import annotations

import re
from array import array
from itertools import accumulate

from perdure.errors import CorruptRecordError, NotStorableError, TooLargeError

__all__ = [
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_PAYLOAD_DEPTH",
    "MAX_RECORD_BYTES",
    "MAX_VALUE_DEPTH",
    "check_depth",
    "check_size",
    "depth_of",
    "is_deeper",
]

MAX_DEPTH = 200
"""The most levels of anything stored: a line of the log, a document."""
MAX_PAYLOAD_DEPTH = 192
"""The most levels of a record's payload; the rest is for what wraps it."""
MAX_VALUE_DEPTH = 184
"""The most levels of a value inside a payload."""
MAX_RECORD_BYTES = 16 * 1024 * 1024
"""The largest payload, where nobody says otherwise."""
MAX_CONTAINERS = 250_000
"""The most lists and dicts in a value, as often as each is written: what shares its parts can
be small in memory, and endless when it is encoded."""

# Possessive, and always a match once a quote is seen: linear on any input. A string that never
# ends, or ends in a lone backslash, swallows the rest, as it does for a decoder.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PLAIN_BRACKETS = bytes.maketrans(b"{}", b"[]")
_SIGNS = bytes.maketrans(b"[]", b"\x01\xff")
_COLLAPSES = 4


def depth_of(data: bytes) -> int:
    """Return how many levels of arrays and objects JSON has.

    Bytes that are not JSON get a number that is at least the depth which a decoder would
    reach before it gives up on them.

    >>> depth_of(b'{"a": [1, "[[["]}')
    2
    """
    brackets = _STRING.sub(b"", data).translate(_PLAIN_BRACKETS, _NO_BRACKETS)
    for height in range(_COLLAPSES):  # most JSON is wide and shallow: this empties it
        if not brackets:
            return height
        brackets = brackets.replace(b"[]", b"")
    deepest = max(accumulate(array("b", brackets.translate(_SIGNS))), default=0)
    return _COLLAPSES + max(deepest, 0)


def is_deeper(data: bytes, limit: int) -> bool:
    """Tell whether JSON has more than ``limit`` levels."""
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    return depth_of(data) > limit


def check_depth(data: bytes, limit: int = MAX_DEPTH) -> None:
    """Refuse stored bytes that nest too deep to be decoded safely.

    Raises:
        CorruptRecordError: They have more than ``limit`` levels: perdure did not write them.

    """
    if is_deeper(data, limit):
        message = (
            f"{len(data)} stored bytes nest deeper than {limit} levels: perdure never writes "
            "such data, so they are damaged or foreign; restore them from a copy"
        )
        raise CorruptRecordError(message, size=len(data), limit=limit)


def check_size(size: int, limit: int = MAX_RECORD_BYTES, *, at: str = "$") -> None:
    """Refuse a value of ``size`` encoded bytes that is above ``limit``.

    Raises:
        TooLargeError: It is.

    """
    if size > limit:
        message = (
            f"the value at {at} takes {size} bytes, the limit is {limit}: split it, or keep large "
            "content elsewhere and store a reference"
        )
        raise TooLargeError(message, path=at, size=size, limit=limit)


def too_deep(at: str, limit: int) -> NotStorableError:
    """Return the error for a value that nests deeper than ``limit`` levels."""
    message = f"the value at {at} nests deeper than {limit} levels: store it flatter, or as text"
    return TooLargeError(message, path=at, limit=limit)
