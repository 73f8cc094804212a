"""Managers over one place, as several processes would have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Autosave, LeaseOptions, Limits, Shutdown, connect, store_for
from perdure.session.manager import SessionManager
from perdure.session.runtime import Clock
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore

Place = Callable[[], Store]


class Connect:
    """A connect() that always leads to the same place, each time as a new process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.store: Store
        """The newest manager's."""

    def __call__(self, *, clock: Clock | None = None, **options: Any) -> SessionManager:
        self.store = self._place()
        options.setdefault("shutdown", Shutdown(signals=False))
        if clock is None:
            return connect(self.store, **options)
        options = {"autosave": Autosave(), "lease": LeaseOptions(), "limits": Limits(), **options}
        return SessionManager(self.store, clock=clock, **options)


@pytest.fixture(params=["memory", "file"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    backing = MemoryBacking()
    if request.param == "memory":
        return Connect(lambda: MemoryStore(backing=backing))
    return Connect(lambda: store_for(tmp_path / "data"))


@pytest.fixture(params=["memory", "file", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return what opens the same place, each time as another process would."""
    backing, url = MemoryBacking(), f"sqlite:///{tmp_path / 'data.db'}"
    return {
        "memory": lambda: MemoryStore(backing=backing),
        "file": lambda: store_for(tmp_path / "data"),
        "sqlite": lambda: store_for(url),
    }[request.param]
