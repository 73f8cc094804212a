"""Versions of the SDKs that the adapters were tested with, and stores that others have written."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import SessionManager
from perdure.adapters import versions
from perdure.errors import FormatError
from perdure.session.internals import accept

ROOT = Path(__file__).parents[2]
ADAPTERS = {
    "agent-framework-core": ("agent_framework", "agent_framework"),
    "google-adk": ("google.adk", "google_adk_events"),
    "langgraph": ("langgraph.graph", "langgraph"),
    "langgraph-checkpoint": ("langgraph.checkpoint.base", "langgraph"),
    "openai-agents": ("agents", "openai_agents"),
    "pydantic-ai-harness": ("pydantic_ai_harness", "pydantic_ai_steps"),
    "pydantic-ai-slim": ("pydantic_ai", "pydantic_ai"),
}
"""Each SDK's module, and the adapter's that says so."""


@pytest.fixture
def anyio_backend() -> str:
    """Some SDKs run on asyncio alone."""
    return "asyncio"


@pytest.fixture(autouse=True)
def unwarned() -> Iterator[None]:
    versions.warn_untested.cache_clear()
    yield
    versions.warn_untested.cache_clear()


@pytest.mark.parametrize("package", versions.TESTED)
@pytest.mark.parametrize("installed", ["0.1", "99.0.0", "of an unknown version"])
def test_an_untested_version_is_named_once(
    package: str, installed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "_installed", lambda _: installed)
    for _ in range(2):
        versions.warn_untested(package)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{package} {installed} was not tested" in record.getMessage()


@pytest.mark.parametrize("package", versions.TESTED)
def test_tested_versions_are_not_warned_of(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for installed in versions.TESTED[package]:
        monkeypatch.setattr(versions, "_installed", lambda _, it=installed: it)
        versions.warn_untested.cache_clear()
        versions.warn_untested(package)
    assert caplog.records == []


@pytest.mark.parametrize("package", ADAPTERS)
def test_each_adapter_warns(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, name = ADAPTERS[package]
    pytest.importorskip(module)
    adapter = importlib.import_module(f"perdure.adapters.{name}")
    versions.warn_untested.cache_clear()
    monkeypatch.setattr(versions, "_installed", lambda _: "99.0")
    if package == "openai-agents":  # which imports the SDK for its first session
        adapter.PerdureSession.in_memory()
    else:
        spec = importlib.util.spec_from_file_location("loaded_again", adapter.__file__)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, loaded)
        spec.loader.exec_module(loaded)
    assert any(f"{package} 99.0 was not tested" in each.getMessage() for each in caplog.records)


def test_the_lowest_versions_are_those_of_the_extras_and_of_the_pages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    floors = {
        match[1]: match[2]
        for extra in extras.values()
        for each in extra
        if (match := re.match(r"([\w-]+)>=([\d.]+)$", each))
    }
    pages = "".join(
        (ROOT / "docs" / f"{name}.md").read_text()
        for name in (
            *("agent-framework", "langgraph", "openai-agents", "google-adk", "pydantic-ai"),
            "claude-agent-sdk",
        )
    )
    for package, (lowest, _) in versions.TESTED.items():
        assert f"{lowest}.".startswith(f"{floors[package]}.")
        assert f"{package} {lowest}" in pages


# Stores that another version of an SDK has written


@pytest.fixture
async def sessions() -> Any:
    async with perdure.connect("memory:") as manager:
        yield manager


async def test_an_item_of_an_unknown_kind_comes_back(sessions: SessionManager) -> None:
    from perdure.adapters import PerdureSession

    items = [{"type": "from_the_future", "of": [1, None]}, {"role": "oracle", "content": [{}]}]
    async with PerdureSession("ada", sessions) as session:
        await session.add_items(items)
    assert await PerdureSession("ada", sessions).get_items() == items


async def test_an_event_with_an_unknown_field_is_named(sessions: SessionManager) -> None:
    pytest.importorskip("google.adk")
    from google.adk.events.event import Event

    from perdure.adapters import PerdureSessionService
    from perdure.adapters.google_adk_events import encoded

    service = PerdureSessionService(sessions)
    where = {"app_name": "harbor", "user_id": "ada", "session_id": "tides"}
    await service.create_session(**where)
    stored = json.loads(Event(id="e7", author="ada").model_dump_json(exclude_none=True))
    stored["actions"]["retired"] = "secret"
    async with sessions.open("harbor/ada", session="tides") as held:
        accept(held, encoded(json.dumps(stored).encode(), is_posted=False))

    with pytest.raises(
        FormatError, match=r"session harbor/ada/tides: event e7.*actions\.retired"
    ) as no:
        await service.get_session(**where)
    assert "secret" not in str(no.value)
    assert no.value.facts["path"] == "actions.retired"


async def test_an_entry_of_an_unknown_kind_is_named(
    sessions: SessionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.messages import ModelRequest, UserPromptPart

    from perdure.adapters import PerdureConversationStore, pydantic_ai

    store = PerdureConversationStore(sessions)
    message = ModelRequest(parts=[UserPromptPart("secret")])
    with monkeypatch.context() as patch:
        patch.setattr(pydantic_ai, "MESSAGES", Newer())
        await store.save(Conversation(messages=[message], conversation_id="ada"))

    with pytest.raises(FormatError, match=r"conversation ada: .*user-prompt-2") as no:
        await store.load("ada")
    assert "secret" not in str(no.value)


class Newer:
    """Dumps messages as a newer version might."""

    def dump_json(self, messages: list[Any]) -> bytes:
        from pydantic_ai.messages import ModelMessagesTypeAdapter

        data = ModelMessagesTypeAdapter.dump_json(messages)
        return data.replace(b'"user-prompt"', b'"user-prompt-2"')

    def dump_python(self, messages: list[Any], *, mode: str) -> Any:
        from pydantic_ai.messages import ModelMessagesTypeAdapter

        return ModelMessagesTypeAdapter.dump_python(messages, mode=mode)

    def validate_python(self, values: Any) -> None:
        """Read what it dumps."""

    def validate_json(self, data: bytes) -> None:
        """Read what it dumps."""
