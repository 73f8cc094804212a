"""The chat server: streams, owners, retries, metrics; and two of it on PostgreSQL (deep)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Shutdown
from tests.asgi.served import Served, contents, preview

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat_server.py"
UVICORN = "uvicorn chat_server:app --port {port} --log-level warning".split()
LONG = " ".join(str(number) for number in range(40))
ADA, BOB = {"authorization": "Bearer ada-token"}, {"authorization": "Bearer bob-token"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(*UVICORN, store=f"file:{tmp_path_factory.mktemp('example') / 'store'}")
    try:
        yield server
    finally:
        server.close()


def shown(served: Served, chat: str) -> list[str]:
    """Return what a chat's messages say, read beside the server."""

    async def look() -> list[str]:
        async with perdure.connect(served.store, shutdown=Shutdown(signals=False)) as sessions:
            view = await sessions.load(chat)
            return [] if view is None else [message.text for message in view.context()]

    return anyio.run(look)


def test_the_example_is_short() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) < 40
    page = (EXAMPLE.parents[1] / "docs" / "asgi.md").read_text(encoding="utf-8")
    assert f"```python\n{EXAMPLE.read_text(encoding='utf-8')}```\n" in page


def test_an_answer_streams_and_ends_when_it_is_durable(served: Served) -> None:
    events = list(served.post("/chats/tides", "Hello", "1", **ADA))
    assert [event.name for event in events if event.name != "text"] == [
        "turn",
        "message",
        "message",
        "end",
    ]
    assert preview(events) == contents(events)[1] == "You said: Hello "
    assert shown(served, "tides") == ["Hello", "You said: Hello "]


def test_a_retry_gets_the_same_answer_and_doubles_nothing(served: Served) -> None:
    first = list(served.post("/chats/retry", "Hello", "1", **ADA))
    again = list(served.post("/chats/retry", "Hello", "1", **ADA))
    assert [event for event in first if event.name != "text"] == again
    assert shown(served, "retry") == ["Hello", "You said: Hello "]
    headers = {**ADA, "idempotency-key": "1"}
    other = served.client.post("/chats/retry", json={"text": "Another"}, headers=headers)
    assert other.status_code == 422


def test_a_chat_is_its_owner_s_alone(served: Served) -> None:
    list(served.post("/chats/mine", "Hello", "1", **ADA))
    headers = {**BOB, "idempotency-key": "2"}
    assert (
        served.client.post("/chats/mine", json={"text": "Hi"}, headers=headers).status_code == 404
    )
    assert served.client.get("/chats/mine", headers=BOB).status_code == 404
    assert served.client.get("/chats/mine").status_code == 401
    follow = {**ADA, "last-event-id": "0"}
    with served.client.stream("GET", "/chats/mine", headers=follow) as answer:
        lines = answer.iter_lines()
        names = [line for line in (next(lines) for _ in range(18)) if line.startswith("event")]
    assert names == ["event: turn", "event: message", "event: message", "event: end"]


def test_a_disconnect_keeps_the_half_answer_and_a_retry_gives_the_whole_one(
    tmp_path: Path,
) -> None:
    server = Served(*UVICORN, store=f"file:{tmp_path / 'store'}")
    try:
        for event in server.post("/chats/cut", f"{LONG} {LONG} {LONG} {LONG} {LONG}", "1", **ADA):
            if event.name == "text" and "3" in event.data["text"]:
                break
        server.stop()  # the grace of turns is over before that answer is
        whole = f"You said: {LONG} {LONG} {LONG} {LONG} {LONG} "
        question, half = shown(server, "cut")
        assert question in whole
        assert "3" in half
        assert whole.startswith(half)
        assert half != whole
    finally:
        server.close()


def test_a_client_that_comes_back_in_time_continues_where_it_was(served: Served) -> None:
    before = []
    for event in served.post("/chats/back", LONG, "1", **ADA):
        before.append(event)
        if event.name == "text" and "2" in event.data["text"]:
            break
    seen = {"last-event-id": before[-1].id, **ADA}
    after = list(served.post("/chats/back", LONG, "1", **seen))
    assert [event.name for event in before if event.name != "text"] == ["turn", "message"]
    assert [event.name for event in after if event.name != "text"] == ["message", "end"]
    assert preview([*before, *after]) == contents(after)[0] == f"You said: {LONG} "
    offsets = [event.data["offset"] for event in after if event.name == "text"]
    assert offsets[0] == int(before[-1].id.partition(".")[2])


def sample(served: Served, name: str) -> float:
    lines = served.client.get("/metrics").text.splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
    return float(value)


def test_each_worker_shows_what_it_does_itself(served: Served) -> None:
    other = Served(*UVICORN, store=served.store)
    try:
        saves = 'perdure_saves_total{outcome="ok"}'
        before = sample(served, saves)
        list(served.post("/chats/hop", "Hello", "1", **ADA))
        there, here = sample(served, "perdure_open_sessions"), sample(served, saves)
        assert here > before
        assert (sample(other, saves), sample(other, "perdure_open_sessions")) == (0, 0)
        list(other.post("/chats/hop", "And now?", "2", **ADA))
        assert sample(other, saves) > 0
        assert sample(other, "perdure_open_sessions") == 1
        assert sample(served, "perdure_open_sessions") == there - 1  # it was handed over
    finally:
        other.stop()
        other.close()


def test_probes_metrics_and_errors(served: Served) -> None:
    assert served.client.get("/health/readyz").json()["ready"] is True
    assert served.client.get("/health/healthz").status_code == 200
    metrics = served.client.get("/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nperdure_saves_total" in metrics.text
    assert served.client.post("/metrics").status_code == 405
    bad = served.client.post(
        "/chats/tides",
        json={"text": "Hi"},
        headers={"idempotency-key": "2", "last-event-id": "x", **ADA},
    )
    assert (bad.status_code, bad.headers["content-type"]) == (400, "application/problem+json")
