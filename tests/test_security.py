"""SECURITY.md keeps its word: each threat has its tests, and the table of keyrings is what happens."""

from __future__ import annotations

import ast
import os
import pickle
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from perdure import ConfigError, Message, PerdureError, PersistentConfig, Shutdown, connect
from perdure.records.chunks import name_of
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, PendingItem, Status, Store, take_after
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.stores.s3 import S3Store
from perdure.stores.sqlite import SqliteStore
from perdure.stores.wrapped import EncryptedStore
from perdure.testing.conformance._kit import KEY, manifest_of
from tests.integration.journeys.backends import BACKENDS, ENVIRONMENT, store_of
from tests.source_tree import files, functions, nodes, pyproject

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "perdure"
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
QUIET = Shutdown(signals=False)


def table(name: str) -> list[list[str]]:
    """Return the rows of a table of the page, without its head."""
    (_, lines) = PAGE.split(f"<!-- table: {name} -->\n")
    rows = [line for line in lines.split("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


# the threats


def test_every_threat_has_tests_and_all_of_them_are_there() -> None:
    rows = table("threats")
    assert [row[0] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    for number, threat, what, shown in rows:
        assert threat
        assert what
        named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", shown)
        assert named, f"threat {number} has no test"
        assert len(named) == shown.count("`") // 2, f"threat {number}: {shown}"
        for path, test in named:
            there = {function.name for function in functions(ROOT / path)}
            assert test in there, f"threat {number}: {path} has no {test}"


@cache
def called() -> list[tuple[str, str, ast.Call]]:
    """Return the calls in perdure's source: the module, and what is called."""
    return [
        (path.relative_to(SOURCE).as_posix(), name_of_function(node), node)
        for path in files("src")
        for node in nodes(path)
        if isinstance(node, ast.Call)
    ]


def name_of_function(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return ast.unparse(call.func).rpartition(".")[2]


LOADERS = {
    "_lib/designs.py": "the public packages, from its own table, when a name is not found",
    "_lib/lazy.py": "lazy public names of a package, from its own table, and modules of extras by their names",
    "_lib/platform.py": "modules of Python's that only some platforms have",
    "adapters/thread_types.py": "classes from LangGraph's own table, and those that the user has listed",
    "adapters/imports.py": "drivers of databases, by their names",
    "agent/mcp.py": "the package mcp",
    "cli/transfer.py": "the imports from other SDKs, from a table",
    "providers/__init__.py": "formats, from a table",
    "providers/formats.py": "formats, which are checked against a table first",
    "serve/server.py": "the module of the agent, which the operator names",
    "restore/__init__.py": "its own modules, from a table",
    "testing/__init__.py": "its own modules, from a table",
}


def test_nothing_that_was_read_can_be_run() -> None:
    """Nothing in perdure can make an object of bytes but JSON, nor import what they name."""
    banned = {
        "pickle",
        "marshal",
        "shelve",
        "dbm",
        "dill",
        "cloudpickle",
        "joblib",
        "code",
        "runpy",
    }
    for path in files("src"):
        for node in nodes(path):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & banned, path
    loaders = set()
    for module, name, call in called():
        plain = isinstance(call.func, ast.Name)
        assert not (plain and name in {"eval", "exec", "compile", "__import__"}), module
        assert name not in {"unsafe_load", "full_load", "Unpickler", "extractall"}, module
        if name == "import_module" and not all(isinstance(one, ast.Constant) for one in call.args):
            loaders.add(module)
    assert loaders <= LOADERS.keys()


LISTEN = {
    *("create_tcp_listener", "create_unix_listener", "create_server", "create_unix_server"),
    *("start_server", "start_unix_server", "open_tcp_listeners", "serve_tcp"),
}


def test_nothing_listens_but_the_demo_on_this_machine() -> None:
    listening = [(module, ast.unparse(call)) for module, name, call in called() if name in LISTEN]
    assert [module for module, _ in listening] == ["cli/demo/server.py"]
    assert "local_host='127.0.0.1'" in listening[0][1]


class Planted:
    """What would leave a file behind if anybody unpickled it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._file),)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_planted_pickle_is_not_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    ran = tmp_path / "ran"
    planted = pickle.dumps(Planted(ran), 4)
    while b"\n" in planted:  # which the file store would not take
        ran = ran.with_name(f"{ran.name}x")
        planted = pickle.dumps(Planted(ran), 4)
    store = store_of(kind, tmp_path)
    await store.open()
    grant = await take_after(store, KEY, after=0)
    documents = {"session.json": planted, "memory.json": planted}
    await store.write_documents(KEY, documents, manifest_of(grant, grant.head, documents))
    await store.put_blobs("", {name_of(planted): planted})
    await store.enqueue(KEY, [PendingItem("op/0", MESSAGE, b'"not a message"', 1.0)])
    payloads = (b'{"py/object": "os.mkdir", "lc": 1, "id": ["os", "mkdir"]}', planted)
    entries = tuple(Entry(MESSAGE, payload) for payload in payloads)
    (outcome,) = await store.append_many([Batch(KEY, grant.epoch, grant.head + 1, entries)])
    assert outcome.status is Status.OK
    await store.release(KEY, grant.epoch)
    await store.aclose()
    store = store_of(kind, tmp_path)
    async with connect(store, shutdown=QUIET) as sessions:
        with pytest.raises(PerdureError):
            view = await sessions.load(KEY.agent, session=KEY.session, tenant=KEY.tenant)
            assert view is not None
            view.context()
        with pytest.raises(PerdureError):
            session = await sessions.open(KEY.agent, session=KEY.session, tenant=KEY.tenant)
            session.context()
        assert await store.get_blob("", name_of(planted)) == planted
    assert not ran.exists()
    pickle.loads(pickle.dumps(Planted(ran)))
    assert ran.exists()  # it would have shown


@pytest.mark.anyio
async def test_a_template_is_substituted_once_and_evaluates_nothing(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("name: '{{ uuid }}{{ 7*7 }}'\n")
    file = tmp_path / "persistence.yaml"
    file.write_text("version: 1\nconfig:\n  who: {init: 'I am {{ agent_name }}'}\n")
    config = await PersistentConfig(tmp_path / "state", file)
    assert config.get("who") == "I am {{ uuid }}{{ 7*7 }}"
    for hostile in (
        "{{ 7*7 }}",
        "{{ agent_name.__class__ }}",
        "{{ agent_name!r:>9 }}",
        "{{ env }}",
    ):
        file.write_text(f"version: 1\nconfig:\n  who: {{init: '{hostile}'}}\n")
        with pytest.raises(ConfigError):
            await PersistentConfig(tmp_path / "other", file)


def test_nobody_can_guess_the_id_of_a_lease_holder(tmp_path: Path) -> None:
    makers: list[Callable[[], Store]] = [
        MemoryStore,
        lambda: FileStore(tmp_path / "files"),
        lambda: SqliteStore(tmp_path / "x.db"),
        lambda: S3Store("bucket"),
    ]
    for make in makers:
        owners = set()
        for _ in range(50):
            random.seed(1)
            owners.add(make().owner)
        assert len(owners) == 50
        assert min(map(len, owners)) >= 16  # 64 bits and more


# what perdure brings along


def test_no_lower_bound_allows_a_release_with_a_known_hole() -> None:
    page = (ROOT / "docs" / "decisions" / "0001-dependencies.md").read_text(encoding="utf-8")
    known = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| .*\|$", page, re.MULTILINE)
    assert {"cryptography", "psycopg", "starlette", "pytest"} <= {name for name, _ in known}
    project = pyproject()["project"]
    given = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        given += extra
    bounds = {
        one.name: [Version(part.version) for part in one.specifier if part.operator == ">="]
        for one in map(Requirement, given)
    }
    for name, lowest in known:
        assert bounds[name], f"{name} has no lower bound"
        assert max(bounds[name]) >= Version(lowest), name


# the keyring

KEYS = {"": "5a" * 32, "another": "a5" * 32}


async def filled(backing: MemoryBacking, what: str) -> None:
    inner = MemoryStore(backing=backing)
    store: Store = EncryptedStore(inner, KEYS[""]) if what == "a keyring" else inner
    async with connect(store, shutdown=QUIET) as sessions:
        if what == "a plain post":
            await sessions.post("ada", Message.user("Hello"))
        elif what != "nothing":
            async with sessions.open("ada") as session:
                session.append(Message.user("Hello"))


@pytest.mark.anyio
@pytest.mark.parametrize("row", table("keyring"), ids=" - ".join)
async def test_the_table_of_keyrings_is_what_happens(row: list[str]) -> None:
    holds, how, happens = row
    assert holds in {"nothing", "a keyring", "plain sessions", "a plain post"}
    backing = MemoryBacking()
    if holds != "nothing":
        await filled(backing, holds)
    store: Store = MemoryStore(backing=backing)
    if how.startswith("with `encrypted+`"):
        store = EncryptedStore(store, KEYS["another" if "another key" in how else ""])

    async def use() -> None:
        async with connect(store, shutdown=QUIET, read_only="read-only" in how) as sessions:
            view = await sessions.load("ada")
            assert (view is None) == (holds in {"nothing", "a plain post"})

    if happens == "refused":
        with pytest.raises(ConfigError):
            await use()
    else:
        assert happens == "goes on"
        await use()


def test_the_table_of_keyrings_leaves_nothing_out() -> None:
    rows = {(holds, how) for holds, how, _ in table("keyring")}
    plain, sealed = "without `encrypted+`", "with `encrypted+`"
    assert {
        (holds, how)
        for holds in ("nothing", "a keyring", "plain sessions")
        for how in (plain, sealed)
    } <= rows
