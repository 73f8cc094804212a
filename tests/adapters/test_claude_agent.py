"""`PerdureSessionStore` against the SDK's conformance, its helpers, its program, other processes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, strategies as st

import perdure
from perdure import (
    CorruptRecordError,
    LeaseLostError,
    Message,
    NotStorableError,
    Retention,
    SessionError,
    SessionManager,
    StoreUnavailableError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.store import Capabilities
from perdure.stores.delegate import DelegatingStore
from perdure.testing import FaultyStore, MemoryBacking, MemoryStore
from perdure.testing.faulty import How
from tests.servers.anthropic_script import AnthropicScript, call, said, text
from tests.session.test_folds import ReadsCounted

sdk: Any = pytest.importorskip("claude_agent_sdk")
testing: Any = pytest.importorskip("claude_agent_sdk.testing")

from perdure.adapters import PerdureSessionStore  # noqa: E402  # behind the skip

ROOT = Path(__file__).parents[2]
KEY: Any = {"project_key": "harbor", "session_id": "s"}
SUB: Any = {**KEY, "subpath": "subagents/agent-1"}


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[SessionManager]:
    async with perdure.connect(tmp_path / "store") as manager:
        yield manager


def entries(*uuids: object, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "user", "uuid": f"{uuid}", **fields} for uuid in uuids]


async def uuids(store: PerdureSessionStore, key: Any = KEY) -> list[str]:
    return [entry["uuid"] for entry in await store.load(key) or ()]


# The SDK's own suite


def place(name: str, folder: Path) -> Any:
    match name:
        case "postgres":
            from tests.servers.postgres import schema_of, shared

            return f"{shared().url}?schema={schema_of(folder)}"
        case "redis":
            from tests.servers.valkey import shared as shared_valkey

            return shared_valkey().url
        case "s3":
            from tests.servers.s3 import shared as shared_s3, store_on

            return store_on(shared_s3(), folder)
    return {"memory": "memory:", "sqlite": f"sqlite:///{folder}/a.db"}.get(name, folder / "store")


@pytest.mark.parametrize(
    "name",
    [
        "memory",
        "file",
        "sqlite",
        *(pytest.param(each, marks=pytest.mark.deep) for each in ("postgres", "redis", "s3")),
    ],
)
async def test_it_keeps_the_sdk_s_contracts(tmp_path: Path, name: str) -> None:
    async with perdure.connect(place(name, tmp_path)) as sessions:
        # A contract sees an empty store.
        tenants = (f"{tmp_path.name}-{number}" for number in count())
        await testing.run_session_store_conformance(
            lambda: PerdureSessionStore(sessions, tenant=next(tenants))
        )


async def test_the_sdk_s_helpers_read_it(sessions: SessionManager) -> None:
    store = PerdureSessionStore(sessions, owner="ada")
    project = sdk.project_key_for_directory("/harbor")
    name = "3c6fbad6-edc8-415d-95ec-78932ad963dd"
    key = {"project_key": project, "session_id": name}
    asked = {"role": "user", "content": "When is low tide?"}
    told = {"role": "assistant", "content": [text("At noon.")], "id": "m"}
    first, second = "e468dd5c-b402-4e46-8ea1-5d34a89b453b", "81fa26a9-4b2d-4c42-8ea8-0225d34c16a9"
    about = {"sessionId": name, "timestamp": "2026-11-27T12:00:00.000Z", "cwd": "/harbor"}
    await store.append(
        key,
        [
            {"type": "user", "uuid": first, "parentUuid": None, "message": asked, **about},
            {"type": "assistant", "uuid": second, "parentUuid": first, "message": told, **about},
            {"type": "custom-title", "customTitle": "Tides", "sessionId": name},
        ],
    )
    (listed,) = await sdk.list_sessions_from_store(store, directory="/harbor")
    assert (listed.session_id, listed.summary) == (name, "Tides")
    messages = await sdk.get_session_messages_from_store(store, name, directory="/harbor")
    assert [message.type for message in messages] == ["user", "assistant"]
    forked = await sdk.fork_session_via_store(store, name, directory="/harbor")
    assert len(await sdk.list_sessions_from_store(store, directory="/harbor")) == 2
    await sdk.delete_session_via_store(store, name, directory="/harbor")
    (info,) = await sessions.list(owner="ada", tag="claude-agent-sdk")
    assert info.key.agent == f"claude/{project}/{forked.session_id}"
    assert info.title == "Tides (fork)"


# What is stored


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=4))
def test_entries_come_back_as_they_were(given: list[dict[str, Any]]) -> None:
    appended = [{"type": "x", **entry} for entry in given]

    async def run() -> None:
        async with PerdureSessionStore.in_memory() as store:
            await store.append(KEY, appended)
            named: Counter[str] = Counter()
            kept = []
            for entry in appended:
                uuid = entry.get("uuid")
                if not isinstance(uuid, str) or not named[uuid]:
                    kept.append(entry)
                if isinstance(uuid, str):
                    named[uuid] += 1
            loaded = await store.load(KEY)
            assert json.dumps(loaded or []) == json.dumps(kept)

    anyio.run(run)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        "\ud800",
        float("inf"),
        2**80,
        nested(150),
        nested(400),
        "x" * MAX_RECORD_BYTES,
        '"\n\ud800\u2603' * (MAX_RECORD_BYTES // 16),
    ],
    ids=["surrogate", "infinity", "large number", "deep", "deeper", "large", "large and escaped"],
)
async def test_what_is_large_or_odd_comes_back(sessions: SessionManager, value: Any) -> None:
    store = PerdureSessionStore(sessions)
    around = [*entries(1), {"type": "x", "uuid": "2", "value": value}, *entries(3)]
    await store.append(KEY, around)
    await store.append(KEY, around)
    assert await store.load(KEY) == around
    again = PerdureSessionStore(sessions)
    await again.append(KEY, around)
    assert await again.load(KEY) == around


async def test_without_blobs_a_large_entry_is_named_and_nothing_is_stored() -> None:
    async with perdure.connect(Plain(MemoryStore())) as sessions:
        store = PerdureSessionStore(sessions)
        large = {"type": "x", "uuid": "2", "value": "x" * MAX_RECORD_BYTES}
        with pytest.raises(TooLargeError, match=r"the value at entries\[1\] takes"):
            await store.append(KEY, [*entries(1), large])
        assert await store.load(KEY) is None
        await store.append(KEY, entries(1))
        assert await store.load(KEY) == entries(1)


class Plain(DelegatingStore):
    """A store that keeps no blobs."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, blobs=False)


@pytest.mark.parametrize("value", [{1, 2}, b"x", object()], ids=["set", "bytes", "object"])
async def test_what_is_no_json_is_refused_whole(sessions: SessionManager, value: Any) -> None:
    store = PerdureSessionStore(sessions)
    with pytest.raises(NotStorableError, match=r"entries\[1\] is not JSON"):
        await store.append(KEY, [*entries(1), {"type": "x", "value": value}])
    assert await store.load(KEY) is None


@pytest.mark.parametrize(
    ("project", "session", "subpath"),
    [("a/b", "c", None), ("a", "b/c", None), ("a%2Fb", "c", None), ("a", "b", "default")],
)
async def test_keys_that_look_alike_are_others(
    sessions: SessionManager, project: str, session: str, subpath: str | None
) -> None:
    store = PerdureSessionStore(sessions)
    key = {"project_key": project, "session_id": session}
    if subpath is not None:
        key["subpath"] = subpath
    await store.append(key, entries(f"{key}"))
    others = [
        {"project_key": "a", "session_id": "b"},
        {"project_key": "a", "session_id": "b", "subpath": "%default"},
        {"project_key": "a", "session_id": "b", "subpath": "%25default"},
    ]
    for other in others:
        await store.append(other, entries(f"{other}"))
    for each in (key, *others):
        assert await uuids(store, each) == [f"{each}"]
    found = {each["session_id"] for each in await store.list_sessions(project)}
    assert session in found
    subpaths = {"%default", "%25default", *([] if subpath is None else [subpath])}
    assert set(await store.list_subkeys(others[0])) == subpaths


async def test_a_session_that_begins_alike_keeps_its_subagents(sessions: SessionManager) -> None:
    store = PerdureSessionStore(sessions)
    longer = {**SUB, "session_id": "s2"}
    for key in (KEY, SUB, longer):
        await store.append(key, entries(1))
    assert await store.list_subkeys(KEY) == [SUB["subpath"]]
    await store.delete(KEY)
    assert await uuids(store, longer) == ["1"]


async def test_a_session_with_messages_is_left_alone(sessions: SessionManager) -> None:
    async with sessions.open("claude/harbor/s") as session:
        session.append(Message.user("Hello"))
    with pytest.raises(SessionError, match="is no transcript"):
        await PerdureSessionStore(sessions).append(KEY, entries(1))


async def test_what_a_newer_release_wrote_is_refused(sessions: SessionManager) -> None:
    from perdure.records.records import FOREIGN, Entry
    from perdure.session.internals import accept

    store = PerdureSessionStore(sessions)
    await store.append(KEY, entries(1))
    async with sessions.open("claude/harbor/s") as session:
        accept(session, (Entry(FOREIGN, b'{"sdk": "claude-agent-sdk", "v": 2}'),))
        await session.save()
    with pytest.raises(UnsupportedVersionError, match="upgrade perdure"):
        await store.load(KEY)
    async with sessions.open("claude/other/s") as session:
        accept(session, (Entry(FOREIGN, b'{"sdk": "claude-agent-sdk", "v": 1, "text": 1}'),))
        await session.save()
    with pytest.raises(CorruptRecordError):
        await store.load({**KEY, "project_key": "other"})


# Summaries


async def test_a_summary_is_of_each_entry_once(sessions: SessionManager) -> None:
    store = PerdureSessionStore(sessions)
    await store.append(KEY, entries(1, customTitle="old"))
    await store.append(KEY, entries(2, customTitle="new"))
    await store.append(KEY, entries(1, customTitle="old"))  # a retry that comes late
    (summary,) = await store.list_session_summaries("harbor")
    assert summary["data"]["custom_title"] == "new"
    (listed,) = await store.list_sessions("harbor")
    assert listed == {"session_id": "s", "mtime": summary["mtime"]}
    again = PerdureSessionStore(sessions)
    await again.append(KEY, entries(3, gitBranch="main"))
    (later,) = await again.list_session_summaries("harbor")
    assert later["mtime"] > summary["mtime"]
    assert later["data"] == {**summary["data"], "git_branch": "main"}


async def test_transcripts_expire(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path / "store") as sessions:
        store = PerdureSessionStore(sessions)
        await store.append(KEY, entries(1, 2))
        await store.append(SUB, entries(1))
    async with perdure.connect(tmp_path / "store") as sessions:
        await sessions.prune(Retention(keep_turns=1, keep_days=0))
        store = PerdureSessionStore(sessions)
        assert await uuids(store) == ["1", "2"]  # a transcript is kept whole, or not at all
        report = await sessions.prune(Retention(expire_days=0))
        assert len(report.expired) == 2
        assert (await store.load(KEY), await store.load(SUB)) == (None, None)
        assert await store.list_sessions("harbor") == []


# Costs


async def test_an_append_reads_nothing_of_what_is_known() -> None:
    backing = MemoryBacking()
    counted, others = ReadsCounted(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(others) as sessions:
        await PerdureSessionStore(sessions).append(KEY, entries(*range(500)))
    async with perdure.connect(counted) as sessions:
        store = PerdureSessionStore(sessions)
        await store.load(KEY)
        await store.append(KEY, entries(500))  # what the open has brought
        reads = counted.log_reads
        for number in range(100):
            await store.append(KEY, entries(number, 501 + number))
        assert counted.log_reads == reads
        assert await uuids(store) == [f"{number}" for number in range(601)]


async def test_two_processes_take_turns_and_read_only_what_is_new(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path) as one, perdure.connect(tmp_path) as two:
        stores = PerdureSessionStore(one), PerdureSessionStore(two)
        for number in range(6):
            await stores[number % 2].append(KEY, entries(number, number + 1, number + 2))
            known = stores[number % 2]._transcripts.get(SessionKey("claude/harbor/s"))
            assert known is not None
            assert known.uuids == {f"{at}" for at in range(number + 3)}
        for store in stores:
            assert await uuids(store) == [f"{at}" for at in range(8)]


async def test_calls_at_once_store_each_entry_once(sessions: SessionManager) -> None:
    stores = [PerdureSessionStore(sessions) for _ in range(2)]
    async with anyio.create_task_group() as group:
        for number in range(20):
            batch = entries(number, number + 1, number + 2)
            group.start_soon(stores[number % 2].append, KEY, batch)
    assert sorted(map(int, await uuids(stores[0]))) == list(range(22))


@pytest.mark.parametrize("method", ["acquire", "append_many", "read_log"])
@pytest.mark.parametrize("how", ["transient", "in_doubt_lost", "in_doubt_applied"])
async def test_a_batch_that_is_tried_again_is_stored_once(method: str, how: How) -> None:
    nth, injected = 0, 1
    while injected:  # each such call of the store fails in its turn
        nth += 1
        backing = MemoryBacking()
        faulty = FaultyStore(MemoryStore(backing=backing), fail_on=method, nth=nth, how=how)
        async with perdure.connect(faulty) as sessions:
            store = PerdureSessionStore(sessions)
            for number in range(0, 12, 3):
                await tried(store, entries(number, number + 1, number + 2))
        async with perdure.connect(MemoryStore(backing=backing)) as sessions:
            assert await uuids(PerdureSessionStore(sessions)) == [f"{at}" for at in range(12)]
        injected = faulty.injected
    assert nth > 1


async def tried(store: PerdureSessionStore, batch: list[dict[str, Any]]) -> None:
    """Append as the SDK does."""
    for attempt in (1, 2, 3):
        try:
            await store.append(KEY, batch)
        except StoreUnavailableError:
            assert attempt < 3
        else:
            break


# Deletion


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "by another process"])
async def test_what_was_deleted_begins_anew_when_it_is_read_again(elsewhere: bool) -> None:
    backing = MemoryBacking()
    stores = MemoryStore(backing=backing), MemoryStore(backing=backing)
    async with perdure.connect(stores[0]) as sessions, perdure.connect(stores[1]) as others:
        store = PerdureSessionStore(sessions)
        await store.append(KEY, entries(1))
        await (others if elsewhere else sessions).forget("claude/harbor/s")
        with pytest.raises(LeaseLostError, match="deleted"):
            await store.append(KEY, entries(2))
        assert await store.load(KEY) is None
        await store.append(KEY, entries(1, 3))
        assert await uuids(store) == ["1", "3"]
        await store.delete(KEY)
        await store.append(KEY, entries(1))
        assert await uuids(store) == ["1"]


# Several processes

WRITERS, BATCHES = 3, 40


def write(url: str, writer: int) -> None:
    async def run() -> None:
        async with PerdureSessionStore.from_url(url, wait=60) as store:
            for number in range(BATCHES):
                batch = entries(f"{writer} {number}", f"shared {number}", writer=writer)
                await store.append(KEY, [*batch, {"type": "mode", "of": [writer, number]}])

    asyncio.run(run())


@pytest.mark.deep
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", ["file", "sqlite", "postgres"])
async def test_processes_append_to_one_transcript(tmp_path: Path, name: str) -> None:
    url = str(place(name, tmp_path))
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=write, args=(url, number)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        await anyio.to_thread.run_sync(writer.join)
        assert writer.exitcode == 0
    async with PerdureSessionStore.from_url(url) as store:
        stored = await store.load(KEY) or []
    named = Counter(entry["uuid"] for entry in stored if "uuid" in entry)
    assert set(named.values()) == {1}
    assert len(named) == (WRITERS + 1) * BATCHES
    for writer in range(WRITERS):
        own = [entry["uuid"] for entry in stored if entry.get("uuid", "")[:2] == f"{writer} "]
        assert own == [f"{writer} {number}" for number in range(BATCHES)]
        modes = [entry["of"][1] for entry in stored if entry.get("of", [None])[0] == writer]
        assert modes == list(range(BATCHES))


# The SDK's own program


def program(server: AnthropicScript, *words: str, config: Path) -> subprocess.Popen[str]:
    config.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.adapters.claude_program", *words],
        cwd=ROOT,
        env={**os.environ, **server.environment, "CLAUDE_CONFIG_DIR": str(config)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.splitlines()


@pytest.mark.deep
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_sdk_s_program_is_killed_and_resumed_elsewhere(tmp_path: Path) -> None:
    url, cwd = f"sqlite:///{tmp_path}/agents.db", tmp_path / "work"
    cwd.mkdir()
    asked, hold = anyio.Event(), multiprocessing.Event()
    loop = asyncio.get_running_loop()

    def answers(request: dict[str, Any]) -> list[dict[str, Any]]:
        question = said(request)[-1][1].splitlines()[-1]
        if question == "Three?":
            loop.call_soon_threadsafe(asked.set)
            hold.wait(60)
        return [text(f"Answer to {question}")]

    def run(*words: str, config: str) -> subprocess.Popen[str]:
        return program(server, url, str(cwd), *words, config=tmp_path / config)

    with AnthropicScript(answers) as server:
        killed = run("One?", "Two?", "Three?", config="first")
        with anyio.fail_after(120):
            await asked.wait()
        os.killpg(killed.pid, signal.SIGKILL)
        out, _ = killed.communicate()
        hold.set()
        told = out.splitlines()
        name = told[0].split()[0]
        assert told == [f"{name} Answer to One?", f"{name} Answer to Two?"]
        resumed = run("Four?", "--resume", name, config="second")
        assert await anyio.to_thread.run_sync(finished, resumed) == [f"{name} Answer to Four?"]
    *conversation, (role, newest) = said(server.requests[-1])
    assert conversation[:4] == [
        ("user", "One?"),
        ("assistant", "Answer to One?"),
        ("user", "Two?"),
        ("assistant", "Answer to Two?"),
    ]
    # The third question was mirrored or not, and then is with the fourth, or before it.
    assert (role, newest.endswith("Four?")) == ("user", True)
    async with PerdureSessionStore.from_url(url) as store:
        key = {"project_key": sdk.project_key_for_directory(str(cwd)), "session_id": name}
        stored = await store.load(key) or []
        named = Counter(entry["uuid"] for entry in stored if "uuid" in entry)
        assert set(named.values()) == {1}
        (listed,) = await sdk.list_sessions_from_store(store, directory=str(cwd))
        assert (listed.session_id, listed.first_prompt) == (name, "One?")


@pytest.mark.deep
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_subagent_s_transcript_is_mirrored_and_resumed(tmp_path: Path) -> None:
    url, cwd = str(tmp_path / "store"), tmp_path / "work"
    cwd.mkdir()

    def answers(request: dict[str, Any]) -> list[dict[str, Any]]:
        spoken = said(request)
        if spoken[0][1] == "Look at the tide":
            return [text("Low at noon.")]
        is_told = "tool_result" in json.dumps(request["messages"][-1])
        if spoken[-1][1] == "Ask a colleague" and not is_told:
            kind = {"subagent_type": "general-purpose", "run_in_background": False}
            return [call("t1", "Agent", description="x", prompt="Look at the tide", **kind)]
        return [text("Done.")]

    with AnthropicScript(answers) as server:
        words = (url, str(cwd), "Ask a colleague")
        first = program(server, *words, config=tmp_path / "first")
        ((name, _),) = [line.split() for line in await anyio.to_thread.run_sync(finished, first)]
        words = (url, str(cwd), "And now?", "--resume", name)
        second = program(server, *words, config=tmp_path / "second")
        assert await anyio.to_thread.run_sync(finished, second)
    key = {"project_key": sdk.project_key_for_directory(str(cwd)), "session_id": name}
    async with PerdureSessionStore.from_url(url) as store:
        (subpath,) = await store.list_subkeys(key)
        stored = await store.load({**key, "subpath": subpath})
        assert "Low at noon." in json.dumps(stored)
        assert all(entry.get("isSidechain", True) for entry in stored or ())
        (listed,) = await store.list_sessions(key["project_key"])
        assert listed["session_id"] == name
