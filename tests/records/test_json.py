"""The one door for JSON: nothing but perdure's errors come out of it, without content."""

from __future__ import annotations

import enum
import sys
from typing import Any

import msgspec
import pytest

from perdure.errors import CorruptRecordError, FormatError, NotStorableError, TooLargeError
from perdure.records.json import decode, encode

SECRET = "canary-7f3a"


class Color(enum.Enum):
    RED = "red"


class Thing(msgspec.Struct):
    color: Color
    size: int = 0


def test_what_was_encoded_decodes() -> None:
    value = {"a": [1, 1.0, None, True, "é"], "b": {}}
    assert decode(encode(value)) == value
    assert decode(encode(Thing(Color.RED)), Thing) == Thing(Color.RED)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1,]", b"nul", b"1 2", b"NaN", b"1e400", b'"\xff"', b'"\xed\xa0\x80"']
    + [b'"\\ud800"', b'"\\udc00"', b'{"a":1}x', b"\x80\x04K\x01.", b"1" * 5000],
)
def test_damaged_bytes_are_a_corrupt_record(data: bytes) -> None:
    with pytest.raises(CorruptRecordError, match=f"{len(data)} stored bytes"):
        decode(data)


def test_the_wrong_type_names_the_place() -> None:
    with pytest.raises(CorruptRecordError, match=r"Expected `int`, got `str` - at `\$\.size`"):
        decode(b'{"color":"red","size":"x"}', Thing)


@pytest.mark.parametrize("data", [b'{"color":"%s"}', b'{"color":"red","size":"%s"}', b'["%s"'])
def test_an_error_does_not_quote_what_was_stored(data: bytes) -> None:
    with pytest.raises(CorruptRecordError) as caught:
        decode(data % SECRET.encode(), Thing)
    error: BaseException | None = caught.value
    assert SECRET not in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {"b c": object()}]}, r'the object at \$\.a\[1\]\["b c"\] cannot be stored'),
        ({"a": ["\ud800"]}, r"the str at \$\.a\[0\] cannot be stored: it holds a lone surrogate"),
        ({"a": {None: 1}}, r"the dict at \$\.a cannot be stored: a key is not text"),
        ({"\ud800": 1}, r"the dict at \$ cannot be stored: a key is not text"),
        ({"n": 10**5000}, r"the int at \$\.n cannot be stored: it has too many digits"),
        (Thing(Color.RED, size=object()), r"the object at \$\.size"),
    ],
)
def test_what_cannot_be_encoded_is_named_by_its_path(value: Any, said: str) -> None:
    with pytest.raises(NotStorableError, match=said):
        encode(value)


def test_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(TooLargeError, match="deeper than"):
        encode(circle)


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 and later count the levels of C code apart"
)
def test_no_stack_left_is_not_called_damage() -> None:
    data = b"[" * 190 + b"]" * 190

    def dive(levels: int) -> None:
        if levels:
            dive(levels - 1)
        else:
            decode(data)

    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    with pytest.raises(FormatError, match="call stack is too deep") as caught:
        dive(sys.getrecursionlimit() - depth - 120)
    assert not isinstance(caught.value, CorruptRecordError)
