"""What media cost a session that has none: as many calls of Python, however long it is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from perdure import Message
from perdure.providers import FORMATS, Format
from perdure.session.manager import SessionManager
from tests.images import png, url
from tests.session.conftest import Connect


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of this thread by the modules that they are in."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "perdure" in (path := Path(frame.f_code.co_filename)).parts:
            calls["/".join(path.with_suffix("").parts[-2:])] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


async def say(sessions: SessionManager, *last: Message) -> None:
    for key, turns in LENGTHS.items():
        async with sessions.open(key) as session:
            for at in range(turns):
                session.append(Message.user(f"question {at}"), Message.assistant(f"answer {at}"))
            session.append(*last)


LENGTHS = {"first": 5, "short": 5, "long": 250}
"""The first one imports what is imported when it is first used."""
IMAGE = Message.user("look", image_urls=[url(png(100_000))])


@pytest.mark.parametrize("last", [(), (IMAGE,)], ids=["text", "image"])
async def test_an_open_takes_no_message_out_of_the_stored_context(
    again: Connect, last: tuple[Message, ...]
) -> None:
    async with again() as sessions:
        await say(sessions, *last)
    taken: dict[str, Counter[str]] = {}
    async with again() as sessions:
        for key in LENGTHS:
            with counting() as taken[key]:
                opening = sessions.open(key)
                await opening.__aenter__()
            await opening.__aexit__(None, None, None)
    short, long = taken["short"], taken["long"]
    assert long["memory/context"] == short["memory/context"] > 0
    assert long.total() < short.total() + 100


@pytest.mark.parametrize("format", [None, *FORMATS])
async def test_no_message_of_text_is_walked_for_media_or_for_rules(
    again: Connect, format: Format | None
) -> None:
    async with again() as sessions:
        await say(sessions)
        walked: dict[str, list[int]] = {}
        for key in LENGTHS:
            async with sessions.open(key) as session:
                session.context()  # takes the messages out of what is stored
                with counting() as calls:
                    session.context(format)
            walked[key] = [calls[name] for name in WALKING]
    assert walked["long"] == walked["short"]
    assert sum(walked["long"]) > 0


WALKING = ("records/media", "memory/media", "providers/request_rules")
