"""Threads of LangGraph are shown in plain words, and nothing that they hold is run."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import msgspec
import pytest

from perdure.inspector.conversation import step_of
from perdure.records.records import FOREIGN, MESSAGE, Record
from tests.inspector.conftest import HOSTILE, client, connected
from tests.inspector.test_pages import get


def stored(*arguments: Any) -> msgspec.msgpack.Ext:
    """Return an object as LangGraph stores it: where its class is, and what makes it."""
    return msgspec.msgpack.Ext(5, msgspec.msgpack.encode(arguments))


def message(kind: str, content: Any, **fields: Any) -> msgspec.msgpack.Ext:
    about = {"type": kind, "content": content, **fields}
    return stored("langchain_core.messages", "Message", about, "model_validate_json")


def record(*values: Any, put: Any = None, kind: str = FOREIGN, sdk: str = "langgraph") -> Record:
    leaves = [
        ["leaf", str(number), "msgpack", base64.b64encode(msgspec.msgpack.encode(value)).decode()]
        for number, value in enumerate(values)
    ]
    payload = {"sdk": sdk, "v": 1, "values": leaves, "put": put}
    return Record(seq=1, epoch=1, kind=kind, payload=msgspec.json.encode(payload), end=True)


def test_messages_calls_and_results_are_parts_of_a_step() -> None:
    at = {"body": {"checkpoint": {"ts": "2026-11-25T12:23:40+00:00"}}}
    call = message("ai", "I look.", tool_calls=[{"name": "tide", "args": {"harbor": "x"}}])
    step = step_of(record(call, message("tool", "noon", name="tide"), put=at))
    assert step is not None
    assert (step.role, step.kind, step.at) == ("tool", "checkpoint", 1795609420.0)
    assert step.parts == [
        ("text", "", "I look."),
        ("call", "tide", {"harbor": "x"}),
        ("result", "tide", "noon"),
    ]
    written = step_of(record([stored("langgraph.types", "Interrupt", {"value": "sail?"}, None)]))
    assert written is not None
    assert (written.role, written.parts) == ("", [("json", "", [{"value": "sail?"}])])


def entry(**fields: Any) -> Record:
    payload = {"sdk": "claude-agent-sdk", "v": 1, **fields}
    return Record(seq=1, epoch=1, kind=FOREIGN, payload=msgspec.json.encode(payload), end=True)


def test_blocks_of_an_entry_are_parts_of_a_step() -> None:
    at = "2026-11-25T12:23:40.000Z"
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "Low?", "signature": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "tide", "input": {"harbor": "x"}},
        {"type": "image", "source": {}},
    ]
    answer = {"role": "assistant", "content": blocks}
    step = step_of(entry(entry={"type": "assistant", "timestamp": at, "message": answer}))
    assert step is not None
    assert (step.role, step.kind, step.at) == ("assistant", "entry", 1795609420.0)
    assert (step.sdk, step.parts) == (
        "claude-agent-sdk",
        [
            ("reasoning", "", "Low?"),
            ("text", "", "I look."),
            ("call", "tide", {"harbor": "x"}),
            ("json", "", blocks[3]),
        ],
    )
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "noon", "is_error": True}
    told = step_of(entry(entry={"type": "user", "message": {"role": "user", "content": [result]}}))
    assert told is not None
    assert (told.role, told.parts) == ("tool", [("error", "t1", "noon")])
    title = step_of(entry(entry={"type": "custom-title", "customTitle": "Tides"}))
    assert title is not None
    assert (title.role, title.parts[0][0]) == ("", "json")
    assert step_of(entry(text='{"type": "us', more=True)) is None
    assert step_of(entry(entry={"type": "x", "timestamp": "noon"})) is None
    assert step_of(entry(entry={"type": "x", "message": {"content": 1}})) is None


def test_what_cannot_be_read_is_no_step() -> None:
    nested: Any = "x"
    for _ in range(2000):
        nested = stored("m", "C", nested)
    assert step_of(record(nested)) is None
    assert step_of(record("x", kind=MESSAGE)) is None
    assert step_of(record("x", sdk="another")) is None
    broken = Record(
        seq=1, epoch=1, kind=FOREIGN, payload=b'{"sdk": "langgraph", "values": [[1]]}', end=True
    )
    assert step_of(broken) is None
    large = step_of(record("x" * 200_000))
    assert large is not None
    assert large.parts[0][2] == "200,005 bytes of msgpack"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_thread_is_a_conversation() -> None:
    pytest.importorskip("langgraph")
    from langgraph.graph import START, MessagesState, StateGraph

    from perdure.adapters import PerdureSaver

    async def answer(_: MessagesState) -> dict[str, Any]:
        return {"messages": [("ai", HOSTILE)]}

    builder = StateGraph(MessagesState)
    builder.add_node(answer)
    builder.add_edge(START, "answer")
    async with connected() as sessions:
        graph = builder.compile(checkpointer=PerdureSaver(sessions))
        thread: Any = {"configurable": {"thread_id": "pilot"}}
        await graph.ainvoke({"messages": [("user", "Take me there")]}, thread)
        async with client(sessions) as inspector:
            await _shows(inspector)


async def _shows(inspector: httpx.AsyncClient) -> None:
    page = await get(inspector, "/session", agent="pilot")
    assert [item["role"] for item in page["items"]] == ["user", "assistant"]
    assert {item["source"] for item in page["items"]} == {"langgraph"}
    assert [item["parts"][0]["text"] for item in page["items"]] == ["Take me there", HOSTILE]
    rows = (await get(inspector, "/session", agent="pilot", view="timeline"))["rows"]
    assert {"checkpoint", "writes"} <= {row["item"]["kind"] for row in rows}
    raw = await inspector.get("/session", params={"agent": "pilot", "view": "raw"})
    assert "msgpack" in raw.text
    shown = await inspector.get("/session", params={"agent": "pilot"})
    assert "<script>alert" not in shown.text


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_transcript_is_a_conversation() -> None:
    pytest.importorskip("claude_agent_sdk")
    from perdure.adapters import PerdureSessionStore

    about = {"timestamp": "2026-11-25T12:23:40.000Z"}
    asked = {"role": "user", "content": "Take me there"}
    told = {"role": "assistant", "content": [{"type": "text", "text": HOSTILE}]}
    async with connected() as sessions:
        await PerdureSessionStore(sessions).append(
            {"project_key": "harbor", "session_id": "s"},
            [
                {"type": "user", "uuid": "1", "message": asked, **about},
                {"type": "attachment", "uuid": "2", "attachment": {}, **about},
                {"type": "assistant", "uuid": "3", "message": told, **about},
            ],
        )
        async with client(sessions) as inspector:
            page = await get(inspector, "/session", agent="claude/harbor/s")
            assert [item["role"] for item in page["items"]] == ["user", "assistant"]
            assert {item["source"] for item in page["items"]} == {"claude-agent-sdk"}
            texts = [item["parts"][0]["text"] for item in page["items"]]
            assert texts == ["Take me there", HOSTILE]
            view = {"agent": "claude/harbor/s", "view": "timeline"}
            rows = (await get(inspector, "/session", **view))["rows"]
            assert [row["item"]["kind"] for row in rows].count("entry") == 3
            shown = await inspector.get("/session", params={"agent": "claude/harbor/s"})
            assert "<script>alert" not in shown.text
