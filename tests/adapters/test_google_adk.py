"""`PerdureSessionService` against the SDK's own services, its Runner, and other processes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import enum
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st

import perdure
from perdure import InvalidArgumentError, LeaseHeldError, Message, NotStorableError, SessionManager
from perdure.lease import LeaseOptions

pytest.importorskip("google.adk")

from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.base_events_summarizer import BaseEventsSummarizer
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions, EventCompaction
from google.adk.models import BaseLlm, LlmResponse
from google.adk.models.base_llm import LlmCapabilities
from google.adk.platform import time as platform_time
from google.adk.runners import Runner
from google.adk.sessions import (
    BaseSessionService,
    DatabaseSessionService,
    InMemorySessionService,
    Session,
)
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools import ToolContext
from google.genai import types

from perdure.adapters import PerdureSessionService
from perdure.session.internals import kill
from perdure.store import Batch, Outcome
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.adapters import kills
from tests.listings import NotedReads

GUARD = 60
APP, USER = "harbor", "ada"
WHO = {"app_name": APP, "user_id": USER}
HERE = {**WHO, "session_id": "s"}

Connect = Callable[[], AbstractAsyncContextManager[SessionManager]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The SDK runs on asyncio alone."""
    return "asyncio"


STORES = os.environ.get("ADAPTER_STORES", "sqlite,file").split(",")
"""All of them: ``ADAPTER_STORES=sqlite,file,postgres,redis,s3 pytest tests/adapters``."""


@pytest.fixture(params=STORES)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Connect to one store again and again: as several processes would, or after a restart."""
    lease = LeaseOptions(heartbeat=0.1, ttl=20)
    match request.param:
        case "sqlite":
            yield lambda: perdure.connect(f"sqlite:///{tmp_path}/a.db", lease=lease)
        case "file":
            yield lambda: perdure.connect(tmp_path / "store", lease=lease)
        case "postgres":
            from tests.servers.postgres import Postgres

            with Postgres() as server:
                yield lambda: perdure.connect(server.url, lease=lease)
        case "redis":
            from tests.servers.valkey import valkey

            with valkey() as server:
                yield lambda: perdure.connect(server.url, lease=lease)
        case _:
            from tests.servers.s3 import S3Server, store_on

            with S3Server() as server:
                yield lambda: perdure.connect(store_on(server, tmp_path), lease=lease)


@pytest.fixture
async def service() -> AsyncIterator[PerdureSessionService]:
    async with PerdureSessionService.in_memory() as service:
        yield service


@asynccontextmanager
async def services(connect: Connect, count: int) -> AsyncIterator[list[PerdureSessionService]]:
    """Give as many services as there are processes, each with a manager of its own."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            PerdureSessionService(await stack.enter_async_context(connect())) for _ in range(count)
        ]


def said(text: str, author: str = "user", at: float | None = None, **delta: Any) -> Event:
    event = Event(
        author=author,
        invocation_id="i1",
        content=types.Content(
            role="user" if author == "user" else "model", parts=[types.Part(text=text)]
        ),
        actions=EventActions(state_delta=delta),
    )
    if at is not None:
        event.timestamp = at
    return event


def texts(session: Session | None) -> list[str]:
    assert session is not None
    return [
        part.text or "" for e in session.events for part in (e.content and e.content.parts) or []
    ]


def exact(events: Sequence[Event]) -> list[str]:
    return [event.model_dump_json() for event in events]


PARTS: dict[str, list[types.Part]] = {
    "text": [types.Part(text="Where? half \u2028 a\\b\n" * 9)],
    "empty": [],
    "thought": [
        types.Part(text="The harbor matters. " * 9, thought=True, thought_signature=b"\xff\x00"),
        types.Part(text="At noon."),
    ],
    "calls": [
        types.Part(
            function_call=types.FunctionCall(id="a", name="tide", args={"n": None, "d": {}})
        ),
        types.Part(function_call=types.FunctionCall(id="b", name="tide")),
        types.Part(function_call=types.FunctionCall(name="no id")),
    ],
    "results": [
        types.Part(
            function_response=types.FunctionResponse(id="a", name="tide", response={"r": [None]})
        ),
        types.Part(
            function_response=types.FunctionResponse(
                id="b", name="tide", response={"text": "low at noon " * 20}
            )
        ),
    ],
    "bytes": [types.Part(inline_data=types.Blob(mime_type="image/png", data=b"\x00\xff" * 99))],
    "file": [types.Part(file_data=types.FileData(file_uri="gs://a/b", mime_type="a/b"))],
    "code": [types.Part(executable_code=types.ExecutableCode(code="1", language="PYTHON"))],
}

NESTED: Any = 0
for _ in range(180):
    NESTED = [NESTED]

EVENTS = {
    **{
        name: Event(author="model", invocation_id="i", content=types.Content(role="m", parts=parts))
        for name, parts in PARTS.items()
    },
    "none": Event(author="user"),
    "deep": Event(
        author="model",
        content=types.Content(
            parts=[
                types.Part(
                    function_call=types.FunctionCall(id="d", name="deep", args={"v": NESTED})
                )
            ]
        ),
    ),
    "state": Event(
        author="a",
        actions=EventActions(
            state_delta={
                "a": None,
                "b": {"c": [1.5, "x"]},
                "big": 2**70,
                "": 1,
                "deep": NESTED,
                "k/../..": 2,
            }
        ),
    ),
    "compaction": Event(
        author="user",
        actions=EventActions(
            compaction=EventCompaction(
                start_timestamp=1.5,
                end_timestamp=2.25,
                compacted_content=types.Content(parts=[types.Part(text="So far: tides. " * 9)]),
            )
        ),
    ),
    "fields": Event(
        author="a",
        branch="a.b",
        custom_metadata={"x": None},
        long_running_tool_ids={"b", "a"},
        error_code="E",
        output={"of": [None]},
        usage_metadata=types.GenerateContentResponseUsageMetadata(prompt_token_count=7),
        actions=EventActions(transfer_to_agent="b", escalate=True, agent_state={"s": 1}),
    ),
}


async def test_an_event_comes_back_to_the_letter_after_a_restart(connect: Connect) -> None:
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.create_session(**HERE)
        for event in EVENTS.values():
            await service.append_event(session, copy.deepcopy(event))
        held = await service.get_session(**HERE)
    async with connect() as sessions:
        stored = await PerdureSessionService(sessions).get_session(**HERE)
    assert held is not None
    assert stored is not None
    assert exact(held.events) == exact(stored.events) == exact([*EVENTS.values()])
    assert held.state == stored.state == session.state
    assert held._storage_update_marker == stored._storage_update_marker


async def test_events_are_messages_for_everything_else_in_perdure(connect: Connect) -> None:
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.create_session(**HERE)
        for event in [said("Where?"), EVENTS["calls"], EVENTS["results"], said("Noon.", "harbor")]:
            await service.append_event(session, event)
        view = await sessions.load("harbor/ada", session="s")
        assert view is not None
        assert [message.role for message in view.context()] == [
            *("user", "assistant", "tool", "tool", "assistant"),
        ]
        assert [call.id for call in view.context()[1].tool_calls] == ["a", "b"]
        assert view.info.turns == 1
        assert view.info.metadata.owner == USER
        # A long text is stored once.
        await service.append_event(session, said(5000 * "x"))
        (extra,) = (await sessions.open("harbor/ada", session="s")).context()[-1].extra.values()
        assert len(bytes(extra)) < 500


# Against the SDK's own services

KEYS = st.sampled_from(["color", "n/m", "app:fleet", "user:name", "temp:now", "app:é", "user:x/y"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=3,
)
DELTAS = st.dictionaries(KEYS, VALUES, max_size=3)
USERS, IDS = st.sampled_from(["ada", "b/c"]), st.sampled_from(["s", "t"])
APPS = st.sampled_from(["harbor", "har/bor"])
CONFIGS = st.none() | st.builds(
    GetSessionConfig,
    num_recent_events=st.none() | st.integers(0, 4),
    after_timestamp=st.none() | st.integers(1000, 1020).map(float),
)
STEPS = st.one_of(
    st.tuples(st.just("create"), APPS, USERS, IDS, DELTAS),
    st.tuples(st.just("append"), APPS, USERS, IDS, DELTAS, st.sampled_from(sorted(PARTS))),
    st.tuples(st.just("append"), APPS, USERS, IDS, DELTAS, st.sampled_from(sorted(PARTS))),
    st.tuples(st.just("partial"), APPS, USERS, IDS, DELTAS),
    st.tuples(st.just("stale"), APPS, USERS, IDS, DELTAS),
    st.tuples(st.just("delete"), APPS, USERS, IDS),
    st.tuples(st.just("get"), APPS, USERS, IDS, CONFIGS),
    st.tuples(st.just("list"), APPS, st.none() | USERS),
    st.tuples(st.just("user"), APPS, USERS),
    st.tuples(st.just("restart")),
)


async def act(service: BaseSessionService, step: Sequence[Any]) -> Any:
    """Do a step, and return what a caller sees of it."""
    what, *rest = step
    if what == "list":
        listed = await service.list_sessions(app_name=rest[0], user_id=rest[1])
        return [seen(session) for session in listed.sessions]
    app, user, *rest = rest
    who = {"app_name": app, "user_id": user}
    if what == "user":
        return await service.get_user_state(**who)
    key, *rest = rest
    try:
        if what == "create":
            made = await service.create_session(**who, session_id=key, state=rest[0])
            return seen(made)
        if what == "delete":
            return await service.delete_session(**who, session_id=key)
        if what == "get":
            session = await service.get_session(**who, session_id=key, config=rest[0])
            return session and seen(session)
        return await write(service, what, {**who, "session_id": key}, *rest)
    except (AlreadyExistsError, SessionNotFoundError, StaleSessionError) as error:
        return type(error)


async def write(
    service: BaseSessionService, what: str, where: Any, delta: Any, parts: str = "text"
) -> Any:
    now = platform_time.get_time()
    session = await service.get_session(**where)
    if session is None:  # each service says that there is none
        who = {name: where[name] for name in ("app_name", "user_id")}
        session = Session(id=where["session_id"], **who)
    if what == "stale":
        newer = await service.get_session(**where)
        if newer is not None:
            await service.append_event(newer, said("first", at=now - 0.25))
        if isinstance(service, InMemorySessionService):  # it knows no revisions
            return SessionNotFoundError if newer is None else StaleSessionError
    event = Event(
        id=f"{now}",
        author="model",
        partial=what == "partial" or None,
        timestamp=now,
        actions=EventActions(state_delta=delta),
        content=types.Content(role="model", parts=PARTS[parts]),
    )
    returned = await service.append_event(session, event)
    return returned is event, seen(session)


def seen(session: Session) -> dict[str, Any]:
    """Return what two services can agree about: they make ids of their own."""
    said = session.model_dump()
    return {**said, "events": [{**event, "id": None} for event in said["events"]]}


@pytest.mark.parametrize("kind", ["file", pytest.param("sqlite", marks=pytest.mark.deep)])
@settings(max_examples=12)
@given(steps=st.lists(STEPS, min_size=5, max_size=25))
def test_every_operation_does_what_the_sdk_s_services_do(
    steps: list[Any], kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("adk")
    url = f"sqlite:///{folder}/a.db" if kind == "sqlite" else str(folder / "store")
    now = 1000.0

    async def run() -> None:
        nonlocal now
        platform_time.set_time_provider(lambda: now)
        ours, memory = PerdureSessionService(url), InMemorySessionService()
        database = DatabaseSessionService("sqlite+aiosqlite:///:memory:")
        try:
            for step in steps:
                now += 1
                if step[0] == "restart":
                    await ours.aclose()
                    ours = PerdureSessionService(url)
                    continue
                done = await act(ours, step)
                assert done == await act(memory, step), step
                assert done == await act(database, step), step
        finally:
            await ours.aclose()
            await database.close()

    asyncio.run(run())


# What the service promises beyond that


async def test_an_id_that_exists_or_cannot_be_used_is_refused(
    service: PerdureSessionService,
) -> None:
    made = await service.create_session(**WHO)
    assert made.id
    with pytest.raises(AlreadyExistsError, match=made.id):
        await service.create_session(**WHO, session_id=made.id)
    with pytest.raises(InvalidArgumentError, match="control character"):
        await service.create_session(**WHO, session_id="a\nb")
    with pytest.raises(InvalidArgumentError, match="no session manager"):
        PerdureSessionService(7)  # type: ignore[arg-type]
    assert await service.get_session(**WHO, session_id="other") is None
    await service.delete_session(**WHO, session_id="other")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_what_could_not_be_read_back_is_refused_and_nothing_is_stored(
    service: PerdureSessionService,
) -> None:
    session = await service.create_session(**HERE)
    odd = EventActions.model_construct(artifact_delta={"map": "secret"})
    event = Event(author="a")
    event.actions = odd
    with pytest.raises(NotStorableError, match="could never be read back") as refused:
        await service.append_event(session, event)
    assert "secret" not in str(refused.value)
    stored = await service.get_session(**HERE)
    assert stored is not None
    assert stored.events == session.events == []


async def test_what_is_no_json_is_refused_and_nothing_is_stored(
    service: PerdureSessionService,
) -> None:
    session = await service.create_session(**HERE)
    odd = types.FunctionResponse(id="a", name="tide", response={"v": object()})
    event = Event(author="a", content=types.Content(parts=[types.Part(function_response=odd)]))
    with pytest.raises(NotStorableError, match=r"the object at .*response\.v is not JSON"):
        await service.append_event(session, event)
    with pytest.raises(NotStorableError, match="deep"):
        await service.append_event(session, said("x", a=[[[NESTED]]]))
    with pytest.raises(NotStorableError, match="deep"):
        await service.append_event(session, said("x", **{"user:a": [[[NESTED]]]}))
    with pytest.raises(NotStorableError, match="deep"):
        await service.create_session(**WHO, state={"a": [[[NESTED]]]})
    assert await service.get_user_state(**WHO) == {}
    assert texts(await service.get_session(**HERE)) == []
    assert session.events == []


ODD = {
    "nan": float("nan"),
    "deep": [{"a": float("-inf")}],
    "half": "a \ud83d",
    "mine": {"perdure_json": "1"},
    "user:nan": float("inf"),
    "user:": "no name",
    "app:": {"half": "\udc00"},
    "app:perdure:key": None,
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_numbers_and_characters_that_json_lacks_come_back(connect: Connect) -> None:
    part = types.Part(text="half \ud83d")
    call = types.FunctionCall(id="a", name="f", args={"x": float("nan"), "s": "\udc00", "n": None})
    parts = [part, types.Part(function_call=call), types.Part(text="whole \U0001f600")]
    parts.append(types.Part(inline_data=types.Blob(data=b"\xff\x00", mime_type="a/b")))
    event = Event(author="a", content=types.Content(role="model", parts=parts))
    event.actions.state_delta = dict(ODD)
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.create_session(**HERE, state=ODD)
        assert repr(sorted(session.state.items())) == repr(sorted(ODD.items()))
        await service.append_event(session, event)
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        found = await service.get_session(**HERE)
        assert found is not None
        assert repr(sorted(found.state.items())) == repr(sorted(ODD.items()))
        assert repr(found.events) == repr([event])
        await service.append_event(found, event)  # it is the same, so it is stored once
        await service.append_event(found, said("more"))
        (listed,) = (await service.list_sessions(**WHO)).sessions
        assert repr(sorted(listed.state.items())) == repr(sorted(ODD.items()))
        assert repr(await service.get_user_state(**WHO)) == repr(
            {"nan": float("inf"), "": "no name"}
        )
        view = await sessions.load("harbor/ada", session="s")
        assert view is not None
        assert len(view.context()) == 2
        assert view.context()[0].text == "half ?whole \U0001f600"


async def test_a_class_that_comes_back_as_json_is_told_at_the_write(
    service: PerdureSessionService, caplog: pytest.LogCaptureFixture
) -> None:
    class Color(enum.Enum):
        RED = "r"

    session = await service.create_session(**HERE)
    await service.append_event(session, said("x", paint=[{"top": Color.RED}], plain=(1, 2)))
    await service.append_event(session, said("x", tool={"run": print}))
    ours = [each.getMessage() for each in caplog.records if each.name.startswith("perdure")]
    assert [line.partition(" is stored")[0] for line in ours] == [
        f"a {Color.__qualname__} at state.paint[0].top",
        "a builtin_function_or_method at state.tool.run",
    ]


MANY: int = 17 * 1024 * 1024


@pytest.mark.deep
async def test_what_is_larger_than_a_record_is_in_blobs(connect: Connect) -> None:
    event = said("x" * MANY, large="y" * MANY, small=1, **{"user:large": "z" * MANY})
    event.actions.state_delta |= {f"k{number}": f"{number}" * 1_100_000 for number in range(10)}
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.create_session(**HERE, state={"begin": "b" * MANY})
        await service.append_event(session, event)
        await service.append_event(session, said("after"))
        assert session.state["large"] == "y" * MANY
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        found = await service.get_session(**HERE)
        assert found is not None
        assert found.events[0] == event
        assert found.state == {**event.actions.state_delta, "begin": "b" * MANY}
        (listed,) = (await service.list_sessions(**WHO)).sessions
        assert listed.state == found.state
        await service.append_event(found, event)  # it is the same, so it is stored once
        await sessions.fork("harbor/ada", "harbor/bob", session="s", new_session="s")
        forked = await service.get_session(app_name=APP, user_id="bob", session_id="s")
        assert forked is not None
        assert forked.events[0] == event
        assert texts(forked)[1:] == ["after"]


async def test_a_rewind_restores_what_a_session_was_created_with(connect: Connect) -> None:
    given = {"tenant": "acme", "color": "red", "gone": 1}
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.create_session(**HERE, state=given)
        changes: list[dict[str, Any]] = [{"gone": None, "kept": 1}, {"color": "blue", "kept": 2}]
        for number, changed in enumerate(changes):
            event = said("x", **changed).model_copy(update={"invocation_id": f"i{number}"})
            await service.append_event(session, event)
        run = Runner(
            app_name=APP,
            agent=LlmAgent(name="a", model=Script(answers=[])),
            session_service=service,
        )
        await run.rewind_async(user_id=USER, session_id="s", rewind_before_invocation_id="i1")
        found = await service.get_session(**HERE)
        assert found is not None
        assert found.state == {"tenant": "acme", "color": "red", "gone": None, "kept": 1}


async def test_what_a_caller_changes_is_not_given_to_the_next(
    service: PerdureSessionService,
) -> None:
    session = await service.create_session(**HERE, state={"list": [1]})
    await service.append_event(session, said("At noon."))
    for _ in range(2):
        found = await service.get_session(**HERE)
        assert texts(found) == ["At noon."]
        assert found is not None
        assert found.state == {"list": [1]}
        found.events[0].content.parts[0].text = "changed"  # type: ignore[union-attr, index]
        found.events[0].custom_metadata = {"no": object()}
        found.state["list"].append(2)


async def test_an_event_that_is_given_again_is_stored_once(connect: Connect) -> None:
    async with services(connect, 2) as (service, other):
        session = await service.create_session(**HERE)
        event = said("Once.")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await service.append_event(session, event)
        await service.append_event(session, event)
        await service.append_event(session, event.model_copy())
        assert [e.id for e in session.events] == [event.id]
        await service.append_event(session, said("Twice."))
        await other.append_event(session, event)
        assert texts(await other.get_session(**HERE)) == ["Once.", "Twice."]
        # As in the SDK's databases, an id is one event's.
        with pytest.raises(AlreadyExistsError, match=event.id):
            await service.append_event(session, said("No.").model_copy(update={"id": event.id}))
        assert texts(await other.get_session(**HERE)) == ["Once.", "Twice."]


async def test_an_event_of_long_ago_that_is_given_again_is_stored_once(connect: Connect) -> None:
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.create_session(**HERE)
        event = said("Once.")
        await service.append_event(session, event)
        for number in range(150):
            await service.append_event(session, said(f"{number}"))
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.get_session(**HERE)
        assert session is not None
    async with connect() as sessions:  # which has read nothing of it
        service = PerdureSessionService(sessions)
        await service.append_event(session, event)
        again = await service.get_session(**HERE)
        assert again is not None
        assert len(again.events) == 151


async def test_an_overtaken_worker_is_told_who_continues(connect: Connect) -> None:
    async with services(connect, 2) as (first, second):
        mine = await first.create_session(**HERE)
        await first.append_event(mine, said("one"))
        theirs = await second.get_session(**HERE)
        assert theirs is not None
        await second.append_event(theirs, said("two", count=2))
        with pytest.raises(StaleSessionError, match=f"continued by process {os.getpid()} on"):
            await first.append_event(mine, said("lost?", count=1))
        # It did not take the lease back, and nothing of it was stored.
        await second.append_event(theirs, said("three"))
        found = await first.get_session(**HERE)
        assert texts(found) == ["one", "two", "three"]
        assert found is not None
        assert found.state == {"count": 2}
        await first.append_event(found, said("four"))
        assert texts(await second.get_session(**HERE)) == ["one", "two", "three", "four"]


async def test_two_runs_of_one_process_are_told_too(service: PerdureSessionService) -> None:
    session = await service.create_session(**HERE)
    again = await service.get_session(**HERE)
    assert again is not None
    done = await asyncio.gather(
        *(service.append_event(session, said(str(number))) for number in range(5)),
        service.append_event(again, said("other")),
        return_exceptions=True,
    )
    assert [type(each) for each in done] == [Event] * 5 + [StaleSessionError]
    assert "another run of this process" in str(done[-1])
    assert texts(await service.get_session(**HERE)) == texts(session) == list("01234")


async def test_writers_that_load_again_lose_nothing(connect: Connect) -> None:
    async def work(service: PerdureSessionService, name: str) -> None:
        for number in range(4):
            event = said(f"{name}{number}", **{f"user:{name}": number, "app:last": name})
            while True:
                session = await service.get_session(**HERE)
                assert session is not None
                try:
                    await service.append_event(session, event)
                    break
                except StaleSessionError:
                    await asyncio.sleep(0.01)

    async with services(connect, 2) as both:
        await both[0].create_session(**HERE)
        await asyncio.gather(*(work(each, name) for each, name in zip(both, "ab", strict=True)))
        session = await both[0].get_session(**HERE)
    assert session is not None
    written = [f"{name}{number}" for name in "ab" for number in range(4)]
    assert sorted(texts(session)) == written
    assert session.state.pop("app:last") == texts(session)[-1][0]
    assert session.state == {"user:a": 3, "user:b": 3}


async def test_a_process_that_must_not_be_asked_is_not(connect: Connect) -> None:
    async with connect() as one, connect() as two:
        first, second = PerdureSessionService(one), PerdureSessionService(two, on_held="raise")
        await first.append_event(await first.create_session(**HERE), said("one"))
        session = await second.get_session(**HERE)
        assert session is not None
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()}"):
            await second.append_event(session, said("two"))
        await one.aclose()
        await second.append_event(session, said("two"))


async def test_what_is_posted_makes_no_run_stale(connect: Connect) -> None:
    async with services(connect, 2) as (service, other):
        with pytest.raises(SessionNotFoundError):
            await other.post_event(**HERE, event=said("early"))
        session = await service.create_session(**HERE)
        await service.append_event(session, said("one"))
        posted = said("from outside", at=7.5, color="red", **{"user:name": "Ada", "temp:x": 1})
        for _ in range(2):  # a retry posts nothing twice
            await other.post_event(**HERE, event=posted)
        manager = await other._connection.manager()
        await manager.post("harbor/ada", Message.user("plain"), session="s")
        with anyio.fail_after(GUARD):
            while len(texts(await service.get_session(**HERE))) < 3:
                await asyncio.sleep(0.02)
        await service.append_event(session, said("two"))
        found = await other.get_session(**HERE)
        assert texts(found) == ["one", "from outside", "plain", "two"]
        assert found is not None
        assert exact(found.events[1:2]) == exact([posted])
        assert found.state == {"color": "red", "user:name": "Ada"}
        await other.append_event(found, said("three"))


async def test_the_end_of_a_long_log_is_read_backwards(connect: Connect) -> None:
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        session = await service.create_session(**HERE)
        service.durable = False
        for number in range(300):
            await service.append_event(session, said(f"{number} " + 2500 * "x", at=float(number)))
        await service.flush()
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        for config, count in [
            (GetSessionConfig(num_recent_events=3), 3),
            (GetSessionConfig(num_recent_events=150), 150),
            (GetSessionConfig(after_timestamp=290.0), 10),
            (GetSessionConfig(num_recent_events=5, after_timestamp=290.0), 5),
            (GetSessionConfig(num_recent_events=0), 0),
            (None, 300),
        ]:
            found = await service.get_session(**HERE, config=config)
            assert [text.split()[0] for text in texts(found)] == [
                str(number) for number in range(300 - count, 300)
            ]
            assert found is not None
            assert found.last_update_time == 299
        few = await service.get_session(**HERE, config=GetSessionConfig(num_recent_events=1))
        assert few is not None
        await service.append_event(few, said("more"))
        assert len(texts(await service.get_session(**HERE))) == 301


async def test_state_of_users_and_apps_is_in_scopes_that_others_read(connect: Connect) -> None:
    async with connect() as sessions:
        service = PerdureSessionService(sessions)
        state = {"user:name": "Ada", "app:fleet": [1], "own": True}
        await service.create_session(**HERE, state=state)
        assert await sessions.scope("app:harbor").values() == {"fleet": [1]}
        await sessions.scope("user:harbor/ada").set("name", "Ada L.")
        found = await service.get_session(**HERE)
        assert found is not None
        assert found.state == {**state, "user:name": "Ada L."}
        await sessions.forget(owner=USER)
        assert await service.get_session(**HERE) is None
        assert await service.get_user_state(**WHO) == {}
        again = await service.create_session(**HERE)
        assert again.state == {"app:fleet": [1]}


def everywhere(n: int | None) -> dict[str, int]:
    return {} if n is None else {"n": n, "user:n": n, "app:n": n}


class Ends(DelegatingStore):
    """A store whose process ends in a save, before or after it."""

    def __init__(self, store: MemoryStore, nth: int, *, saved: bool) -> None:
        super().__init__(store)
        self._left = nth
        self._saved = saved
        self.ended = anyio.Event()

    async def append_many(self, batches: Sequence[Batch]) -> list[Outcome]:
        self._left -= 1
        if self._left > 0:
            return await self.inner.append_many(batches)
        if self._left == 0 and self._saved:
            await self.inner.append_many(batches)
        self.ended.set()
        await anyio.sleep_forever()
        return []


@pytest.mark.parametrize("saved", [True, False])
async def test_a_crash_at_each_save_leaves_an_event_with_all_that_it_changes_or_nothing(
    saved: bool,
) -> None:
    """Also for another session of the user, and for who writes the state next."""
    nth, is_done = 0, False
    while not is_done:
        nth += 1
        backing = MemoryBacking()
        store = Ends(MemoryStore(backing=backing), nth, saved=saved)
        crashed = await perdure.connect(store, autosave=None)
        ours = PerdureSessionService(crashed)
        given: list[int] = []
        async with anyio.create_task_group() as group:

            async def work(ours: PerdureSessionService = ours, given: list[int] = given) -> None:
                session = await ours.create_session(**HERE, state=everywhere(0))
                given.append(0)
                for number in (1, 2, 3):
                    await ours.append_event(session, said(f"{number}", **everywhere(number)))
                    given.append(number)
                group.cancel_scope.cancel()

            group.start_soon(work)
            await store.ended.wait()
            group.cancel_scope.cancel()
        is_done = not store.ended.is_set()
        await kill(crashed)
        async with perdure.connect(MemoryStore(backing=backing)) as sessions:
            after = PerdureSessionService(sessions)
            found = await after.get_session(**HERE)
            last = None if found is None else len(found.events)
            assert len(given) - 1 <= (-1 if last is None else last) <= len(given)
            assert (found.state if found else {}) == everywhere(last), nth
            other = await after.create_session(**WHO, session_id="other", state={"user:own": 1})
            shared = {key: n for key, n in everywhere(last).items() if ":" in key}
            assert other.state == {**shared, "user:own": 1}
            values = await sessions.scope("user:harbor/ada").values()
            assert values.get("n") == last, nth
            assert list(await sessions.scope("app:harbor").values()) == [] or last is not None
            await after.append_event(other, said("x", **{"app:n": 9}))
            await after.delete_session(**HERE)
            assert (await after.get_session(**WHO, session_id="other")).state["app:n"] == 9  # type: ignore[union-attr]
    assert nth > 8


async def test_a_deleted_session_leaves_what_it_has_changed_elsewhere() -> None:
    backing = MemoryBacking()
    crashed = await perdure.connect(MemoryStore(backing=backing), autosave=None)
    ours = PerdureSessionService(crashed)
    session = await ours.create_session(**HERE)
    await ours.append_event(session, said("x", **{"user:n": 1, "app:n": 1}))
    await kill(crashed)
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        after = PerdureSessionService(sessions)
        assert await sessions.scope("user:harbor/ada").values() == {}  # not yet
        await after.delete_session(**HERE)
        assert await after.get_user_state(**WHO) == {"n": 1}
        assert await sessions.scope("app:harbor").values() == {"n": 1}


async def test_autosave_by_choice_and_flush_at_once(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path, autosave=None) as sessions:
        service = PerdureSessionService(sessions, durable=False)
        session = await service.create_session(**HERE)
        await service.append_event(session, said("soon"))
        durable = await sessions.load("harbor/ada", session="s")
        assert durable is not None
        assert durable.context() == []
        await service.flush()
        durable = await sessions.load("harbor/ada", session="s")
        assert durable is not None
        assert len(durable.context()) == 1
    await PerdureSessionService(tmp_path).flush()  # before its first use


# Runs


class Script(BaseLlm):
    """A model that answers from a list, and remembers what it was asked."""

    model: str = "script"
    answers: list[list[types.Part]]
    asked: list[Any] = []

    @property
    def capabilities(self) -> LlmCapabilities:
        return LlmCapabilities(output_schema_and_tools=False)

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.asked.append(llm_request.contents)
        parts = self.answers.pop(0)
        whole = types.Content(role="model", parts=parts)
        if stream and parts[0].text:
            for word in parts[0].text.split():
                part = types.Content(role="model", parts=[types.Part(text=word)])
                yield LlmResponse(content=part, partial=True)
        yield LlmResponse(content=whole)


def calls(name: str, **arguments: Any) -> list[types.Part]:
    return [types.Part(function_call=types.FunctionCall(name=name, args=arguments))]


def answers(text: str) -> list[types.Part]:
    return [types.Part(text=text)]


def tide(harbor: str, tool_context: ToolContext) -> dict[str, Any]:
    """Say when the tide is low."""
    tool_context.state["asked"] = tool_context.state.get("asked", 0) + 1
    tool_context.state["user:harbor"] = harbor
    tool_context.state["app:asked"] = True
    tool_context.state["temp:draft"] = harbor
    return {"harbor": harbor, "low": None}


def runner(
    service: BaseSessionService, *script: list[types.Part], tools: Sequence[Any] = (tide,)
) -> Runner:
    model = Script(answers=list(script), asked=[])
    agent = LlmAgent(name="pilot", model=model, tools=list(tools), output_key="answer")
    return Runner(app=App(name=APP, root_agent=agent), session_service=service)


async def ask(run: Runner, text: str, *, stream: bool = False) -> list[Event]:
    mode = StreamingMode.SSE if stream else StreamingMode.NONE
    message = types.Content(role="user", parts=[types.Part(text=text)])
    config = RunConfig(streaming_mode=mode)
    return [
        event
        async for event in run.run_async(
            user_id=USER, session_id="s", new_message=message, run_config=config
        )
    ]


def alike(session: Session | None) -> Any:
    """Return a session without what each run makes anew: ids and times."""
    assert session is not None
    drop = {"id", "invocation_id", "timestamp", "thought_signature", "node_info"}

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(each) for key, each in value.items() if key not in drop}
        return [clean(each) for each in value] if isinstance(value, list) else value

    return clean(session.model_dump(mode="json", include={"events", "state"}, exclude_none=True))


TWO_TURNS = [calls("tide", harbor="Oosthaven"), answers("Low at noon."), answers("Yes.")]


async def test_streamed_and_plain_runs_leave_what_the_sdk_s_service_has(connect: Connect) -> None:
    left = []
    async with services(connect, 1) as (service,):
        for each, stream in [(service, False), (service, True), (InMemorySessionService(), True)]:
            await each.delete_session(**HERE)
            await each.create_session(**HERE, state={"seed": 1})
            async with runner(each, *TWO_TURNS) as run:
                events = await ask(run, "When is low tide?", stream=stream)
                assert any(event.partial for event in events) == stream
                await ask(run, "Sure?", stream=stream)
            left.append(alike(await each.get_session(**HERE)))
        del run
    assert left[0] == left[1] == left[2]
    assert left[0]["state"] == {
        "seed": 1,
        "asked": 1,
        "answer": "Yes.",
        "user:harbor": "Oosthaven",
        "app:asked": True,
    }


async def test_a_run_continues_after_a_restart(connect: Connect) -> None:
    for number in range(3):
        async with services(connect, 1) as (service,):
            if not number:
                await service.create_session(**HERE)
            async with runner(service, answers(f"Answer {number}")) as run:
                await ask(run, f"Question {number}")
                assert isinstance(run.agent, LlmAgent)
                model = run.agent.model
    assert isinstance(model, Script)
    asked = [content.parts[0].text for content in model.asked[0]]
    assert asked == ["Question 0", "Answer 0", "Question 1", "Answer 1", "Question 2"]


async def test_a_rewind_leaves_what_the_sdk_s_service_has(service: PerdureSessionService) -> None:
    left = []
    for each in (service, InMemorySessionService()):
        await each.create_session(**HERE)
        async with runner(each, *TWO_TURNS, answers("Again.")) as run:
            await ask(run, "When?")
            second = await ask(run, "Sure?")
            await run.rewind_async(
                user_id=USER,
                session_id="s",
                rewind_before_invocation_id=second[0].invocation_id,
            )
            rewound = await each.get_session(**HERE)
            assert rewound is not None
            assert rewound.state["answer"] == "Low at noon."
            await ask(run, "Really?")
            assert isinstance(run.agent, LlmAgent)
            assert isinstance(run.agent.model, Script)
            last = run.agent.model.asked[-1]
        assert "Sure?" not in str(last)
        session = alike(await each.get_session(**HERE))
        for event in session["events"]:
            event["actions"].pop("rewind_before_invocation_id", None)
        left.append(session)
    assert left[0] == left[1]


SHARED = {"user:harbor": "A", "app:asked": True}


class Sums(BaseEventsSummarizer):
    """A summarizer that counts what it was given."""

    async def maybe_summarize_events(self, *, events: list[Event]) -> Event:
        text = f"{len(events)} events: {events[0].timestamp} to {events[-1].timestamp}"
        content = types.Content(role="model", parts=[types.Part(text=text)])
        compaction = EventCompaction(
            start_timestamp=events[0].timestamp,
            end_timestamp=events[-1].timestamp,
            compacted_content=content,
        )
        return Event(author="user", actions=EventActions(compaction=compaction))


@pytest.mark.filterwarnings("ignore:.EXPERIMENTAL.")
async def test_sessions_that_begin_at_the_last_summary_give_the_model_the_same(
    connect: Connect,
) -> None:
    asked, sizes = [], []
    config = EventsCompactionConfig(summarizer=Sums(), token_threshold=1, event_retention_size=3)
    async with connect() as sessions:
        for name, compacted in [("cut", True), ("whole", False)]:
            service = PerdureSessionService(sessions, tenant=name, compacted=compacted)
            await service.create_session(**HERE, state={"seed": 1})
            script = [calls("tide", harbor="A"), answers("0 " * 60)]
            script += [answers(f"{number} " * 60) for number in range(1, 9)]
            model = Script(answers=script, asked=[])
            agent = LlmAgent(name="pilot", model=model, tools=[tide], output_key="answer")
            app = App(name=APP, root_agent=agent, events_compaction_config=config)
            clock = iter(range(1000, 9000))
            platform_time.set_time_provider(lambda clock=clock: float(next(clock)))
            run = Runner(app=app, session_service=service)
            for number in range(6):
                await ask(run, f"Question {number} " * 20)
            found = await service.get_session(**HERE)
            assert found is not None
            sizes.append(len(found.events))
            assert found.state["asked"] == 1
            # A rewind knows the state of the events that are not read.
            last = found.events[-1].invocation_id or found.events[-2].invocation_id
            await run.rewind_async(user_id=USER, session_id="s", rewind_before_invocation_id=last)
            rewound = await service.get_session(**HERE)
            assert rewound is not None
            assert rewound.state == {"asked": 1, "answer": "4 " * 60, "seed": 1} | SHARED
            await ask(run, "And now?")
            asked.append([str(contents) for contents in model.asked])
    platform_time.reset_time_provider()
    assert sizes[0] < 8 < 14 < sizes[1]
    assert asked[0] == asked[1]
    assert "events: 1" in asked[0][5]


@pytest.mark.parametrize(
    ("second", "kept"),
    [
        (said("plain", "pilot"), 1),
        (EVENTS["calls"], 3),
        (Event(author="pilot", long_running_tool_ids={"a"}), 3),
        (Event(author="pilot", branch="a.b"), 3),
        (Event(author="pilot", isolation_scope="fc"), 3),
        (Event(author="pilot", invocation_id="i2"), 3),
    ],
)
async def test_a_summary_replaces_nothing_that_may_be_asked_for(second: Event, kept: int) -> None:
    async with PerdureSessionService.in_memory(compacted=True) as service:
        session = await service.create_session(**HERE)
        first = said("first", at=1.0, **{"a": 1, "b": 1, "app:x": 1})
        third, last = said("third", "pilot", at=3.0, b=None), said("last", at=4.0)
        for event in [first, second.model_copy(update={"timestamp": 2.0}), third]:
            await service.append_event(session, event)
        await service.append_event(session, last.model_copy(update={"invocation_id": "i2"}))
        whole = await service.get_session(**HERE)
        summary = EventCompaction(
            start_timestamp=1.0, end_timestamp=3.0, compacted_content=types.Content(parts=[])
        )
        event = Event(author="user", actions=EventActions(compaction=summary))
        await service.append_event(session, event)
        found = await service.get_session(**HERE)
        assert found is not None
        assert whole is not None
        base, *events = found.events
        assert exact(events) == exact([*whole.events[-kept:], event])
        assert (base.content, base.timestamp) == (None, 1.0)
        assert base.actions.state_delta == ({"a": 1} if kept == 1 else {"a": 1, "b": 1})
        await service.append_event(found, said("more"))
        all_events = await service.get_session(**HERE, config=GetSessionConfig())
        assert all_events is not None
        assert len(all_events.events) == 6


async def test_a_run_that_is_cancelled_keeps_what_it_has_done(connect: Connect) -> None:
    in_tool = asyncio.Event()

    async def wait(harbor: str) -> str:
        in_tool.set()
        await asyncio.sleep(GUARD)
        return harbor

    async with services(connect, 1) as (service,):
        await service.create_session(**HERE)
        script = [calls("tide", harbor="A"), calls("wait", harbor="B")]
        run = runner(service, *script, tools=[tide, wait])
        task = asyncio.create_task(ask(run, "When?"))
        await asyncio.wait_for(in_tool.wait(), GUARD)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await service.get_session(**HERE)
        assert found is not None
        kinds = [
            [*part.model_dump(exclude_none=True)] for e in found.events for part in e.content.parts
        ]  # type: ignore[union-attr]
        assert [kind[0] for kind in kinds[:4]] == [
            *("text", "function_call", "function_response", "function_call"),
        ]
        assert found.state["asked"] == 1
        async with runner(service, answers("Noon.")) as run:
            await ask(run, "And now?")


# Processes

PROGRAM = """
import asyncio, sys
from google.adk.errors import StaleSessionError
from google.adk.events.event import Event
from google.genai import types
from perdure.adapters import PerdureSessionService
from perdure.session.internals import kill
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import FaultyStore, Crash

HERE = {"app_name": "harbor", "user_id": "ada", "session_id": "s"}

async def main():
    service = PerdureSessionService(sys.argv[1], wait=60)
    name, count = sys.argv[2], int(sys.argv[3])
    for number in range(count):
        text = f"{name} {number}"
        event = Event(id=text, author="user", content=types.Content(parts=[types.Part(text=text)]))
        event.actions.state_delta = {name: number, f"user:{name}": number}
        while True:
            session = await service.get_session(**HERE)
            try:
                await service.append_event(session, event)
            except StaleSessionError:
                await asyncio.sleep(0.01)
                continue
            break
        print(text, flush=True)
    await service.close()

asyncio.run(main())
"""


def worker(url: str, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, url, name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.deep
@pytest.mark.parametrize("url", ["sqlite:///{}/a.db", "{}/store"])
def test_kills_leave_each_event_that_append_event_returned_once(tmp_path: Path, url: str) -> None:
    """Many more: ``python -m tests.adapters.kills google-adk``."""
    kills.run("google-adk", url.format(tmp_path), kills=3)


@pytest.mark.deep
async def test_processes_that_share_a_session_lose_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with PerdureSessionService(url) as service:
        await service.create_session(**HERE)
    workers = [worker(url, name, 12) for name in "xy"]
    for process in workers:
        assert (await anyio.to_thread.run_sync(process.wait, GUARD)) == 0
        assert process.stdout is not None
        process.stdout.close()
    async with PerdureSessionService(url) as service:
        session = await service.get_session(**HERE)
    assert session is not None
    for name in "xy":
        mine = [text for text in texts(session) if text.startswith(name)]
        assert mine == [f"{name} {number}" for number in range(12)]
        assert session.state[name] == session.state[f"user:{name}"] == 11


async def test_a_list_reads_each_session_once_also_while_another_process_uses_it() -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        ours = PerdureSessionService(sessions)
        for number in range(5):
            state = {"n": number, "user:name": "Ada", "app:port": "Harbor"}
            session = await ours.create_session(**WHO, session_id=f"s{number}", state=state)
        await ours.append_event(session, said("Hello", at=session.last_update_time + 1, n=44))
        await ours.create_session(app_name=APP, user_id="bob", session_id="b", state={"n": 7})
        place = NotedReads(MemoryStore(backing=backing))
        async with perdure.connect(place) as others:
            theirs = PerdureSessionService(others)
            await theirs.list_sessions(**WHO)
            place.forget()
            found = (await theirs.list_sessions(**WHO)).sessions
            assert [each.state["n"] for each in found] == [0, 1, 2, 3, 44]
            assert {each.state["user:name"] for each in found} == {"Ada"}
            assert {each.state["app:port"] for each in found} == {"Harbor"}
            assert [each.id for each in found] == [f"s{number}" for number in range(5)]
            assert found[-1].last_update_time == pytest.approx(session.last_update_time, abs=1e-3)
            assert len(place.queries) == 1
            mine = [key for key in place.read if key.agent == f"{APP}/{USER}"]
            assert len(mine) == 5
            every = (await theirs.list_sessions(app_name=APP)).sessions
            assert [each.state.get("user:name") for each in every if each.id == "b"] == [None]
            # What was listed can be continued, unless it was continued since.
            await ours.aclose()
            stale = found[0].model_copy(deep=True)
            await theirs.append_event(found[0], said("And now?"))
            with pytest.raises(StaleSessionError):
                await ours.append_event(stale, said("No"))
