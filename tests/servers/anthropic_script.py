"""A server on the loopback interface that answers as Anthropic's Messages API, from a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Script = Callable[[dict[str, Any]], list[dict[str, Any]]]


class AnthropicScript:
    """Answers each request by a script, and keeps it.

    Args:
        script: Returns the blocks of the answer to a request; by default a text.

    """

    def __init__(self, script: Script | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        answers, requests = script or (lambda _: [text("At noon.")]), self.requests

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:  # noqa: N802  # the base class' name
                size = int(self.headers.get("Content-Length", 0))
                asked = json.loads(self.rfile.read(size))
                if not self.path.startswith("/v1/messages?"):
                    self.send_error(404)
                    return
                requests.append(asked)
                events = answer(len(requests), answers(asked))
                body = b"".join(map(event, events))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Content-Length", f"{len(body)}")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def environment(self) -> dict[str, str]:
        """The variables that let the SDK's program talk to this server, and to nothing else."""
        return {
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{self._server.server_port}",
            "ANTHROPIC_API_KEY": "anything",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def text(content: str) -> dict[str, Any]:
    """Return a block of text."""
    return {"type": "text", "text": content}


def call(id_: str, name: str, **arguments: Any) -> dict[str, Any]:
    """Return a block that calls a tool."""
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def said(request: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the user and the assistant have said, of a request; no reminders."""
    messages = []
    for message in request["messages"]:
        content = message["content"]
        blocks = [text(content)] if isinstance(content, str) else content
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        own = [each for each in texts if not each.startswith("<system-reminder>")]
        if message["role"] != "system" and own:
            messages.append((message["role"], "\n".join(own)))
    return messages


def answer(number: int, blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer."""
    message = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    yield {"type": "message_start", "message": message}
    for at, block in enumerate(blocks):
        if block["type"] == "text":
            empty, delta = text(""), {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": at, "content_block": empty}
        yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}
    reason = "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn"
    end = {"stop_reason": reason, "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": 1}}
    yield {"type": "message_stop"}


def event(data: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
