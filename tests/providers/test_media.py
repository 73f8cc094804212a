"""Images in requests: where tools return them, and as many as a provider takes."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Message, ToolCall
from perdure.memory.media import LIMITS, MIB, RequestLimits
from perdure.providers import FORMATS, render
from perdure.providers.formats import within_limits
from tests.images import encoded, part, png, shown, url, words
from tests.providers.rules import wrongs

CALLS = [ToolCall("a", "shot"), ToolCall("b", "shot")]


def conversation(*results: Any) -> list[Message]:
    calls = CALLS[: len(results)]
    answers = [
        Message.tool(one.id, result, name="shot")
        for one, result in zip(calls, results, strict=True)
    ]
    asked = Message.assistant("I look.", tool_calls=calls)
    return [Message.user("look"), asked, *answers, Message.assistant("a harbor"), Message.user("?")]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "result",
    [
        [part(png(900))],
        [{"type": "text", "text": "here"}, part(png(900))],
        [{"type": "image", "data": encoded(png(900)), "mimeType": "image/png"}],
        [{"type": "image_url", "image_url": {"url": url(png(900))}}],
        part(png(900)),
        url(png(900)),
    ],
    ids=["anthropic", "text too", "mcp", "chat", "one part", "url"],
)
def test_an_image_that_a_tool_returned_is_an_image_for_each_provider(
    format: Any, result: Any
) -> None:
    context = render(conversation(result, "plain"), format)
    assert shown(context.messages) == [png(900)]
    assert encoded(png(900))[:100] not in words(context.messages)
    assert wrongs(context) == []
    assert "plain" in words(context.messages)


@pytest.mark.parametrize("format", ["openai", "gemini"])
def test_the_result_says_where_its_image_is(format: Any) -> None:
    context = render(conversation([part(png(2048))]), format)
    assert "[image/png, 2 KB, shown in the next message]" in words(context.messages)
    assert "[what shot has returned:]" in words(context.messages)


@pytest.mark.parametrize("format", FORMATS)
def test_no_base64_stands_in_the_text_of_a_result(format: Any) -> None:
    result = {"page": "example", "screen": url(png(2000)), "more": [part(png(2000))]}
    context = render(conversation(result), format)
    assert encoded(png(2000))[:100] not in str(context.messages)
    assert "which cannot be shown here" in words(context.messages)
    assert wrongs(context) == []


def test_more_than_a_provider_takes_leaves_notes_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LIMITS, "anthropic", RequestLimits(count=4, bytes=MIB, image=9_000))
    images = [png(3_000, number) for number in range(6)]
    messages = [Message.user([part(image)]) for image in images]
    assert shown(render(messages, "anthropic").messages) == images[2:]
    large = [Message.user([part(png(8_000))]), *messages[:2]]
    assert shown(render(large, "anthropic").messages) == images[:2]
    assert "the provider takes no more" in words(render(large, "anthropic").messages)


def test_what_has_no_media_is_rendered_as_it_is() -> None:
    messages = conversation("plain")
    assert all(
        one is other for one, other in zip(within_limits(messages, "openai"), messages, strict=True)
    )
