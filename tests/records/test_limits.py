"""Depth is measured on bytes, for input of any shape, without recursion."""

from __future__ import annotations

import json
import threading

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure.errors import CorruptRecordError, PerdureError, TooLargeError
from perdure.records import json as door
from perdure.records.json import MAX_DEPTH, check_depth, check_size, depth_of, is_deeper

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def true_depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(true_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(true_depth, value), default=0)
    return 0


@given(JSON)
def test_depth_is_that_of_the_decoded_value(value: object) -> None:
    assert depth_of(json.dumps(value).encode()) == true_depth(value)


SIGNS = st.lists(st.sampled_from([b"\\", b'"', b"[", b"]", b"{", b"}", b"a"]), max_size=60)


@given(SIGNS, st.integers(1, 40))
def test_depth_is_the_same_where_escapes_are_many_or_few(signs: list[bytes], times: int) -> None:
    data = b"".join(signs) * times
    among_text = data + b"a" * (256 * len(data))
    assert depth_of(among_text) == depth_of(data)


@given(SIGNS, st.integers(1, 9))
def test_a_long_value_is_as_deep_as_a_short_one(signs: list[bytes], sample: int) -> None:
    data = b"".join(signs)
    deeper = [is_deeper(data, limit) for limit in range(5)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(door, "_SAMPLE", sample)
        patched.setattr(door, "_LONG", 2 * sample)
        assert [is_deeper(data, limit) for limit in range(5)] == deeper


@pytest.mark.parametrize("levels", [199, 200])
def test_up_to_the_limit_passes(levels: int) -> None:
    check_depth(nested(levels))
    assert true_depth(door.decode(nested(levels))) == levels


@pytest.mark.parametrize("levels", [201, 1_000, 100_000])
@pytest.mark.parametrize("closed", [True, False])
def test_beyond_the_limit_is_refused(levels: int, closed: bool) -> None:
    data = nested(levels) if closed else b"[" * levels
    with pytest.raises(CorruptRecordError, match="deeper than 200"):
        check_depth(data)
    with pytest.raises(CorruptRecordError):
        door.decode(data)


@pytest.mark.parametrize("unit", [b'{"a":', b'[{"k":"]",', b'["}",'])
def test_mixed_nesting_beyond_the_limit_is_refused(unit: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        door.decode(unit * 100_000)


def test_deep_input_is_refused_on_a_thread_with_a_small_stack() -> None:
    found: list[object] = []

    def work() -> None:
        for levels in (200, 201, 100_000):
            try:
                found.append(true_depth(door.decode(nested(levels))))
            except CorruptRecordError as error:
                found.append(type(error))

    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert found == [200, CorruptRecordError, CorruptRecordError]


def test_brackets_in_text_do_not_count() -> None:
    text = json.dumps({"a": '[{"' * 500 + "\\" * 3}).encode()
    assert depth_of(text) == 1
    check_depth(text)


def test_wide_data_is_not_deep() -> None:
    assert depth_of(b"[" + b"[]," * 5_000 + b"[[1]]]") == 3


@pytest.mark.parametrize(
    "data",
    [b"", b'"', b"\\", b'"\\', b"]]]]" * 100, b'"' * 1001, b'"\\"' * 999 + b"\\", b"\xff" * 300],
)
def test_what_is_not_json_is_answered(data: bytes) -> None:
    is_deeper(data, 0)
    depth_of(data)
    with pytest.raises(CorruptRecordError):
        door.decode(data)


def test_a_string_of_quotes_and_backslashes_takes_linear_time() -> None:
    """Quadratic work on these 8 MB would not end within the test's time limit."""
    deepest = {
        unit: depth_of(unit * (8_000_000 // len(unit)) + b"\\")
        for unit in (b'"\\', b'\\"', b'"a\\"', b'[{"')
    }
    assert deepest[b'"\\'] == 0
    assert deepest[b'[{"'] >= 2


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\ue0 1', max_size=200).map(str.encode))
def test_no_bytes_make_the_door_raise_anything_else(data: bytes) -> None:
    try:
        value = door.decode(data)
    except PerdureError:
        return
    assert true_depth(value) == depth_of(data)


def test_a_prefix_that_a_decoder_would_follow_is_never_underrated() -> None:
    data = b"[" * 300 + b"]" * 250 + b"x" + b"]" * 1000
    assert depth_of(data) >= 300


def test_a_size_above_the_limit_is_refused_with_the_cure() -> None:
    check_size(10, 10)
    with pytest.raises(TooLargeError, match=r"\$\.x takes 11 bytes, the limit is 10: split"):
        check_size(11, 10, at="$.x")


def test_the_limit_stays_below_what_a_decoder_can_recurse() -> None:
    value = msgspec.json.decode(nested(MAX_DEPTH))
    levels = 0
    while value:
        (value,) = value
        levels += 1
    assert levels in {MAX_DEPTH - 1, MAX_DEPTH}
