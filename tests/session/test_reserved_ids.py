"""Ids of perdure's own sessions: nobody who was given an id reaches one of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import perdure
from perdure import InvalidArgumentError, Message, Retention, SessionManager, Shutdown
from perdure.formats.state import FullAgentState

RESERVED = ["perdure:scope", "perdure:keyring", "perdure:backup", "perdure:later"]
GIVEN: dict[str, Any] = {
    "items": (Message.user("x"),),
    "keys": ("one",),
    "retention": Retention(keep_turns=1),
    "autosave": None,
}
"""What a call is given beside the id."""


def naming_methods() -> list[tuple[str, str]]:
    """Return each public method of a manager that takes a session's id, and the parameter."""
    found = []
    for name, method in inspect.getmembers(SessionManager, inspect.isfunction):
        parameters = inspect.signature(method).parameters
        if not name.startswith("_") and name != "scope":  # its id is no session's
            found += [(name, given) for given in ("id", "new_id") if given in parameters]
    return found


def test_there_are_methods_to_try() -> None:
    assert {"open", "load", "post", "fork", "forget", "exists"} < {
        name for name, _ in naming_methods()
    }


@pytest.mark.parametrize(("name", "parameter"), naming_methods())
@pytest.mark.parametrize("reserved", RESERVED)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # refused before anything awaits
async def test_no_call_of_a_manager_takes_such_an_id(
    name: str, parameter: str, reserved: str
) -> None:
    async with perdure.connect("memory:", shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("hi"))
        await sessions.scope("user:bob").set("secret", 1)
        before = await sessions.scope("user:bob").history()
        method = getattr(sessions, name)
        positional, named = [], {}
        for given in list(inspect.signature(method).parameters.values()):
            value = reserved if given.name == parameter else GIVEN.get(given.name, "ada")
            if given.name in ("id", "new_id"):
                named[given.name] = value
            elif given.kind is given.VAR_POSITIONAL:
                positional = list(value)
            elif given.default is given.empty or given.name in GIVEN:
                named[given.name] = value
        if positional:  # behind an id that is given by its place
            positional.insert(0, named.pop("id"))
        if "session" in inspect.signature(method).parameters:
            named["session"] = "user:bob" if parameter == "id" else "default"
        with pytest.raises(InvalidArgumentError, match="perdure's own"):
            called = method(*positional, **named)
            if inspect.isawaitable(called):
                await called
        assert await sessions.scope("user:bob").history() == before


async def test_exports_and_imports_of_states_take_no_such_id() -> None:
    async with perdure.connect("memory:", shutdown=Shutdown(signals=False)) as sessions:
        with pytest.raises(InvalidArgumentError, match="perdure's own"):
            await perdure.export_state(sessions, "perdure:scope", session="user:bob")
        with pytest.raises(InvalidArgumentError, match="perdure's own"):
            await perdure.import_state(sessions, FullAgentState(agent_id="perdure:keyring"))


async def test_a_listing_by_a_prefix_shows_no_scope() -> None:
    async with perdure.connect("memory:", shutdown=Shutdown(signals=False)) as sessions:
        await sessions.scope("user:bob").set("secret", 1)
        assert await sessions.list(prefix="perdure:scope") == []
        assert [info.key.session for info in await sessions.list_scopes()] == ["user:bob"]


async def test_ids_that_only_begin_alike_are_sessions() -> None:
    async with perdure.connect("memory:", shutdown=Shutdown(signals=False)) as sessions:
        place: Any = {"session": "perdure:keyring", "tenant": "perdure:x"}
        for id in ("perdure", "Perdure:keyring", "my perdure:keyring"):
            async with sessions.open(id, **place) as session:
                session.append(Message.user("hi"))
                await session.save()
            view = await sessions.load(id, **place)
            assert view is not None
            assert [message.text for message in view.context()] == ["hi"]
