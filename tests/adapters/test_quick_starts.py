"""What the adapters' pages say to change in a program of the SDK's works."""

from __future__ import annotations

import pytest

from tests.adapters.quick_starts import GIVEN, program, run

MODULES = {
    "agent-framework": "agent_framework",
    "claude-agent-sdk": "claude_agent_sdk",
    "openai-agents": "agents",
    "pydantic-ai": "pydantic_ai",
    "langgraph": "langgraph.checkpoint.sqlite.aio",
    "google-adk": "google.adk",
}


@pytest.mark.deep
@pytest.mark.parametrize("sign", ["-", "+"])
@pytest.mark.parametrize("extra", GIVEN)
def test_a_program_runs_on_both_sides_of_the_page_s_diff(extra: str, sign: str) -> None:
    pytest.importorskip(MODULES[extra])
    ran = run(extra, program(extra, sign))
    assert (ran.returncode, ran.stderr[-2000:]) == (0, ran.stderr[-2000:])
