"""Strict YAML reader: nodes with line and column, and the problems found.

Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, TypeVar, final

import msgspec

from perdure.errors import ConfigError, MissingExtraError


class YamlNode(msgspec.Struct, frozen=True):
    """A value, and where it begins."""

    value: Any
    """None, a bool, an int, a float, text; a tuple of nodes; or a dict of pairs of key and value,
    both of them nodes, by the key."""
    line: int
    """From 1."""
    column: int
    """From 1."""

    @property
    def is_mapping(self) -> bool:
        """True for a mapping."""
        return isinstance(self.value, dict)

    @property
    def pairs(self) -> tuple[tuple[YamlNode, YamlNode], ...]:
        """The keys and values of a mapping, in their order."""
        return tuple(self.value.values())

    @property
    def plain(self) -> Any:
        """The value without its places."""
        if isinstance(self.value, dict):
            return {name: value.plain for name, (_, value) in self.value.items()}
        if isinstance(self.value, tuple):
            return [item.plain for item in self.value]
        return self.value


class YamlProblem(msgspec.Struct, frozen=True):
    """One thing in a file that does not fit."""

    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}: {self.message}"


MAX_PROBLEMS: Final = 100


class Problems:
    """Problems found so far in one file."""

    def __init__(self, source: str) -> None:
        self.source: str = source
        self.entries: list[YamlProblem] = []
        self.warnings: list[YamlProblem] = []
        """Declarations that are allowed, but unwise."""
        self.error: type[ConfigError] = ConfigError
        """The class of what is raised: that of the first problem."""

    def add(self, node: YamlNode, message: str, error: type[ConfigError] = ConfigError) -> None:
        """Record a problem; raises when there are too many."""
        if not self.entries:
            self.error = error
        self.entries.append(YamlProblem(node.line, node.column, message))
        if len(self.entries) >= MAX_PROBLEMS:
            self.raise_if_any()

    def refuse(self, node: YamlNode, message: str) -> NoReturn:
        """Record a problem that nothing can be read behind, and raise."""
        self.add(node, message)
        raise self._error()

    def warn(self, node: YamlNode, message: str) -> None:
        """Take note of a declaration that is allowed, but unwise."""
        self.warnings.append(YamlProblem(node.line, node.column, message))

    def raise_if_any(self) -> None:
        """Raise the first, and count the others.

        Raises:
            ConfigError: Something was found; ``facts["problems"]`` holds all of it.

        """
        if self.entries:
            raise self._error()

    def _error(self) -> ConfigError:
        self.entries.sort(key=lambda problem: (problem.line, problem.column))
        first, more = self.entries[0], len(self.entries) - 1
        suffix = f" (and {more} more: see `perdure config check`)" if more else ""
        return self.error(
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
    return _KINDS[type(node.value)]


_KINDS: Final[dict[type, str]] = {
    type(None): "nothing",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
    dict: "a mapping",
}


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


def name_in(data: bytes, source: str) -> str | None:
    """Return the name in an agent.yaml, None if it says none.

    All else there is for other programs, and skipped: anchors, tags and the rest.

    Raises:
        ConfigError: It is not YAML, it is no mapping, or the name is no text, or empty.
        MissingExtraError: PyYAML is not installed.

    """
    return _read(data, source, lambda tree: tree.name())


T = TypeVar("T")


def _read(data: bytes, source: str, act: Callable[[_Tree], T]) -> T:
    problems = Problems(source)
    if len(data) > MAX_BYTES:
        problem = f"the file has {len(data)} bytes; at most {MAX_BYTES} are allowed"
        problems.refuse(_START, problem)
    text = _text(data, problems)
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            "persistence.yaml needs PyYAML: pip install 'perdure[yaml]'", extra="yaml"
        ) from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return act(_Tree(yaml, yaml.parse(text, Loader=loader), problems))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "it cannot be read"
        problems.refuse(_at(mark), f"this is not YAML: {problem}{_hint(text, mark)}")
    except (yaml.YAMLError, ValueError) as error:
        # Too deep for the parser's own stack, or a number of too many digits.
        problems.refuse(_START, f"this is not YAML: {error}")


def _text(data: bytes, problems: Problems) -> str:
    """Return the file as text, without a byte order mark."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(errors="replace")
        problems.refuse(_after(before), "this is not UTF-8: save the file as UTF-8")
    match = _CONTROL.search(text)
    if match is not None:
        problem = f"the character U+{ord(match[0]):04X} has no place in YAML: remove it"
        problems.refuse(_after(text[: match.start()]), problem)
    return text


def _after(before: str) -> YamlNode:
    lines = before.replace("\r\n", "\n").split("\n")
    return YamlNode(None, len(lines), len(lines[-1]) + 1)


_START: Final = YamlNode(None, 1, 1)


def _at(mark: Any) -> YamlNode:
    return _START if mark is None else YamlNode(None, mark.line + 1, mark.column + 1)


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
            return YamlNode({}, 1, 1)
        root = self._node(next(self._events), 1)
        next(self._events)  # the document ends
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "a second document begins here: declare everything in one")
        if root.value is None:
            return YamlNode({}, root.line, root.column)
        return root

    def name(self) -> str | None:
        """Return the text at the key ``name`` of the first document."""
        yaml = self._yaml
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        begin = next(self._events)
        if not isinstance(begin, yaml.MappingStartEvent):
            self._refuse(begin, "the file is no mapping: give one with a name")
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            self._skip(key)
            value = next(self._events)
            if not isinstance(key, yaml.ScalarEvent) or key.value != "name":
                self._skip(value)
                continue
            name = value.value.strip() if isinstance(value, yaml.ScalarEvent) else ""
            is_other = name in _NULL or name in _BOOL or _FLOAT.fullmatch(name)
            if not name or (is_other and not value.style):
                self._refuse(value, "name is not text: give text")
            return str(name)
        return None

    def _skip(self, event: Any) -> None:
        """Read on to the end of a value that begins."""
        yaml = self._yaml
        depth = int(isinstance(event, yaml.CollectionStartEvent))
        while depth:
            inner = next(self._events)
            depth += isinstance(inner, yaml.CollectionStartEvent)
            depth -= isinstance(inner, yaml.CollectionEndEvent)
            if depth > MAX_SKIPPED:
                self._refuse(inner, f"this is nested deeper than {MAX_SKIPPED} levels: flatten it")

    def _refuse(self, event: Any, message: str) -> NoReturn:
        self._problems.refuse(_at(event.start_mark), message)

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
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(event, depth)
        items: list[YamlNode] = []
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(item, depth + 1))
        return self._placed(event, tuple(items))

    def _mapping(self, begin: Any, depth: int) -> YamlNode:
        pairs: dict[str, tuple[YamlNode, YamlNode]] = {}
        while not isinstance(event := next(self._events), self._yaml.MappingEndEvent):
            key = self._key(event, self._node(event, depth + 1))
            if key.value in pairs:
                line = pairs[key.value][0].line
                self._refuse(
                    event, f"duplicate key {key.value[:60]!r}, first defined on line {line}"
                )
            pairs[key.value] = (key, self._node(next(self._events), depth + 1))
        return self._placed(begin, pairs)

    def _key(self, event: Any, key: YamlNode) -> YamlNode:
        if not isinstance(key.value, str):
            braces = isinstance(key.value, dict | tuple)
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
