"""Metrics: each figure after what it counts, as a scrape reads it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

import perdure
from perdure import Autosave, EngineOptions, Message, Shutdown
from perdure.observe import Metrics
from perdure.observe.metrics import FIGURES
from perdure.session.manager import SessionManager
from perdure.store import take_after
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore, How
from tests.source_tree import ROOT

QUIET = Shutdown(signals=False)
LINE = re.compile(r'^(\w+?)(\{(?:\w+="(?:[^"\\]|\\.)*",?)+\})? (\S+)$')


def read(text: str) -> dict[str, float]:
    """Parse the text as Prometheus does; refuse what it would."""
    found: dict[str, float] = {}
    families: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
            assert name not in families
            families.add(name)
        if line.startswith("#"):
            continue
        match = LINE.match(line)
        assert match is not None, line
        name = match[1] + (match[2] or "")
        assert name not in found, name
        found[name] = float(match[3])
    assert text.endswith("\n")
    return found


async def one_turn(sessions: SessionManager, id: str = "ada") -> None:
    async with sessions.open(id) as session, session.turn():
        session.append(Message.user("a secret"))


async def test_the_setting_in_force_is_a_metric() -> None:
    """The longest times of the managers; none where nothing is saved by timers."""
    patient = Autosave(debounce=10, max_delay=120)
    async with (
        perdure.connect("memory:", shutdown=QUIET, autosave=patient) as one,
        perdure.connect("memory:", shutdown=QUIET, autosave=Autosave.server()) as other,
    ):
        metrics = Metrics(one, other)
        now = read(metrics.render())
        assert now["perdure_autosave_debounce_seconds"] == 10
        assert now["perdure_autosave_max_delay_seconds"] == 120
        one.tune(None)
        now = read(metrics.render())
        assert now["perdure_autosave_debounce_seconds"] == 2
        assert now["perdure_autosave_max_delay_seconds"] == 10
        other.tune(None)
        assert "perdure_autosave_max_delay_seconds" not in read(metrics.render())


async def test_what_was_done_is_counted() -> None:
    backing = MemoryBacking()
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        metrics = Metrics(sessions)
        before = read(metrics.render())
        await one_turn(sessions)
        async with sessions.open("ada", autosave=None) as session:
            session.append(Message.user("unsaved"))
            now = read(metrics.render())
            await session.save()
        await session.aclose()
        after = read(metrics.render())
    assert before['perdure_saves_total{outcome="ok"}'] == 0
    assert now['perdure_saves_total{outcome="ok"}'] == 1
    assert now["perdure_saved_records_total"] == 3
    assert now["perdure_saved_bytes_total"] > 100
    assert now["perdure_save_duration_seconds_count"] == 1
    assert now['perdure_save_duration_seconds_bucket{le="+Inf"}'] == 1
    assert now["perdure_save_window_seconds_sum"] > 0
    assert now["perdure_unsaved_bytes"] > 10
    assert now["perdure_unsaved_age_seconds"] > 0
    assert now['perdure_unsaved_sessions{state="dirty"}'] == 1
    assert now["perdure_open_sessions"] == 1
    assert now['perdure_lease_changes_total{change="acquired"}'] == 1
    assert now['perdure_restore_duration_seconds_count{source="fresh"}'] == 1
    assert now["perdure_health"] == 0
    assert now["perdure_store_up"] == 1
    assert now[f'perdure_build_info{{version="{perdure.__version__}"}}'] == 1
    assert after['perdure_lease_changes_total{change="released"}'] == 1
    assert after['perdure_folds_total{outcome="ok"}'] == 1
    async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
        metrics.add(sessions)
        await one_turn(sessions)
        assert 'source="snapshot"} 1' in metrics.render()
        metrics.close()
        await one_turn(sessions, "bob")
        assert read(metrics.render())['perdure_lease_changes_total{change="acquired"}'] == 2


@pytest.mark.parametrize(
    ("how", "outcome"),
    [("transient", "failed"), ("in_doubt_applied", "in_doubt"), ("permanent", "refused")],
)
async def test_a_save_that_fails_is_counted_by_how(how: How, outcome: str) -> None:
    store = FaultyStore(MemoryStore(), fail_on="append_many", how=how)
    engine = EngineOptions(backoff_base=0.001)
    async with perdure.connect(store, shutdown=QUIET, engine=engine, autosave=None) as sessions:
        metrics = Metrics(sessions)
        async with sessions.open("ada") as session:
            session.append(Message.user("x"))
            with contextlib.suppress(perdure.PerdureError):
                await session.save()
            now = read(metrics.render())
            assert now[f'perdure_saves_total{{outcome="{outcome}"}}'] == 1
            assert now['perdure_saves_total{outcome="ok"}'] == (outcome != "refused")
            if outcome == "refused":
                assert now['perdure_unsaved_sessions{state="quarantined"}'] == 1
                await session.discard_unsaved()


async def test_a_session_that_is_taken_away_is_counted_where_it_was_lost(tmp_path: Path) -> None:
    backing = MemoryBacking()
    one = MemoryStore(backing=backing)
    async with perdure.connect(one, shutdown=QUIET) as sessions:
        metrics = Metrics(sessions)
        async with sessions.open("ada") as session:
            session.append(Message.user("x"))
            await session.save()
            other = MemoryStore(backing=backing)
            await other.open()
            await take_after(other, session.key, after=session.epoch)
            session.append(Message.user("y"))
            with pytest.raises(perdure.LeaseLostError):
                await session.save()
            now = read(metrics.render())
            assert now['perdure_lease_changes_total{change="lost"}'] == 1
            assert now["perdure_lost_records"] == 1
            assert now["perdure_health"] > 0
            await session.discard_unsaved()
        await other.aclose()


async def test_no_figure_names_a_session_and_each_is_in_the_text() -> None:
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        metrics = Metrics(sessions)
        await one_turn(sessions, "canary-agent")
        await sessions.post("canary-agent", Message.user("x"))
        text = metrics.render()
    assert "canary" not in text
    for figure in FIGURES:
        assert f"# TYPE {figure.in_prometheus} {figure.kind}\n" in text, figure


async def test_several_managers_are_one_set_of_figures() -> None:
    async with (
        perdure.connect("memory:", shutdown=QUIET) as one,
        perdure.connect("memory:", shutdown=QUIET) as two,
    ):
        metrics = Metrics(one, two)
        await one_turn(one)
        await one_turn(two)
        now = read(metrics.render())
    assert now['perdure_saves_total{outcome="ok"}'] == now["perdure_open_sessions"] == 2


def test_a_thread_may_scrape_and_the_loop_is_looked_at() -> None:
    """As a plain ``def`` route of a web framework does; plain asyncio.run."""

    async def main() -> tuple[str, str]:
        async with perdure.connect("memory:", shutdown=QUIET) as sessions:
            metrics = Metrics(sessions)
            await one_turn(sessions)
            while 'loop_lag_seconds_bucket{le="+Inf"} 0' in metrics.render():
                await asyncio.sleep(0.01)
            return await asyncio.to_thread(metrics.render), metrics.render()

    there, here = asyncio.run(main())
    assert read(there).keys() == read(here).keys()
    assert read(there)["perdure_open_sessions"] == 1


def test_the_page_names_each_figure() -> None:
    page = (ROOT / "docs/observing.md").read_text(encoding="utf-8")
    table, rest = page.split("## Several workers")
    listed = set(re.findall(r"`(perdure_\w+)(?:\{\w+\})?`", table))
    assert listed == {figure.in_prometheus for figure in FIGURES}
    asked = set(re.findall(r"\bperdure_\w+", rest.split("## Alerts")[0]))
    assert {name.removesuffix("_bucket") for name in asked} <= listed
