"""A newer release that changes the format beneath a running program, which then says so."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from perdure import LeaseOptions, Message, SessionQuarantinedError, Shutdown, connect
from perdure.errors import UnsupportedVersionError
from perdure.stores.sqlite import SqliteStore

NEWER = 99


def changed_to(path: Path, format_: int) -> int:
    """Give a database another format, as a release with one does; return the one that it had."""
    con = sqlite3.connect(path)
    ((before,),) = con.execute("PRAGMA user_version")
    con.execute(f"PRAGMA user_version = {format_}")
    con.commit()
    con.close()
    return int(before)


async def raised(error: type[Exception], act: Callable[[], Awaitable[object]]) -> str:
    """Try until it raises; the next heartbeat finds out at the latest."""
    with anyio.fail_after(60):
        while True:
            try:
                await act()
            except error as told:
                return str(told)
            await anyio.sleep(0.02)


async def test_a_newer_format_is_told_and_what_is_unsaved_is_kept_for_the_newer_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="perdure")
    path, spill = tmp_path / "a.db", str(tmp_path / "spill")
    options = {
        "autosave": None,
        "shutdown": Shutdown(signals=False, spill=spill),
        "lease": LeaseOptions(heartbeat=0.05),
    }
    saved = 0
    async with connect(SqliteStore(path), **options) as sessions:
        session = await sessions.open("ada")
        format_ = changed_to(path, NEWER)

        async def say() -> None:
            nonlocal saved
            session.append(Message.user(str(saved)))
            await session.save()
            saved += 1

        message = await raised(SessionQuarantinedError, say)
        assert "refuses record" in message
        for said in (
            message,
            await raised(UnsupportedVersionError, lambda: sessions.open("b")),
        ):
            assert f"has format {NEWER}, this release reads up to {format_}" in said
            assert "use a newer release of perdure in every process that uses" in said
        assert sessions.health().status != "ok"
    with pytest.raises(UnsupportedVersionError):
        await connect(SqliteStore(path), **options)
    changed_to(path, format_)  # to be the release that knows it
    async with connect(SqliteStore(path), **options) as sessions:
        async with sessions.open("ada") as session:
            assert [one.text for one in session.context()] == [str(n) for n in range(saved + 1)]


async def test_a_database_of_format_3_is_listed_as_of_its_folds_until_it_is_saved(
    tmp_path: Path,
) -> None:
    path, options = tmp_path / "a.db", {"shutdown": Shutdown(signals=False)}
    async with connect(SqliteStore(path), **options) as sessions:
        for name, owner in (("old", "ann"), ("new", "ann"), ("other", "bob"), ("bare", None)):
            async with sessions.open(name, owner=owner, tags=["vip"] * (name == "old")) as session:
                async with session.turn():
                    session.append(Message.user("Hello"))
                session.describe(title=f"The {name} one")
            await session.aclose()
    before = sqlite3.connect(path)
    with before:
        before.execute(
            "UPDATE manifest SET tags = (SELECT coalesce(s.tags, '[]') FROM session AS s "
            "WHERE s.id = manifest.session), owner = (SELECT s.user FROM session AS s "
            "WHERE s.id = manifest.session)"
        )
        for index in ("session_by_use", "session_by_user"):
            before.execute(f"DROP INDEX {index}")
        for column in ("user", "labels", "tags", "turns", "step"):
            before.execute(f"ALTER TABLE session DROP COLUMN {column}")
    before.close()
    changed_to(path, 3)
    async with connect(SqliteStore(path), **options) as sessions:
        (info,) = await sessions.list(owner="ann", tag="vip")
        assert (info.key.agent, info.title, info.turns) == ("old", "The old one", 1)
        newest = [info.key.agent for info in await sessions.list(newest_first=True)]
        assert newest == ["bare", "other", "new", "old"]
        async with sessions.open("old") as session, session.turn():
            session.append(Message.user("Hello again"))
        (info, _) = await sessions.list(newest_first=True, owner="ann")
        assert (info.key.agent, info.title, info.turns) == ("old", "The old one", 2)
