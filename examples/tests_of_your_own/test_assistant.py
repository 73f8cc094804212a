"""What an application may want to know about its own use of perdure."""

from __future__ import annotations

import pytest
from assistant import answer, jot

from perdure import SessionManager, SessionQuarantinedError
from perdure.agent import Agent
from perdure.testing import ManualClock, SwitchedStore, assert_saved, wait_saved
from perdure.testing.plugin import MakeModel, ReopenSession


async def test_an_answer_is_saved_when_it_is_given(
    perdure_sessions: SessionManager, perdure_scripted_model: MakeModel
) -> None:
    session = await perdure_sessions.open("customer-1")
    await answer(session, perdure_scripted_model("On its way."), "Where is my parcel?")
    assert_saved(session)


async def test_a_conversation_goes_on_after_a_crash(
    perdure_sessions: SessionManager,
    perdure_reopen: ReopenSession,
    perdure_scripted_model: MakeModel,
) -> None:
    model = perdure_scripted_model("On its way.", "Tomorrow.")
    session = await perdure_sessions.open("customer-1")
    await answer(session, model, "Where is my parcel?")

    sessions = await perdure_reopen()
    session = await sessions.open("customer-1")
    await answer(session, model, "When does it come?")
    said = [message.text for message in model.last_messages]
    assert said == ["Where is my parcel?", "On its way.", "When does it come?"]


async def test_a_note_is_saved_within_two_seconds(
    perdure_sessions: SessionManager, perdure_clock: ManualClock
) -> None:
    session = await perdure_sessions.open("customer-1")
    jot(session, "prefers mail")
    assert session.durable_version < session.version
    await perdure_clock.advance(2)
    assert_saved(session)


async def test_a_crash_costs_what_was_not_saved_yet(
    perdure_sessions: SessionManager, perdure_clock: ManualClock, perdure_reopen: ReopenSession
) -> None:
    session = await perdure_sessions.open("customer-1")
    jot(session, "saved")
    await perdure_clock.advance(2)
    jot(session, "lost")

    sessions = await perdure_reopen()
    session = await sessions.open("customer-1")
    assert [message.text for message in session.context()] == ["Note: saved"]


async def test_notes_outlive_an_outage_of_the_store(
    perdure_sessions: SessionManager, perdure_store: SwitchedStore, perdure_clock: ManualClock
) -> None:
    session = await perdure_sessions.open("customer-1")
    perdure_store.down()
    jot(session, "prefers mail")
    await perdure_clock.advance(60)
    assert perdure_sessions.health().status == "degraded"

    perdure_store.up()
    await perdure_clock.advance(10)
    assert_saved(session)


async def test_an_answer_is_there_once_although_its_save_was_in_doubt(
    perdure_sessions: SessionManager,
    perdure_store: SwitchedStore,
    perdure_reopen: ReopenSession,
    perdure_scripted_model: MakeModel,
) -> None:
    session = await perdure_sessions.open("customer-1")
    perdure_store.fail_next(how="in_doubt_applied")
    await answer(session, perdure_scripted_model("On its way."), "Where is my parcel?")

    sessions = await perdure_reopen()
    session = await sessions.open("customer-1")
    assert [message.text for message in session.context()] == ["Where is my parcel?", "On its way."]


async def test_a_note_that_the_store_refuses_is_no_silent_loss(
    perdure_sessions: SessionManager, perdure_store: SwitchedStore
) -> None:
    session = await perdure_sessions.open("customer-1")
    perdure_store.fail_next(how="permanent")
    jot(session, "prefers mail")
    with pytest.raises(SessionQuarantinedError):
        await wait_saved(session)


async def test_an_agent_remembers(
    perdure_sessions: SessionManager, perdure_scripted_model: MakeModel
) -> None:
    model = perdure_scripted_model("Hello, Ada.", "You are Ada.")
    async with Agent.create("helper", model=model, sessions=perdure_sessions) as agent:
        await agent.ask("I am Ada.")
        assert await agent.ask("Who am I?") == "You are Ada."
    assert "I am Ada." in [message.text for message in model.last_messages]
