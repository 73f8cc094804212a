"""One deadline: its stations never take more than it, whatever each of them takes."""

from __future__ import annotations

from typing import get_args

from hypothesis import example, given, strategies as st

from perdure.autosave.deadline import Deadline, Station
from perdure.autosave.options import Shutdown

STATIONS: tuple[Station, ...] = get_args(Station)
TIMES = st.floats(0, 100)
SHARES = st.lists(st.floats(0, 1), min_size=len(STATIONS), max_size=len(STATIONS))
ALL = [1.0] * len(STATIONS)


@given(deadline=TIMES, turns=st.floats(0, 1), grace=TIMES, shares=SHARES, seconds=st.none() | TIMES)
@example(deadline=20.0, turns=0.25, grace=1.0, shares=ALL, seconds=None)
@example(deadline=0.0, turns=0.0, grace=0.0, shares=ALL, seconds=None)
def test_stations_that_take_all_of_their_time_end_by_the_deadline(
    deadline: float, turns: float, grace: float, shares: list[float], seconds: float | None
) -> None:
    options = Shutdown(deadline=deadline, turn_grace=turns * deadline, hard_grace=grace)
    given = deadline if seconds is None else seconds
    whole = Deadline.of(options, 0.0, seconds)
    assert (whole.work, whole.end) == (given, given + grace)
    now = 0.0
    for station, share in zip(STATIONS, shares, strict=True):
        until = max(whole.until(station, now), now)
        assert until <= whole.end
        now += (until - now) * share
    assert now <= whole.end


def test_stations_that_hang_after_the_deadline_leave_time_to_close_the_store() -> None:
    whole = Deadline.of(Shutdown(deadline=20, turn_grace=5, hard_grace=1), 0.0)
    now = 0.0
    for station in STATIONS[:-1]:
        now = max(whole.until(station, now), now)
        assert now < whole.end


def test_turns_have_no_longer_than_the_caller_gives_the_whole_close() -> None:
    whole = Deadline.of(Shutdown(deadline=20, turn_grace=5), 100.0, 2.0)
    assert whole == Deadline(102.0, 102.0, 103.0)
