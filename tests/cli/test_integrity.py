"""A SQLite database that is damaged as a whole: found by `check`, mended where REINDEX can."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
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
                    session.memory.set("big", id * 5000)
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


LOST = "DELETE FROM session WHERE agent = 'eve'"
UNDECODABLE = "UPDATE session SET agent = CAST(x'ff' AS TEXT) WHERE agent = 'eve'"
ROWS = [
    "UPDATE session SET head = head + 1 WHERE agent = 'eve'",
    "UPDATE session SET state = 2 WHERE agent = 'eve'",
    "UPDATE session SET agent = 'evf' WHERE agent = 'eve'",
    LOST,
]


def execute(path: Path, statements: Sequence[str]) -> None:
    with closing(sqlite3.connect(path)) as con, con:
        for statement in statements:
            assert con.execute(statement).rowcount > 0


def test_a_damaged_row_of_a_session_hides_no_other_session(
    command: Command, database: Path
) -> None:
    url = f"sqlite:///{database}"
    execute(database, [ROWS[0], "UPDATE document SET data = x'00' WHERE name = 'session.json'"])
    for options in ((), ("--repair",), ("--gc", "--grace", "0")):
        report = command("check", *options, "--store", url, "--json").json
        assert [one["agent"] for one in report["sessions"]] == IDS
        assert report["sessions"][2]["findings"][0]["detail"].startswith("session eve is damaged")
        if options != ("--gc", "--grace", "0"):
            assert "session.json" in report["sessions"][0]["findings"][0]["detail"]
        assert [blob["unreachable"] for blob in report["blobs"]] in ([], [0])
    ran = command("check", "eve", "--store", url)
    assert (ran.status, ran.out.count("its row does not match its checksum")) == (1, 1)


@pytest.mark.parametrize("statement", [*ROWS, UNDECODABLE])
def test_the_cures_of_a_damaged_row_work(
    command: Command, database: Path, tmp_path: Path, statement: str
) -> None:
    url, out = f"sqlite:///{database}", str(tmp_path / "left")
    execute(database, [statement])
    refused = command("show", "eve", "--store", url)
    assert "`perdure export eve --salvage --out FILE`" in refused.err
    told = command("export", "eve", "--salvage", "--out", out, "--store", url, "--json").json
    assert told["whole"]
    number = re.search(r"delete with sqlite3 the rows of its number (\d+)", refused.err)
    assert number is not None
    with closing(sqlite3.connect(database)) as con, con:
        tables = [
            name for (name,) in con.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        for table in tables:
            names = [row[1] for row in con.execute(f"PRAGMA table_info({table})")]
            name = "id" if table == "session" else "session"
            if name in names:
                con.execute(f"DELETE FROM {table} WHERE {name} = ?", (int(number[1]),))
    assert command("import", out, "--store", url).status == 0
    assert "eve 7" in command("show", "eve", "--store", url).out
    assert command("check", "--store", url).status == 0


@pytest.mark.parametrize("was_folded", [True, False])
@pytest.mark.parametrize("statement", [*ROWS[1:], UNDECODABLE])
def test_a_session_that_no_listing_has_is_found_and_its_blobs_stay(
    command: Command, database: Path, statement: str, was_folded: bool
) -> None:
    url = f"sqlite:///{database}"
    execute(database, [statement] if was_folded else [statement, "DELETE FROM manifest"])
    for options in ((), ("--repair",), ("--gc", "--grace", "0")):
        ran = command("check", *options, "--store", url)
        assert ran.status == 1
        is_named = was_folded or "SET agent" not in statement and statement != LOST
        assert ("PROBLEM: file: session eve is damaged" in ran.out) == is_named
        assert is_named or "PROBLEM: file: number " in ran.out
        assert "blobs: not counted" in ran.out
    assert command("forget", "eve", "--yes", "--store", url).status == 1
    with closing(sqlite3.connect(database)) as con:
        assert con.execute("SELECT count(*) FROM blob WHERE moved_at").fetchone() == (0,)
        assert con.execute("SELECT count(*) > 0 FROM blob").fetchone() == (1,)


def test_a_session_with_nothing_left_is_not_called_unknown(
    command: Command, database: Path, tmp_path: Path
) -> None:
    execute(database, [LOST, "DELETE FROM manifest", "UPDATE log SET epoch = 'text'"])
    out = str(tmp_path / "left")
    ran = command("export", "eve", "--salvage", "--out", out, "--store", f"sqlite:///{database}")
    assert ran.status == 1
    assert "nothing of session eve can be read" in ran.err
