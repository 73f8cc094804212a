"""An agent with a real model and the tools of an MCP server, which goes on after a restart.

pip install 'perdure[openai,mcp]' mcp-server-time
OPENAI_API_KEY=… python real_model.py openai:gpt-5 "What time is it in Tokyo?"
python real_model.py openai:qwen3 "And in Cairo?" http://localhost:8000/v1
"""

from __future__ import annotations

import asyncio
import sys

from perdure.agent import Agent, McpServer, Segment, ToolStarted, TurnFailed, named_model


async def main(name: str, question: str, base_url: str | None = None) -> int:
    model = named_model(name, base_url=base_url)
    clock = McpServer([sys.executable, "-m", "mcp_server_time"], name="time", trusted=True)
    async with Agent.create("clock", model=model, mcp=[clock], persistent_session=True) as agent:
        async for event in agent.stream(question):
            if isinstance(event, Segment):
                print(event.text, end="", flush=True)
            elif isinstance(event, ToolStarted):
                print(f"[{event.call.name} {event.call.arguments}]")
            elif isinstance(event, TurnFailed):
                print(f"no answer: {event.error}")
                return 1
        print()
        print(f"{agent.session.info.turns} turns are kept")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
