"""Whatever is posted, by whomever, and whatever fails or dies meanwhile: it enters the log once.

Stories of several managers over one place: each posts, opens, has turns, is cut off from the store, or
gives way to another. In the end, every post that was acknowledged stands in the log exactly
once, in order, and one that was not stands there at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import example, given, settings, strategies as st

from perdure import Autosave, LeaseOptions, Message, SessionManager, Shutdown, connect
from perdure.errors import PerdureError
from perdure.records.keys import SessionKey
from perdure.session.session import Session
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import SwitchedStore

KEY = SessionKey("agent")
POSTS = 8
MANAGERS = 2
OPTIONS: dict[str, Any] = {
    "shutdown": Shutdown(signals=False, deadline=0.2, turn_grace=0.05, hard_grace=0.05),
    "lease": LeaseOptions(heartbeat=0.02, ttl=0.2),
    "autosave": Autosave(debounce=0.01, max_delay=0.02),
}

managers = st.integers(0, MANAGERS - 1)
faults = st.tuples(
    st.just("fail"),
    managers,
    st.sampled_from(["enqueue", "receive", "append_many", "ack", "acquire", "heartbeat"]),
    st.sampled_from(["transient", "in_doubt_lost", "in_doubt_applied"]),
)
steps = st.one_of(
    st.tuples(st.just("post"), managers, st.integers(0, POSTS - 1)),
    st.tuples(st.just("open"), managers),
    st.tuples(st.just("turn"), managers),
    st.tuples(st.just("rest"), managers),
    st.tuples(st.just("die"), managers),
    faults,
)


@dataclass
class Place:
    """One process of the story."""

    store: SwitchedStore
    sessions: SessionManager
    session: Session | None = None


@dataclass
class Story:
    """What has happened so far."""

    backing: MemoryBacking = field(default_factory=MemoryBacking)
    places: list[Place] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    done: list[int] = field(default_factory=list)
    """Posts that were acknowledged, in the order in which they first were."""
    unsure: set[int] = field(default_factory=set)
    """Posts whose first try failed: they may lie further ahead than their acknowledgment."""

    async def begin(self) -> Place:
        store = SwitchedStore(MemoryStore(backing=self.backing))
        return Place(store, await connect(store, **OPTIONS))

    async def step(self, what: str, at: int, *rest: Any) -> None:
        place = self.places[at]
        try:
            with anyio.move_on_after(2):
                await getattr(self, what)(place, *rest)
        except PerdureError:
            place.session = None

    async def post(self, place: Place, number: int) -> None:
        if number not in self.done:
            if number in self.tried:
                self.unsure.add(number)
            self.tried.add(number)
        message = Message.user(str(number))
        await place.sessions.post(KEY.agent, message, key=f"key {number}")
        if number not in self.done:
            self.done.append(number)

    async def open(self, place: Place) -> None:
        place.session = await place.sessions.open(KEY.agent)

    async def turn(self, place: Place) -> None:
        if place.session is not None:
            async with place.session.turn():
                place.session.append(Message.assistant("turn"))

    async def rest(self, place: Place) -> None:
        await anyio.sleep(0.01)

    async def fail(self, place: Place, method: str, how: Any) -> None:
        place.store.fail_next(method, how=how)

    async def die(self, place: Place) -> None:
        place.store.down()
        await place.sessions.aclose(0.0)
        self.places[self.places.index(place)] = await self.begin()

    async def found(self) -> list[int]:
        """Close all, and read what the log has once a last holder has taken the rest."""
        for place in self.places:
            place.store.up()
            await place.sessions.aclose()
        async with connect(MemoryStore(backing=self.backing), **OPTIONS) as sessions:
            session = await sessions.open(KEY.agent)
            while self.backing.sessions[KEY].inbox:
                await anyio.sleep(0.005)
            history = await session.history(limit=10_000)
        texts = [item.value.text for item in history if item.kind == "message"]
        return [int(text) for text in texts if text != "turn"]


async def tell(told: list[Any]) -> None:
    """Play a story, and judge its end."""
    story = Story()
    story.places = [await story.begin() for _ in range(MANAGERS)]
    for step in told:
        await story.step(*step)
    with anyio.fail_after(60):
        found = await story.found()
    assert len(found) == len(set(found)), "something was doubled"
    assert set(story.done) <= set(found), "something was lost"
    assert set(found) <= story.tried, "something came from nowhere"
    sure = [number for number in story.done if number not in story.unsure]
    assert [number for number in found if number in sure] == sure, "the order was lost"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=25))
@example([("post", 0, 0), ("open", 0), ("die", 0)])
@example([("post", 0, 0), ("open", 0), ("die", 0), ("open", 1), ("post", 0, 0)])
@example([("open", 0), ("fail", 0, "ack", "transient"), ("post", 1, 1), ("open", 1)])
@example([("fail", 0, "append_many", "in_doubt_lost"), ("post", 0, 1), ("open", 0), ("die", 0)])
def test_what_is_posted_enters_the_log_once(backend: str, told: list[Any]) -> None:
    anyio.run(tell, told, backend=backend)
