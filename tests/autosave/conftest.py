"""All async tests of autosave run in virtual time, on both loops."""

from __future__ import annotations

from typing import Any

import pytest

from tests import _virtual


@pytest.fixture(params=_virtual.BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return _virtual.virtual(request.param)
