"""A session's context for each provider: live, in a view, after a kill, and blocking."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perdure.sync
from perdure import ConfigError, Message, SessionManager
from perdure.providers import FORMATS, Format, RenderedContext, parse
from perdure.providers.tool_pairs import INTERRUPTED
from tests.providers.replies import ANTHROPIC, CHAT, GEMINI, RESPONSES
from tests.providers.rules import wrongs
from tests.providers.sdk import assert_accepted
from tests.session.conftest import Connect

REPLIES: dict[Format, dict[str, Any]] = {
    "openai": CHAT,
    "openai-responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
}
formats = pytest.mark.parametrize("format", FORMATS)


def rendered(format: Format, context: Any) -> RenderedContext:
    """Return a context as a `RenderedContext`, whichever shape the format has."""
    if format in {"anthropic", "gemini"}:
        assert isinstance(context, RenderedContext)
        return context
    assert isinstance(context, list)
    return RenderedContext(format, context)


async def talk(sessions: SessionManager, format: Format) -> Any:
    async with sessions.open("ada") as session, session.turn():
        session.append(Message.system("Be kind."), Message.user("Look around"))
        reply = parse(REPLIES[format], format)
        session.append(reply, *(Message.tool(call.id, "seen") for call in reply.tool_calls))
        return session.context(format)


@formats
async def test_a_context_is_the_same_after_a_restart(again: Connect, format: Format) -> None:
    """S0-2, S0-9: what the provider issued goes back to it, through the store, as it was."""
    async with again() as sessions:
        before = await talk(sessions, format)
    async with again() as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert view.context(format) == before
        async with sessions.open("ada") as session:
            assert session.context(format) == before
    context = rendered(format, before)
    assert wrongs(context) == []
    assert_accepted(context)


KILLED = """
import os, signal, sys
import anyio, perdure
from perdure import Message
from perdure.providers import parse
from tests.providers.replies import ANTHROPIC

async def main():
    async with perdure.connect(sys.argv[1]) as sessions, sessions.open("ada") as session:
        async with session.turn():
            session.append(Message.user("Look around"), parse(ANTHROPIC, "anthropic"))
            session.append(Message.tool("toolu_2", "the tower"))
            await session.save()
            os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@formats
async def test_a_kill_in_the_middle_of_a_call_refuses_no_request(
    tmp_path: Path, format: Format
) -> None:
    """C14, S0-3: the call is shown as interrupted, what was done stays, and nothing runs again."""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert ended.returncode == -signal.SIGKILL
    async with perdure.connect(tmp_path) as sessions, sessions.open("ada") as session:
        head = session.version
        session.append(Message.user("Go on"))
        context = rendered(format, session.context(format))
        assert wrongs(context) == []
        assert_accepted(context)
        assert str(context).count(INTERRUPTED) == 1
        assert "the tower" in str(context)
        assert session.version == head + 1  # rendering wrote nothing


async def test_messages_are_given_as_they_are(again: Connect) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        dangling = parse(CHAT, "openai")
        session.append(dangling)
        (kept,) = session.context()
        assert (kept.tool_calls, kept.extra) == (dangling.tool_calls, dangling.extra)


async def test_the_reader_and_the_policy_are_passed_on(again: Connect) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hi"), parse(ANTHROPIC, "anthropic"))
        assert "signature" in str(session.context("anthropic"))
        assert "signature" not in str(session.context("anthropic", to="proxy"))
        assert "signature" in str(session.context("anthropic", to="proxy", reasoning="keep"))
        assert "signature" not in str(session.context("anthropic", reasoning="strip_all"))


async def test_an_unknown_format_names_those_that_there_are(again: Connect) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        with pytest.raises(ConfigError, match="'cohere' is unknown: choose None, 'openai', "):
            session.context("cohere")  # type: ignore[call-overload]


@formats
def test_blocking_sessions_render_the_same(tmp_path: Path, format: Format) -> None:
    with perdure.sync.connect(tmp_path) as sessions, sessions.open("ada") as session:
        session.append(Message.user("Look around"), parse(REPLIES[format], format))
        context = rendered(format, session.context(format))
        assert wrongs(context) == []
        session.save()
        view = sessions.load("ada")
        assert view is not None
        assert view.context(format) == session.context(format)
