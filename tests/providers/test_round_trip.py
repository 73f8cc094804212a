"""A reply comes in without losing a field, and goes back to its issuer as it was."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from perdure import Message
from perdure.errors import ConfigError, FormatError
from perdure.providers import FORMATS, Format, Issuer, parse, render
from perdure.providers.issued import STAMP, stamp_of
from perdure.records.messages import decode_message, encode_message
from tests.providers.replies import (
    ANTHROPIC,
    CHAT,
    DEEPSEEK,
    GEMINI,
    OPENROUTER,
    RESPONSES,
)
from tests.providers.rules import wrongs
from tests.providers.sdk import assert_accepted

REPLIES: dict[Format, dict[str, Any]] = {
    "openai": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
}
formats = pytest.mark.parametrize("format", FORMATS)


def stored(message: Message) -> Message:
    return decode_message(encode_message(message).payload)


def answered(message: Message) -> list[Message]:
    done = [Message.tool(one.id, "seen", name=one.name) for one in message.tool_calls]
    return [Message.user("Look"), message, *done]


def said(format: Format, messages: list[Message], **options: Any) -> Any:
    """Return what is sent for the model's own reply, the second message."""
    rendered = render(messages, format, **options).messages
    if format == "openai":
        return rendered[1]
    if format == "openai-responses":
        return [one for one in rendered if one.get("type") != "function_call_output"][1:]
    return rendered[1]["content" if format == "anthropic" else "parts"]


def issued(format: Format) -> Any:
    """Return what the reply said, as a request has to repeat it."""
    reply = copy.deepcopy(REPLIES[format])
    if format == "openai":
        message = reply["choices"][0]["message"]
        del message["refusal"]
        return message
    if format == "openai-responses":
        return reply["output"]
    return reply["content"] if format == "anthropic" else reply["candidates"][0]["content"]["parts"]


@formats
def test_a_reply_goes_back_to_its_issuer_as_it_was(format: Format) -> None:
    """S0-9, S1-10: text, calls, reasoning, signatures and unknown fields, in their order."""
    message = stored(parse(REPLIES[format], format))
    assert said(format, answered(message)) == issued(format)


@formats
def test_a_reply_is_readable_without_knowing_the_provider(format: Format) -> None:
    message = parse(REPLIES[format], format)
    assert message.text == "Let me look."
    assert [call.name for call in message.tool_calls] == ["look", "look"]
    assert [call.arguments for call in message.tool_calls] == [{"at": "harbor"}, {"at": "tower"}]
    assert (message.reasoning is None) == (format == "openai")


@formats
@pytest.mark.parametrize("other", FORMATS)
def test_a_conversation_goes_on_with_another_provider(format: Format, other: Format) -> None:
    message = stored(parse(REPLIES[format], format))
    context = render(answered(message), other)
    assert wrongs(context) == []
    assert_accepted(context)
    shown = msgspec.json.encode(context.messages).decode()
    assert all(word in shown for word in ("harbor", "tower", "seen"))
    assert shown.count("Let me") == 1
    assert ("sig:" in shown) == (format == other and format in {"anthropic", "openai-responses"})


@formats
def test_what_stood_around_the_message_is_kept(format: Format) -> None:
    stamp = stamp_of(stored(parse(REPLIES[format], format)))
    assert stamp is not None
    assert stamp.model in {"gpt-5.2", "claude-opus-5", "gemini-4-pro"}
    reply = {name: msgspec.json.decode(value) for name, value in stamp.reply.items()}
    usage = {"anthropic": "usage", "gemini": "usageMetadata"}.get(format, "usage")
    assert reply[usage] == REPLIES[format][usage]
    assert not {"instructions", "tools", "output", "content", "candidates"} & set(reply)


@formats
def test_unknown_fields_keep_their_bytes(format: Format) -> None:
    """REQUIREMENTS 2.1: what a provider adds is stored byte for byte, through any number of
    saves."""
    once = stored(parse(REPLIES[format], format))
    again = stored(once)
    assert bytes(again.extra[STAMP]) == bytes(once.extra[STAMP])
    assert [dict(call.extra) for call in again.tool_calls] == [
        dict(call.extra) for call in once.tool_calls
    ]


@pytest.mark.parametrize(
    ("policy", "to", "signed"),
    [
        ("strip_foreign", None, True),
        ("strip_foreign", "proxy", False),
        ("strip_foreign", Issuer("anthropic", "claude-opus-5"), True),
        ("strip_foreign", Issuer("anthropic", "claude-haiku-5"), False),
        ("keep", "proxy", True),
        ("strip_all", None, False),
    ],
)
def test_the_policy_says_who_gets_reasoning(policy: str, to: Any, signed: bool) -> None:
    messages = answered(parse(ANTHROPIC, "anthropic"))
    shown = str(render(messages, "anthropic", to=to, reasoning=policy))  # type: ignore[arg-type]
    assert ("sig:anthropic:EqQ==" in shown) == signed


def test_deepseek_gets_its_reasoning_back_with_the_calls() -> None:
    """REQUIREMENTS 2.1: content and reasoning stay on the message with the calls."""
    message = stored(parse(DEEPSEEK, "openai", issuer="deepseek"))
    assert message.reasoning == "The user wants the harbor. sig:deepseek"
    own = said("openai", answered(message), to="deepseek")
    assert own["reasoning_content"] == message.reasoning
    assert "reasoning_content" not in said("openai", answered(message))


def test_deepseek_wants_the_field_of_every_message_with_calls() -> None:
    """A message that another model wrote has it too, empty: DeepSeek refuses one that lacks it."""
    own, foreign = parse(DEEPSEEK, "openai", issuer="deepseek"), parse(CHAT, "openai")
    rendered = render([*answered(foreign), *answered(own)], "openai", to="deepseek").messages
    assert [one["reasoning_content"] for one in rendered if one["role"] == "assistant"] == [
        "",
        own.reasoning,
    ]


def test_empty_reasoning_is_not_no_reasoning() -> None:
    reply = copy.deepcopy(DEEPSEEK)
    reply["choices"][0]["message"]["reasoning_content"] = ""
    message = stored(parse(reply, "openai", issuer="deepseek"))
    assert said("openai", answered(message), to="deepseek")["reasoning_content"] == ""


def test_fields_that_no_release_knows_go_back_too() -> None:
    message = stored(parse(OPENROUTER, "openai", issuer="openrouter"))
    own = said("openai", answered(message), to="openrouter")
    theirs = OPENROUTER["choices"][0]["message"]
    assert own == {**theirs, "content": None}


def test_a_user_without_any_options_gets_what_deepseek_needs() -> None:
    """Who talks to one provider only need not name it."""
    message = stored(parse(DEEPSEEK, "openai"))
    assert said("openai", answered(message))["reasoning_content"] == message.reasoning


def test_text_that_was_changed_since_is_sent_as_it_is_now() -> None:
    """Redaction reaches every rendering: the stamp holds no second copy."""
    message = parse(ANTHROPIC, "anthropic")
    changed = msgspec.structs.replace(message, content="Redacted.")
    shown = str(render(answered(changed), "anthropic").messages)
    assert shown.count("Redacted.") == 1
    assert "Let me" not in shown


def test_reasoning_that_was_changed_is_not_sent_with_the_old_signature() -> None:
    message = parse(ANTHROPIC, "anthropic")
    changed = msgspec.structs.replace(message, reasoning="Something else")
    blocks = said("anthropic", answered(changed))
    assert "thinking" not in [block["type"] for block in blocks]


def test_arguments_that_were_redacted_are_nowhere_in_the_message() -> None:
    message = parse(RESPONSES, "openai-responses")
    calls = tuple(
        msgspec.structs.replace(call, arguments={"at": "***"}) for call in message.tool_calls
    )
    changed = msgspec.structs.replace(message, tool_calls=calls)
    assert b"harbor" not in encode_message(changed).payload


def test_a_refusal_is_text() -> None:
    reply = {"role": "assistant", "content": None, "refusal": "I will not."}
    message = stored(parse(reply, "openai"))
    assert render([message], "openai").messages == [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    ]
    assert render([message], "anthropic").messages[1]["content"] == "I will not."


def test_a_spoken_answer_is_sent_as_its_words() -> None:
    audio = {"id": "audio_1", "data": "AA==", "expires_at": 1, "transcript": "Hello"}
    message = parse({"role": "assistant", "content": None, "audio": audio}, "openai")
    assert render([message], "openai").messages == [{"role": "assistant", "content": "Hello"}]
    assert msgspec.json.decode(message.extra["audio"]) == audio


def test_custom_tools_are_called_in_their_own_shape() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "ls -l"}}
    message = stored(parse({"role": "assistant", "content": None, "tool_calls": [call]}, "openai"))
    assert said("openai", answered(message))["tool_calls"] == [call]
    item = {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "c2",
        "name": "run",
        "input": "ls -l",
    }
    message = stored(parse({"output": [item]}, "openai-responses"))
    items = render(answered(message), "openai-responses").messages
    assert items[1] == item
    assert items[2] == {"type": "custom_tool_call_output", "call_id": "c2", "output": "seen"}


def test_the_objects_of_the_sdks_are_read_too() -> None:
    from anthropic.types import Message as AnthropicMessage
    from google.genai.types import GenerateContentResponse
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    completion = ChatCompletion.model_construct(**CHAT)
    objects: list[tuple[Any, Format]] = [
        (ChatCompletion.model_validate(CHAT), "openai"),
        (completion, "openai"),
        (Response.construct(**RESPONSES), "openai-responses"),
        (AnthropicMessage.construct(**ANTHROPIC), "anthropic"),
        (GenerateContentResponse.model_validate(GEMINI), "gemini"),
    ]
    for reply, format in objects:
        message = stored(parse(reply, format))
        assert message.text == "Let me look."
        context = render(answered(message), format)
        assert wrongs(context) == []
        assert_accepted(context)


def test_items_that_were_appended_one_by_one_go_back_as_one_reply() -> None:
    """REQUIREMENTS 2.1: Responses items, stored as they came."""
    reasoning, _, one, other = RESPONSES["output"]
    pieces = [parse({"output": part}, "openai-responses") for part in ([reasoning, one], [other])]
    done = [Message.tool("call_b", "seen"), Message.tool("call_a", "seen")]
    items = render([Message.user("Look"), *pieces, *done], "openai-responses").messages
    assert items[1:4] == [reasoning, one, other]


def test_what_the_sdk_of_gemini_calls_otherwise_is_the_same() -> None:
    from google.genai.types import GenerateContentResponse

    theirs = GenerateContentResponse.model_validate(GEMINI).model_dump(exclude_none=True)
    assert said("gemini", answered(parse(theirs, "gemini"))) == issued("gemini")


def test_calls_without_an_id_get_one_that_stays() -> None:
    message = parse(GEMINI, "gemini")
    assert [call.id for call in message.tool_calls] == ["r1_0", "fc-2"]
    assert parse(GEMINI, "gemini") == message


@formats
def test_what_is_no_reply_is_refused(format: Format) -> None:
    for reply in ({}, {"error": {"message": "no"}}, {"content": 5, "output": 5, "parts": 5}):
        if format == "openai" and "content" in reply:
            continue
        with pytest.raises(FormatError, match=f"no reply in the format '{format}'"):
            parse(reply, format)
    with pytest.raises(FormatError, match="a reply of type str cannot be read"):
        parse("Hello", format)


def test_calls_without_ids_or_names_are_refused() -> None:
    broken: list[tuple[Any, Format]] = [
        ({"content": None, "tool_calls": [{"type": "function"}]}, "openai"),
        ({"content": None, "tool_calls": [{"id": "a", "type": "function"}]}, "openai"),
        ({"output": [{"type": "function_call", "name": "look"}]}, "openai-responses"),
        ({"content": [{"type": "tool_use", "id": "a", "input": {}}]}, "anthropic"),
        ({"content": [{"type": "tool_use", "id": "a", "name": "look"}]}, "anthropic"),
        ({"content": [{"type": "text"}]}, "anthropic"),
        ({"parts": [{"functionCall": {"args": {}}}]}, "gemini"),
    ]
    for reply, format in broken:
        with pytest.raises(FormatError):
            parse(reply, format)


def test_an_unknown_format_or_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="format 'cohere' is unknown: choose openai, "):
        render([], "cohere")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="invalid reasoning='some': choose keep, "):
        render([], "openai", reasoning="some")  # type: ignore[arg-type]
