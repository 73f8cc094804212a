from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure.sync
from tests.asgi.served import Event, Served, contents, events_of, preview

SERVE = "perdure serve tests.serve.agents:slow --port {port}".split()
TOKENS = [
    {"token": "ada-token-0123456789", "tenant": "acme", "owners": ["ada"]},
    {"token": "bob-token-0123456789", "tenant": "acme", "owners": ["bob"]},
    {"token": "all-token-0123456789", "tenant": "acme"},
    {"token": "eve-token-0123456789", "tenant": "other"},
    {"token": "ops-token-0123456789", "metrics": True},
]
LONG = " ".join("abcdefghijklmno")
ANSWER = " ".join(map(str, range(15)))


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-token-0123456789"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("served") / "store"
    server = Served(
        *SERVE, "--max-body", "2000", store=f"file:{store}", PERDURE_TOKENS=json.dumps(TOKENS)
    )
    server.client.headers.update(bearer("ada"))
    try:
        yield server
    finally:
        server.close()


def test_an_answer_comes_as_json_and_its_history_in_pages(served: Served) -> None:
    first = served.client.post(
        "/agents/ada-1/messages", json={"text": "a b c"}, headers={"idempotency-key": "1"}
    )
    assert first.json() | {"version": 0} == {
        "agent": "ada-1", "turn": "1", "text": "0 1 2", "version": 0, "replayed": False,
    }  # fmt: skip
    again = served.client.post(
        "/agents/ada-1/messages", json={"text": "a b c"}, headers={"idempotency-key": "1"}
    )
    assert again.json() | {"version": 0} == {**first.json(), "version": 0, "replayed": True}
    page = served.client.get("/agents/ada-1/messages", params={"limit": 1}).json()
    assert [message["content"] for message in page["messages"]] == ["0 1 2"]
    older = served.client.get("/agents/ada-1/messages", params={"before": page["before"]}).json()
    assert [message["content"] for message in older["messages"]] == ["a b c"]
    assert older["before"] is None


def test_a_stream_is_joined_and_resumed_at_its_last_event(served: Served) -> None:
    before: list[Event] = []
    for event in served.post("/agents/ada-2/messages", LONG, "1"):
        before.append(event)
        if event.name == "text" and " 5" in preview(before):
            break
    after = list(
        served.post("/agents/ada-2/messages", LONG, "1", **{"last-event-id": before[-1].id})
    )
    assert [event.name for event in [*before, *after] if event.name != "text"] == [
        "turn",
        "message",
        "message",
        "end",
    ]
    assert preview([*before, *after]) == contents(after)[0] == ANSWER
    headers = {"last-event-id": before[0].id}
    with served.client.stream("GET", "/agents/ada-2/events", headers=headers) as answer:
        listened = events_of(answer)
        assert [next(listened).name for _ in range(3)] == ["message", "message", "end"]


def routes(agent: str) -> list[tuple[str, str, Any]]:
    return [
        ("POST", f"/agents/{agent}/messages", {"text": "Hi"}),
        ("GET", f"/agents/{agent}/messages", None),
        ("GET", f"/agents/{agent}/events", None),
        ("GET", f"/agents/{agent}", None),
        ("DELETE", f"/agents/{agent}", None),
    ]


def test_nobody_reaches_another_s_agent_by_any_route(served: Served) -> None:
    served.client.post("/agents/ada-3/messages", json={"text": "Hi"})
    everywhere = [
        *routes("ada-3"),
        ("GET", "/agents", None),
        ("GET", "/metrics", None),
        ("GET", "/no", None),
    ]
    for method, path, body in everywhere:
        for wrong in (
            {"authorization": ""},
            {"authorization": "Bearer nonsense"},
            {"authorization": "Basic ada-token-0123456789"},
        ):
            answer = served.client.request(method, path, json=body, headers=wrong)
            assert (answer.status_code, answer.json()["title"]) == (401, "Unauthorized"), path
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["www-authenticate"].startswith("Bearer")
    for method, path, body in routes("ada-3"):
        answer = served.client.request(method, path, json=body, headers=bearer("bob"))
        assert (answer.status_code, answer.json()["detail"]) == (
            404,
            "there is no agent 'ada-3'",
        ), path
    for method, path, _ in routes("ada-3")[1:]:
        assert served.client.request(method, path, headers=bearer("eve")).status_code == 404, path
    assert served.client.get("/agents/ada-3", headers=bearer("all")).json()["owner"] == "ada"
    assert served.client.get("/agents", headers=bearer("eve")).json() == {
        "agents": [],
        "after": None,
    }
    assert served.client.delete("/agents/ada-3").status_code == 204
    assert served.client.get("/agents/ada-3").status_code == 404


def test_another_tenant_s_agent_of_the_same_id_is_another_one(served: Served) -> None:
    served.client.post("/agents/same/messages", json={"text": "Hi"})
    served.client.post("/agents/same/messages", json={"text": "a b"}, headers=bearer("eve"))
    shown = served.client.get("/agents/same/messages", headers=bearer("eve")).json()["messages"]
    assert [message["content"] for message in shown] == ["a b", "0 1"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"url": "/agents/x/messages", "method": "POST", "content": b"x" * 3000}, 413),
        ({"url": "/agents/x/messages", "method": "POST", "content": b"{"}, 400),
        ({"url": "/agents/x/messages", "method": "POST", "json": {"text": "Hi"}, "headers": {"idempotency-key": "x" * 3000}}, 400),
        ({"url": "/agents/x/messages", "method": "PUT"}, 405),
        ({"url": "/agents/kept/messages?limit=0", "method": "GET"}, 400),
        ({"url": "/agents", "method": "GET", "headers": {"host": "evil.example"}}, 421),
        ({"url": "/nowhere", "method": "GET"}, 404),
    ],
)  # fmt: skip
def test_an_error_is_a_problem(served: Served, request_: Any, status: int) -> None:
    served.client.post("/agents/kept/messages", json={"text": "Hi"})
    answer = served.client.request(**request_)
    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"


def test_probes_need_no_token_and_metrics_do(served: Served) -> None:
    assert httpx.get(f"{served.url}/readyz").json()["ready"] is True
    assert httpx.get(f"{served.url}/healthz").status_code == 200
    figures = served.client.get("/metrics", headers=bearer("ops"))
    assert "# TYPE perdure_" in figures.text


def test_figures_of_all_tenants_have_a_token_of_their_own(served: Served) -> None:
    for name in ("ada", "all", "eve"):
        assert served.client.get("/metrics", headers=bearer(name)).status_code == 403, name
    for method, path, body in [*routes("ada-1"), ("GET", "/agents", None)]:
        answer = served.client.request(method, path, json=body, headers=bearer("ops"))
        assert answer.status_code == 403, path


class Reader(threading.Thread):
    """A client that streams an answer until the server ends it."""

    def __init__(self, served: Served, agent: str) -> None:
        super().__init__()
        self.served, self.agent = served, agent
        self.events: list[Event] = []
        self.begun = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for event in self.served.post(
                f"/agents/{self.agent}/messages", LONG, "1", **self.headers()
            ):
                self.events.append(event)
                if event.name == "text":
                    self.begun.set()
        except httpx.HTTPError as error:
            self.error = error

    def again(self, served: Served) -> Reader:
        """Return the same client, which connects to another server with what it has."""
        other = Reader(served, self.agent)
        other.events = self.events
        return other

    def headers(self) -> dict[str, str]:
        return {"last-event-id": self.events[-1].id} if self.events else {}


def restarted(tmp_path: Path, how: signal.Signals) -> tuple[list[Reader], int, float, str]:
    """Stop a server with streams open, start it again, and have the clients come back."""
    store = f"file:{tmp_path / 'store'}"
    first = Served(*SERVE, "--grace", "0.3", store=store)
    readers = [Reader(first, f"agent-{number}") for number in range(2)]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            assert reader.begun.wait(30)
        began = time.monotonic()
        said = first.stop(how)
        took = time.monotonic() - began
        for reader in readers:
            reader.join(30)
    finally:
        first.close()
    second = Served(*SERVE, store=store)
    try:
        back = [reader.again(second) for reader in readers]
        for reader in back:
            reader.start()
        for reader in back:
            reader.join(30)
            shown = second.client.get(f"/agents/{reader.agent}/messages").json()["messages"]
            assert [message["content"] for message in shown if "interrupted" not in message] == [
                LONG,
                ANSWER,
            ]
    finally:
        second.close()
    return back, first.process.returncode, took, said


def assert_whole(reader: Reader) -> None:
    """Nothing was lost, nothing came twice, and the client has the whole answer."""
    stored = [int(event.id) for event in reader.events if event.name not in {"text", "error"}]
    assert stored == sorted(set(stored))
    assert reader.events[-1].name == "end"
    assert preview(reader.events) == ANSWER
    assert contents(reader.events)[-1] == ANSWER
    assert contents(reader.events).count(LONG) == 1


def test_sigterm_with_streams_open_exits_0_and_clients_resume_after_the_restart(
    tmp_path: Path,
) -> None:
    readers, status, took, said = restarted(tmp_path, signal.SIGTERM)
    assert (status, took < 10) == (0, True), said
    assert "Traceback" not in said
    for reader in readers:
        assert reader.error is None
        assert "interrupted" in [event.name for event in reader.events]
        assert_whole(reader)


def test_sigkill_loses_nothing_that_clients_were_told(tmp_path: Path) -> None:
    readers, _, _, _ = restarted(tmp_path, signal.SIGKILL)
    for reader in readers:
        assert_whole(reader)


@pytest.mark.deep
def test_sigterm_ends_in_time_while_the_store_is_down_and_what_is_unsaved_is_kept(
    tmp_path: Path,
) -> None:
    database, text = tmp_path / "agents.db", "c d"
    command = "perdure serve tests.serve.agents:slow --grace 1 --port {port}".split()
    server = Served(*command, store=f"sqlite:///{database}", PERDURE_HOME=str(tmp_path))
    try:
        assert server.client.post("/agents/a/messages", json={"text": "a b"}).status_code == 200
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            request = threading.Thread(
                target=server.client.post,
                args=("/agents/a/messages",),
                kwargs={"json": {"text": text}},
            )
            request.start()
            time.sleep(3)
            said = server.stop()  # grace, what agents have to keep what they have, the deadline
        request.join()
    finally:
        server.close()
    assert "UnsavedChangesError" in said
    with perdure.sync.connect(f"sqlite:///{database}") as sessions, sessions.open("a") as session:
        assert text in [message.text for message in session.context()]
