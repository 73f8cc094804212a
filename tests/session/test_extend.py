"""Another program's history in a session: whole and durable, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perdure.sync
from perdure import ConfigError, FormatError, Message, TooLargeError
from perdure.providers import Format
from tests.providers.test_histories import ANTHROPIC, CHAT, GEMINI, RESPONSES
from tests.session.conftest import Connect
from tests.session.test_rendering import rendered

HISTORIES: dict[Format, list[dict[str, Any]]] = {
    "openai": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
}
formats = pytest.mark.parametrize("format", HISTORIES)


@formats
async def test_a_history_is_there_after_a_restart_as_it_came(
    again: Connect, format: Format
) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        receipt = await session.extend(HISTORIES[format], format)
        assert receipt.version == session.version == session.durable_version
    async with again() as sessions, sessions.open("ada") as session:
        assert rendered(format, session.context(format)).messages == HISTORIES[format]
        session.append(Message.user("And now?"))
        messages = rendered(format, session.context(format)).messages
        assert messages[: len(HISTORIES[format]) - 1] == HISTORIES[format][:-1]
        assert "And now?" in str(messages[-1])


async def test_a_result_in_a_history_is_never_taken_for_an_interrupted_call(
    again: Connect,
) -> None:
    """Read as answers of the model's, these messages lost the result: it became words."""
    async with again() as sessions, sessions.open("ada") as session:
        await session.extend(CHAT, "openai")
        context = session.context("openai")
        assert "interrupted" not in str(context)
        assert [one["content"] for one in context if one["role"] == "tool"] == [
            [{"type": "text", "text": "31"}],
            "14 °C",
        ]


async def test_what_does_not_fit_leaves_the_session_as_it_was(again: Connect) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        before = session.version
        with pytest.raises(FormatError, match=r"history\[8\]\.role is 'robot'"):
            await session.extend([*CHAT, {"role": "robot", "content": "Hi"}], "openai")
        with pytest.raises(TooLargeError):
            long = {"role": "user", "content": "x" * 20_000_000}
            await session.extend([*CHAT, long], "openai")
        with pytest.raises(ConfigError, match="format 'cohere' is unknown"):
            await session.extend(CHAT, "cohere")  # type: ignore[arg-type]
        assert session.version == before
        assert session.context() == []
        assert (await session.extend([], "openai")).version == before


async def test_answers_to_a_history_go_on_from_it(again: Connect) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        session.append(Message.user("Before"))
        await session.extend(ANTHROPIC[:2], "anthropic")
        session.append(Message.tool("toolu_1", "14"), Message.tool("toolu_2", "31"))
        messages = session.context("anthropic").messages
        assert [one["role"] for one in messages] == ["user", "assistant", "user"]
        assert messages[1] == ANTHROPIC[1]


def test_the_blocking_mirror_takes_a_history_too(tmp_path: Path) -> None:
    with perdure.sync.connect(tmp_path) as sessions, sessions.open("ada") as session:
        receipt = session.extend(CHAT, "openai")
        assert receipt.version == session.durable_version
        assert session.context("openai") == CHAT
        with pytest.raises(FormatError, match=r"history\[0\]"):
            session.extend(["Hello"], "openai")


KILLED = """
import asyncio, json, os, sys
import perdure

async def main():
    async with perdure.connect(sys.argv[1]) as sessions, sessions.open("ada") as session:
        await session.extend(json.loads(sys.argv[2]), "openai")
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_a_history_that_was_taken_outlives_a_kill(tmp_path: Path) -> None:
    import json

    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), json.dumps(CHAT)],
        env=dict(os.environ),
        check=False,
        timeout=120,
    )
    assert run.returncode == -signal.SIGKILL
    with perdure.sync.connect(tmp_path) as sessions:
        view = sessions.load("ada")
        assert view is not None
        assert view.context("openai") == CHAT
