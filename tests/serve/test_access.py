"""Who may do what to a served agent: browsers, tokens, and what errors give away."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import perdure
from perdure import ConfigError, InvalidArgumentError, LeaseHeldError, Message, Shutdown, connect
from perdure.agent import AgentConfig, EchoModel
from perdure.asgi import problem_of
from perdure.errors import SessionQuarantinedError, StoreUnavailableError
from perdure.records.keys import SessionKey
from perdure.serve import Access, AgentServer, Token
from perdure.serve.api import MAX_PAGE_BYTES, Source
from perdure.store import Held as LeaseHeld, Taken, Terms
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.listings import NotedReads

ANN = Token(token="ann-token-0123456789", owners=("ann",))
BOB = Token(token="bob-token-0123456789", owners=("bob",))
BOTH = Token(token="both-token-0123456789", owners=("bob", "ann"))
SEND = {"content-type": "application/json"}
ECHO = AgentConfig(name="ada", model=EchoModel())


@asynccontextmanager
async def serving(
    access: Access | None = None, **options: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with serving_of(ECHO, access=access, **options) as (_, http):
        yield http


@asynccontextmanager
async def serving_of(
    source: Source, store: Any = "memory:", **options: Any
) -> AsyncGenerator[tuple[AgentServer, httpx.AsyncClient], None]:
    server = AgentServer(source, store, shutdown=Shutdown(signals=False), **options)
    async with server.sessions.lifespan():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield server, http


def bearer(token: Token, key: str | None = None) -> dict[str, str]:
    named = {} if key is None else {"idempotency-key": key}
    return {"authorization": f"Bearer {token.token}", **named}


async def test_without_tokens_no_page_of_another_site_runs_a_turn() -> None:
    body = b'{"text": "Hi"}'
    async with serving() as http:
        for headers, status in (
            ({"origin": "https://evil.example", **SEND}, 403),
            ({"origin": "http://localhost:3000", **SEND}, 403),
            ({"origin": "null", "content-type": "text/plain"}, 403),
            ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", **SEND}, 403),
            ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", **SEND}, 403),
            ({"host": "evil.example", "origin": "http://evil.example", **SEND}, 421),
            ({"content-type": "text/plain"}, 415),
            ({"content-type": "application/x-www-form-urlencoded"}, 415),
            ({"content-type": "text/plain; application/json"}, 415),
            ({}, 415),
        ):
            told = await http.post("/agents/a/messages", content=body, headers=headers)
            assert (told.status_code, told.json()["status"]) == (status, status), headers
        crossing = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await http.get("/agents", headers=crossing)).status_code == 403
        preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        told = await http.options("/agents/a/messages", headers=preflight)
        assert told.status_code == 403
        assert "access-control-allow-origin" not in told.headers
        assert (await http.get("/agents")).json()["agents"] == []
        for headers in (
            SEND,
            {"content-type": "Application/JSON; charset=utf-8"},
            {"origin": "http://localhost", "sec-fetch-site": "same-origin", **SEND},
        ):
            told = await http.post("/agents/a/messages", content=body, headers=headers)
            assert told.status_code == 200, headers


async def test_a_site_that_is_named_sends_from_a_browser_with_its_token() -> None:
    app = "https://app.example"
    token = {"authorization": f"Bearer {ANN.token}"}
    async with serving(Access([ANN], origins=[app])) as http:
        asked = {
            "origin": app,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,idempotency-key",
        }
        told = await http.options("/agents/a/messages", headers=asked)
        assert told.status_code == 200
        assert told.headers["access-control-allow-origin"] == app
        assert "access-control-allow-credentials" not in told.headers
        sent = {"origin": app, "sec-fetch-site": "cross-site", **token}
        told = await http.post("/agents/a/messages", json={"text": "Hi"}, headers=sent)
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, app)
        told = await http.get("/agents", headers={"origin": app})
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (401, app)
        for headers in (asked, sent):
            other = {**headers, "origin": "https://evil.example"}
            method = "OPTIONS" if headers is asked else "GET"
            told = await http.request(method, "/agents", headers=other)
            assert told.status_code == 403
            assert "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": ["*"]},
        {"origins": ["*"]},
        {"origins": ["app.example"]},
        {"origins": ["https://app.example/path"]},
        {"tokens": [ANN], "origins": ["https://*.example"]},
    ],
)
def test_what_lets_every_page_in_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match="--allow-"):
        Access(**options)


def test_with_tokens_any_host_and_any_site_may_be_let_in() -> None:
    assert Access([ANN], hosts=["*"], origins=["*"]).origins == ("*",)


def test_a_token_for_figures_opens_nothing_else() -> None:
    assert repr(Token(token="x" * 16, metrics=True)) == "Token(metrics=True)"
    for more in ({"tenant": "acme"}, {"owners": ("ann",)}):
        with pytest.raises(InvalidArgumentError, match="figures"):
            Token(token="x" * 16, metrics=True, **more)


async def test_a_url_that_is_no_text_is_no_id() -> None:
    async with serving() as http:
        for url in ("/agents/%FF", "/agents/%FE/messages", "/agents?prefix=%FF", "/%C3%28"):
            told = await http.get(url)
            assert (told.status_code, told.json()["detail"]) == (400, "the URL is not UTF-8"), url
        told = await http.post("/agents/%ED%A0%80/messages", json={"text": "Hi"})
        assert told.status_code == 400
        told = await http.post("/agents/%C3%A9/messages", json={"text": "Hi"})
        assert told.json()["agent"] == "é"


async def test_head_of_a_stream_ends_and_probes_are_only_read() -> None:
    async with serving() as http:
        await http.post("/agents/a/messages", json={"text": "Hi"})
        told = await http.head("/agents/a/events")
        assert (told.status_code, told.content) == (200, b"")
        assert told.headers["content-type"].startswith("text/event-stream")
        assert (await http.head("/agents/b/events")).status_code == 404
        for path in ("/healthz", "/readyz"):
            assert (await http.head(path)).status_code == 200
            for method in ("CONNECT", "POST", "OPTIONS", "TRACE"):
                told = await http.request(method, path)
                assert (told.status_code, told.headers["allow"]) == (405, "GET, HEAD")


async def test_too_many_requests_are_busy_and_probes_are_answered() -> None:
    async with serving(max_requests=0) as http:
        told = await http.get("/agents")
        assert (told.status_code, told.headers["retry-after"]) == (503, "1")
        assert (await http.get("/healthz")).status_code == 200


async def test_agents_that_nobody_uses_make_room() -> None:
    async with serving(max_requests=2) as http:
        for agent in ("a", "b", "c"):
            told = await http.post(f"/agents/{agent}/messages", json={"text": "Hi"})
            assert told.status_code == 200
        opened = [(await http.get(f"/agents/{agent}")).json()["open"] for agent in ("a", "b", "c")]
        assert opened == [False, True, True]


class Gated:
    """A model that answers when it may."""

    def __init__(self) -> None:
        self.asked, self.may_answer = anyio.Event(), anyio.Event()

    async def stream(self, messages: Any, tools: Any) -> AsyncGenerator[Any, None]:
        self.asked.set()
        await self.may_answer.wait()
        async for piece in EchoModel().stream(messages, tools):
            yield piece


async def test_an_owner_joins_a_turn_that_another_token_began() -> None:
    model = Gated()
    told: list[httpx.Response] = []
    access = Access([ANN, BOB, BOTH])
    async with serving_of(AgentConfig(name="ada", model=model), access=access) as (server, http):
        async with server.sessions.manager.open("a", owner="ann") as session:
            session.append(Message.user("Hello"))
            await session.save()

        async def post(token: Token) -> None:
            body = {"text": "Hi"}
            told.append(
                await http.post("/agents/a/messages", json=body, headers=bearer(token, "1"))
            )

        async with anyio.create_task_group() as group:
            group.start_soon(post, BOTH)
            with anyio.fail_after(10):
                await model.asked.wait()
            group.start_soon(post, ANN)
            await post(BOB)  # behind hers, and refused in a place that she has come past
            assert [one.status_code for one in told] == [404]
            model.may_answer.set()
    assert [one.status_code for one in told[1:]] == [200, 200]
    assert told[1].json() == told[2].json()
    assert not told[1].json()["replayed"]


@pytest.mark.parametrize("keys", [("1", "1"), ("1", "2")])
async def test_an_agent_that_two_make_at_once_is_one_s_alone(keys: tuple[str, str]) -> None:
    arrived = [anyio.Event(), anyio.Event()]
    waiting = iter(arrived)

    async def both_at_once(id: str) -> AgentConfig:
        arrival = next(waiting, None)
        if arrival is not None:
            arrival.set()
            for event in arrived:
                await event.wait()
        return ECHO

    told: list[tuple[int, str]] = []
    async with serving_of(both_at_once, access=Access([ANN, BOB])) as (_, http):

        async def post(token: Token, key: str) -> None:
            body = {"text": "Hi"}
            answer = await http.post("/agents/new/messages", json=body, headers=bearer(token, key))
            told.append((answer.status_code, token.owners[0]))

        async with anyio.create_task_group() as group:
            group.start_soon(post, ANN, keys[0])
            group.start_soon(post, BOB, keys[1])
        _, owner = min(told)
        assert [status for status, _ in sorted(told)] == [200, 404]
        token = ANN if owner == "ann" else BOB
        shown = await http.get("/agents/new/messages", headers=bearer(token))
        assert [message["content"] for message in shown.json()["messages"]] == [
            "Hi",
            "You said: Hi",
        ]
        assert (await http.get("/agents/new", headers=bearer(token))).json()["owner"] == owner


async def test_a_token_that_joins_reads_no_agent_that_another_has_just_made() -> None:
    class Held(DelegatingStore):
        """Gives no session away before it may."""

        def __init__(self) -> None:
            super().__init__(MemoryStore())
            self.may_open = anyio.Event()

        async def acquire(self, key: SessionKey, terms: Terms) -> LeaseHeld | Taken:
            await self.may_open.wait()
            return await super().acquire(key, terms)

    store, told = Held(), dict[str, int]()
    async with serving_of(ECHO, store, access=Access([ANN, BOB, BOTH])) as (_, http):

        async def post(token: Token) -> None:
            sent = bearer(token, "ann's" if token is ANN else "1")
            answer = await http.post("/agents/new/messages", json={"text": "Hi"}, headers=sent)
            told[token.token or ""] = answer.status_code

        async with anyio.create_task_group() as group:
            for token in (ANN, BOTH, BOB):  # the last two would be bob's, if it were not hers
                group.start_soon(post, token)
                await anyio.wait_all_tasks_blocked()
            store.may_open.set()
    assert told == {ANN.token: 200, BOTH.token: 404, BOB.token: 404}


async def test_a_page_of_history_ends_at_a_number_of_bytes() -> None:
    texts = [f"{number} " + "x" * 1_000_000 for number in range(12)]
    texts[5] = "large " + "x" * MAX_PAGE_BYTES
    async with serving_of(ECHO) as (server, http):
        async with server.sessions.manager.open("a") as session:
            session.append(*map(Message.user, texts))
            await session.save()
        pages: list[list[str]] = []
        before: Any = ""
        while before is not None:
            query = {"limit": 200} | ({"before": before} if pages else {})
            told = await http.get("/agents/a/messages", params=query)
            before = told.json()["before"]
            pages.append([message["content"] for message in told.json()["messages"]])
            assert len(told.content) < MAX_PAGE_BYTES + 1000
    assert [len(page) for page in pages] == [6, 1, 5]
    assert [text for page in reversed(pages) for text in page] == texts


async def test_a_request_costs_no_more_memory_than_its_page(tmp_path: Path) -> None:
    async with serving_of(ECHO, f"file:{tmp_path / 'store'}") as (server, http):
        async with server.sessions.manager.open("a") as session:
            session.append(*(Message.user("x" * 1_000_000) for _ in range(16)))
        await session.aclose()
        del session
        tracemalloc.start()
        try:
            for path, most in (("", 1), ("/messages?limit=1", 8), ("/messages?limit=200", 32)):
                tracemalloc.reset_peak()
                began, _ = tracemalloc.get_traced_memory()
                told = await http.get(f"/agents/a{path}")
                assert told.status_code == 200
                _, peak = tracemalloc.get_traced_memory()
                assert peak - began < most * 1_000_000, path
        finally:
            tracemalloc.stop()


async def test_an_error_of_the_agent_s_source_is_a_problem_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def source(id: str) -> AgentConfig:
        raise ValueError(INSIDE)

    async with serving_of(source) as (_, http):
        for method, path in (
            ("GET", "/agents/a"),
            ("GET", "/agents/a/messages"),
            ("GET", "/agents/a/events"),
            ("GET", "/agents?order=id&after=a"),
            ("POST", "/agents/a/messages"),
            ("DELETE", "/agents/a"),
        ):
            caplog.clear()
            body = {"text": "Hi"} if method == "POST" else None
            told = await http.request(method, path, json=body)  # it raises what a server would get
            assert (told.status_code, told.json()["title"]) == (500, "Internal error"), path
            assert told.headers["content-type"] == "application/problem+json"
            (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert record.exc_info is not None
            assert INSIDE in str(record.exc_info[1])


INSIDE = "session_x is held by host-seven pid=4711 chmod=0700 /srv/agents postgresql://ada@db:5432"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LeaseHeldError(INSIDE), 503),
        (StoreUnavailableError(INSIDE), 503),
        (SessionQuarantinedError(INSIDE), 409),
        (perdure.errors.SessionClosedError(INSIDE), 503),
        (perdure.errors.LeaseLostError(INSIDE), 503),
        (perdure.errors.ModelUnavailableError(INSIDE), 503),
        (perdure.errors.ModelError(INSIDE), 502),
        (perdure.errors.ConfigError(INSIDE), 500),
        (perdure.errors.CorruptRecordError(INSIDE), 500),
        (OSError(2, INSIDE), 500),
    ],
)
def test_an_error_tells_a_client_nothing_of_the_inside(error: Exception, status: int) -> None:
    problem = problem_of(error)
    assert problem.status == status
    assert not [word for word in INSIDE.split() if len(word) > 5 and word.encode() in problem.body]
    assert b"OSError" not in problem.body


async def test_what_a_client_is_not_told_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def source(id: str) -> AgentConfig:
        raise StoreUnavailableError(INSIDE)

    server = AgentServer(source, "memory:", shutdown=Shutdown(signals=False))
    async with server.sessions.lifespan():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            told = await http.get("/agents/a")
    assert (told.status_code, told.json()["detail"]) == (503, "try again later")
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert INSIDE in record.getMessage()


async def test_a_list_of_one_owner_s_agents_is_one_question_and_knows_those_in_use() -> None:
    backing = MemoryBacking()
    place = NotedReads(MemoryStore(backing=backing))
    async with (
        connect(MemoryStore(backing=backing), shutdown=Shutdown(signals=False)) as elsewhere,
        serving_of(ECHO, place, access=Access([ANN])) as (_, http),
    ):
        for name in ("a1", "b1", "a2", "b2"):
            session = await elsewhere.open(name, owner="ann" if name[0] == "a" else "bob")
            async with session.turn():
                session.append(Message.user("Hello"))
        place.forget()
        told = (await http.get("/agents", headers=bearer(ANN))).json()["agents"]
        assert [(one["agent"], one["turns"]) for one in told] == [("a2", 1), ("a1", 1)]
        assert [(query.owner, query.limit) for query in place.queries] == [("ann", 51)]
        assert place.read == set()
