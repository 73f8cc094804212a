"""What tools show and users send: images reach the model as images, also after compactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from perdure import Limits, Message
from perdure.agent import (
    AgentFactory,
    CompactionPolicy,
    Fact,
    ScriptedModel,
    Summary,
    TurnTrace,
    call,
    estimated_tokens,
)
from perdure.providers import FORMATS, render
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import CONTEXT
from perdure.session.internals import store_of
from tests.agent.conftest import Configure, World
from tests.images import encoded, part, png, shown, url, words
from tests.providers.rules import wrongs

KB = 1000


def looking(configured: Configure, seen: list[Any], size: int, **options: Any) -> Any:
    """Return an agent whose model takes a screenshot when it is asked to look."""

    def shot(number: int) -> list[dict[str, Any]]:
        """Take a screenshot."""
        return [part(png(size, number))]

    def answer(messages: Sequence[Message]) -> Any:
        seen.append(list(messages))
        last = messages[-1]
        if last.role == "user" and "look" in last.text:
            return call("shot", number=int(last.text.split()[1]))
        return "noted"

    return configured(model=ScriptedModel(answer), tools=[shot], **options)


@pytest.mark.parametrize("size", [150 * KB, 250 * KB, 700 * KB])
async def test_a_screenshot_of_any_size_reaches_the_model_as_an_image(
    world: World, configured: Configure, size: int
) -> None:
    seen: list[list[Message]] = []
    async with world.agent(looking(configured, seen, size)) as agent:
        await agent.ask("My code word is herring.")
        for number in range(3):
            await agent.ask(f"look {number}")
    images = [png(size, number) for number in range(3)]
    for format in FORMATS:
        rendered = render(seen[-1], format)
        assert shown(rendered.messages) == images
        assert "herring" in words(rendered.messages)
        assert encoded(images[0])[:500] not in words(rendered.messages)
        assert wrongs(rendered) == []
    async with world.connect():
        names = await world.store.blob_names("")
        assert sorted(names) == sorted(name_of(image) for image in images)


class Listening:
    """Sums up, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[Message] = []

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        self.shown += [message for turn in turns for message in turn.messages]
        return Summary("They looked at boats.", (Fact("The boat is red."),))


async def test_a_compaction_keeps_the_images_of_the_turns_that_stay(
    world: World, configured: Configure
) -> None:
    seen: list[list[Message]] = []
    summarizer = Listening()
    policy = CompactionPolicy(max_tokens=14_000, keep_turns=4)
    config = looking(configured, seen, 300 * KB, summarizer=summarizer, compaction=policy)
    async with world.agent(config) as agent:
        for number in range(12):
            await agent.ask(f"look {number}")
        context = agent.session.context("anthropic").messages
        log = store_of(agent.session).inner.read_log(SessionKey("ada"))  # type: ignore[attr-defined]
        records = [record async for chunk in log for record in chunk.records]
    replaced = [record for record in records if record.kind == CONTEXT]
    assert any(b"compaction" in record.payload for record in replaced)
    assert max(len(record.payload) for record in replaced) < 20 * KB
    images = shown(context)
    assert 2 <= len(images) < 12
    assert images == [png(300 * KB, number) for number in range(12)][-len(images) :]
    assert summarizer.shown
    said = str(summarizer.shown)
    assert "[image/png, 292 KB" in said
    assert "perdure:media" not in said
    assert encoded(png(300 * KB, 0))[:500] not in said
    async with world.agent(config) as agent:
        assert agent.session.context("anthropic").messages == context


async def test_images_that_are_left_out_stay_with_a_compaction_as_references(
    world: World, configured: Configure
) -> None:
    """With more room in the budget, they are shown again."""
    seen: list[list[Message]] = []
    policy = CompactionPolicy(max_tokens=40_000, keep_turns=8)
    config = looking(configured, seen, 70 * KB, summarizer=Listening(), compaction=policy)
    small = Limits(context_media_tokens=3_500)
    async with world.connect(limits=small) as sessions:
        made = await AgentFactory(sessions).create_agent(config, agent_id="ada")
        async with made as agent:
            for number in range(10):
                await agent.ask(f"look {number}")
            agent.memory.request_compaction()
            await agent.ask("thanks")
            assert len(shown(agent.session.context("anthropic").messages)) == 2
    async with world.connect(limits=Limits()) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert len(shown(view.context("anthropic").messages)) >= 5


async def test_a_large_result_with_an_image_has_no_base64_in_its_preview(
    world: World, configured: Configure
) -> None:
    seen: list[list[Message]] = []
    image = png(100 * KB)

    def report() -> list[dict[str, Any]]:
        """Return an image and very much text."""
        return [part(image), {"type": "text", "text": "herring " * 100_000}]

    def answer(messages: Sequence[Message]) -> Any:
        seen.append(list(messages))
        return call("report") if messages[-1].role == "user" else "noted"

    config = configured(model=ScriptedModel(answer), tools=[report])
    async with world.agent(config) as agent:
        await agent.ask("report")
        result = agent.session.context()[-2].tool_result
        assert result is not None
        assert "[image/png, 97 KB, not in this preview]" in str(result.result)
        assert encoded(image)[:200] not in str(result.result)
        assert encoded(image)[:200] not in str(seen[-1][-1].tool_result)


async def test_a_photo_that_waits_for_its_turn_comes_back(
    world: World, configured: Configure
) -> None:
    image = png(100 * KB)
    seen: list[list[Message]] = []
    photo = Message.user("look at this", image_urls=[url(image)])

    def answer(messages: Sequence[Message]) -> Any:
        seen.append(list(messages))
        return "noted"

    config = configured(model=ScriptedModel(answer))
    async with world.connect(autosave=None) as sessions:
        made = await AgentFactory(sessions).create_agent(config, agent_id="ada")
        await made.start()
        made.context.ledger.admit(photo, None)
        await made.session.save()
        left = world.killed()
        await made.stop()
    async with left.connect() as sessions:
        made = await AgentFactory(sessions).restore_agent("ada", config)
        async with made as agent:
            assert [one.message.image_urls for one in agent.unfinished] == [(url(image),)]
            await agent.resume()
    assert any(one.image_urls == (url(image),) for one in seen[-1])


def test_an_image_counts_as_its_tokens_and_not_as_its_bytes() -> None:
    image = Message.user([part(png(1_700_000))])
    assert 1_366 <= estimated_tokens(image) <= 1_700
