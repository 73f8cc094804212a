"""Kill an agent that looks at screenshots, restart it, and judge what its model is shown.

A tool returns screenshots, and users send photos. The agent is killed at random moments, or at the calls that
change the disk, until all of them are there. Whatever happened: for each provider, media within the
budget are images in the request, older ones are notes, no text has base64 in it, all that was said is
there, and the store has each image once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiofiles  # noqa: F401  # imported here once, not in each child that is forked
import anyio
import anyio._backends._asyncio  # noqa: F401

import perdure
from perdure import Limits, Message, Shutdown
from perdure.agent import AgentConfig, AgentFactory, ScriptedModel, call
from perdure.providers import FORMATS
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.session.manager import SessionManager
from perdure.stores.file import FileStore
from perdure.transfer.bundle_files import reach
from tests.crash.forks import Child, Report
from tests.crash.scratch import scratch
from tests.images import part, png, shown, url, words
from tests.providers.rules import wrongs

WORD = "My code word is herring."
BASE64 = re.compile(r"[A-Za-z0-9+/]{500,}")


class Script:
    """What is said: screenshots by a tool, and photos by a user.

    Args:
        screenshots: How many.
        photos: How many.
        least: Bytes of the smallest.
        most: Bytes of the largest.

    """

    def __init__(self, screenshots: int, photos: int, least: int, most: int) -> None:
        dice = random.Random(screenshots)
        count = screenshots + photos
        every = max(count // photos, 1)
        numbers = range(count)
        self.photos = {number for number in numbers if number % every == 1 and photos}
        self.photos = set(sorted(self.photos)[:photos])
        self.images = [png(dice.randint(least, most), number) for number in numbers]

    def asked(self, number: int) -> Message:
        if number in self.photos:
            image = self.images[number]
            if number % 2:
                return Message.user(f"photo {number}", image_urls=[url(image)])
            return Message.user([{"type": "text", "text": f"photo {number}"}, part(image)])
        return Message.user(f"look {number}")


def manager(root: Path, limits: Limits) -> SessionManager:
    return perdure.connect(FileStore(root), shutdown=Shutdown(signals=False), limits=limits)


def config(script: Script) -> AgentConfig:
    async def shot(number: int) -> list[dict[str, Any]]:
        """Take a screenshot."""
        return [{"type": "text", "text": f"screen {number}"}, part(script.images[number])]

    def answer(messages: Sequence[Message]) -> Any:
        last = messages[-1]
        if last.role == "tool" or "photo" in last.text:
            return f"seen {sum(one.role == 'user' for one in messages)}"
        if last.text.startswith("look"):
            return call("shot", number=int(last.text.split()[1]))
        return "Noted."

    return AgentConfig(name="tester", model=ScriptedModel(answer), tools=[shot])


async def work(root: Path, script: Script, limits: Limits, report: Report) -> None:
    """Ask what was not answered yet, until all is or the process is killed."""
    async with manager(root, limits) as sessions:
        factory = AgentFactory(sessions)
        if await sessions.exists("ada"):
            made = await factory.restore_agent("ada", config(script))
        else:
            made = await factory.create_agent(config(script), agent_id="ada")
        async with made as agent:
            await agent.ask(WORD, turn_id="first")
            for number in range(len(script.images)):
                await agent.ask(script.asked(number), turn_id=f"turn-{number}")
                report("answered", number)


async def judge(root: Path, script: Script, limits: Limits, answered: int) -> list[str]:
    """Return what is wrong with a session of which so many turns were answered."""
    problems: list[str] = []
    async with manager(root, limits) as sessions, sessions.open("ada") as session:
        history = await session.history(limit=10_000)
        said = [one.value for one in history if isinstance(one.value, Message)]
        whole = "\n".join(one.text for one in said)
        there = [number for number in range(len(script.images)) if _is_there(said, script, number)]
        cut = _cut(said)  # of these, the tool's answer is that it was interrupted
        if [number for number in range(answered) if number not in {*there, *cut}]:
            problems.append(f"{answered} turns were answered, the log has {there}, cut {cut}")
        for format in FORMATS:
            context = session.context(format)
            request = context if isinstance(context, list) else context.messages
            seen, text = shown(request), words(request)
            rendered = json.dumps(request)
            if not seen or seen != [script.images[number] for number in there][-len(seen) :]:
                problems.append(f"{format}: {len(seen)} images of {len(there)} are shown")
            notes = text.count(", left out: ")
            if len(seen) + notes != len(there):
                problems.append(f"{format}: {len(seen)} images, {notes} notes of {len(there)}")
            if BASE64.search(text) or "perdure:media" in rendered:
                problems.append(f"{format}: text holds what is no text")
            missing = [one for one in whole.splitlines() if one and one not in text]
            if WORD not in text or missing:
                problems.append(f"{format}: {len(missing)} lines are missing: {missing[:3]}")
            problems += [f"{format}: {wrong}" for wrong in _wrongs(context, format)]
    problems += await _stored(root, script, there)
    return problems


def _cut(said: Sequence[Message]) -> set[int]:
    """Return the numbers of the screenshots whose tool was cut off by a kill."""
    failed = {one.tool_result.call_id for one in said if one.tool_result and one.tool_result.error}
    calls = [call for one in said for call in one.tool_calls]
    return {call.arguments["number"] for call in calls if call.id in failed}


def _is_there(said: Sequence[Message], script: Script, number: int) -> bool:
    image = script.images[number]
    content = [list(one.image_urls) or one.content for one in said if one.role == "user"]
    results = [one.tool_result.result for one in said if one.tool_result is not None]
    for value in (*content, *results):
        if isinstance(value, list):
            found = shown([{"url": one} if isinstance(one, str) else one for one in value])
            if image in found:
                return True
    return False


def _wrongs(context: Any, format: str) -> list[str]:
    if isinstance(context, list):
        from perdure.providers import RenderedContext

        context = RenderedContext(format, context)  # type: ignore[arg-type]
    return wrongs(context)


async def _stored(root: Path, script: Script, there: Sequence[int]) -> list[str]:
    """Return what is wrong with the blobs of the store, after what a kill left was swept."""
    store, key = FileStore(root), SessionKey("ada")
    await store.open()
    try:
        reached = {blob.name async for blob in (await reach(store, key)).blobs()}
        await store.sweep("", reached, 0.0)
        names = sorted(await store.blob_names(""))
    finally:
        await store.aclose()
    # What a cut turn had said, and was taken back, is in the log, too.
    expected = {name_of(script.images[number]) for number in there}
    if expected <= set(names) <= {name_of(image) for image in script.images}:
        return []
    return [f"the store has {len(names)} blobs, {len(expected)} images are in the log"]


def media(
    *,
    screenshots: int = 20,
    photos: int = 3,
    least: int = 300_000,
    most: int = 1_700_000,
    tokens: int = 40_000,
    cycles: int = 12,
    seed: int = 0,
) -> dict[str, Any]:
    """Kill an agent at random while it works, judge, and go on until all is answered."""
    script = Script(screenshots, photos, least, most)
    limits = Limits(context_media_tokens=tokens)
    dice = random.Random(seed)
    problems: list[str] = []
    kills, answered = 0, 0
    with scratch(on_disk=True) as root:
        for cycle in itertools.count():

            def program(report: Report) -> None:
                anyio.run(work, root, script, limits, report)

            child = Child(program)
            if cycle < cycles:
                share = (len(script.images) - answered) // max(cycles - cycle, 1)
                child.listen(120.0, events=dice.randint(answered and 1, answered + share + 1))
                child.listen(dice.uniform(0, 0.03))
                events = child.kill()
            else:
                events = child.wait()
            kills += child.was_killed
            problems += [event[1] for event in events if event[0] == "problem"]
            done = [event[1] + 1 for event in events if event[0] == "answered"]
            answered = max([answered, *done])
            with contextlib.suppress(FileNotFoundError):
                problems += anyio.run(judge, root, script, limits, answered) if answered else []
            if answered == len(script.images) or problems:
                break
    return {
        "kills": kills,
        "acknowledged": answered,
        "images": len(script.images),
        "problems": problems,
    }
