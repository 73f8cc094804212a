"""Code that type checkers must refuse, at each marked line and nowhere else. It is never run.

A mark names mypy's code; pyright has others, and has to complain about the same lines.
"""

# pyright: strict
from __future__ import annotations

import perdure
import perdure.agent
import perdure.restore
import perdure.sync
from perdure import Autosave, Message, SessionManager, connect
from perdure.agent import Agent, AgentConfig, EchoModel
from perdure.errors import LeaseHeldError
from perdure.events import LoopBlocked
from perdure.records.keys import SessionKey
from perdure.session.session import Session
from perdure.store import Store, take_after
from perdure.stores.file import FileStore
from perdure.testing import ManualClock, Sandbox, SwitchedStore, assert_saved

perdure.no_such_name  # error: attr-defined
perdure.agent.no_such_name  # error: attr-defined
perdure.restore.no_such_name  # error: attr-defined

Autosave(2.0)  # error: call-arg
Autosave(debounce="2 s")  # error: arg-type
Autosave(interval=2.0)  # error: call-arg
Autosave(debonce=2.0)  # error: call-arg
Autosave().debounce = 3.0  # error: misc

SessionKey()  # error: call-arg
SessionKey(agent="mia").agent = "leo"  # error: misc
SessionKey(agent=7)  # error: arg-type

LeaseHeldError("held").no_such_fact  # error: attr-defined

connect("memory:", Autosave())  # error: call-arg
connect(autosave=2.0)  # error: arg-type
connect(7)  # error: arg-type
connect().open()  # error: call-arg
connect().open("mia", on_held="wait")  # error: arg-type
connect().open("mia").append(Message.user("Hello"))  # error: attr-defined
connect().on("no_such_event", print)  # error: call-overload
connect().on("saved", lambda event: event.tok)  # error: call-overload
connect().on("before_save", lambda session: session.contxt())  # error: call-overload


def blocked(event: LoopBlocked) -> None: ...


connect().on("saved", blocked)  # error: call-overload
connect().on("loop_blocked", blocked)
perdure.sync.connect().on("saved", lambda event: event.tok)  # error: call-overload
perdure.sync.connect().on("before_save", lambda session: session.contxt())  # error: call-overload


class NotAStore:
    async def head(self, key: SessionKey) -> int:
        return 0


connect(NotAStore())  # error: arg-type


class MySession(Session):  # error: misc
    pass


async def a_session(sessions: SessionManager) -> None:
    async with sessions as again, again.open("mia") as session:
        session.append("Hello").real.no_such_name  # error: attr-defined
        session.context()[-1].txet  # error: attr-defined
        session.version = 7  # error: misc
        session.turn(7)  # error: arg-type
        session.context("no such format")  # error: call-overload
        (await session.save()).version = 7  # error: misc
        (await session.save()).verson  # error: attr-defined
        session.info.metdata  # error: attr-defined
        async with session.turn() as turn:
            turn.replaid  # error: attr-defined
        with session.turn():  # error: attr-defined
            pass
    Message.user("Hello").content = "Bye"  # error: misc
    Message.user()  # error: call-arg
    sessions.tune(autosave=2)  # error: arg-type
    (await sessions.load("mia")).key  # error: union-attr


async def a_store(store: Store, key: SessionKey) -> None:
    await store.acquire(key)  # error: call-arg
    await take_after(store, "mia", after=0)  # error: arg-type
    await store.read_log(key)  # error: misc
    store.capabilities.durability.no_such_name  # error: attr-defined
    store.location = "elsewhere"  # error: misc
    FileStore(7)  # error: arg-type


async def an_agent(sessions: SessionManager) -> None:
    Agent.create("mia", EchoModel())  # error: call-arg
    Agent.create("mia", model=7)  # error: arg-type
    AgentConfig(model=EchoModel())  # error: call-arg
    async with Agent.create("mia", model=EchoModel(), sessions=sessions) as agent:
        await agent.ask(7)  # error: arg-type


def blocking() -> None:
    with connect():  # error: attr-defined
        pass
    perdure.sync.connect().open("mia").save().no_such_name  # error: attr-defined


async def testing(sandbox: Sandbox, clock: ManualClock, store: SwitchedStore) -> None:
    Sandbox(backend="memory:")  # error: call-arg
    Sandbox(autosave=2.0)  # error: arg-type
    await clock.advance("30 s")  # error: arg-type
    store.fail_next("head", how="always")  # error: arg-type
    store.fail_next("head", "transient")  # error: call-arg
    assert_saved(sandbox)  # error: arg-type
