"""One table of events: what is emitted, what type checkers know, and what the page lists."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import msgspec
import pytest

import perdure.events
from perdure.session import events
from perdure.session.session import Session
from tests.source_tree import ROOT

ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \|(.*?)\|(.+)\|$", re.MULTILINE)


def typed_names() -> dict[str, str]:
    """Return the events that type checkers know, with the types that their hooks get."""
    source = inspect.getsource(events.OnEvent)
    return dict(re.findall(r'event: Literal\["(\w+)"\], hook: Hook\[(\w+)\]', source))


def emitted_names() -> dict[str, str]:
    return {name: payload.__name__ for payload, name in events.NAMES.items()}


def test_type_checkers_know_each_event_with_what_is_emitted() -> None:
    assert typed_names() == {"before_save": "SessionT_co", **emitted_names()}
    assert set(typed_names()) == set(get_args(events.EventName))


def test_a_payload_is_called_as_its_event_is_and_is_public() -> None:
    called = emitted_names()
    assert called.pop("pruned") == "PruneReport"  # what `prune` returns
    assert {re.sub(r"(?<!^)(?=[A-Z])", "_", payload).lower() for payload in called.values()} == set(
        called
    )
    assert set(perdure.events.__all__) == set(emitted_names().values())


def fields(payload: Any) -> set[str]:
    return {one.name for one in msgspec.structs.fields(payload)}


def test_the_page_lists_each_event_with_its_payload_and_fields() -> None:
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    rows = {name: (payload, cells) for name, payload, cells, _ in ROW.findall(page)}
    assert rows.pop("before_save")[0] == Session.__name__
    assert {name: payload for name, (payload, _) in rows.items()} == emitted_names()
    for payload, cells in rows.values():
        written = set(re.findall(r"`(\w+)`", cells))
        assert written == fields(getattr(perdure.events, payload)), payload


@pytest.mark.parametrize("payload", events.NAMES)
def test_every_field_is_typed_for_who_reads_it(payload: type) -> None:
    assert all(one.type is not Any for one in msgspec.structs.fields(payload))
