"""Calls that nobody means, and what is said about them."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest

import perdure.sync
from perdure import ConfigError, Message, Session, connect

pytestmark = pytest.mark.anyio


def forget_a_turn_of(session: Session | perdure.sync.Session) -> None:
    session.turn()
    gc.collect()


async def test_a_turn_that_is_never_entered_is_told() -> None:
    async with connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.warns(RuntimeWarning, match=r"of session ada was never entered.*async with"):
            forget_a_turn_of(session)


async def test_nothing_is_told_of_turns_that_were_entered_or_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with connect("memory:") as sessions, sessions.open("ada") as session:
            async with session.turn():
                session.append(Message.user("Hello"))
            with pytest.raises(ConfigError):
                session.turn("")
            gc.collect()


def test_a_blocking_turn_that_is_never_entered_is_told() -> None:
    with perdure.sync.connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.warns(RuntimeWarning, match="never entered"):
            forget_a_turn_of(session)


@pytest.mark.parametrize("name", ["memory", "sqlite", "s3"])
def test_the_name_of_a_store_is_no_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"did you mean '{name}:'"):
        connect(name)
    assert list(tmp_path.iterdir()) == []


async def test_the_cure_for_a_folder_of_that_name_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with connect("file:memory") as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hello"))
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_a_plain_with_names_both_ways() -> None:
    with pytest.raises(TypeError, match=r"async with perdure\.connect.*with perdure\.sync"):
        with connect("memory:"):  # type: ignore[attr-defined]
            pass
