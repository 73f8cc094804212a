"""Sessions that were dead forever in other projects: each once, as it was reported."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from perdure import Message, ToolCall
from perdure.providers import FORMATS, Format, parse, render
from perdure.providers.context_fit import EMPTY, OPENING
from perdure.providers.tool_pairs import INTERRUPTED, paired
from perdure.records.messages import decode_message, encode_message
from tests.providers.replies import ANTHROPIC, GEMINI, RESPONSES
from tests.providers.rules import wrongs
from tests.providers.sdk import assert_accepted

formats = pytest.mark.parametrize("format", FORMATS)


def asks(*ids: str, text: str | None = None) -> Message:
    return Message.assistant(text, tool_calls=[ToolCall(one, "look") for one in ids])


def result(call_id: str, value: Any = "seen") -> Message:
    return Message.tool(call_id, value, name="look")


def sent(messages: list[Message], format: Format) -> list[dict[str, Any]]:
    """Return what is sent, after every judge has taken it."""
    context = render(messages, format)
    assert wrongs(context) == []
    assert_accepted(context)
    return context.messages


SAVED = b"""{"role":"assistant","content":null,"reasoning_content":null,"image_urls":[],
"audio_urls":[],"video_urls":[],"tool_payload":{"tool_calls":[{"id":"call_MD","name":"run_bash",
"arguments":{"command":"pwd"},"nativeToolCallContext":{"provider":"openai_responses",
"functionCallItem":{"id":"fc_1"},"responseOutputItems":[]}}]}}"""


@formats
def test_a_saved_context_that_ends_with_a_call(format: Format) -> None:
    """S0-27, defect h of REQUIREMENTS 2.1: a real snapshot ended so, and each restore was refused.

    C14: the call is closed, and not called again.
    """
    saved = decode_message(SAVED.replace(b"\n", b""))
    shown = sent([Message.user("Where am I?"), saved], format)
    assert INTERRUPTED in str(shown)
    assert "nativeToolCallContext" not in str(shown)
    assert b"openai_responses" in bytes(saved.tool_calls[0].extra["nativeToolCallContext"])


@formats
def test_a_tool_that_was_cancelled_leaves_no_dead_session(format: Format) -> None:
    """FIELD 1: a crash, a cancellation or a reload in the middle of a tool call."""
    shown = sent([Message.user("go"), asks("a", "b"), result("b"), Message.user("and?")], format)
    assert str(shown).count(INTERRUPTED) == 1
    assert "seen" in str(shown)


def test_a_made_up_result_takes_its_place_and_no_turn_of_its_own() -> None:
    """FIELD 1: a separate user message for it would break the alternation of roles."""
    shown = sent([Message.user("go"), asks("a"), Message.user("and?")], "anthropic")
    assert [one["role"] for one in shown] == ["user", "assistant", "user"]
    assert [block["type"] for block in shown[2]["content"]] == ["tool_result", "text"]
    contents = sent([Message.user("go"), asks("a"), Message.user("and?")], "gemini")
    assert [list(part) for part in contents[2]["parts"]] == [["functionResponse"], ["text"]]


@formats
def test_a_result_without_its_call_is_not_sent(format: Format) -> None:
    """FIELD 2: the oldest messages were cut off between a call and its result."""
    shown = sent([result("gone", "orphan"), Message.user("well?")], format)
    assert "orphan" not in str(shown)


@formats
def test_calls_that_were_made_together_are_sent_together(format: Format) -> None:
    """REQUIREMENTS 2.1: parallel calls in one message, no text in between.

    Results stand in the order in which they came, where the provider leaves it open.
    """
    pieces = [asks("a"), asks("b"), Message.assistant("Both, please.")]
    shown = sent([Message.user("go"), *pieces, result("b", "B"), result("a", "A")], format)
    if format == "openai":
        assert [one["role"] for one in shown] == ["user", "assistant", "tool", "tool"]
        assert [one["id"] for one in shown[1]["tool_calls"]] == ["a", "b"]
        assert shown[1]["content"] == "Both, please."
        assert [one["tool_call_id"] for one in shown[2:]] == ["b", "a"]
    elif format == "anthropic":
        assert [one["type"] for one in shown[1]["content"]] == ["text", "tool_use", "tool_use"]
        assert [one["tool_use_id"] for one in shown[2]["content"]] == ["b", "a"]
    elif format == "gemini":
        given = [one["functionResponse"]["response"]["output"] for one in shown[2]["parts"]]
        assert given == ["A", "B"]
    else:
        kinds = ["message", "message", *2 * ["function_call"], *2 * ["function_call_output"]]
        assert [one.get("type", "message") for one in shown] == kinds


@formats
def test_a_result_that_came_twice_is_sent_once(format: Format) -> None:
    """REQUIREMENTS 2.1: duplicates are ignored, the first one counts."""
    shown = sent([asks("a"), result("a", "first"), result("a", "second")], format)
    assert "first" in str(shown)
    assert "second" not in str(shown)


def test_numbers_that_begin_anew_with_each_answer_stay_apart() -> None:
    """Anthropic: `tool_use` ids must be unique; other providers call each first call the same."""
    log = [asks("call_0"), result("call_0", "one"), asks("call_0"), result("call_0", "two")]
    shown = sent(log, "anthropic")
    uses = [shown[1]["content"][0]["id"], shown[3]["content"][0]["id"]]
    assert [shown[2]["content"][0]["tool_use_id"], shown[4]["content"][0]["tool_use_id"]] == uses
    assert [shown[2]["content"][0]["content"], shown[4]["content"][0]["content"]] == ["one", "two"]


@formats
def test_a_thought_that_was_cut_off_is_not_sent(format: Format) -> None:
    """FIELD 3: an aborted stream left thinking without its signature, refused ever after."""
    reply = copy.deepcopy(ANTHROPIC)
    reply["content"] = [{"type": "thinking", "thinking": "Where is", "signature": ""}]
    shown = sent([Message.user("go"), parse(reply, "anthropic"), Message.user("well?")], format)
    assert "Where is" not in str(shown)
    assert "user" in {one["role"] for one in shown}


def test_an_answer_that_is_thinking_alone_is_no_answer() -> None:
    reply = {**ANTHROPIC, "content": ANTHROPIC["content"][:1]}
    shown = sent([Message.user("go"), parse(reply, "anthropic"), Message.user("?")], "anthropic")
    assert [one["role"] for one in shown] == ["user"]
    content = {"role": "model", "parts": [{"text": "Hm", "thought": True}]}
    shown = sent([Message.user("go"), parse(content, "gemini"), Message.user("?")], "gemini")
    assert [one["role"] for one in shown] == ["user"]


def searches(*blocks: dict[str, Any], stop: str | None = "tool_use") -> Message:
    """Return an answer that begins with a search which has no result yet."""
    search = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"q": "sea"}}
    reply = {**ANTHROPIC, "content": [search, *blocks], "stop_reason": stop}
    return parse(reply, "anthropic")


def found(text: str) -> Message:
    """Return the answer that begins with that search's result."""
    error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    result = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": error}
    text_block = {"type": "text", "text": text}
    return parse({**ANTHROPIC, "content": [result, text_block]}, "anthropic")


LOOKS = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}


def test_a_search_beside_a_tool_is_run_when_the_tool_has_answered() -> None:
    """Anthropic: "Mixing server tools and client tools in one turn"; the result comes later."""
    log = [Message.user("go"), searches(LOOKS), result("toolu_1")]
    shown = sent(log, "anthropic")
    assert [one["type"] for one in shown[1]["content"]] == ["server_tool_use", "tool_use"]
    shown = sent([*log, found("Waves."), Message.user("Thanks")], "anthropic")
    assert "srv_1" in str(shown[1]["content"])
    assert [one["type"] for one in shown[3]["content"]] == ["web_search_tool_result", "text"]


def test_a_search_that_nobody_waited_for_is_left_out() -> None:
    """Anthropic: "web_search tool use was found without a corresponding result block"."""
    log = [Message.user("go"), searches(LOOKS), result("toolu_1"), Message.user("Stop")]
    assert "srv_1" not in str(sent(log, "anthropic"))
    # Its result, which came all the same, has no call then.
    assert "srv_1" not in str(sent([*log, found("Waves.")], "anthropic"))


def test_a_paused_turn_is_sent_as_it_is_while_it_is_the_last() -> None:
    log = [Message.user("go"), searches(stop="pause_turn")]
    assert "srv_1" in str(sent(log, "anthropic")[-1])
    assert "srv_1" in str(sent([*log, found("Waves."), Message.user("Thanks")], "anthropic"))
    assert [one["role"] for one in sent([*log, Message.user("?")], "anthropic")] == ["user"]
    assert "srv_1" not in str(sent([Message.user("go"), searches(stop=None)], "anthropic"))


def test_a_result_whose_search_was_cut_off_is_left_out() -> None:
    """Anthropic: "unexpected tool_use_id found in web_search_tool_result blocks"."""
    shown = sent([found("Waves."), Message.user("And?")], "anthropic")
    assert [one["role"] for one in shown] == ["user", "assistant", "user"]
    assert shown[1]["content"] == "Waves."


def test_a_call_that_a_program_made_stands_alone_when_the_program_is_gone() -> None:
    caller = {"type": "code_execution_20260120", "tool_id": "srv_1"}
    log = [Message.user("go"), searches({**LOOKS, "caller": caller}), result("toolu_1")]
    assert sent(log, "anthropic")[1]["content"][1]["caller"] == caller
    shown = sent([*log, Message.user("Stop")], "anthropic")
    assert shown[1]["content"] == [LOOKS]


def test_reasoning_that_nobody_stored_is_not_named() -> None:
    """Responses: "item rs_1 not found", and then "provided without its required reasoning item"."""
    reply = copy.deepcopy(RESPONSES)
    del reply["output"][0]["encrypted_content"]
    message = parse(reply, "openai-responses")
    shown = sent(
        [Message.user("go"), message, result("call_a"), result("call_b")], "openai-responses"
    )
    assert {"rs_1", "fc_1", "fc_2", "msg_1"} & {one.get("id") for one in shown} == set()
    assert shown[1] == {"role": "assistant", "content": "Let me look."}


def test_reasoning_that_led_to_nothing_is_not_sent() -> None:
    """Responses: "reasoning was provided without its required following item"."""
    reply = {**RESPONSES, "output": RESPONSES["output"][:1]}
    shown = sent([Message.user("go"), parse(reply, "openai-responses")], "openai-responses")
    assert shown == [{"role": "user", "content": "go"}]


def test_reasoning_goes_when_its_calls_were_dropped() -> None:
    reply = {**RESPONSES, "output": [RESPONSES["output"][0], RESPONSES["output"][2]]}
    log = [Message.user("go"), parse(reply, "openai-responses")]
    assert sent(list(paired(log, "drop").messages), "openai-responses") == [
        {"role": "user", "content": "go"}
    ]


def after_reasoning(*items: dict[str, Any], **fields: Any) -> Message:
    """Return an answer that these items and reasoning are, with ids that need the reasoning."""
    reasoning = {**RESPONSES["output"][0], **fields}
    return parse({**RESPONSES, "output": [reasoning, *items]}, "openai-responses")


LOOKED = {
    "type": "web_search_call",
    "id": "ws_1_after_rs",
    "status": "completed",
    "action": {"type": "search", "query": "harbor"},
}
SAID = {
    "type": "message",
    "id": "msg_1_after_rs",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Waves.", "annotations": []}],
}
CALLED = {
    "type": "function_call",
    "id": "fc_1_after_rs",
    "call_id": "call_a",
    "name": "look",
    "arguments": "{}",
    "status": "completed",
}


def test_what_the_api_says_of_reasoning_is_not_said_back() -> None:
    """Responses: "Unknown parameter: 'input[1].status'": the SDK's objects have it, as null."""
    answer = after_reasoning(SAID, status=None, content=None)
    shown = sent([Message.user("go"), answer], "openai-responses")
    assert shown[1] == RESPONSES["output"][0]
    assert shown[2] == SAID


def test_what_the_provider_did_goes_with_the_reasoning_that_led_to_it() -> None:
    """Responses: "'web_search_call' was provided without its required 'reasoning' item"."""
    kept = sent([Message.user("go"), after_reasoning(LOOKED, SAID)], "openai-responses")
    assert [one.get("type") for one in kept[1:]] == ["reasoning", "web_search_call", "message"]
    unread = after_reasoning(LOOKED, SAID, encrypted_content=None)
    shown = sent([Message.user("go"), unread], "openai-responses")
    assert shown[1:] == [{"role": "assistant", "content": "Waves."}]


def test_reasoning_goes_when_one_of_its_calls_was_dropped() -> None:
    """Responses: what follows reasoning has to be what it led to."""
    log = [Message.user("go"), after_reasoning(CALLED, SAID)]
    shown = sent(list(paired(log, "drop").messages), "openai-responses")
    assert shown[1:] == [{"role": "assistant", "content": "Waves."}]


def test_a_call_that_is_no_function_and_has_no_output_is_not_sent() -> None:
    """Responses: "No tool output found for computer call"; a hosted shell has its output there."""
    click = {"type": "computer_call", "id": "cu_1", "call_id": "call_c", "status": "completed"}
    action = {"action": {"type": "screenshot"}, "pending_safety_checks": []}
    log = [Message.user("go"), after_reasoning(click | action), Message.user("?")]
    assert [one["content"] for one in sent(log, "openai-responses")] == ["go", "?"]
    shell = {
        "type": "shell_call",
        "id": "sh_1",
        "call_id": "call_s",
        "status": "completed",
        "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
    }
    done = {"type": "exit", "exit_code": 0}
    output = {
        "type": "shell_call_output",
        "id": "so_1",
        "call_id": "call_s",
        "output": [{"stdout": "a", "stderr": "", "outcome": done}],
    }
    shown = sent([Message.user("go"), after_reasoning(shell, output, SAID)], "openai-responses")
    assert len(shown) == 5


def test_the_signature_of_gemini_survives_and_others_calls_say_that_they_have_none() -> None:
    """REQUIREMENTS 2.1: `thoughtSignature` was lost on save; Gemini 3 refuses a call without."""
    own = parse(GEMINI, "gemini")
    shown = sent([Message.user("go"), own, result("r1_0"), result("fc-2")], "gemini")
    signatures = [one.get("thoughtSignature") for one in shown[1]["parts"]]
    assert signatures == [None, None, "c2lnOmdlbWluaTox", None, "c2lnOmdlbWluaToy"]
    foreign = sent([Message.user("go"), asks("a", "b")], "gemini")[1]["parts"]
    assert [one.get("thoughtSignature") for one in foreign] == [
        "skip_thought_signature_validator",
        None,
    ]


@formats
def test_an_empty_answer_is_not_sent(format: Format) -> None:
    """FIELD 14: an aborted stream left an empty block, refused ever after."""
    log = [Message.user("go"), Message.assistant(""), Message.assistant("  "), Message.user("?")]
    assert {one["role"] for one in sent(log, format)} == {"user"}


@formats
def test_names_and_arguments_that_a_model_made_up(format: Format) -> None:
    """A tool that nobody declared, and arguments that broke off: the history still fits."""
    call = ToolCall("a", "multi_tool_use.parallel", '{"tool_uses": [')
    shown = sent([Message.user("go"), Message.assistant(tool_calls=[call])], format)
    assert "invalid_json" in str(shown)


@formats
def test_a_failure_without_words_is_still_a_failure(format: Format) -> None:
    shown = sent([asks("a"), Message.tool("a", error="")], format)
    assert "failed" in str(shown)


@formats
def test_a_result_and_an_error_are_both_shown(format: Format) -> None:
    failed = Message(
        role="tool",
        tool_result=msgspec.structs.replace(result("a").tool_result, error="timed out"),  # type: ignore[type-var]
    )
    shown = str(sent([asks("a"), failed], format))
    assert "timed out" in shown
    assert "seen" in shown


def test_a_conversation_that_begins_with_the_model() -> None:
    """What the user said first has been cut off, or nobody said anything."""
    assert sent([Message.assistant("Hello!")], "anthropic") == [
        {"role": "user", "content": OPENING},
        {"role": "assistant", "content": "Hello!"},
    ]
    assert sent([Message.assistant("Hello!")], "gemini")[0] == {
        "role": "user",
        "parts": [{"text": OPENING}],
    }


def test_an_answer_to_be_gone_on_with_ends_without_a_space() -> None:
    """Anthropic: "final assistant content cannot end with trailing whitespace"."""
    shown = sent([Message.user("go"), Message.assistant("The answer is ")], "anthropic")
    assert shown[1]["content"] == "The answer is"


def test_instructions_stand_where_the_provider_wants_them() -> None:
    """S0-Q1: a replaced system prompt is the one that is sent; later ones keep their authority."""
    log = [Message.system("Be kind."), Message.user("Hi"), Message.system("Be brief.")]
    for format in ("anthropic", "gemini"):
        context = render(log, format)  # type: ignore[arg-type]
        assert context.system == "Be kind.\n\nBe brief."
        assert [one["role"] for one in context.messages] == ["user"]
    for format in ("openai", "openai-responses"):
        shown = sent(log, format)  # type: ignore[arg-type]
        assert [one["role"] for one in shown] == ["system", "user", "system"]


def test_a_prompt_in_parts_keeps_its_marks() -> None:
    part = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    context = render([Message.system([part]), Message.user("Hi")], "anthropic")
    assert context.request == {"system": [part], "messages": [{"role": "user", "content": "Hi"}]}
    assert render([Message.system([part])], "openai").messages[0]["content"] == "Be kind."


@pytest.mark.parametrize("format", ["anthropic", "gemini"])
def test_no_instructions_are_no_field(format: Format) -> None:
    assert len(render([Message.user("Hi")], format).request) == 1


def test_an_empty_message_of_the_users_stays_a_turn() -> None:
    """Anthropic refuses blank text; without the turn, two answers would become one."""
    log = [Message.user("go"), Message.assistant("a"), Message.user(" "), Message.assistant("b")]
    assert sent(log, "anthropic")[2] == {"role": "user", "content": EMPTY}
    log[2] = Message.user("")
    assert sent(log, "gemini")[2] == {"role": "user", "parts": [{"text": EMPTY}]}


@formats
def test_arguments_that_are_brackets_without_end_stay_text(format: Format) -> None:
    """A small model that repeats itself: its call is kept, and shown, as any other that is none."""
    endless = "[" * 100_000
    made = {"name": "look", "arguments": endless}
    reply = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": made}]}
    message = decode_message(encode_message(parse(reply, "openai")).payload)
    assert message.tool_calls[0].arguments == endless
    shown = sent([Message.user("Look"), message, result("a")], format)
    assert "invalid_json" in str(shown)
