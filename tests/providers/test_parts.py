"""Media, in whichever provider's shape it was given, for each provider in its own."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Message, ToolCall
from perdure.providers import FORMATS, Format, render
from perdure.providers.parts import Media, Text, Unknown, read_part
from tests.providers.rules import wrongs
from tests.providers.sdk import assert_accepted

formats = pytest.mark.parametrize("format", FORMATS)
URL = "https://example.org/a.png"
DATA = "data:image/png;base64,AAAA"

IMAGES: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": DATA}},
    {"type": "input_image", "image_url": DATA, "detail": "auto"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
    {"inline_data": {"mime_type": "image/png", "data": "AAAA"}},
]
"""The same image, as six APIs shape it."""


def sent(message: Message, format: Format) -> list[dict[str, Any]]:
    """Return the blocks that are sent for a message of the user's."""
    context = render([message], format)
    assert wrongs(context) == []
    assert_accepted(context)
    blocks = context.messages[0]["parts" if format == "gemini" else "content"]
    assert isinstance(blocks, list)
    return blocks


@pytest.mark.parametrize("part", IMAGES)
def test_an_image_is_read_in_every_shape(part: dict[str, Any]) -> None:
    assert read_part(part) == Media("image", data="AAAA", media_type="image/png")


@formats
@pytest.mark.parametrize("part", IMAGES)
def test_an_image_is_sent_in_the_provider_s_own_shape(format: Format, part: dict[str, Any]) -> None:
    shapes = {
        "openai": IMAGES[0],
        "openai-responses": IMAGES[1],
        "anthropic": IMAGES[2],
        "gemini": IMAGES[4],
    }
    (block,) = sent(Message.user([part]), format)
    assert block == shapes[format]


@formats
def test_media_urls_are_shown_or_named(format: Format) -> None:
    """S0-9: image, audio and video URLs reach the model, or are at least told."""
    message = Message.user(
        "See",
        image_urls=[URL, DATA, "/tmp/b.png"],
        audio_urls=["https://example.org/a.mp3"],
        video_urls=["https://example.org/v.mp4"],
    )
    shown = str(sent(message, format))
    assert all(one in shown for one in (URL, "AAAA", "/tmp/b.png", "a.mp3", "v.mp4"))
    assert "[image: /tmp/b.png]" in shown
    assert ("[video: https://example.org/v.mp4]" in shown) == (format != "gemini")


REFUSED: dict[str, tuple[Format, ...]] = {
    "data:image/svg+xml;base64,PHN2Zy8+": FORMATS,
    "data:image/svg+xml,%3Csvg%2F%3E": FORMATS,
    "data:image/bmp;base64,AAAA": FORMATS,
    "data:image/png;base64,": FORMATS,  # "image cannot be empty"
    "data:image/gif;base64,AAAA": ("gemini",),
    "data:image/heic;base64,AAAA": ("openai", "openai-responses", "anthropic"),
    "http://example.org/a.png": ("anthropic",),
    "data:image/jpg;base64,AAAA": (),  # no type of its own: it is shown as a JPEG
}
"""Images that an API refuses, and with them each request of the session."""


@formats
@pytest.mark.parametrize("url", REFUSED)
def test_an_image_that_a_provider_refuses_is_named(format: Format, url: str) -> None:
    """codex issue 4946, open-webui 30100, vscode 286628: one such image ended the session."""
    own: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if url.startswith("data:"):
        head, _, data = url[len("data:") :].partition(",")
        media_type = head.partition(";")[0]
        shapes: dict[Format, dict[str, Any]] = {
            "anthropic": {
                "type": "image",
                "source": {"type": "base64", "media_type": media_type, "data": data},
            },
            "gemini": {"inlineData": {"mimeType": media_type, "data": data}},
            "openai-responses": {"type": "input_image", "image_url": url, "detail": "auto"},
        }
        own = shapes.get(format, own)
    blocks = sent(Message.user([{"type": "text", "text": "See"}, own], image_urls=[url]), format)
    named = ["[image" in str(block) for block in blocks]
    assert named == [False, *[format in REFUSED[url]] * 2]


@pytest.mark.parametrize(
    ("format", "part"),
    [
        ("gemini", {"fileData": {"fileUri": "files/abc-123"}}),
        ("gemini", {"inlineData": {"mimeType": "text/csv", "data": "AA==", "displayName": "a"}}),
        ("openai", {"type": "file", "file": {"file_id": "file-1"}}),
        ("openai", {"type": "file", "file": {"filename": "a.pdf", "file_data": "JVBERi0x"}}),
        ("openai-responses", {"type": "input_image", "file_id": "file-1", "detail": "low"}),
        ("anthropic", {"type": "image", "source": {"type": "file", "file_id": "file_1"}}),
    ],
)
def test_what_the_user_has_shaped_for_a_provider_stays(
    format: Format, part: dict[str, Any]
) -> None:
    """Files that lie with the provider, and fields of its own."""
    context = render([Message.user([{"type": "text", "text": "See"}, part])], format)
    blocks = context.messages[0]["parts" if format == "gemini" else "content"]
    assert blocks[1] == part


def test_others_who_speak_a_format_may_take_more() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/bmp;base64,AAAA"}}
    assert render([Message.user([part])], "openai", to="ollama").messages[0]["content"] == [part]


def test_sound_of_another_kind_is_named_for_openai() -> None:
    ogg = Message.user("Hear", audio_urls=["data:audio/ogg;base64,AAAA"])
    assert "[audio (audio/ogg)" in str(sent(ogg, "openai"))
    wav = Message.user("Hear", audio_urls=["data:audio/x-wav;base64,AAAA"])
    assert sent(wav, "openai")[1]["input_audio"] == {"data": "AAAA", "format": "wav"}


@formats
def test_a_document_is_shown(format: Format) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    part = {"type": "document", "source": source, "title": "Map.pdf"}
    (block,) = sent(Message.user([part]), format)
    assert "AAAA" in str(block)


def test_sound_is_shown_to_who_can_hear_it() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert sent(Message.user([part]), "openai") == [part]
    assert sent(Message.user([part]), "gemini") == [
        {"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}}
    ]
    for format in ("anthropic", "openai-responses"):
        shown = str(render([Message.user([part])], format).messages)  # type: ignore[arg-type]
        assert "[audio (audio/wav), which cannot be shown here]" in shown


@formats
def test_what_a_tool_shows_is_shown_where_that_can_be(format: Format) -> None:
    """A result of an MCP server: text and an image."""
    parts = [{"type": "text", "text": "the harbor"}, IMAGES[3]]
    call = Message.assistant(tool_calls=[ToolCall("a", "look")])
    context = render([Message.user("go"), call, Message.tool("a", parts)], format)
    assert wrongs(context) == []
    assert_accepted(context)
    shown = str(context.messages)
    assert "the harbor" in shown
    seen = {"anthropic": "'type': 'base64'", "openai-responses": "input_image"}
    assert seen.get(format, "AAAA") in shown


@formats
def test_a_result_that_only_looks_like_parts_is_text(format: Format) -> None:
    rows = [{"type": "image", "id": 7}, {"type": "row", "id": 8}]
    call = Message.assistant(tool_calls=[ToolCall("a", "rows")])
    context = render([Message.user("go"), call, Message.tool("a", rows)], format)
    assert_accepted(context)
    assert "7" in str(context.messages)


def test_a_part_of_no_known_type_is_sent_as_it_is() -> None:
    part = {"type": "hologram", "of": "a harbor"}
    assert read_part(part) == Unknown(part)
    assert render([Message.user([part])], "openai").messages[0]["content"] == [part]


@pytest.mark.parametrize(
    ("part", "read"),
    [
        ("plain", Text("plain")),
        (7, Text("7")),
        ({"type": "image_url", "image_url": 7}, Unknown({"type": "image_url", "image_url": 7})),
        ({"type": "input_audio", "input_audio": {}}, None),
        ({"type": "file", "file": {"file_id": "f"}}, None),
        ({"type": "document", "source": {"type": "text", "data": "words"}}, Text("words")),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, None),
        ({"type": "text"}, None),
        ({"fileData": {"fileUri": URL}}, Media("document", url=URL)),
        ({"type": "input_file", "file_url": URL}, Media("document", url=URL)),
    ],
)
def test_parts_that_are_odd_are_read_without_an_error(part: Any, read: Any) -> None:
    assert read_part(part) == (Unknown(part) if read is None else read)


def test_marks_of_one_provider_are_not_sent_to_another() -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    bare = {"type": "text", "text": "Hi"}
    assert sent(Message.user([part]), "anthropic") == [part]
    assert sent(Message.user([part]), "openai") == [bare]
    through = render([Message.user([part])], "openai", to="openrouter").messages[0]["content"]
    assert through == [part]
