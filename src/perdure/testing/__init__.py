"""Tools for your own tests: sessions that crash and are restored, injected faults, a manual clock.

Start with `Sandbox`; `perdure.testing.plugin` provides pytest fixtures for it, which you enable
with ``pytest_plugins = ["perdure.testing.plugin"]`` in a conftest. `perdure.testing.conformance` is
the test suite for authors of stores.

Names resolve when they are first used: only the plugin and the suite import pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.agent.llm.scripted import (
        EchoModel as EchoModel,
        ScriptedModel as ScriptedModel,
        call as call,
    )
    from perdure.stores.memory import MemoryBacking as MemoryBacking, MemoryStore as MemoryStore
    from perdure.testing import conformance as conformance
    from perdure.testing.faulty import (
        Crash as Crash,
        Faults as Faults,
        FaultyStore as FaultyStore,
        How as How,
        SwitchedStore as SwitchedStore,
    )
    from perdure.testing.sandbox import (
        ManualClock as ManualClock,
        Sandbox as Sandbox,
        SandboxOptions as SandboxOptions,
        assert_saved as assert_saved,
        wait_saved as wait_saved,
    )

_HOMES = {
    "perdure.agent.llm.scripted": ("EchoModel", "ScriptedModel", "call"),
    "perdure.stores.memory": ("MemoryBacking", "MemoryStore"),
    "perdure.testing.sandbox": (
        "ManualClock",
        "Sandbox",
        "SandboxOptions",
        "assert_saved",
        "wait_saved",
    ),
    "perdure.testing.faulty": ("Crash", "Faults", "FaultyStore", "How", "SwitchedStore"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["conformance", *_HOME_OF]  # noqa: PLE0604  # all of them strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    _get, __dir__ = lazy(__name__, _HOME_OF, "conformance")

    def __getattr__(name: str) -> Any:
        if name == "conformance":  # a module
            return importlib.import_module("perdure.testing.conformance")
        return _get(name)
