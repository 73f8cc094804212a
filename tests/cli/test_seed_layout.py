"""``perdure export --layout seed``: raw traces with their archive, memories, and the way back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import Message, Shutdown, ToolCall
from perdure.agent import AgentConfig, AgentFactory, CompactionPolicy, EchoModel
from perdure.memory.compaction import EpisodicItem, items_of
from perdure.memory.documents import EPISODIC, SEMANTIC
from perdure.memory.traces import read_turns
from perdure.session.internals import contents_of, store_of
from perdure.session.manager import SessionManager
from tests.agent.test_compacting import words
from tests.cli.conftest import Command

QUIET = Shutdown(signals=False)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def config() -> AgentConfig:
    policy = CompactionPolicy(max_tokens=160, count_tokens=words, keep_turns=1)
    return AgentConfig(name="gus", model=EchoModel(), instructions="Be kind.", compaction=policy)


async def _talk(sessions: SessionManager, first: int, last: int) -> None:
    async with await AgentFactory(sessions).create_agent(config(), agent_id="gus") as agent:
        for number in range(first, last):
            text = f"The wind is from the west, and this is number {number}. " * 3
            await agent.ask(f"{text}I prefer answers in knots.")


async def _fill(root: Path) -> None:
    async with perdure.connect(root, shutdown=QUIET) as sessions:
        await _talk(sessions, 0, 6)
        async with sessions.open("gus") as session, session.turn():
            session.append(Message.user("And the tide?", image_urls=["https://example.org/a.png"]))
            session.append(Message.assistant(tool_calls=[ToolCall("c1", "tide", {"at": 4})]))
            session.append(Message.tool("c1", {"level": 2}, name="tide"))
            session.append(Message.assistant("It is 2 m.", reasoning="A rising tide."))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose agent was compacted several times, and has spoken since."""
    root = tmp_path_factory.mktemp("seed") / "store"
    anyio.run(_fill, root)
    return root


@pytest.fixture
def exported(filled: Path, command: Command, tmp_path: Path) -> Path:
    """Return what is exported of it, without the log."""
    out = tmp_path / "out"
    tokens = ("export", "gus", "--layout", "seed", "--plain", "--out", out, "--store", filled)
    done = command(*tokens, "--json")
    assert done.status == 0, done.err
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert set(done.json["files"]) == found
    return out


def segments(folder: Path) -> Iterator[list[Any]]:
    manifest = json.loads((folder / "raw_traces_archive_manifest.json").read_text("utf-8"))
    for segment in manifest["segments"]:
        assert segment["status"] == "complete"
        found = lines(folder / "raw_traces_archive" / segment["file_name"])
        assert (found[0]["id"], found[-1]["id"]) == (
            segment["first_trace_id"],
            segment["last_trace_id"],
        )
        assert len(found) == segment["record_count"]
        yield found


async def _state(root: Path) -> dict[str, Any]:
    """Return what a model would see, what was said, and what is remembered."""
    async with perdure.connect(root, shutdown=QUIET) as sessions, sessions.open("gus") as session:
        turns = read_turns(store_of(session), session.key)
        said = [json.loads(one) async for turn in turns for one in turn.messages]
        items = items_of(await contents_of(session).lines(EPISODIC), EpisodicItem)
        later = read_turns(store_of(session), session.key, after=items[-1].as_of_seq)
        return {
            "context": session.context(),
            "said": [(one["role"], one.get("content"), one.get("tool_payload")) for one in said],
            "episodes": [(item.id, item.turn_ids, item.summary) for item in items],
            "facts": [
                json.loads(line)["fact"] for line in await contents_of(session).lines(SEMANTIC)
            ],
            "tail": [one async for turn in later for one in turn.messages],
        }


def state(root: Path) -> dict[str, Any]:
    return anyio.run(_state, root)


def test_traces_are_archived_by_compaction_and_the_tail_is_active(exported: Path) -> None:
    """S1-15, S1-16: everything that was said is in the archive or active, once and in order."""
    archived = list(segments(exported))
    active = lines(exported / "raw_traces.jsonl")
    episodes = lines(exported / "episodic.jsonl")
    assert len(archived) == len(episodes) > 1
    for found, episode in zip(archived, episodes, strict=True):
        assert found[-1]["seq"] <= episode["as_of_seq"]
    assert active[0]["seq"] > episodes[-1]["as_of_seq"]
    everything = [*(trace for found in archived for trace in found), *active]
    seqs = [trace["seq"] for trace in everything]
    assert seqs == sorted(seqs)
    assert len({trace["id"] for trace in everything}) == len(everything)
    kinds = [trace["trace_type"] for trace in active[-5:]]
    assert kinds == ["tool_call", "tool_result", "tool_continuation", "reasoning", "assistant"]
    assert lines(exported / "semantic.jsonl")[0]["fact"] == "I prefer answers in knots."
    manifest = json.loads((exported / "compacted_memory_manifest.json").read_text("utf-8"))
    assert manifest == {"schema_version": 3, "last_reset_ts": None}


@pytest.mark.parametrize("history", ["of the traces", "of session.json"])
def test_what_was_exported_without_the_log_comes_back(
    exported: Path, filled: Path, command: Command, tmp_path: Path, history: str
) -> None:
    """S0-1, S0-4, S1-2: what was said, what is remembered, and what the model sees next."""
    if history == "of the traces":
        (exported / "session.json").unlink()
        shutil.rmtree(exported / "plugins", ignore_errors=True)
    done = command("import", exported, "--store", tmp_path / "other", "--json")
    assert done.status == 0, done.err
    assert (done.json["agent"], done.json["findings"]) == ("gus", [])
    assert state(tmp_path / "other") == state(filled)
    assert command("check", "--store", tmp_path / "other").status == 0


def test_an_imported_agent_goes_on_and_compacts_what_is_not_compacted_yet(
    exported: Path, command: Command, tmp_path: Path
) -> None:
    """S1-14: the episodes know how far they reach in their new log."""
    (exported / "session.json").unlink()
    other = tmp_path / "other"
    assert command("import", exported, "--store", other).status == 0
    before = state(other)["episodes"]

    async def go_on() -> None:
        async with perdure.connect(other, shutdown=QUIET) as sessions:
            await _talk(sessions, 6, 10)

    anyio.run(go_on)
    after = state(other)["episodes"]
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert "number 0" not in " ".join(summary for _, _, summary in after[len(before) :])


def test_the_log_counts_where_it_is_carried(filled: Path, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command("export", "gus", "--layout", "seed", "--out", out, "--store", filled)
    (out / "episodic.jsonl").write_text("not read\n")
    done = command("import", out, "--store", tmp_path / "other", "--json")
    assert done.json["findings"] == []
    assert state(tmp_path / "other") == state(filled)


def test_what_is_damaged_or_pending_is_left_out_and_said(
    exported: Path, command: Command, tmp_path: Path
) -> None:
    """S1-15: a pending segment does not count; a torn line costs itself only."""
    (exported / "session.json").unlink()
    manifest = json.loads((exported / "raw_traces_archive_manifest.json").read_text("utf-8"))
    manifest["segments"][0]["status"] = "pending"
    (exported / "raw_traces_archive_manifest.json").write_text(json.dumps(manifest))
    with (exported / "raw_traces.jsonl").open("a") as file:
        file.write('{"id":"rt_999","trace_ty')
    (exported / "working_context_snapshot.json").write_text("{")
    gone = [
        trace["content"] for trace in lines(next((exported / "raw_traces_archive").glob("000001*")))
    ]
    done = command("import", exported, "--id", "gus", "--store", tmp_path / "other", "--json")
    assert done.status == 0, done.err
    said = {Path(one["where"]).name: one["detail"] for one in done.json["findings"]}
    assert "the context was made anew" in said["working_context_snapshot.json"]
    assert "1 lines cannot be read, the first is line" in said["raw_traces.jsonl"]
    found = state(tmp_path / "other")
    assert not {text for _, text, _ in found["said"]} & set(gone)
    texts = [message.text for message in found["context"]]
    assert "Memory of earlier turns" in texts[0]
    assert texts[-1] == "It is 2 m."
    assert len(texts) == 1 + len(found["tail"])


def test_a_context_that_is_older_than_the_traces_is_made_anew(
    exported: Path, command: Command, tmp_path: Path
) -> None:
    """S1-G1: never silently an older cache."""
    (exported / "session.json").unlink()
    with (exported / "raw_traces.jsonl").open("a") as file:
        trace = {"id": "rt_999", "ts": 1.0, "turn_id": "t", "seq": 999, "trace_type": "user"}
        file.write(json.dumps({**trace, "content": "One more thing."}) + "\n")
    assert command("import", exported, "--store", tmp_path / "other").status == 0
    context = state(tmp_path / "other")["context"]
    assert [context[0].role, context[0].text] == ["system", "Be kind."]
    assert "Memory of earlier turns" in context[1].text
    assert context[-1].text == "One more thing."


BASE = {"ts": 1778739886.449, "turn_id": "turn_0001", "content": ""}
TOOL = {"tool_name": "run_bash", "tool_call_id": "call_MD", "tool_args": {"command": "pwd"}}
THEIRS = [
    {**BASE, "id": "rt_1", "seq": 1, "trace_type": "user", "content": "Where are we?"},
    {**BASE, "id": "rt_2", "seq": 2, "trace_type": "tool_call", **TOOL},
    {**BASE, "id": "rt_3", "seq": 3, "trace_type": "tool_result", **TOOL, "tool_result": "/home"},
    {**BASE, "id": "rt_4", "seq": 4, "trace_type": "assistant", "content": "In /home."},
    {**BASE, "id": "rt_5", "seq": 1, "turn_id": "turn_0002", "trace_type": "user", "content": "ok"},
]
ABSENT = {"reasoning_content": None, "image_urls": [], "audio_urls": [], "video_urls": []}


def theirs(folder: Path, last: dict[str, Any]) -> Path:
    """Write what another runtime keeps of an agent."""
    folder.mkdir()
    said = [("system", "Be terse."), ("user", "Where are we?"), ("assistant", "In /home.")]
    messages = [{"role": role, "content": text, **ABSENT} for role, text in said]
    snapshot = {"schema_version": 3, "agent_id": "daily_4771", "epoch_id": 1}
    files = {
        "raw_traces_archive.jsonl": THEIRS[:4],
        "raw_traces.jsonl": THEIRS[4:],
        "episodic.jsonl": [
            {"id": "ep_1", "ts": 1.0, "turn_ids": ["turn_0001"], "summary": "pwd", "tags": []}
        ],
        "semantic.jsonl": [
            {"id": "sem_1", "ts": 1.0, "fact": "Home is /home.", "confidence": 0.9, "tags": []}
        ],
        "working_context_snapshot.json": [{**snapshot, "messages": [*messages, last]}],
    }
    for name, values in files.items():
        (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    return folder


def test_the_memory_folder_of_another_runtime_becomes_an_agent(
    command: Command, tmp_path: Path
) -> None:
    """S0-9, S0-27, S1-G1: their snapshot is the context if it has what was said last."""
    last = {"role": "user", "content": "ok", "tool_payload": None, **ABSENT}
    store = tmp_path / "store"
    done = command("import", theirs(tmp_path / "in", last), "--store", store, "--json")
    assert (done.status, done.json["agent"]) == (0, "daily_4771"), done.err

    async def look() -> dict[str, Any]:
        async with perdure.connect(store, shutdown=QUIET) as sessions:
            async with sessions.open("daily_4771") as session:
                said = [json.loads(line) for line in await contents_of(session).lines(EPISODIC)]
                facts = [json.loads(line) for line in await contents_of(session).lines(SEMANTIC)]
                history = [one.value.text for one in await session.history()]
                context = [(one.role, one.text) for one in session.context()]
                after = read_turns(store_of(session), session.key, after=said[0]["as_of_seq"])
                tail = [json.loads(one)["content"] async for turn in after for one in turn.messages]
                return {"facts": facts, "history": history, "context": context, "tail": tail}

    found = anyio.run(look)
    assert found["history"] == ["Where are we?", "", "", "In /home.", "ok"]
    assert found["context"][0] == ("system", "Be terse.")
    assert found["context"][-1] == ("user", "ok")
    assert len(found["context"]) == 4
    assert found["tail"] == ["ok"]
    assert found["facts"][0]["fact"] == "Home is /home."
