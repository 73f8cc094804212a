"""An application's requests: another owner's sessions, and errors that only the operator reads."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from perdure import Message, Session, Shutdown, TurnReusedError
from perdure.agent import AgentConfig, EchoModel
from perdure.asgi import AppSessions, Channel, Run
from perdure.records.keys import SessionKey
from perdure.serve.access import Access, Token
from perdure.serve.api import AgentServer
from perdure.session.base import Turn
from tests._virtual import BACKENDS, run
from tests.asgi.served import Event, contents, events_of, preview


async def answer(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
    session.append(Message.user("When is low tide?"))
    yield "at noon"


async def late(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
    session.append(Message.user("When is low tide?"))
    yield "at"
    raise ValueError("a bug of the application's")


def application(sessions: AppSessions) -> Any:
    async def stream(request: Request) -> Response:
        user, id = request.path_params["user"], request.path_params["id"]
        how = late if id == "late" else answer
        key, body = request.headers.get("idempotency-key"), await request.body()
        return sessions.stream(id, how, owner=user, turn_id=key, request=body)

    async def plain(request: Request) -> Response:
        user, id = request.path_params["user"], request.path_params["id"]
        key, body = request.headers.get("idempotency-key"), await request.body()
        async with sessions.turn(id, key, owner=user, request=body) as (session, _):
            return JSONResponse(session.id)

    routes = [
        Route("/stream/{user}/{id}", stream, methods=["POST"]),
        Route("/plain/{user}/{id}", plain, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(sessions.middleware)])


@pytest.fixture
async def client() -> AsyncGenerator[httpx.AsyncClient, None]:
    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
    async with sessions.lifespan():
        transport = httpx.ASGITransport(application(sessions))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            yield client


async def test_metrics_count_over_each_lifespan_of_an_application() -> None:
    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
    app = Starlette(routes=[Route("/metrics", sessions.metrics), Mount("/at", sessions.metrics)])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        for saves in (1, 2):
            async with sessions.lifespan():
                async with sessions.turn("tide") as (session, _):
                    session.append(Message.user("When is low tide?"))
                for path in ("/metrics", "/at/"):
                    shown = await client.get(path)
                    assert f'\nperdure_saves_total{{outcome="ok"}} {saves}\n' in shown.text
                    assert "\nperdure_open_sessions 1\n" in shown.text
        assert "\nperdure_open_sessions 0\n" in (await client.get("/metrics")).text
        head = await client.head("/metrics")
        assert (head.status_code, head.content) == (200, b"")
        refused = await client.delete("/metrics")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


async def test_an_answer_may_be_any_iterator_of_text() -> None:
    class Pieces:
        """A client's stream, with nothing to close."""

        def __init__(self) -> None:
            self.left = ["at ", "noon"]

        def __aiter__(self) -> AsyncIterator[str]:
            return self

        async def __anext__(self) -> str:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

    def pieces(session: Session, turn: Turn) -> AsyncIterator[str]:
        turn.append(Message.user("When is low tide?"))
        return Pieces()

    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))

    async def ask(request: Request) -> Response:
        return sessions.stream("tide", pieces)

    app = Starlette(routes=[Route("/", ask, methods=["POST"])])
    async with sessions.lifespan():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            assert "event: end" in (await client.post("/")).text
        view = await sessions.manager.load("tide")
        assert view is not None
        assert [message.text for message in view.context()] == ["When is low tide?", "at noon"]


@pytest.mark.parametrize("road", ["stream", "plain"])
async def test_another_owners_session_is_not_found(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, road: str
) -> None:
    assert (await client.post(f"/{road}/ann/tide")).status_code == 200
    refused = await client.post(f"/{road}/bob/tide")
    assert refused.status_code == 404
    assert refused.json() == {
        "type": "about:blank",
        "title": "Not found",
        "status": 404,
        "code": "SessionNotFoundError",
    }
    assert caplog.records == []


async def test_a_failure_in_a_stream_is_logged_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    told = await client.post("/stream/ann/late")
    assert told.status_code == 200
    assert "event: interrupted" in told.text
    assert "a bug" not in told.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert "a bug of the application's" in str(record.exc_info[1])


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_a_failed_answer_of_a_served_agent_is_logged_once(
    caplog: pytest.LogCaptureFixture, accept: str
) -> None:
    class Broken:
        async def stream(self, messages: Any, tools: Any) -> AsyncGenerator[Any, None]:
            raise ValueError("a bug of the model's")
            yield

    server = AgentServer(
        AgentConfig(name="ada", model=Broken()), "memory:", shutdown=Shutdown(signals=False)
    )
    async with server.sessions.lifespan():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            told = await client.post(
                "/agents/ada/messages", json={"text": "Hi"}, headers={"accept": accept}
            )
    if accept == "application/json":
        assert told.status_code == 500
        assert told.json()["title"] == "Internal error"
    else:
        assert "event: interrupted" in told.text
    assert "a bug" not in told.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert "a bug of the model's" in str(record.exc_info[1])


@pytest.mark.parametrize("road", ["stream", "plain"])
async def test_an_id_that_comes_with_another_body_is_422(
    client: httpx.AsyncClient, road: str
) -> None:
    key = {"idempotency-key": "1"}
    for _ in range(2):
        told = await client.post(f"/{road}/ann/tide", content=b"When?", headers=key)
        assert told.status_code == 200
    told = await client.post(f"/{road}/ann/tide", content=b"Delete it", headers=key)
    assert told.status_code == 422
    assert told.json()["code"] == "TurnReusedError"


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_an_idempotency_key_of_a_served_agent_is_for_one_message(accept: str) -> None:
    server = AgentServer(
        AgentConfig(name="ada", model=EchoModel()), "memory:", shutdown=Shutdown(signals=False)
    )
    headers = {"accept": accept, "idempotency-key": "1"}
    async with server.sessions.lifespan():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            statuses = [
                (
                    await client.post("/agents/ada/messages", json={"text": text}, headers=headers)
                ).status_code
                for text in ("Hello", "Delete my account", "Hello")
            ]
    assert statuses == [200, 422, 200]


async def test_a_running_turn_is_not_joined_by_another_request() -> None:
    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
    go = anyio.Event()

    async def work(run: Run, channel: Channel) -> None:
        await go.wait()

    async with sessions.lifespan():
        key = SessionKey("ada")
        run = sessions.start(key, "1", work, request="When?")
        assert sessions.start(key, "1", work, request="When?") is run
        assert sessions.start(key, "1", work) is run
        with pytest.raises(TurnReusedError):
            sessions.start(key, "1", work, request="Delete it")
        go.set()
        await run.done.wait()


async def test_a_turn_that_runs_is_joined_by_requests_of_its_owner_only() -> None:
    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
    asked, may_answer, times = anyio.Event(), anyio.Event(), 0

    async def gated(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
        nonlocal times
        times += 1
        turn.append(Message.user("When is low tide?"))
        yield "at "
        asked.set()
        await may_answer.wait()
        yield "noon"

    async def ask(request: Request) -> Response:
        owner = request.headers.get("user")
        key, body = request.headers["idempotency-key"], await request.body()
        return sessions.stream("tide", gated, owner=owner, turn_id=key, request=body)

    app = Starlette(routes=[Route("/", ask, methods=["POST"])])
    told: list[httpx.Response] = []
    async with sessions.lifespan():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:

            async def post(body: str, **headers: str) -> httpx.Response:
                answer = await client.post(
                    "/", content=body, headers={"idempotency-key": "1", **headers}
                )
                told.append(answer)
                return answer

            async def anns(**headers: str) -> None:
                await post("When?", **headers)

            async with anyio.create_task_group() as group:
                group.start_soon(partial(anns, user="ann"))
                with anyio.fail_after(10):
                    await asked.wait()
                    for body, key in (("When?", "1"), ("Else?", "1"), ("When?", "2")):
                        refused = await post(body, user="bob", **{"idempotency-key": key})
                        assert (refused.status_code, refused.json()["status"]) == (404, 404)
                told.clear()
                group.start_soon(partial(anns, user="ann"))
                group.start_soon(anns)  # opens any owner's
                await anyio.wait_all_tasks_blocked()
                may_answer.set()
    assert times == 1
    assert [answer.status_code for answer in told] == [200, 200, 200]
    for answer in told:
        events = list(events_of(answer))
        assert contents(events) == ["When is low tide?", "at noon"]
        assert preview(events) in {"at noon", ""}  # a refused request takes no text away


async def test_a_retry_continues_behind_what_its_client_has_of_the_cut_attempt() -> None:
    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
    fails = True

    async def half(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
        turn.append(Message.user("When is low tide?"))
        yield "at"
        if fails:
            raise ConnectionError

    async def ask(request: Request) -> Response:
        return sessions.stream("tide", half, turn_id="1")

    app = Starlette(routes=[Route("/", ask, methods=["POST"])])
    async with sessions.lifespan():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:

            async def post(last: str | None = None) -> list[Event]:
                seen = {} if last is None else {"last-event-id": last}
                return list(events_of(await client.post("/", headers=seen)))

            first = await post()
            assert first[-1].name == "interrupted"
            fails = False
            retry = await post(first[-1].id)
            assert retry[0].name == "retracted"
            assert [event.name for event in [*first, *retry] if event.name != "text"] == [
                *("turn", "message", "message", "interrupted"),
                *("retracted", "turn", "message", "message", "end"),
            ]
            # From any place, each event of the log comes once: from that of a turn that has ended
            # by now, too.
            numbered = [event for event in [*first, *retry] if event.name != "text"]
            for place, event in enumerate(numbered):
                assert await post(event.id) == numbered[place + 1 :]
            (taken,) = numbered[4].data["spans"]
            assert taken == [int(numbered[0].id), int(numbered[3].id)]
            # Who has seen nothing of it gets the attempt that counts.
            for before in (None, "1"):
                assert await post(before) == numbered[5:]


async def test_a_stream_does_not_end_with_the_turn_that_its_own_waited_for() -> None:
    sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
    may_ask = anyio.Event()

    async def late(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
        await may_ask.wait()
        turn.append(Message.user("When is low tide?"))
        yield "at noon"

    async def ask(request: Request) -> Response:
        return sessions.stream("tide", late, turn_id=request.headers["idempotency-key"])

    app = Starlette(routes=[Route("/", ask, methods=["POST"])])
    told: list[list[Event]] = []
    async with sessions.lifespan():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:

            async def post(key: str, last: str) -> None:
                sent = {"idempotency-key": key, "last-event-id": last}
                told.append(list(events_of(await client.post("/", headers=sent))))

            async with anyio.create_task_group() as group:
                for key, last in (
                    ("1", "0"),
                    ("2", "0"),
                    ("2", "3"),
                ):  # 3: the first one's question
                    group.start_soon(post, key, last)
                    await anyio.wait_all_tasks_blocked()
                may_ask.set()
    names = [[event.name for event in events if event.name != "text"] for events in told]
    assert names == [["turn", "message", "message", "end"]] * 3


async def test_what_the_end_of_the_process_cuts_is_told_to_come_again() -> None:
    sessions = AppSessions("memory:", grace=0, shutdown=Shutdown(signals=False))

    async def endless(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
        turn.append(Message.user("When is low tide?"))
        yield "at "
        await anyio.sleep_forever()

    async def nothing(run: Run, channel: Channel) -> None:
        run.begin(turn="1", replayed=False)
        await anyio.sleep_forever()

    async def ask(request: Request) -> Response:
        key = request.headers["idempotency-key"]
        if key == "unsaved":
            return sessions.respond(sessions.start(SessionKey("ebb"), key, nothing))
        return sessions.stream("tide", endless, turn_id=key)

    app = Starlette(routes=[Route("/", ask, methods=["POST"])])
    told: dict[str, httpx.Response] = {}
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://t") as client,
        anyio.create_task_group() as group,
        sessions.lifespan(),
    ):

        async def post(key: str) -> None:
            told[key] = await client.post("/", headers={"idempotency-key": key})

        for key in ("runs", "waits", "unsaved"):
            group.start_soon(post, key)
            await anyio.wait_all_tasks_blocked()
    assert list(events_of(told["runs"]))[-1].name == "interrupted"
    assert (told["waits"].status_code, told["waits"].headers["retry-after"]) == (503, "1")
    (event,) = events_of(told["unsaved"])
    assert (event.name, event.data["status"]) == ("error", 503)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_turn_lingers_from_when_its_last_client_has_left(backend: str) -> None:
    cut_at = 0.0

    async def endless(session: Session, turn: Turn) -> AsyncGenerator[str, None]:
        nonlocal cut_at
        turn.append(Message.user("When is low tide?"))
        yield "at "
        try:
            await anyio.sleep_forever()
        finally:
            cut_at = anyio.current_time()

    async def read(sessions: AppSessions, seconds: float) -> None:
        async def receive() -> None:
            await anyio.sleep_forever()

        async def send(message: Any) -> None:
            pass

        with anyio.move_on_after(seconds):
            response = sessions.stream("tide", endless, turn_id="1", linger=3)
            await response({"method": "POST", "headers": []}, receive, send)

    async def come_and_go() -> tuple[float, float]:
        sessions = AppSessions("memory:", shutdown=Shutdown(signals=False))
        async with sessions.lifespan():
            began = anyio.current_time()
            await read(sessions, 0.3)
            await anyio.sleep(0.3)
            await read(sessions, 2.4)
            left = anyio.current_time()
            while not cut_at:
                await anyio.sleep(0.1)
        return left - began, cut_at - left

    assert run(backend, come_and_go) == (pytest.approx(3.0), pytest.approx(3.0))


async def test_agents_in_use_are_listed_by_last_use_and_only_the_owners() -> None:
    server = AgentServer(
        AgentConfig(name="ada", model=EchoModel()),
        "memory:",
        shutdown=Shutdown(signals=False),
        access=Access(
            [
                Token(token="ann-token-0123456789", owners=("ann", "team")),
                Token(token="bob-token-0123456789", owners=("bob",)),
            ]
        ),
    )
    async with server.sessions.lifespan():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            ann, bob = (
                {"authorization": f"Bearer {name}-token-0123456789"} for name in ("ann", "bob")
            )
            for agent in ("c", "a", "b"):
                for headers, prefix in ((ann, "ann"), (bob, "bob")):
                    url = f"/agents/{prefix}-{agent}/messages"
                    await client.post(url, json={"text": "Hi"}, headers=headers)
            listed, after, pages = [], "", 0
            while after is not None:
                params = {"limit": 2, "after": after}
                page = (await client.get("/agents", params=params, headers=ann)).json()
                listed += page["agents"]
                after, pages = page["after"], pages + 1
            assert [info["agent"] for info in listed] == ["ann-b", "ann-a", "ann-c"]
            assert [info["turns"] for info in listed] == [1, 1, 1]
            assert pages == 2
            params = {"order": "id", "limit": 2}
            by_id = (await client.get("/agents", params=params, headers=ann)).json()
            assert [info["agent"] for info in by_id["agents"]] == ["ann-a", "ann-b"]
            params["after"] = by_id["after"]
            by_id = (await client.get("/agents", params=params, headers=ann)).json()
            assert [info["agent"] for info in by_id["agents"]] == ["ann-c"]
            assert by_id["after"] is None
            for wrong in ({"after": "nonsense"}, {"order": "size"}):
                assert (await client.get("/agents", params=wrong, headers=ann)).status_code == 400
