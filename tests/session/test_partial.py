"""A reply that is streamed into a turn: what is kept of it, whenever it ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, strategies as st

from perdure import (
    EngineOptions,
    FormatError,
    InvalidArgumentError,
    Message,
    SessionError,
    Shutdown,
    StoreUnavailableError,
    connect,
    sync,
)
from perdure.providers import Format
from perdure.records.messages import CUT_OFF
from perdure.session.internals import store_of
from perdure.store import Status
from perdure.testing import MemoryBacking, MemoryStore
from tests import _virtual
from tests.session.test_meanwhile import Store
from tests.source_tree import ROOT

QUIET = Shutdown(signals=False)
Event = dict[str, Any]


def chat(words: Iterable[str], *, ends: bool = True) -> list[Event]:
    deltas: list[tuple[Event, str | None]] = [({"content": word}, None) for word in words]
    deltas += [({}, "stop")] if ends else []
    return [
        {
            "id": "c",
            "model": "gpt-5",
            "choices": [{"index": 0, "delta": delta, "finish_reason": end}],
        }
        for delta, end in deltas
    ]


def responses(words: Iterable[str], *, ends: bool = True) -> list[Event]:
    words = list(words)
    content = [{"type": "output_text", "text": "".join(words), "annotations": []}]
    item = {"type": "message", "id": "m", "role": "assistant", "content": content}
    end = {"type": "response.completed", "response": {"id": "r", "model": "m", "output": [item]}}
    deltas = [{"type": "response.output_text.delta", "delta": word} for word in words]
    return [*deltas, end] if ends else deltas


def claude(words: Iterable[str], *, ends: bool = True) -> list[Event]:
    start = {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
        for word in words
    ]
    end = [
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]
    message = {"id": "m", "model": "claude", "content": []}
    return [
        {"type": "message_start", "message": message},
        start,
        *deltas,
        *(end if ends else []),
    ]


def gemini(words: Iterable[str], *, ends: bool = True) -> list[Event]:
    chunks: list[Event] = [
        {"candidates": [{"content": {"role": "model", "parts": [{"text": word}]}}]}
        for word in words
    ]
    return [*chunks, {"candidates": [{"finishReason": "STOP"}]}] if ends else chunks


STREAMS = {
    "openai": chat,
    "openai-responses": responses,
    "anthropic": claude,
    "gemini": gemini,
}
formats = pytest.mark.parametrize("format", STREAMS)
WORDS = ["Down ", "by ", "the ", "water."]


def said(session: Any) -> list[tuple[str, bool]]:
    """Return the assistant's messages, and whether each is marked as interrupted."""
    messages = session.context()
    return [(one.text, CUT_OFF in one.extra) for one in messages if one.role == "assistant"]


@formats
async def test_a_stream_becomes_the_message_that_its_reply_is(format: Format) -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            with turn.partial(format, every=0) as reply:
                got = [reply.add(event) for event in STREAMS[format](WORDS)]
            assert reply.complete
        assert "".join(got) == reply.text == "Down by the water."
        assert said(session) == [("Down by the water.", False)]
        assert reply.message is not None
        assert "perdure_issued" in reply.message.extra  # who wrote it is known


@formats
async def test_a_stream_that_ends_early_leaves_what_came(format: Format) -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            with turn.partial(format) as reply:
                for event in STREAMS[format](WORDS[:2], ends=False):
                    reply.add(event)
            assert not reply.complete
        assert said(session) == [("Down by ", True)]
        assert session.context("openai")[-1]["content"] == "Down by "  # and no mark is sent


async def test_a_format_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            with pytest.raises(InvalidArgumentError, match="choose openai, .*, or None for plain"):
                turn.partial("text")  # type: ignore[call-overload]


async def test_text_needs_no_format() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            with turn.partial() as reply:
                for word in WORDS:
                    reply.add(word)
            with turn.partial() as silence:
                silence.add("")
        assert said(session) == [("Down by the water.", False)]
        assert silence.message is None


async def test_a_piece_is_a_message_until_the_next_one_replaces_it() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            turn.append(Message.user("Where?"))
            with turn.partial(every=0) as reply:
                for count, word in enumerate(WORDS, 1):
                    reply.add(word)
                    assert said(session) == [("".join(WORDS[:count]), True)]
                    await session.save()
                    view = await sessions.load("a")
                    assert view is not None
                    assert said(view) == said(session)
            history = await session.history()
            assert [item.value.text for item in history] == ["Where?", "Down by the water."]
        assert len(session.context()) == 2


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_pieces_come_a_second_apart(backend: str) -> None:
    async def main() -> None:
        async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
            async with session.turn() as turn:
                with turn.partial() as reply:
                    before = session.version
                    for _ in range(100):
                        reply.add("word ")
                        await anyio.sleep(0.05)
                    pieces = (session.version - before + 1) // 2
                    assert pieces == 4
                with turn.partial(every=math.inf) as reply:
                    before = session.version
                    for _ in range(100):
                        reply.add("word ")
                        await anyio.sleep(0.05)
                    assert session.version == before

    _virtual.run(backend, main)


async def test_pieces_together_take_few_times_the_bytes_of_a_reply() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            with turn.partial(every=0) as reply:
                for _ in range(5_000):
                    reply.add("0123456789")
        await session.save()
        store = store_of(session)
        log = [record async for chunk in store.read_log(session.key) for record in chunk.records]
        assert sum(len(record.payload) for record in log) < 18 * 50_000


@given(
    format=st.sampled_from([*STREAMS, None]),
    words=st.lists(st.text(max_size=20), max_size=12),
    stop=st.integers(0, 14),
    end=st.sampled_from(["raise", "break", "whole"]),
)
def test_whatever_ends_it_each_word_is_there_once(
    format: Format | None, words: list[str], stop: int, end: str
) -> None:
    async def main() -> None:
        backing = MemoryBacking()
        sessions = connect(MemoryStore(backing=backing), shutdown=QUIET)
        async with sessions, sessions.open("a") as session:
            events: list[Any] = words if format is None else STREAMS[format](words)
            texts: list[str] = []
            turned = 0
            try:
                async with session.turn() as turn:
                    turn.append(Message.user("Where?"))
                    with turn.partial(format, every=0) as reply:
                        for at, event in enumerate(events):
                            if end != "whole" and at == stop:
                                if end == "break":
                                    break
                                raise ZeroDivisionError  # noqa: TRY301  # the block's own error
                            texts.append(reply.add(event))
                        turned = 1
            except ZeroDivisionError:
                turned = 2
            whole = "".join(texts)
            is_cut = turned == 2 or not reply.complete
            if whole or not is_cut:
                found = said(session)
                if whole:
                    assert found == [(whole, is_cut)]
            else:
                assert said(session) == []
            assert (await session.save()).version == session.version
            shown = len(session.context())
            assert session.info.messages == shown
        async with connect(MemoryStore(backing=backing), shutdown=QUIET) as again:
            view = await again.load("a")
            assert view is not None
            assert (len(view.context()), view.info.messages) == (shown, shown)

    anyio.run(main)


async def test_a_cancellation_keeps_what_came() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        with anyio.CancelScope() as scope:
            async with session.turn("request-1") as turn:
                turn.append(Message.user("Where?"))
                with turn.partial("anthropic") as reply:
                    for event in claude(WORDS[:3], ends=False):
                        reply.add(event)
                    scope.cancel()
                    await anyio.sleep(60)
        assert said(session) == [("Down by the ", True)]
        async with session.turn("request-1", resume=True) as turn:
            assert [message.text for message in turn.messages] == ["Where?", "Down by the "]
        assert said(session) == [("Down by the ", True)]


async def test_a_retry_takes_half_a_reply_back() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        with pytest.raises(ZeroDivisionError):
            async with session.turn("request-1") as turn:
                turn.append(Message.user("Where?"))
                with turn.partial(every=0) as reply:
                    for word in WORDS:
                        reply.add(word)
                    raise ZeroDivisionError
        async with session.turn("request-1") as turn:
            turn.append(Message.user("Where?"))
            with turn.partial() as reply:
                reply.add("There.")
        assert [message.text for message in session.context()] == ["Where?", "There."]


KILLED = """
import asyncio, os, signal, sys
from perdure import Message, connect

async def main():
    async with connect(sys.argv[1]) as sessions, sessions.open("a") as session:
        async with session.turn("request-1") as turn:
            turn.append(Message.user("Where?"))
            with turn.partial(every=0) as reply:
                for word in ("Down ", "by ", "the "):
                    reply.add(word)
                await session.save()
                reply.add("water.")
                os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("place", ["file:{}/store", "sqlite:///{}/s.db"])
async def test_a_killed_process_leaves_what_was_saved(
    place: str, resume: bool, tmp_path: Path
) -> None:
    url = place.format(tmp_path)
    killed = subprocess.run(  # noqa: ASYNC221  # nothing else runs in this loop
        [sys.executable, "-c", KILLED, url],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    async with connect(url, shutdown=QUIET) as sessions:
        view = await sessions.load("a")
        assert view is not None
        assert said(view) == [("Down by the ", True)]
        async with sessions.open("a") as session, session.turn("request-1", resume=resume) as turn:
            assert [message.text for message in turn.messages] == ["Where?", "Down by the "]
            assert said(session) == ([("Down by the ", True)] if resume else [])


async def test_a_stream_goes_on_while_the_store_takes_nothing() -> None:
    store = Store()
    little = EngineOptions(dirty_soft=8_000, dirty_hard=16_000, outage_policy="reject")
    async with connect(store, engine=little, shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        async with session.turn() as turn:
            with turn.partial(every=0) as reply:
                store.refuses = Status.TRANSIENT
                for _ in range(20):
                    reply.add("0123456789" * 30)
                with pytest.raises(StoreUnavailableError):
                    turn.append(Message.user("too much is unsaved"))
                store.refuses = None
                await sessions.flush()
        assert said(session) == [("0123456789" * 600, False)]


def test_blocking_style_streams_the_same() -> None:
    with sync.connect("memory:") as sessions, sessions.open("a") as session:
        with session.turn() as turn:
            with turn.partial("gemini", every=0) as reply:
                for event in gemini(WORDS):
                    reply.add(event)
            assert (reply.text, reply.complete) == ("Down by the water.", True)
            assert reply.message is not None
        with pytest.raises(ZeroDivisionError), session.turn() as turn, turn.partial() as reply:
            reply.add("Down")
            raise ZeroDivisionError
        assert said(session) == [("Down by the water.", False), ("Down", True)]


async def test_what_it_cannot_take_is_named() -> None:
    async with connect("memory:", shutdown=QUIET) as sessions, sessions.open("a") as session:
        async with session.turn() as turn:
            with pytest.raises(InvalidArgumentError, match=r"choose openai"):
                turn.partial("chatgpt")  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match=r"every=-1"):
                turn.partial(every=-1)
            with pytest.raises(InvalidArgumentError, match=r"every='1': give seconds"):
                turn.partial(every="1")  # type: ignore[arg-type]
            with turn.partial() as reply, pytest.raises(InvalidArgumentError, match="whose stream"):
                reply.add({"choices": []})
            with turn.partial("openai") as reply, pytest.raises(FormatError, match="type str"):
                reply.add("text")
            late = turn.partial()
        with pytest.raises(SessionError, match="has ended"), late:
            pass
        assert said(session) == []
