"""What can be stored comes back as itself; what cannot raises where it is, with the cure."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import json
import math
import threading
import uuid
from decimal import Decimal
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure.errors import CorruptRecordError, NotStorableError, PerdureError, TooLargeError
from perdure.records.json import MAX_VALUE_DEPTH
from perdure.records.types import Registry
from perdure.records.values import OpaqueValue, decode_value, encode_value, is_plain, lift

INTERNAL = [
    *["value", "types", "data", "v", "tag", "version", "x:Point@1", "bytes", "tuple", "repr"],
    *["arguments_types", "tool_result_types", "tool_payload", "", "/", "~", "~1", "/a/0", "0"],
]
TEXT = st.text() | st.sampled_from(INTERNAL)
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
PLAIN = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
HASHABLE = st.recursive(
    ATOMS
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(dt.UTC))
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=8,
)
RICH = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
        | st.binary().map(bytearray)
    ),
    max_leaves=12,
)


def again(value: Any) -> Any:
    data, tags = encode_value(value)
    stored = json.loads(json.dumps(tags))  # a table goes through JSON too
    return decode_value(data, stored)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return one == other and collections.Counter(map(type, one)) == collections.Counter(
            map(type, other)
        )
    return bool(one == other)


@given(PLAIN)
def test_json_goes_as_it_is_without_a_table(value: Any) -> None:
    data, tags = encode_value(value)
    assert tags is None
    assert same(decode_value(data, None), value)
    assert same(json.loads(data), value)


@given(RICH)
def test_every_supported_value_comes_back_as_itself(value: Any) -> None:
    assert same(again(value), value)


@given(st.dictionaries(st.sampled_from(INTERNAL), RICH, min_size=1))
def test_no_key_of_a_users_is_taken_for_a_tag(value: dict[str, Any]) -> None:
    assert same(again(value), value)


@pytest.mark.parametrize("key", INTERNAL)
@pytest.mark.parametrize("inner", [b"raw", {"types": {"": "bytes"}, "value": "eA=="}, ["bytes"]])
def test_each_internal_key_is_plain_data(key: str, inner: Any) -> None:
    value = {key: inner, "list": [{key: inner}]}
    assert same(again(value), value)


@given(RICH)
def test_encoding_again_gives_the_same_bytes(value: Any) -> None:
    data, tags = encode_value(value)
    assert encode_value(decode_value(data, tags)) == (data, tags)


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**64), 10**300, -(10**4000)], ids=range(5))
def test_integers_beyond_64_bits_come_back(value: int) -> None:
    assert again({"n": [value]}) == {"n": [value]}
    assert again((value,)) == (value,)


@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: [n], lambda n: (n,)])
def test_integers_too_long_to_read_are_refused(wrap: Any) -> None:
    with pytest.raises(NotStorableError, match="too many digits: store it as text"):
        encode_value(wrap(10**4400))


def test_a_path_comes_back() -> None:
    assert same(again({"p": Path("/a/ü")}), {"p": Path("/a/ü")})


def test_a_zone_comes_back_as_its_offset() -> None:
    value = dt.datetime(2026, 7, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2), "CEST"))
    back = again(value)
    assert back == value
    assert back.utcoffset() == dt.timedelta(hours=2)


def test_a_set_gives_the_same_bytes_in_whichever_order_it_lies() -> None:
    words = [f"word{n}" for n in range(50)]
    assert encode_value(set(words)) == encode_value(set(words[25:]) | set(words[:25]))
    assert json.loads(encode_value({3, 1, 2})[0]) == [1, 2, 3]


class Text(str):
    __slots__ = ()


class Number(float):
    __slots__ = ()


class Table(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (Text("a"), "a"),
        (Number(0.5), 0.5),
        (Table(a=Text("b")), {"a": "b"}),
        (collections.OrderedDict(b=1, a=b"x"), {"b": 1, "a": b"x"}),
        ({Text("k"): 1}, {"k": 1}),
    ],
)
def test_a_subclass_of_json_comes_back_as_json(value: Any, back: Any) -> None:
    assert same(again(value), back)


class Pair(NamedTuple):
    a: int
    b: int


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Kind(enum.StrEnum):
    A = "a"


class Point(msgspec.Struct):
    x: int = 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"the object at \$\.a\[1\] .*register it, connect\(types=\[…\]\)"),
        (Point(), r"the Point at \$\.a\[1\] .*register it"),
        (Color.RED, r"the Color at \$\.a\[1\] .*register it"),
        (Level.LOW, r"the Level at \$\.a\[1\] .*register it"),
        (Kind.A, r"the Kind at \$\.a\[1\] .*register it"),
        (Pair(1, 2), r"the Pair at \$\.a\[1\] .*convert the Pair first"),
        (PureWindowsPath("a"), r"the PureWindowsPath at \$\.a\[1\] .*str\(path\)"),
        (math.nan, r"the float at \$\.a\[1\] .*NaN"),
        (-math.inf, r"the float at \$\.a\[1\] .*infinity"),
        ("\ud800", r"the str at \$\.a\[1\] .*lone surrogate"),
        (Path("/\udcff"), r"the PosixPath at \$\.a\[1\] .*lone surrogate"),
        ({"\udfff": 1}, r"the dict at \$\.a\[1\] .*lone surrogate"),
        ({1: 2}, r"the dict at \$\.a\[1\] .*a key of type int: use text"),
        ({None: 2}, r"the dict at \$\.a\[1\] .*a key of type NoneType"),
        ({b"k": 2}, r"the dict at \$\.a\[1\] .*a key of type bytes"),
        (msgspec.Raw(b"1"), r"the Raw at \$\.a\[1\] .*decode it first"),
        (msgspec.UNSET, r"the UnsetType at \$\.a\[1\]"),
        (range(3), r"the range at \$\.a\[1\]"),
        (iter([]), r"the list_iterator at \$\.a\[1\]"),
    ],
)
def test_what_cannot_be_stored_is_named_by_path_type_and_cure(value: Any, said: str) -> None:
    with pytest.raises(NotStorableError, match=said):
        encode_value({"a": [0, value]}, Registry())


def test_where_no_type_can_be_registered_the_cure_is_to_convert() -> None:
    with pytest.raises(NotStorableError, match="the Point at .*: it is not JSON: convert it first"):
        encode_value({"a": Point()})


@pytest.mark.parametrize("rich", [None, b"x"])
def test_a_lone_surrogate_is_found_in_plain_and_in_rich_values(rich: Any) -> None:
    with pytest.raises(NotStorableError, match=r"the str at \$\.a\[0\]"):
        encode_value({"rich": rich, "a": ["\udc00"]})


def test_an_error_does_not_quote_the_value() -> None:
    with pytest.raises(NotStorableError) as caught:
        encode_value({"a": "canary\ud800"})
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None


def circle() -> Any:
    inner: dict[str, Any] = {}
    inner["self"] = [inner]
    return {"a": inner}


def test_a_circle_is_refused_where_it_closes() -> None:
    with pytest.raises(NotStorableError, match=r"the dict at \$\.a\.self\[0\] .*refers to itself"):
        encode_value(circle())


def test_a_circle_that_doubles_ends_too() -> None:
    doubling: list[Any] = []
    doubling += [doubling, doubling]
    with pytest.raises(NotStorableError, match="refers to itself"):
        encode_value(doubling)


def test_the_same_part_twice_is_no_circle() -> None:
    part = {"x": (1,)}
    assert again([part, part]) == [part, part]


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize("inner", [0, b"x"])
def test_a_value_as_deep_as_the_limit_comes_back(inner: Any) -> None:
    value = nested(MAX_VALUE_DEPTH, inner)
    assert again(value) == value


@pytest.mark.parametrize("inner", [0, b"x"])
@pytest.mark.parametrize("levels", [MAX_VALUE_DEPTH + 1, 201, 100_000])
def test_a_deeper_value_is_refused(levels: int, inner: Any) -> None:
    with pytest.raises(TooLargeError, match="nests deeper than 184 levels"):
        encode_value(nested(levels, inner))


def test_deep_values_are_answered_on_a_thread_with_a_small_stack() -> None:
    found: list[object] = []
    # Made, and freed, on this thread: from 3.12 on Python itself takes a large stack to free them.
    values = [nested(levels, inner) for levels in (MAX_VALUE_DEPTH, 100_000) for inner in (0, b"x")]

    def work() -> None:
        for value in values:
            try:
                found.append(again(value) == value)
            except TooLargeError as error:
                found.append(type(error))

    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert found == [True, True, TooLargeError, TooLargeError]


@pytest.mark.deep
@pytest.mark.parametrize(("levels", "width"), [(60, 2), (4, 100_000)])
def test_what_is_small_in_memory_and_endless_when_written_is_refused(
    levels: int, width: int
) -> None:
    bomb: list[Any] = ["x"]
    for _ in range(levels):
        bomb = [bomb] * width
    assert not is_plain(bomb)
    with pytest.raises(TooLargeError, match="more than 250000 lists"):
        encode_value(bomb)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (object(), "<object object at 0x"),
        (math.nan, "nan"),
        ({1: 2}, "{1: 2}"),
        ("a\ud800", r"'a\ud800'"),
        (circle()["a"], "{'self': [{...}]}"),
    ],
)
def test_a_repr_stands_in_where_it_is_asked_for(value: Any, stored: str) -> None:
    data, tags = encode_value({"ok": b"x", "bad": value}, on_unstorable="repr")
    back = decode_value(data, tags)
    assert back["ok"] == b"x"
    assert "repr" in (tags or {}).values()
    assert stored in str(back["bad"]) or stored.startswith("{'self'")


def test_a_repr_that_raises_or_never_ends_does_no_harm() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    class Long:
        def __repr__(self) -> str:
            return "x" * 1_000_000

    data, tags = encode_value([Broken(), Long()], on_unstorable="repr")
    broken, long = decode_value(data, tags)
    assert broken == "<Broken, whose repr raises ValueError>"
    assert len(long) < 20_000


def test_a_deep_value_ends_in_a_repr_where_it_is_asked_for() -> None:
    data, tags = encode_value(nested(100_000, 0), on_unstorable="repr")
    assert list((tags or {}).values()) == ["repr"]
    decode_value(data, tags)


def test_an_unknown_tag_comes_back_opaque_and_goes_down_again_as_it_was() -> None:
    data = b'{"a":[{"k":[1,"eA=="]}],"b":"eA=="}'
    tags = {"/a/0": "x:Gone@3", "/a/0/k/1": "bytes", "/a/0/k": "tuple", "/b": "bytes"}
    value = decode_value(data, tags)
    assert value["b"] == b"x"
    assert value["a"][0].tag == "Gone"
    assert value["a"][0].version == 3
    again_data, again_tags = encode_value(value)
    assert again_data == data
    assert again_tags == tags


def test_a_tag_of_a_later_release_comes_back_opaque() -> None:
    value = decode_value(b'["Europe/Rome",1]', {"/0": "zone"})
    assert (value[0].tag, value[0].version) == ("zone", 0)
    assert encode_value(value) == (b'["Europe/Rome",1]', {"/0": "zone"})


def test_an_opaque_value_can_be_in_a_set() -> None:
    tags = {"": "set", "/0": "x:Gone@1"}
    assert encode_value(decode_value(b"[[1]]", tags)) == (b"[[1]]", tags)


def test_raw_bytes_of_an_opaque_value_are_kept() -> None:
    opaque = OpaqueValue("Gone", 1, msgspec.Raw(b'{"a" : 1.0,"a":2}'))
    assert encode_value([opaque]) == (b'[{"a" : 1.0,"a":2}]', {"/0": "x:Gone@1"})


@pytest.mark.parametrize("data", [b"{not json", b"", b"[" * 5000, b'"\xff"'])
def test_an_opaque_value_that_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(NotStorableError):
        encode_value([OpaqueValue("Gone", 1, msgspec.Raw(data))])


@pytest.mark.parametrize(
    ("data", "tags"),
    [
        (b'{"a":1}', {"/b": "bytes"}),
        (b'{"a":1}', {"/a": "bytes"}),
        (b'{"a":1}', {"a": "tuple"}),
        (b'{"a":1}', {"/a/0": "tuple"}),
        (b"[1]", {"/x": "bytes"}),
        (b"[1]", {"/5": "bytes"}),
        (b"[[[1]]]", {"/0": "set", "": "set"}),
        (b'["x"]', {"/0": "datetime"}),
        (b'["x"]', {"/0": "decimal"}),
        (b'["x"]', {"/0": "uuid"}),
        (b'["a b"]', {"/0": "bytes"}),
        (b"[1e300]", {"/0": "timedelta"}),
        (b"[1]", {"/0": "tuple"}),
        (b"[1]", {"/0": "path"}),
    ],
)
def test_a_table_that_does_not_fit_is_a_corrupt_record(data: bytes, tags: dict[str, str]) -> None:
    with pytest.raises(CorruptRecordError):
        decode_value(data, tags)


@given(
    PLAIN,
    st.dictionaries(
        st.lists(st.sampled_from(["a", "0", "1", "-1", "", "~1", "٣"]), max_size=4).map(
            lambda steps: "".join(f"/{one}" for one in steps)
        )
        | st.text(max_size=5),
        st.sampled_from([*INTERNAL, "bytes", "set", "datetime", "uuid", "decimal", "timedelta"]),
        max_size=4,
    ),
)
def test_no_table_makes_reading_crash(value: Any, tags: dict[str, str]) -> None:
    data, _ = encode_value(value)
    try:
        read = decode_value(data, tags)
    except PerdureError:
        assert tags  # without a table there is nothing to refuse
    else:
        assert tags or read == value


def test_a_uuid_and_a_decimal_keep_their_digits() -> None:
    value = [uuid.UUID(int=7), Decimal("1.10"), Decimal("1E+5")]
    assert list(map(str, again(value))) == list(map(str, value))


def test_plain_values_are_told_from_the_others() -> None:
    assert is_plain({"a": [1, 2.5, None, True, "x", {}], "b": []})
    for other in [(1,), b"x", {1: 2}, math.inf, [Text("a")], Level.LOW, {"a": [[{"b": (1,)}]]}]:
        assert not is_plain(other)


def test_a_place_deeper_than_any_value_is_no_place() -> None:
    """S13: a table is stored bytes too; its places are looked at in linear time."""
    deep = "/a" * 500_000
    for tag in ("bytes", "x:Unknown@1"):
        with pytest.raises(CorruptRecordError, match="does not have"):
            lift({"a": 1}, {deep: tag, "": "x:Unknown@1"})
