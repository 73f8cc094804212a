"""The table of what providers accept: in the page as in the code, and read as it is written."""

from __future__ import annotations

import pytest

from perdure.providers import FORMATS
from perdure.providers.request_rules import RULES, Rule, broken, places
from tests.provider_rules import main

REQUEST = {
    "system": [{"type": "text", "cache_control": "s"}],
    "messages": [
        {"role": "user", "content": "Hi", "name": "ada"},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "content": [{"type": "text", "cache_control": "in"}]},
                {"type": "text", "cache_control": "out"},
                "junk",
            ],
        },
    ],
}


def test_the_page_has_the_table_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["provider_rules"])
    assert main() == 0


def test_each_format_has_its_rules() -> None:
    assert set(RULES) == set(FORMATS)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("messages[].name", ["ada"]),
        ("messages[role=assistant].name", []),
        ("messages[].content", ["Hi", REQUEST["messages"][1]["content"]]),  # type: ignore[index]
        ("messages[role=user].content[type=text].cache_control", ["out"]),
        ("messages[].content[type!=text].content[].cache_control", ["in"]),
        ("messages[].content[*].cache_control", ["in", "out"]),
        ("system[].cache_control", ["s"]),
        ("system[].text", []),
    ],
)
def test_a_path_names_values_in_their_order(path: str, found: list[object]) -> None:
    assert [place.value for place in places(REQUEST, path)] == found


def test_a_field_that_is_none_breaks_no_rule() -> None:
    rule = Rule(fields=("a",), takes="", otherwise="", cure="left out", pattern="x")
    assert broken(rule, {"a": None}) == []
    assert [place.key for place in broken(rule, {"a": "y"})] == ["a"]
