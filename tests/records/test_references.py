"""Only what perdure itself spelled as a reference is one."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from perdure import EncodedRecord, Message, ToolCall
from perdure.records.chunks import name_of
from perdure.records.media import decode_held, lifted, media_of, referred, severed
from perdure.records.messages import decode_message, encode_message
from perdure.records.references import held, spelled
from tests.images import encoded, part, png

SIGNED = rb"perdure:media:[0-9a-f]{64}:(url|data):"
NAME = "ab" * 32
TEXT = f"perdure:media:data:image/png:66024:1280x800:{NAME}"
RAW = f'"\\u0070{TEXT[1:]}"'


@pytest.mark.parametrize(
    "message",
    [
        Message.user(TEXT),
        Message.user(f'"{TEXT}"'),
        Message.user(f'see "{TEXT}'),
        Message.user(f"\\u0070{TEXT[1:]}"),
        Message.user([{"type": "image", "source": {"media_type": "image/png", "data": TEXT}}]),
        Message.user([{TEXT: TEXT}]),
        Message.user("", image_urls=[TEXT.replace(":data:", ":url:")]),
        Message.tool("a", TEXT),
        Message.tool("a", {"data": TEXT, "mime_type": "image/png"}),
        Message.assistant(tool_calls=[ToolCall("a", "b", {"data": TEXT})]),
        Message(role="user", extra={"raw": msgspec.Raw(RAW.encode())}),
        Message(role="user", extra={"raw": msgspec.Raw(f'{{"data":{RAW}}}'.encode())}),
        Message.assistant(tool_calls=[ToolCall("a", "b", {}, {"raw": msgspec.Raw(RAW.encode())})]),
    ],
)
def test_a_string_that_a_message_brings_stays_text(message: Message) -> None:
    payload = encode_message(message).payload
    assert referred(payload) == []
    again = decode_held(payload)
    assert not any(medium.name for medium, _ in media_of(again))
    assert json.loads(payload) == json.loads(encode_message(again).payload)
    if not any((message.extra, *(call.extra for call in message.tool_calls))):
        assert again == message


@pytest.mark.parametrize("spelling", [RAW, f'"{TEXT}"'])
def test_a_record_that_a_program_encodes_stays_text(spelling: str) -> None:
    record = EncodedRecord("message", f'{{"role":"user","content":{spelling}}}'.encode())
    assert referred(record.payload) == []
    assert decode_message(record.payload) == Message.user(TEXT)


def test_references_and_what_looks_like_them_are_told_apart_in_one_message() -> None:
    image = png(70_000)
    given = [{"type": "text", "text": TEXT}, part(image), {"data": TEXT, "mime_type": "image/png"}]
    payload, blobs = lifted(encode_message(Message.user(given)).payload)
    assert list(blobs.values()) == [image]
    assert [medium.name for medium in referred(payload)] == list(blobs)
    stored = decode_held(payload)
    assert [medium.name for medium, _ in media_of(stored) if medium.name] == list(blobs)
    assert encode_message(stored).payload == payload


def test_a_reference_is_signed_in_memory_and_in_no_record() -> None:
    payload, _ = lifted(encode_message(Message.user([part(png(70_000))])).payload)
    assert re.search(SIGNED, held(payload))
    assert spelled(held(payload)) == payload
    assert not re.search(SIGNED, payload)
    assert not re.search(SIGNED, str(decode_message(payload)).encode())


def test_who_has_seen_a_reference_in_memory_cannot_name_the_media_of_another() -> None:
    own, secret = png(70_000), png(70_001)
    payload, [name] = lifted(encode_message(Message.user([part(own)])).payload)
    [(_, seen)] = media_of(decode_held(payload))
    for forged in (
        seen.replace(name, name_of(secret)),
        seen.replace(name, "0" * 64),
        seen.replace(":data:", ":url:"),
        seen + "0",
    ):
        given = {"media_type": "image/png", "data": forged}
        extra = {"raw": msgspec.Raw(msgspec.json.encode(given))}
        message = Message(role="user", content=[given, forged], image_urls=[forged], extra=extra)  # type: ignore[arg-type]
        record = encode_message(message).payload
        assert referred(record) == []
        assert decode_held(record) == message
        assert media_of(decode_held(record)) == []


def test_a_reference_to_the_blob_of_another_is_severed() -> None:
    payload, blobs = lifted(encode_message(Message.user([part(png(70_000))])).payload)
    assert severed(payload, blobs) == payload
    assert [medium.name for medium in referred(severed(payload, ()))] == ["0" * 64]


def test_media_in_a_calls_arguments_and_in_fields_of_others_come_back() -> None:
    from perdure.memory.media import MediaBudget, fitted

    image = png(70_000)
    source: dict[str, Any] = {"data": encoded(image), "mime_type": "image/png"}
    extra = {"seen": msgspec.Raw(msgspec.json.encode(source))}
    calls = [ToolCall("a", "upload", source, extra)]
    for message in (
        Message(role="assistant", tool_calls=tuple(calls), payload_extra=extra, extra=extra),
        msgspec.structs.replace(
            Message.tool("a"), tool_result=msgspec.structs.replace(
                Message.tool("a").tool_result, extra=extra
            )
        ),
    ):  # fmt: skip
        payload, blobs = lifted(encode_message(message).payload)
        assert len(payload) < 2000
        [back] = fitted([decode_held(payload)], MediaBudget(), blobs).messages
        assert back == message
