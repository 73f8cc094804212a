"""A history of another program comes in whole, and goes back as it came.

Compared is all that is said: fields that are None count as left out, and Gemini's names are those
of the REST API.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from perdure import Message
from perdure.errors import FormatError, NotStorableError
from perdure.providers import FORMATS, Format, parse_history, render
from perdure.providers.request_rules import RULES, Rule, places
from perdure.records.messages import decode_message, encode_message
from tests.providers.histories import HISTORIES, taken, without_none
from tests.providers.rules import wrongs
from tests.providers.sdk import assert_accepted

formats = pytest.mark.parametrize("format", FORMATS)


def stored(messages: list[Message]) -> list[Message]:
    return [decode_message(encode_message(one).payload) for one in messages]


def assert_comes_back(history: list[Any], format: Format) -> list[Message]:
    for one in history:
        taken(format).validate_python(one)
    messages = stored(parse_history(history, format))
    assert without_none(render(messages, format).messages) == without_none(history)
    return messages


def assert_fits_everybody(messages: list[Message], *, but: Format) -> None:
    for other in FORMATS:
        if other != but:
            context = render(messages, other)
            assert wrongs(context) == []
            assert_accepted(context)
            assert "interrupted:" not in str(context)


@formats
@settings(max_examples=8)
@given(data=st.data())
def test_a_history_goes_back_as_it_came_and_to_all_others(
    format: Format, data: st.DataObject
) -> None:
    messages = assert_comes_back(data.draw(HISTORIES[format]), format)
    assert_fits_everybody(messages, but=format)


@pytest.mark.deep
@formats
@settings(max_examples=120)
@given(data=st.data())
def test_many_histories_go_back_as_they_came(format: Format, data: st.DataObject) -> None:
    messages = assert_comes_back(data.draw(HISTORIES[format]), format)
    assert_fits_everybody(messages, but=format)


WEATHER = {"name": "get_weather", "arguments": '{"location": "Oslo, Norway"}'}
CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Answer in one line."},
    {"role": "user", "name": "ada", "content": "What is the weather like in Oslo and Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": WEATHER},
            {
                "id": "call_2",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{\n  "location": "Rome"\n}'},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "31"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "14 °C"},
    {"role": "assistant", "content": "14 °C in Oslo, 31 °C in Rome."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "And what is this?"},
            {
                "type": "image_url",
                "image_url": {"url": "https://example.org/a.png", "detail": "low"},
            },
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "file", "file": {"file_id": "file-6F2k"}},
        ],
    },
    {"role": "assistant", "content": None, "refusal": "I cannot help with that."},
]
RESPONSES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Answer in one line."},
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is in this file?"},
            {"type": "input_file", "file_url": "https://example.org/letter.pdf"},
        ],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "get_horoscope",
        "arguments": '{"sign": "Aquarius"}',
        "status": "completed",
    },
    {"type": "function_call_output", "call_id": "call_1", "output": '{"horoscope": "Otters."}'},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "refusal", "refusal": "I will not say."}],
    },
    {"role": "user", "content": "Please"},
    {"type": "item_reference", "id": "msg_2"},
    {"role": "assistant", "content": "You will meet otters."},
]
ANTHROPIC: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather like in Oslo and Rome?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Two places.", "signature": "EqQB"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"at": "Oslo"}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {"at": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "31", "is_error": False},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "no such place"}],
                "is_error": True,
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
            {"type": "text", "text": "And here?"},
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                "cache_control": {"type": "ephemeral"},
            },
        ],
    },
    {"role": "assistant", "content": "A picture."},
    {"role": "user", "content": "Thanks"},
    {"role": "user", "content": [{"type": "text", "text": "One more thing."}]},
]
GEMINI: list[dict[str, Any]] = [
    {"role": "user", "parts": [{"text": "Dim the lights, and play something"}]},
    {
        "role": "model",
        "parts": [
            {"text": "Both at once.", "thought": True},
            {"functionCall": {"name": "dim", "args": {"to": 0.5}}, "thoughtSignature": "AAAA"},
            {"functionCall": {"name": "play"}},
        ],
    },
    {
        "role": "user",
        "parts": [
            {"functionResponse": {"name": "dim", "response": {"result": {"level": 0.5}}}},
            {"functionResponse": {"name": "play", "response": {"error": "no such song"}}},
        ],
    },
    {"role": "model", "parts": [{"text": "It is dim, and silent."}]},
]
USUAL: list[tuple[list[dict[str, Any]], Format]] = [
    (CHAT, "openai"),
    (RESPONSES, "openai-responses"),
    (ANTHROPIC, "anthropic"),
    (GEMINI, "gemini"),
]
usual = pytest.mark.parametrize(("history", "format"), USUAL)


@usual
def test_the_usual_histories_go_back_as_they_came(history: list[Any], format: Format) -> None:
    assert_fits_everybody(assert_comes_back(history, format), but=format)


@usual
def test_json_text_that_was_parsed_again_is_the_same(history: list[Any], format: Format) -> None:
    """Whoever reads a file of theirs need not know which dict was an SDK's."""
    loaded = json.loads(json.dumps(history))
    assert parse_history(loaded, format) == parse_history(tuple(history), format)


def test_refusals_results_and_reasoning_are_where_every_reader_finds_them() -> None:
    chat = parse_history(CHAT, "openai")
    assert [one.role for one in chat[:5]] == ["system", "user", "assistant", "tool", "tool"]
    assert chat[2].tool_calls[0].arguments == {"location": "Oslo, Norway"}
    assert chat[4].tool_result is not None
    assert chat[4].tool_result.name == "get_weather"
    assert render(chat, "anthropic").messages[-1]["content"] == "I cannot help with that."
    refused = parse_history(RESPONSES, "openai-responses")[4]
    assert refused.text == "I will not say."
    thought = parse_history(ANTHROPIC, "anthropic")
    assert thought[1].reasoning == "Two places."
    assert thought[3].tool_result is not None
    assert thought[3].tool_result.error == "no such place"
    called = parse_history(GEMINI, "gemini")
    assert [one.tool_result.call_id for one in called if one.tool_result] == [
        call.id for call in called[1].tool_calls
    ]


def test_what_is_redacted_in_a_message_is_redacted_in_what_goes_back() -> None:
    import msgspec

    for history, format in USUAL:
        for message in parse_history(history, format):
            changed = msgspec.structs.replace(
                message, content=None, reasoning=None, tool_calls=(), tool_result=None, role="user"
            )
            left = encode_message(changed).payload.decode()
            for word in ("Oslo", "otters", "Otters", "Two places", "no such", "Aquarius", "refus"):
                assert word not in left.replace('"refusal":""', "").replace('"refusal"', "")


MARKER = {"type": "ephemeral", "ttl": "1h"}


def test_instructions_that_stand_apart_come_with_the_request() -> None:
    marked = [{"type": "text", "text": "Be kind.", "cache_control": MARKER}]
    for system in ("Be kind.", marked):
        request = {"model": "m", "max_tokens": 9, "system": system, "messages": ANTHROPIC}
        context = render(parse_history(request, "anthropic"), "anthropic")
        assert context.request == {"system": system, "messages": ANTHROPIC}
        assert render(parse_history(context, "anthropic"), "anthropic") == context
    parts = {"parts": [{"text": "Be kind."}]}
    for name in ("systemInstruction", "system_instruction"):
        request = {"contents": GEMINI, name: parts}
        context = render(parse_history(request, "gemini"), "gemini")
        assert context.request == {"contents": GEMINI, "systemInstruction": parts}
    asked = {"instructions": "Be kind.", "input": "Hello"}
    assert render(parse_history(asked, "openai-responses"), "openai-responses").messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
    ]


def test_the_objects_of_the_sdks_may_stand_anywhere() -> None:
    """Many programs append what the client returned, beside dicts of their own."""
    from anthropic.types import TextBlock, ThinkingBlock
    from google.genai import types
    from openai.types.chat import ChatCompletionMessage
    from openai.types.responses import ResponseFunctionToolCall

    said = ChatCompletionMessage(role="assistant", content="Hi", annotations=[])
    history: list[Any] = [{"role": "user", "content": "Hello"}, said]
    assert render(parse_history(history, "openai"), "openai").messages[1] == {
        "role": "assistant",
        "content": "Hi",
        "annotations": [],
    }
    blocks = [
        ThinkingBlock(type="thinking", thinking="Hm", signature="EqQB"),
        TextBlock(type="text", text="Hi"),
    ]
    history = [history[0], {"role": "assistant", "content": blocks}]
    context = render(parse_history(history, "anthropic"), "anthropic")
    assert context.messages[1]["content"] == [one.model_dump(exclude_none=True) for one in blocks]
    call = ResponseFunctionToolCall(
        type="function_call", call_id="c", name="look", arguments='{"at": 1}', id="fc_1"
    )
    done = {"type": "function_call_output", "call_id": "c", "output": "seen"}
    items = render(parse_history([call, done], "openai-responses"), "openai-responses").messages
    assert items == [call.model_dump(exclude_none=True), done]
    content = types.Content(
        role="model", parts=[types.Part(text="Hi", thought_signature=b"\xff\xfe\xfd")]
    )
    (_, again) = render(parse_history(["Hello", content], "gemini"), "gemini").messages
    assert again == {"role": "model", "parts": [{"text": "Hi", "thoughtSignature": "//79"}]}


def test_geminis_names_in_python_are_those_of_the_rest_api() -> None:
    theirs = [
        {"role": "user", "parts": [{"inline_data": {"mime_type": "image/png", "data": b"\xff"}}]},
        {
            "role": "model",
            "parts": [
                {
                    "function_call": {"name": "look", "args": {"at_x": 1}},
                    "thought_signature": b"\xff",
                }
            ],
        },
        {
            "role": "function",
            "parts": [{"function_response": {"name": "look", "response": {"the_result": 1}}}],
        },
    ]
    assert render(parse_history(theirs, "gemini"), "gemini").messages == [
        {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "/w=="}}]},
        {
            "role": "model",
            "parts": [
                {
                    "functionCall": {"name": "look", "args": {"at_x": 1}},
                    "thoughtSignature": "/w==",
                }
            ],
        },
        {
            "role": "function",
            "parts": [{"functionResponse": {"name": "look", "response": {"the_result": 1}}}],
        },
    ]


def test_reasoning_of_others_who_speak_the_format_goes_back_to_them_only() -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hm?", "cache_control": {"a": 1}}]},
        {"role": "assistant", "content": "Hi", "reasoning_content": "A greeting.", "x_id": 5},
    ]
    messages = stored(parse_history(history, "openai", issuer="deepseek"))
    assert messages[1].reasoning == "A greeting."
    assert render(messages, "openai", to="deepseek").messages == history
    assert "A greeting." not in str(render(messages, "openai").messages)


def test_an_empty_answer_of_a_history_stays() -> None:
    history = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    assert_comes_back(history, "openai")


NOT_SENT = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]}


@pytest.mark.parametrize(
    ("request_", "format", "place"),
    [
        ({"messages": [{"role": "user"}]}, "openai", "messages[0].content is missing"),
        ({"messages": [{"role": "user"}]}, "anthropic", "messages[0].content is missing"),
        ({"contents": [{"role": "user"}]}, "gemini", "contents[0].parts is missing"),
        ({"input": [{"role": "user"}]}, "openai-responses", "input[0].content is missing"),
        ({"messages": ["Hello"]}, "openai", "messages[0] is a str"),
        ({"messages": 7}, "openai", "messages is a int"),
    ],
)
def test_what_does_not_fit_into_a_request_is_named_by_its_field(
    request_: Any, format: Format, place: str
) -> None:
    with pytest.raises(FormatError) as refused:
        parse_history(request_, format)
    assert place in str(refused.value)


@pytest.mark.parametrize(
    ("history", "format", "index", "field", "words"),
    [
        ("Hello", "openai", None, None, "is a str"),
        ({"model": "m"}, "openai", None, None, "without 'messages'"),
        ([{"role": "user", "content": "a"}, "b"], "openai", 1, None, "each message as a dict"),
        ([Message.user("a")], "openai", 0, None, "session.append"),
        ([{"content": "a"}], "openai", 0, "role", "is missing"),
        ([{"role": "robot", "content": "a"}], "anthropic", 0, "role", "'user', 'assistant'"),
        ([{"role": "tool", "content": "a"}], "anthropic", 0, "role", "or say 'openai'"),
        ([{"role": "user", "parts": []}], "openai", 0, "content", "is missing"),
        ([{"role": "model", "parts": []}], "openai", 0, "role", "or say 'gemini'"),
        ([{"role": "user", "content": 5}], "openai", 0, "content", "is a int"),
        ([{"role": "user", "content": ["a"]}], "openai", 0, "content[0]", "give an object"),
        ([{"role": "tool", "content": "a"}], "openai", 0, "tool_call_id", "is missing"),
        ([NOT_SENT], "openai", 0, "tool_calls[0].function", "is missing"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "name": "x", "function": WEATHER}],
                }
            ],
            "openai",
            0,
            "tool_calls[0].name",
            "next to the function",
        ),
        ([{"type": "function_call"}], "openai-responses", 0, "call_id", "is missing"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}],
            "anthropic",
            0,
            "content[0].input",
            "is no object",
        ),
        ([{"role": "model"}], "gemini", 0, "parts", "is missing"),
        (
            [{"role": "model", "parts": [{"functionCall": {}}]}],
            "gemini",
            0,
            "parts[0].functionCall.name",
            "is missing",
        ),
        ([{"role": "user", "content": "a", "x": object()}], "openai", 0, "x", "is no JSON"),
    ],
)
def test_what_does_not_fit_is_named(
    history: Any, format: Format, index: int | None, field: str | None, words: str
) -> None:
    with pytest.raises(FormatError) as refused:
        parse_history(history, format)
    assert words in str(refused.value)
    assert refused.value.facts["index"] == index
    assert refused.value.facts["field"] == field
    if index is not None:
        assert f"history[{index}]" in str(refused.value)


# Whatever a history says, what is sent keeps the provider's rules


def test_at_most_four_cache_markers_are_sent_the_newest_ones() -> None:
    """Applications mark the end of each turn; the fifth marker was refused, for ever."""
    marker = {"type": "ephemeral"}
    marked = [
        message
        for at in range(6)
        for message in (
            Message.user([{"type": "text", "text": f"q{at}", "cache_control": marker}]),
            Message.assistant(f"a{at}"),
        )
    ]
    instructions = Message.system([{"type": "text", "text": "Kind.", "cache_control": marker}])
    context = render([instructions, *marked], "anthropic")
    assert isinstance(context.system, list)
    assert context.system[0]["cache_control"] == marker
    having = [one["content"][0] for one in context.messages if "cache_control" in str(one)]
    assert [one["text"] for one in having] == ["q3", "q4", "q5"]
    assert len(str(render(marked, "anthropic").messages).split("cache_control")) == 5
    assert marked[0].content == [{"type": "text", "text": "q0", "cache_control": marker}]


def test_a_marker_that_outlasts_one_before_it_is_shortened() -> None:
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b", "cache_control": MARKER},
    ]
    (sent,) = render([Message.user(blocks)], "anthropic").messages
    assert [one["cache_control"] for one in sent["content"]] == 2 * [{"type": "ephemeral"}]
    assert blocks[1]["cache_control"] == MARKER


def test_the_picture_of_a_failed_tool_comes_after_the_results() -> None:
    shot = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    use = [{"type": "tool_use", "id": f"t{at}", "name": "shot", "input": {}} for at in (1, 2)]
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    history = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": use},
        {
            "role": "user",
            "content": [
                {**failed, "content": [{"type": "text", "text": "no"}, shot]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "ok"},
            ],
        },
    ]
    sent = render(parse_history(history, "anthropic"), "anthropic")
    assert wrongs(sent) == []
    results, other, picture = sent.messages[2]["content"]
    assert results["content"] == [{"type": "text", "text": "no"}]
    assert (other["content"], picture) == ("ok", shot)


def test_a_client_s_message_object_goes_back_without_what_only_replies_have() -> None:
    from anthropic.types import Message as Reply, TextBlock, Usage

    reply = Reply(
        id="msg_1",
        type="message",
        role="assistant",
        model="claude-opus-5",
        content=[TextBlock(type="text", text="Hi")],
        stop_reason="end_turn",
        usage=Usage(input_tokens=1, output_tokens=1),
    )
    (message,) = parse_history([reply], "anthropic")
    assert b"end_turn" in encode_message(message).payload  # kept, and not sent
    assert render([Message.user("?"), message], "anthropic").messages[1] == {
        "role": "assistant",
        "content": [{"type": "text", "text": "Hi"}],
    }


def test_names_ids_and_arguments_that_are_refused_are_changed() -> None:
    call = {"id": "c" * 50, "type": "function", "function": {"name": "f", "arguments": " "}}
    history = [
        {"role": "user", "name": "Ada Lovelace", "content": "x"},
        {"role": "user", "name": "", "content": []},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c" * 50, "content": [{"type": "image_url"}]},
    ]
    context = render(parse_history(history, "openai"), "openai")
    assert wrongs(context) == []
    first, second, asks, answer = context.messages
    assert first["name"] == "Ada_Lovelace"
    assert second == {"role": "user", "content": ""}
    assert asks["tool_calls"][0]["function"]["arguments"] == "{}"
    assert asks["tool_calls"][0]["id"] == answer["tool_call_id"]


def test_an_item_s_id_that_is_refused_is_left_out() -> None:
    def said(item_id: str) -> dict[str, Any]:
        text = {"type": "output_text", "text": "x", "annotations": []}
        item = {"type": "message", "id": item_id, "role": "assistant", "status": "completed"}
        return {**item, "content": [text]}

    thought = {"type": "reasoning", "id": "", "summary": [], "encrypted_content": "E"}
    history = [
        *({"role": "user", "content": "a"}, said("msg_1")),
        *({"role": "user", "content": "b", "name": "ada"}, said("msg_1")),
        *({"role": "user", "content": "c"}, thought, said("m" * 85)),
        *({"role": "user", "content": "d"}, {"type": "item_reference", "id": "msg_1"}),
    ]
    context = render(parse_history(history, "openai-responses"), "openai-responses")
    assert wrongs(context) == []
    plain = {"role": "assistant", "content": "x"}
    assert context.messages == [
        *({"role": "user", "content": "a"}, said("msg_1")),
        *({"role": "user", "content": "b"}, plain),
        {"role": "user", "content": "c"},
        {"type": "reasoning", "summary": [], "encrypted_content": "E"},
        *(plain, {"role": "user", "content": "d"}),
    ]


SVG = "data:image/svg+xml;base64,AAAA"
BAD_PARTS: list[Any] = [
    {"type": "image_url", "image_url": {"url": SVG}},
    {"type": "input_image", "image_url": SVG},
    {"type": "image", "source": {"type": "base64", "media_type": "image/svg+xml", "data": "AA"}},
    {"type": "text", "text": "a"},
    {"type": "input_text", "text": "a"},
    {"inlineData": {"mimeType": "image/svg+xml", "data": "AAAA"}},
]


def bad(rule: Rule, format: Format) -> st.SearchStrategy[Any]:
    """Return values that a rule may not accept."""
    if rule.pattern is not None:
        return st.sampled_from(["", "a b", "x" * 300, "ü", "same", "msg_1"])
    if rule.is_object:
        return st.sampled_from(["", "  ", "[1]", '{"a', "null", {}])
    if rule.types is not None or rule.images is not None:
        return st.sampled_from(BAD_PARTS[-1:] if format == "gemini" else BAD_PARTS[:-1])
    if rule.is_filled:
        return st.sampled_from(["", " "])
    return st.sampled_from([[], {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}, "x"])


@st.composite
def wild(draw: st.DrawFn, format: Format) -> list[Any]:
    """A history in which anything that the provider's table is about may be otherwise."""
    history = copy.deepcopy(draw(HISTORIES[format]))
    if format == "anthropic":
        for block in [one["content"] for one in history if isinstance(one["content"], list)]:
            for one in block:
                if isinstance(one, dict) and draw(st.booleans()):
                    one["cache_control"] = draw(st.sampled_from([MARKER, {"type": "ephemeral"}]))
    names = {"openai": "messages", "openai-responses": "input", "anthropic": "messages"}
    request = {names.get(format, "contents"): history}
    for rule in [one for one in RULES[format] if one.cure != "sent"]:
        for owner, key in [one for path in rule.fields for one in places(request, path)]:
            if not draw(st.integers(0, 3)) and isinstance(owner[key], dict) and rule.names:
                owner[key]["x"] = 1
            elif not draw(st.integers(0, 7)) and not rule.names:
                owner[key] = draw(bad(rule, format))
    return history


@formats
@settings(max_examples=40)
@given(data=st.data())
def test_whatever_a_history_has_what_is_sent_keeps_the_table(
    format: Format, data: st.DataObject
) -> None:
    history = data.draw(wild(format))
    try:
        messages = stored(parse_history(history, format))
    except (FormatError, NotStorableError):
        return  # refused by name, when it came
    for other in FORMATS:
        context = render(messages, other)
        assert wrongs(context) == []
        if other != format:  # what came of the SDK's own type may have fields that it lacks
            assert_accepted(context)
