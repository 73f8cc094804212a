"""`PerdureSession` against the SDK's own SQLiteSession, its Runner, and a second process."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    output_guardrail,
)
from agents.memory import OpenAIResponsesCompactionSession, Session, SessionSettings
from agents.testing import ScriptedModel, assistant_message, function_call
from hypothesis import given, settings, strategies as st

import perdure
from perdure import (
    LeaseHeldError,
    LeaseLostError,
    Limits,
    Message,
    NotStorableError,
    SessionManager,
    WrongLoopError,
)
from perdure.adapters import PerdureSession
from perdure.memory.context import WorkingContext
from perdure.records.keys import SessionKey
from perdure.records.messages import encode_message
from perdure.records.records import Entry
from perdure.session.internals import accept
from perdure.session.retention import Retention
from perdure.store import take_after
from perdure.testing import MemoryBacking, MemoryStore
from tests.adapters import kills
from tests.images import png, url

QUIET = RunConfig(tracing_disabled=True)
GUARD = 60


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDK runs on asyncio alone."""
    return "asyncio"


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(call_id: str, name: str = "tide") -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": name,
        "arguments": '{"harbor": "Oosthaven"}',
        "status": "completed",
    }


def output(call_id: str, text: Any = "low") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(text: str) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }


def reasoning(name: str = "rs_1") -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": "The harbor matters."}]
    return {"type": "reasoning", "id": name, "summary": summary, "encrypted_content": "gAAA"}


PARALLEL = [
    user("When is low tide?"),
    reasoning(),
    call("a"),
    call("b"),
    output("a"),
    output("b", [{"type": "input_text", "text": "at noon"}]),
    said("At noon."),
]

ODD: list[Any] = [
    {},
    {"role": "user"},
    {"role": "assistant", "content": []},
    {"role": "developer", "content": "Be brief.", "extra": None},
    {"type": "function_call", "call_id": 7, "name": None, "arguments": {"not": "text"}},
    {"type": "function_call", "call_id": "x y", "name": "a.b", "arguments": "[1,  2]"},
    {"type": "function_call_output", "call_id": "q", "output": None, "id": None},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "tide"}},
    {"type": "mcp_approval_request", "id": "m1", "name": "n", "arguments": "{}"},
    {"type": "compaction", "encrypted_content": "zzz"},
    {"role": "user", "content": "half a pair: \ud800", "n": 1e400, "big": 2**70, "one": 1.0},
    {"role": "user", "content": "a\nb\r\u2028c\x00", "perdure_foreign": "not ours"},
    {"role": "user", "content": "x", "created_at": "mine", "tool_payload": {"a": 1}},
    {"role": []},
    "a text",
    ["a", "list"],
    None,
]


def texts(items: Sequence[Any]) -> list[str]:
    """Items to the letter, but for the order of their fields."""
    return [json.dumps(item, sort_keys=True) for item in items]


def test_it_is_a_session_for_the_sdk_and_takes_the_run_s_context() -> None:
    session = PerdureSession.in_memory()
    assert isinstance(session, Session)
    for name in ("get_items", "add_items", "pop_item", "clear_session"):
        wrapper = inspect.signature(getattr(session, name)).parameters["wrapper"]
        assert (wrapper.kind, wrapper.default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert session.session_settings == SessionSettings()
    limited = PerdureSession.in_memory(session_settings={"limit": 3})
    assert limited.session_settings == SessionSettings(limit=3)


@pytest.mark.parametrize("item", [*PARALLEL, *ODD], ids=lambda item: str(item)[:30])
async def test_an_item_comes_back_to_the_letter(item: Any, sessions: SessionManager) -> None:
    session, twin = PerdureSession("a", sessions), SQLiteSession("a")
    for each in (session, twin):
        await each.add_items([user("first"), item])
    await session.aclose()
    assert texts(await session.get_items()) == texts(await twin.get_items())
    assert texts([await session.pop_item()]) == texts([await twin.pop_item()])
    assert await session.get_items() == [user("first")]


async def test_items_with_images_come_back_to_the_letter(tmp_path: Path) -> None:
    image = {"type": "input_image", "image_url": url(png(100_000)), "detail": "auto"}
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}, image]},
        {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
        {
            "type": "computer_call_output",
            "call_id": "d",
            "output": {"type": "computer_screenshot", "image_url": url(png(100_000, 1))},
        },
    ]
    for _ in range(2):
        async with perdure.connect(tmp_path) as sessions:
            session = PerdureSession("a", sessions)
            if not await session.get_items():
                await session.add_items(items)
            assert await session.get_items() == items
            assert await session.get_items(1) == items[-1:]


async def test_what_is_no_json_is_refused_and_nothing_of_its_call_is_added() -> None:
    session = PerdureSession.in_memory()
    with pytest.raises(NotStorableError, match=r"items\[1\]\.content is not JSON .*bytes"):
        await session.add_items([user("one"), {"role": "user", "content": b"two"}])
    assert await session.get_items() == []
    await session.aclose()


@pytest.mark.parametrize("given", ["hello", user("hello")])
async def test_one_item_without_its_list_is_refused(given: Any) -> None:
    session = PerdureSession.in_memory()
    with pytest.raises(perdure.InvalidArgumentError, match=r"give a list of items"):
        await session.add_items(given)


def test_settings_of_the_sdk_s_are_checked_by_the_sdk() -> None:
    with pytest.raises(Exception, match="limits"):
        PerdureSession.in_memory(session_settings={"limits": 3})


# Against the SDK's own session


def inside_a_group(items: Sequence[Any], at: int) -> bool:
    """Whether a call is before a place, and its output is not; or reasoning is right before it."""
    if at and isinstance(items[at - 1], dict) and items[at - 1].get("type") == "reasoning":
        return True
    calls: dict[str, int] = {}
    for place, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            calls[item["call_id"]] = place
        elif kind == "function_call_output" and place >= at > calls.get(item["call_id"], at):
            return True
    return False


def limited(items: Sequence[Any], limit: int | None) -> list[Any]:
    """The newest whole groups within a limit; the newest one even if it is larger."""
    if limit is None or limit < 0 or not items or limit >= len(items):
        return list(items)
    if limit == 0:
        return []
    places = [at for at in range(len(items)) if not inside_a_group(items, at)]
    fits = [at for at in places if at >= len(items) - limit]
    return list(items[fits[0] if fits else places[-1] :])


IDS = st.sampled_from("abc")
ITEMS = st.one_of(
    st.text(max_size=200).map(user),
    IDS.map(call),
    st.builds(output, IDS, st.text(max_size=5)),
    st.text(max_size=5).map(said),
    IDS.map(reasoning),
    st.sampled_from([item for item in ODD if not str(item).startswith("{'type': 'function")]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(ITEMS, max_size=4)),
        st.tuples(st.just("get"), st.none() | st.integers(-1, 6)),
        st.tuples(st.sampled_from(["pop", "pop", "clear", "reopen", "other"]), st.none()),
    ),
    max_size=25,
)


EXAMPLES: dict[str, Any] = {
    "steps": STEPS,
    "context_bytes": st.sampled_from([1500, 512 * 1024]),
    "durable": st.booleans(),
}


@given(**EXAMPLES)
def test_it_does_what_the_sdk_s_session_does(
    steps: list[tuple[str, Any]], context_bytes: int, *, durable: bool
) -> None:
    """With a small context, what is older is read from the log."""
    twin = SQLiteSession("a")
    asyncio.run(do_both(steps, context_bytes, twin, durable=durable))
    twin.close()


@settings(max_examples=10)
@given(**EXAMPLES)
def test_it_does_what_the_sdk_s_session_on_sqlalchemy_does(
    steps: list[tuple[str, Any]], context_bytes: int, *, durable: bool
) -> None:
    for module in ("sqlalchemy", "aiosqlite"):
        pytest.importorskip(module)
    from agents.extensions.memory import SQLAlchemySession

    async def main() -> None:
        twin = SQLAlchemySession.from_url("a", url="sqlite+aiosqlite://", create_tables=True)
        await do_both(steps, context_bytes, twin, durable=durable)
        await twin.engine.dispose()

    asyncio.run(main())


async def do_both(
    steps: list[tuple[str, Any]], context_bytes: int, twin: Session, *, durable: bool
) -> None:
    """Do the same with a session of the SDK's, and compare all that is returned."""
    backing = MemoryBacking()

    def connected() -> SessionManager:
        store, limits = MemoryStore(backing=backing), Limits(context_bytes=context_bytes)
        return perdure.connect(store, limits=limits, autosave=None)

    sessions = await connected()
    session = PerdureSession("a", sessions, durable=durable)
    for what, value in [*steps, ("get", None), ("reopen", None), ("get", None)]:
        if what == "add":
            await session.add_items(value)
            await twin.add_items(value)
        elif what == "get":
            items = await session.get_items(value)
            assert texts(items) == texts(limited(await twin.get_items(), value))
        elif what == "pop":
            assert texts([await session.pop_item()]) == texts([await twin.pop_item()])
        elif what == "clear":
            await session.clear_session()
            await twin.clear_session()
        else:
            if what == "reopen":
                await sessions.aclose()
                sessions = await connected()
            session = PerdureSession("a", sessions, durable=durable)
    await sessions.aclose()


@pytest.mark.parametrize("context_bytes", [600, 512 * 1024])
async def test_each_item_is_popped_by_one_of_many(tmp_path: Path, context_bytes: int) -> None:
    async with perdure.connect(tmp_path, limits=Limits(context_bytes=context_bytes)) as sessions:
        session, other = (PerdureSession("a", sessions) for _ in range(2))
        items = [user(f"item {number}") for number in range(60)]
        await session.add_items(items)
        popped = await asyncio.gather(
            *((session, other)[number % 2].pop_item() for number in range(70))
        )
        assert sorted(texts(filter(None, popped))) == sorted(texts(items))
        assert popped.count(None) == 10
        assert await session.get_items() == []


async def test_popping_item_by_item_writes_no_more_than_a_record_each(
    sessions: SessionManager, tmp_path: Path
) -> None:
    session = PerdureSession("a", sessions)
    await session.add_items([user("x" * 1000) for _ in range(200)])
    log = next(tmp_path.rglob("*.jsonl"))
    before = log.read_bytes()
    await asyncio.gather(*(session.pop_item() for _ in range(200)))
    assert await session.get_items() == []
    after = log.read_bytes()
    assert after.startswith(before)  # nothing was rewritten
    assert after.count(b'"k":"retract"') == 200
    assert len(after) - len(before) < 200 * 100


@pytest.mark.parametrize("durable", [True, False])
def test_each_run_of_a_loop_opens_the_store_again(tmp_path: Path, durable: bool) -> None:
    session = PerdureSession.from_url("a", f"sqlite:///{tmp_path}/a.db", durable=durable)
    for number in range(3):
        asyncio.run(session.add_items([user(f"{number}")]))
    assert asyncio.run(session.get_items()) == [user("0"), user("1"), user("2")]
    assert asyncio.run(session.pop_item()) == user("2")
    asyncio.run(session.aclose())


@pytest.mark.parametrize(
    "item",
    [{"role": []}, {"role": {}}, {"type": []}, {"role": "tool", "tool_call_id": []}, [], None, 7],
)
async def test_an_item_of_no_form_of_the_sdk_s_comes_back_alone_and_among_others(
    sessions: SessionManager, item: Any
) -> None:
    session = PerdureSession("a", sessions)
    await session.add_items([user("before")])
    await session.add_items([item, user("after")])
    assert await session.get_items() == [user("before"), item, user("after")]
    assert await session.get_items(2) == [item, user("after")]
    view = await sessions.load("a")
    assert view is not None
    assert view.context("anthropic").messages
    assert await session.pop_item() == user("after")
    assert await session.pop_item() == item


@pytest.mark.parametrize("bad", ["", "a\nb", "perdure:scope", "x" * 2000, 7])
def test_an_id_that_cannot_be_used_is_named_by_the_sdk_s_word(bad: Any) -> None:
    with pytest.raises(perdure.InvalidArgumentError, match="session_id") as refused:
        PerdureSession(bad, None)
    assert "agent" not in str(refused.value)


async def test_a_read_takes_no_lease_and_creates_nothing(
    sessions: SessionManager, tmp_path: Path
) -> None:
    session = PerdureSession("a", sessions)
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.clear_session()
    await session.drop_run_state()
    assert await sessions.list() == []
    async with perdure.connect(tmp_path / "store") as others:
        async with PerdureSession("a", others) as theirs:
            await theirs.add_items([user("hello")])
            assert await session.get_items() == [user("hello")]
            assert await session.get_items(limit=1) == [user("hello")]


async def test_owner_title_and_tags_are_listed_with_the_session(sessions: SessionManager) -> None:
    async with PerdureSession(
        "a", sessions, owner="ada", title="Tides", tags=["harbor"]
    ) as session:
        await session.add_items([user("hello")])
    async with PerdureSession("a", sessions, title="Another") as session:
        await session.add_items([user("again")])
    (info,) = await sessions.list(owner="ada", tag="harbor")
    assert (info.key.agent, info.title) == ("a", "Tides")
    view = await sessions.load("a")
    assert view is not None
    assert [message.text for message in view.context()] == ["hello", "again"]


async def test_a_session_is_kept_while_a_caller_has_entered_it(
    sessions: SessionManager, tmp_path: Path
) -> None:
    async with perdure.connect(tmp_path / "store") as others:
        theirs = PerdureSession("a", others, on_held="raise")
        async with PerdureSession("a", sessions) as first:
            await first.acquire()
            async with PerdureSession("a", sessions) as second:
                await second.add_items([user("one")])
            with pytest.raises(LeaseHeldError):
                await theirs.add_items([user("two")])
        await theirs.add_items([user("two")])
    assert await first.get_items() == [user("one"), user("two")]


@pytest.mark.deep
async def test_an_idle_session_is_given_back_and_taken_again(tmp_path: Path) -> None:
    idle = perdure.EngineOptions(hibernate_after=0.05)
    async with (
        perdure.connect(tmp_path, engine=idle) as sessions,
        perdure.connect(tmp_path) as others,
    ):
        first = PerdureSession("a", sessions)
        await first.add_items([user("one")])
        async with PerdureSession("a", others, wait=GUARD) as second:
            await second.add_items([user("two")])
        await first.add_items([user("three")])
        assert await first.get_items() == [user("one"), user("two"), user("three")]


async def test_a_process_that_asks_is_given_the_session(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path) as sessions, perdure.connect(tmp_path) as others:
        first = PerdureSession("a", sessions, on_held="handover", wait=GUARD)
        second = PerdureSession("a", others, on_held="handover", wait=GUARD)
        for number in range(6):
            await (first, second)[number % 2].add_items([user(str(number))])
        assert await first.get_items() == [user(str(number)) for number in range(6)]


async def test_a_run_that_was_overtaken_is_refused_until_it_reads_again() -> None:
    backing = MemoryBacking()
    one, other = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(one) as mine:
        session, key = PerdureSession("a", mine), SessionKey("a")
        await session.add_items([user("one")])
        await other.open()
        holder = await other.holder(key)
        assert holder is not None
        taken = await take_after(other, key, after=holder.epoch)
        for text in ("two", "three"):  # while the takeover is not known here, and when it is
            with pytest.raises(LeaseLostError, match=f"taken over by .*{other.owner}"):
                await session.add_items([user(text)])
        (lost,) = mine.lost  # a manager of the program's own may have had other records
        await lost.discard_unsaved()
        await other.release(key, taken.epoch)
        with pytest.raises(LeaseLostError, match=f"taken over by .*{other.owner}"):
            await session.add_items([user("four")])
        assert await session.get_items() == [user("one")]
        await session.add_items([user("five")])
        assert await session.get_items() == [user("one"), user("five")]


STALE: dict[str, Any] = {
    "add": lambda session, items: session.add_items([user("late")]),
    "pop": lambda session, items: session.pop_item(),
    "clear": lambda session, items: session.clear_session(),
    "replace": lambda session, items: session.replace_items([user("late")]),
    "replace expected": lambda session, items: session.replace_items(
        [user("late")], expected=items
    ),
    "keep a run": lambda session, items: session.save_run_state(SimpleNamespace(to_json=dict)),
    "acquire": lambda session, items: session.acquire(),
}


@pytest.mark.parametrize("on_held", ["steal", "handover"])
@pytest.mark.parametrize("was_written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("call", STALE)
async def test_no_call_changes_a_session_that_has_the_id_of_a_forgotten_one(
    call: str, was_written: bool, on_held: Any
) -> None:
    backing = MemoryBacking()
    items = [user("1"), user("2"), user("3")]
    async with perdure.connect(MemoryStore(backing=backing)) as others:
        theirs = PerdureSession("a", others, on_held="handover")
        if not was_written:
            await theirs.add_items(items)
            await theirs.aclose()
        async with perdure.connect(MemoryStore(backing=backing)) as mine:
            session = PerdureSession("a", mine, on_held=on_held)
            if was_written:
                await session.add_items(items)
            assert await session.get_items() == items
            await others.forget("a")
            for _ in range(2):  # equal to what was forgotten, and longer
                await PerdureSession("a", others).add_items(items)
            await theirs.aclose()
            for _ in range(2):
                with pytest.raises(LeaseLostError, match="was deleted"):
                    await STALE[call](session, items)
            async with others.open("a", on_held="raise"):  # it is left to its own users
                pass
            fresh = PerdureSession("a", others)
            assert await fresh.get_items() == [*items, *items]
            assert await fresh.load_run_state(None) is None
            await theirs.aclose()
            assert await session.get_items() == [*items, *items]
            await session.add_items([user("read again")])
            assert await session.get_items() == [*items, *items, user("read again")]


async def test_a_session_that_began_with_another_one_s_history_is_not_the_forgotten_one() -> None:
    backing = MemoryBacking()
    async with (
        perdure.connect(MemoryStore(backing=backing)) as mine,
        perdure.connect(MemoryStore(backing=backing)) as others,
    ):
        template = PerdureSession("template", others)
        for number in range(5):  # its numbers and epochs are those of what was forgotten
            await template.add_items([user(f"template {number}")])
        async with PerdureSession("a", mine) as session:
            await session.add_items([user("secret")])
        await others.forget("a")
        await others.copy("template", "a")
        with pytest.raises(LeaseLostError, match="was deleted"):
            await session.add_items([user("late")])
        assert await PerdureSession("a", others).get_items() == await template.get_items()


@pytest.mark.parametrize("on_held", ["steal", "handover"])
@pytest.mark.parametrize("length", [0, 1, 8])
async def test_a_run_whose_session_is_forgotten_during_a_tool_ends_without_a_trace(
    length: int, on_held: Any
) -> None:
    backing = MemoryBacking()
    following = [user(f"of somebody else {number}") for number in range(length)]
    async with (
        perdure.connect(MemoryStore(backing=backing)) as mine,
        perdure.connect(MemoryStore(backing=backing)) as others,
    ):

        @function_tool
        async def slow() -> str:
            await others.forget("a")
            async with PerdureSession("a", others) as theirs:
                for item in following:
                    await theirs.add_items([item])
            return "a secret"

        async with PerdureSession("a", mine, on_held=on_held) as session:
            await session.add_items([user("a secret")])
            model = ScriptedModel(
                [[function_call("slow", {}, call_id="1")], [assistant_message("a secret")]]
            )
            with pytest.raises(LeaseLostError, match="was deleted"):
                await Runner.run(
                    Agent(name="a", model=model, tools=[slow]),
                    "What is it?",
                    session=session,
                    run_config=QUIET,
                )
        assert await PerdureSession("a", others).get_items() == following


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "by another process"])
@pytest.mark.parametrize("is_automatic", [False, True], ids=["asked for", "after a run"])
async def test_the_sdk_s_compaction_stores_no_summary_of_what_was_forgotten_meanwhile(
    is_automatic: bool, elsewhere: bool, is_followed: bool
) -> None:
    backing = MemoryBacking()
    following = [user(f"of somebody else {number}") for number in range(8)]
    async with (
        perdure.connect(MemoryStore(backing=backing)) as mine,
        perdure.connect(MemoryStore(backing=backing)) as others,
    ):
        manager = others if elsewhere else mine
        session = PerdureSession("a", mine)
        await session.add_items([user(f"secret {number}") for number in range(4)])

        async def forget() -> None:
            await manager.forget("a")
            if is_followed:
                async with PerdureSession("a", manager) as theirs:
                    await theirs.add_items(following)

        compacting = Compacting(session, forget)
        with pytest.raises(LeaseLostError, match="was deleted"):
            await (compacting.run("one") if is_automatic else compacting.ask())
        assert len(compacting.inputs) == 1
        left = await PerdureSession("a", others).get_items()
        assert left == (following if is_followed else [])
        # What is there now may be read, and compacted.
        assert await session.get_items() == left
        await session.add_items([user("next")])
        await Compacting(session).ask()
        assert await session.get_items() == [SUMMARY]


async def test_a_summary_replaces_no_equal_items_of_a_later_session(
    sessions: SessionManager,
) -> None:
    secrets = [user("a secret")] * 4
    session = PerdureSession("a", sessions)
    await session.add_items(secrets)

    async def repeat() -> None:
        stale = await session.get_items()
        await sessions.forget("a")
        theirs = PerdureSession("a", sessions)
        for items in (secrets, stale[4:5], stale[5:]):
            await theirs.add_items(items)
        assert await session.get_items() == stale  # it is shown to somebody, too

    with pytest.raises(LeaseLostError, match="was deleted"):
        await Compacting(session, repeat).run("one")
    assert (await session.get_items())[:4] == secrets


async def test_a_session_that_others_fold_take_over_and_prune_is_still_the_same(
    tmp_path: Path,
) -> None:
    items: list[Any] = []
    session: PerdureSession | None = None
    async with perdure.connect(tmp_path) as reads:
        for number in range(8):
            async with perdure.connect(tmp_path) as others:
                own = PerdureSession("a", others, on_held="handover", wait=GUARD)
                await own.add_items([user(f"{number}")])
                if number == 5:
                    await others.prune(Retention(keep_turns=2))
            items = [*items, user(f"{number}")]  # closing has folded it
            session = session or PerdureSession("a", reads, on_held="handover", wait=GUARD)
            assert await session.get_items() == items
            if number % 2:
                await session.add_items([user(f"{number} too")])
                items = [*items, user(f"{number} too")]
        assert await PerdureSession("a", reads).get_items() == items


async def test_what_was_accepted_and_not_saved_stays_in_the_report_of_an_overtaken_session() -> (
    None
):
    backing = MemoryBacking()
    one, other = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(one, autosave=None) as mine:
        session, key = PerdureSession("a", mine, durable=False), SessionKey("a")
        await session.add_items([user("one")])
        await other.open()
        holder = await other.holder(key)
        assert holder is not None
        await take_after(other, key, after=holder.epoch)
        await mine.flush()
        with pytest.raises(LeaseLostError, match="taken over by"):
            await session.add_items([user("two")])
        (lost,) = mine.lost  # no caller was told that "one" is not stored
        assert await lost.discard_unsaved()


async def test_a_session_is_a_tenant_s_own(sessions: SessionManager) -> None:
    for tenant in ("north", "south"):
        await PerdureSession("a", sessions, tenant=tenant).add_items([user(tenant)])
    assert await PerdureSession("a", sessions, tenant="north").get_items() == [user("north")]
    assert await PerdureSession("a", sessions).get_items() == []


async def test_closing_does_no_harm_at_any_time(tmp_path: Path) -> None:
    unused = PerdureSession.from_url("a", tmp_path / "none")
    await unused.aclose()
    assert not (tmp_path / "none").exists()
    own = PerdureSession.from_url("a", tmp_path)
    await asyncio.gather(
        own.add_items([user("one")]), own.get_items(), own.add_items([user("two")])
    )
    await own.aclose()
    await own.aclose()
    with pytest.raises(perdure.SessionClosedError, match="make another one"):
        await own.get_items()
    async with own:  # which opens it again
        assert len(await own.get_items()) == 2
    await own.close()
    async with perdure.connect(tmp_path) as sessions:
        session = PerdureSession("a", sessions)
        await session.add_items([user("three")])
    await session.aclose()
    with pytest.raises(perdure.SessionClosedError, match="call connect"):
        await session.get_items()


@pytest.mark.parametrize("given", ["postgresql://ada:secret@host/db", object()])
def test_what_is_no_manager_is_refused_with_what_to_write(given: Any) -> None:
    with pytest.raises(perdure.InvalidArgumentError, match="PerdureSession.from_url") as refused:
        PerdureSession("a", given)
    assert "secret" not in str(refused.value)


async def test_in_memory_needs_no_manager() -> None:
    async with PerdureSession.in_memory() as session:
        await session.add_items([user("hello")])
        assert await session.get_items() == [user("hello")]


async def test_autosave_saves_what_is_not_durable_at_once(sessions: SessionManager) -> None:
    async with PerdureSession("a", sessions, durable=False) as session:
        await session.add_items([user("hello")])
        assert await sessions.load("a") is None or not (await sessions.load("a")).context()  # type: ignore[union-attr]
        assert await PerdureSession("a", sessions).get_items() == [user("hello")]
    view = await sessions.load("a")
    assert view is not None
    assert [message.text for message in view.context()] == ["hello"]


async def test_a_torn_write_leaves_all_of_a_change_or_nothing(
    sessions: SessionManager, tmp_path: Path
) -> None:
    """The log is cut at each byte that a call has written, as a crash might cut it."""
    session = PerdureSession("a", sessions)
    log = tmp_path / "store" / "agents" / "a" / "log" / "1-0.jsonl"
    new = [user("again"), call("z")]
    for change, name in (
        (lambda: session.add_items(PARALLEL), "add"),
        (session.pop_item, "pop"),
        (lambda: session.replace_items(new), "replace"),
        (session.clear_session, "clear"),
    ):
        before = await session.get_items()
        start = log.stat().st_size if log.exists() else 0
        await change()
        after = await session.get_items()
        assert before != after
        whole = log.read_bytes()
        shown = []
        for end in {start, *range(start + 1, len(whole), 97), len(whole) - 1, len(whole)}:
            copy = tmp_path / f"{name}-{end}"
            shutil.copytree(tmp_path / "store", copy)
            (copy / log.relative_to(tmp_path / "store")).write_bytes(whole[:end])
            async with PerdureSession.from_url("a", copy) as torn:
                shown.append((end, await torn.get_items()))
            shutil.rmtree(copy)
        assert [end for end, items in shown if items not in (before, after)] == []
        assert dict(shown)[start] == before
        assert dict(shown)[len(whole)] == after


# What perdure makes of the items


@pytest.mark.parametrize("url", ["sqlite:///{}/a.db", "{}/folder"])
async def test_a_session_is_exported_imported_forked_and_moved_like_any_other(
    url: str, tmp_path: Path, sessions: SessionManager
) -> None:
    items = [*PARALLEL, *ODD]
    async with perdure.connect(url.format(tmp_path)) as there:
        async with PerdureSession("a", there) as session:
            await session.add_items([user("popped"), *items])
            await session.replace_items(items)
        await there.fork("a", "b")
        await there.copy("a", "c")
        for name in ("a", "b", "c"):
            held = await PerdureSession(name, there).get_items()
            assert texts(held) == texts(items)
        state = await perdure.export_state(there, "a")
    await perdure.import_state(sessions, state, id="d")
    assert texts(await PerdureSession("d", sessions).get_items()) == texts(items)


def test_the_command_line_shows_and_checks_the_items(tmp_path: Path) -> None:
    async def main() -> None:
        async with PerdureSession.from_url("a", tmp_path) as session:
            await session.add_items([*PARALLEL, reasoning() | {"summary": []}, ODD[8], {}])

    asyncio.run(main())

    def shell(*arguments: str) -> str:
        command = [sys.executable, "-m", "perdure", *arguments, "--store", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    said = [line.split(maxsplit=2)[1:] for line in shell("show", "a").splitlines()[-10:]]
    assert said == [
        ["user", "When is low tide?"],
        ["reasoning", "The harbor matters."],
        ["call", 'tide({"harbor":"Oosthaven"})'],
        ["call", 'tide({"harbor":"Oosthaven"})'],
        ["tool", "a: low"],
        ["tool", 'b: [{"type":"input_text","text":"at noon"}]'],
        ["assistant", "At noon."],
        ["assistant", "(reasoning)"],
        ["assistant", "(web_search_call)"],
        ["assistant", "(empty)"],
    ]
    assert "no problems" in shell("check")


async def test_each_run_is_a_turn_of_the_session(sessions: SessionManager) -> None:
    session = PerdureSession("a", sessions)
    for text in ("When?", "And now?"):
        model = script(asks("A"), [assistant_message("Noon.")])
        await run(Agent(name="harbor", model=model, tools=[tide]), text, session, stream=False)
    async with sessions.open("a") as own, own.turn():
        await session.add_items([user("in a turn of perdure's"), said("yes")])
    view = await sessions.load("a")
    assert view is not None
    assert view.info.turns == 3
    async with sessions.open("a") as own, own.turn() as turn:
        assert turn.number == 4


@pytest.mark.parametrize("context_bytes", [1500, 512 * 1024])
async def test_a_pruned_session_gives_what_the_model_would_see(
    tmp_path: Path, context_bytes: int
) -> None:
    limits = Limits(context_bytes=context_bytes)
    async with perdure.connect(tmp_path, limits=limits) as sessions:
        session = PerdureSession("a", sessions)
        turns = [[user(f"question {at}"), call(f"{at}"), output(f"{at}")] for at in range(10)]
        for turn in turns:
            await session.add_items(turn[:1])
            await session.add_items(turn[1:])
        items = [item for turn in turns for item in turn]
        (pruned,) = (await sessions.prune(Retention(keep_turns=0))).pruned
        assert pruned.turns == 9
        left = await session.get_items()
        assert left == items[-len(left) :]
        assert len(left) == 30 if context_bytes > 1500 else 3 <= len(left) < 30
        assert await PerdureSession("a", sessions).get_items(limit=3) == turns[-1]
        assert await session.pop_item() == output("9")
        assert await session.get_items() == left[:-1]
        await session.clear_session()
        await session.add_items([user("new")])
        assert await session.get_items() == [user("new")]
    async with perdure.connect(tmp_path, limits=limits) as sessions:
        assert await PerdureSession("a", sessions).get_items() == [user("new")]


async def test_a_compacted_session_gives_what_perdure_s_model_would_see(
    sessions: SessionManager,
) -> None:
    session = PerdureSession("a", sessions)
    await session.add_items([user("old"), *PARALLEL])
    async with sessions.open("a") as own:
        compacted = WorkingContext(10_000)
        compacted.feed(1, "message", encode_message(Message.user("So far: tides.")).payload)
        compacted.epoch_id = 1
        accept(own, (Entry("context", compacted.as_record("compaction")),))
    await session.add_items([user("new"), call("n"), output("n")])
    contents = [item.get("content") for item in await session.get_items()]
    assert contents == ["So far: tides.", "new", None, None]
    assert await session.get_items(limit=1) == (await session.get_items())[-2:]
    assert len(await session.get_items(limit=-1)) == 4
    assert await session.pop_item() == output("n")


async def test_a_provider_s_context_is_made_of_the_items(sessions: SessionManager) -> None:
    session = PerdureSession("a", sessions)
    for item in PARALLEL:  # one by one: a reply is put together again
        await session.add_items([item])
    view = await sessions.load("a")
    assert view is not None
    assert view.context("openai-responses") == PARALLEL
    _, asked, answered, last = view.context("anthropic").messages
    assert [part["id"] for part in asked["content"]] == ["a", "b"]
    assert [part["tool_use_id"] for part in answered["content"]] == ["a", "b"]
    assert "At noon." in str(last)


async def test_what_a_message_gives_back_is_stored_once(
    sessions: SessionManager, tmp_path: Path
) -> None:
    long = "word " * 1000
    await PerdureSession("a", sessions).add_items([*PARALLEL, user(long), said(long)])
    (log,) = tmp_path.rglob("*.jsonl")
    text = log.read_text()
    assert text.count('"perdure_foreign":{"sdk":"openai-agents","v":1}') == len(PARALLEL) + 2
    assert text.count(long) == 2
    assert text.count("The harbor matters.") == 2  # the reasoning's text, and its own block


async def test_every_provider_takes_what_odd_items_are_shown_as(sessions: SessionManager) -> None:
    session = PerdureSession("a", sessions)
    await session.add_items([user("hello"), *ODD, said("bye")])
    view = await sessions.load("a")
    assert view is not None
    for format in ("openai", "openai-responses", "anthropic", "gemini"):
        assert "hello" in str(view.context(format))
        assert "perdure_foreign" not in str(view.context(format, reasoning="keep"))


async def test_a_field_of_the_same_name_is_another_program_s(sessions: SessionManager) -> None:
    stored = [b'{"role":"user","content":"hi","perdure_foreign":%b}' % field for field in
              (b'"x"', b'{"sdk":"another","v":9}')]  # fmt: skip
    async with sessions.open("a") as own:
        own.append(*(perdure.EncodedRecord("message", data) for data in stored))
    items = await PerdureSession("a", sessions).get_items()
    assert [item["content"] for item in items] == ["hi", "hi"]


async def test_a_session_of_perdure_s_continues_in_the_sdk(sessions: SessionManager) -> None:
    async with sessions.open("a") as own, own.turn():
        own.append(Message.system("Be brief."), Message.user("Hello"), Message.assistant("Hi"))
    session = PerdureSession("a", sessions)
    await session.add_items([user("Bye")])
    assert [item["content"] for item in await session.get_items()] == [
        "Be brief.",
        "Hello",
        "Hi",
        "Bye",
    ]
    assert (await session.pop_item())["content"] == "Bye"
    assert (await session.pop_item())["content"] == "Hi"
    assert [item["content"] for item in await session.get_items()] == ["Be brief.", "Hello"]


STORED = [
    (
        b'{"role":"user","content":"hi","perdure_issued":{"provider":"openai-responses",'
        b'"format":"openai-responses","sent":true},"perdure_foreign":{"sdk":"openai-agents","v":1}}'
    ),
    (
        b'{"role":"assistant","tool_payload":{"tool_calls":[{"id":"c1","name":"tide","arguments":'
        b'{"harbor":"A"}}]},"perdure_issued":{"provider":"openai-responses","format":'
        b'"openai-responses","items":[{"block":{"type":"function_call","id":"fc"},"call":"c1"}],'
        b'"sent":true},"perdure_foreign":{"sdk":"openai-agents","v":1}}'
    ),
    (
        b'{"role":"user","perdure_foreign":{"sdk":"openai-agents","v":1,"item":'
        b'"{\\"role\\": \\"user\\", \\"content\\": \\"\\\\ud800\\"}"}}'
    ),
]


async def test_what_an_earlier_release_has_stored_is_read(sessions: SessionManager) -> None:
    async with sessions.open("a") as session:
        session.append(*(perdure.EncodedRecord(kind, data) for kind, data in zip(
            ("message", "tool_call", "message"), STORED, strict=True
        )))  # fmt: skip
    assert await PerdureSession("a", sessions).get_items() == [
        user("hi"),
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c1",
            "name": "tide",
            "arguments": '{"harbor":"A"}',
        },
        user("\ud800"),
    ]


async def test_an_item_of_a_newer_release_is_refused_by_name(sessions: SessionManager) -> None:
    newer = STORED[0].replace(b'"v":1', b'"v":2')
    async with sessions.open("a") as session:
        session.append(perdure.EncodedRecord("message", newer))
    with pytest.raises(perdure.UnsupportedVersionError, match="shape 2, and this release reads"):
        await PerdureSession("a", sessions).get_items()


# With the SDK's Runner


@function_tool
def tide(harbor: str) -> str:
    return f"low in {harbor}"


def script(*steps: Any) -> ScriptedModel:
    return ScriptedModel(steps)


def asks(*harbors: str) -> list[Any]:
    return [function_call("tide", {"harbor": name}, call_id=f"c_{name}") for name in harbors]


async def run(agent: Agent[Any], text: str, session: Any, *, stream: bool) -> Any:
    if not stream:
        return await Runner.run(agent, text, session=session, run_config=QUIET)
    result = Runner.run_streamed(agent, text, session=session, run_config=QUIET)
    async for _ in result.stream_events():
        pass
    return result


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_leaves_what_it_leaves_in_the_sdk_s_session(
    sessions: SessionManager, *, stream: bool
) -> None:
    """Tools in parallel, a hand-off, two runs with a restart of the session between them."""
    held: list[list[Any]] = []
    for session in (PerdureSession("a", sessions), SQLiteSession("a")):
        pilot = Agent(name="pilot", model=script([assistant_message("Sail at noon.")]))
        handoff = [function_call("transfer_to_pilot", {}, call_id="h")]
        model = script(asks("A", "B"), handoff, [assistant_message("As I said.")])
        agent = Agent(name="harbor", model=model, tools=[tide], handoffs=[pilot])
        first = await run(agent, "When?", session, stream=stream)
        assert first.final_output == "Sail at noon."
        if isinstance(session, PerdureSession):
            await session.aclose()
        second = await run(agent, "Say it again", session, stream=stream)
        assert second.final_output == "As I said."
        assert model.last_call is not None
        held.append([await session.get_items(), model.last_call.input])
    assert held[0] == held[1]
    assert len(held[0][0]) == 10


@output_guardrail
async def forbids(_context: Any, _agent: Any, _output: Any) -> GuardrailFunctionOutput:
    return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)


async def test_a_limit_gives_the_model_whole_groups(sessions: SessionManager) -> None:
    session = PerdureSession("a", sessions, session_settings=SessionSettings(limit=5))
    await session.add_items([user("before"), *PARALLEL])
    model = script([assistant_message("Noon.")])
    await run(Agent(name="harbor", model=model), "And now?", session, stream=False)
    assert model.last_call is not None
    assert [item.get("type", "user") for item in model.last_call.input] == ["message", "user"]
    session.session_settings = SessionSettings(limit=8)
    model = script([assistant_message("Noon.")])
    await run(Agent(name="harbor", model=model), "And now?", session, stream=False)
    assert model.last_call is not None
    assert [item.get("type", "user") for item in model.last_call.input][:2] == [
        "reasoning",
        "function_call",
    ]


async def test_a_stream_that_is_ended_after_a_turn_leaves_the_same(
    sessions: SessionManager,
) -> None:
    held: list[list[Any]] = []
    for session in (PerdureSession("a", sessions), SQLiteSession("a")):
        model = script(asks("A", "B"), asks("C"), [assistant_message("Done.")])
        agent = Agent(name="harbor", model=model, tools=[tide])
        result = Runner.run_streamed(agent, "When?", session=session, run_config=QUIET)
        async for event in result.stream_events():
            if event.type == "run_item_stream_event" and event.name == "tool_output":
                result.cancel(mode="after_turn")
        held.append(await session.get_items())
    assert held[0] == held[1]
    assert len(held[0]) == 5


async def test_runs_at_the_same_time_lose_nothing(sessions: SessionManager) -> None:
    session = PerdureSession("a", sessions)

    async def one(number: int) -> None:
        model = script(asks(f"A{number}"), [assistant_message(f"Answer {number}")])
        agent = Agent(name="harbor", model=model, tools=[tide])
        await run(agent, f"Question {number}", session, stream=bool(number % 2))

    await asyncio.gather(*map(one, range(8)))
    items = await session.get_items()
    assert len(items) == len(set(texts(items))) == 8 * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_guardrail_that_trips_loses_no_tool_that_was_run(
    sessions: SessionManager, *, stream: bool
) -> None:
    held: list[list[Any]] = []
    for session in (PerdureSession("a", sessions), SQLiteSession("a")):
        model = script(asks("A"), [assistant_message("Secret.")])
        agent = Agent(name="harbor", model=model, tools=[tide], output_guardrails=[forbids])
        with pytest.raises(OutputGuardrailTripwireTriggered):
            await run(agent, "When?", session, stream=stream)
        held.append(await session.get_items())
    assert held[0] == held[1]
    assert [item.get("type") for item in held[0]][1:3] == ["function_call", "function_call_output"]


async def test_a_run_that_is_cancelled_keeps_what_it_has_done(sessions: SessionManager) -> None:
    in_tool = asyncio.Event()

    @function_tool
    async def wait(harbor: str) -> str:
        in_tool.set()
        await asyncio.sleep(GUARD)
        return harbor

    session = PerdureSession("a", sessions)
    calls = [function_call("wait", {"harbor": "B"}, call_id="c_B")]
    agent = Agent(name="harbor", model=script(asks("A"), calls), tools=[tide, wait])
    task = asyncio.create_task(Runner.run(agent, "When?", session=session, run_config=QUIET))
    await asyncio.wait_for(in_tool.wait(), GUARD)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    kinds = [item.get("type") for item in await session.get_items()]
    assert kinds[:3] == [None, "function_call", "function_call_output"]
    await session.aclose()
    model = script([assistant_message("Noon.")])
    agent = Agent(name="harbor", model=model, tools=[tide])
    async with PerdureSession("a", sessions) as session:
        await Runner.run(agent, "And now?", session=session, run_config=QUIET)
    assert model.last_call is not None
    assert [item.get("content") for item in model.last_call.input][::3] == ["When?", "And now?"]


async def test_a_write_that_is_cancelled_is_there_or_not_as_a_whole(
    sessions: SessionManager,
) -> None:
    session = PerdureSession("a", sessions)
    await session.add_items([user("first")])
    with anyio.CancelScope() as scope:
        scope.cancel()
        await session.add_items([call("a"), output("a")])
    assert scope.cancelled_caught
    assert await session.get_items() in ([user("first")], [user("first"), call("a"), output("a")])


async def test_a_run_that_waits_for_approval_is_resumed_after_a_restart(tmp_path: Path) -> None:
    @function_tool(needs_approval=True)
    def sail(harbor: str) -> str:
        return f"sailed to {harbor}"

    asked = [function_call("sail", {"harbor": "A"}, call_id="c1")]
    async with PerdureSession.from_url("a", tmp_path) as session:
        agent = Agent(name="pilot", model=script(asked), tools=[sail])
        result = await Runner.run(agent, "Go", session=session, run_config=QUIET)
        assert len(result.interruptions) == 1
        await session.save_run_state(result.to_state())
    async with PerdureSession.from_url("a", tmp_path) as session:
        agent = Agent(name="pilot", model=script([assistant_message("Done.")]), tools=[sail])
        state = await session.load_run_state(agent)
        async with perdure.connect(tmp_path) as others:  # it is resumed by one process at a time
            with pytest.raises(LeaseHeldError):
                await PerdureSession("a", others, wait=0).load_run_state(agent)
        (interruption,) = state.get_interruptions()
        state.approve(interruption)
        result = await Runner.run(agent, state, session=session, run_config=QUIET)
        assert result.final_output == "Done."
        await session.drop_run_state()
        assert await session.load_run_state(agent) is None
        kinds = [item.get("type", "user") for item in await session.get_items()]
        assert kinds == ["user", "function_call", "function_call_output", "message"]


async def test_two_sessions_of_one_url_share_what_is_open(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    one, two = (PerdureSession.from_url("a", url, on_held="raise") for _ in range(2))
    await one.add_items([user("one")])
    await two.add_items([user("two")])
    await one.aclose()
    await two.add_items([user("three")])
    async with perdure.connect(url) as elsewhere:
        with pytest.raises(LeaseHeldError):
            await elsewhere.open("a", on_held="raise")
        await two.aclose()
        async with elsewhere.open("a", on_held="raise"):
            pass  # the last one has closed what they shared
    again = PerdureSession.from_url("a", url)
    assert await again.get_items() == [user("one"), user("two"), user("three")]
    await again.aclose()


async def test_sessions_in_memory_share_nothing() -> None:
    async with PerdureSession.in_memory("a") as one, PerdureSession.in_memory("a") as two:
        await one.add_items([user("one")])
        assert await two.get_items() == []


def test_the_next_event_loop_opens_a_url_anew(tmp_path: Path) -> None:
    async def add(text: str) -> Any:
        session = PerdureSession.from_url("a", tmp_path)  # never closed
        await session.add_items([user(text)])
        return await session.get_items()

    asyncio.run(add("one"))
    assert asyncio.run(add("two")) == [user("one"), user("two")]


def test_first_calls_from_several_event_loops_are_served_or_refused(tmp_path: Path) -> None:
    session = PerdureSession.from_url("a", f"sqlite:///{tmp_path}/a.db")
    together = threading.Barrier(3)

    async def add(text: str) -> None:
        together.wait()
        await session.add_items([user(text)])

    def run(text: str) -> str:
        try:
            asyncio.run(add(text))
        except WrongLoopError:
            return ""
        return text

    with ThreadPoolExecutor(3) as pool:
        stored = [text for text in pool.map(run, "abc") if text]
    assert len(stored) == 1

    async def read() -> Any:
        async with perdure.connect(f"sqlite:///{tmp_path}/a.db") as sessions:
            return await PerdureSession("a", sessions).get_items()

    assert asyncio.run(read()) == [user(stored[0])]


async def test_a_store_that_could_not_be_opened_may_be_opened_in_another_loop(
    tmp_path: Path,
) -> None:
    (tmp_path / "store").write_text("a file", encoding="utf-8")
    session = PerdureSession.from_url("a", tmp_path / "store")
    with pytest.raises(perdure.PerdureError):
        await session.get_items()
    (tmp_path / "store").unlink()
    assert await asyncio.to_thread(lambda: asyncio.run(session.get_items())) == []


async def test_the_sdk_s_compaction_replaces_the_history_in_one_group(
    sessions: SessionManager, tmp_path: Path
) -> None:
    compacted = {"type": "compaction", "id": "cmp_1", "encrypted_content": "zz"}
    sent: list[Any] = []

    async def compact(**request: Any) -> Any:
        sent.append(request["input"])
        return SimpleNamespace(output=[user("When is low tide?"), compacted], usage=None)

    client = SimpleNamespace(responses=SimpleNamespace(compact=compact))
    session = PerdureSession("a", sessions)
    await session.add_items(PARALLEL)
    around = OpenAIResponsesCompactionSession("a", session, client=client)  # type: ignore[arg-type]
    await around.run_compaction({"force": True, "compaction_mode": "input"})
    assert len(sent) == 1
    assert await session.get_items() == [user("When is low tide?"), compacted]
    (log,) = tmp_path.rglob("*.jsonl")
    last = [json.loads(line) for line in log.read_bytes().splitlines()[-3:]]
    assert [(record["k"], "end" in record) for record in last] == [
        ("retract", False),
        ("message", False),
        ("message", True),
    ]


class Compacting:
    """The SDK's compaction of a session after each run, by a client that answers with a summary."""

    def __init__(self, session: Any, during: Any = None) -> None:
        self.responses = self
        self.inputs: list[Any] = []
        self._during = during
        self._around = OpenAIResponsesCompactionSession(
            "a",
            session,
            client=self,  # type: ignore[arg-type]  # it has what is called
            compaction_mode="input",
            should_trigger_compaction=lambda about: len(about["session_items"]) >= 4,
        )

    async def compact(self, **request: Any) -> Any:
        self.inputs.append(request["input"])
        if self._during is not None:
            await self._during()
        return SimpleNamespace(output=[SUMMARY], usage=None)

    async def ask(self) -> None:
        await self._around.run_compaction({"force": True, "compaction_mode": "input"})

    async def run(self, *questions: str, **options: Any) -> None:
        for question in questions:
            model = ScriptedModel([[assistant_message(f"{question}!")]])
            config = RunConfig(tracing_disabled=True, **options)
            await Runner.run(
                Agent(name="a", model=model), question, session=self._around, run_config=config
            )


SUMMARY = {"type": "compaction", "id": "cmp_1", "encrypted_content": "zz"}


@pytest.mark.parametrize("context_bytes", [600, 512 * 1024])
async def test_the_sdk_s_compaction_keeps_what_was_added_meanwhile(
    tmp_path: Path, context_bytes: int
) -> None:
    async with perdure.connect(tmp_path, limits=Limits(context_bytes=context_bytes)) as sessions:
        session, other = (PerdureSession("a", sessions) for _ in range(2))
        await Compacting(session, lambda: other.add_items([user("since")])).run("one", "two")
        items = await session.get_items()
        assert SUMMARY not in items
        assert [items[0], items[-1]] == [user("one"), user("since")]
        compacting = Compacting(session)
        await compacting.run("three")
        assert await session.get_items() == [SUMMARY]
        assert user("since") in compacting.inputs[0]


async def test_the_sdk_s_compaction_does_not_undo_a_clear(sessions: SessionManager) -> None:
    session, other = (PerdureSession("a", sessions) for _ in range(2))
    await Compacting(session, other.clear_session).run("one", "two")
    assert await session.get_items() == []


@pytest.mark.parametrize("context_bytes", [600, 512 * 1024])
async def test_the_sdk_s_compaction_replaces_what_a_limit_shows_and_keeps_what_is_older(
    tmp_path: Path, context_bytes: int
) -> None:
    older = [user("old"), {"role": "assistant", "content": "old"}] * 5
    async with perdure.connect(tmp_path, limits=Limits(context_bytes=context_bytes)) as sessions:
        session = PerdureSession("a", sessions)
        await session.add_items(older)
        limit = SessionSettings(limit=2)
        await Compacting(session).run("one", session_settings=limit)
        assert await session.get_items() == [*older[:-2], SUMMARY]


async def test_the_sdk_s_compaction_of_messages_of_other_programs(sessions: SessionManager) -> None:
    async with sessions.open("a") as own:
        for number in range(3):
            own.append(Message.user(f"question {number}"), Message.assistant(f"answer {number}"))
    session = PerdureSession("a", sessions)
    before = await session.get_items()
    assert len(before) == 6
    await Compacting(session).run("one", session_settings=SessionSettings(limit=3))
    after = await session.get_items()
    assert after[-1] == SUMMARY
    assert after[:-1] == before[: len(after) - 1]
    assert len(after) < len(before)


@pytest.mark.parametrize("mixed", [False, True])
async def test_the_sdk_s_compaction_drops_what_has_expired_and_keeps_what_it_cannot_read(
    sessions: SessionManager, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    pytest.importorskip("cryptography")
    from agents.extensions.memory import EncryptedSession

    now = [1000.0]
    monkeypatch.setattr("cryptography.fernet.time.time", lambda: now[0])
    session = PerdureSession("a", sessions)
    mine, theirs = (
        EncryptedSession("a", session, encryption_key=key, ttl=10)  # type: ignore[arg-type]
        for key in ("mine", "theirs")
    )
    await mine.add_items([user("expired")] * 3)
    if mixed:
        await theirs.add_items([user("of another key")])
    unreadable = (await session.get_items())[3:]
    now[0] += 11
    await mine.add_items([user("live"), user("live too")])
    await Compacting(mine).run("one")
    kept = await session.get_items()
    assert kept[:-1] == unreadable
    assert await mine.get_items() == [SUMMARY]


@pytest.mark.parametrize("context_bytes", [600, 512 * 1024])
async def test_a_summary_replaces_what_it_is_of_and_nothing_that_came_since(
    tmp_path: Path, context_bytes: int
) -> None:
    summary = [user("So far: tides.")]
    async with perdure.connect(tmp_path, limits=Limits(context_bytes=context_bytes)) as sessions:
        session, other = (PerdureSession("a", sessions) for _ in range(2))
        await session.add_items(PARALLEL)
        items = await session.get_items()
        await other.add_items([user("since")])
        assert not await session.replace_items(summary, expected=items)
        assert await session.get_items() == [*PARALLEL, user("since")]
        items = await session.get_items()
        await other.add_items([await other.pop_item()])  # equal again
        assert await session.replace_items(summary, expected=items)
        assert await other.get_items() == summary
        done = await asyncio.gather(
            *(other.add_items([user(str(number))]) for number in range(5)),
            session.replace_items([], expected=summary),
            other.replace_items([user("x")], expected=[]),
        )
        assert [text["content"] for text in await session.get_items()][-5:] == list("01234")
        assert done[-2:] == [False, False]


# Processes

PROGRAM = """
import asyncio, os, signal, sys
import perdure
from agents import Agent, RunConfig, Runner, function_tool
from agents.testing import ScriptedModel, assistant_message, function_call
from perdure.adapters.openai_agents import PerdureSession

QUIET = RunConfig(tracing_disabled=True)

@function_tool
def tide(harbor: str) -> str:
    return "low"

def agent(*steps):
    return Agent(name="harbor", model=ScriptedModel(steps), tools=[tide])

ask = [function_call("tide", {"harbor": "A"}, call_id="c1")]
"""


def program(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + code, *arguments],
        capture_output=True,
        text=True,
        timeout=GUARD * 4,
        check=False,
    )


KILLED = """
@function_tool
def die(harbor: str) -> str:
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    session = PerdureSession.from_url("a", sys.argv[1])
    model = ScriptedModel([ask, [function_call("die", {"harbor": "B"}, call_id="c2")]])
    killed = Agent(name="harbor", model=model, tools=[tide, die])
    await Runner.run(killed, "When?", session=session, run_config=QUIET)

asyncio.run(main())
"""


@pytest.mark.deep
async def test_a_process_that_is_killed_leaves_its_items_and_its_lease(tmp_path: Path) -> None:
    killed = await anyio.to_thread.run_sync(program, KILLED, str(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    async with PerdureSession.from_url("a", tmp_path, wait=GUARD) as session:
        model = script([assistant_message("Noon.")])
        agent = Agent(name="harbor", model=model)
        await Runner.run(agent, "And now?", session=session, run_config=QUIET)
        kinds = [item.get("type", "user") for item in await session.get_items()]
    assert kinds[:3] == ["user", "function_call", "function_call_output"]
    assert kinds[-2:] == ["user", "message"]
    assert model.last_call is not None
    assert len(model.last_call.input) == 4  # the SDK leaves out a call without an output


SECOND = """
async def main():
    async with perdure.connect(sys.argv[1]) as sessions:
        session = PerdureSession("a", sessions, wait=0.2)
        print(len(await session.get_items()))
        try:
            await session.add_items([{"role": "user", "content": "mine"}])
        except perdure.LeaseHeldError as error:
            print(error)

asyncio.run(main())
"""


@pytest.mark.deep
async def test_a_second_process_reads_and_is_told_who_writes(
    sessions: SessionManager, tmp_path: Path
) -> None:
    async with PerdureSession("a", sessions) as session:
        await session.add_items(PARALLEL)
        second = await anyio.to_thread.run_sync(program, SECOND, str(tmp_path / "store"))
        assert second.returncode == 0, second.stderr
        count, error = second.stdout.splitlines()
        assert count == str(len(PARALLEL))
        assert str(os.getpid()) in error
        assert await session.get_items() == PARALLEL
    second = await anyio.to_thread.run_sync(program, SECOND, str(tmp_path / "store"))
    assert second.stdout.splitlines() == [str(len(PARALLEL))], second.stderr
    assert await session.get_items() == [*PARALLEL, user("mine")]


IN_TURNS = """
async def main():
    async with perdure.connect(sys.argv[1]) as sessions:
        for number in range(5):
            async with PerdureSession("a", sessions, wait=200) as session:
                await session.acquire()
                who = f"{sys.argv[2]} {number}"
                done = agent(ask, [assistant_message(f"Answer {who}")])
                await Runner.run(done, f"Question {who}", session=session, run_config=QUIET)

asyncio.run(main())
"""


@pytest.mark.deep
async def test_processes_that_share_a_session_run_one_after_another(tmp_path: Path) -> None:
    done: list[subprocess.CompletedProcess[str]] = []

    async def work(name: str) -> None:
        done.append(await anyio.to_thread.run_sync(program, IN_TURNS, str(tmp_path), name))

    async with anyio.create_task_group() as group:
        for name in "xyz":
            group.start_soon(work, name)
    assert [worker.stderr for worker in done if worker.returncode] == []
    async with PerdureSession.from_url("a", tmp_path) as session:
        items = await session.get_items()
    assert len(items) == 3 * 5 * 4
    asked = []
    for at in range(0, len(items), 4):
        question, call, output, answer = items[at : at + 4]
        assert (call["type"], output["type"]) == ("function_call", "function_call_output")
        asked.append(question["content"].removeprefix("Question "))
        assert answer["content"][0]["text"] == f"Answer {asked[-1]}"
    assert sorted(asked) == [f"{name} {number}" for name in "xyz" for number in range(5)]


@pytest.mark.deep
def test_kills_at_any_time_leave_what_was_acknowledged(tmp_path: Path) -> None:
    """Many more: ``python -m tests.adapters.kills openai-agents``."""
    kills.run("openai-agents", str(tmp_path / "store"), kills=4)


BLOCKING = """
import warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)
session = PerdureSession.from_url("a", sys.argv[1])
for text in ("one", "two"):
    speaker = agent([assistant_message("Yes.")])
    Runner.run_sync(speaker, text, session=session, run_config=QUIET)
print(len(asyncio.get_event_loop().run_until_complete(session.get_items())))
"""


@pytest.mark.deep
def test_a_script_without_a_loop_and_without_a_close_remembers(tmp_path: Path) -> None:
    first = program(BLOCKING, str(tmp_path))
    assert (first.returncode, first.stdout) == (0, "4\n"), first.stderr
    second = program(BLOCKING, str(tmp_path))
    assert (second.returncode, second.stdout) == (0, "8\n"), second.stderr


def test_what_is_stored_is_the_envelope_that_the_decision_describes() -> None:
    from perdure.adapters.openai_agents import Envelope

    fields = {field.name for field in msgspec.structs.fields(Envelope)}
    assert fields == {"sdk", "v", "item"}


async def test_a_session_that_is_only_written_keeps_little_in_memory(
    sessions: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.adapters.openai_agents.TEXT_BYTES", 5000)
    session = PerdureSession("ada", sessions)
    items = [user(f"{at} " * 200) for at in range(20)]
    for item in items:
        await session.add_items([item])
    assert len(vars(session._texts)["_values"]) < 10
    assert await session.get_items() == items  # also of those that are not kept
    assert len(vars(session._texts)["_values"]) < 10


async def test_a_turn_owns_what_a_run_in_another_task_stores(sessions: SessionManager) -> None:
    """The SDK calls from wherever its own tasks are."""
    events: list[Any] = []
    sessions.on("turn_warned", events.append)
    begun, done = anyio.Event(), anyio.Event()

    async def run() -> None:
        await begun.wait()
        await PerdureSession("ada", sessions).add_items([user("Q")])
        done.set()

    async with sessions.open("ada") as session, anyio.create_task_group() as group:
        group.start_soon(run)
        with pytest.raises(ConnectionError):
            async with session.turn("request-17"):
                begun.set()
                await done.wait()
                raise ConnectionError
        async with session.turn("request-17") as turn:
            assert [message.text for message in turn.messages] == ["Q"]
            assert session.context() == []
    assert events == []
