"""Named states as types."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import msgspec
import pytest

from perdure import ConfigError, CorruptRecordError, NotStorableError
from tests.session.conftest import Connect, again  # noqa: F401  # a fixture


@dataclasses.dataclass
class Inner:
    at: datetime.datetime


@dataclasses.dataclass
class MyState:
    step: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)
    inner: Inner | None = None


class AsStruct(msgspec.Struct):
    step: int = 0
    anything: Any = None


async def test_a_typed_state_comes_back_as_its_type(again: Connect) -> None:  # noqa: F811
    value = MyState(2, ["a"], Inner(datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)))
    async with again() as sessions, sessions.open("a") as session:
        state = session.state.typed("app", MyState)
        assert await state.get() is None
        state.set(value)
        assert await state.get() == value
    async with again() as sessions, sessions.open("a") as session:
        assert await session.state.typed("app", MyState).get() == value
        # Plain JSON: whoever does not know the type can read it.
        assert (await session.state.get("app"))["notes"] == ["a"]
        session.state.typed("app", MyState).drop()
        assert await session.state.keys() == []


async def test_a_state_of_another_form_is_refused_and_stays(again: Connect) -> None:  # noqa: F811
    async with again() as sessions, sessions.open("a") as session:
        session.state.set("app", {"step": "not a number"})
        with pytest.raises(CorruptRecordError, match="MyState") as raised:
            await session.state.typed("app", MyState).get()
        assert "not a number" not in str(raised.value)
        assert await session.state.get("app") == {"step": "not a number"}


async def test_new_fields_with_defaults_read_an_old_state(again: Connect) -> None:  # noqa: F811
    async with again() as sessions, sessions.open("a") as session:
        session.state.set("app", {"step": 3})
        assert await session.state.typed("app", MyState).get() == MyState(3)


@pytest.mark.parametrize("value", [AsStruct(1, datetime.date(2026, 1, 2)), AsStruct(1, (1, 2))])
async def test_what_would_come_back_changed_is_refused(
    again: Connect,  # noqa: F811
    value: AsStruct,
) -> None:
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(NotStorableError, match="registered type"):
            session.state.typed("app", AsStruct).set(value)
        assert await session.state.keys() == []


async def test_a_type_that_cannot_be_read_is_refused_at_once(again: Connect) -> None:  # noqa: F811
    class Opaque:
        def __init__(self, x: int) -> None: ...

    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(ConfigError, match="dataclass"):
            session.state.typed("app", Opaque)


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/"])
async def test_a_key_that_no_document_can_have_is_refused(
    again: Connect,  # noqa: F811
    key: str,
) -> None:
    """Else its record would be in the log, and no fold of the session could ever end."""
    async with again() as sessions, sessions.open("a") as session:
        version = session.version
        with pytest.raises(ConfigError, match="key"):
            session.state.set(key, 1)
        assert session.version == version
