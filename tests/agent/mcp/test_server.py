"""MCP servers, as real processes: their tools, their deaths, and what is said about both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest

from perdure import (
    ConfigError,
    MissingExtraError,
    ToolOutcomeUnknownError,
    ToolServerError,
    connect,
)
from perdure.agent import Agent, ScriptedModel, call
from perdure.agent.mcp import McpServer, StderrTail, effect_of, tool_name
from tests.servers import free_port

SCRIPT = Path(__file__).parents[2] / "servers" / "mcp_tools.py"


def server(folder: Path, **options: Any) -> McpServer:
    return McpServer([sys.executable, str(SCRIPT), str(folder)], name="tools", **options)


def processes() -> list[psutil.Process]:
    """Return the MCP servers that this process has running."""
    children = psutil.Process().children()
    return [one for one in children if any("mcp_tools" in word for word in one.cmdline())]


async def test_a_server_offers_tools_and_is_made_again_when_it_has_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with server(tmp_path) as tools:
        assert {one.name for one in tools.tools()} == {"add", "files_read", "pay", "look", "fail"}
        assert await tools.call("add", {"a": 1, "b": 2}) == {"result": 3}
        assert await tools.call("files.read", {"path": "x.png"}) == [
            {"type": "text", "text": "a picture"},
            {"type": "image", "data": "AAEC", "mimeType": "image/png"},
        ]
        with pytest.raises(
            ToolServerError, match="fail of MCP server 'tools' failed: no such thing"
        ):
            await tools.call("fail", {})
        # What is annotated as reading is called again; what may have taken effect is not.
        assert await tools.call("look", {}, repeatable=True) == "seen"
        assert tools.starts == 2
        with pytest.raises(ToolOutcomeUnknownError, match="unknown") as caught:
            await tools.call("pay", {"amount": 5})
        assert "as you wished" not in str(caught.value)  # a model reads it
        assert "about to die, as you wished" in caplog.text
        assert (tmp_path / "done").read_text().splitlines() == ["look", "look", "pay"]
        assert not tools.is_connected
        assert await tools.call("add", {"a": 2, "b": 2}) == {"result": 4}
        assert tools.starts == 3
        assert len(processes()) == 1
    assert processes() == []


async def test_an_agent_calls_tools_of_a_server(tmp_path: Path) -> None:
    """S1-1: servers are started in the bootstrap, and gone with the agent."""
    model = ScriptedModel(
        [call("add", a=1, b=2), call("my_files_read", path="x")],
        lambda messages: " ".join(str(one.tool_result.result) for one in messages[-2:]),
    )
    tools = server(tmp_path, only=["files.read"], prefix="my_")
    add = server(tmp_path, only=["add"])
    async with Agent.create("ada", model=model, mcp=[add, tools]) as agent:
        assert len(processes()) == 2
        said = await agent.ask("Go.")
        assert "{'result': 3}" in said
        assert "what stands in x" in said
        shown = [spec.name for spec in model.last_tools]
        assert shown == ["add", "my_files_read"]
        schema = model.last_tools[0].parameters
        assert sorted(schema["properties"]) == ["a", "b"]
    assert processes() == []


async def test_what_a_dying_server_did_is_unknown_and_not_done_again(tmp_path: Path) -> None:
    """The ledger of effects has it, and the model is told."""
    model = ScriptedModel(call("pay", amount=5), lambda messages: messages[-1].tool_result.error)
    async with Agent.create("ada", model=model, mcp=[server(tmp_path)]) as agent:
        assert "whether that has taken effect is unknown" in await agent.ask("Pay.")
        (effect,) = agent.unknown_effects
        assert effect.tool == "pay"
    assert (tmp_path / "done").read_text().splitlines() == ["pay"]


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_servers_word_counts_only_where_it_is_trusted(
    tmp_path: Path, trusted: bool
) -> None:
    """`look` says of itself that it just reads, and takes its server down the first time."""
    model = ScriptedModel(call("look"), lambda messages: str(messages[-1].tool_result))
    tools = server(tmp_path, only=["look"], trusted=trusted)
    async with Agent.create("ada", model=model, mcp=[tools]) as agent:
        answer = await agent.ask("Look.")
        unknown = [effect.tool for effect in agent.unknown_effects]
    looks = (tmp_path / "done").read_text().splitlines()
    if trusted:
        assert looks == ["look", "look"]
        assert "seen" in answer
        assert unknown == []
    else:
        assert looks == ["look"]
        assert "whether that has taken effect is unknown" in answer
        assert unknown == ["look"]


async def test_two_agents_share_a_server(tmp_path: Path) -> None:
    shared = server(tmp_path)
    async with connect("memory:") as sessions:
        async with Agent.create("ada", model=ScriptedModel("a"), mcp=[shared], sessions=sessions):
            async with Agent.create(
                "bob", model=ScriptedModel("b"), mcp=[shared], sessions=sessions
            ):
                assert (shared.starts, len(processes())) == (1, 1)
            assert len(processes()) == 1
    assert processes() == []


async def test_two_tools_of_one_name_are_told_apart(tmp_path: Path) -> None:
    async def add(a: int) -> int:
        return a

    with pytest.raises(ConfigError, match="give it a prefix"):
        async with Agent.create(
            "ada", model=ScriptedModel("a"), tools=[add], mcp=[server(tmp_path, only=["add"])]
        ):
            pass
    assert processes() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        (
            {"command": [sys.executable, "-c", "import sys; sys.exit('no config at all')"]},
            "no config at all",
        ),
        (
            {"command": ["sh", "-c", "cat > /dev/null"], "start_timeout": 0.2},
            "has not answered within 0.2 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, r"127.0.0.1:9/mcp.*could not be reached"),
    ],
)
async def test_a_server_that_does_not_start_says_why(given: Any, message: str) -> None:
    model = ScriptedModel("never")
    before = psutil.Process().children()
    with pytest.raises(ToolServerError, match=message):
        async with Agent.create("ada", model=model, mcp=[McpServer(**given)]):
            pass
    assert psutil.Process().children() == before


@pytest.fixture
def http(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]], Any]]:
    port = free_port()
    running: list[subprocess.Popen[str]] = []

    def start() -> None:
        command = [sys.executable, "-m", "tests.servers.mcp_tools", str(tmp_path), str(port)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout.readline() == "listening\n"

    try:
        start()
        yield f"http://127.0.0.1:{port}/mcp", running, start
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.deep
async def test_a_server_at_a_url_may_go_and_come(http: Any) -> None:
    url, running, start = http
    async with McpServer(url=url, headers={"Authorization": "secret"}) as tools:
        assert "secret" not in repr(tools)
        assert await tools.call("add", {"a": 1, "b": 2}) == {"result": 3}
        running[-1].kill()
        running[-1].wait()
        with pytest.raises(ToolServerError, match="could not be reached"):
            await tools.call("add", {"a": 1, "b": 2})
        await anyio.to_thread.run_sync(start)
        assert await tools.call("add", {"a": 2, "b": 2}) == {"result": 4}


def test_last_words_that_do_not_end_take_no_room() -> None:
    words = StderrTail()
    with words.pipe as pipe:
        for _ in range(100):
            pipe.write("x" * 1000)
    words._thread.join()
    assert words.text.splitlines() == ["x" * 500] * 20


def test_what_a_server_wrote_last_has_no_credentials() -> None:
    words = StderrTail()
    with words.pipe as pipe:
        pipe.write("cannot reach db://me:canary@host/x\nOPENAI_KEY=canary is wrong\n")
        pipe.write('{"authorization": "Bearer canary"}\nsent bearer canary to https://host\n')
    words._thread.join()
    assert words.text.splitlines() == [
        "cannot reach db://me:[redacted]@host/x",
        "OPENAI_KEY=[redacted]",
        '{"authorization": [redacted]',
        "sent bearer [redacted] to https://host",
    ]


def test_what_a_server_is_has_to_be_said() -> None:
    with pytest.raises(ConfigError, match="a command or a URL"):
        McpServer()
    with pytest.raises(ConfigError, match="a command or a URL"):
        McpServer("x", url="http://localhost")
    assert repr(McpServer.of("uvx some-server --here")) == (
        "<McpServer 'uvx' (uvx some-server --here)>"
    )
    assert repr(McpServer(["/bin/serve", "--api-key", "k1", "--token=k2", "db://me:k3@host/"])) == (
        "<McpServer 'serve' (/bin/serve --api-key [redacted] --token=[redacted] "
        "db://me:[redacted]@host/)>"
    )
    assert repr(McpServer.of("http://me:secret@localhost:1/mcp?key=secret")) == (
        "<McpServer 'localhost' (http://localhost:1/mcp)>"
    )


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[mcp\]'"):
        McpServer("x")


def test_names_and_effects_fit() -> None:
    assert tool_name("files.read") == "files_read"
    assert tool_name("1st") == "_1st"
    assert len(tool_name("x" * 100)) == 64
    told = [hints(reads=True), hints(idempotent=True)]
    assert {effect_of(one, trusted=True) for one in told} == {"replay"}
    assert {effect_of(one, trusted=False) for one in told} == {"ask"}
    assert {effect_of(one, trusted=True) for one in (None, hints())} == {"ask"}


def hints(*, reads: bool | None = None, idempotent: bool | None = None) -> SimpleNamespace:
    return SimpleNamespace(read_only_hint=reads, idempotent_hint=idempotent)
