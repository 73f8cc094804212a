from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
import perdure.sync
from perdure import Message, Shutdown
from tests.cli.conftest import Command
from tests.images import part, png


def test_ls_lists_the_sessions_with_their_counts(command: Command, store: Path) -> None:
    ran = command("ls", "--by-id", "--store", str(store))
    assert ran.status == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == ["agent", "session", "turns", "records", "active", "title"]
    assert [(line[0], line[1]) for line in lines[1:]] == [
        ("ada", "default"), ("bob", "default"), ("bob", "second"),
    ]  # fmt: skip
    assert lines[1][2] == "1"
    assert lines[1][-1] == "Sums"


def test_ls_as_json_is_one_object(command: Command, store: Path) -> None:
    found = command("ls", "--by-id", "--store", str(store), "--json").json
    assert found["location"] == str(store)
    ada = found["sessions"][0]
    assert (ada["agent"], ada["turns"], ada["title"], ada["tags"]) == ("ada", 1, "Sums", ["x"])


def test_ls_takes_a_prefix_a_tenant_and_a_limit(command: Command, store: Path) -> None:
    def agents(*tokens: str) -> list[str]:
        found = command("ls", "--by-id", *tokens, "--store", str(store), "--json").json
        return [one["agent"] for one in found["sessions"]]

    assert agents("b") == ["bob", "bob"]
    assert agents("--tenant", "acme") == ["eve"]
    assert agents("--limit", "1") == ["ada"]


@pytest.fixture(params=["file", "sqlite"], scope="module")
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of six sessions, of two owners and with two tags; its tests only read."""
    root = tmp_path_factory.mktemp("several")
    url = f"{request.param}:{'///' if request.param == 'sqlite' else ''}{root}/several"

    async def fill() -> None:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            for name in ("ada", "app-1", "app-2", "bob"):
                owner, tags = ("me" if "app" in name else "you"), ["new", name[:1]]
                async with sessions.open(name, owner=owner, tags=tags) as session:
                    session.append(Message.user("Hello"))
            for session_id in ("a", "z"):
                async with sessions.open("bob", session=session_id, owner="me") as session:
                    session.append(Message.user("Hello"))
            await sessions.post("later", Message.user("Are you there?"), key="op-1")
            await sessions.post("later", Message.user("Hm?"), tenant="acme", key="op-1")

    anyio.run(fill)
    return url


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("--owner", "me"), ["app-1", "app-2", "bob/a", "bob/z"]),
        (("--tag", "a"), ["ada", "app-1", "app-2"]),
        (("--owner", "me", "--tag", "a"), ["app-1", "app-2"]),
        (("--prefix", "app", "--limit", "1"), ["app-1"]),
        (("app", "--after", "app-1"), ["app-2"]),
        (("--after", "bob", "--after-session", "a"), ["bob", "bob/z"]),
        (("--tag", "new", "--after", "ada", "--limit", "2"), ["app-1", "app-2"]),
        (("--owner", "nobody"), []),
        (("--limit", "0"), []),
    ],
)
def test_ls_chooses_and_pages(
    command: Command, several: str, tokens: tuple[str, ...], expected: list[str]
) -> None:
    """S2-3: by owner, tag and prefix, a page at a time."""
    found = command("ls", "--by-id", *tokens, "--store", several, "--json").json["sessions"]
    names = [
        one["agent"] + ("" if one["session"] == "default" else f"/{one['session']}")
        for one in found
    ]
    assert names == expected


def test_ls_lists_those_used_last_first(command: Command, several: str) -> None:
    found = command("ls", "--store", several, "--json").json["sessions"]
    times = [one["updated_at"] for one in found]
    assert times == sorted(times, reverse=True)
    by_id = command("ls", "--by-id", "--store", several, "--json").json["sessions"]
    keys = [(one["agent"], one["session"]) for one in by_id]
    assert keys == sorted(keys)
    assert sorted(map(str, found)) == sorted(map(str, by_id))
    two = command("ls", "--limit", "2", "--store", several, "--json").json["sessions"]
    assert two == found[:2]
    refused = command("ls", "--after", "ada", "--store", several)
    assert (refused.status, "give --by-id" in refused.err) == (2, True)


def test_ls_knows_a_session_that_another_process_uses(command: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agents.db"
    with perdure.sync.connect(url) as sessions:
        for name in ("old", "new"):
            chat = sessions.open(name, owner="ann", tags=["vip"])
            with chat.turn():
                chat.append(perdure.Message.user("Hello"))
            chat.describe(title=f"The {name} one")
            chat.save()
        found = command("ls", "--owner", "ann", "--store", url, "--json").json["sessions"]
        assert [(one["agent"], one["turns"], one["title"]) for one in found] == [
            ("new", 1, "The new one"),
            ("old", 1, "The old one"),
        ]
        assert "The new one" in command("ls", "--tag", "vip", "--limit", "1", "--store", url).out


def test_ls_lists_what_waits_for_sessions_that_nobody_has_opened(
    command: Command, several: str
) -> None:
    assert "later" not in command("ls", "--store", several).out
    found = command("ls", "--waiting", "--store", several, "--json").json["waiting"]
    place = {"agent": "later", "session": "default"}
    assert found == [{**place, "tenant": "", "exists": False}]
    theirs = command("ls", "--waiting", "--tenant", "acme", "--store", several, "--json").json
    assert theirs["waiting"] == [{**place, "tenant": "acme", "exists": False}]
    assert "later" in command("ls", "--waiting", "lat", "--store", several).out
    assert "nothing waits" in command("ls", "x", "--waiting", "--store", several).out
    refused = command("ls", "--waiting", "--tag", "new", "--store", several)
    assert (refused.status, "--waiting goes without" in refused.err) == (2, True)


@pytest.mark.parametrize("call", [("ls",), ("forget", "--dry-run")])
def test_a_filter_that_is_no_text_is_refused(
    command: Command, store: Path, call: tuple[str, ...]
) -> None:
    """It would match nothing, silently."""
    for option in ("--tag", "--owner"):
        refused = command(*call, option, "\udc80", "--store", store)
        assert refused.status == 2
        assert "holds a lone surrogate" in refused.err


def test_ls_of_an_empty_store_says_so(command: Command, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ran = command("ls", "--store", str(tmp_path))
    assert (ran.status, ran.out) == (0, f"no sessions in {tmp_path}\n")
    assert command("ls", "--store", str(tmp_path), "--json").json["sessions"] == []


def test_ls_lists_all(command: Command, store: Path) -> None:
    assert len(command("ls", "--store", str(store), "--json").json["sessions"]) == 3


def test_show_says_what_a_session_is_and_what_was_said(command: Command, store: Path) -> None:
    out = command("show", "ada", "--store", str(store)).out
    for expected in (
        "ada, session default  Sums",
        "1 turn, 4 messages",
        "held by   no one",
        "session.json (",
        "owner     lovelace",
        "memory    favorite",
        "state     mood",
        'call      add({"a":2,"b":3})',
        "tool      add: 5",
        "assistant It is 5.",
    ):
        assert expected in out


def test_show_has_one_message_with_its_media_in_memory_at_a_time(
    command: Command, store: Path
) -> None:
    async def write() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("seen") as session:
                for _ in range(20):
                    session.append(Message.user([part(png(2_000_000))]))
                    await session.save()

    anyio.run(write)
    command("show", "ada", "--store", str(store))  # what is loaded at the first use
    tracemalloc.start()
    try:
        assert command("show", "seen", "--store", str(store)).status == 0
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def test_show_as_json_has_the_context_in_the_shape_of_a_request(
    command: Command, store: Path
) -> None:
    shown = command("show", "ada", "--store", str(store), "--json").json
    assert (shown["turns"], shown["memory"], shown["state"]) == (1, ["favorite"], ["mood"])
    assert [message["role"] for message in shown["context"]] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_show_log_lists_every_record_and_limit_the_newest(command: Command, store: Path) -> None:
    shown = command("show", "ada", "--log", "--store", str(store), "--json").json
    log = shown["log"]
    assert [record["seq"] for record in log] == list(range(1, shown["records"] + 1))
    assert log[0]["kind"] == "epoch"
    assert {"tool_call", "tool_result", "memory_set", "state", "meta", "turn"} <= {
        record["kind"] for record in log
    }
    (newest,) = command(
        "show", "ada", "--log", "--limit", "1", "--store", str(store), "--json"
    ).json["log"]
    assert newest == log[-1]
    lines = command("show", "ada", "--log", "--store", str(store)).out.splitlines()
    assert any('"content":"It is 5."' in line for line in lines)


def test_show_takes_a_session_and_a_tenant(command: Command, store: Path) -> None:
    assert (
        "Hello from second"
        in command("show", "bob", "--session", "second", "--store", str(store)).out
    )
    assert command("show", "eve", "--store", str(store)).status == 1
    assert command("show", "eve", "--tenant", "acme", "--store", str(store)).status == 0


def test_show_says_who_holds_a_session_and_is_not_in_its_way(command: Command, store: Path) -> None:
    async def held() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as ada:
                shown = await anyio.to_thread.run_sync(
                    lambda: command("show", "ada", "--store", str(store))
                )
                assert "held by   process" in shown.out
                ada.append(Message.user("Still mine"))
                await ada.save()

    anyio.run(held)


def test_what_somebody_stored_cannot_steer_the_terminal(command: Command, store: Path) -> None:
    async def write() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("mallory") as session:
                session.append(Message.user("a\x1b[2Jb [bold]c[/bold] \u202e"))
                session.describe(title="\x1b]0;owned\x07")

    anyio.run(write)
    for tokens in (["ls"], ["show", "mallory"], ["show", "mallory", "--log"]):
        out = command(*tokens, "--store", str(store)).out
        assert "\x1b" not in out
        assert "\u202e" not in out
    assert r"a\x1b[2Jb [bold]c[/bold]" in command("show", "mallory", "--store", str(store)).out


def test_json_escapes_what_would_steer_a_terminal(command: Command, store: Path) -> None:
    hostile = "a\x9b2J \u202egnp.exe \u2066 \u200f \u061c \x85 \x7f é"

    async def write() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("mallory \u202e") as session:
                session.append(Message.user(hostile))
                session.describe(title=hostile)

    anyio.run(write)
    at = ("--store", str(store), "--json")
    for tokens in (["ls"], ["show", "mallory \u202e"], ["show", "mallory \u202e", "--log"]):
        out = command(*tokens, *at).out
        assert not [one for one in out if ord(one) > 0x7E and one != "é"]
        assert r"\u202e" in out
    assert command("show", "mallory \u202e", *at).json["title"] == hostile
    exported = command("export", "mallory \u202e", *at).out
    assert "\u202e" not in exported
    assert "\x9b" not in exported


def test_show_tells_how_a_session_would_come_back(command: Command, store: Path) -> None:
    """S0-Q3, C8."""
    (store / "agents" / "ada" / "memory.json").write_text("damaged")
    out = command("show", "ada", "--restore-plan", "--store", str(store)).out
    assert "rebuild   memory.json: it is lost, or not what its manifest says" in out
    assert "use       session.json" in out
    told = ("show", "ada", "--restore-plan", "--target", "anthropic", "--store", str(store))
    plan = command(*told, "--json").json
    assert (plan["agent"], plan["target"], plan["is_sound"]) == ("ada", "anthropic", False)
    assert {one["name"]: one["fate"] for one in plan["documents"]}["memory.json"] == "rebuild"
    assert (store / "agents" / "ada" / "memory.json").read_text() == "damaged"
    ran = command("show", "nobody", "--restore-plan", "--store", str(store))
    assert "there is no session nobody" in ran.err
    ran = command("show", "ada", "--restore-plan", "--target", "llama", "--store", str(store))
    assert ran.status == 2
    assert "target 'llama' is unknown: choose None or openai" in ran.err


def test_show_marks_a_turn_that_failed_or_was_interrupted(command: Command, store: Path) -> None:
    async def write() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("cut") as session:
                async with session.turn():
                    session.append(Message.user("one"), Message.assistant("!"))
                with contextlib.suppress(KeyError):
                    async with session.turn("order-7"):
                        session.append(Message.user("two"))
                        raise KeyError

    anyio.run(write)
    out = command("show", "cut", "--store", str(store)).out
    assert "status    failed: turn 2 ended with KeyError" in out
    lines = [line.split(maxsplit=1)[1] for line in out.partition("\n\n")[2].splitlines()]
    assert [line.partition(", 0.")[0].partition(": 0.")[0] for line in lines] == [
        "turn 1",
        "user      one",
        "assistant !",
        "turn 2: order-7, failed, KeyError",
        "user      two",
    ]
    shown = command("show", "cut", "--store", str(store), "--json").json
    assert (shown["status"], shown["status_detail"]) == ("failed", "turn 2 ended with KeyError")
    assert "status    idle" in command("show", "ada", "--store", str(store)).out
    newest = command("show", "cut", "--limit", "1", "--store", str(store)).out
    assert "turn 2: order-7, failed" in newest


def test_show_says_what_a_thread_of_langgraph_holds(command: Command, store: Path) -> None:
    pytest.importorskip("langgraph")
    from langchain_core.messages import AIMessage
    from langgraph.graph import START, MessagesState, StateGraph

    from perdure.adapters import PerdureSaver

    async def answer(_: MessagesState) -> dict[str, list[AIMessage]]:
        return {"messages": [AIMessage("At noon.", usage_metadata=USAGE)]}

    async def write() -> None:
        builder = StateGraph(MessagesState)
        builder.add_node(answer)
        builder.add_edge(START, "answer")
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            graph: Any = builder.compile(checkpointer=PerdureSaver(sessions))
            for asked in ("When?", "And tomorrow?"):
                thread = {"configurable": {"thread_id": "tides"}}
                await graph.ainvoke({"messages": [("user", asked)]}, thread)

    anyio.run(write)
    out = command("show", "tides", "--store", str(store)).out
    assert "holds     2 turns, 4 messages, " in out
    assert ", 6 checkpoints of LangGraph's" in out
    assert "status    idle" in out
    lines = [line.split(maxsplit=1)[1] for line in out.partition("\n\n")[2].splitlines()]
    assert [line for line in lines if not line.startswith("turn")] == [
        "user      When?",
        "assistant At noon.",
        "user      And tomorrow?",
        "assistant At noon.",
    ]
    assert [line.rpartition("s, ")[2] for line in lines if line.startswith("turn")] == [
        "5 tokens in, 3 out"
    ] * 2
    shown = command("show", "tides", "--store", str(store), "--json").json
    assert (shown["turns"], shown["messages"], shown["checkpoints"]) == (2, 4, 6)
    assert "tides" in command("show", "tides", "--log", "--store", str(store)).out


USAGE: Any = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}


KILLED = """
import asyncio, os, sys
import perdure

async def main():
    async with perdure.connect(sys.argv[1]) as sessions, sessions.open("kim") as session:
        async with session.turn():
            session.append(perdure.Message.user("x"))
            await session.save()
            os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_show_has_the_newest_entries_of_a_transcript(command: Command, store: Path) -> None:
    pytest.importorskip("claude_agent_sdk")
    from perdure.adapters import PerdureSessionStore

    said = [("user", "When?"), ("assistant", "At noon.")]

    async def write() -> None:
        async with PerdureSessionStore.from_url(store) as kept:
            entries = [
                {"type": role, "uuid": role, "message": {"role": role, "content": text}}
                for role, text in said
            ]
            await kept.append({"project_key": "-harbor", "session_id": "tides"}, entries)

    anyio.run(write)
    given = ("show", "claude/-harbor/tides", "--store", str(store))
    facts, _, lines = command(*given).out.partition("\n\n")
    assert " records of a transcript\n" in facts
    assert [tuple(line.split(maxsplit=2)[1:]) for line in lines.splitlines()] == said
    assert "messages" in command(*given, "--limit", "0").out


def test_show_has_the_times_of_a_session_that_was_killed_in_its_first_run(
    command: Command, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "agents")], check=False)
    ran = command("show", "kim", "--store", str(tmp_path / "agents"))
    assert re.search(r"^  active    20\S+Z \(since 20\S+Z\)$", ran.out, re.MULTILINE), ran.out
    assert "restored from the log alone, at record 3" in ran.out


def test_show_says_that_a_session_was_rolled_back(command: Command, tmp_path: Path) -> None:
    where = str(tmp_path / "agents")
    with perdure.sync.connect(where) as sessions, sessions.open("ada") as session:
        with session.turn():
            session.append(Message.user("a"), Message.assistant("b"))
        before = session.checkpoints.create("before")
        with session.turn():
            session.append(Message.user("c"), Message.assistant("d"))
        session.checkpoints.rollback(before.id)
    out = command("show", "ada", "--store", where).out
    assert "2 turns, 4 messages" in out
    assert "; 2 messages in the context" in out
    assert "rollback  to checkpoint 1 (before), at record" in out
    assert command("checkpoints", "ada", "--store", where).out.startswith("id  clock  record")
