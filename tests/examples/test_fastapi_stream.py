from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.asgi.served import Served, contents, preview

EXAMPLE = Path(__file__).parents[2] / "examples" / "fastapi_stream.py"
UVICORN = "uvicorn fastapi_stream:app --port {port} --log-level warning".split()
LONG = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(*UVICORN, store=f"file:{tmp_path_factory.mktemp('example') / 'store'}")
    try:
        yield server
    finally:
        server.close()


def shown(served: Served, agent: str) -> list[str]:
    return [message["content"] for message in served.client.get(f"/agents/{agent}").json()]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40


def test_an_answer_streams_and_ends_when_it_is_durable(served: Served) -> None:
    events = list(served.post("/agents/ada", "Hello", "1"))
    assert [event.name for event in events if event.name != "text"] == [
        "turn",
        "message",
        "message",
        "end",
    ]
    assert preview(events) == contents(events)[1] == "You said: Hello "
    assert shown(served, "ada") == ["Hello", "You said: Hello "]


def test_a_retry_gets_the_same_answer_and_doubles_nothing(served: Served) -> None:
    first = list(served.post("/agents/bob", "Hello", "1"))
    again = list(served.post("/agents/bob", "Hello", "1"))
    assert [event for event in first if event.name != "text"] == again
    assert shown(served, "bob") == ["Hello", "You said: Hello "]


def test_a_disconnect_keeps_the_half_answer_and_a_retry_gives_the_whole_one(served: Served) -> None:
    for event in served.post("/agents/eve", LONG, "1"):
        if event.name == "text" and "one" in event.data["text"]:
            break
    end = time.monotonic() + 30
    while len(kept := shown(served, "eve")) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert kept[0] == LONG
    assert f"You said: {LONG} ".startswith(kept[1])
    assert kept[1] != f"You said: {LONG} "
    assert contents(list(served.post("/agents/eve", LONG, "1"))) == [LONG, f"You said: {LONG} "]
    assert shown(served, "eve") == [LONG, f"You said: {LONG} "]


def test_a_client_that_comes_back_in_time_continues_where_it_was(served: Served) -> None:
    before = []
    for event in served.post("/agents/gus", LONG, "1"):
        before.append(event)
        if event.name == "text" and "two" in event.data["text"]:
            break
    after = list(served.post("/agents/gus", LONG, "1", **{"last-event-id": before[-1].id}))
    assert [event.name for event in before if event.name != "text"] == ["turn", "message"]
    assert [event.name for event in after if event.name != "text"] == ["message", "end"]
    assert preview([*before, *after]) == contents(after)[0] == f"You said: {LONG} "
    offsets = [event.data["offset"] for event in after if event.name == "text"]
    assert offsets[0] == int(before[-1].id.partition(".")[2])


def test_probes_and_errors(served: Served) -> None:
    assert served.client.get("/health/readyz").json()["ready"] is True
    assert served.client.get("/health/healthz").status_code == 200
    bad = served.client.post(
        "/agents/ada", json={"text": "Hi"}, headers={"idempotency-key": "2", "last-event-id": "x"}
    )
    assert (bad.status_code, bad.headers["content-type"]) == (400, "application/problem+json")
