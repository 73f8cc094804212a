"""Media in records: lifted into blobs, and put back to the letter."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from perdure import Message, ToolCall
from perdure.records.chunks import name_of, named_in
from perdure.records.media import (
    LEAST,
    decode_held,
    dimensions,
    filled,
    lifted,
    media_of,
    noted,
    referred,
    sniffed,
    text_bytes,
    without_media,
)
from perdure.records.messages import encode_message
from tests.images import encoded, part, png, url

FILES = [png(LEAST, 1), b"\xff\xd8\xff" + bytes(LEAST), b"%PDF-1.7" + bytes(range(256)) * 300]

PARTS = st.recursive(
    st.one_of(
        st.text(max_size=20),
        st.integers(),
        st.sampled_from([part(data) for data in FILES]),
        st.sampled_from([url(data) for data in FILES]),
        st.sampled_from([{"type": "image", "data": encoded(FILES[0]), "mimeType": "image/png"}]),
        st.sampled_from([{"inlineData": {"mimeType": "image/png", "data": encoded(FILES[1])}}]),
        st.sampled_from([{"data": encoded(FILES[2])}, {"data": "QUJD" * 30_000}]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(PARTS)
def test_lifting_is_undone_to_the_letter_and_done_once(value: Any) -> None:
    payload = msgspec.json.encode({"role": "tool", "value": value})
    stored, blobs = lifted(payload)
    assert filled(stored, blobs) == payload
    assert lifted(stored) == (stored, {})
    assert {name: name_of(data) for name, data in blobs.items()} == {name: name for name in blobs}
    assert named_in([stored]) == set(blobs) == {one.name for one in referred(stored)}
    assert text_bytes(stored) <= len(stored) <= max(len(payload), len(stored))


@pytest.mark.parametrize(("size", "is_lifted"), [(LEAST - 40, False), (LEAST, True)])
def test_media_of_64_kib_and_more_are_lifted(size: int, is_lifted: bool) -> None:
    payload = encode_message(Message.user([part(png(size))])).payload
    assert bool(lifted(payload)[1]) is is_lifted
    assert without_media(payload, "left out").count(b"left out") == 1
    assert text_bytes(payload) < 200


def test_text_that_is_no_media_stays() -> None:
    values: list[Any] = [
        {"data": "QUJD" * 40_000},
        {"text": url(FILES[0])},
        {"words": f'he said "{url(FILES[0])}'},
        "A" * 200_000,
        {"key": encoded(FILES[0])},
        {"type": "image", "media_type": "image/png", "data": "not base64! " * 20_000},
    ]
    for value in values:
        payload = msgspec.json.encode({"role": "user", "content": [value]})
        assert lifted(payload) == (payload, {}), str(value)[:40]
        assert text_bytes(payload) == len(payload)


def test_what_a_type_reads_stays_in_the_record() -> None:
    data = {
        "data": FILES[0],
        "part": part(FILES[1]),
        "pair": (url(FILES[2]), {"a/b": url(FILES[2])}),
    }
    call = Message.assistant(tool_calls=[ToolCall("a", "b", {"x/y": data})])
    for message in (Message.tool("a", data), call):
        payload = encode_message(message).payload
        assert list(lifted(payload)[1]) == [name_of(FILES[1])]
        assert text_bytes(payload) == len(payload) - len(encoded(FILES[1]))


@pytest.mark.parametrize(
    "given",
    [
        [{"mimeType": "text/plain", "alt": "a" * 500}, {"x": "a" * 500, "data": "<pdf>"}],
        {"thumb": {"mimeType": "image/gif"}, "data": "<pdf>"},
        {"data": "<pdf>", "thumb": {"mimeType": "image/gif"}},
        {"more": [{"alt": "a" * 500, "mimeType": "image/gif"}], "data": "<pdf>"},
    ],
)
def test_the_type_of_another_part_is_none_of_its_own(given: Any) -> None:
    payload = json.dumps({"role": "user", "content": [given]}, separators=(",", ":"))
    payload = payload.replace("<pdf>", encoded(FILES[2]))
    assert b'"[application/pdf, ' in without_media(payload.encode(), "left out")


def test_base64_that_would_come_back_otherwise_stays() -> None:
    odd = encoded(FILES[0][: LEAST + 1 - LEAST % 3])
    assert odd.endswith("=")
    odd = odd.rstrip("=")[:-1] + "B" + "=" * odd.count("=")
    payload = encode_message(
        Message.user([{"type": "image", "data": odd, "mimeType": "image/png"}])
    )
    stored, blobs = lifted(payload.payload)
    assert filled(stored, blobs) == payload.payload


def test_a_note_stands_for_the_whole_part() -> None:
    image = png(1_200_000)
    message = Message.tool("a", [{"type": "text", "text": "here"}, part(image)])
    for one in (message, decode_held(lifted(encode_message(message).payload)[0])):
        result = noted(one, "gone").tool_result
        assert result is not None
        assert result.result == [
            {"type": "text", "text": "here"},
            {"type": "text", "text": "[image/png, 1.1 MB, gone]"},
        ]


def test_a_note_stands_for_a_string_that_is_no_part() -> None:
    message = Message.tool("a", {"page": "https://example.org", "screen": url(FILES[0])})
    result = noted(message, "gone").tool_result
    assert result is not None
    assert result.result == {"page": "https://example.org", "screen": "[image/png, 64 KB, gone]"}
    assert b"base64" not in without_media(encode_message(message).payload, "gone")


def test_only_an_image_may_stand_for_what_a_computer_shows() -> None:
    shown = {"type": "computer_screenshot", "image_url": url(FILES[0])}
    result = noted(Message.tool("a", shown), "gone").tool_result
    assert result is not None
    data = base64.b64decode(result.result["image_url"].partition(",")[2])
    assert dimensions(data) == (1, 1)


def test_what_is_no_media_is_not_copied() -> None:
    message = Message.tool("a", {"rows": [{"n": 1}], "data": "plain"})
    assert noted(message, "gone") is message
    assert media_of(message) == []


def _jpeg(width: int, height: int) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", 500) + bytes(498)
    frame = b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width) + bytes(10)
    return b"\xff\xd8" + exif + frame


def _webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBP" + kind + bytes(4) + body + bytes(20)


@pytest.mark.parametrize(
    "data",
    [
        png(10, width=640, height=480),
        b"GIF89a" + struct.pack("<HH", 640, 480),
        _jpeg(640, 480),
        _webp(b"VP8X", bytes(4) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")),
        _webp(b"VP8L", b"\x2f" + (639 | 479 << 14).to_bytes(4, "little")),
        _webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", 640, 480)),
    ],
    ids=["png", "gif", "jpeg", "webp", "lossless webp", "lossy webp"],
)
def test_an_images_header_says_how_large_it_is(data: bytes) -> None:
    assert dimensions(data) == (640, 480)


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", png(0)[:20], b"\xff\xd8\xff\xc0", b"GIF8", b"RIFF    WEBP"]
)
def test_a_header_that_is_cut_says_nothing(data: bytes) -> None:
    assert dimensions(data) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF    WEBP"]), st.binary()
)
def test_no_header_raises(magic: bytes, rest: bytes) -> None:
    width, height = dimensions(magic + rest)
    assert width >= 0
    assert height >= 0


def test_first_bytes_show_the_type() -> None:
    heads = {b"%PDF-1": "application/pdf", b"\0\0\0\x18ftypmp42": "video/mp4", b"hello": None}
    assert {head: sniffed(head) for head in heads} == heads
