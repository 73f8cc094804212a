"""The lines that docs/observing.md names are logged, with their levels and fields."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable

import anyio
import pytest

import perdure
from perdure import (
    Autosave,
    LeaseLostError,
    Message,
    SessionQuarantinedError,
    Shutdown,
)
from perdure.autosave.options import EngineOptions
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import FaultyStore
from tests.source_tree import ROOT

QUIET = Shutdown(signals=False, spill=False)
HASTY = EngineOptions(
    breaker_failures=2, backoff_base=0.01, backoff_cap=0.02, breaker_reset=0.02, jitter=0
)
ROW = re.compile(r"^\| `(.+?)` \| (INFO|WARNING|ERROR) \|(.*)\|$", re.MULTILINE)


def documented(start: str) -> tuple[str, int, set[str]]:
    """Return the one line of the page that begins so: how it begins, its level, and its fields."""
    page = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    (row,) = [row for row in ROW.findall(page) if row[0].startswith(start)]
    message, level, fields = row
    return message, logging.getLevelNamesMapping()[level], set(re.findall(r"`(\w+)`", fields))


def is_readable(record: logging.LogRecord, field: str) -> bool:
    """Return whether a plain formatter shows a field: by its name, or as a part of the sentence."""
    text, value = record.getMessage(), getattr(record, field)
    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{field}={shown}" in text or f" {shown}" in text


Lines = Callable[[str], list[logging.LogRecord]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Return what was logged of a line of the page, once level and fields were compared."""

    def find(start: str) -> list[logging.LogRecord]:
        message, level, fields = documented(start)
        pattern = re.compile(re.escape(message.removesuffix(" …")).replace("…", ".*"))
        found = [record for record in caplog.records if pattern.match(record.getMessage())]
        for record in found:
            assert record.levelno == level
            assert fields <= record.__dict__.keys()
            assert all(is_readable(record, field) for field in fields)
        return found

    return find


async def test_start_drain_and_stop(lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure")
    async with perdure.connect("memory:", shutdown=QUIET) as sessions:
        (connected,) = lines("connected")
        async with sessions.open("ada") as session, session.turn():
            session.append(Message.user("x"))
        assert not lines("draining")
        sessions.drain()
        (draining,) = lines("draining")
    (stopped,) = lines("stopped")
    assert (connected.location, draining.sessions, stopped.clean) == ("memory:", 1, True)


async def test_an_outage_and_its_end(lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure")
    store = FaultyStore(MemoryStore(), fail_on="append_many", times=None)
    autosave = Autosave.write_through()
    async with perdure.connect(store, autosave=autosave, shutdown=QUIET, engine=HASTY) as sessions:
        failures, down = itertools.count(1), anyio.Event()
        sessions.on("save_failed", lambda _: down.set() if next(failures) == 3 else None)
        async with sessions.open("ada") as session:
            session.append(Message.user("x"))
            await down.wait()
            store.mend()
            await session.save()
    (failed,) = lines("autosave failed")
    assert (failed.session, failed.attempt, failed.in_doubt) == ("ada", 1, False)
    assert len(lines("the store counts as down")) == len(lines("autosave works again")) == 1


async def test_quarantine(lines: Lines) -> None:
    store = FaultyStore(MemoryStore(), fail_on="append_many", times=None, how="permanent")
    with pytest.raises(perdure.UnsavedChangesError):
        async with perdure.connect(store, shutdown=QUIET) as sessions:
            async with sessions.open("ada") as session:
                session.append(Message.user("x"))
                with pytest.raises(SessionQuarantinedError):
                    await session.save()
    (refused,) = lines("session …: the store refuses")
    assert (refused.session, refused.seq) == ("ada", session.version)


async def test_takeover(lines: Lines) -> None:
    backing = MemoryBacking()
    with pytest.raises(perdure.UnsavedChangesError):
        async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as sessions:
            session = await sessions.open("ada")
            session.append(Message.user("unsaved"))
            for stored in backing.sessions.values():  # as if its holder were dead
                stored.released = True
            async with perdure.connect(MemoryStore(backing=backing), shutdown=QUIET) as other:
                async with other.open("ada") as taken:
                    taken.append(Message.user("theirs"))
            with pytest.raises(LeaseLostError):
                await session.save()
    (lost,) = lines("session …: another process")
    assert (lost.session, lost.unsaved) == ("ada", 1)
