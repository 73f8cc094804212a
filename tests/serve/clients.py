"""Clients of `perdure serve` that continue over every disconnect, and know what they should have got."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import anyio
import httpx

from tests.asgi.served import Event, contents, preview

QUESTION = "a b c d e f g h i j"
ANSWER = "0 1 2 3 4 5 6 7 8 9"


class Client:
    """One agent's client: asks, and continues over every disconnect until the turn has ended.

    Args:
        url: Where the next request goes.
        agent: Its id.
        tally: Counts disconnects, and requests that were refused for the moment.

    """

    def __init__(self, url: Callable[[], str], agent: str, tally: dict[str, int]) -> None:
        self.url, self.agent, self.tally = url, agent, tally
        self.turns: list[list[Event]] = []
        self.ended: int = 0
        """Turns whose last event has come."""

    async def ask(self, http: httpx.AsyncClient, *, hang_up: bool = False) -> None:
        """Ask once, until the answer's last event has come.

        Args:
            http: Sends the requests.
            hang_up: Whether to leave once in the middle of the answer.

        """
        events: list[Event] = []
        self.turns.append(events)
        key = str(len(self.turns))
        while not (events and events[-1].name == "end"):
            try:
                await self._read(http, key, events, hang_up=hang_up)
            except httpx.HTTPError:
                self.tally["disconnects"] += 1
                await anyio.sleep(0.2)
            if events and events[-1].name in {"error", "interrupted"}:
                await anyio.sleep(0.2)
            hang_up = hang_up and not events
        self.ended += 1

    async def _read(
        self, http: httpx.AsyncClient, key: str, events: list[Event], *, hang_up: bool
    ) -> None:
        url = f"{self.url()}/agents/{self.agent}/messages"
        headers = {"idempotency-key": key, "accept": "text/event-stream"}
        seen = [event.id for event in events if event.id]
        if seen:
            headers["last-event-id"] = seen[-1]
        async with http.stream("POST", url, json={"text": QUESTION}, headers=headers) as answer:
            if answer.status_code == 503:
                self.tally["refused"] += 1
                await anyio.sleep(float(answer.headers["retry-after"]) / 4)
                return
            assert answer.status_code == 200, await answer.aread()
            fields: dict[str, str] = {}
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                    continue
                if "event" in fields:
                    data = json.loads(fields["data"])
                    events.append(Event(fields["event"], fields.get("id", ""), data))
                    if hang_up and fields["event"] == "text":
                        return
                fields = {}

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with what the client got."""
        for events in self.turns:
            stored = [int(event.id) for event in events if event.id and event.name != "text"]
            if stored != sorted(set(stored)):
                yield "doubled"
            # Who was away for the end of the answer gets its message, and not the pieces before.
            if not ANSWER.startswith(preview(events)) or contents(events)[-1] != ANSWER:
                yield "incomplete"

    async def stored_faults(self, http: httpx.AsyncClient) -> list[str]:
        """Return what is wrong with what the store has."""
        url = f"{self.url()}/agents/{self.agent}/messages"
        while (answer := await http.get(url, params={"limit": 200})).status_code == 503:
            await anyio.sleep(0.5)
        texts = [
            shown["content"] for shown in answer.json()["messages"] if "interrupted" not in shown
        ]
        asked = [QUESTION, ANSWER] * len(self.turns)
        return [] if texts == asked[-len(texts) :] else ["store differs"]
