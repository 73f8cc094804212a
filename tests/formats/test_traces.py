"""Raw traces: lines out of messages, and messages out of anybody's lines."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest

from perdure.formats.state import SavedTrace, TraceMessage, TraceMessages, trace_lines
from perdure.formats.trace_files import is_segment_name, read_memories, segment_of
from perdure.memory.compaction import EpisodicItem
from perdure.records.json import decode
from perdure.records.messages import Message, ToolCall, ToolResult

SAID = [
    Message(role="system", content="Be kind.", created_at=1.0),
    Message.user("Look", image_urls=["https://example.org/a.png"]),
    Message.assistant(
        "I look.",
        reasoning="Hm.",
        tool_calls=[ToolCall("c1", "ls", {"at": "."}), ToolCall("c2", "pwd")],
    ),
    Message.tool("c1", {"files": ["a"]}, name="ls"),
    Message.tool("c2", name="pwd", error="no such tool"),
    Message.assistant("There is a."),
    Message.assistant(reasoning="Nothing to say.", content=""),
]


def gathered(lines: list[dict[str, Any]]) -> list[TraceMessage]:
    gathering = TraceMessages()
    found: list[TraceMessage] = []
    for line in lines:
        found.extend(gathering.feed(decode(json.dumps(line).encode(), SavedTrace)))
    return [*found, *gathering.rest()]


def test_messages_come_back_from_their_traces() -> None:
    """S1-15: what is archived as traces is what was said."""
    lines = [json.loads(one.data) for one in trace_lines("t1", enumerate(SAID, 5))]
    assert {line["turn_id"] for line in lines} == {"t1"}
    back = gathered(lines)
    assert [one.message for one in back] == SAID
    assert [one.seq for one in back] == list(range(5, 12))


def test_values_that_json_does_not_have_are_written_as_they_are_stored() -> None:
    day = datetime.date(2026, 5, 4)
    result = Message(role="tool", tool_result=ToolResult("c", "when", {"day": day, "raw": b"x"}))
    (line,) = trace_lines("t", [(3, result)])
    assert json.loads(line.data)["tool_result"] == {"day": "2026-05-04", "raw": "eA=="}


def test_lines_of_others_become_messages() -> None:
    """S1-6, S1-9: numbered by turn, an answer behind its calls, and boundaries between."""
    base = {"ts": 1.5, "turn_id": "turn_0001", "content": ""}
    call = {"tool_name": "run", "tool_call_id": "c", "tool_args": {"cmd": "ls"}}
    lines = [
        {
            **base,
            "id": "1",
            "seq": 1,
            "trace_type": "user",
            "content": "Go",
            "media": {"images": []},
        },
        {**base, "id": "2", "seq": 2, "trace_type": "tool_call", **call},
        {**base, "id": "3", "seq": 3, "trace_type": "assistant", "content": "I run it."},
        {
            **base,
            "id": "4",
            "seq": 4,
            "trace_type": "tool_result",
            **call,
            "tool_result": {"out": 1},
        },
        {**base, "id": "5", "seq": 5, "trace_type": "tool_continuation", "content": "more"},
        {**base, "id": "6", "seq": 6, "trace_type": "operation_boundary"},
        {**base, "id": "7", "seq": 7, "trace_type": "assistant", "content": "Done."},
        {**base, "id": "7", "seq": 7, "trace_type": "assistant", "content": "Done."},
    ]
    at = {"created_at": 1.5}
    assert [one.message for one in gathered(lines)] == [
        Message(role="user", content="Go", **at),
        Message(
            role="assistant",
            content="I run it.",
            tool_calls=(ToolCall("c", "run", {"cmd": "ls"}),),
            **at,
        ),
        Message(role="tool", tool_result=ToolResult("c", "run", {"out": 1}), **at),
        Message(role="assistant", content="Done.", **at),
    ]


def test_a_compaction_is_a_segment() -> None:
    segment = segment_of(2, EpisodicItem(id="ep_9", ts=1777545015.123, summary="b", as_of_seq=9))
    assert segment.file_name.startswith("000002_20260430T103015123Z_")
    assert segment.boundary_key == f"native_compaction:{segment.file_name[-14:-6]}"


@pytest.mark.parametrize("name", ["../x.jsonl", "a/b", ".x", "", "..", "a\n"])
def test_a_segment_never_leads_out_of_the_archive(name: str) -> None:
    assert not is_segment_name(name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
def test_a_pipe_in_a_files_place_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "raw_traces.jsonl").write_bytes(b"")
    os.mkfifo(tmp_path / "episodic.jsonl")
    read = read_memories(tmp_path)
    assert read.episodic == ()
    assert [(Path(one.where).name, one.detail) for one in read.findings] == [
        ("episodic.jsonl", "it is no regular file")
    ]
