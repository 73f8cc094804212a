"""A server killed under load and started again: what every store on a server has to live through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio
import msgspec

from perdure import EngineOptions, Message, Session, Shutdown, connect
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Record
from perdure.store import Store
from perdure.testing.conformance._kit import read
from tests.servers import LONG

SESSIONS = 12
TURNS = 30
KILL_AFTER = 60
QUICK = EngineOptions(breaker_failures=2, breaker_reset=0.2, backoff_base=0.05, backoff_cap=0.2)


class Server(Protocol):
    """One that dies, and comes back on the same data and port."""

    def kill(self) -> None: ...

    def start(self) -> None: ...


class Chats:
    """Sessions that talk, what each of them said, and what of it was acknowledged."""

    def __init__(self) -> None:
        self.said: dict[str, list[str]] = {f"agent-{n}": [] for n in range(SESSIONS)}
        self.acknowledged: dict[str, list[str]] = {name: [] for name in self.said}
        self.sessions: list[Session] = []
        self.enough = anyio.Event()

    def say(self, session: Session, text: str) -> None:
        session.append(Message.user(f"{session.id} {text}"))
        self.said[session.id].append(f"{session.id} {text}")

    async def chat(self, session: Session) -> None:
        for turn in range(TURNS):
            self.say(session, f"turn {turn}")
            said = list(self.said[session.id])
            await session.save()
            self.acknowledged[session.id] = said
            if sum(map(len, self.acknowledged.values())) >= KILL_AFTER:
                self.enough.set()


async def killed_under_load(
    url: str, server: Server, stored: Callable[[str], list[str]] | None = None
) -> None:
    """Kill the server amid turns, bring it back, and look for everything that was said.

    ``stored`` reads a session's texts behind the store's back, right after the restart.
    """
    chats = Chats()
    failed, recovered = anyio.Event(), anyio.Event()
    async with connect(url, engine=QUICK, shutdown=Shutdown(signals=False)) as sessions:
        sessions.on("save_failed", lambda event: failed.set())
        sessions.on("recovered", lambda event: recovered.set())
        async with anyio.create_task_group() as tasks:
            for name in chats.said:
                chats.sessions.append(await sessions.open(name))
                tasks.start_soon(chats.chat, chats.sessions[-1])
            with anyio.fail_after(LONG):
                await chats.enough.wait()
            server.kill()
            kept = {name: list(texts) for name, texts in chats.acknowledged.items()}
            with anyio.fail_after(LONG):
                await failed.wait()
                for session in chats.sessions:  # who asks for no durability is not kept waiting
                    chats.say(session, "while it was down")
                while sessions.health().breaker == "closed":
                    await anyio.sleep(0.01)
            assert sessions.health().status == "degraded"
            server.start()
            if stored is not None:
                for name, texts in kept.items():
                    assert [text for text in stored(name) if text in texts] == texts
            with anyio.fail_after(LONG):
                await recovered.wait()
    await everything_is_there(url, chats)


async def everything_is_there(url: str, chats: Chats) -> None:
    from perdure import store_for

    store: Store = store_for(url)
    await store.open()
    for name, texts in chats.said.items():
        assert texts_of(await read(store, SessionKey(name))) == texts
        assert set(chats.acknowledged[name]) <= set(texts)
    await store.aclose()


def texts_of(records: list[Record]) -> list[str]:
    """Return what the messages of a log say."""
    decoded = [msgspec.json.decode(one.payload) for one in records if one.kind == MESSAGE]
    return [one["content"] for one in decoded]
