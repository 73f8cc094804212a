"""Raw traces: the log's messages, in the form that others keep them in."""

from __future__ import annotations

import msgspec

from perdure.memory.traces import traces_of
from perdure.records.messages import Message, ToolCall


def test_a_message_is_as_many_traces_as_it_says_things() -> None:
    """S1-9, S1-12: what was called with what, and what came of it."""
    message = Message.assistant(
        "Let me see.", reasoning="Hm.", tool_calls=[ToolCall("a", "look", {"deck": 2})]
    )
    found = list(traces_of("turn_0001", [(7, message)]))
    assert [one.trace_type for one in found] == ["reasoning", "tool_call", "assistant"]
    assert [one.id for one in found] == ["rt_7", "rt_7_1", "rt_7_2"]
    assert (found[1].tool_name, found[1].tool_args) == ("look", {"deck": 2})


def test_ids_follow_from_the_records_numbers_and_never_collide() -> None:
    """Defect e of seed 1's project: ids of the same millisecond were the same."""
    said = [(seq, msgspec.structs.replace(Message.user("x"), created_at=1.0)) for seq in range(50)]
    found = list(traces_of("turn_0001", said))
    assert len({one.id for one in found}) == 50
    assert {one.ts for one in found} == {1.0}


def test_the_stored_form_has_the_seeds_field_names() -> None:
    """S1-6, S1-15."""
    said = [
        (4, Message.user("Look", image_urls=["https://example.org/a.png"])),
        (5, Message.tool("a", name="look", error="too dark")),
    ]
    first, second = (msgspec.to_builtins(one) for one in traces_of("turn_0001", said))
    assert first == {
        "id": "rt_4",
        "ts": 0.0,
        "turn_id": "turn_0001",
        "seq": 4,
        "trace_type": "user",
        "content": "Look",
        "media": {"images": ["https://example.org/a.png"]},
    }
    assert (second["trace_type"], second["tool_call_id"]) == ("tool_result", "a")
    assert second["tool_error"] == "too dark"
