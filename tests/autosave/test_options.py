"""Options are checked where they are made, and the error names option, value and what fits."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.autosave.options import Autosave, EngineOptions, Shutdown
from perdure.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (Autosave, {"debounce": -1}, "debounce=-1"),
        (Autosave, {"debounce": True}, "debounce=True"),
        (Autosave, {"debounce": 31.0}, "max_delay=30.0"),
        (Autosave, {"max_delay": float("inf")}, "max_delay=inf"),
        (Autosave, {"debounce": float("nan")}, "debounce=nan"),
        (Autosave, {"debounce": "2 s"}, "debounce='2 s'"),
        (Autosave, {"max_delay": None}, "max_delay=None"),
        (Autosave, {"max_bytes": 0}, "max_bytes=0"),
        (Autosave, {"max_records": 0}, "max_records=0"),
        (Shutdown, {"deadline": -1}, "deadline=-1"),
        (Shutdown, {"turn_grace": 30}, "turn_grace=30"),
        (Shutdown, {"spill": True}, "spill=True"),
        (Shutdown, {"spill": ""}, "spill=''"),
        (Shutdown, {"deadline": "20"}, "deadline='20'"),
        (EngineOptions, {"save_timeout": "10"}, "save_timeout='10'"),
        (EngineOptions, {"outage_policy": "hope"}, "'hope'"),
        (EngineOptions, {"dirty_soft": 2, "dirty_hard": 1}, "dirty_hard=1"),
        (EngineOptions, {"jitter": 1.0}, "jitter=1.0"),
        (EngineOptions, {"batch_max": 0}, "batch_max=0"),
        (EngineOptions, {"save_timeout": 0}, "save_timeout=0"),
        (EngineOptions, {"hibernate_after": 0}, "hibernate_after=0"),
    ],
)
def test_a_value_that_does_not_fit_is_named(kind: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        kind(**options)


def test_the_presets_are_what_they_say() -> None:
    assert Autosave.server().max_delay == 10.0
    assert Autosave.write_through().debounce == Autosave.write_through().max_delay == 0.0
    assert EngineOptions(hibernate_after=float("inf")).hibernate_after == float("inf")
