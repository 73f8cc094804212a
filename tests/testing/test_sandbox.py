from __future__ import annotations

import logging
import os
import subprocess
import sys

import anyio
import pytest

from perdure import (
    Autosave,
    Message,
    SessionClosedError,
    Shutdown,
    StoreUnavailableError,
    UnsavedChangesError,
)
from perdure.stores.file import FileStore
from perdure.testing.sandbox import ManualClock, Sandbox


@pytest.fixture(params=["memory", "file"])
def make_store(request, tmp_path):
    return None if request.param == "memory" else lambda: FileStore(tmp_path / "data")


@pytest.fixture
async def sandbox(make_store):
    async with Sandbox(store=make_store, autosave=None) as sandbox:
        yield sandbox


def texts(session):
    return [message.text for message in session.context()]


async def test_a_crash_keeps_what_was_durable_and_nothing_else(sandbox):
    session = await sandbox.sessions.open("mia")
    session.append(Message.user("saved"))
    await session.save()
    session.append(Message.user("lost"))
    sessions = await sandbox.reopen()
    assert texts(await sessions.open("mia")) == ["saved"]


PROGRAM = """
import anyio, sys
from perdure import Message
from perdure.stores.file import FileStore
from perdure.testing.sandbox import Sandbox

async def main():
    async with Sandbox(store=lambda: FileStore(sys.argv[1]), autosave=None) as sandbox:
        session = await sandbox.sessions.open("mia")
        session.append(Message.user("lost"))
        await sandbox.reopen()

anyio.run(main)
"""


def test_what_a_crash_has_lost_is_not_spilled_at_the_end_of_the_process(tmp_path):
    state = tmp_path / "state"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "data")],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, "no one closed" in ended.stderr) == (0, False)
    assert not state.exists()


async def test_a_clean_end_keeps_everything(sandbox):
    session = await sandbox.sessions.open("mia")
    session.append(Message.user("saved"))
    sessions = await sandbox.reopen(crash=False)
    assert texts(await sessions.open("mia")) == ["saved"]


async def test_after_a_crash_nobody_waits_for_the_dead_owner(sandbox):
    await sandbox.sessions.open("mia")
    sessions = await sandbox.reopen()
    session = await sessions.open("mia", on_held="raise")
    assert session.epoch == 2


async def test_an_open_turn_is_interrupted_by_a_crash(sandbox):
    session = await sandbox.sessions.open("mia")
    with pytest.raises(SessionClosedError):
        async with session.turn():
            session.append(Message.user("Hello"))
            await session.save()
            sessions = await sandbox.reopen()
    again = await sessions.open("mia")
    assert texts(again) == ["Hello"]


async def test_what_belonged_to_the_crashed_manager_says_so(sandbox):
    crashed = sandbox.sessions
    session = await crashed.open("mia")
    await sandbox.reopen()
    with pytest.raises(SessionClosedError, match="crash"):
        session.append(Message.user("too late"))
    with pytest.raises(SessionClosedError, match="closed"):
        crashed.open("mia")
    assert await crashed.aclose() is not None


async def test_whoever_waits_for_a_save_learns_of_the_crash(sandbox):
    session = await sandbox.sessions.open("mia")
    session.append(Message.user("Hello"))

    async def wait():
        with pytest.raises(SessionClosedError):
            await session.wait_durable()
        told.append(session.id)

    told: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await sandbox.reopen()
    assert told == ["mia"]


async def test_a_crash_during_a_save_leaves_all_of_it_or_nothing(sandbox):
    session = await sandbox.sessions.open("mia")
    session.append(Message.user("one"), Message.user("two"))
    sandbox.store.fail_next(how="hang")
    async with anyio.create_task_group() as group:

        async def save():
            with pytest.raises(SessionClosedError):
                await session.save()

        group.start_soon(save)
        await anyio.wait_all_tasks_blocked()
        sessions = await sandbox.reopen()
    assert texts(await sessions.open("mia")) == []


async def test_it_can_crash_again_and_again(sandbox):
    for count in range(5):
        session = await sandbox.sessions.open("mia")
        assert texts(session) == [str(one) for one in range(count)]
        session.append(Message.user(str(count)))
        await session.save()
        await sandbox.reopen()


async def test_a_store_that_is_down_stays_down_for_the_next_manager(sandbox):
    sandbox.store.down()
    with pytest.raises(StoreUnavailableError):
        await sandbox.reopen()
    sandbox.store.up()
    sessions = await sandbox.reopen()
    assert await sessions.open("mia")


async def test_without_a_clock_everything_saves_itself_at_once():
    async with Sandbox() as sandbox:
        session = await sandbox.sessions.open("mia")
        version = session.append(Message.user("Hello"))
        assert (await session.wait_durable()).version == version


async def test_a_clean_end_with_the_store_down_says_what_is_not_saved(caplog):
    stop = Shutdown(deadline=0, turn_grace=0, hard_grace=0, signals=False)
    async with Sandbox(autosave=None, shutdown=stop) as sandbox:
        session = await sandbox.sessions.open("mia")
        session.append(Message.user("Hello"))
        sandbox.store.down()
        with caplog.at_level(logging.CRITICAL), pytest.raises(UnsavedChangesError, match="mia"):
            await sandbox.reopen(crash=False)


async def test_leaving_it_saves_what_failed_while_the_store_was_down():
    clock = ManualClock()
    async with Sandbox(clock=clock, autosave=Autosave()) as sandbox:
        session = await sandbox.sessions.open("mia")
        session.append(Message.user("Hello"))
        sandbox.store.down()
        await clock.advance(3600)
        assert session.durable_version < session.version
    assert session.durable_version == session.version


async def test_leaving_it_twice_or_after_the_manager_was_closed_is_well(sandbox):
    await sandbox.sessions.aclose()
    await sandbox.__aexit__(None, None, None)
    with pytest.raises(SessionClosedError):
        await sandbox.sessions.open("mia")


async def test_options_reach_every_manager():
    async with Sandbox(autosave=None) as sandbox:
        for _ in range(2):
            session = await sandbox.sessions.open("mia")
            session.append(Message.user("Hello"))
            await anyio.wait_all_tasks_blocked()
            assert session.durable_version < session.version
            await sandbox.reopen()


@pytest.mark.parametrize("part", ["sessions", "store"])
def test_it_has_to_be_entered_first(part):
    with pytest.raises(SessionClosedError, match="async with Sandbox"):
        getattr(Sandbox(), part)
