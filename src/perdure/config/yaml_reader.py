"""Strict YAML reader: nodes with line and column, and the problems found.

Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, Final, final

import msgspec

from perdure.errors import ConfigError, MissingExtraError


class YamlNode(msgspec.Struct, frozen=True):
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
    def pairs(self) -> tuple[tuple[YamlNode, YamlNode], ...]:
        """The keys and values of a mapping, in their order."""
        pairs: tuple[tuple[YamlNode, YamlNode], ...] = self.value
        return pairs


class YamlProblem(msgspec.Struct, frozen=True):
    """One thing in a file that does not fit."""

    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}: {self.message}"


class Problems:
    """Problems found so far in one file."""

    def __init__(self, source: str, most: int = 100) -> None:
        self.source: str = source
        self._most = most
        self.entries: list[YamlProblem] = []
        self.error: type[ConfigError] = ConfigError
        """The class of what is raised: that of the first problem."""

    def add(self, node: YamlNode, message: str, error: type[ConfigError] = ConfigError) -> None:
        """Record a problem; raises when there are too many."""
        if not self.entries:
            self.error = error
        self.entries.append(YamlProblem(node.line, node.column, message))
        if len(self.entries) >= self._most:
            self.raise_if_any()

    def unknown(self, key: YamlNode, parent: str, known: tuple[str, ...]) -> None:
        """Take note of a key that is not known there."""
        near = get_close_matches(str(key.value)[:60], known, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"
        self.add(key, f"{shown(key.value)} is no key of {parent}: {cure}")

    def raise_if_any(self) -> None:
        """Raise the first, and count the others.

        Raises:
            ConfigError: Something was found; ``facts["problems"]`` holds all of it.

        """
        if not self.entries:
            return
        self.entries.sort(key=lambda problem: (problem.line, problem.column))
        first, more = self.entries[0], len(self.entries) - 1
        suffix = f" (and {more} more: see `perdure config check`)" if more else ""
        raise self.error(
            f"{self.source}, {first}{suffix}",
            path=self.source,
            line=first.line,
            column=first.column,
            problems=tuple(self.entries),
        )


def kind_of(node: YamlNode) -> str:
    """Return what a node is, in the words of people who write YAML.

    >>> kind_of(YamlNode(True, 1, 1)), kind_of(YamlNode((), 1, 1))
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


# A YAML file as nodes, with everything refused that a declaration has no use for
#
# The text goes through PyYAML's parser as events and nothing is ever constructed, so no tag makes
# an object, and no alias multiplies. Plain scalars are read as YAML 1.2 reads them: ``NO`` and
# ``on`` are text, and so are dates. Numbers that YAML 1.1 and 1.2 read differently are refused.


MAX_BYTES: Final = 256 * 1024
"""The largest file."""
MAX_DEPTH: Final = 10
"""Deepest nesting of a file."""
MAX_SKIPPED: Final = 100
"""Deepest nesting of skipped parts: the parser's time grows with the square of the depth."""

_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT: Final = re.compile(r"[-+]?[0-9]+")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DOUBTFUL: Final = re.compile(
    r"[-+]?0[0-9]+|[-+]?0[box][0-9a-fA-F_]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_CONTROL: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MOST_INT: Final = 2**63


def read(data: bytes, source: str) -> YamlNode:
    """Return the root of a file.

    Args:
        data: What the file holds.
        source: What it is called in errors.

    Raises:
        ConfigError: It is not YAML, or YAML that a declaration has no use for; with line
            and column.
        MissingExtraError: PyYAML is not installed.

    """
    return _read(data, source, lambda tree: tree.root())


def read_top(data: bytes, source: str) -> YamlNode:
    """Return the top-level pairs of a file of another program; nested values are skipped.

    Errors as `read`, for what is no YAML at all: anchors, tags and the rest are theirs to use.
    """
    return _read(data, source, lambda tree: tree.top())


def _read(data: bytes, source: str, act: Callable[[_Tree], YamlNode]) -> YamlNode:
    problems = Problems(source)
    if len(data) > MAX_BYTES:
        problem = f"the file has {len(data)} bytes; at most {MAX_BYTES} are allowed"
        problems.add(YamlNode(None, 1, 1), problem)
        problems.raise_if_any()
    text = _text(data, problems)
    yaml = _yaml()
    try:
        return _parsed(yaml, text, act, problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "it cannot be read"
        problems.add(_at(mark), f"this is not YAML: {problem}{_hint(text, mark)}")
        problems.raise_if_any()
        raise
    except (yaml.YAMLError, ValueError) as error:
        # Too deep for the parser's own stack, or a number of too many digits.
        problems.add(YamlNode(None, 1, 1), f"this is not YAML: {error}")
        problems.raise_if_any()
        raise


def _parsed(yaml: Any, text: str, act: Callable[[_Tree], YamlNode], problems: Problems) -> YamlNode:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return act(_Tree(yaml, yaml.parse(text, Loader=loader), problems))
    except yaml.MarkedYAMLError as error:
        if "nesting depth" not in str(error.problem):
            raise
    # libyaml 0.2.6 reads ahead to a limit of its own: the slower parser tells where ours is passed.
    return act(_Tree(yaml, yaml.parse(text, Loader=yaml.SafeLoader), problems))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            "persistence.yaml needs PyYAML: pip install 'perdure[yaml]'", extra="yaml"
        ) from error
    return yaml


def _text(data: bytes, problems: Problems) -> str:
    """Return the file as text, without a byte order mark."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(errors="replace")
        problem = "this is not UTF-8: save the file as UTF-8"
        problems.add(_after(before), problem)
        problems.raise_if_any()
        raise
    match = _CONTROL.search(text)
    if match is not None:
        problem = f"the character U+{ord(match[0]):04X} has no place in YAML: remove it"
        problems.add(_after(text[: match.start()]), problem)
        problems.raise_if_any()
    return text


def _after(before: str) -> YamlNode:
    lines = before.replace("\r\n", "\n").split("\n")
    return YamlNode(None, len(lines), len(lines[-1]) + 1)


def _at(mark: Any) -> YamlNode:
    return (
        YamlNode(None, mark.line + 1, mark.column + 1) if mark is not None else YamlNode(None, 1, 1)
    )


def _hint(text: str, mark: Any) -> str:
    """Report a tab, which the parser's own message does not name."""
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    return " (the line is indented with a tab: use spaces)" if "\t" in indent else ""


@final
class _Tree:
    """Put nodes together from the parser's events."""

    def __init__(self, yaml: Any, events: Iterator[Any], problems: Problems) -> None:
        self._yaml = yaml
        self._events = events
        self._problems = problems

    def root(self) -> YamlNode:
        """Return the one document that there is; nothing at all is an empty mapping."""
        yaml = self._yaml
        next(self._events)  # the stream begins
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return YamlNode((), 1, 1, is_mapping=True)
        root = self._node(next(self._events), 1)
        next(self._events)  # the document ends
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "a second document begins here: declare everything in one")
        if root.value is None:
            return YamlNode((), root.line, root.column, is_mapping=True)
        return root

    def top(self) -> YamlNode:
        """Return the first document's own keys and values, the text and the numbers."""
        yaml = self._yaml
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return YamlNode((), 1, 1, is_mapping=True)
        begin = next(self._events)
        if not isinstance(begin, yaml.MappingStartEvent):
            return self._skimmed(begin)
        nodes: list[YamlNode] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            nodes.append(self._skimmed(event))
        pairs = tuple(zip(nodes[::2], nodes[1::2], strict=True))
        return YamlNode(pairs, begin.start_mark.line + 1, 1, is_mapping=True)

    def _skimmed(self, event: Any) -> YamlNode:
        """Return a value if it is a scalar, otherwise an empty list."""
        yaml = self._yaml
        if isinstance(event, yaml.ScalarEvent):
            text = event.value
            is_text = event.style or not (text in _NULL or text in _BOOL or _FLOAT.fullmatch(text))
            return self._placed(event, text if is_text else None)
        depth = int(isinstance(event, yaml.CollectionStartEvent))
        while depth:
            inner = next(self._events)
            depth += isinstance(inner, yaml.CollectionStartEvent)
            depth -= isinstance(inner, yaml.CollectionEndEvent)
            if depth > MAX_SKIPPED:
                self._refuse(inner, f"this is nested deeper than {MAX_SKIPPED} levels: flatten it")
        return self._placed(event, ())

    def _refuse(self, event: Any, message: str) -> None:
        self._problems.add(_at(event.start_mark), message)
        self._problems.raise_if_any()

    def _node(self, event: Any, depth: int) -> YamlNode:
        yaml = self._yaml
        if depth > MAX_DEPTH:
            self._refuse(event, f"this is nested deeper than {MAX_DEPTH} levels: flatten it")
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event, f"the alias *{event.anchor[:60]} is not allowed: write it out")
        if event.anchor is not None:
            self._refuse(event, f"the anchor &{event.anchor[:60]} is not allowed: write it out")
        if event.tag is not None:
            self._refuse(event, f"the tag {event.tag[:60]} is not allowed: leave it out")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(event, depth)
        return self._mapping(event, depth)

    def _list(self, begin: Any, depth: int) -> YamlNode:
        items: list[YamlNode] = []
        while not isinstance(event := next(self._events), self._yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return self._placed(begin, tuple(items))

    def _mapping(self, begin: Any, depth: int) -> YamlNode:
        pairs: dict[str, tuple[YamlNode, YamlNode]] = {}
        while not isinstance(event := next(self._events), self._yaml.MappingEndEvent):
            key = self._key(event, self._node(event, depth + 1))
            if key.value in pairs:
                first = pairs[key.value][0].line
                name = key.value[:60]
                self._refuse(event, f"duplicate key {name!r}, first defined on line {first}")
            pairs[key.value] = (key, self._node(next(self._events), depth + 1))
        node = self._placed(begin, tuple(pairs.values()))
        return YamlNode(node.value, node.line, node.column, is_mapping=True)

    def _key(self, event: Any, key: YamlNode) -> YamlNode:
        if not isinstance(key.value, str):
            braces = key.is_mapping or isinstance(key.value, tuple)
            problem = "put text with {{ … }} into quotes" if braces else "put it into quotes"
            self._refuse(event, f"a key has to be text: {problem}")
        if key.value == "<<" and not event.style:
            self._refuse(event, "the merge key << is not allowed: write the keys out")
        return key

    def _placed(self, event: Any, value: Any) -> YamlNode:
        return YamlNode(value, event.start_mark.line + 1, event.start_mark.column + 1)

    def _scalar(self, event: Any) -> YamlNode:
        text: str = event.value
        if event.style:  # quoted, or a block: text in any case
            return self._placed(event, text)
        if text in _NULL:
            return self._placed(event, None)
        if text in _BOOL:
            return self._placed(event, _BOOL[text])
        if _DOUBTFUL.fullmatch(text):
            problem = f"{text[:60]} is read differently by different readers: "
            self._refuse(event, f"{problem}write a plain decimal number, or quotes around text")
        return self._placed(event, self._number(event, text))

    def _number(self, event: Any, text: str) -> Any:
        if _INT.fullmatch(text):
            if len(text) > 20 or not -_MOST_INT <= int(text) < _MOST_INT:
                self._refuse(event, "this number does not fit into 64 bits: put it into quotes")
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if not math.isfinite(number):
                self._refuse(event, "this number is too large: put it into quotes")
            return number
        return text
