from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

import perdure
from perdure import Shutdown
from tests.servers import free_port, until_up

EXAMPLES = Path(__file__).parents[2] / "examples"


class Served:
    """The example server under uvicorn, in a process of its own."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.port = free_port()
        command = [sys.executable, "-m", "uvicorn", "server:app", "--port", str(self.port)]
        command += ["--timeout-graceful-shutdown", "10", "--log-level", "warning"]
        env = {**os.environ, "PERDURE_URL": f"file:{store}"}
        self.process = subprocess.Popen(
            command, cwd=EXAMPLES, env=env, stderr=subprocess.PIPE, text=True
        )
        until_up(self.port, self.process)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def stop(self) -> str:
        """End it by SIGTERM; return its stderr."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=240)[1]

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path / "store")
    try:
        yield server
    finally:
        server.close()


def questions(store: Path, agent: str) -> list[str]:
    """Return what the log holds of an agent's user messages."""
    return anyio.run(_questions, store, agent)


async def _questions(store: Path, agent: str) -> list[str]:
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        view = await sessions.load(agent)
        items = [] if view is None else await view.history(limit=10**9)
    return [item.value.text for item in items if item.value.role == "user"]


def test_the_server_answers_as_json_and_knows_the_conversation(served: Served) -> None:
    first = served.client.post("/agents/ada/messages", json={"text": "Hello"}).json()
    again = served.client.post("/agents/ada/messages", json={"text": "Again"}).json()
    assert (first["answer"], again["answer"]) == ("This is answer 1.", "This is answer 2.")
    shown = served.client.get("/agents/ada").json()
    assert [message["content"] for message in shown["messages"]] == [
        "Hello", "This is answer 1.", "Again", "This is answer 2.",
    ]  # fmt: skip
    assert served.client.get("/agents/nobody").status_code == 404


def test_the_server_streams_events_and_says_done_when_it_is_durable(served: Served) -> None:
    with served.client.stream("POST", "/agents/bob/stream", json={"text": "Hi"}) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream")
    pieces = [json.loads(line[6:]) for line in lines[1:-2:2]]
    assert "".join(pieces) == "This is answer 1."
    assert lines[-2:] == ["event: done", 'data: {"turn": "turn_0001"}']
    assert questions(served.store, "bob") == ["Hi"]


def test_a_client_that_goes_away_does_not_take_the_answer_with_it(served: Served) -> None:
    with served.client.stream("POST", "/agents/eve/stream", json={"text": "Hi"}) as answer:
        next(answer.iter_lines())
    for _ in range(1000):
        messages = served.client.get("/agents/eve").json()["messages"]
        if len(messages) == 2:
            break
    assert messages[-1]["content"] == "This is answer 1."


def test_readiness_says_how_saving_goes(served: Served) -> None:
    answer = served.client.get("/ready")
    assert answer.status_code == 200
    assert answer.json() == {"ready": True, "saving": "ok", "oldest_unsaved_age": 0.0}


def test_sigterm_amid_load_loses_nothing_that_was_answered(served: Served) -> None:
    talkers = [Talker(served, f"agent-{number}") for number in range(8)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        assert talker.warm.wait(60)
    said = served.stop()
    for talker in talkers:
        talker.join()
    assert served.process.returncode == -signal.SIGTERM, said
    assert said == ""
    for talker in talkers:
        held = questions(served.store, talker.agent)
        assert [text for text in held if text in talker.answered] == talker.answered


class Talker(threading.Thread):
    """A client that asks until the server is gone: now for JSON, now for a stream."""

    def __init__(self, served: Served, agent: str) -> None:
        super().__init__()
        self.url = f"http://127.0.0.1:{served.port}/agents/{agent}"
        self.agent = agent
        self.answered: list[str] = []
        """The questions whose answer was complete."""
        self.warm = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            try:
                while self.ask(client, f"{self.agent} asks {len(self.answered)}"):
                    if len(self.answered) == 5:
                        self.warm.set()
            except httpx.HTTPError:
                return

    def ask(self, client: httpx.Client, text: str) -> bool:
        kind = "stream" if len(self.answered) % 2 else "messages"
        answer = client.post(f"{self.url}/{kind}", json={"text": text})
        whole = kind == "messages" or "event: done" in answer.text
        if answer.status_code == 200 and whole:
            self.answered.append(text)
        return answer.status_code == 200 and whole
