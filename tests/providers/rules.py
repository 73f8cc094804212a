"""What each provider refuses, told from the request alone.

Written from the providers' documents and error messages, and knowing nothing of how a context is
rendered: it judges the renderers. Each function returns what is wrong; nothing is sound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from perdure.providers import RenderedContext

Dict = dict[str, Any]


def wrongs(context: RenderedContext) -> list[str]:
    judge = {
        "openai": chat,
        "openai-responses": responses,
        "anthropic": anthropic,
        "gemini": gemini,
    }
    return list(judge[context.format](context.messages))


def chat(messages: list[Dict]) -> Iterator[str]:
    waiting: list[str] = []
    for at, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                yield f"{at}: a tool message must be a response to a preceding message's tool_calls"
            else:
                waiting.remove(message["tool_call_id"])
            if not isinstance(message["content"], str):
                yield f"{at}: a tool message's content is text"
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
    if not calls and not message.get("content"):
        yield f"{at}: an assistant message needs content or tool_calls"
    for call in calls or ():
        if not 0 < len(call["id"]) <= 40:
            yield f"{at}: the id {call['id']!r} is too long"
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call["function"]["name"]):
            yield f"{at}: the name {call['function']['name']!r} does not match the pattern"
        if not isinstance(json.loads(call["function"]["arguments"]), dict):
            yield f"{at}: arguments are no object"


def responses(items: list[Dict]) -> Iterator[str]:
    asked: list[str] = []
    answered: set[str] = set()
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call":
            if item["call_id"] in asked:
                yield f"{at}: the call id {item['call_id']} is there twice"
            asked.append(item["call_id"])
            if not isinstance(json.loads(item["arguments"]), dict):
                yield f"{at}: arguments are no object"
        elif kind == "function_call_output":
            if item["call_id"] not in asked or item["call_id"] in answered:
                yield f"{at}: no tool call found for function call output {item['call_id']}"
            answered.add(item["call_id"])
        elif kind.endswith("_call") and item.get("call_id"):
            if not any(one.get("call_id") == item["call_id"] for one in items[at + 1 :]):
                yield f"{at}: no tool output found for {kind} {item['call_id']}"
        elif kind == "reasoning":
            if "status" in item:
                yield f"{at}: unknown parameter: 'input[{at}].status'"
            if not item.get("encrypted_content"):
                yield f"{at}: item {item['id']} not found: it is not persisted"
            led_to = items[at + 1] if at + 1 < len(items) else {"role": "user"}
            if led_to.get("role") == "user" or led_to.get("type") == "function_call_output":
                yield f"{at}: reasoning was provided without its required following item"
        elif kind == "message" and not item.get("content") and item["role"] == "assistant":
            yield f"{at}: an assistant message with nothing in it"
    if set(asked) - answered:
        yield f"no tool output found for function call {set(asked) - answered}"
    for at, item in enumerate(items):
        before = items[:at]
        names_it = item.get("type") != "reasoning" and "id" in item
        if names_it and item["id"].endswith("_after_rs") and not any(map(is_reasoning, before)):
            yield f"{at}: {item['id']} was provided without its required reasoning item"


def is_reasoning(item: Dict) -> bool:
    return item.get("type") == "reasoning"


def anthropic(messages: list[Dict]) -> Iterator[str]:
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
    if kind == "thinking" and not block.get("signature"):
        yield f"{at}: thinking.signature: field required"
    if kind == "tool_use":
        if block["id"] in used:
            yield f"{at}: tool_use ids must be unique: {block['id']}"
        used.add(block["id"])
        if not re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]):
            yield f"{at}: tool_use.id should match the pattern: {block['id']}"
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", block["name"]):
            yield f"{at}: tool_use.name should match the pattern: {block['name']}"
        if not isinstance(block["input"], dict):
            yield f"{at}: tool_use.input should be an object"
    if kind == "tool_result" and block.get("is_error") and not block["content"]:
        yield f"{at}: content cannot be empty if is_error is true"
    if kind in {"tool_use", "thinking", "redacted_thinking"} and role != "assistant":
        yield f"{at}: {kind} blocks can only be in assistant messages"


KINDS = {"text", "inlineData", "fileData", "functionCall", "functionResponse", "executableCode"}


def gemini(contents: list[Dict]) -> Iterator[str]:
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
        if expected == "model" and [one["name"] for one in calls] != [one["name"] for one in given]:
            yield f"{at}: the number of function response parts is not that of the calls"
        if [one.get("id") for one in calls] != [one.get("id") for one in given] and calls:
            yield f"{at}: a response names another call"
        first = next((part for part in parts if "functionCall" in part), None)
        if first is not None and not first.get("thoughtSignature"):
            yield f"{at}: function call is missing a thought_signature"
        if expected == "model" and all(part.get("thought") for part in parts):
            yield f"{at}: thoughts alone are no answer"
    if contents and any("functionResponse" in part for part in contents[0]["parts"]):
        yield "0: a function response turn comes immediately after a function call turn"
