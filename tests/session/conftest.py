"""Managers over one place, as several processes would have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Shutdown, connect, store_for
from perdure.session.manager import SessionManager
from perdure.session.runtime import Clock
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore

Connect = Callable[..., SessionManager]
Place = Callable[[], Store]


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


@pytest.fixture(params=["memory", "file", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return what opens the same place, each time as another process would."""
    backing, url = MemoryBacking(), f"sqlite:///{tmp_path / 'data.db'}"
    return {
        "memory": lambda: MemoryStore(backing=backing),
        "file": lambda: store_for(tmp_path / "data"),
        "sqlite": lambda: store_for(url),
    }[request.param]
