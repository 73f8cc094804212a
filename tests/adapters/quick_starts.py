"""The diff of each adapter's page, applied to a program of the SDK's: before and after it runs.

``python tests/adapters/quick_starts.py langgraph`` needs nothing but the extra: it runs the page's
own program, then the other one as the diff makes it, and as it was, if what that asks for is
installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).parents[2] / "docs"
GIVEN = {
    "openai-agents": """
        from agents import Agent, set_tracing_disabled
        from agents.testing import ScriptedModel, assistant_message

        set_tracing_disabled(True)
        agent = Agent(name="pilot", model=ScriptedModel([[assistant_message("At noon.")]]))
        """,
    "pydantic-ai": """
        from pydantic_ai import Agent
        from pydantic_ai.models.test import TestModel

        agent = Agent(TestModel(custom_output_text="At noon."))
        """,
    "claude-agent-sdk": "",
    "langgraph": """
        from langgraph.graph import START, MessagesState, StateGraph

        builder = StateGraph(MessagesState)
        builder.add_node("model", lambda state: {"messages": [("ai", "At noon.")]})
        builder.add_edge(START, "model")
        config = {"configurable": {"thread_id": "ada"}}
        """,
    "agent-framework": """
        from agent_framework import BaseChatClient, ChatResponse, FunctionInvocationLayer, Message

        class Scripted(FunctionInvocationLayer, BaseChatClient):
            def _inner_get_response(self, *, messages, **kwargs):
                async def answer():
                    return ChatResponse(messages=[Message("assistant", ["At noon."])])
                return answer()

        client = Scripted()
        """,
    "google-adk": """
        from google.adk.agents import BaseAgent
        from google.adk.events.event import Event
        from google.genai import types

        class Noon(BaseAgent):
            async def _run_async_impl(self, ctx):
                yield Event(author=self.name, invocation_id=ctx.invocation_id)

        agent = Noon(name="pilot")
        """,
}
"""What a program has besides the page's lines: an agent whose model is a script."""
BETWEEN = """\
await service.create_session(app_name="harbor", user_id="ada", session_id="tides")
question = types.Content(role="user", parts=[types.Part(text="When is low tide?")])
async for _ in runner.run_async(user_id="ada", session_id="tides", new_message=question):
    pass
"""
"""What stands where a diff has left lines out."""
FOUND = """
import perdure

async def look():
    async with perdure.connect("sqlite:///agents.db") as sessions:
        (info,) = await sessions.list()
        assert info.key.agent in ("ada", "harbor/ada") or info.title == "When is low tide?", info

asyncio.run(look())
"""


def program(extra: str, sign: str) -> str:
    """Return the program before (``-``) or after (``+``) the diff of an SDK's page."""
    page = (DOCS / f"{extra}.md").read_text(encoding="utf-8")
    diff = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert diff is not None
    lines = [line[1:] for line in diff[1].splitlines() if line[:1] in ("", " ", sign)]
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    body = "\n".join(line for line in lines if line not in imports).replace("…\n", BETWEEN)
    main = f"async def main():\n{textwrap.indent(body, '    ')}\n\nasyncio.run(main())\n"
    given = textwrap.dedent(GIVEN[extra])
    found = FOUND if sign == "+" else ""
    return "\n".join(["import asyncio", *imports, given, main, found])


def whole(extra: str) -> str:
    """Return the program on an SDK's page."""
    page = (DOCS / f"{extra}.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(import asyncio\n.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


@contextmanager
def environment(extra: str, folder: str) -> Iterator[dict[str, str]]:
    """Yield the variables of a program: of one that asks a model, those of a server that is one."""
    if extra != "claude-agent-sdk":
        yield {**os.environ}
        return
    sys.path.insert(0, str(DOCS.parent))
    from tests.servers.anthropic_script import AnthropicScript

    with AnthropicScript() as server:
        yield {**os.environ, **server.environment, "CLAUDE_CONFIG_DIR": f"{folder}/config"}


def run(extra: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run such a program in an empty folder."""
    with TemporaryDirectory() as folder, environment(extra, folder) as variables:
        return subprocess.run(  # noqa: S603  # our own page
            [sys.executable, "-c", code],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def main() -> int:
    """Run the program of the page that was named, on both sides of its diff."""
    (extra,) = sys.argv[1:]
    page = run(extra, whole(extra))
    print(f"{extra}: the page's program: {page.returncode}\n{page.stderr}", end="")
    before, after = run(extra, program(extra, "-")), run(extra, program(extra, "+"))
    if "ModuleNotFoundError" in before.stderr:
        print(f"{extra}: before: not run: {before.stderr.splitlines()[-1]}")
    else:
        print(f"{extra}: before: {before.returncode}\n{before.stderr}", end="")
    print(f"{extra}: after: {after.returncode}\n{after.stderr}", end="")
    return page.returncode or after.returncode


if __name__ == "__main__":
    sys.exit(main())
