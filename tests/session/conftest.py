"""Managers over one place, as several processes would have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Shutdown, connect, store_for
from perdure.session.manager import SessionManager
from perdure.session.runtime import Clock
from perdure.stores.memory import MemoryBacking, MemoryStore

Connect = Callable[..., SessionManager]


@pytest.fixture(params=["memory", "file"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Return a connect() that always leads to the same place, each time as a new process."""
    backing = MemoryBacking()

    def make(*, clock: Clock | None = None, **options: object) -> SessionManager:
        store = (
            MemoryStore(backing=backing)
            if request.param == "memory"
            else store_for(tmp_path / "data")
        )
        options.setdefault("shutdown", Shutdown(signals=False))
        manager = connect(store, **options)  # type: ignore[arg-type]
        manager._clock = clock
        return manager

    return make
