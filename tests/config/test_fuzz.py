"""Any bytes at all: they fit, or a ConfigError says where they do not."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import given, strategies as st

from perdure.config.schema import Declaration, declaration_of
from perdure.config.yaml_reader import read
from perdure.errors import ConfigError
from tests.config.conftest import SEED
from tests.config.test_hostile import HOSTILE
from tests.config.test_json_schema import plain, validator

SMALL = [
    text
    for text in (one[0] for one in HOSTILE.values())
    if isinstance(text, str) and len(text) < 500
]
PIECES = st.sampled_from(
    ["version", "config", "init", "on_new_session", "persist_paths", "store", "autosave"]
    + [
        ": ",
        ":",
        "\n",
        "\n  ",
        "\n    ",
        "- ",
        "? ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "'",
        '"',
        "#",
        "|\n",
    ]
    + ["&a ", "*a", "!!str ", "<<", "1", "2", "null", "~", "true", "NO", "{{ uuid }}", "{{", "../x"]
    + [
        "\t",
        "\r",
        "\x00",
        "\ufeff",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "é",
        "\u2028",
        "\x85",
        "server",
    ]
)
YAML = st.lists(PIECES, max_size=30).map("".join)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Return a file that was nearly right."""
    text = draw(st.sampled_from([SEED, *SMALL]))
    at = draw(st.integers(0, len(text)))
    until = draw(st.integers(at, min(len(text), at + 8)))
    return text[:at] + draw(PIECES) + text[until:]


@pytest.fixture(params=["libyaml", "python"], autouse=True, scope="module")
def loader(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.delattr(yaml, "CSafeLoader")
        yield


def outcome(data: bytes) -> Declaration | None:
    """Return what it declares; None if it was refused in the right form."""
    try:
        return declaration_of(read(data, "p.yaml"), "p.yaml")
    except ConfigError as error:
        check_place(error, data)
        return None


def check_place(error: ConfigError, data: bytes) -> None:
    """Require a place that is in the file, or right behind it."""
    line, column = error.facts["line"], error.facts["column"]
    assert str(error).startswith(f"p.yaml, line {line}, column {column}: ")
    ends = (b"\n", b"\r", b"\x85", "\u2028".encode())
    assert 1 <= int(str(line)) <= sum(map(data.count, ends)) + 2


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    declaration = outcome(data)
    assert declaration is None or b"version" in data


@hypothesis.settings(max_examples=300)
@given(st.one_of(YAML, mutated()))
def test_anything_that_looks_like_yaml(text: str) -> None:
    declaration = outcome(text.encode())
    if declaration is None:
        return
    assert "version" in text
    assert list(validator().iter_errors(plain(read(text.encode(), "p.yaml")))) == []
