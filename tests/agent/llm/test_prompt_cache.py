"""What a request says of Anthropic's cache: each leg of a tool loop reads what the last wrote."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from perdure import ConfigError, Message
from perdure.agent import Agent
from perdure.agent.llm import AnthropicModel, ToolSpec
from perdure.agent.llm.anthropic import with_breakpoints
from tests.servers.models import KEY, Server

MARK = {"type": "ephemeral"}


async def get_current_time(timezone: str) -> str:
    """Return the time."""
    return f"noon in {timezone}"


def model(server: Server, **options: Any) -> AnthropicModel:
    return AnthropicModel("m", base_url=server.url, api_key=KEY, **options)


def blocks(request: dict[str, Any]) -> list[tuple[dict[str, Any], bool]]:
    """Return a request's blocks in the order in which it is cached, and which are marked."""
    system = request.get("system") or []
    system = [{"type": "text", "text": system}] if isinstance(system, str) else system
    found = [*request.get("tools", []), *system]
    for message in request["messages"]:
        said = message["content"]
        said = [{"type": "text", "text": said}] if isinstance(said, str) else said
        found += [{"role": message["role"], **block} for block in said]
    return [
        (
            {name: one for name, one in block.items() if name != "cache_control"},
            "cache_control" in block,
        )
        for block in found
    ]


def written(request: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the beginnings that a request writes to the cache, or reads from it."""
    listed = blocks(request)
    bare = [block for block, _ in listed]
    return [bare[: at + 1] for at, (_, marked) in enumerate(listed) if marked]


async def test_each_leg_of_a_tool_loop_reads_what_the_one_before_wrote(models: Server) -> None:
    before = len(models.seen()["requests"])
    made = Agent.create(
        "ada", model=model(models), tools=[get_current_time], instructions="Be kind."
    )
    async with made as agent:
        await agent.ask("think about time in Asia/Tokyo")
        await agent.ask("time in Europe/Berlin and time in Europe/Oslo")
    seen = models.seen()
    legs = seen["requests"][before:]
    assert len(legs) == 4
    assert seen["broken"] == []
    for leg in legs:
        assert written(leg)[-1] == [block for block, _ in blocks(leg)]  # all of it, for the next
    for leg, following in zip(legs, legs[1:], strict=False):
        assert written(leg)[-1] in written(following)


async def test_it_can_be_turned_off(models: Server) -> None:
    off = model(models, prompt_cache=None)
    async for _ in off.stream([Message.user("Hello")], [ToolSpec("look", "Look.", {})]):
        pass
    await off.aclose()
    assert "cache_control" not in str(models.seen()["requests"][-1])


def test_an_hour_is_said_and_anything_else_is_refused() -> None:
    request = {"messages": [{"role": "user", "content": "Hello"}]}
    hour = {"type": "ephemeral", "ttl": "1h"}
    assert with_breakpoints(request, "1h")["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": hour}]}
    ]
    with pytest.raises(ConfigError, match="choose '5m', '1h' or None"):
        AnthropicModel("m", api_key=KEY, prompt_cache="2h")  # type: ignore[arg-type]


def marked(text: str, **mark: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {**MARK, **mark}}


def test_marks_of_the_user_stay_and_there_are_never_more_than_four() -> None:
    many = [
        {"role": role, "content": [marked(f"{at}")]}
        for at, role in enumerate(["user", "assistant"] * 3)
    ]
    request = {
        "system": [marked("Be kind.")],
        "messages": [*many, {"role": "user", "content": "And now?"}],
    }
    kept = copy.deepcopy(request)
    listed = blocks(with_breakpoints(request, "5m"))
    assert [block.get("text") for block, is_marked in listed if is_marked] == [
        "Be kind.",
        "4",
        "5",
        "And now?",
    ]
    assert request == kept


def test_what_stays_longer_comes_first_whoever_marked_it() -> None:
    late = {"role": "user", "content": [marked("b", ttl="1h"), {"type": "text", "text": "c"}]}
    request = {"system": "a", "tools": [{"name": "look"}], "messages": [late]}
    said = with_breakpoints(request, "5m")
    assert said["system"][0]["cache_control"]["ttl"] == "1h"
    assert said["tools"][0]["cache_control"]["ttl"] == "1h"
    assert said["messages"][0]["content"][-1]["cache_control"] == MARK
    early = {"system": [marked("a")], "messages": [{"role": "user", "content": "b"}]}
    assert with_breakpoints(early, "1h")["messages"][0]["content"][0]["cache_control"] == MARK


def test_thoughts_take_no_mark() -> None:
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    paused = {"role": "assistant", "content": [{"type": "text", "text": "Hm"}, thought]}
    said = with_breakpoints({"messages": [{"role": "user", "content": "a"}, paused]}, "5m")
    assert said["messages"][1]["content"] == [
        {"type": "text", "text": "Hm", "cache_control": MARK},
        thought,
    ]


async def test_what_an_answer_wrote_and_read_is_kept_with_it(
    models: Server, tmp_path: Path
) -> None:
    import msgspec

    from perdure.agent import PersistentSession

    kept = PersistentSession(storage=f"file:{tmp_path}")
    for _ in range(2):
        async with Agent.create("ada", model=model(models), persistent_session=kept) as agent:
            await agent.ask("Hello")
            stamp = msgspec.json.decode(agent.session.context()[1].extra["perdure_issued"])
    usage = stamp["reply"]["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (3, 2)
