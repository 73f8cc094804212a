"""A world for agents: a place that managers connect to, and what a kill would leave of it."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure import Message, Shutdown, connect, store_for
from perdure.agent import Agent, AgentConfig, AgentFactory, EchoModel
from perdure.session.manager import SessionManager
from perdure.store import Store
from perdure.stores.memory import MemoryBacking, MemoryStore


class World:
    """One store's content, as processes come and go."""

    def __init__(self, content: MemoryBacking | Path) -> None:
        self.content = content
        self.kills = 0
        self.store: Store
        """What the newest process has of it."""

    def connect(self, **options: object) -> SessionManager:
        """Return what a new process connects with."""
        options.setdefault("shutdown", Shutdown(signals=False))
        content = self.content
        is_memory = isinstance(content, MemoryBacking)
        self.store = MemoryStore(backing=content) if is_memory else store_for(content)
        return connect(self.store, **options)  # type: ignore[arg-type]

    @asynccontextmanager
    async def agent(
        self, config: AgentConfig, *, agent_id: str = "ada", **options: object
    ) -> AsyncGenerator[Agent, None]:
        """Run an agent, in a new process."""
        async with self.connect(**options) as sessions:
            made = await AgentFactory(sessions).create_agent(config, agent_id=agent_id)
            async with made as agent:
                yield agent

    async def context(self) -> list[Message]:
        """Return the agent's working context, as it is stored."""
        async with self.connect() as sessions:
            view = await sessions.load("ada")
            assert view is not None
            return view.context()

    def killed(self) -> World:
        """Return the world as it would be if this process were killed now."""
        if isinstance(self.content, MemoryBacking):
            image = copy.deepcopy(self.content)
            for owner in image.owners.values():
                owner.alive = False
            return World(image)
        self.kills += 1
        image_path = self.content.with_name(f"{self.content.name}-{self.kills}")
        _copy_at_a_moment(self.content, image_path)
        return World(image_path)


def _copy_at_a_moment(folder: Path, image: Path) -> None:
    """Copy a folder in which a fold may be writing, as it was at one moment."""
    for _ in range(1000):
        before = _files(folder)
        with contextlib.suppress(shutil.Error, FileNotFoundError):  # a temporary file is gone
            shutil.copytree(folder, image)
            if _files(folder) == before:
                return
        shutil.rmtree(image, ignore_errors=True)
    raise AssertionError(f"{folder} does not come to rest")


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found[path] = status.st_size, status.st_mtime_ns
    return found


@pytest.fixture(params=["memory", "file"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """Return an empty world, in memory and on files."""
    return World(MemoryBacking() if request.param == "memory" else tmp_path / "data")


@pytest.fixture
def memory_world() -> World:
    """Return an empty world in memory, for what has nothing to do with the store."""
    return World(MemoryBacking())


Configure = Callable[..., AgentConfig]


@pytest.fixture
def configured() -> Configure:
    """Return a maker of configs, with an echo for a model."""

    def make(**options: object) -> AgentConfig:
        return AgentConfig(**{"name": "tester", "model": EchoModel(), **options})  # type: ignore[arg-type]

    return make


__all__ = ["AgentFactory", "Configure", "World"]
