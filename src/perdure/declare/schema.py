"""What persistence.yaml may say, and what it becomes: a `Declaration`.

Pure: a tree of nodes in, values out. Whatever does not fit is an error with line and column, and
all of them are found in one go.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from perdure.autosave.options import Autosave
from perdure.codec.redaction import redact
from perdure.declare import template
from perdure.declare.nodes import Node, Problem, Problems, kind_of, shown
from perdure.declare.sections import (
    KeySource,
    StorePlace,
    autosave_in,
    encryption_in,
    persist_paths_in,
    retention_in,
    store_in,
)
from perdure.errors import ConfigError, TemplateError
from perdure.session.retention import Retention

__all__ = ["FORMAT", "ConfigKey", "Declaration", "declaration_of", "name_of"]

FORMAT: Final = 1
"""The version of persistence.yaml that this release reads."""
MAX_KEYS: Final = 1000
MAX_NAME_BYTES: Final = 200

SECTIONS: Final = (
    *("version", "config", "persist_paths"),
    *("store", "autosave", "retention", "encryption"),
)
FIELDS: Final = ("description", "init", "on_new_session")

OnNewSession = Literal["preserve", "regenerate"]
Initial = str | int | float | bool | None


class ConfigKey(msgspec.Struct, frozen=True, kw_only=True):
    """One declared value."""

    name: str
    description: str = ""
    init: Initial = None
    """What it begins with; text is a template."""
    on_new_session: OnNewSession = "preserve"

    @property
    def is_regenerated(self) -> bool:
        """Whether each new session gets a value of its own."""
        return self.on_new_session == "regenerate"


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What a persistence.yaml says."""

    config: dict[str, ConfigKey] = {}
    persist_paths: tuple[str, ...] = ()
    """Folders below the agent's home, as ``a/b``: relative, and never leading out."""
    store: StorePlace | None = None
    autosave: Autosave | UnsetType | None = UNSET
    """None for off; UNSET where the file says nothing."""
    retention: Retention | None = None
    encryption: KeySource | None = None
    warnings: tuple[Problem, ...] = ()
    """What is allowed, and not wise."""


def declaration_of(root: Node, source: str) -> Declaration:
    """Return what a file declares.

    Raises:
        ConfigError: Something does not fit; ``facts["problems"]`` holds all of it.
        TemplateError: The first thing that does not fit is a template.

    """
    problems, warnings = Problems(source), Problems(source, most=MAX_KEYS + 1)
    if not root.is_mapping:
        problems.add(root, f"the file is {kind_of(root)}: begin it with version: {FORMAT}")
        problems.raise_if_any()
    found: dict[str, Node] = {}
    for key, value in root.pairs:
        if key.value in SECTIONS:
            found[key.value] = value
        else:
            problems.unknown(key, "persistence.yaml", SECTIONS)
    _check_version(root, found.pop("version", None), problems)
    said = {
        name: _SECTION[name](node, problems)
        for name, node in found.items()
        if name in _SECTION and node.value is not None
    }
    if "config" in found:
        said["config"] = _config(found["config"], problems, warnings)
    problems.raise_if_any()
    return Declaration(**said, warnings=tuple(warnings.found))


_SECTION: Final[dict[str, Any]] = {
    "persist_paths": persist_paths_in,
    "store": store_in,
    "autosave": autosave_in,
    "retention": retention_in,
    "encryption": encryption_in,
}


def _check_version(root: Node, version: Node | None, problems: Problems) -> None:
    if version is None:
        problems.add(root, f"version is missing: begin the file with version: {FORMAT}")
    elif type(version.value) is not int:
        problems.add(version, f"version is {kind_of(version)}: write version: {FORMAT}")
    elif version.value != FORMAT:
        said = f"version {version.value} is unknown: this release reads version {FORMAT}"
        problems.add(version, said)


def _config(node: Node, problems: Problems, warnings: Problems) -> dict[str, ConfigKey]:
    if node.value is None:
        return {}
    if not node.is_mapping:
        problems.add(node, f"config is {kind_of(node)}: give a mapping of names")
        return {}
    if len(node.pairs) > MAX_KEYS:
        problems.add(node, f"{len(node.pairs)} keys, the limit is {MAX_KEYS}: declare less")
        return {}
    keys: dict[str, ConfigKey] = {}
    for name, value in node.pairs:
        _check_name(name, problems)
        key = _key(name, value, problems)
        if redact({name.value: "x"})[1]:
            said = f"{shown(name.value)} looks like a credential: keep it out of the agent's state"
            warnings.add(name, f"{said}, in an environment variable")
        keys[name.value] = key
    return keys


def _check_name(name: Node, problems: Problems) -> None:
    text: str = name.value
    if not text.strip():
        problems.add(name, "the name of this key is empty: give it at least one character")
    elif len(text.encode()) > MAX_NAME_BYTES:
        problems.add(name, f"this name is longer than {MAX_NAME_BYTES} bytes: shorten it")
    elif not text.isprintable():
        problems.add(name, "this name holds a control character: remove it")


def _key(name: Node, node: Node, problems: Problems) -> ConfigKey:
    where = f"config.{name.value[:60]}"
    if node.value is None:
        return ConfigKey(name=name.value)
    if not node.is_mapping:
        said = f"{where} is {kind_of(node)}: give a mapping, such as {{init: …}}"
        problems.add(node, said)
        return ConfigKey(name=name.value)
    fields: dict[str, Any] = {}
    for key, value in node.pairs:
        if key.value not in FIELDS:
            problems.unknown(key, where, FIELDS)
        elif _fits(key.value, value, where, problems):
            fields[key.value] = value.value
    return ConfigKey(name=name.value, **fields)


def _fits(field: str, node: Node, where: str, problems: Problems) -> bool:
    value, before = node.value, len(problems.found)
    if field == "description" and not isinstance(value, str):
        problems.add(node, f"{where}: description is {kind_of(node)}: give text")
    elif field == "on_new_session" and value not in ("preserve", "regenerate"):
        said = shown(value) if isinstance(value, str) else kind_of(node)
        message = f"{where}: on_new_session is {said}: choose preserve or regenerate"
        problems.add(node, message)
    elif field == "init" and isinstance(value, tuple):
        said = "give text, a number, true, false or null, and set the rest in setup()"
        problems.add(node, f"{where}: init is {kind_of(node)}: {said}")
    elif field == "init" and isinstance(value, str):
        try:
            template.check(value)
        except TemplateError as error:
            problems.add(node, f"{where}: {error}", TemplateError)
    return len(problems.found) == before


def name_of(root: Node, source: str) -> str | None:
    """Return the name in an agent.yaml, None if it says none; everything else there is others'.

    Raises:
        ConfigError: The name is no text, or empty.

    """
    problems = Problems(source)
    if not root.is_mapping:
        problems.add(root, "the file is no mapping: give one with a name")
        problems.raise_if_any()
    for key, value in root.pairs:
        if key.value == "name":
            if isinstance(value.value, str) and value.value.strip():
                return value.value.strip()
            found = "not text" if value.value is None else kind_of(value)
            problems.add(value, f"name is {found}: give text", ConfigError)
            problems.raise_if_any()
    return None
