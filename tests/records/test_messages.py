"""A message comes back from its record as it was, unknown fields byte for byte."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure.errors import CorruptRecordError, NotStorableError, PerdureError, TooLargeError
from perdure.records.json import MAX_DEPTH, MAX_RECORD_BYTES, MAX_VALUE_DEPTH, depth_of
from perdure.records.messages import (
    CALL_FIELDS,
    CALLS_FIELDS,
    MESSAGE_FIELDS,
    RESULT_FIELDS,
    ROLES,
    Message,
    ToolCall,
    ToolResult,
    decode_message,
    encode_message,
)
from perdure.records.records import MESSAGE, TOOL_CALL, TOOL_RESULT
from perdure.records.types import Registry
from perdure.records.values import OpaqueValue
from tests.records.test_values import INTERNAL, PLAIN, RICH, TEXT

ODD_RAW = [
    *[b"1.0", b"1", b"1e5", b"-0.0", b"0.10", b"12345678901234567890123", b"null", b'""'],
    *[b'{"b":1,"a":2}', b'{"a":1,"a":2}', b'{ "a" :\t[ 1 , 2.50 ] }', b'"\\u00e9\\/"'],
    *[b'{"role":"system","types":{"/a":"bytes"}}', '"é"'.encode()],
]
RAWS = st.sampled_from(ODD_RAW) | PLAIN.map(lambda value: json.dumps(value).encode())


def extras(known: frozenset[str]) -> st.SearchStrategy[dict[str, msgspec.Raw]]:
    names = TEXT.filter(lambda name: name not in known)
    return st.dictionaries(names, RAWS.map(msgspec.Raw), max_size=3)


CALLS = st.builds(ToolCall, id=TEXT, name=TEXT, arguments=RICH, extra=extras(CALL_FIELDS))
RESULTS = st.builds(
    ToolResult,
    call_id=TEXT,
    name=st.none() | TEXT,
    result=RICH,
    error=st.none() | TEXT,
    extra=extras(RESULT_FIELDS),
)
URLS = st.lists(TEXT, max_size=2).map(tuple)
COMMON: dict[str, Any] = {
    "role": st.sampled_from(ROLES),
    "content": st.none() | TEXT | st.lists(PLAIN, max_size=3),
    "reasoning": st.none() | TEXT,
    "image_urls": URLS,
    "audio_urls": URLS,
    "video_urls": URLS,
    "created_at": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "extra": extras(MESSAGE_FIELDS),
}
MESSAGES = st.builds(
    Message,
    **COMMON,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    payload_extra=extras(CALLS_FIELDS),
) | st.builds(Message, **COMMON, tool_result=RESULTS)


def again(message: Message, registry: Registry | None = None) -> Message:
    entry = encode_message(message, registry or Registry())
    assert b"\n" not in entry.payload
    assert entry.end
    return decode_message(entry.payload, registry or Registry())


@given(MESSAGES)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert again(message) == message


@given(MESSAGES)
def test_encoding_what_came_back_gives_the_same_bytes(message: Message) -> None:
    entry = encode_message(message)
    assert encode_message(decode_message(entry.payload)) == entry


@pytest.mark.parametrize("raw", ODD_RAW)
def test_unknown_fields_keep_their_bytes_at_each_level(raw: bytes) -> None:
    calls = b'{"role":"assistant","tool_payload":{"tool_calls":[{"id":"1","name":"n",'
    calls += b'"arguments":{},"sig":%s}],"beside":%s},"usage":%s}'
    result = b'{"role":"tool","tool_payload":{"tool_call_id":"1","tool_name":null,'
    result += b'"tool_result":1,"tool_error":null,"sig":%s,"tool_calls":%s},"usage":%s}'
    for shape in (calls, result):
        payload = shape % (raw, raw, raw)
        message = decode_message(payload)
        assert bytes(message.extra["usage"]) == raw
        assert encode_message(message).payload == payload


@pytest.mark.parametrize("key", INTERNAL + sorted(MESSAGE_FIELDS | CALL_FIELDS | RESULT_FIELDS))
def test_no_key_in_a_users_data_is_taken_for_perdures(key: str) -> None:
    data = {key: {"types": {"": "set"}, "value": [1]}, "raw": {key: b"x"}}
    assert again(Message.tool("1", data)) == Message.tool("1", data)
    calls = Message.assistant(tool_calls=[ToolCall("1", "n", data)])
    assert again(calls) == calls
    parts = Message.user([{key: {"tool_calls": [], "type": "text"}}])
    assert again(parts) == parts


def test_the_kind_says_what_a_message_is_about() -> None:
    call = ToolCall("1", "run")
    assert encode_message(Message.user("x")).kind == MESSAGE
    assert encode_message(Message.assistant("x", tool_calls=[call])).kind == TOOL_CALL
    assert encode_message(Message.tool("1", 2)).kind == TOOL_RESULT


def test_the_stored_shape_is_the_one_that_others_read() -> None:
    call = Message.assistant(reasoning="why", tool_calls=[ToolCall("c", "run", {"x": 1})])
    assert json.loads(encode_message(call).payload) == {
        "role": "assistant",
        "reasoning_content": "why",
        "tool_payload": {"tool_calls": [{"id": "c", "name": "run", "arguments": {"x": 1}}]},
    }
    result = Message.tool("c", b"x", name="run")
    assert json.loads(encode_message(result).payload) == {
        "role": "tool",
        "tool_payload": {
            "tool_call_id": "c",
            "tool_name": "run",
            "tool_result": "eA==",
            "tool_error": None,
            "tool_result_types": {"": "bytes"},
        },
    }


def test_a_snapshot_that_others_wrote_is_read() -> None:
    payload = json.dumps(
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": None,
            "image_urls": [],
            "audio_urls": None,
            "tool_payload": {
                "tool_calls": [
                    {"id": "c", "name": "run", "arguments": {}, "native": {"provider": "p"}}
                ]
            },
        }
    ).encode()
    message = decode_message(payload)
    assert message.tool_calls[0].extra == {"native": msgspec.Raw(b'{"provider": "p"}')}
    assert (message.content, message.image_urls, message.audio_urls) == (None, (), ())


@dataclasses.dataclass
class Place:
    name: str
    seen: dt.datetime


def test_registered_types_come_back_in_arguments_and_results() -> None:
    registry = Registry([Place])
    place = Place("harbor", dt.datetime(2026, 1, 2, tzinfo=dt.UTC))
    calls = Message.assistant(tool_calls=[ToolCall("1", "n", {"at": [place]})])
    result = Message.tool("1", place)
    assert again(calls, registry) == calls
    assert again(result, registry) == result
    entry = encode_message(result, registry)
    unknown = decode_message(entry.payload)
    assert isinstance(unknown.tool_result, ToolResult)
    assert isinstance(unknown.tool_result.result, OpaqueValue)
    assert encode_message(unknown) == entry


def raw(data: bytes) -> dict[str, msgspec.Raw]:
    return {"f": msgspec.Raw(data)}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message.user("\ud800"), r"the str at \$\.content"),
        (Message.assistant(reasoning="\ud800"), r"the str at \$\.reasoning_content"),
        (Message.user([b"x"]), r"\$\.content/0 holds a bytes: content parts are JSON"),
        (Message.user([{"a": object()}]), r"the object at \$\.content\[0\]\.a"),
        (Message.assistant(reasoning=5), r"the int at \$\.reasoning"),  # type: ignore[arg-type]
        (Message.user("a", image_urls=[5]), r"the int at \$\.image_urls\[0\]"),  # type: ignore[list-item]
        (Message.assistant(tool_calls=[{}]), r"the dict at \$\.tool_calls\[0\]"),  # type: ignore[list-item]
        (Message(role="tool", tool_result=5), r"the int at \$\.tool_result"),  # type: ignore[arg-type]
        (Message.assistant(tool_calls=[ToolCall(5, "n")]), r"the int at \$\.tool_calls\[0\]\.id"),  # type: ignore[arg-type]
        (
            Message.assistant(tool_calls=[ToolCall("1", "n", {"a": [math.nan]})]),
            r"the float at \$\.tool_calls\[0\]\.arguments\.a\[0\]",
        ),
        (Message.tool("1", {"a": {1}, 2: 3}), r"the dict at \$\.tool_result\.result"),
        (Message.tool("1", error=ValueError("x")), r"the ValueError at \$\.tool_result\.error"),  # type: ignore[arg-type]
        (Message(role="user", extra=raw(b"{x")), r"the raw field at \$\.extra\.f is not JSON"),
        (Message(role="user", extra=raw(b'1,"role":"system"')), r"\$\.extra\.f is not JSON"),
        (Message(role="user", extra=raw(b'"\xff"')), r"\$\.extra\.f is not JSON"),
        (Message(role="user", extra=raw(b'"\\ud800"')), r"\$\.extra\.f is not JSON"),
        (Message(role="user", extra=raw(b"1e999")), r"\$\.extra\.f is not JSON"),
        (Message(role="user", extra=raw(b"[" * 5000)), r"\$\.extra\.f nests deeper"),
        (Message.tool("1", {"a": [[object()]]}), r"\$\.tool_result\.result\.a\[0\]\[0\]"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path(message: Message, said: str) -> None:
    with pytest.raises(NotStorableError, match=said):
        encode_message(message)


def test_a_message_above_the_size_limit_is_refused() -> None:
    encode_message(Message.user("x" * (MAX_RECORD_BYTES - 100)))
    with pytest.raises(TooLargeError, match=f"the limit is {MAX_RECORD_BYTES}"):
        encode_message(Message.user("x" * MAX_RECORD_BYTES))


def deep(levels: int) -> Any:
    value: Any = b"x"
    for _ in range(levels):
        value = [value]
    return value


def test_the_deepest_message_stays_readable_in_what_wraps_it() -> None:
    message = Message.assistant(
        [deep_plain := msgspec.json.decode(b"[" * 183 + b"]" * 183)],
        tool_calls=[ToolCall("1", "n", deep(MAX_VALUE_DEPTH))],
    )
    payload = encode_message(message).payload
    assert depth_of(payload) <= MAX_DEPTH - 8
    assert decode_message(payload) == message
    assert deep_plain


def test_an_extra_field_does_not_keep_the_record_in_memory() -> None:
    payload = b'{"role":"user","content":"%s","id":"1"}' % (b"x" * 10_000)
    message = decode_message(payload)
    assert len(bytes(message.extra["id"])) == 3
    assert memoryview(message.extra["id"]).obj is not payload


@pytest.mark.parametrize(
    "payload",
    [
        *[b"", b"null", b"[]", b'"x"', b"{}", b'{"role":"boss"}', b'{"role":"user","content":5}'],
        b'{"role":"user","tool_payload":5}',
        b'{"role":"user","tool_payload":{"tool_calls":{}}}',
        b'{"role":"user","tool_payload":{"tool_calls":[5]}}',
        b'{"role":"user","tool_payload":{"tool_calls":[{"id":"1"}]}}',
        b'{"role":"user","tool_payload":{"tool_call_id":5}}',
        b'{"role":"user","tool_payload":{"tool_call_id":null,"tool_result":1}}',
        b'{"role":"tool","tool_payload":{"tool_call_id":"1","tool_result_types":{"/a":"bytes"}}}',
        b'{"role":"user","image_urls":"x"}',
        b'{"role":"user","created_at":1e999}',
        b'{"role":"user","content":"\xff"}',
        b'{"role":"user","content":' + b"[" * 100_000,
    ],
)
def test_a_payload_that_is_no_message_is_a_corrupt_record(payload: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_message(payload)


def test_an_error_about_a_damaged_message_does_not_quote_it() -> None:
    for payload in (b'{"role":"canary"}', b'{"role":"user","content":["canary"'):
        with pytest.raises(CorruptRecordError) as caught:
            decode_message(payload)
        assert "canary" not in str(caught.value)
        assert caught.value.__suppress_context__


@given(MESSAGES, st.data())
def test_a_damaged_message_never_crashes_the_reader(message: Message, data: st.DataObject) -> None:
    payload = bytearray(encode_message(message).payload)
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        back = decode_message(bytes(payload))
    except PerdureError:
        return
    assert isinstance(back, Message)
