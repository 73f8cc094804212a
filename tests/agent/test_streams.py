"""Event streams."""

from __future__ import annotations

import anyio

from perdure import Message
from perdure.agent.events import (
    MAX_WAITING,
    AgentEvent,
    AgentStopped,
    EventStream,
    Segment,
    TurnEnded,
    TurnStarted,
)

STARTED = TurnStarted(agent_id="a", turn_id="t")
ENDED = TurnEnded(agent_id="a", turn_id="t", message=Message.assistant("x"), version=1)
STOPPED = AgentStopped(agent_id="a")


async def collect(stream: EventStream) -> list[AgentEvent]:
    return [event async for event in stream]


async def test_events_wait_for_who_listens() -> None:
    stream = EventStream(TurnEnded)
    for event in (STARTED, ENDED):
        stream.feed(event)
    assert await collect(stream) == [STARTED, ENDED]


async def test_a_listener_that_waits_is_woken() -> None:
    stream = EventStream(TurnEnded)
    found: list[AgentEvent] = []

    async def listen() -> None:
        found.extend(await collect(stream))

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        stream.feed(STARTED)
        await anyio.wait_all_tasks_blocked()
        stream.feed(ENDED)
    assert found == [STARTED, ENDED]


async def test_the_agents_end_ends_every_stream() -> None:
    stream = EventStream()
    stream.feed(STOPPED)
    stream.feed(STARTED)
    assert await collect(stream) == [STOPPED]


async def test_only_segments_are_left_out_when_nobody_fetches() -> None:
    stream = EventStream(TurnEnded)
    for _ in range(MAX_WAITING + 5):
        stream.feed(Segment(agent_id="a", turn_id="t", text="x"))
    stream.feed(ENDED)
    found = await collect(stream)
    assert (len(found), found[-1]) == (MAX_WAITING + 1, ENDED)
    assert stream.segments_left_out == 5


async def test_a_closed_stream_gives_out_what_it_has() -> None:
    closed: list[EventStream] = []
    stream = EventStream(on_close=closed.append)
    stream.feed(STARTED)
    async with stream:
        pass
    stream.feed(ENDED)
    stream.close()
    assert await collect(stream) == [STARTED]
    assert closed == [stream]


async def test_what_begins_a_stream_is_awaited_once_with_the_first_event() -> None:
    begun: list[EventStream] = []

    async def begin(stream: EventStream) -> None:
        begun.append(stream)
        stream.feed(ENDED)

    stream = EventStream(TurnEnded, begin=begin)
    assert begun == []
    assert await collect(stream) == [ENDED]
    assert begun == [stream]
