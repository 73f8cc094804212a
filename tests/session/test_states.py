"""What a contributor's state becomes in the log, decided on values."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from perdure import NotStorableError
from perdure.memory.documents import StateSet, fold_state, typed
from perdure.records.records import Record
from perdure.records.types import Registry
from perdure.records.values import NO_TYPES
from perdure.session.contributors import LARGE, StoredContribution, change_of, state_name, state_of

NAME = "plug"
LONG = "x" * 2000


class Log:
    """A log of one contributor's changes, and what they fold to."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.kept = StoredContribution()

    def change(self, state: Any, version: int = 1) -> StateSet | None:
        change = change_of(NAME, state, version, self.kept, NO_TYPES)
        if change is None:
            return None
        (kind, payload, end), self.kept = change
        self.records.append(Record(len(self.records) + 1, 1, kind, payload, end))
        return json.loads(payload)  # type: ignore[no-any-return]

    def fold(self, *, steps: int = 1) -> tuple[Any, int] | None:
        """Fold in several steps, as a session does over its life."""
        bare = beside = None
        size = max(len(self.records) // steps, 1)
        for at in range(0, len(self.records), size):
            part = self.records[at : at + size]
            bare = fold_state(state_name(NAME), bare, part)
            beside = fold_state(typed(state_name(NAME)), beside, part)
        return state_of(bare, beside, NO_TYPES)


def test_a_state_that_is_the_same_writes_nothing() -> None:
    log = Log()
    assert log.change({"a": [1, 2.5, None]}) is not None
    assert log.change({"a": [1, 2.5, None]}) is None
    assert log.fold() == ({"a": [1, 2.5, None]}, 1)


def test_no_state_is_nothing_until_there_was_one() -> None:
    log = Log()
    assert log.change(None) is None
    log.change({"a": 1})
    assert log.change(None) is not None
    assert log.fold() is None
    assert log.change(None) is None


def test_a_new_version_of_the_same_state_is_written() -> None:
    log = Log()
    log.change({"a": 1}, version=1)
    assert log.change({"a": 1}, version=3) is not None
    assert log.fold() == ({"a": 1}, 3)
    log.change({"a": 1}, version=1)
    assert log.fold() == ({"a": 1}, 1)


def test_of_a_large_state_only_the_keys_that_changed_are_written() -> None:
    log = Log()
    state = {f"key-{n}": f"{n}{LONG}" for n in range(40)}
    whole = log.change(dict(state))
    assert whole is not None
    assert "partial" not in whole
    state["key-7"] = "new"
    state["key-new"] = "also"
    del state["key-9"]
    part = log.change(dict(state))
    assert part == {
        "name": "plugins/plug.json",
        "value": {"key-7": "new", "key-new": "also"},
        "partial": True,
        "gone": ["key-9"],
    }
    assert log.fold() == (state, 1)
    assert log.fold(steps=2) == (state, 1)


def test_a_state_that_shrinks_below_the_limit_is_written_whole() -> None:
    log = Log()
    log.change({f"key-{n}": LONG for n in range(40)})
    assert log.change({"key-1": LONG}) == {
        "name": "plugins/plug.json",
        "value": {"key-1": LONG},
    }
    assert log.fold(steps=2) == ({"key-1": LONG}, 1)


def test_a_large_list_is_written_whole() -> None:
    log = Log()
    log.change([LONG] * 40)
    change = log.change([LONG] * 41)
    assert change is not None
    assert "partial" not in change
    assert log.fold() == ([LONG] * 41, 1)


def test_what_is_more_than_json_comes_back_as_itself() -> None:
    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    log = Log()
    log.change({"at": when, "pair": (1, 2)}, version=2)
    assert log.fold() == ({"at": when, "pair": (1, 2)}, 2)
    log.change({"at": "plain"}, version=2)
    assert log.fold(steps=2) == ({"at": "plain"}, 2)


def test_what_cannot_be_stored_is_refused_with_its_path() -> None:
    with pytest.raises(NotStorableError) as raised:
        change_of(NAME, {"a": [object()]}, 1, StoredContribution(), Registry())
    assert raised.value.facts["path"] == "$.a[0]"


values = st.dictionaries(
    st.sampled_from([f"k{n}" for n in range(6)]),
    st.one_of(st.integers(), st.text(max_size=5), st.integers(1, 5).map(lambda n: "y" * LARGE * n)),
    max_size=6,
)


@given(st.lists(st.one_of(st.none(), values), max_size=8), st.integers(1, 4))
def test_whatever_it_was_before_the_log_folds_to_the_last_state(
    states: list[dict[str, Any] | None], steps: int
) -> None:
    log = Log()
    for state in states:
        log.change(state)
    last = states[-1] if states else None
    assert log.fold(steps=steps) == (None if last is None else (last, 1))
