"""What sessions, managers and reports show of themselves, in a line and in a notebook."""

from __future__ import annotations

import re

from perdure import Autosave, Message, connect
from perdure.autosave.reports import ShutdownReport, Unsaved
from perdure.records.keys import SessionKey
from perdure.restore.report import RestoreStep
from perdure.types import RestoreReport
from tests.session.conftest import Connect


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
