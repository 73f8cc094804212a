"""Large and odd tool results: a blob of their own, a preview, and back again (S1-G3)."""

from __future__ import annotations

import datetime
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from perdure import Message
from perdure.agent import AgentFactory, CompactionPolicy, ScriptedModel, call, tool
from perdure.agent.requests import claimed, reference_of, resolved
from perdure.errors import StoreUnavailableError
from perdure.records.messages import ToolResult
from perdure.session.internals import store_of
from tests.agent.conftest import Configure, World
from tests.images import png

KIB = 1024
TEXT = "0123456789abcdef" * 64 * KIB  # 1 MiB


def roomy() -> CompactionPolicy:
    return CompactionPolicy(max_bytes=16 * KIB * KIB)


def fetching(value: Any, configured: Configure, **options: Any) -> Any:
    async def fetch() -> Any:
        """Return something large."""
        return value

    options.setdefault("compaction", roomy())
    return configured(model=ScriptedModel(call("fetch"), "done"), tools=[fetch], **options)


async def kept(world: World, config: Any) -> Message:
    """Have the result of a tool kept, and return what the log has of it after a kill."""
    async with world.connect(autosave=None) as sessions:
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            assert await agent.ask("go") == "done"
            left = world.killed()
    async with left.connect() as sessions:
        view = await sessions.load("ada")
        assert view is not None
        (found,) = [one for one in view.context() if one.tool_result]
        (whole,) = await resolved(view, [found])
        assert reference_of(found) is not None
        assert reference_of(whole) is None
        assert whole.tool_result is not None
        assert found.tool_result is not None
        assert len(str(found.tool_result.result)) < 2 * KIB
        return whole


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(TEXT, id="text"),
        pytest.param(TEXT.encode(), id="bytes"),
        pytest.param([{"n": n, "text": "é\n" * 10} for n in range(20_000)], id="json"),
        pytest.param({"at": datetime.datetime(2026, 1, 2), "all": TEXT}, id="tagged"),
        pytest.param({"mime_type": "image/png", "data": png(KIB * KIB)}, id="image"),
    ],
)
async def test_a_large_result_lies_in_a_blob_and_comes_back_as_it_was(
    world: World, configured: Configure, value: Any
) -> None:
    """S1-G3: what is over ``max_inline_bytes`` leaves a preview and a reference in the log."""
    whole = await kept(world, fetching(value, configured))
    assert whole.tool_result is not None
    assert whole.tool_result.result == value
    assert type(whole.tool_result.result) is type(value)


async def test_the_reference_says_what_lies_there(world: World, configured: Configure) -> None:
    """S1-G3: sha256, bytes, media_type and preview; the blob is readable by anybody."""
    async with world.connect(autosave=None) as sessions:
        config = fetching(TEXT, configured)
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
            (found,) = [one for one in agent.session.context() if one.tool_result]
            reference = reference_of(found)
            assert reference is not None
            assert reference.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
            assert (reference.bytes, reference.media_type) == (
                len(TEXT),
                "text/plain; charset=utf-8",
            )
            assert TEXT.startswith(reference.preview)
            assert len(reference.preview) == 1000
            blob = await store_of(agent.session).get_blob("", reference.sha256)
            assert blob == TEXT.encode()


async def test_what_is_small_stays_where_it_is(world: World, configured: Configure) -> None:
    async with world.connect(autosave=None) as sessions:
        config = fetching("x" * 1000, configured)
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
            (found,) = [one for one in agent.session.context() if one.tool_result]
            assert reference_of(found) is None
            assert not await store_of(agent.session).blob_names("")


@pytest.mark.parametrize(("room", "sees"), [(16 * KIB * KIB, len(TEXT)), (64 * KIB, 1100)])
async def test_the_model_is_shown_the_whole_if_the_budget_allows_it(
    memory_world: World, configured: Configure, room: int, sees: int
) -> None:
    """S1-G3: transparent to the model; a result over the budget is shown as its preview."""
    async with memory_world.connect() as sessions:
        config = fetching(TEXT, configured, compaction=CompactionPolicy(max_bytes=room))
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
            (shown,) = [one for one in config.model.last_messages if one.tool_result]
    size = len(shown.tool_result.result)
    assert size == sees if sees == len(TEXT) else 1000 <= size <= sees


async def test_a_lost_blob_leaves_the_preview_and_says_so(
    tmp_path: Path, configured: Configure
) -> None:
    """S1-G3: a missing or damaged blob never is a crash; the agent goes on."""
    root = tmp_path / "data"
    world = World(root)
    async with world.connect(autosave=None) as sessions:
        config = fetching(TEXT, configured)
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
    (blob,) = [path for path in (root / "blobs").rglob("*") if path.is_file()]
    for damage in ("flip", "delete"):
        if damage == "flip":
            data = blob.read_bytes()
            blob.write_bytes(b"?" + data[1:])
        else:
            blob.unlink(missing_ok=True)
        async with world.connect() as sessions:
            config = configured(model=ScriptedModel("still here"), compaction=roomy())
            async with await AgentFactory(sessions).restore_agent("ada", config) as agent:
                assert await agent.ask("and?") == "still here"
            (shown,) = [one for one in config.model.last_messages if one.tool_result]
            text = shown.tool_result.result
            assert text.startswith(TEXT[:1000])
            assert "is lost" in text


async def test_where_blobs_cannot_be_written_the_log_takes_the_result(
    memory_world: World, configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_world.connect(autosave=None) as sessions:
        async with sessions.open("ada") as session:
            store = store_of(session)

            async def refuse(tenant: str, blobs: Any) -> None:
                raise StoreUnavailableError("the disk is away")

            monkeypatch.setattr(type(store), "put_blobs", lambda self, *rest: refuse(*rest))
            result = ToolResult("c1", "fetch", TEXT)
            assert await claimed(result, session, max_inline_bytes=KIB) is result


async def test_a_repr_is_kept_of_a_result_only_if_the_tool_says_so(
    memory_world: World, configured: Configure
) -> None:
    """S1-G3: what is not registered is an error that says so; a repr only by opt-in."""
    lock = threading.Lock()

    @tool(unstorable="repr")
    async def shown() -> Any:
        return {"lock": lock, "n": 1}

    async def plain() -> Any:
        return {"lock": lock, "n": 1}

    async with memory_world.connect() as sessions:
        model = ScriptedModel([call("shown"), call("plain")], "done")
        config = configured(model=model, tools=[shown, plain])
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
            results = {
                one.tool_result.name: one.tool_result
                for one in agent.session.context()
                if one.tool_result
            }
    assert results["shown"].result["n"] == 1
    assert "lock" in str(results["shown"].result["lock"])
    assert "cannot be stored" in str(results["plain"].error)


async def test_a_fork_and_a_sweep_keep_what_a_result_names(
    tmp_path: Path, configured: Configure
) -> None:
    """S1-G3: `perdure check --gc` reaches the blob through the record that names it."""
    from perdure.cli.check import audit, collect, garbage

    world = World(tmp_path / "data")
    async with world.connect(autosave=None) as sessions:
        config = fetching(TEXT, configured)
        async with await AgentFactory(sessions).create_agent(config, agent_id="ada") as agent:
            await agent.ask("go")
        await sessions.fork("ada", "bea")
        await sessions.delete("ada")
        async with sessions.open("bea") as session:
            store = store_of(session)
            await store.put_blobs("", {hashlib.sha256(b"x").hexdigest(): b"x"})
            keys = [listed.key for listed in await store.sessions()]
            found, reached = await garbage(
                store,
                "",
                set(await store.blob_names("")),
                [await audit(store, key) for key in keys],
            )
            await collect(store, found, reached, 0.0)
            await collect(store, found, reached, 0.0)
            (result,) = [one for one in session.context() if one.tool_result]
            (whole,) = await resolved(session, [result])
    assert found.unreachable == 1
    assert whole.tool_result is not None
    assert whole.tool_result.result == TEXT


LONE = "caf\udce9"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (LONE, r"caf\udce9"),
        ({"files": [LONE, "b"], LONE: (1, LONE)}, None),
        (LONE + "x" * 300 * KIB, r"caf\udce9" + "x" * 300 * KIB),
    ],
    ids=["text", "nested", "large"],
)
async def test_a_lone_surrogate_in_a_result_is_escaped_and_the_rest_is_kept(
    memory_world: World, configured: Configure, value: Any, stored: Any
) -> None:
    async with memory_world.agent(fetching(value, configured)) as agent:
        await agent.ask("go")
        (found,) = await resolved(
            agent.session, [one for one in agent.session.context() if one.tool_result]
        )
    assert found.tool_result is not None
    assert found.tool_result.error is None
    if stored is None:
        stored = {"files": [r"caf\udce9", "b"], r"caf\udce9": (1, r"caf\udce9")}
    assert found.tool_result.result == stored


async def test_a_lone_surrogate_in_an_exception_is_escaped_and_the_rest_is_kept(
    memory_world: World, configured: Configure
) -> None:
    async def fetch() -> Any:
        raise FileNotFoundError(LONE)

    model = ScriptedModel(call("fetch"), "done")
    async with memory_world.agent(configured(model=model, tools=[fetch])) as agent:
        await agent.ask("go")
        (found,) = [one for one in agent.session.context() if one.tool_result]
    assert found.tool_result is not None
    assert found.tool_result.error == r"FileNotFoundError: caf\udce9"
