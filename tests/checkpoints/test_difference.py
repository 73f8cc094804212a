"""What changed between two states, and the laws that it keeps."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, strategies as st

from perdure.checkpoints.engine import Difference, difference

leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1, 1) | st.text(max_size=3)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("ab/~", max_size=2), inner, max_size=4)
    ),
    max_leaves=12,
)


def written(value: Any) -> str:
    """Return a value so that 1, 1.0 and true are three."""
    return repr(value)


def applied(value: Any, change: Difference) -> Any:
    value = copy.deepcopy(value)
    if "" in change.changed:
        return change.changed[""].after
    for path, one in change.changed.items():
        parent, last = walked(value, path)
        parent[last] = one.after
    for path in sorted(change.removed, key=steps, reverse=True):
        parent, last = walked(value, path)
        del parent[last]
    for path in sorted(change.added, key=steps):
        parent, last = walked(value, path)
        if isinstance(parent, list):
            parent.insert(last, change.added[path])
        else:
            parent[last] = change.added[path]
    return value


def steps(path: str) -> list[tuple[int, str]]:
    return [(int(step), "") if step.isdecimal() else (0, step) for step in path.split("/")[1:]]


def walked(value: Any, path: str) -> tuple[Any, Any]:
    parts = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for part in parts[:-1]:
        value = value[int(part) if isinstance(value, list) else part]
    return value, int(parts[-1]) if isinstance(value, list) else parts[-1]


@given(values)
def test_nothing_differs_from_itself(value: Any) -> None:
    assert not difference(value, copy.deepcopy(value))


@given(values, values)
def test_applied_it_leads_from_one_to_the_other(before: Any, after: Any) -> None:
    found = applied(before, difference(before, after))
    assert sorted_(found) == sorted_(after)


def sorted_(value: Any) -> str:
    """Return what a value says, in one order of its keys."""
    if isinstance(value, dict):
        return repr([(key, sorted_(value[key])) for key in sorted(value)])
    if isinstance(value, list):
        return repr([sorted_(item) for item in value])
    return written(value)


@given(values, values)
def test_the_way_back_is_the_other_way_round(before: Any, after: Any) -> None:
    there, back = difference(before, after), difference(after, before)
    assert there.added.keys() == back.removed.keys()
    assert there.removed.keys() == back.added.keys()
    assert there.changed.keys() == back.changed.keys()


def test_a_path_is_a_json_pointer() -> None:
    found = difference({"a/b": {"c~d": [1]}}, {"a/b": {"c~d": [2]}})
    assert list(found.changed) == ["/a~1b/c~0d/0"]
    assert found  # a change alone is a difference
