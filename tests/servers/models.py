"""A server of models that follow rules: it speaks the providers' protocols, and checks them.

It runs in a process of its own (`python -m tests.servers.models`, which prints its port), and
answers what the last user message asks for: a tool call for ``time in ZONE``, a failure for
``fail …``, else the text itself. Each request is held against the rules of its protocol; one
that breaks them is answered with 400, as the providers do, and counted. ``/seen`` returns what came.
A model named ``window-2000-vllm`` has a window of 2,000 tokens, and refuses more as vLLM does.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

KEY = "key-for-tests"


class Server:
    """The server, as a test has it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.openai_url = f"{self.url}/v1"

    def seen(self) -> dict[str, Any]:
        """Return ``requests`` (their bodies) and ``broken`` (which rules were broken)."""
        with urllib.request.urlopen(f"{self.url}/seen", timeout=60) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """Start a server in a process of its own; stop it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers.models"], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.strip().isdigit(), f"the server of models said {line!r}"
        yield Server(int(line))
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


# What to answer: a script of parts, from the conversation as (role, text) pairs.


def asked_for(last: str) -> dict[str, str] | None:
    """Return the arguments of the tool call that a user asks for."""
    found = re.search(r"time in (\S+)", last)
    return None if found is None else {"timezone": found[1]}


def reply_to(last: str, results: list[str]) -> tuple[str, list[dict[str, str]]]:
    """Return text, and the tool calls, for the last user message and what tools said since."""
    if results:
        return "The tools say: " + "; ".join(results), []
    zones = re.findall(r"time in (\S+)", last)
    if zones:
        return "", [{"timezone": zone} for zone in zones]
    return f"You said: {last}", []


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


# The rules, one checker per protocol: each returns what is broken.


def broken_chat(body: dict[str, Any]) -> str | None:
    waiting: list[str] = []
    for at, message in enumerate(body["messages"]):
        role = message.get("role")
        if role not in {"system", "developer", "user", "assistant", "tool"}:
            return f"messages[{at}]: unknown role {role!r}"
        unknown = set(message) - {
            "role",
            "content",
            "tool_calls",
            "tool_call_id",
            "name",
            "refusal",
            "audio",
            "reasoning_content",
        }
        if unknown:
            return f"messages[{at}]: unknown field {min(unknown)}"
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                return f"messages[{at}]: a result without its call"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"messages[{at}]: tool_call_ids did not have response messages: {waiting}"
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
        if role == "assistant" and not waiting and not message.get("content"):
            return f"messages[{at}]: an assistant message needs content or tool_calls"
    return f"unanswered: {waiting}" if waiting else None


def broken_responses(body: dict[str, Any]) -> str | None:
    calls, answered = set(), set()
    for at, item in enumerate(body["input"]):
        kind = item.get("type", "message")
        if kind == "function_call":
            calls.add(item["call_id"])
        elif kind == "function_call_output":
            if item["call_id"] not in calls:
                return f"input[{at}]: No tool call found for function call output"
            answered.add(item["call_id"])
        elif kind == "reasoning" and not item.get("encrypted_content"):
            return f"input[{at}]: Item not found: items are not persisted when store is false"
    return (
        f"No tool output found for function call {calls - answered}" if calls - answered else None
    )


def marks_in(value: Any) -> list[str]:
    """Return how long each marked block stays cached, in the order of the request."""
    if isinstance(value, list):
        return [mark for one in value for mark in marks_in(one)]
    if not isinstance(value, dict):
        return []
    inside = marks_in(value.get("content"))
    mark = value.get("cache_control")
    return inside if mark is None else [*inside, mark.get("ttl", "5m")]


def broken_marks(body: dict[str, Any]) -> str | None:
    marks = marks_in([*body.get("tools", []), body.get("system"), *body["messages"]])
    if isinstance(body.get("system"), list):
        marks = marks_in([*body.get("tools", []), *body["system"], *body["messages"]])
    if len(marks) > 4:
        return f"A maximum of 4 blocks with cache_control may be provided. Found {len(marks)}."
    if marks != sorted(marks, key=["1h", "5m"].index):
        return "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block"
    return None


def broken_messages(body: dict[str, Any]) -> str | None:
    if "max_tokens" not in body:
        return "max_tokens: Field required"
    if broken_marks(body) is not None:
        return broken_marks(body)
    last, waiting = None, set()
    for at, message in enumerate(body["messages"]):
        role, content = message["role"], message["content"]
        if role not in {"user", "assistant"}:
            return f"messages[{at}]: unexpected role {role!r}"
        if role == last:
            return f"messages[{at}]: roles must alternate"
        last = role
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not blocks or any(b["type"] == "text" and not b["text"].strip() for b in blocks):
            return f"messages[{at}]: text content blocks must be non-empty"
        results = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        if set(results) != waiting or len(results) != len(waiting):
            return f"messages[{at}]: tool_use ids {waiting} and tool_result blocks {results}"
        for block in blocks:
            if block["type"] == "thinking" and "cache_control" in block:
                return f"messages[{at}]: thinking: Extra inputs are not permitted"
            if block["type"] == "thinking" and block.get("signature") != "signed":
                return f"messages[{at}]: Invalid `signature` in `thinking` block"
        waiting = {b["id"] for b in blocks if b["type"] == "tool_use"}
    return f"tool_use ids without tool_result: {waiting}" if waiting else None


def broken_contents(body: dict[str, Any]) -> str | None:
    asked: list[str] = []
    for at, content in enumerate(body["contents"]):
        if content.get("role") not in {"user", "model"} or not content.get("parts"):
            return f"contents[{at}]: Please use a valid role: user, model, and give parts"
        calls = [p["functionCall"]["name"] for p in content["parts"] if "functionCall" in p]
        answers = [
            p["functionResponse"]["name"] for p in content["parts"] if "functionResponse" in p
        ]
        if answers != asked:
            return f"contents[{at}]: function response parts {answers} for calls {asked}"
        signed = [p.get("thoughtSignature") for p in content["parts"] if "functionCall" in p]
        if signed and not signed[0]:
            return f"contents[{at}]: Function call is missing a thought_signature"
        asked = calls
    return f"function calls without a response: {asked}" if asked else None


# A model with a window.


def tokens_in(body: dict[str, Any]) -> int:
    """Return how many tokens a request has: a third of its characters, so that guesses are off."""
    said = body.get("messages") or body.get("input")
    return len(json.dumps([body.get("system"), said, body.get("tools")])) // 3


def too_long(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Return the status and the error of a request that is longer than its model's window."""
    found = re.match(r"window-(\d+)-(.+)", body["model"])
    tokens = tokens_in(body)
    if found is None or tokens <= int(found[1]):
        return None
    window = found[1]
    match found[2]:
        case "anthropic":
            text = f"prompt is too long: {tokens} tokens > {window} maximum"
            return 400, {"type": "invalid_request_error", "message": text}
        case "anthropic-bytes":
            return 413, {"type": "request_too_large", "message": "Request exceeds the maximum size"}
        case "responses":
            text = "Your input exceeds the context window of this model."
            return 400, {"code": "context_length_exceeded", "message": text, "param": "input"}
        case "vllm":
            text = f"This model's maximum context length is {window} tokens. However, you requested"
            text += f" {tokens + 9} tokens ({tokens} in the messages, 9 in the completion)."
            return 400, {"type": "BadRequestError", "message": text, "code": 400}
        case "llama.cpp":
            error = {"code": 400, "type": "exceed_context_size_error", "message": "too large"}
            return 400, {**error, "n_prompt_tokens": tokens, "n_ctx": int(window)}
    text = f"This model's maximum context length is {window} tokens. However, your messages"
    text += f" resulted in {tokens} tokens."
    return 400, {"message": text, "code": "context_length_exceeded", "param": "messages"}


# The application. Imports are late: tests import this module for `running` alone.


class Application:
    """Routes, and what was seen."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.broken: list[str] = []
        self.failures: dict[str, int] = {}
        self.number = 0

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def seen(request: Any) -> Any:
            return JSONResponse({"requests": self.requests, "broken": self.broken})

        return Starlette(
            routes=[
                Route("/seen", seen),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/v1/messages", self.messages, methods=["POST"]),
                Route("/{version}/models/{rest:path}", self.contents, methods=["POST"]),
                # The same, where Azure and Vertex have it.
                Route(
                    "/azure/openai/deployments/{name}/chat/completions",
                    self.chat,
                    methods=["POST"],
                ),
                Route("/vertex/{rest:path}", self.messages, methods=["POST"]),
            ]
        )

    async def received(self, request: Any, broken: Any, key: str | None) -> tuple[Any, Any]:
        """Return the body, and the answer that says what is wrong with it."""
        from starlette.responses import JSONResponse

        body = await request.json()
        body.setdefault("model", "m")  # some have it in the path
        self.requests.append(body)
        self.number += 1
        if key != KEY:
            error = {"message": f"Incorrect API key provided: {key}", "code": "invalid_api_key"}
            return body, JSONResponse({"error": error}, status_code=401)
        why = broken(body)
        if why is not None:
            self.broken.append(why)
            error = {"message": why, "type": "invalid_request_error"}
            return body, JSONResponse({"type": "error", "error": error}, status_code=400)
        refused = too_long(body)
        if refused is not None:
            status, error = refused
            return body, JSONResponse({"type": "error", "error": error}, status_code=status)
        return body, None

    def failure(self, last: str) -> Any:
        """Return the failure that a user asks for: ``fail 500 once``, ``fail 429 always``."""
        from starlette.responses import JSONResponse

        found = re.search(r"fail (\d+) (once|always)", last)
        if found is None:
            return None
        self.failures[last] = self.failures.get(last, 0) + 1
        if found[2] == "once" and self.failures[last] > 1:
            return None
        error = {"message": f"as you wished, with {KEY}", "type": "api_error"}
        return JSONResponse(
            {"type": "error", "error": error},
            status_code=int(found[1]),
            headers={"retry-after": "0.01"},
        )

    async def chat(self, request: Any) -> Any:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.headers.get("api-key") or bearer
        body, refused = await self.received(request, broken_chat, key)
        if refused is not None:
            return refused
        users = [at for at, m in enumerate(body["messages"]) if m["role"] == "user"]
        last = body["messages"][users[-1]]["content"]
        results = [m["content"] for m in body["messages"][users[-1] :] if m["role"] == "tool"]
        return self.failure(last) or streamed(self.chat_chunks(body, last, results), last)

    async def chat_chunks(self, body: Any, last: str, results: list[str]) -> AsyncIterator[Any]:
        head = {"id": f"chatcmpl-{self.number}", "object": "chat.completion.chunk"}
        head |= {"created": 1, "model": body["model"], "system_fingerprint": "fp_1"}

        def chunk(delta: Any, reason: str | None = None) -> Any:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return None, {**head, "choices": [choice]}

        text, calls = reply_to(last, results)
        yield chunk({"role": "assistant", "content": ""})
        if "think" in last:
            for piece in pieces("Let me think about it."):
                yield chunk({"reasoning_content": piece})
        for piece in pieces(text):
            yield chunk({"content": piece})
        for index, arguments in enumerate(calls):
            function: dict[str, str] = {"name": "get_current_time", "arguments": ""}
            call = {"index": index, "id": f"call_{self.number}_{index}", "type": "function"}
            yield chunk({"tool_calls": [{**call, "function": function}]})
            for piece in pieces(json.dumps(arguments), 5):
                part = {"index": index, "function": {"arguments": piece}}
                yield chunk({"tool_calls": [part]})
        yield chunk({}, "tool_calls" if calls else "stop")
        usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
        usage |= {"prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2}}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield None, {**head, "choices": [], "usage": usage}
        yield None, "[DONE]"

    async def responses(self, request: Any) -> Any:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        body, refused = await self.received(request, broken_responses, key)
        if refused is not None:
            return refused
        users = [at for at, item in enumerate(body["input"]) if item.get("role") == "user"]
        content = body["input"][users[-1]]["content"]
        last = content if isinstance(content, str) else "".join(p["text"] for p in content)
        outputs = [i for i in body["input"][users[-1] :] if i.get("type") == "function_call_output"]
        results = [str(item["output"]) for item in outputs]
        return self.failure(last) or streamed(self.response_events(body, last, results), last)

    async def response_events(self, body: Any, last: str, results: list[str]) -> AsyncIterator[Any]:
        sequence = 0
        items: list[Any] = []
        response = {"id": f"resp_{self.number}", "object": "response", "created_at": 1}
        response |= {"model": body["model"], "status": "in_progress", "output": items}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}

        def event(kind: str, **fields: Any) -> Any:
            nonlocal sequence
            sequence += 1
            return kind, {"type": kind, "sequence_number": sequence, **fields}

        text, calls = reply_to(last, results)
        yield event("response.created", response=response)
        if "think" in last:
            summary = [{"type": "summary_text", "text": "Let me think about it."}]
            item = {"type": "reasoning", "id": f"rs_{self.number}", "summary": summary}
            where = {"item_id": item["id"], "output_index": 0, "summary_index": 0}
            for piece in pieces("Let me think about it."):
                yield event("response.reasoning_summary_text.delta", delta=piece, **where)
            items.append({**item, "encrypted_content": "sealed"})
            yield event("response.output_item.done", output_index=0, item=items[-1])
        if text:
            where = {"item_id": f"msg_{self.number}", "output_index": len(items)}
            for piece in pieces(text):
                yield event(
                    "response.output_text.delta", delta=piece, content_index=0, logprobs=[], **where
                )
            part = {"type": "output_text", "text": text, "annotations": []}
            item = {"type": "message", "id": f"msg_{self.number}", "role": "assistant"}
            items.append({**item, "status": "completed", "content": [part]})
            yield event("response.output_item.done", output_index=len(items) - 1, item=items[-1])
        for index, arguments in enumerate(calls):
            item = {"type": "function_call", "id": f"fc_{self.number}_{index}"}
            item |= {"call_id": f"call_{self.number}_{index}", "name": "get_current_time"}
            for piece in pieces(json.dumps(arguments), 5):
                yield event(
                    "response.function_call_arguments.delta",
                    delta=piece,
                    item_id=item["id"],
                    output_index=len(items),
                )
            items.append({**item, "arguments": json.dumps(arguments), "status": "completed"})
            yield event("response.output_item.done", output_index=len(items) - 1, item=items[-1])
        usage = {"input_tokens": 11, "output_tokens": 5, "total_tokens": 16}
        usage |= {"input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2}}
        usage |= {"output_tokens_details": {"reasoning_tokens": 2}}
        yield event(
            "response.completed", response={**response, "status": "completed", "usage": usage}
        )

    async def messages(self, request: Any) -> Any:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key") or bearer
        body, refused = await self.received(request, broken_messages, key)
        if refused is not None:
            return refused
        last, results = "", []
        for message in body["messages"]:
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if message["role"] == "user":
                texts = [b["text"] for b in blocks if b["type"] == "text"]
                said = [block_text(b["content"]) for b in blocks if b["type"] == "tool_result"]
                last, results = (texts[-1], []) if texts else (last, [*results, *said])
        return self.failure(last) or streamed(self.message_events(body, last, results), last)

    async def contents(self, request: Any) -> Any:
        key = request.headers.get("x-goog-api-key")
        body, refused = await self.received(request, broken_contents, key)
        if refused is not None:
            return refused
        last, results = "", []
        for content in body["contents"]:
            for part in content["parts"] if content["role"] == "user" else ():
                if "functionResponse" in part:
                    results.append(part["functionResponse"]["response"]["output"])
                elif part.get("text"):
                    last, results = part["text"], []
        said = [json.dumps(one) if isinstance(one, dict) else str(one) for one in results]
        return self.failure(last) or streamed(self.content_events(last, said), last)

    async def content_events(self, last: str, results: list[str]) -> AsyncIterator[Any]:
        head = {"responseId": f"resp_{self.number}", "modelVersion": "m"}

        def event(*parts: Any, **fields: Any) -> Any:
            candidate = {"index": 0, "content": {"role": "model", "parts": list(parts)}, **fields}
            return None, {**head, "candidates": [candidate]}

        text, calls = reply_to(last, results)
        if "blocked" in last:
            yield None, {**head, "promptFeedback": {"blockReason": "SAFETY"}}
            return
        if "think" in last:
            for piece in pieces("Let me think about it."):
                yield event({"text": piece, "thought": True})
        for piece in pieces(text):
            yield event({"text": piece})
        for at, arguments in enumerate(calls):
            signed = {"thoughtSignature": "c2lnbmVk"} if not at else {}
            call = {"name": "get_current_time", "args": arguments}
            yield event({"functionCall": call, **signed})
        usage = {"promptTokenCount": 11, "candidatesTokenCount": 3, "thoughtsTokenCount": 2}
        usage |= {"cachedContentTokenCount": 3, "totalTokenCount": 16}
        name, data = event({"text": ""}, finishReason="STOP")
        yield name, {**data, "usageMetadata": usage}

    async def message_events(self, body: Any, last: str, results: list[str]) -> AsyncIterator[Any]:
        text, calls = reply_to(last, results)
        message = {"id": f"msg_{self.number}", "type": "message", "role": "assistant"}
        message |= {"model": body["model"], "content": [], "stop_reason": None}
        usage = {"input_tokens": 6, "cache_read_input_tokens": 3, "output_tokens": 1}
        usage |= {"cache_creation_input_tokens": 2}
        yield (
            "message_start",
            {
                "type": "message_start",
                "message": {**message, "stop_sequence": None, "usage": usage},
            },
        )
        yield "ping", {"type": "ping"}
        index = 0
        blocks: list[tuple[Any, list[Any]]] = []
        if "think" in last:
            deltas: list[Any] = [
                {"type": "thinking_delta", "thinking": piece}
                for piece in pieces("Let me think about it.")
            ]
            deltas.append({"type": "signature_delta", "signature": "signed"})
            blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
        if text:
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(text)]
            blocks.append(({"type": "text", "text": ""}, deltas))
        for at, arguments in enumerate(calls):
            block = {"type": "tool_use", "id": f"toolu_{self.number}_{at}"}
            block |= {"name": "get_current_time", "input": {}}
            parts = pieces(json.dumps(arguments), 5)
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in parts]
            blocks.append((block, deltas))
        for index, (block, deltas) in enumerate(blocks):
            start = {"type": "content_block_start", "index": index, "content_block": block}
            yield "content_block_start", start
            for delta in deltas:
                event = {"type": "content_block_delta", "index": index, "delta": delta}
                yield "content_block_delta", event
            yield "content_block_stop", {"type": "content_block_stop", "index": index}
        delta = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
        yield (
            "message_delta",
            {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 5}},
        )
        yield "message_stop", {"type": "message_stop"}


def block_text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def streamed(events: AsyncIterator[Any], last: str) -> Any:
    """Return an answer of server-sent events; ``cut`` in the message cuts it, ``hang`` never ends it."""
    import anyio
    from starlette.responses import StreamingResponse

    async def lines() -> AsyncIterator[str]:
        sent = 0
        async for name, data in events:
            if "cut" in last and sent == 6:
                raise ConnectionResetError("as you wished")
            if "hang" in last and sent == 6:
                await anyio.sleep_forever()  # until the client goes away
            head = f"event: {name}\n" if name else ""
            yield f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
            sent += 1

    return StreamingResponse(lines(), media_type="text/event-stream")


def main() -> None:
    import logging
    import socket

    import uvicorn

    logging.disable(logging.CRITICAL)  # a cut stream is no news
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(Application().app(), log_config=None, lifespan="off"))
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
