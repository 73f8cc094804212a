"""What all tests share: both event loops, an untouched home, and Hypothesis' settings."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import trio._core._run

import perdure

ROOT = Path(__file__).parents[1]

# Images for containers tell Python to keep no bytecode. Each process that a test starts would
# then compile perdure anew, and each worker of pytest every test file.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts its background jobs with Ctrl-C ignored: tests that press it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Whoever looks for new examples asks for them: pytest --hypothesis-profile=explore
# A deadline, or the "too slow" check, would be a timed assertion on a shared machine.
hypothesis.settings.register_profile(
    "explore",
    deadline=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "same",
    hypothesis.settings.get_profile("explore"),
    derandomize=True,
    database=None,
    print_blob=True,
)
# What mutants of autosave's core meet: the same examples, and eight times as many.
hypothesis.settings.register_profile(
    "many", hypothesis.settings.get_profile("same"), max_examples=400
)
hypothesis.settings.load_profile("same")


ABOVE_THE_LOOP = {
    "agent", "archive", "checkpoints", "config", "formats", "golden", "inspector", "memory",
    "observe", "properties", "restore", "serve", "stores", "transfer", "tuning",
    *(f"session/test_{what}.py" for what in (
        "contributors", "copies_meanwhile", "dead_letters", "display", "door", "emitting",
        "exchange", "extend", "forged_media", "forgetting", "forking", "freed", "handover",
        "inbox", "lost", "meanwhile", "media", "media_unused", "misuse", "own_process", "pruning",
        "renaming", "rendering", "reserved_ids", "retention", "retries", "scope", "spilling",
        "tuning", "ways_out",
    )),
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trio-seed", help="another order in which trio runs what is ready")


MEMORY = "/dev/shm"
ROOM = 1 << 30
"""Bytes that have to be free there; the tests of one run need a tenth of it at a time."""


def pytest_configure(config: pytest.Config) -> None:
    # Waiting for a disk's syncs is a third of the time of the default command. Deep tests use it.
    if config.option.markexpr == "not deep" and has_room(MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    if any(map(config.pluginmanager.hasplugin, ("asyncio", "pytest_asyncio.plugin"))):
        message = "run without pytest-asyncio (-p no:asyncio): it takes trio's tests to asyncio"
        raise pytest.UsageError(message)
    here = Path(perdure.__file__).is_relative_to(ROOT / "src")
    if not here and not os.environ.get("PERDURE_TEST_INSTALLED"):
        message = (
            f"perdure comes from {perdure.__file__}, a copy that does not follow this tree: "
            "pip install -e '.[test]'"
        )
        raise pytest.UsageError(message)


def has_room(folder: str) -> bool:
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > ROOM


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector leave out what collection makes: thousands of tests, to be kept."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let no async test pass by without a loop under it; leave out what says nothing new."""
    twice = seen_on_trio(items)
    items[:] = [item for item in items if item not in twice and not on_trio(item, "never")]
    for item in items:
        if on_trio(item, "deep") or runs_on_trio(item) and is_above_the_loop(item):
            item.add_marker(pytest.mark.deep)
        if not isinstance(item, pytest.Function) or not is_async(item):
            continue
        if "anyio_backend" not in item.fixturenames:
            message = f"{item.nodeid} is async, and would run on no event loop"
            raise pytest.UsageError(message)


def on_trio(item: pytest.Item, when: str) -> bool:
    """Whether a test runs on trio, and its class has it there ``when``: never, or deep only.

    A class of the conformance suite says so by ``on_trio`` where what it wraps has been on
    both loops, and what it adds knows of none.
    """
    return getattr(getattr(item, "cls", None), "on_trio", None) == when and runs_on_trio(item)


def runs_on_trio(item: pytest.Item) -> bool:
    return getattr(item, "callspec", None) is not None and "trio" in item.callspec.params.values()


def is_above_the_loop(item: pytest.Item) -> bool:
    """Whether what is tested meets the event loop only through what other tests hold to it."""
    path = item.path.relative_to(ROOT / "tests")
    return not ABOVE_THE_LOOP.isdisjoint({path.parts[0], path.as_posix()})


STORES = ("memory", "file", "sqlite", "postgres", "redis", "s3")
"""Stores as the parameters of tests name them."""


def seen_on_trio(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return tests above the loop that are on trio with one store already.

    Each store is on trio by itself, in `tests/conformance` and in `tests/stores`.
    """
    first: dict[object, int] = {}
    ranks: dict[pytest.Item, tuple[object, int]] = {}
    for item in items:
        if not runs_on_trio(item) or not is_above_the_loop(item) or is_about_stores(item):
            continue
        params = item.callspec.params.values()  # type: ignore[attr-defined]
        stores = [STORES.index(one) for one in params if isinstance(one, str) and one in STORES]
        others = tuple(re.split(rf"\b(?:{'|'.join(STORES)})\b", item.nodeid))
        if stores:
            ranks[item] = (others, stores[0])
            first[others] = min(stores[0], first.get(others, stores[0]))
    return {item for item, (others, rank) in ranks.items() if rank > first[others]}


def is_about_stores(item: pytest.Item) -> bool:
    path = item.path.relative_to(ROOT / "tests")
    return path.parts[0] == "stores" and path.parts[1] != "wrapped"


def is_async(item: pytest.Function) -> bool:
    import inspect

    hypothesis_inner = getattr(getattr(item.obj, "hypothesis", None), "inner_test", None)
    return inspect.iscoroutinefunction(hypothesis_inner or item.obj)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Write down what a test used of a processor, for ``python -m tests.durations``."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu", round(cpu_seconds() - before, 2)))


def cpu_seconds() -> float:
    """Return what this process has used, and the processes that it started and waited for."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


@pytest.fixture(params=["asyncio", "trio"], scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each async test twice, on asyncio and on trio."""
    return request.param


@pytest.fixture(autouse=True)
def same_order(request: pytest.FixtureRequest) -> None:
    """Let trio, which runs what is ready in a random order, choose the same one each time."""
    seed = request.config.getoption("trio_seed")
    if seed is not None or request.config.getoption("hypothesis_profile") is None:
        order = getattr(trio._core._run, "_r", random)
        order.seed(f"{seed or ''}{request.node.nodeid}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Note what is open before a test."""
    item.stash[BEFORE] = descriptors()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Require of each test that the files and folders that it has opened are closed at its end."""
    result = yield
    folder = str(item.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    left = open_below(folder, item.stash[BEFORE])
    for _ in range(100):  # a thread that nobody waits for any more may still be at it
        if not left:
            return result
        gc.collect()  # what an exception holds in a cycle is closed when that goes
        time.sleep(0.05)
        left = open_below(folder, item.stash[BEFORE])
    pytest.fail(f"left open: {left}")


BEFORE = pytest.StashKey[set[str]]()
DESCRIPTORS = "/proc/self/fd"
"""What this process has open; on Linux."""


def descriptors() -> set[str]:
    return {*os.listdir(DESCRIPTORS)} if sys.platform == "linux" else set()


def open_below(folder: str, before: set[str]) -> list[str]:
    """Return what this process has open below a folder, and had not before."""
    found: list[str] = []
    for descriptor in descriptors() - before:
        with contextlib.suppress(OSError):  # it is closed by now
            found.append(os.readlink(f"{DESCRIPTORS}/{descriptor}"))
    return [path for path in found if path.startswith(folder)]


@pytest.fixture(autouse=True, scope="session")
def untouched_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep every test, and every process that it starts, out of the person's own data."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PERDURE_")]:
            patch.delenv(name)
        patch.setenv("PERDURE_HOME", str(home))
        patch.setenv("XDG_DATA_HOME", str(home))
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        yield home


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder with a short path, as a Unix socket needs it (107 bytes)."""
    parent = "/tmp" if os.path.isdir("/tmp") else None
    path = Path(tempfile.mkdtemp(prefix="pd-", dir=parent))
    yield path
    shutil.rmtree(path, ignore_errors=True)
