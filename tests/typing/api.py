"""Code that type checkers must accept: how people use perdure. It is checked, never run."""

# pyright: strict
from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_type

import perdure
from perdure import (
    AcknowledgedRecordsLostError,
    Autosave,
    CheckpointNotFoundError,
    ConfigError,
    ContextOverflowError,
    Contributor,
    CorruptRecordError,
    EncodedRecord,
    EngineOptions,
    FormatError,
    HistoryPrunedError,
    InboxFullError,
    InvalidArgumentError,
    LeaseError,
    LeaseHeldError,
    LeaseLostError,
    LeaseOptions,
    Limits,
    Message,
    MissingExtraError,
    NotStorableError,
    OwnerMismatchError,
    PerdureError,
    ReplayDivergedError,
    ReplayError,
    Session,
    SessionAlreadyActiveError,
    SessionClosedError,
    SessionError,
    SessionKey,
    SessionManager,
    SessionNotFoundError,
    SessionQuarantinedError,
    SessionView,
    Shutdown,
    StalePlanError,
    StoreError,
    StoreUnavailableError,
    TemplateError,
    TooLargeError,
    ToolCall,
    ToolResult,
    Turn,
    TurnReusedError,
    UnknownConfigKeyError,
    UnsavedChangesError,
    UnsupportedVersionError,
    WrongLoopError,
    connect,
    register,
    store_for,
)
from perdure.events import Closed
from perdure.records.records import MESSAGE, Entry
from perdure.restore.report import RestoreStep
from perdure.store import Batch, Outcome, SessionInfo, Status, Store, Taken, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.types import (
    Attachment,
    AutosaveStatus,
    DeadLetter,
    OpaqueValue,
    PartialReply,
    PendingItem,
    PostReceipt,
    Receipt,
    RestoreContext,
    RestoreReport,
    ShutdownReport,
)


@dataclass
class Rating:
    stars: int


def options() -> None:
    assert_type(Autosave(debounce=1, max_delay=5.0), Autosave)
    assert_type(Autosave.server(), Autosave)
    assert_type(Autosave.write_through().debounce, float | None)
    assert_type(Shutdown(deadline=10.0, spill="/var/tmp/spill").spill, str | Literal[False] | None)
    assert_type(LeaseOptions(heartbeat=2, ttl=8.0).ttl, float)
    assert_type(Limits(context_bytes=1000).context_bytes, int)
    assert_type(EngineOptions(hibernate_after=float("inf")).batch_max, int | None)
    assert_type(SessionKey("mia", tenant="acme").session, str)
    assert_type(perdure.__version__, str)


def connecting() -> None:
    assert_type(connect(), SessionManager)
    assert_type(connect("file:~/agents", autosave=None), SessionManager)
    assert_type(connect(Path("agents"), autosave=Autosave(), lease=LeaseOptions()), SessionManager)
    assert_type(connect(MemoryStore(), shutdown=Shutdown(), limits=Limits()), SessionManager)
    assert_type(connect(types=[Rating, register(Rating, tag="rating")]), SessionManager)
    assert_type(store_for("memory:"), Store)


async def a_manager() -> None:
    sessions = await connect(engine=EngineOptions())
    assert_type(sessions, SessionManager)
    async with connect() as entered:
        assert_type(entered, SessionManager)
    session = await sessions.open("mia", session="work", owner="ada", tags=["new"], create=False)
    assert_type(session, Session)
    async with sessions.open("mia", on_held="steal", wait=1, autosave=None) as opened:
        assert_type(opened, Session)
    assert_type(await sessions.load("mia", tenant="acme"), SessionView | None)
    page: list[SessionInfo] = await sessions.list(prefix="m", limit=10)
    page = await sessions.list(after=page[-1])
    assert_type(page[0].updated_at, float | None)
    posted = await sessions.post("mia", Message.user("Hello"), Rating(5), key="k", session="work")
    assert_type(posted, PostReceipt)
    assert_type((posted.key, posted.new), tuple[str, int])
    assert_type(await sessions.exists("mia"), bool)
    assert_type(await sessions.delete("mia", on_held="raise"), bool)
    assert_type(sessions.health().status == "failing", bool)
    assert_type(sessions.on("saved", print), Callable[[], None])
    sessions.on("saved", lambda event: print(event.took))
    sessions.on("opened", lambda event: print(event.report.source))
    sessions.on("before_save", lambda session: session.append(Message.user("Hello")))
    sessions.on("closed", closed)
    sessions.on("before_save", capture)
    sessions.tune(Autosave.server())
    sessions.tune(None, id="a", session="b", tenant="c")
    sessions.tune(id="a")
    assert_type(sessions.autosave, AutosaveStatus)
    assert_type(sessions.autosave.in_force, Autosave | None)
    await sessions.flush(deadline=1)
    sessions.drain()
    report = await sessions.aclose(deadline=5)
    assert_type(report, ShutdownReport)
    assert_type(report.unsaved[0].key, SessionKey)
    report.raise_if_unsaved()


async def capture(session: Session) -> None:
    session.state.set("app", {"step": 1})


async def closed(event: Closed) -> None:
    assert_type((event.key, event.version), tuple[SessionKey, int])


def watch(sessions: SessionManager, event: Literal["quarantined", "lost"]) -> Callable[[], None]:
    return sessions.on(event, lambda facts: print(facts.unsaved))


async def a_session(session: Session) -> None:
    assert_type(session.append(Message.user("Hello"), EncodedRecord("app:rating", b"5")), int)
    assert_type(session.append(Rating(5)), int)
    assert_type(await session.save(), Receipt)
    assert_type((await session.wait_durable(7)).durability, str)
    assert_type(session.describe(title="Trip", tags=["new"], city="Rome"), int)
    assert_type((session.id, session.key, session.epoch), tuple[str, SessionKey, int])
    assert_type((session.version, session.durable_version), tuple[int, int])
    assert_type(session.unsaved_age, float)
    assert_type(session.info.metadata.title, str | None)
    assert_type(session.restore_report, RestoreReport)
    assert_type(session.restore_report.steps, tuple[RestoreStep, ...])
    assert_type(session.context("openai"), list[Any])
    assert_type((await session.history(before=9, limit=3))[0].seq, int)
    assert_type(await session.retract(after=3), int)
    assert_type(session.unsaved()[0].payload, bytes)
    assert_type(await session.discard_unsaved(), int)
    session.retry()
    await session.aclose()


async def what_a_session_keeps(session: Session, view: SessionView) -> None:
    assert_type(session.memory.set("city", "Rome", description="where", pinned=True), int)
    assert_type(await session.memory.get("city", default=None), Any)
    assert_type(await view.memory.keys(), list[str])
    assert_type((await session.memory.entries())[0].key, str)
    assert_type((await view.memory.search("x", scope="task", limit=3))[0].is_loaded, bool)
    assert_type(session.memory.drop("city"), int)
    assert_type(session.state.set("app", {"step": 1}), int)
    assert_type(await view.state.get("app"), Any)
    assert_type(session.state.drop("app"), int)
    assert_type((view.key, view.settled), tuple[SessionKey, bool])
    assert_type(view.restore_report, RestoreReport)
    assert_type((await view.history(limit=1))[0].seq, int)


class Plugin:
    """A contributor of a user's own."""

    name = "plugin"
    version = 1

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def capture(self) -> list[str]:
        return self.seen

    async def restore(self, state: Any, context: RestoreContext) -> None:
        self.seen = list(state)


async def what_others_keep(session: Session) -> None:
    plugin: Contributor = Plugin()
    attachment = await session.attach(plugin)
    assert_type(attachment, Attachment)
    attachment.changed()
    attachment.detach()
    ratings = session.state.typed("rating", Rating)
    assert_type(await ratings.get(), Rating | None)
    assert_type(ratings.set(Rating(5)), int)


async def a_turn(session: Session, send: Callable[[str], Awaitable[None]]) -> None:
    async with session.turn(id="request-7") as turn:
        assert_type(turn, Turn)
        assert_type((turn.id, turn.number, turn.replayed), tuple[str, int, bool])
        await turn.emit("Hello", send)
        await turn.emit("Hello", print)
        with turn.partial("openai", every=0.5) as reply:
            assert_type(reply, PartialReply)
            assert_type(reply.add({"choices": []}), str)
        assert_type((reply.text, reply.complete), tuple[str, bool])
        assert_type(reply.message, Message | None)


def messages() -> None:
    call = ToolCall("call_1", "add", {"a": 1})
    assert_type(Message.system("Be kind."), Message)
    assert_type(Message.user("Look", image_urls=["https://example.org/cat.png"]), Message)
    assert_type(Message.assistant(reasoning="Hm.", tool_calls=[call]), Message)
    assert_type(Message.tool(call.id, {"sum": 1}, name="add"), Message)
    assert_type(Message.user("Hello").text, str)
    assert_type(Message.tool("call_1", error="no").tool_result, ToolResult | None)
    assert_type(EncodedRecord("app:rating", b"5").payload, bytes)


def is_unknown(value: object) -> bool:
    return isinstance(value, OpaqueValue)


def errors_are_one_tree() -> None:
    try:
        options()
    except LeaseHeldError as error:
        assert_type(error.facts, dict[str, object])
    except (LeaseLostError, LeaseError) as error:
        lease: LeaseError = error
        raise lease from None
    except ContextOverflowError as error:
        overflow: ContextOverflowError = error
        raise overflow from None
    except (InvalidArgumentError, CheckpointNotFoundError) as error:
        wrong: ValueError | LookupError = error
        print(wrong, error.facts)
    except (HistoryPrunedError, StalePlanError) as error:
        print(error.facts)
    except (MissingExtraError, TemplateError, UnknownConfigKeyError, ConfigError) as error:
        config: ConfigError = error
        raise config from None
    except (
        AcknowledgedRecordsLostError,
        StoreUnavailableError,
        InboxFullError,
        TooLargeError,
        NotStorableError,
        StoreError,
    ) as error:
        store: StoreError = error
        raise store from None
    except (CorruptRecordError, UnsupportedVersionError, FormatError) as error:
        form: FormatError = error
        raise form from None
    except (ReplayDivergedError, ReplayError) as error:
        replay: ReplayError = error
        raise replay from None
    except (
        OwnerMismatchError,
        SessionAlreadyActiveError,
        SessionClosedError,
        SessionNotFoundError,
        SessionQuarantinedError,
        TurnReusedError,
        UnsavedChangesError,
        WrongLoopError,
        SessionError,
    ) as error:
        everything: PerdureError = error
        raise everything from None


async def a_store(store: Store) -> list[Outcome]:
    key = SessionKey(agent="mia", session="default", tenant="acme")
    holder = await store.holder(key)
    grant = await take_after(store, key, after=holder.epoch if holder else 0)
    assert_type(grant, Taken)
    entries = (Entry(MESSAGE, b'{"role":"user"}'), Entry(kind=MESSAGE, payload=b"{}", end=True))
    batch = Batch(key=key, epoch=grant.epoch, first=grant.head + 1, records=entries)
    async for chunk in store.read_log(key, after=0, limit=10):
        assert_type(chunk.records[0].seq, int)
    outcomes = await store.append_many([batch])
    assert_type(outcomes[0].status, Status)
    return outcomes


async def the_stores() -> None:
    for store in (FileStore("~/agents"), FileStore(), MemoryStore(backing=MemoryBacking())):
        await a_store(store)


async def undelivered(sessions: SessionManager) -> list[bytes]:
    letters: tuple[DeadLetter, ...] = await sessions.dead_letters("ada")
    items: list[PendingItem] = [letter.item for letter in letters]
    return [item.payload for item in items]
