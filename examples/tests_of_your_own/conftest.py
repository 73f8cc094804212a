"""The one line that brings the fixtures, and what this project wants otherwise."""

from __future__ import annotations

import pytest

from perdure import Autosave, EngineOptions
from perdure.testing import SandboxOptions

pytest_plugins = ["perdure.testing.plugin"]


@pytest.fixture
def perdure_options() -> SandboxOptions:
    """Autosave as the application has it, and no waiting before a save is tried again."""
    return {
        "autosave": Autosave.server(),
        "engine": EngineOptions(backoff_base=0.001, backoff_cap=0.001, jitter=0, eager=False),
    }
