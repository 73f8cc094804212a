"""``python -m tests.adapters.claude_program URL CWD QUESTION… [--resume ID]``: the SDK's own program.

It asks questions, its transcript mirrored into the store, and prints the session's id after each.
"""

from __future__ import annotations

import argparse
import asyncio

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage

from perdure.adapters import PerdureSessionStore


async def ask(url: str, cwd: str, questions: list[str], resume: str | None) -> None:
    async with PerdureSessionStore.from_url(url) as store:
        options = ClaudeAgentOptions(
            cwd=cwd,
            session_store=store,
            session_store_flush="eager",
            resume=resume,
            setting_sources=[],
        )
        async with ClaudeSDKClient(options) as client:
            for question in questions:
                await client.query(question)
                async for message in client.receive_response():
                    if isinstance(message, ResultMessage):
                        print(message.session_id, message.result, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.claude_program")
    parser.add_argument("url")
    parser.add_argument("cwd")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--resume")
    given = parser.parse_args()
    asyncio.run(ask(given.url, given.cwd, given.questions, given.resume))


if __name__ == "__main__":
    main()
