"""``perdure inbox``: list, show, retry and drop, and what `check` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

import perdure
from perdure import Limits, Message, Shutdown
from perdure.cli.app import run

QUIET = Shutdown(signals=False)


@pytest.fixture(params=["file", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = (
        f"file:{tmp_path / 'kept'}" if request.param == "file" else f"sqlite:///{tmp_path / 'x.db'}"
    )
    anyio.run(filled, url)
    return url


async def filled(url: str) -> None:
    """Leave two dead letters of two posts, and one that came."""
    async with perdure.connect(url, shutdown=QUIET) as one:
        await one.post("ada", Message.user("one " + "x" * 3000), key="first")
        await one.post("ada", Message.user("two " + "x" * 3000), key="second")
        await one.post("ada", Message.user("small"), key="small")
    limits = Limits(record_bytes=2000)
    async with perdure.connect(url, shutdown=QUIET, limits=limits) as two:
        await two.open("ada")
        with anyio.fail_after(60):
            while len(await two.dead_letters("ada")) < 2:
                await anyio.sleep(0.05)


def texts(url: str) -> list[str]:
    async def read() -> list[str]:
        async with perdure.connect(url, shutdown=QUIET) as sessions:
            return [message.text[:5] for message in (await sessions.open("ada")).context()]

    return anyio.run(read)


def said(capsys: pytest.CaptureFixture[str], *tokens: str) -> Any:
    capsys.readouterr()
    assert run([*tokens, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_letters_are_listed_shown_retried_and_dropped(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ("--store", url)
    listed = said(capsys, "inbox", *store)["dead_letters"]
    assert sorted(one["post"] for one in listed) == ["first", "second"]
    assert {(one["agent"], one["tries"]) for one in listed} == {("ada", 5)}
    assert "payload" not in listed[0]
    (shown,) = said(capsys, "inbox", "ada", "second", *store)["dead_letters"]
    assert "two xxx" in shown["payload"]
    assert run(["inbox", *store]) == 0
    assert "over the limit" in capsys.readouterr().out
    assert run(["inbox", "ada", "first", *store]) == 0
    assert "one xxx" in capsys.readouterr().out
    assert run(["check", *store]) == 0
    out = capsys.readouterr().out
    assert "2 posted items could not be delivered" in out
    assert said(capsys, "inbox", "ada", "first", "--retry", *store) == {"retried": 1}
    assert texts(url) == ["small", "one x"]
    assert said(capsys, "inbox", "ada", "--drop", "--all", *store) == {"dropped": 1}
    assert said(capsys, "inbox", *store)["dead_letters"] == []
    assert run(["inbox", *store]) == 0
    assert "no dead letters" in capsys.readouterr().out
    assert texts(url) == ["small", "one x"]


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (["ada", "first", "--retry", "--drop"], "exclude each other"),
        (["ada", "--retry"], "takes an id, and the keys of posts or --all"),
        (["--drop", "--all"], "takes an id"),
        (["ada", "first", "--drop", "--all"], "or --all"),
        (["ada", "--all"], "--all goes with"),
        (["ada", "never"], "no dead letter 'never'"),
        (["ada", "never", "--drop"], "no dead letter 'never'"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], why: str
) -> None:
    async def make() -> None:
        async with perdure.connect(f"sqlite:///{tmp_path / 'x.db'}", shutdown=QUIET) as sessions:
            await sessions.open("ada")

    anyio.run(make)
    assert run(["inbox", *tokens, "--store", f"sqlite:///{tmp_path / 'x.db'}"]) == 2
    assert why in capsys.readouterr().err
