"""A server of the examples, or of `perdure serve`, under uvicorn in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from tests.servers import free_port, until_up

ROOT = Path(__file__).parents[2]


class Event(msgspec.Struct):
    """An event as a client reads it."""

    name: str
    id: str
    data: Any


class Served:
    """A process that serves, and a client of it."""

    def __init__(
        self,
        *command: str,
        store: str,
        port: int | None = None,
        log: Path | None = None,
        **env: str,
    ) -> None:
        self.store, self.port = store, port or free_port()
        words = [sys.executable, "-m", *(word.format(port=self.port) for word in command)]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "examples")])
        settings = {**os.environ, "PERDURE_URL": store, "PYTHONPATH": path, **env}
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("w") as stderr:
            self.process = subprocess.Popen(words, env=settings, stderr=stderr, text=True)
        until_up(self.port, self.process)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> str:
        """End it by a signal; return its stderr, unless that goes to a file."""
        self.process.send_signal(how)
        return self.process.communicate(timeout=60)[1]

    def close(self) -> None:
        """Kill it and its workers: they hold its stderr open."""
        self.client.close()
        if self.process.poll() is None:
            for worker in psutil.Process(self.process.pid).children(recursive=True):
                worker.kill()
        self.process.kill()
        self.process.communicate()

    def post(self, path: str, text: str, key: str, **headers: str) -> Iterator[Event]:
        """Post a message, and yield the events of the answer as they come."""
        sent = {"idempotency-key": key, "accept": "text/event-stream", **headers}
        with self.client.stream("POST", path, json={"text": text}, headers=sent) as answer:
            yield from events_of(answer)


def events_of(answer: httpx.Response) -> Iterator[Event]:
    """Yield a stream's events as they come."""
    assert answer.status_code == 200, answer.read()
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif "event" in fields:
            yield Event(fields["event"], fields.get("id", ""), json.loads(fields["data"]))
            fields = {}
        else:
            fields = {}


def contents(events: list[Event]) -> list[str]:
    """Return the texts of the messages among events."""
    return [event.data["content"] for event in events if event.name == "message"]


def preview(events: list[Event]) -> str:
    """Return the text as a client shows it before it has the message."""
    text = ""
    for event in events:
        if event.name == "text":
            text = text[: event.data["offset"]] + event.data["text"]
    return text
