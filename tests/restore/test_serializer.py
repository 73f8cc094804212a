"""The snapshot's stored form, by the serializer and by the fold: one format (S0-6 to S0-10, S0-27)."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from perdure import Message, ToolCall, UnsupportedVersionError
from perdure.memory.context import WorkingContext
from perdure.records.messages import encode_message
from perdure.restore import WorkingContextSnapshot, WorkingContextSnapshotSerializer

MESSAGES = (
    Message.system("Be kind."),
    Message.user("Look", image_urls=["http://i/1.png"], audio_urls=["a.wav"], video_urls=["v.mp4"]),
    Message.assistant(
        "Let me see",
        reasoning="The user wants a look.",
        tool_calls=[ToolCall("c1", "look", {"at": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"x"})],
    ),
    Message.tool("c1", {"seen": ["ship"]}, name="look"),
    Message(role="assistant", content="A ship.", extra={"signature": msgspec.Raw(b'"abc"')}),
)


def snapshot() -> WorkingContextSnapshot:
    return WorkingContextSnapshot(messages=MESSAGES, epoch_id=4, last_compaction_ts=1738100000.0)


def payload() -> dict[str, Any]:
    return WorkingContextSnapshotSerializer().serialize(snapshot(), {"agent_id": "a", "seq": 9})


def test_everything_comes_back() -> None:
    """S0-6, S0-7, S0-9: calls, results, media, reasoning, unknown fields, values that are more than JSON."""
    through_text = json.loads(json.dumps(payload()))
    found, beside = WorkingContextSnapshotSerializer().deserialize(through_text)
    assert found == snapshot()
    assert beside == {"agent_id": "a", "seq": 9, "schema_version": 1}


def test_the_fields_are_those_of_the_format() -> None:
    """S0-27."""
    stored = payload()
    assert {"schema_version", "agent_id", "epoch_id", "last_compaction_ts", "messages"} <= set(
        stored
    )
    assert stored["messages"][0] == {"role": "system", "content": "Be kind."}
    assert stored["messages"][2]["reasoning_content"] == "The user wants a look."
    assert stored["messages"][3]["tool_payload"]["tool_result"] == {"seen": ["ship"]}
    assert stored["messages"][1]["image_urls"] == ["http://i/1.png"]


def folded() -> dict[str, Any]:
    context = WorkingContext(100_000)
    for seq, message in enumerate(MESSAGES, 1):
        entry = encode_message(message)
        context.feed(seq, entry.kind, entry.payload)
    found: dict[str, Any] = json.loads(context.snapshot("a", "default"))
    return found


def test_what_the_fold_writes_is_read_here() -> None:
    found, beside = WorkingContextSnapshotSerializer().deserialize(folded())
    assert found.messages == MESSAGES
    assert beside["seq"] == len(MESSAGES)
    assert WorkingContextSnapshotSerializer().validate(folded(), "a")


def test_messages_are_stored_as_the_fold_stores_them() -> None:
    assert payload()["messages"] == folded()["messages"]


BAD: list[Any] = [
    None,
    [],
    "text",
    {},
    {**payload(), "schema_version": 2},
    {**payload(), "schema_version": "1"},
    {key: value for key, value in payload().items() if key != "messages"},
    {key: value for key, value in payload().items() if key != "agent_id"},
    {**payload(), "messages": "no"},
    {**payload(), "messages": [1]},
    {**payload(), "messages": [{"content": "no role"}]},
    {**payload(), "messages": [{"role": "robot", "content": "x"}]},
    {**payload(), "messages": [{"role": "tool", "tool_payload": {"tool_call_id": 7}}]},
    {**payload(), "epoch_id": "four"},
    {**payload(), "messages": [{"role": "user", "content": object()}]},
]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_well_formed_is_invalid_and_raises_nothing(bad: Any) -> None:
    """S0-8, S0-26."""
    assert not WorkingContextSnapshotSerializer().validate(bad, "a")


def test_nesting_without_end_is_invalid_and_raises_nothing() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert not WorkingContextSnapshotSerializer().validate({**payload(), "messages": deep}, "a")


def test_another_agents_snapshot_is_invalid() -> None:
    """S0-26: agent_id equality, which the seeds' projects forgot."""
    serializer = WorkingContextSnapshotSerializer()
    assert serializer.validate(payload(), "a")
    assert not serializer.validate(payload(), "b")


def test_a_newer_version_is_named() -> None:
    """S0-10."""
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        WorkingContextSnapshotSerializer().deserialize({**payload(), "schema_version": 2})
