"""`perdure inspect` serves a store's pages on this machine, to who has the address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.cli.conftest import Command
from tests.inspector.conftest import home_of


def test_the_address_shows_the_sessions_and_nothing_is_written(store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    command = [sys.executable, "-m", "perdure", "inspect", str(store), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = httpx.URL(json.loads(server.stdout.readline())["address"])
            assert address.host == "127.0.0.1"
            with httpx.Client(base_url=address.copy_with(query=None)) as http:
                assert http.get("/").status_code == 401
                home = home_of(http.get(address))
                assert "ada" in http.get(home).text
                assert http.get(f"{home}session?agent=ada").status_code == 200
                assert http.get(home, headers={"host": "evil.com"}).status_code == 421
                assert http.get(f"{home}change?change=forget&agent=ada").status_code == 404
            server.send_signal(signal.SIGINT)
            assert server.wait(20) in {130, -signal.SIGINT}
        finally:
            server.kill()
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_an_address_of_no_browser_and_a_store_given_twice_are_refused(
    command: Command, store: Path
) -> None:
    for host in ("0.0.0.0", "::"):
        ran = command("inspect", str(store), "--host", host)
        assert ran.status == 2
        assert "--host" in ran.err
    twice = command("inspect", str(store), "--store", str(store))
    assert twice.status == 2
    assert "given twice" in twice.err


def test_a_store_that_does_not_exist_is_not_made(command: Command, tmp_path: Path) -> None:
    ran = command("inspect", str(tmp_path / "nothing"))
    assert ran.status == 1
    assert not os.path.lexists(tmp_path / "nothing")
