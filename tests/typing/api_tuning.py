"""Tuning, as a type checker sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from perdure import Autosave
from perdure.records.records import Record
from perdure.store import Store
from perdure.tuning import (
    Advice,
    LoadLevel,
    Option,
    Requirements,
    SettingCost,
    StoreMeasurement,
    Workload,
    WorkloadChange,
    advise,
    changes_of,
    chart,
    made_up,
    measure,
    observed,
    replay,
    workload_of,
)


async def tune(store: Store, records: Sequence[Record]) -> None:
    assert_type(await observed(store, most=1000), Workload)
    assert_type(changes_of(records), list[WorkloadChange])
    assert_type(workload_of([changes_of(records)], "a log"), Workload)
    workload = made_up(sessions=10, seconds=60, seed=1)
    measured = await measure(store, size=workload.size, seconds=1.0)
    assert_type(measured, StoreMeasurement)
    assert_type(measured.levels, tuple[LoadLevel, ...])
    assert_type(replay(workload, Autosave(), save_time=measured.save_time), SettingCost)
    advice = advise(workload, measured, Requirements(sessions=10, max_loss=5.0))
    assert_type(advice, Advice)
    assert_type(advice.best, Option | None)
    assert_type(chart(advice, 10), str)
