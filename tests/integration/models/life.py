"""One life of an agent with a real client and a real MCP server, for `test_lives.py`.

Reads a message a line. ``hold`` stops the MCP server (SIGSTOP), so that a call does not end, and
``resume`` goes on with what is unfinished. What happens is a line of JSON each.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import anyio
import psutil

from perdure.agent import (
    Agent,
    AgentEvent,
    AnthropicModel,
    McpServer,
    OpenAIModel,
    PersistentSession,
    TurnEnded,
)
from tests.servers.models import KEY


def model(kind: str, url: str) -> Any:
    if kind == "anthropic":
        return AnthropicModel("m", base_url=url, api_key=KEY)
    api: Any = "responses" if kind == "responses" else "chat"
    return OpenAIModel("m", api=api, base_url=f"{url}/v1", api_key=KEY)


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def event_facts(event: AgentEvent) -> dict[str, Any]:
    ended = {"text": event.text} if isinstance(event, TurnEnded) else {}
    return {"event": type(event).__name__, **ended}


async def main(kind: str, url: str, folder: str) -> None:
    server = McpServer([sys.executable, "-m", "mcp_server_time"], name="time", trusted=True)
    kept = PersistentSession(storage=f"file:{folder}")
    made = Agent.create("ada", model=model(kind, url), mcp=[server], persistent_session=kept)
    async with made as agent:
        pids = [one.pid for one in psutil.Process().children()]
        tell(event="Ready", restored=str(agent.restore_report), pids=pids)
        async for line in anyio.wrap_file(sys.stdin):
            text = line.strip()
            if text == "hold":
                for pid in pids:
                    psutil.Process(pid).send_signal(signal.SIGSTOP)
                tell(event="Held")
                continue
            if text == "resume":
                ended = await agent.resume()
                tell(event="Resumed", ended=[event_facts(event) for event in ended])
                continue
            async for event in agent.stream(text):
                tell(**event_facts(event))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[2:], backend=sys.argv[1])
