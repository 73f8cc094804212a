"""The application of several workers, as one of them (workers_app.py): what a request is answered.

All of them at once, under ``uvicorn workers_app:app --workers 4``: tests/integration.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure
from perdure import Message, Shutdown
from tests.examples.test_examples import ROOT, serving


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    spec = importlib.util.spec_from_file_location("workers_app", ROOT / "examples/workers_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "workers_app", module)
    spec.loader.exec_module(module)
    return module.app


async def say(client: httpx.AsyncClient, op: str, text: str) -> httpx.Response:
    return await client.post("/sessions/ada", json={"op": op, "text": text})


async def test_a_request_that_is_sent_again_is_answered_and_not_run_again(app: Any) -> None:
    async with serving(app) as client:
        assert (await client.get("/sessions/ada")).status_code == 404
        first = (await say(client, "one", "Hello")).json()
        again = (await say(client, "one", "Hello")).json()
        other = (await say(client, "two", "And now?")).json()
        later = (await say(client, "one", "Hello")).json()
        assert first["answer"] == again["answer"] == later["answer"] != other["answer"]
        assert (await say(client, "one", "Bye")).status_code == 422
        assert [(one["turn"], one["replayed"]) for one in (first, again, other)] == [
            (1, False),
            (1, True),
            (2, False),
        ]
        shown = (await client.get("/sessions/ada")).json()
        assert [message["content"] for message in shown["messages"]] == [
            "Hello",
            "Hello comes after 0 messages.",
            "And now?",
            "And now? comes after 2 messages.",
        ]


async def test_a_session_that_another_process_keeps_is_asked_for_elsewhere(
    app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = perdure.connect(tmp_path / "home", shutdown=Shutdown(signals=False))
    async with manager as other, serving(app) as client:
        async with other.open("ada") as session, session.turn():
            session.append(Message.user("a long turn"))
            opening = app.state.sessions.open
            with monkeypatch.context() as patch:
                impatient = lambda _, id: opening(id, wait=0.05)  # noqa: E731
                patch.setattr(app.state.sessions.__class__, "open", impatient)
                refused = await say(client, "one", "Hello")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "0")
            assert "is held by process" in refused.json()["error"]
        answered = await say(client, "one", "Hello")
        assert answered.json()["turn"] == 2
