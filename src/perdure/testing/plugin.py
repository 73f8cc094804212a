"""A pytest plugin with fixtures for sessions; it loads only on request.

In a conftest: ``pytest_plugins = ["perdure.testing.plugin"]``, or ``-p perdure.testing.plugin``.
Its fixtures work in async tests that anyio's plugin runs, on each of its loops, and in those
of pytest-asyncio, in the loop of the test's own loop_scope. Each test has a sandbox of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from perdure.agent.llm.scripted import Answer, ScriptedModel, ScriptedReply
    from perdure.session.manager import SessionManager
    from perdure.testing.faulty import SwitchedStore
    from perdure.testing.sandbox import ManualClock, Sandbox, SandboxOptions


ASYNCIO = ("asyncio", "pytest_asyncio.plugin")
"""The names under which pytest-asyncio may be known: as an entry point, and by ``-p``."""


__all__ = [
    "MakeModel",
    "ReopenSession",
    "perdure_clock",
    "perdure_options",
    "perdure_reopen",
    "perdure_sandbox",
    "perdure_scripted_model",
    "perdure_sessions",
    "perdure_store",
]


class ReopenSession(Protocol):
    """The type of `perdure_reopen`."""

    def __call__(self, *, crash: bool = True) -> Awaitable[SessionManager]:
        """See `perdure.testing.Sandbox.reopen`."""
        ...


class MakeModel(Protocol):
    """The type of `perdure_scripted_model`."""

    def __call__(self, *script: ScriptedReply | Answer, chunk_chars: int = 16) -> ScriptedModel:
        """Return a model that answers by a script, or without one repeats its input."""
        ...


# the fixtures


@pytest.fixture
def perdure_options() -> SandboxOptions:
    """Options for the manager, as of ``perdure.connect``; override it to change some."""
    return {}


@pytest.fixture
def perdure_clock() -> ManualClock:
    """Autosave's clock: it advances only by ``await perdure_clock.advance(seconds)``."""
    from perdure.testing.sandbox import ManualClock

    return ManualClock()


@pytest.fixture
def perdure_sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """All of it in one object: `perdure.testing.Sandbox`."""
    sandbox: Sandbox = request.getfixturevalue(_fixture_for(request))
    return sandbox


@pytest.fixture
def perdure_sessions(perdure_sandbox: Sandbox) -> SessionManager:
    """A connected manager; saves at once, or by `perdure_clock` if the test uses it."""
    return perdure_sandbox.sessions


@pytest.fixture
def perdure_store(perdure_sandbox: Sandbox) -> SwitchedStore:
    """The manager's store, with ``down()``, ``up()`` and ``fail_next(…)``."""
    return perdure_sandbox.store


@pytest.fixture
def perdure_reopen(perdure_sandbox: Sandbox) -> ReopenSession:
    """Crashes and connects again when awaited: what the new manager finds was durable."""
    return perdure_sandbox.reopen


@pytest.fixture
def perdure_scripted_model() -> MakeModel:
    """Makes models that need no key: ``perdure_scripted_model("Hello.", "Bye.")``."""
    from perdure.agent.llm.scripted import EchoModel, ScriptedModel

    def make(*script: ScriptedReply | Answer, chunk_chars: int = 16) -> ScriptedModel:
        if not script:
            return EchoModel(chunk_chars=chunk_chars)
        return ScriptedModel(*script, chunk_chars=chunk_chars)

    return make


# on whichever loop the test runs


@pytest.fixture
def _perdure_new_sandbox(
    request: pytest.FixtureRequest, perdure_options: SandboxOptions
) -> Sandbox:
    from perdure.testing.sandbox import Sandbox

    wanted = "perdure_clock" in request.fixturenames
    clock: ManualClock | None = request.getfixturevalue("perdure_clock") if wanted else None
    return Sandbox(clock=clock, **perdure_options)


@pytest.fixture
async def _perdure_sandbox_on_anyio(
    _perdure_new_sandbox: Sandbox,
) -> AsyncGenerator[Sandbox, None]:
    async with _perdure_new_sandbox as sandbox:
        yield sandbox


def pytest_configure(config: pytest.Config) -> None:
    """Add the fixtures for pytest-asyncio, if it is active."""
    if _with_asyncio(config):
        from perdure.testing import _asyncio_fixtures

        config.pluginmanager.register(_asyncio_fixtures, "perdure.testing.asyncio")


def _fixture_for(request: pytest.FixtureRequest) -> str:
    """Return the fixture that runs in the test's own loop."""
    if _with_asyncio(request.config):
        from perdure.testing import _asyncio_fixtures

        name = _asyncio_fixtures.fixture_for(request.node)
        if name is not None:
            return name
    if "anyio_backend" in request.fixturenames:
        return "_perdure_sandbox_on_anyio"
    raise pytest.UsageError(
        f"{request.node.nodeid} asks for sessions, but no event loop runs it: make it `async def`, "
        "and mark it with pytest.mark.anyio or pytest.mark.asyncio, or set the auto mode of either"
    )


def _with_asyncio(config: pytest.Config) -> bool:
    return any(map(config.pluginmanager.hasplugin, ASYNCIO))
