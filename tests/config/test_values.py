"""What is kept, made and put aside: pure decisions over anything that may be stored."""

from __future__ import annotations

import msgspec
from hypothesis import given, strategies as st

from perdure.config.schema import ConfigKey, StoredValues, begun, changed, plan, saved_in, written

NAMES = st.sampled_from(["a", "b", "c", "d"])
RAW = st.sampled_from([b"1", b'"x"', b"null", b'{"a":[1]}']).map(msgspec.Raw)
POLICIES = st.sampled_from(["preserve", "regenerate"])


@st.composite
def saves(draw: st.DrawFn) -> StoredValues:
    values = draw(st.dictionaries(NAMES, RAW))
    orphans = draw(st.dictionaries(NAMES, RAW))
    return StoredValues(
        values=values, orphans={k: v for k, v in orphans.items() if k not in values}
    )


CONFIGS = st.dictionaries(NAMES, POLICIES).map(
    lambda policies: {
        name: ConfigKey(name=name, init=name, on_new_session=policy)  # type: ignore[arg-type]
        for name, policy in policies.items()
    }
)


def initial(key: ConfigKey) -> object:
    return f"made {key.init}"


@given(saves(), CONFIGS, st.booleans(), st.sets(NAMES))
def test_nothing_is_ever_lost_and_every_key_has_a_value(
    saved: StoredValues, config: dict[str, ConfigKey], is_new: bool, kept: set[str]
) -> None:
    """S4-7, S4-12, S4-G2: whatever was stored is in use or aside, unless it was to be regenerated."""
    new = begun(saved, config, is_new=is_new, initial=initial, keep=kept.__contains__)
    assert set(config) <= set(new.values) <= set(config) | kept
    assert not set(new.values) & set(new.orphans)
    for name, raw in {**saved.orphans, **saved.values}.items():
        if is_new and name in config and config[name].is_regenerated:
            assert msgspec.json.decode(new.values[name]) == f"made {name}"
        else:
            assert {**new.values, **new.orphans}[name] == raw
    assert begun(new, config, is_new=False, initial=initial, keep=kept.__contains__) is new


@given(saves(), CONFIGS, st.sets(NAMES))
def test_a_plan_is_empty_if_and_only_if_nothing_changes(
    saved: StoredValues, config: dict[str, ConfigKey], kept: set[str]
) -> None:
    new = begun(saved, config, is_new=False, initial=initial, keep=kept.__contains__)
    planned = plan(saved, config, kept.__contains__)
    assert bool(planned) == (new is not saved)
    assert set(planned.orphaned) == set(new.orphans) - set(saved.orphans)
    assert {*planned.added, *planned.returned} == set(new.values) - set(saved.values)


@given(saves(), NAMES, RAW)
def test_what_is_written_is_read_again(saved: StoredValues, name: str, raw: msgspec.Raw) -> None:
    new = changed(saved, name, bytes(raw))
    again = saved_in(msgspec.json.encode(written(new)), "here")
    assert again == new
    assert again.values[name] == raw
