"""Autosave settings from the environment: behind arguments, before defaults, never ignored."""

from __future__ import annotations

import pytest

from perdure import Autosave, ConfigError, Message, Shutdown, connect
from perdure.autosave.options import PRESET, VARIABLES, autosave_from

QUIET = Shutdown(signals=False)


def test_an_empty_environment_gives_the_defaults() -> None:
    assert autosave_from({}) == Autosave()
    assert autosave_from({PRESET: "", "PERDURE_AUTOSAVE_DEBOUNCE": ""}) == Autosave()


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("off", None), ("server", Autosave.server()), ("write_through", Autosave.write_through())],
)
def test_a_preset_is_chosen_by_name(preset: str, expected: Autosave | None) -> None:
    assert autosave_from({PRESET: preset}) == expected


def test_each_setting_has_its_variable() -> None:
    environment = {
        "PERDURE_AUTOSAVE_DEBOUNCE": "0.5",
        "PERDURE_AUTOSAVE_MAX_DELAY": "5",
        "PERDURE_AUTOSAVE_ON_TURN_END": "false",
        "PERDURE_AUTOSAVE_MAX_BYTES": "1000",
        "PERDURE_AUTOSAVE_MAX_RECORDS": "10",
    }
    assert set(environment) == set(VARIABLES)
    assert {setting for setting, _, _ in VARIABLES.values()} == set(Autosave.__struct_fields__)
    assert autosave_from(environment) == Autosave(
        debounce=0.5, max_delay=5.0, on_turn_end=False, max_bytes=1000, max_records=10
    )


def test_single_settings_change_a_preset() -> None:
    environment = {PRESET: "server", "PERDURE_AUTOSAVE_DEBOUNCE": "1"}
    assert autosave_from(environment) == Autosave(debounce=1.0, max_delay=10.0)


def test_off_is_off_whatever_else_is_set() -> None:
    assert autosave_from({PRESET: "off", "PERDURE_AUTOSAVE_DEBOUNCE": "1"}) is None


@pytest.mark.parametrize("text", ["1", "true", "Yes", "TRUE"])
def test_a_switch_is_on(text: str) -> None:
    found = autosave_from({"PERDURE_AUTOSAVE_ON_TURN_END": text})
    assert found is not None
    assert found.on_turn_end


@pytest.mark.parametrize(
    ("environment", "fits"),
    [
        ({PRESET: "always"}, "off, server or write_through"),
        ({"PERDURE_AUTOSAVE_DEBOUNCE": "2s"}, "seconds"),
        ({"PERDURE_AUTOSAVE_DEBOUNCE": "nan"}, "debounce=nan: it must be a number of seconds"),
        ({"PERDURE_AUTOSAVE_DEBOUNCE": "60"}, "choose debounce <= max_delay"),
        ({"PERDURE_AUTOSAVE_MAX_DELAY": "inf"}, "max_delay=inf: it must be a number of seconds"),
        ({"PERDURE_AUTOSAVE_ON_TURN_END": "maybe"}, "true or false"),
        ({"PERDURE_AUTOSAVE_MAX_BYTES": "1.5"}, "whole number"),
        ({"PERDURE_AUTOSAVE_MAX_BYTES": "0"}, "at least 1"),
        ({"PERDURE_AUTOSAVE_MAX_RECORDS": "-1"}, "at least 1"),
        ({PRESET: "write_through", "PERDURE_AUTOSAVE_DEBOUNCE": "1"}, "choose"),
    ],
)
def test_what_does_not_fit_names_variable_value_and_what_fits(
    environment: dict[str, str], fits: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        autosave_from(environment)
    for name, value in environment.items():
        assert f"{name}={value!r}" in str(caught.value)
    assert fits in str(caught.value)


async def test_the_environment_says_when_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_AUTOSAVE", "write_through")
    async with connect("memory:", shutdown=QUIET) as sessions:
        session = await sessions.open("a")
        session.append(Message.user("Hello"))
        version = session.version
        receipt = await session.wait_durable()  # nobody but autosave would save it
        assert receipt.version >= version


@pytest.mark.anyio
async def test_an_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_AUTOSAVE_DEBOUNCE", "0")
    async with connect("memory:", shutdown=QUIET) as sessions:
        assert sessions.autosave.setting == Autosave(debounce=0.0)
    given = Autosave(debounce=1.0)
    async with connect("memory:", autosave=given, shutdown=QUIET) as sessions:
        assert sessions.autosave.setting == given
    async with connect("memory:", autosave=None, shutdown=QUIET) as sessions:
        assert sessions.autosave.setting is None
