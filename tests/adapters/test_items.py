"""What the adapters share: the SDK that is missing, and the one that is not imported early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perdure import ConfigError, connect
from perdure.adapters.items import AdapterManager


def program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("sdk", "extra", "use"),
    [
        ("agent_framework", "agent-framework", "PerdureHistoryProvider"),
        ("agent_framework", "agent-framework", "PerdureCheckpointStorage"),
        ("google.adk", "google-adk", "PerdureSessionService"),
        ("agents", "openai-agents", "PerdureSession; PerdureSession.in_memory()"),
        ("pydantic_ai", "pydantic-ai", "PerdureConversationStore"),
        ("langgraph", "langgraph", "PerdureSaver"),
        ("ormsgpack", "langgraph", "PerdureSaver"),
    ],
)
def test_without_the_sdk_the_error_says_what_to_install(sdk: str, extra: str, use: str) -> None:
    hidden = f"import sys; sys.modules[{sdk!r}] = None\n"
    done = program(f"{hidden}from perdure.adapters import {use}")
    assert "MissingExtraError" in done.stderr
    assert f"pip install 'perdure[{extra}]'" in done.stderr


def test_no_sdk_is_imported_before_it_is_used() -> None:
    done = program(
        "import sys, perdure.adapters, perdure.adapters.openai_agents\n"
        "print({'agents', 'openai', 'pydantic', 'pydantic_ai'} & set(sys.modules))"
    )
    assert done.stdout == "set()\n", done.stderr


def test_what_is_no_manager_is_refused() -> None:
    with pytest.raises(ConfigError, match="no session manager.*PerdureSession.from_url"):
        AdapterManager("sqlite:///a.db", instead="PerdureSession.from_url")  # type: ignore[arg-type]


async def test_a_manager_that_was_given_stays_open() -> None:
    async with connect("memory:") as sessions:
        await AdapterManager(sessions, instead="").aclose()
        assert await sessions.list() == []
