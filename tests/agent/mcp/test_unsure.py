"""MCP servers that do not answer as they should: what is known then, and what is not."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from perdure import ToolOutcomeUnknownError, ToolServerError, connect
from perdure.agent import Agent, ScriptedModel, call
from perdure.agent.mcp import ConnectionGoneError, McpServer
from tests.agent.mcp.test_server import processes
from tests.servers.mcp_tools import Tools, answer

SCRIPT = Path(__file__).parents[2] / "servers" / "mcp_tools.py"
TOOLS = Tools(Path())


class Web(ThreadingHTTPServer):
    """A server with sessions, as older ones have them; it fails as it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.session = "first"
        self.fails: int | None = None
        self.calls = 0
        self.url = f"http://127.0.0.1:{self.server_port}/mcp"


class Handler(BaseHTTPRequestHandler):
    """Speak the protocol by hand."""

    protocol_version = "HTTP/1.1"
    server: Web

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, web = request["method"], self.server
        if method == "notifications/initialized":
            return self._send(202, b"")
        if method == "initialize" or method.startswith("server/"):
            body = answer(method, request.get("params") or {}, TOOLS)
        elif self.headers.get("mcp-session-id") != web.session:
            return self._send(404, b"")
        elif method == "tools/call":
            web.calls += 1
            if web.fails is not None:
                return self._send(web.fails, b"")
            body = {"content": [{"type": "text", "text": "paid"}], "isError": False}
        else:
            body = answer(method, request.get("params") or {}, TOOLS)
        error = {"code": -32601, "message": f"no method {method}"}
        part = {"error": error} if body is None else {"result": body}
        return self._send(200, json.dumps({"jsonrpc": "2.0", "id": request["id"], **part}).encode())

    def do_GET(self) -> None:
        self._send(405, b"")

    do_DELETE = do_GET

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("mcp-session-id", self.server.session)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_a_server_that_was_started_anew_gets_a_new_session(web: Web) -> None:
    """It does not know the old session; the call was not made, so it is made again."""
    async with McpServer(url=web.url) as tools:
        assert await tools.call("pay", {"amount": 1}) == "paid"
        web.session = "second"
        assert await tools.call("pay", {"amount": 2}) == "paid"
        assert (tools.starts, web.calls) == (2, 2)


@pytest.mark.parametrize("status", [500, 502])
async def test_a_call_that_ends_in_an_error_of_the_server_is_unknown(web: Web, status: int) -> None:
    """S1-9: whoever stands before the server gives up, while the server goes on."""
    web.fails = status
    async with McpServer(url=web.url) as tools:
        with pytest.raises(ToolOutcomeUnknownError, match="taken effect is unknown"):
            await tools.call("pay", {"amount": 1})
        with pytest.raises(ToolServerError) as caught:
            await tools.call("look", {}, repeatable=True)
        assert type(caught.value) is ToolServerError
        assert web.calls == 2


async def test_a_server_that_dies_when_it_is_asked_again_may_have_done_it() -> None:
    """S1-9: the first try has reached nobody; the second one may have taken effect."""
    tools, asked = McpServer("serve"), iter([False, True, False, False])

    async def gone(*_: Any, **__: Any) -> None:
        raise ConnectionGoneError(asked=next(asked))

    tools._call = gone  # type: ignore[method-assign]
    with pytest.raises(ToolOutcomeUnknownError, match="died while it ran 'pay'"):
        await tools.call("pay", {"amount": 1})
    with pytest.raises(ToolServerError, match="died twice"):
        await tools.call("pay", {"amount": 1})


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP")
async def test_a_server_that_hangs_does_not_hang_its_agent(tmp_path: Path) -> None:
    """S1-9: the call ends, and its effect is unknown."""
    tools = McpServer([sys.executable, str(SCRIPT), str(tmp_path)], call_timeout=0.2)
    model = ScriptedModel(call("pay", amount=5), lambda messages: messages[-1].tool_result.error)
    async with connect("memory:") as sessions:
        async with Agent.create("ada", model=model, mcp=[tools], sessions=sessions) as agent:
            (process,) = processes()
            process.send_signal(signal.SIGSTOP)
            try:
                text = await agent.ask("Pay.")
                assert "has not answered 'pay' within 0.2 s" in text
                assert [one.tool for one in agent.unknown_effects] == ["pay"]
            finally:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
