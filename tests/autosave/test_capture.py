"""What one save takes: whole groups, as many as fit, at least one."""

from __future__ import annotations

import gc

import anyio
import pytest
from hypothesis import given, strategies as st

from perdure.autosave.core import as_group, size_of, whole_groups
from perdure.autosave.tracked import OVERHEAD, Tracked
from perdure.errors import LeaseLostError
from perdure.records.records import Entry
from tests.autosave.rigs import Rig, rig


def entry(size: int, *, end: bool) -> Entry:
    return Entry("message", b"x" * size, end)


entries = st.lists(st.builds(entry, st.integers(0, 20), end=st.booleans()), max_size=20)


@given(
    pending=entries, limit=st.integers(0, 25), records=st.integers(0, 9), size=st.integers(0, 500)
)
def test_it_takes_whole_groups_that_fit(
    pending: list[Entry], limit: int, records: int, size: int
) -> None:
    count, taken = whole_groups(pending, limit=limit, most_records=records, most_bytes=size)
    ends = [n for n, one in enumerate(pending[:limit], 1) if one.end]
    assert count in {0, *ends}
    assert taken == size_of(pending[:count])
    assert (count == 0) is (not ends)
    fits = [n for n in ends if n <= records and size_of(pending[:n]) <= size]
    assert count == max(fits, default=min(ends, default=0))


@given(group=st.lists(st.builds(entry, st.integers(0, 9), end=st.booleans()), min_size=1))
def test_a_group_ends_once_at_its_end(group: list[Entry]) -> None:
    closed = as_group(group)
    assert [one.end for one in closed] == [False] * (len(group) - 1) + [True]
    assert [one.payload for one in closed] == [one.payload for one in group]


def test_a_record_weighs_more_than_its_payload() -> None:
    assert size_of([entry(10, end=True), entry(0, end=True)]) == 10 + 2 * OVERHEAD


async def test_a_session_that_ended_before_its_turn_to_be_asked_is_not_asked() -> None:
    asked = 0
    async with rig(autosave=None) as r:
        t = r.track()

        async def contribute() -> None:
            nonlocal asked
            asked += 1
            await anyio.sleep(1)

        async def save() -> None:
            with pytest.raises(LeaseLostError):
                await r.saver.save(t)

        t.before_capture = contribute
        r.append(t)
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(save)
            await anyio.sleep(0.5)
            r.saver.lose(t)
    assert asked == 1


async def test_nothing_is_kept_of_a_session_whose_contributors_were_asked() -> None:
    def tracked() -> int:
        gc.collect()
        return sum(type(one) is Tracked for one in gc.get_objects())

    async def saved(r: Rig) -> None:
        t = r.track()

        async def contribute() -> None:
            r.append(t)

        t.before_capture = contribute
        r.append(t)
        await r.saver.save(t)
        assert r.stored(t) == 2
        r.saver.untrack(t)

    async with rig() as r:
        others = tracked()
        await saved(r)
        await anyio.sleep(10)  # what was to look at it has gone on
        assert tracked() == others
