"""A SQLite database that is damaged as a whole: found by `check`, mended where REINDEX can."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, Shutdown
from perdure.stores.sqlite.connections import PAGE_BYTES as PAGE
from tests.cli.conftest import Command

IDS = ["ada", "bob", "eve"]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database with three sessions, each in pages of its own."""

    async def fill() -> None:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            for id in IDS:
                async with sessions.open(id) as session:
                    for number in range(8):
                        async with session.turn():
                            session.append(Message.user(f"{id} {number} {'x' * 2000}"))

    path = tmp_path / "kept" / "a.db"
    url = f"sqlite:///{path}"
    anyio.run(fill)
    return path


def lose_rows_of_an_index(path: Path) -> None:
    con = sqlite3.connect(path, isolation_level=None)
    whole = "CREATE UNIQUE INDEX log_by_place ON log (session, first)"
    con.execute("DROP INDEX log_by_place")
    con.execute(f"{whole} WHERE first <> 1")
    con.execute("PRAGMA writable_schema = ON")
    con.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'log_by_place'", (whole,))
    con.close()


def zero(path: Path, page: int) -> None:
    data = bytearray(path.read_bytes())
    data[(page - 1) * PAGE : page * PAGE] = bytes(PAGE)
    path.write_bytes(data)


def root_of(path: Path, name: str) -> int:
    con = sqlite3.connect(path)
    (page,) = con.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    con.close()
    return int(page)


def test_a_damaged_index_is_found_and_mended(command: Command, database: Path) -> None:
    url = f"sqlite:///{database}"
    lose_rows_of_an_index(database)
    assert command("show", "ada", "--log", "--store", url).status == 1
    ran = command("check", "--store", url)
    assert ran.status == 1
    assert "PROBLEM: file: row" in ran.out
    assert "missing from index log_by_place" in ran.out
    assert "`perdure check --repair` rebuilds the indexes" in ran.out
    mended = command("check", "--repair", "--store", url)
    assert mended.status == 0
    assert "the indexes were rebuilt from their tables (REINDEX)" in mended.out
    again = command("check", "--store", url, "--json").json
    assert (again["problems"], again["file"]["problems"]) == (0, [])
    for id in IDS:
        shown = command("show", id, "--log", "--store", url)
        assert (shown.status, f"{id} 7" in shown.out) == (0, True)


def test_sessions_are_found_without_the_index_that_lists_them(
    command: Command, database: Path
) -> None:
    url = f"sqlite:///{database}"
    zero(database, root_of(database, "session_by_key"))
    assert command("ls", "--by-id", "--store", url).status == 1
    report = command("check", "--store", url, "--json").json
    assert [one["agent"] for one in report["sessions"]] == IDS
    assert [one["findings"] for one in report["sessions"]] == [[], [], []]
    assert report["problems"] == len(report["file"]["left"]) > 0


def test_damage_that_no_index_mends_is_told_with_the_way_out(
    command: Command, database: Path, tmp_path: Path
) -> None:
    url, new = f"sqlite:///{database}", f"sqlite:///{tmp_path}/new/a.db"
    place = database.read_bytes().index(b"bob 3 xxx")
    zero(database, place // PAGE + 1)
    ran = command("check", "--repair", "--store", url)
    assert ran.status == 1
    assert (
        "REINDEX does not repair this. 2 of 3 sessions can be read in whole; not so: bob" in ran.out
    )
    assert "bob: PROBLEM: log: " in ran.out
    for id in ("ada", "eve"):  # as it says
        out = tmp_path / f"{id}.bundle"
        taken = command("export", id, "--layout", "bundle", "--out", str(out), "--store", url)
        assert taken.status == 0
        assert command("import", str(out), "--store", new).status == 0
        assert f"{id} 7" in command("show", id, "--store", new).out
