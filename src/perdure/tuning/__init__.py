"""Choice of an autosave setting for a store and a workload: measure, replay, advise.

`observed` reads from a store when its sessions changed, or `made_up` makes such a workload;
`measure` finds out what the store can take; `advise` replays the workload with each setting,
through the same decisions that autosave makes, and weighs what comes out.
"""

from __future__ import annotations

from perdure.tuning.advice import (
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
    replay,
    workload_of,
)
from perdure.tuning.chart import chart
from perdure.tuning.measure import made_up, measure, observed

__all__ = [
    "Advice",
    "LoadLevel",
    "Option",
    "Requirements",
    "SettingCost",
    "StoreMeasurement",
    "Workload",
    "WorkloadChange",
    "advise",
    "changes_of",
    "chart",
    "made_up",
    "measure",
    "observed",
    "replay",
    "workload_of",
]
