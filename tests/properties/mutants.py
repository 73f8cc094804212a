"""Loads autosave with a change in its source: what the properties have to notice.

The package is imported again, under its own name, from changed text; the true modules are
put back before anything else runs. What was imported meanwhile lives on in its classes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import perdure.autosave

PACKAGE = "perdure.autosave"
SOURCE = Path(perdure.autosave.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """Changes to modules: each text is replaced, and has to be there exactly once."""

    name: str
    changes: tuple[tuple[str, str, str], ...]
    """Each a module, the text, and what it becomes."""
    by_the_core: bool = False
    """Whether the state machine of the core has to notice, instead of the stories."""

    def sources(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        for module, old, new in self.changes:
            path = SOURCE / f"{module}.py"
            text = texts.get(module) or path.read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{self.name}: {text.count(old)} times {old!r}"
            texts[module] = text.replace(old, new)
        return texts


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the changed modules where the import system looks first."""

    def __init__(self, mutant: Mutant) -> None:
        self._codes = {
            f"{PACKAGE}.{module}": compile(text, f"<{mutant.name}: {module}>", "exec")
            for module, text in mutant.sources().items()
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._codes:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self._codes[module.__name__], module.__dict__)


@contextmanager
def _aside() -> Iterator[None]:
    """Take the true modules away, and put them back."""
    true = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(true)
        for name, module in true.items():
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def _ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def load(mutant: Mutant, module: str) -> ModuleType:
    """Import ``perdure.autosave.<module>`` with the mutant in it."""
    finder = _Finder(mutant)
    with _aside():
        sys.meta_path.insert(0, finder)
        try:
            return importlib.import_module(f"{PACKAGE}.{module}")
        finally:
            sys.meta_path.remove(finder)


def _m(name: str, module: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, tuple((module, old, new) for old, new in changes))


_LATEST = "            due = min(due, first + o.max_delay * t.earliness)\n"
_BEGIN = """        if t.first_at is not None:
            return
        t.first_at = now
"""
_AGAIN = """        if t.first_at is not None:
            self.books.unsaved[t] = None
            self.schedule.arm(t, now)
        else:
"""
_RETRY = """            )
        )
        self.schedule.arm(t, now)

    def answered("""
_CONFLICT = """        if outcome.status is Status.CONFLICT:
            return self.lose(t)
"""
_PUSH = """            self.ready.push(t, deadline(t), urgent=t.urgent_to > t.durable)
            self.nudged = True
"""

_HELD = "        if t.holds or t.preparing:\n"
_READY = "        self.schedule.ready.drop(t)\n        self.books.unsaved"

MUTANTS = (
    _m("no-longest-delay", "schedule", (_LATEST, "")),
    _m(
        "longest-delay-seen-at-the-next-change",
        "schedule",
        (
            _LATEST,
            _LATEST.replace("due = min", "if first + o.max_delay < t.last_at: due = min"),
        ),
    ),
    _m(
        "clean-once-written",
        "core",
        ("t.durable = sent\n", "t.durable = t.version\n"),
        ("drop_first(t, records)", "t.records = None"),
    ),
    _m("edits-while-saving-forgotten", "core", (_AGAIN, "        if True:\n")),
    _m("no-retry", "core", (_RETRY, _RETRY.replace("self.schedule.arm(t, now)", "pass"))),
    _m(
        "the-first-change-at-zero",
        "intake",
        (_BEGIN, _BEGIN.replace(" is not None", "")),
        ("if t.first_at is None or t.groups:", "if not t.first_at or t.groups:"),
    ),
    _m(
        "a-group-in-parts",
        "intake",
        (
            "        if not t.groups:\n            t.group_from = t.version\n",
            "        t.group_from = 1 << 60\n",
        ),
    ),
    Mutant(
        "all-waiters-woken",
        (
            ("tracked", "waiters.take_all() if reached is None", "waiters.take_all() if True"),
            ("waiting", "while t.durable < version:\n", "if t.durable < version:\n"),
        ),
    ),
    _m(
        "waiters-never-leave",
        "waiting",
        ("            t.give_up(number, waiters)\n", "            pass\n"),
    ),
    _m(
        "waiters-not-woken",
        "batcher",
        ("                waiter.wake()\n", "                pass\n"),
    ),
    _m(
        "two-saves-at-a-time",
        "schedule",
        (
            "t.first_at is None or t.inflight is not None or t.ticket",
            "t.first_at is None or t.ticket",
        ),
    ),
    _m("jitter-to-later", "core", ("1.0 - engine.jitter", "1.0 + engine.jitter")),
    _m(
        "slots-rounded-up",
        "wheel",
        (
            "self.next_at = self._order[0] * self.width\n",
            "self.next_at = (self._order[0] + 1) * self.width\n",
        ),
    ),
    _m(
        "a-timeout-is-a-success",
        "batcher",
        ("[in_doubt(self._why_cut(scope))]", "[Outcome(Status.OK)]"),
    ),
    _m(
        "a-crash-is-a-success",
        "outcomes",
        ("    return Outcome(Status.IN_DOUBT, error)\n", "    return Outcome(Status.OK)\n"),
    ),
    _m(
        "save-waits-for-the-debounce",
        "schedule",
        (" or t.urgent_to > t.durable:\n            due = now", ":\n            due = now"),
    ),
    _m("ready-but-nobody-told", "schedule", (_PUSH, _PUSH.replace("self.nudged = True", "pass"))),
    _m(
        "bytes-never-given-back",
        "core",
        (
            "        self.books.pressure.dirty_bytes -= size\n        t.last_error",
            "        t.last_error",
        ),
    ),
    _m(
        "a-job-beside-a-save",
        "lane",
        ("while t.inflight is not None or t.occupied:", "while False:"),
    ),
    _m("a-save-beside-a-job", "schedule", ("if t.holds or t.preparing:", "if t.preparing:")),
    _m(
        "contributors-hold-for-ever",
        "core",
        ("        t.preparing = False\n        t.prepared = True\n", "        t.prepared = True\n"),
    ),
    _m(
        "the-worker-stops-after-one-batch",
        "batcher",
        (
            "            while not scope.cancel_called and (saves := self._take()):\n",
            "            if not scope.cancel_called and (saves := self._take()):\n",
        ),
        (
            "            self.launch(self._clock())  # there may be more, and now there is room\n",
            "",
        ),
    ),
    _m(
        "records-sent-from-the-start",
        "core",
        ("else t.pending[:count])", "else t.pending[count - 1 :])"),
        ("t.pending if count == len(t.pending) else", "t.pending[:1] if count == 0 else"),
    ),
    *[
        Mutant(name, ((module, old, new),), by_the_core=True)
        for name, module, old, new in (
            (
                "a-failure-makes-it-younger",
                "core",
                "t.first_at = t.oldest_at\n",
                "t.first_at = now\n",
            ),
            ("a-group-without-an-age", "core", "t.first_at = t.group_at", "t.first_at = None"),
            ("held-back-but-captured", "schedule", _HELD, "        if t.preparing:\n"),
            ("quarantine-weighs-nothing", "core", "end is not State.QUARANTINED and", "True and"),
            ("a-refused-group-hides-others", "core", "t.narrow = half", "t.narrow = 0"),
            ("lost-but-ready", "core", _READY, "        self.books.unsaved"),
            (
                "a-prefix-twice",
                "core",
                "            t.durable + 1,\n",
                "            max(t.durable, 1),\n",
            ),
        )
    ],
)
