"""A reply is what the model said: nobody else's words become the assistant's."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Message
from perdure.errors import FormatError
from perdure.providers import parse
from perdure.providers.context_fit import Format

TEXT = "It is 14 degrees."


@pytest.mark.parametrize(
    ("said", "format", "cure"),
    [
        ({"role": "user", "content": TEXT}, "openai", "Message.user("),
        ({"role": "system", "content": TEXT}, "openai", "Message.system("),
        ({"role": "developer", "content": TEXT}, "openai", "Message.system("),
        ({"role": "tool", "tool_call_id": "c", "content": TEXT}, "openai", "Message.tool("),
        ({"role": "user", "content": TEXT}, "openai-responses", "Message.user("),
        (
            {"output": [{"type": "message", "role": "user", "content": []}]},
            "openai-responses",
            "Message.user(",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": TEXT}]},
            "anthropic",
            "Message.user(",
        ),
        ({"role": "user", "content": TEXT}, "anthropic", "Message.user("),
        ({"role": "user", "parts": [{"text": TEXT}]}, "gemini", "Message.user("),
        ({"role": "function", "parts": [{"text": TEXT}]}, "gemini", "Message.tool("),
    ],
)
def test_another_role_is_refused_with_the_call_that_takes_it(
    said: dict[str, Any], format: Format, cure: str
) -> None:
    with pytest.raises(FormatError) as refused:
        parse(said, format)
    role = said["role"] if "role" in said else said["output"][0]["role"]
    assert f"the role {role!r}" in str(refused.value)
    assert repr(format) in str(refused.value)
    assert f"session.append({cure}" in str(refused.value)
    assert f"session.extend(history, {format!r})" in str(refused.value)


@pytest.mark.parametrize("role", [{}, {"role": None}])
def test_a_reply_may_leave_its_role_out(role: dict[str, Any]) -> None:
    assert parse({**role, "content": TEXT}, "openai").text == TEXT
    assert parse({**role, "parts": [{"text": TEXT}]}, "gemini").text == TEXT


def test_the_calls_that_the_errors_name_are_there() -> None:
    made = [Message.user(TEXT), Message.system(TEXT), Message.tool("c", TEXT)]
    assert [one.role for one in made] == ["user", "system", "tool"]
