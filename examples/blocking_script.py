"""One assistant in a script without async: the same library, blocking.

    python examples/blocking_script.py "My name is Ada"
    python examples/blocking_script.py "What did I say?"

The model is asked by blocking code, in several threads where that is handy; autosave goes on
meanwhile, in a thread of perdure's own. Ctrl-C and SIGTERM amid an answer keep the question.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import perdure.sync
from perdure import Message

AGENTS = ("amber", "basalt")


def ask_model(messages: list[dict[str, Any]]) -> str:
    """Stand in for a client that blocks."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if len(asked) == 1:
        return "Nice to meet you. I will remember that."
    return f"Before that you said: {asked[-2]!r}. In all you have said {len(asked)} things."


def converse(sessions: perdure.sync.SessionManager, agent: str, text: str) -> str:
    with sessions.open(agent) as session:
        with session.turn():
            session.append(Message.user(text))
            session.save()  # from here on the question outlives whatever happens
            session.append(Message.assistant(ask_model(session.context("openai"))))
        return f"{agent}: {session.context()[-1].text}"


def main(text: str) -> None:
    with perdure.sync.connect() as sessions, ThreadPoolExecutor() as threads:
        for said in threads.map(lambda agent: converse(sessions, agent, text), AGENTS):
            print(said)


main(" ".join(sys.argv[1:]) or "Hello")
