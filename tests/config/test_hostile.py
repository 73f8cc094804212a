"""A corpus of YAML that is broken, doubtful or hostile: each refused where it stands."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from perdure import ConfigError, TemplateError
from perdure.config.persistent_config import PersistentConfig, declared_at
from perdure.config.schema import Declaration, declaration_of
from perdure.config.yaml_reader import MAX_BYTES, name_in, read
from tests.config.conftest import AgentFolder

BOMB = "version: 1\nconfig: &a [&b [x, x], *b, *b]\n"
LAUGHS = "\n".join(
    ["version: 1", "a0: &a0 [lol, lol]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
KEY = "version: 1\nconfig:\n  k:\n    "

HOSTILE: dict[str, tuple[bytes | str, int, int, str]] = {
    # what there is of YAML that no declaration needs
    "aliases": (BOMB, 2, 9, "anchor &a"),
    "a billion laughs": (LAUGHS, 2, 5, "anchor &a0"),
    "an alias of nothing": ("version: *x\n", 1, 10, "alias"),
    "an anchor": ("version: &v 1\n", 1, 10, "anchor"),
    "a merge key": ("version: 1\n<<: {a: 1}\n", 2, 1, "merge key"),
    "a tag that makes an object": ("!!python/object/apply:os.system [id]\n", 1, 1, "tag"),
    "a tag of a value": (KEY + "init: !!python/name:os.system\n", 4, 11, "tag"),
    "a binary": (KEY + "init: !!binary aGk=\n", 4, 11, "tag"),
    "a set": ("version: 1\nconfig: !!set {a, b}\n", 2, 9, "tag"),
    "a tag of one's own": ("version: !mine 1\n", 1, 10, "tag"),
    "a quoted number by a tag": ('version: !!int "1"\n', 1, 10, "tag"),
    "a template without quotes": (KEY + "init: {{ uuid }}\n", 4, 12, r"\{\{ … \}\} into quotes"),
    "all sessions forgotten": ("version: 1\nretention: {expire_days: 0}\n", 2, 26, "every session"),
    "a password in a query": ('version: 1\nstore: "pg://h?password=hush"\n', 2, 8, "password"),
    "two documents": ("version: 1\n---\nversion: 1\n", 2, 1, "second document"),
    "a directive": ("%YAML 3.0\n---\nversion: 1\n", 1, 1, "not YAML"),
    # size and shape
    "deep lists": ("version: 1\nconfig: " + "[" * 50_000, 2, None, "nested deeper|nesting depth"),
    "deep mappings": (
        "version: 1\nconfig: " + "{a: " * 20_000,
        2,
        None,
        "nested deeper|nesting depth",
    ),  # type: ignore[dict-item]
    "ten megabytes": (b"#" * 10_000_000, 1, 1, "at most"),
    "a long key": ("version: 1\n? " + "k" * 2000 + "\n: 1\n", 2, 3, "no key of"),
    "many keys": (
        "version: 1\nconfig:\n" + "".join(f"  k{n}: {{}}\n" for n in range(1001)),
        3,
        3,
        "at most 1000",
    ),
    "a huge number": ("version: " + "9" * 5000 + "\n", 1, 10, "64 bits"),
    "a number too many": (f"version: {2**63}\n", 1, 10, "64 bits"),
    "a huge float": (KEY + "init: 1e999\n", 4, 11, "too large"),
    # bytes
    "NUL": (b"version: 1\nconfig: \0{}\n", 2, 9, r"U\+0000"),
    "an escape": (b"version: 1 # \x1b[2J\n", 1, 14, r"U\+001B"),
    "not UTF-8": (b"version: 1\n# \xe9\n", 2, 3, "UTF-8"),
    "UTF-16": ("version: 1\n".encode("utf-16"), 1, 1, "UTF-8"),
    "a surrogate": (b"version: 1\n# \xed\xa0\x80\n", 2, 3, "UTF-8"),
    "not a character": ("version: 1\n# \uffff\n", 2, 3, r"U\+FFFF"),
    "a tab": ("version: 1\nconfig:\n\tk: {}\n", 3, 1, "tab"),
    # not YAML
    "an open bracket": ("version: [1\n", 2, 1, "not YAML"),
    "an open quote": ('version: "1\n', 2, 1, "not YAML"),
    "a wrong indent": ("version: 1\n  config: {}\n", 2, 9, "not YAML"),
    "a colon too many": ("version: 1: 2\n", 1, 11, "not YAML"),
    "an unknown escape": ('version: "\\q"\n', 1, 12, "not YAML"),
    # keys
    "a duplicate": ("version: 1\nconfig: {}\nversion: 1\n", 3, 1, "first defined on line 1"),
    "a duplicate in config": ("version: 1\nconfig:\n  k: {}\n  k: {}\n", 4, 3, "on line 3"),
    "a duplicate in quotes": ("version: 1\nconfig: {k: {}, 'k': {}}\n", 2, 17, "on line 2"),
    "an unknown section": ("version: 1\nconfigs: {}\n", 2, 1, "did you mean 'config'"),
    "an unknown field": (KEY + "on_new_sesion: preserve\n", 4, 5, "did you mean 'on_new_session'"),
    "on as a key": ("version: 1\non: {}\n", 2, 1, "'on' is no key"),
    "a number as a key": ("version: 1\n1: {}\n", 2, 1, "has to be text"),
    "true as a key": ("version: 1\nconfig: {true: {}}\n", 2, 10, "has to be text"),
    "null as a key": ("version: 1\nconfig: {~: {}}\n", 2, 10, "has to be text"),
    "a list as a key": ("version: 1\n? [a]\n: 1\n", 2, 3, "has to be text"),
    "an empty key": ("version: 1\nconfig: {'': {}}\n", 2, 10, "is empty"),
    "a control in a key": ('version: 1\nconfig: {"a\\u0007": {}}\n', 2, 10, "control character"),
    # versions
    "nothing at all": ("", 1, 1, "version is missing"),
    "only a comment": ("# nothing\n", 1, 1, "version is missing"),
    "no version": ("config: {}\n", 1, 1, "version is missing"),
    "a newer version": ("version: 2\n", 1, 10, "version 2 is unknown"),
    "version 0": ("version: 0\n", 1, 10, "version 0 is unknown"),
    "a version as text": ('version: "1"\n', 1, 10, "version is text"),
    "a version with a point": ("version: 1.0\n", 1, 10, "version is a number"),
    "true as version": ("version: true\n", 1, 10, "version is true or false"),
    "yes as version": ("version: yes\n", 1, 10, "version is text"),
    "an octal version": ("version: 01\n", 1, 10, "read differently"),
    "a hexadecimal version": ("version: 0x1\n", 1, 10, "read differently"),
    "a date as version": ("version: 2026-01-01\n", 1, 10, "version is text"),
    # types
    "a list as the file": ("- version: 1\n", 1, 1, "the file is a list"),
    "text as the file": ("version 1\n", 1, 1, "the file is text"),
    "config as a list": ("version: 1\nconfig: [a]\n", 2, 9, "config is a list"),
    "config as text": ("version: 1\nconfig: a\n", 2, 9, "config is text"),
    "a key as text": ("version: 1\nconfig: {k: v}\n", 2, 13, "config.k is text"),
    "init as a list": (KEY + "init: [a]\n", 4, 11, "init is a list"),
    "init as a mapping": (KEY + "init: {a: 1}\n", 4, 11, "init is a mapping"),
    "init as an octal": (KEY + "init: 0o600\n", 4, 11, "read differently"),
    "init as not a number": (KEY + "init: .nan\n", 4, 11, "read differently"),
    "a description as a number": (
        KEY + "description: 7\n",
        4,
        18,
        "description: expected `str`, got `int`",
    ),
    "an unknown policy": (KEY + "on_new_session: keep\n", 4, 21, "preserve or regenerate"),
    "NO as a policy": (KEY + "on_new_session: NO\n", 4, 21, "choose preserve or regenerate"),
    "null as a policy": (KEY + "on_new_session:\n", 4, 20, "preserve or regenerate"),
    # templates
    "an unknown variable": (KEY + "init: '{{ nme }}'\n", 4, 11, "'nme', which is no variable"),
    "an expression": (KEY + "init: '{{ 7*7 }}'\n", 4, 11, "no variable"),
    "an attribute": (KEY + "init: '{{ uuid.__class__ }}'\n", 4, 11, "no variable"),
    "an open template": (KEY + "init: 'a {{ uuid'\n", 4, 11, "without its }}"),
    "a nested template": (KEY + "init: '{{ {{ uuid }} }}'\n", 4, 11, "braces in between"),
    # paths
    "paths as text": ("version: 1\npersist_paths: data\n", 2, 16, "persist_paths is text"),
    "a path as a number": ("version: 1\npersist_paths: [7]\n", 2, 17, "a path is a whole number"),
    "an absolute path": ("version: 1\npersist_paths: [/etc]\n", 2, 17, "in the agent's home"),
    "a path that leads out": (
        "version: 1\npersist_paths: [data/../..]\n",
        2,
        17,
        "leaves the folder",
    ),
    "a path of somebody's": ("version: 1\npersist_paths: [~root]\n", 2, 17, "in the agent's home"),
    "a drive": ("version: 1\npersist_paths: ['C:/x']\n", 2, 17, "in the agent's home"),
    "a backslash": ("version: 1\npersist_paths: ['..\\x']\n", 2, 17, "backslash"),
    "a control in a path": ('version: 1\npersist_paths: ["a\\u0000"]\n', 2, 17, "control"),
    "the whole home": ("version: 1\npersist_paths: [./]\n", 2, 17, "whole home"),
    "an empty path": ("version: 1\npersist_paths: ['']\n", 2, 17, "whole home"),
    "a long path": (f"version: 1\npersist_paths: [{'x' * 2000}]\n", 2, 17, "name_bytes=255"),
    "a path twice": ("version: 1\npersist_paths: [a/b/, ./a//b]\n", 2, 23, "on line 2"),
    "many paths": (
        f"version: 1\npersist_paths: [{', '.join(f'p{n}' for n in range(101))}]\n",
        2,
        16,
        "at most 100",
    ),
    # the other sections
    "a store as a list": ("version: 1\nstore: [a]\n", 2, 8, "expected `str`, got `array`"),
    "an empty store": ("version: 1\nstore: ''\n", 2, 8, "says nothing"),
    "a store of nothing": ("version: 1\nstore: {}\n", 2, 8, "store: it says nothing"),
    "a password": ("version: 1\nstore: postgresql://u:hush@h/d\n", 2, 8, "holds a password"),
    "a password with all signs": (
        "version: 1\nstore: pg://u:hu@sh@h/d\n",
        2,
        8,
        "holds a password",
    ),
    "a password behind colons": (
        f"version: 1\nstore: pg://{':' * 200_000}hush@h\n",
        2,
        8,
        "holds a password",
    ),
    "a bad variable": (
        "version: 1\nstore: {url_env: $X}\n",
        2,
        18,
        "the name of an environment variable",
    ),
    "an unknown preset": ("version: 1\nautosave: fast\n", 2, 11, "choose from default"),
    "an autosave as a number": ("version: 1\nautosave: 3\n", 2, 11, "autosave is a whole number"),
    "a debounce as text": (
        "version: 1\nautosave: {debounce: 2s}\n",
        2,
        22,
        "expected `float . null`, got `str`",
    ),
    "a debounce too long": ("version: 1\nautosave: {debounce: 99}\n", 2, 11, "debounce <= max"),
    "off with settings": (
        "version: 1\nautosave: {preset: off, debounce: 1}\n",
        2,
        11,
        "is off, and has settings",
    ),
    "yes for a switch": (
        "version: 1\nautosave: {on_turn_end: yes}\n",
        2,
        25,
        "expected `bool`, got `str`",
    ),
    "a retention of nothing": ("version: 1\nretention: {}\n", 2, 12, "says nothing"),
    "a retention below 0": ("version: 1\nretention: {keep_days: -1}\n", 2, 12, "from 0 up"),
    "half a turn": (
        "version: 1\nretention: {keep_turns: 0.5}\n",
        2,
        25,
        "expected `int . null`, got `float`",
    ),
    "a key in the file": (
        "version: 1\nencryption: {key: hush}\n",
        2,
        14,
        "'key' is no key of encryption: did you mean 'key_env'",
    ),
    "encryption as text": (
        "version: 1\nencryption: hush\n",
        2,
        13,
        "give a mapping of key_env, key_file",
    ),
    "two keys": (
        "version: 1\nencryption: {key_env: A, key_file: b}\n",
        2,
        13,
        "has to name one key",
    ),
    "a key file as a list": (
        "version: 1\nencryption: {key_file: [a]}\n",
        2,
        24,
        "key_file: expected `str`",
    ),
    "no key": ("version: 1\nencryption: {}\n", 2, 13, "has to name one key"),
}


@pytest.fixture(params=["libyaml", "python"], autouse=True)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take both of PyYAML's parsers."""
    if request.param == "python":
        monkeypatch.delattr(yaml, "CSafeLoader")
    else:
        assert yaml.CSafeLoader


def parsed(text: bytes | str) -> Declaration:
    data = text.encode() if isinstance(text, str) else text
    return declaration_of(read(data, "persistence.yaml"), "persistence.yaml")


def test_it_is_refused_where_it_stands() -> None:
    """S4-2, S4-5, S4-6, S4-G7: each with line and column, and nothing of a value quoted."""
    wrong = {name: told for name in HOSTILE if (told := _taken_or_misplaced(name))}
    assert wrong == {}


def _taken_or_misplaced(name: str) -> str:
    """Return what is wrong with how a file is refused; nothing if it is as it has to be."""
    text, line, column, says = HOSTILE[name]
    try:
        parsed(text)
    except ConfigError as error:
        said, facts = str(error), error.facts
    else:
        return "it was taken"
    is_right = (
        re.search(says, said)
        and facts["line"] == line
        and said.startswith(f"persistence.yaml, line {line}, column ")
        and (facts["column"] == column or _differs(name))
        and len(said) < 500
        and "hush" not in said
    )
    return "" if is_right else f"{facts['line']}, {facts['column']}: {said[:600]}"


def _differs(name: str) -> bool:
    """Whether the two parsers point at different columns of one line."""
    return name in {"deep lists", "deep mappings", "an open quote", "an unknown escape"}


def test_nothing_is_written_for_any_of_them(folder: AgentFolder) -> None:
    """S4-2: a file that does not fit changes nothing that is stored."""
    anyio.run(_refused, folder)


async def _refused(folder: AgentFolder) -> None:
    config = await PersistentConfig(folder.state, folder.yaml)
    before = {path: path.read_bytes() for path in folder.state.iterdir()}
    for text, *_ in HOSTILE.values():
        folder.yaml.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError):
            await PersistentConfig(folder.state, folder.yaml)
    assert {path: path.read_bytes() for path in folder.state.iterdir()} == before
    assert config.get("theme") == "default"


def test_all_that_does_not_fit_is_found_in_one_go() -> None:
    text = "version: 2\nconfg: {}\nconfig: {k: {init: [1], x: 1}}\n"
    with pytest.raises(ConfigError, match="and 3 more") as caught:
        parsed(text)
    found: Any = caught.value.facts["problems"]
    assert [(one.line, one.column) for one in found] == [(1, 10), (2, 1), (3, 20), (3, 25)]


@pytest.mark.deep
def test_after_a_hundred_problems_nobody_reads_on() -> None:
    text = "version: 1\n" + "".join(f"k{number}: 1\n" for number in range(20_000))
    with pytest.raises(ConfigError, match="and 99 more"):
        parsed(text)


def test_the_first_of_them_gives_the_error_its_class() -> None:
    with pytest.raises(TemplateError):
        parsed(KEY + "init: '{{ x }}'\n")


PLAIN: list[tuple[str, object]] = [
    ("NO", "NO"),
    ("on", "on"),
    ("yes", "yes"),
    ("2026-01-01", "2026-01-01"),
    ("12:30:45", "12:30:45"),
    ("1_000", "1_000"),
    ("'010'", "010"),
    ("'null'", "null"),
    ("~", None),
    ("", None),
    ("true", True),
    ("False", False),
    ("7", 7),
    ("-7", -7),
    ("1.5", 1.5),
    ("1e3", 1000.0),
    ("|\n      two\n      lines", "two\nlines\n"),
]


def test_plain_values_are_read_as_yaml_1_2_has_them() -> None:
    """S4-4: no Norway problem, no dates, no base 60."""
    read = [(said, parsed(KEY + f"init: {said}\n").config["k"].init) for said, _ in PLAIN]
    assert read == PLAIN
    assert [type(value) for _, value in read] == [type(meant) for _, meant in PLAIN]


@pytest.mark.parametrize("start", ["\ufeff", "---\n", "%YAML 1.2\n---\n", "\r\n"])
def test_what_editors_put_before_it_is_fine(start: str) -> None:
    assert parsed(start + "version: 1\r\nconfig: {k: {}}\r\n...\n").config["k"].init is None


def test_a_file_at_the_limit_is_read() -> None:
    data = b"version: 1\nconfig: {k: {init: " + b"x" * (MAX_BYTES - 100) + b"}}\n"
    assert len(str(parsed(data).config["k"].init)) == MAX_BYTES - 100


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no FIFOs")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "persistence.yaml")
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        declared_at(tmp_path / "persistence.yaml")
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        declared_at(tmp_path)
    with pytest.raises(ConfigError, match="there is no"):
        declared_at(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    "deep", ["x: " + "[" * 200_000, "x: " + "{a: " * 50_000], ids=["lists", "mappings"]
)
def test_what_is_skipped_of_an_agent_yaml_is_no_deeper_than_anybody_writes(deep: str) -> None:
    """A parser's time grows with the square of the depth: minutes, for a file of this size."""
    with pytest.raises(ConfigError, match="deeper than 100 levels|nesting depth"):
        name_in(deep.encode(), "agent.yaml")
    text = f"x: {'[' * 99}{']' * 99}\nname: a\n"
    assert name_in(text.encode(), "agent.yaml") == "a"
