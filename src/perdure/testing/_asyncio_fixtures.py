"""The plugin's fixtures for tests that pytest-asyncio runs; only imported where it is at work.

pytest-asyncio fixes the loop of a fixture where it is defined, so there is one for each
loop_scope that a test may have.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from perdure.testing.sandbox import Sandbox


Scope = Literal["function", "class", "module", "package", "session"]

SCOPES: Final[tuple[Scope, ...]] = ("function", "class", "module", "package", "session")


def fixture_for(item: pytest.Item) -> str | None:
    """Return the name of the fixture in the loop of a test; None if another plugin runs it."""
    marker = item.get_closest_marker("asyncio")
    if marker is None or not pytest_asyncio.is_async_test(item):
        return None
    given = marker.kwargs.get("loop_scope") or marker.kwargs.get("scope")
    return _name(given or item.config.getini("asyncio_default_test_loop_scope"))


def _name(scope: Scope) -> str:
    return f"_perdure_sandbox_on_asyncio_{scope}"


def _fixture(scope: Scope) -> Any:
    @pytest_asyncio.fixture(name=_name(scope), loop_scope=scope)
    async def sandbox(_perdure_new_sandbox: Sandbox) -> AsyncGenerator[Sandbox, None]:
        async with _perdure_new_sandbox as opened:
            yield opened

    return sandbox


# pytest finds the fixtures of a plugin among its attributes.
globals().update({_name(scope): _fixture(scope) for scope in SCOPES})
