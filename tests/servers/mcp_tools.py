"""An MCP server for tests: `python tests/servers/mcp_tools.py FOLDER`, by stdio.

It speaks the protocol by hand, so that it starts at once. `python -m tests.servers.mcp_tools
FOLDER PORT` is the package's own server with one tool, by HTTP. What a tool does leaves a line in
a file of the folder, so that a test can count effects.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NUMBER = {"type": "integer"}
READS = {"readOnlyHint": True}


def described(name: str, text: str, annotations: Any = None, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    hints = {} if annotations is None else {"annotations": annotations}
    return {"name": name, "description": text, "inputSchema": schema, **hints}


TOOLS = [
    described("add", "Add two numbers.", a=NUMBER, b=NUMBER),
    described("files.read", "Read a file.", path={"type": "string"}),
    described("pay", "Pay, and die before anybody hears of it.", amount=NUMBER),
    described("look", "Look, and die the first time.", READS),
    described("fail", "Fail."),
]


class Tools:
    """What the tools do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, name: str, arguments: Any) -> dict[str, Any]:
        if name == "add":
            total = {"result": arguments["a"] + arguments["b"]}
            return {**said(json.dumps(total)), "structuredContent": total}
        if name == "files.read" and arguments["path"].endswith(".png"):
            image = {"type": "image", "data": "AAEC", "mimeType": "image/png"}
            return {"content": [*said("a picture")["content"], image], "isError": False}
        if name == "files.read":
            return said(f"what stands in {arguments['path']}")
        if name == "fail":
            return {**said("no such thing"), "isError": True}
        times = self.note(name)
        if name == "pay" or times == 1:
            sys.stderr.write("about to die, as you wished\n")
            sys.stderr.flush()
            os._exit(3)
        return said("seen")

    def note(self, line: str) -> int:
        with (self.folder / "done").open("a") as file:
            file.write(f"{line}\n")
        return (self.folder / "done").read_text().splitlines().count(line)


def said(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": False}


def answer(method: str, params: Any, tools: Tools) -> dict[str, Any] | None:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "tools", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        return tools.call(params["name"], params.get("arguments") or {})
    return None


def by_stdio(tools: Tools) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params") or {}, tools)
        error = {"code": -32601, "message": f"no method {request['method']}"}
        body = {"error": error} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}), flush=True)


def by_http(port: int) -> None:
    import socket

    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("tools", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    web = uvicorn.Config(server.streamable_http_app(), log_config=None)
    uvicorn.Server(web).run(sockets=[listener])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        by_http(int(sys.argv[2]))
    else:
        by_stdio(Tools(Path(sys.argv[1])))
