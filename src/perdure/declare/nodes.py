"""What a YAML file says, as nodes that know where they stand, and what is wrong with it.

Pure.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import msgspec

from perdure.errors import ConfigError

__all__ = ["Node", "Problem", "Problems", "kind_of"]


class Node(msgspec.Struct, frozen=True):
    """A value, and where it begins."""

    value: Any
    """None, a bool, an int, a float, text; or a tuple of nodes, or pairs of key and value."""
    line: int
    """From 1."""
    column: int
    """From 1."""
    is_mapping: bool = False
    """Whether the value is pairs: they are not a dict, so that each key keeps its place."""

    @property
    def pairs(self) -> tuple[tuple[Node, Node], ...]:
        """The keys and values of a mapping, in their order."""
        pairs: tuple[tuple[Node, Node], ...] = self.value
        return pairs


class Problem(msgspec.Struct, frozen=True):
    """One thing in a file that does not fit."""

    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}: {self.message}"


class Problems:
    """What was found so far in one file."""

    def __init__(self, source: str, most: int = 100) -> None:
        self.source: str = source
        self._most = most
        self.found: list[Problem] = []
        self.error: type[ConfigError] = ConfigError
        """The class of what is raised: that of the first problem."""

    def add(self, node: Node, message: str, error: type[ConfigError] = ConfigError) -> None:
        """Take note of a problem; raises when there are too many to go on."""
        if not self.found:
            self.error = error
        self.found.append(Problem(node.line, node.column, message))
        if len(self.found) >= self._most:
            self.raise_if_any()

    def unknown(self, key: Node, where: str, known: tuple[str, ...]) -> None:
        """Take note of a key that is not known there."""
        near = get_close_matches(str(key.value)[:60], known, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"
        self.add(key, f"{shown(key.value)} is no key of {where}: {cure}")

    def raise_if_any(self) -> None:
        """Raise the first, and count the others.

        Raises:
            ConfigError: Something was found; ``facts["problems"]`` holds all of it.

        """
        if not self.found:
            return
        self.found.sort(key=lambda one: (one.line, one.column))
        first, more = self.found[0], len(self.found) - 1
        rest = f" (and {more} more: see `perdure config check`)" if more else ""
        raise self.error(
            f"{self.source}, {first}{rest}",
            path=self.source,
            line=first.line,
            column=first.column,
            problems=tuple(self.found),
        )


def kind_of(node: Node) -> str:
    """Return what a node is, in the words of people who write YAML.

    >>> kind_of(Node(True, 1, 1)), kind_of(Node((), 1, 1))
    ('true or false', 'a list')
    """
    if node.is_mapping:
        return "a mapping"
    if node.value is None:
        return "nothing"
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return kinds.get(type(node.value), "a list")


def shown(value: object) -> str:
    """Return a key for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
