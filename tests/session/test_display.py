"""What sessions, managers and reports show of themselves, in a line and in a notebook."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from perdure import Autosave, Message, connect
from perdure.autosave.reports import ShutdownReport, Unsaved
from perdure.records.keys import SessionKey
from perdure.restore.report import RestoreStep
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped.compressed import CompressedStore
from perdure.testing import SwitchedStore
from perdure.types import RestoreReport
from tests.session.conftest import Connect
from tests.source_tree import missing_names


def rows(html: str) -> dict[str, str]:
    return dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", html))


async def test_a_session_shows_where_it_stands(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("<b>") as session:
        session.append(Message.user("Hello"))
        session.describe(title="<i>Sums")
        assert repr(session) == "<Session <b> open version=3 durable=1>"
        shown = session._repr_html_()
        assert "<b>" not in shown
        assert rows(shown)["title"] == "&lt;i&gt;Sums"
        assert rows(shown)["records"] == "3"
    assert "closed" in repr(session)
    assert rows(session._repr_html_())["state"] == "closed"


async def test_a_manager_shows_its_life(again: Connect) -> None:
    manager = again()
    assert repr(manager) == "<SessionManager not connected>"
    async with manager as sessions:
        await sessions.open("a")
        assert re.fullmatch(
            r"<SessionManager open, .+, 1 sessions, ok, 0 bytes unsaved>", repr(sessions)
        )
        assert rows(sessions._repr_html_())["saving"] == "ok"
        assert rows(sessions.health()._repr_html_())["status"] == "ok"
    assert "closed" in repr(manager)
    assert "stopped in" in rows(manager._repr_html_())["report"]


def test_a_manager_shows_no_more_than_it_can_before_it_is_connected() -> None:
    assert rows(connect("memory:", autosave=Autosave())._repr_html_()) == {"state": "not connected"}


def test_a_clean_report_is_short() -> None:
    assert repr(ShutdownReport(duration=0.5, clean=True, saved=2)) == (
        "ShutdownReport(duration=0.5, clean=True, saved=2)"
    )


def test_a_report_shows_what_was_not_saved() -> None:
    lost = Unsaved(
        key=SessionKey("<b>"),
        version=5,
        durable=3,
        in_doubt_to=3,
        oldest_age=1.0,
        bytes=10,
        state="dirty",
        error=None,
    )
    shown = rows(ShutdownReport(duration=0.5, clean=False, unsaved=(lost,))._repr_html_())
    assert shown["unsaved"] == "&lt;b&gt; (2 records)"
    assert "quarantined" not in shown


def test_a_restore_report_shows_its_steps() -> None:
    report = RestoreReport(
        source="rebuild",
        steps=(RestoreStep("damaged", "memory.json"), RestoreStep("rebuilt")),
        damaged=("memory.json",),
        head=7,
    )
    shown = rows(report._repr_html_())
    assert (shown["source"], shown["head"], shown["damaged"]) == ("rebuild", "7", "memory.json")
    assert "settled" not in repr(report)


PACKAGES = ["", "checkpoints", "observe", "stores", "testing", "types", "sync"]
INTERNAL = {"Bucket", "Faults", "SessionOpening"}
"""What people derive from, or hardly hold."""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_object_that_people_hold_shows_its_address_only(package: str) -> None:
    module = importlib.import_module(f"perdure.{package}".rstrip("."))
    classes = {
        name: value
        for name in set(module.__all__) - missing_names() - INTERNAL
        if isinstance(value := getattr(module, name), type)
    }
    assert [
        name
        for name, cls in classes.items()
        if cls.__repr__ is object.__repr__ and not getattr(cls, "_is_protocol", False)
    ] == []


async def test_what_is_held_of_a_session_names_it() -> None:
    async with connect("memory:") as sessions:
        assert repr(sessions.open("ada")).startswith("<SessionOpening of ada: await it")
        async with sessions.open("ada") as session, session.turn("request-7") as turn:
            assert repr(turn) == "<Turn request-7 of ada running>"
            with turn.partial() as reply:
                reply.add("Hello")
                assert repr(reply) == (
                    "<PartialReply in <Turn request-7 of ada running>, 5 characters, complete>"
                )
            assert repr(session.memory) == "<WorkingMemory of ada>"
            assert repr(session.checkpoints) == "<CheckpointEngine of ada>"
            assert repr(session.events) == "<KernelEventStream of ada>"
        assert repr(turn) == "<Turn request-7 of ada not running>"


def test_a_store_shows_its_place_and_what_is_around_it(tmp_path: Path) -> None:
    files = FileStore(tmp_path)
    assert repr(files) == f"FileStore({str(tmp_path)!r})"
    assert repr(SwitchedStore(files)) == f"SwitchedStore({files!r})"
    sqlite = SqliteStore(tmp_path / "a.db", owner="one")
    assert repr(CompressedStore(sqlite)) == f"CompressedStore(SqliteStore({sqlite.location!r}))"
    assert repr(MemoryStore(owner="one")) == "<MemoryStore of one, 0 sessions>"
