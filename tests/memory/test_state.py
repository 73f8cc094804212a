"""Named states as types."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import msgspec
import pytest

import perdure
from perdure import ConfigError, CorruptRecordError, NotStorableError, UnsupportedVersionError
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


@dataclasses.dataclass
class Prefs:
    language: str


def prefs(**options: Any) -> list[Any]:
    return [perdure.register(Prefs, tag="Prefs", **options)]


def renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {"language": fields["lang"]}


OLD = msgspec.defstruct("Prefs", [("lang", str)])


@pytest.mark.parametrize("types", [[], [OLD]], ids=["not registered", "registered"])
@pytest.mark.parametrize("way", ["typed", "set"])
async def test_a_renamed_field_is_upcast_however_it_was_stored(
    again: Connect,  # noqa: F811
    types: list[Any],
    way: str,
) -> None:
    async with again(types=types or ([OLD] if way == "set" else [])) as sessions:
        async with sessions.open("a") as session:
            if way == "typed":
                session.state.typed("app", OLD).set(OLD("de"))
            else:
                session.state.set("app", OLD("de"))
    async with again(types=prefs(version=2, upcasts={1: renamed})) as sessions:
        async with sessions.open("a") as session:
            state = session.state.typed("app", Prefs)
            assert await state.get() == Prefs("de")
            state.set(Prefs("fr"))
            assert await state.get() == Prefs("fr")
            assert await session.state.get("app") == {"language": "fr"}
    async with again(types=prefs(version=2)) as sessions, sessions.open("a") as session:
        assert await session.state.typed("app", Prefs).get() == Prefs("fr")  # its version is known
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(UnsupportedVersionError, match="has version 2, and Prefs .* version 1"):
            await session.state.typed("app", Prefs).get()


async def test_a_mismatch_names_class_field_version_and_cure(again: Connect) -> None:  # noqa: F811
    async with again(types=prefs()) as sessions, sessions.open("a") as session:
        session.state.set("app", {"lang": "canary"})
        with pytest.raises(CorruptRecordError) as raised:
            await session.state.typed("app", Prefs).get()
    said = str(raised.value)
    assert "the state 'app' of 'Prefs' version 1 does not match Prefs" in said
    assert "`language`" in said
    assert "register(Prefs, version=2, upcasts={1: …})" in said
    assert "canary" not in said
    assert raised.value.facts == {
        "tag": "Prefs",
        "version": 1,
        "type": "Prefs",
        "field": "language",
    }


async def test_a_renamed_class_is_read_by_its_alias(again: Connect) -> None:  # noqa: F811
    old = msgspec.defstruct("Preferences", [("language", str)])
    async with again(types=[old]) as sessions, sessions.open("a") as session:
        session.state.set("app", old("de"))
        session.memory.set("app", old("de"))
        session.append(old("de"))
    async with again() as sessions, sessions.open("a") as session:
        with pytest.raises(CorruptRecordError, match=r"aliases=\['Preferences'\]"):
            await session.state.typed("app", Prefs).get()
    async with again(types=prefs(aliases=["Preferences"])) as sessions:
        async with sessions.open("a") as session:
            assert await session.state.get("app") == Prefs("de")
            assert await session.state.typed("app", Prefs).get() == Prefs("de")
            assert await session.memory.get("app") == Prefs("de")
            assert (await session.history())[-1].value == Prefs("de")
