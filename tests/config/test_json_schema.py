"""The JSON Schema for editors says what the parser says."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from perdure.cli.config import SCHEMA
from perdure.config.schema import FIELDS, PRESETS, SECTIONS, declaration_of
from perdure.config.yaml_reader import YamlNode, read
from perdure.errors import ConfigError
from tests.config.conftest import SEED
from tests.config.test_hostile import HOSTILE


@cache
def validator() -> Any:
    """Import jsonschema, for as long as a second, where it is used."""
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text("utf-8")))


# What a schema cannot say: one value that depends on another, and two spellings of one path.
BEYOND = {"a debounce too long", "off with settings", "a path twice", "a control in a key"}
BEYOND |= {"a version with a point"}  # 1.0 is an integer to JSON Schema
GOOD = [
    SEED,
    "version: 1\n",
    "version: 1\nconfig:\nstore:\nautosave:\nretention:\nencryption:\npersist_paths:\n",
    "version: 1\nconfig: {a: , b: {init: 7}, c: {init: '{ x } {{uuid}}'}, d: {init: true}}\n",
    "version: 1\nstore: {url_env: X}\nencryption: {key_file: k}\nautosave: off\n",
    "version: 1\nstore: redis://h\nautosave: {preset: server}\nretention: {keep_days: 1.5}\n",
    "version: 1\nautosave: {debounce: 1, max_delay: 2, on_turn_end: false, max_bytes: 9}\n",
]


def plain(node: YamlNode) -> Any:
    if node.is_mapping:
        return {key.value: plain(value) for key, value in node.pairs}
    if isinstance(node.value, tuple):
        return [plain(one) for one in node.value]
    return node.value


@pytest.mark.parametrize("text", GOOD)
def test_both_take_what_fits(text: str) -> None:
    node = read(text.encode(), "x")
    declaration_of(node, "x")
    assert list(validator().iter_errors(plain(node))) == []


def test_both_refuse_what_does_not() -> None:
    """Whatever of the corpus is YAML at all."""
    taken = {name: by for name in sorted(set(HOSTILE) - BEYOND) if (by := takers(HOSTILE[name][0]))}
    assert taken == {}


def takers(text: bytes | str) -> list[str]:
    """Return who takes a file that nobody should."""
    data = text.encode() if isinstance(text, str) else text
    try:
        node = read(data, "x")
    except ConfigError:
        return []  # not for a schema to say
    took = [] if list(validator().iter_errors(plain(node))) else ["the schema"]
    try:
        declaration_of(node, "x")
    except ConfigError:
        return took
    return [*took, "the parser"]


def test_it_knows_every_section_field_and_preset() -> None:
    schema = validator().schema
    assert set(schema["properties"]) == set(SECTIONS)
    assert set(schema["properties"]["config"]["additionalProperties"]["properties"]) == set(FIELDS)
    assert set(schema["$defs"]["preset"]["enum"]) == set(PRESETS)
    validator().check_schema(schema)
