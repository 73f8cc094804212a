"""Messages as values: what they accept, and that they keep what they do not know."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from perdure.errors import ConfigError, NotStorableError
from perdure.records.messages import (
    CALL_FIELDS,
    CALLS_FIELDS,
    MESSAGE_FIELDS,
    RESULT_FIELDS,
    Message,
    ToolCall,
    ToolResult,
)

RAW = msgspec.Raw(b"1")


def test_the_constructors_give_each_role() -> None:
    call = ToolCall("c1", "run", {"x": 1})
    assert Message.system("s") == Message(role="system", content="s")
    assert Message.user("u", image_urls=["i"]) == Message(
        role="user", content="u", image_urls=("i",)
    )
    assert Message.assistant("a", reasoning="r", tool_calls=[call]) == Message(
        role="assistant", content="a", reasoning="r", tool_calls=(call,)
    )
    assert Message.tool("c1", [1], name="run") == Message(
        role="tool", tool_result=ToolResult("c1", "run", [1])
    )
    assert Message.tool("c1", error="no").tool_result == ToolResult("c1", error="no")


@pytest.mark.parametrize("role", ["developer", "", "User", None])
def test_a_role_that_does_not_exist_is_refused_with_the_choice(role: Any) -> None:
    with pytest.raises(ConfigError, match="choose system, user, assistant, tool"):
        Message(role=role)


@pytest.mark.parametrize("when", [math.nan, math.inf])
def test_a_time_that_is_none_is_refused(when: float) -> None:
    with pytest.raises(ConfigError, match="created_at"):
        Message(role="user", created_at=when)


def test_lists_become_tuples_and_text_is_no_list() -> None:
    assert Message(role="user", image_urls=["a"]).image_urls == ("a",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="image_urls must be a list or tuple, not str"):
        Message(role="user", image_urls="a")  # type: ignore[arg-type]


def test_calls_and_a_result_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Message(role="tool", tool_result=ToolResult("1"), tool_calls=(ToolCall("1", "n"),))


@pytest.mark.parametrize("name", sorted(MESSAGE_FIELDS))
def test_extra_of_a_message_holds_no_known_field(name: str) -> None:
    with pytest.raises(NotStorableError, match=f"extra holds '{name}', which is a field"):
        Message(role="user", extra={name: RAW})


@pytest.mark.parametrize("name", sorted(CALL_FIELDS))
def test_extra_of_a_call_holds_no_known_field(name: str) -> None:
    with pytest.raises(NotStorableError):
        ToolCall("1", "n", extra={name: RAW})


@pytest.mark.parametrize("name", sorted(RESULT_FIELDS))
def test_extra_of_a_result_holds_no_known_field(name: str) -> None:
    with pytest.raises(NotStorableError):
        ToolResult("1", extra={name: RAW})


@pytest.mark.parametrize("name", sorted(CALLS_FIELDS))
def test_extra_beside_the_calls_holds_no_known_field(name: str) -> None:
    with pytest.raises(NotStorableError):
        Message(role="assistant", payload_extra={name: RAW})


@pytest.mark.parametrize("value", [1, "x", b"x", {"a": 1}, None])
def test_extra_holds_raw_json_only(value: Any) -> None:
    with pytest.raises(NotStorableError, match="give it as raw JSON"):
        Message(role="user", extra={"usage": value})


def test_line_breaks_between_tokens_become_spaces() -> None:
    pretty = msgspec.Raw(b'{\r\n "a": "x\\ny",\n "b": 1.0\n}')
    message = Message(role="user", extra={"usage": pretty, "id": RAW})
    assert bytes(message.extra["usage"]) == b'{   "a": "x\\ny",  "b": 1.0 }'
    assert msgspec.json.decode(message.extra["usage"]) == msgspec.json.decode(pretty)
    assert message.extra["id"] == RAW


def test_text_joins_the_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, "x", {"text": 1}, {"text": "b"}]
    assert Message.user(parts).text == "ab"
    assert Message.user("ab").text == "ab"
    assert Message.user(None).text == ""


def test_a_message_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Message.user("a").content = "b"  # type: ignore[misc]
