"""Threads of LangGraph are shown in plain words, and nothing that they hold is run."""

from __future__ import annotations

import base64
import contextlib
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
    at = {
        "ns": "",
        "id": "1",
        "parent": None,
        "channels": {},
        "versions": {},
        "body": {"checkpoint": {"ts": "2026-11-25T12:23:40+00:00"}},
    }
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
            await graph.ainvoke({"messages": [("user", "And back")]}, thread)
            await _shows_turns(inspector)


async def _shows_turns(inspector: httpx.AsyncClient) -> None:
    page = await get(inspector, "/session", agent="pilot")
    said = [("user", 1), ("assistant", None), ("user", 2), ("assistant", None)]
    assert [(item["role"], (item["turn"] or {}).get("number")) for item in page["items"]] == said
    head = page["head"]
    assert (head["turns"], head["messages"], head["checkpoints"]) == (2, 4, 6)
    assert head["status"] == {"name": "idle", "detail": ""}
    older = await get(inspector, "/session", agent="pilot", limit=3, end=page["items"][3]["place"])
    assert [item["place"] for item in older["items"]] == [0, 1, 2]
    assert (older["by"], older["older"], older["newer"]) == ("end", None, 4)
    middle = await get(inspector, "/session", agent="pilot", before=page["items"][2]["checkpoint"])
    assert [item["place"] for item in middle["items"]] == [0, 1]
    context = await get(inspector, "/context", agent="pilot")
    assert [item["role"] for item in context["items"]] == ["user", "assistant"] * 2
    steps = (await get(inspector, "/checkpoints", agent="pilot"))["steps"]
    assert [(step["source"], step["turn"], step["messages"]) for step in steps] == [
        ("loop", 2, 1), ("loop", 2, 1), ("input", 2, 0),
        ("loop", 1, 1), ("loop", 1, 1), ("input", 1, 0),
    ]  # fmt: skip
    assert [step["next"] for step in steps] == [[], ["answer"], ["__start__"]] * 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_thread_that_was_cut_or_waits_says_so() -> None:
    pytest.importorskip("langgraph")
    from langchain_core.messages import AIMessage, RemoveMessage
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.types import interrupt

    from perdure.adapters import PerdureSaver

    async def answer(state: MessagesState) -> dict[str, Any]:
        asked = state["messages"][-1].text
        if asked == "fail":
            raise ValueError(asked)
        if asked == "wait":
            interrupt("May I?")
        usage = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
        gone = RemoveMessage(str(state["messages"][0].id))
        return {"messages": [AIMessage("done", usage_metadata=usage), gone]}

    builder = StateGraph(MessagesState)
    builder.add_node(answer)
    builder.add_edge(START, "answer")
    async with connected() as sessions, client(sessions) as http:
        graph = builder.compile(checkpointer=PerdureSaver(sessions))

        async def status_after(thread: str, given: Any) -> tuple[str, str]:
            config: Any = {"configurable": {"thread_id": thread}}
            with contextlib.suppress(ValueError):
                await graph.ainvoke(given, config)
            await sessions.flush()
            status = (await get(http, "/status", agent=thread))["status"]
            page = await get(http, "/session", agent=thread)
            assert page["head"]["status"] == status
            return status["name"], page["items"][-1]["parts"][0]["text"]

        failed = await status_after("a", {"messages": [("user", "fail")]})
        assert failed == ("failed", "fail")
        assert await status_after("b", {"messages": [("user", "wait")]}) == ("interrupted", "wait")
        goes_on = {"messages": [("user", "go on")]}
        assert await status_after("b", goes_on) == ("idle", "done")
        page = await get(http, "/session", agent="b")
        # the first message is in the newest state no longer, and is shown all the same
        assert [item["in_context"] for item in page["items"]] == [False, True, True]
        assert [item["turn"]["status"] for item in page["items"] if item["turn"]] == [
            "interrupted",
            "done",
        ]
        assert [item["turn"]["tokens"] for item in page["items"] if item["turn"]] == [
            {"input": 0, "output": 0},
            {"input": 5, "output": 3},
        ]


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
