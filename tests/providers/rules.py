"""What each provider refuses, told from the request alone.

Written from the providers' documents and error messages, and knowing nothing of how a context is
rendered: it judges the renderers. What one field may be stands in the table that they share; what
messages owe each other is told here. Each function returns what is wrong; nothing is sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.providers import RenderedContext
from perdure.providers.request_rules import RULES, broken

Dict = dict[str, Any]


def wrongs(context: RenderedContext) -> list[str]:
    judge = {
        "openai": chat,
        "openai-responses": responses,
        "anthropic": anthropic,
        "gemini": gemini,
    }
    return [*judge[context.format](context.messages), *breaches(context)]


def breaches(context: RenderedContext, *, official: bool = True) -> Iterator[str]:
    """Return what in a request is against its provider's table."""
    system = [] if context.format == "gemini" else context.system
    request = {**context.request, "system": system}
    for rule in RULES[context.format]:
        if rule.cure == "sent" or (rule.official and not official):
            continue
        for place in broken(rule, request):
            yield f"{rule.fields[0]}: takes {rule.takes}: {place.value!r}"


def chat(messages: list[Dict]) -> Iterator[str]:
    waiting: list[str] = []
    for at, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                yield f"{at}: a tool message must be a response to a preceding message's tool_calls"
            else:
                waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            yield f"{at}: tool_calls must be followed by tool messages: {waiting}"
        if role == "assistant":
            yield from chat_answer(at, message)
            waiting = [call["id"] for call in message.get("tool_calls", ())]
        elif message.get("content") is None:
            yield f"{at}: content of {role} is missing"
    if waiting:
        yield f"the end: tool_calls must be followed by tool messages: {waiting}"


def chat_answer(at: int, message: Dict) -> Iterator[str]:
    calls = message.get("tool_calls")
    if calls == []:
        yield f"{at}: tool_calls is too short"
    said = [message.get(name) for name in ("content", "refusal", "audio", "function_call")]
    if not calls and not any(one not in (None, []) for one in said):
        yield f"{at}: an assistant message needs content or tool_calls"
    for call in calls or ():
        if call["type"] == "function" and not call["function"]["arguments"].strip():
            yield f"{at}: arguments are blank"


def responses(items: list[Dict]) -> Iterator[str]:
    asked: dict[str, str] = {}
    answered: set[str] = set()
    for at, item in enumerate(items):
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind in ANSWERS:
            asked[item["call_id"]] = kind
        elif kind.endswith("_output") and kind.removesuffix("_output") in ANSWERS:
            call_id = item.get("call_id") or shell_of(item, items[:at], answered)
            if call_id not in asked or call_id in answered:
                yield f"{at}: no tool call found for {kind} {call_id}"
            elif kind not in ANSWERS[asked[call_id]]:
                yield f"{at}: {kind} is no output of a {asked[call_id]}"
            answered.add(call_id)
        elif kind.endswith("_call") and item.get("call_id"):
            if not any(one.get("call_id") == item["call_id"] for one in items[at + 1 :]):
                yield f"{at}: no tool output found for {kind} {item['call_id']}"
        elif kind == "reasoning":
            if "status" in item:
                yield f"{at}: unknown parameter: 'input[{at}].status'"
            led_to = items[at + 1] if at + 1 < len(items) else {"role": "user"}
            if led_to.get("role") == "user" or led_to.get("type", "").endswith("_call_output"):
                yield f"{at}: reasoning was provided without its required following item"
        elif kind == "message" and not item.get("content") and item["role"] == "assistant":
            yield f"{at}: an assistant message with nothing in it"
    if set(asked) - answered:
        yield f"no tool output found for calls {set(asked) - answered}"
    for at, item in enumerate(items):
        before = items[:at]
        names_it = item.get("type") != "reasoning" and item.get("id")
        if names_it and item["id"].endswith("_after_rs") and not any(map(is_reasoning, before)):
            yield f"{at}: {item['id']} was provided without its required reasoning item"


ANSWERS = {
    "function_call": {"function_call_output"},
    "custom_tool_call": {"custom_tool_call_output"},
    "local_shell_call": {"local_shell_call_output", "function_call_output"},
    "shell_call": {"shell_call_output"},
    "apply_patch_call": {"apply_patch_call_output"},
    "computer_call": {"computer_call_output"},
}
"""The outputs that calls take; codex answers its local shell's as functions."""


def shell_of(output: Dict, before: list[Dict], answered: set[str]) -> str:
    """Return the call of a local shell that an output without a call's id is of."""
    calls = [one for one in before if one.get("type") == "local_shell_call"]
    named = [one for one in calls if one.get("id") == output.get("id")]
    open_calls = [one for one in named or calls if one["call_id"] not in answered]
    return open_calls[0]["call_id"] if open_calls else ""


def is_reasoning(item: Dict) -> bool:
    return item.get("type") == "reasoning"


def joined(messages: list[Dict], said: str) -> list[Dict]:
    """Join what one role says in a row, as Anthropic and Gemini do."""
    found: list[Dict] = []
    for message in messages:
        parts = message[said]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        role = "user" if message["role"] == "function" else message["role"]
        if found and found[-1]["role"] == role:
            found[-1][said] = [*found[-1][said], *parts]
        else:
            found.append({**message, "role": role, said: parts})
    return found


def anthropic(messages: list[Dict]) -> Iterator[str]:
    messages = [message for message in messages if message["role"] != "system"]
    messages = joined(messages, "content")
    used: set[str] = set()
    waiting: list[str] = []
    for at, message in enumerate(messages):
        expected = ("user", "assistant")[at % 2]
        if message["role"] != expected:
            yield f"{at}: roles must alternate: {message['role']}"
        blocks = message["content"]
        if isinstance(blocks, str):
            blocks = [{"type": "text", "text": blocks}]
        if not blocks:
            yield f"{at}: content must not be empty"
        found = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if sorted(found) != sorted(waiting):
            yield f"{at}: tool_use ids {waiting} were answered by {found}"
        if any(block["type"] != "tool_result" for block in blocks[: len(found)]):
            yield f"{at}: tool_result blocks must come first"
        waiting = [block["id"] for block in blocks if block["type"] == "tool_use"]
        for block in blocks:
            yield from anthropic_block(at, block, message["role"], used)
        if message["role"] == "assistant" and blocks and "thinking" in blocks[-1]["type"]:
            yield f"{at}: the final block cannot be thinking"
    if waiting:
        yield f"the end: tool_use ids {waiting} have no tool_result"
    yield from anthropic_server_tools(messages)
    last = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else ""
    text = last if isinstance(last, str) else last[-1].get("text", "")
    if text != text.rstrip():
        yield "the end: final assistant content cannot end with trailing whitespace"


def anthropic_server_tools(messages: list[Dict]) -> Iterator[str]:
    """What the API runs by itself: it must still be able to answer, or have answered."""
    seen: set[str] = set()
    running: set[str] = set()
    for at, message in enumerate(messages):
        blocks = message["content"]
        said = isinstance(blocks, str) or any(one["type"] != "tool_result" for one in blocks)
        if message["role"] == "user" and said and running:
            yield f"{at}: {running} was found without a corresponding result block"
        for block in blocks if message["role"] == "assistant" else ():
            if not isinstance(block, dict):
                continue
            if block["type"] in {"server_tool_use", "mcp_tool_use"}:
                seen.add(block["id"])
                running.add(block["id"])
            elif block["type"].endswith("_tool_result"):
                if block["tool_use_id"] not in running:
                    yield f"{at}: unexpected tool_use_id in {block['type']}"
                running.discard(block["tool_use_id"])
            elif block.get("caller", {}).get("tool_id", "") not in {"", *seen}:
                yield f"{at}: nothing of the id {block['caller']['tool_id']} has called it"


def anthropic_block(at: int, block: Dict, role: str, used: set[str]) -> Iterator[str]:
    kind = block["type"]
    if kind == "text" and not block["text"].strip():
        yield f"{at}: text content blocks must contain non-whitespace text"
    if kind == "tool_use":
        if block["id"] in used:
            yield f"{at}: tool_use ids must be unique: {block['id']}"
        used.add(block["id"])
    if kind in {"tool_use", "thinking", "redacted_thinking"} and role != "assistant":
        yield f"{at}: {kind} blocks can only be in assistant messages"


KINDS = {"text", "inlineData", "fileData", "functionCall", "functionResponse"}
KINDS |= {"executableCode", "codeExecutionResult"}


def gemini(contents: list[Dict]) -> Iterator[str]:
    contents = joined(contents, "parts")
    for at, content in enumerate(contents):
        expected = ("user", "model")[at % 2]
        parts = content["parts"]
        if content["role"] != expected:
            yield f"{at}: roles must alternate: {content['role']}"
        if not parts:
            yield f"{at}: must include at least one parts field"
        for part in parts:
            if len(KINDS & set(part)) != 1:
                yield f"{at}: a part has one kind of data: {part}"
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        after = contents[at + 1]["parts"] if at + 1 < len(contents) else []
        given = [one["functionResponse"] for one in after if "functionResponse" in one]
        if calls and expected == "user":
            yield f"{at}: function calls come from the model"
        names = [sorted(one["name"] for one in listed) for listed in (calls, given)]
        if expected == "model" and names[0] != names[1]:
            yield f"{at}: the number of function response parts is not that of the calls"
        ids = [sorted(str(one.get("id")) for one in listed) for listed in (calls, given)]
        if ids[0] != ids[1] and calls:
            yield f"{at}: a response names another call"
        first = next((part for part in parts if "functionCall" in part), None)
        if first is not None and not first.get("thoughtSignature"):
            yield f"{at}: function call is missing a thought_signature"
        if expected == "model" and all(part.get("thought") for part in parts):
            yield f"{at}: thoughts alone are no answer"
    if contents and any("functionResponse" in part for part in contents[0]["parts"]):
        yield "0: a function response turn comes immediately after a function call turn"
