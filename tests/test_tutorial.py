"""The tutorial holds by its text alone: its programs, run in its order, answer what it shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_examples import serving
from tests.source_tree import ROOT

PAGES = sorted((ROOT / "docs" / "tutorial").glob("[1-5]-*.md"))
PROGRAM = re.compile(
    r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def seconds(text: str, name: str) -> int:
    (found,) = re.findall(rf"\b{name}[=: ](\d+)", text)
    return int(found)


def test_the_times_of_a_stop_fit_into_the_time_until_the_kill() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| (\d+) \|$", page, re.MULTILINE)
    *parts, total = [int(row) for row in rows]
    assert sum(parts) == total
    manifests = "".join(re.findall(r"```(?:ini|yaml)\n(.*?)```", page, re.DOTALL))
    assert seconds(manifests, "terminationGracePeriodSeconds:") == total
    assert seconds(manifests, "TimeoutStopSec") == total
    assert f'command: ["sleep", "{parts[0]}"]' in manifests
    assert f"--timeout-graceful-shutdown {parts[1]}" in manifests


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_server_of_the_tutorial_answers_a_retry_with_its_own_answer(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_URL", str(tmp_path / "agents"))
    [page] = [page for page in PAGES if page.name.startswith("4")]
    [(_, code)] = PROGRAM.findall(page.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(compile(code.replace("asyncio.sleep(1)", "asyncio.sleep(0)"), page.name, "exec"), names)
    async with serving(names["app"]) as client:

        async def ask(op: str, text: str) -> tuple[int, Any]:
            answer = await client.post("/agents/bob", json={"op": op, "text": text})
            return answer.status_code, answer.json()

        assert (await client.get("/ready")).json() == {"ready": True}
        first, later = await ask("1", "Hello"), await ask("2", "And now?")
        assert first == (200, {"answer": "That was message 1.", "again": False})
        assert later == (200, {"answer": "That was message 3.", "again": False})
        assert await ask("1", "Hello") == (200, {"answer": "That was message 1.", "again": True})
        status, refused = await ask("1", "Bye")
        assert status == 422
        assert "begun with another request" in refused["error"]


@pytest.mark.deep
def test_the_programs_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    for page in PAGES:
        for name, code in PROGRAM.findall(page.read_text(encoding="utf-8")):
            (tmp_path / name).write_text(code, encoding="utf-8")
    env = {**os.environ, "PERDURE_URL": "agents"}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("notes.py", "My name is Ada") == "You have said: My name is Ada.\n"
    assert run("notes.py", "I like herring").endswith("My name is Ada, I like herring.\n")
    assert "I have ordered two herrings: order 1." in run("assistant.py", "two herrings")

    command = [sys.executable, "assistant.py", "a net"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ordering a net\n"
    shop = tmp_path / "shop.json"
    while "a net" not in shop.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (
        run("assistant.py") == "unfinished: a net\nordering a net\nI have ordered a net: order 2.\n"
    )
    assert list(json.loads(shop.read_text()).values()) == ["two herrings", "a net"]
    assert run("trial.py") == "6 messages after the trial\n4 messages after the rollback\n"
