"""Autosave's setting: read, changed for all sessions or one, and given back, while they are open."""

from __future__ import annotations

from typing import Any

import pytest

import perdure.sync
from perdure import Autosave, EngineOptions, InvalidArgumentError, Message, SessionClosedError
from perdure.testing import ManualClock
from perdure.types import AutosaveStatus, Inherit
from tests.session.conftest import Connect

PATIENT = Autosave(debounce=10, max_delay=120)
WRITE_THROUGH = Autosave.write_through()


async def test_what_was_given_is_read_back_as_it_is_in_force(again: Connect) -> None:
    async with again(autosave=PATIENT) as sessions, sessions.open("a") as session:
        assert sessions.autosave == AutosaveStatus(setting=PATIENT, in_force=PATIENT)
        assert session.autosave == AutosaveStatus(setting=PATIENT, in_force=PATIENT, inherited=True)


async def test_health_says_which_setting_is_in_force(again: Connect) -> None:
    async with again(autosave=Autosave(max_delay=60)) as sessions:
        assert sessions.health().autosave == sessions.autosave
        assert sessions.health().autosave.in_force == Autosave(debounce=2.0, max_delay=60)
        sessions.tune(None)
        assert sessions.health().autosave == AutosaveStatus(setting=None, in_force=None)


async def test_the_default_s_debounce_is_read_back_in_seconds(again: Connect) -> None:
    async with again(autosave=Autosave()) as sessions:
        assert sessions.autosave.setting == Autosave()
        assert sessions.autosave.in_force == Autosave(debounce=2.0)
        sessions.tune(Autosave(max_delay=0.5))
        assert sessions.autosave.in_force == Autosave(debounce=0.5, max_delay=0.5)


async def test_off_is_read_back_as_off(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as session:
        assert session.autosave == AutosaveStatus(setting=None, in_force=None, inherited=True)


async def test_beyond_the_soft_limit_nothing_waits_and_it_says_so(again: Connect) -> None:
    engine = EngineOptions(dirty_soft=1)
    async with again(autosave=PATIENT, engine=engine) as sessions, sessions.open("a") as session:
        session.append(Message.user("Hello"))
        session.append(Message.user("Hello"))
        in_force = session.autosave.in_force
        assert in_force is not None
        assert (in_force.debounce, in_force.max_delay) == (0.0, 0.0)
        assert session.autosave.setting == PATIENT


async def test_one_session_is_tuned_and_given_back(again: Connect) -> None:
    async with again(autosave=None) as sessions, sessions.open("a") as a, sessions.open("b") as b:
        a.append(Message.user("Hello"))
        b.append(Message.user("Hello"))
        sessions.tune(WRITE_THROUGH, id="b")
        await b.wait_durable()
        assert a.durable_version < a.version
        assert (a.autosave.setting, b.autosave.setting) == (None, WRITE_THROUGH)
        sessions.tune(PATIENT)
        assert (a.autosave.setting, b.autosave.setting) == (PATIENT, WRITE_THROUGH)
        assert (a.autosave.inherited, b.autosave.inherited) == (True, False)
        sessions.tune(id="b")
        assert b.autosave == a.autosave


async def test_one_conversation_of_an_id_is_tuned(again: Connect) -> None:
    async with again(autosave=PATIENT) as sessions:
        one = await sessions.open("a", session="one", tenant="acme")
        other = await sessions.open("a", tenant="acme")
        sessions.tune(None, id="a", session="one", tenant="acme")
        assert (one.autosave.setting, other.autosave.setting) == (None, PATIENT)


async def test_an_open_gives_takes_back_and_otherwise_leaves_the_setting(again: Connect) -> None:
    async with again(autosave=PATIENT) as sessions:
        session = await sessions.open("a", autosave=None)
        assert session.autosave.setting is None
        await sessions.open("a")
        assert session.autosave.setting is None
        await sessions.open("a", autosave=Inherit.INHERIT)
        assert session.autosave.inherited
        await sessions.open("a", autosave=PATIENT)  # as the manager's now, and not with it later
        sessions.tune(None)
        assert session.autosave == AutosaveStatus(setting=PATIENT, in_force=PATIENT)


async def test_a_session_that_is_given_back_saves_as_its_manager_says(again: Connect) -> None:
    clock, engine = ManualClock(), EngineOptions(jitter=0.0)
    connected = again(autosave=Autosave.server(), engine=engine, clock=clock)
    async with connected as sessions, sessions.open("a", autosave=PATIENT) as session:
        session.append(Message.user("Hello"))
        await clock.advance(4)
        assert session.durable_version < session.version
        sessions.tune(id="a")  # what is unsaved has been quiet for long enough
        await clock.advance(0)
        assert session.durable_version == session.version


@pytest.mark.parametrize(
    ("autosave", "names"),
    [
        (Inherit.INHERIT, {}),
        (Inherit.KEEP, {}),
        (PATIENT, {"tenant": "acme"}),
        (PATIENT, {"session": "one"}),
        (Inherit.INHERIT, {"session": "one"}),
        (5, {}),
        (5, {"id": "a"}),
    ],
)
async def test_what_tunes_nothing_is_refused(
    again: Connect, autosave: Any, names: dict[str, str]
) -> None:
    async with again(autosave=PATIENT) as sessions, sessions.open("a") as session:
        with pytest.raises(InvalidArgumentError, match="autosave="):
            sessions.tune(autosave, **names)
        assert sessions.autosave.setting == session.autosave.setting == PATIENT


async def test_a_session_that_is_not_open_is_not_tuned(again: Connect) -> None:
    async with again() as sessions:
        with pytest.raises(SessionClosedError, match=r"session a is not open here.*autosave="):
            sessions.tune(PATIENT, id="a")


async def test_a_manager_follows_nobody(again: Connect) -> None:
    inherit: Any = Inherit.INHERIT
    with pytest.raises(InvalidArgumentError, match="autosave="):
        again(autosave=inherit)


def test_the_same_without_a_loop() -> None:
    with perdure.sync.connect("memory:", autosave=PATIENT) as sessions:
        session = sessions.open("a")
        assert sessions.autosave.in_force == PATIENT
        sessions.tune(None, id="a")
        assert session.autosave == AutosaveStatus(setting=None, in_force=None)
        sessions.tune(id="a")
        assert session.autosave.inherited
        sessions.tune(WRITE_THROUGH)
        session.append(Message.user("Hello"))
        session.wait_durable()
