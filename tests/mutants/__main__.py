"""Change the source, one function at a time, and see whether a test notices.

    python -m tests.mutants                      the mutants that are known by name
    python -m tests.mutants --seed 7 --count 60  others, drawn from the same packages
    python -m tests.mutants --only sqlite        a group, or mutants by their names
    python -m tests.mutants --fast               on asyncio alone, and the quickest tests
    python -m tests.mutants --default            by the tests of the README's command alone
    python -m tests.mutants --only "Core.hold: drop call drop 1"    one that was drawn, again

Each mutant runs in a copy of the tree, against the tests that run its function: which ones is
recorded first (a few minutes, kept in .mutants/). It is killed when a test fails, or hangs.
killers.txt names the test that killed each the last time, which runs before the others.
Exits 1 if more than a tenth survives; equivalent.txt lists those that nobody can tell from the
original, with the reason, and they do not count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.conftest import MEMORY, has_room
from tests.mutants.catalog import GROUPS, KNOWN, Mutant
from tests.mutants.operators import MutantError, Package
from tests.mutants.recording import NOT, RECORD, SEEN, SELECT, collected, instrument
from tests.source_tree import ROOT

AT_ONCE = 2
"""How many mutants run beside each other."""
LONGEST = 900.0
"""Seconds until a run counts as one that hangs."""
BUDGET = {False: 60.0, True: 5.0}
"""Seconds of recorded time that the tests of one mutant may take; the quickest come first."""
ENOUGH = 0.9
"""The share that has to be killed."""
RECORDING = ROOT / ".mutants" / "recording.json"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
KILLERS = Path(__file__).with_name("killers.txt")
SIGNATURES = "tests/test_api.py::test_the_public_api_is_the_reviewed_one"
"""Reads the defaults of what it does not run."""
COPIED = (
    "src",
    "tests",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "docs",
    "examples",
    "CHANGELOG.md",
)
QUIET = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--no-header",
    "--tb=line",
    "-rfE",
)

Recording = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Result:
    """What came of a mutant."""

    mutant: Mutant
    how: str
    """killed, survived, or broken: it is not to be found."""
    by: str
    seconds: float


class Tree:
    """A copy of the repository in which one mutant after the other runs."""

    def __init__(self, parent: Path, name: str, like: Path = ROOT, *, deep: bool = True) -> None:
        self.root = parent / name
        self.marks = ["-m", ""] if deep else []
        """Which tests run: all, or those of the README's command."""
        for part in COPIED:
            old, new = like / part, self.root / part
            if old.is_dir():
                shutil.copytree(old, new, ignore=shutil.ignore_patterns(".*", "__pycache__"))
            else:
                shutil.copy2(old, new)
        self.source = self.root / "src"

    def run(self, tests: list[str], *, seconds: float, **more: str) -> tuple[int | None, str]:
        """Run tests, and return pytest's status, None if it hangs, and what it said."""
        path = f"{self.source}{os.pathsep}{self.root}"
        env = {**os.environ, "PYTHONPATH": path, **more}
        if has_room(MEMORY):  # nothing here is judged by a disk's syncs
            env.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.recording"]
        command += [*QUIET, *self.marks, *tests]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said

    @contextlib.contextmanager
    def changed(self, package: Package, mutant: Mutant) -> Iterable[None]:
        """Have the mutant in it for a while."""
        texts = package.mutate(mutant.changes)
        paths = {self.source / "perdure" / path.relative_to(package.root): path for path in texts}
        try:
            for path, original in paths.items():
                path.write_text(texts[original], encoding="utf-8")
                for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                    compiled.unlink()
            yield
        finally:
            for path, original in paths.items():
                shutil.copy2(original, path)


# which tests


def record(tests: list[str], where: Path) -> Recording:
    """Run all tests that a mutant may meet, on asyncio, and return which functions each runs."""
    tree = Tree(where, "recording")
    names = instrument(tree.source)

    def part(number: int, test: str) -> Recording:
        told = where / f"told-{number}"
        told.mkdir()
        path = f"tests/{test}"
        status, said = tree.run(["-k", "not trio", path], seconds=3600.0, **{RECORD: str(told)})
        if status not in {0, 1}:
            raise SystemExit(f"{path} could not be recorded:\n{said[-3000:]}")
        print(f"{path}: {said.splitlines()[-1]}", flush=True)
        return collected(told, names)

    found: Recording = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for some in pool.map(part, range(len(tests)), tests):
            for name, took in some.items():
                found.setdefault(name, {}).update(took)
    return found


def recorded(where: Path, *, again: bool) -> Recording:
    """Return the recording, made if there is none."""
    if again or not RECORDING.exists():
        print("recording which tests run which functions…", flush=True)
        found = record(sorted({one for group in GROUPS.values() for one in group.tests}), where)
        RECORDING.parent.mkdir(exist_ok=True)
        RECORDING.write_text(packed(found), encoding="utf-8")
    return unpacked(RECORDING.read_text(encoding="utf-8"))


def packed(found: Recording) -> str:
    """Return a recording with each test's id in it once."""
    took = {test: seconds for tests in found.values() for test, seconds in tests.items()}
    places = {test: place for place, test in enumerate(took)}
    functions = {name: [places[test] for test in tests] for name, tests in found.items()}
    return json.dumps({"tests": list(took.items()), "functions": functions})


def unpacked(text: str) -> Recording:
    """Return what `packed` was given."""
    known = json.loads(text)
    tests = known["tests"]
    return {name: dict(tests[one] for one in some) for name, some in known["functions"].items()}


def tests_of(mutant: Mutant, package: Package, known: Recording, budget: float) -> list[str]:
    """Return the tests that run a mutant's functions, its group's first, the quickest first."""
    group = GROUPS[mutant.group]
    ranked: dict[str, tuple[int, float]] = {}
    for where, _ in mutant.changes:
        for test, seconds in known.get(str(package.find(where)), {}).items():
            if not (package.root.parents[1] / test.partition("::")[0]).exists():
                continue
            for rank, place in enumerate(group.tests):
                if test.startswith(f"tests/{place}"):
                    ranked[test] = (rank > 0, seconds)
    chosen, total = [], 0.0
    for test in sorted(ranked, key=lambda one: ranked[one]):
        if total + ranked[test][1] <= budget:
            chosen.append(test)
            total += ranked[test][1]
    return chosen


# one mutant


def judge(tree: Tree, package: Package, mutant: Mutant, known: Recording, *, fast: bool) -> Result:
    """Run a mutant on asyncio, then, if it survives, on trio."""
    began = time.monotonic()

    def result(how: str, by: str) -> Result:
        return Result(mutant, how, by, round(time.monotonic() - began, 1))

    more, options = newer(mutant, known), GROUPS[mutant.group].options
    try:
        tests = tests_of(mutant, package, known, BUDGET[fast])
        later = runs(tests, mutant, fast=fast)
        for chosen, new in [(killer(mutant), set()), *((one, more) for one in later)]:
            while True:
                with tree.changed(package, mutant):
                    status, said = attempt(tree, chosen, new, options)
                if status is None:
                    return result("killed", "it hangs")
                if status in {3, 4}:
                    return result("broken", said[-500:])
                if status in {0, 5}:
                    break
                failed = failed_test(said)
                if failed is None or failed in SOUND:
                    return result("killed", failed or said[-200:])
                with tree.changed(
                    package, mutant
                ):  # if it fails alone, it is soon known to be sound
                    status, _ = attempt(tree, [failed], set(), options)
                if status == 0:
                    print(f"only among others: {failed}", flush=True)
                among = (chosen, new) if status == 0 else ([failed], set())
                if is_sound(tree, failed, *among, options):
                    return result("killed", failed)
                UNSOUND.add(failed)
    except (MutantError, KeyError, SyntaxError) as error:
        return result("broken", str(error))
    return result("survived", f"{len(tests)} tests")


UNSOUND: set[str] = set()
SOUND: set[str] = set()
"""Tests that fail without a mutant, too, and so tell nothing, and those that do not."""


def vouch(tree: Tree, mutants: list[Mutant]) -> None:
    """Run what killed some mutants the last time, without any: all at once, not each by itself."""
    chosen = sorted({test for mutant in mutants for test in killer(mutant)})
    if len(chosen) > 1:
        status, said = select(tree, chosen, set(), ["--timeout", "60"])
        if status in {0, 1}:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", said, re.MULTILINE)
            SOUND.update({*chosen} - {*failed})


def is_sound(
    tree: Tree, test: str, chosen: list[str], more: set[str], options: tuple[str, ...]
) -> bool:
    """Say whether a test that has failed passes without the mutant, among the same tests."""
    if test not in SOUND | UNSOUND:
        status, said = attempt(tree, chosen, more, options)
        if status in {0, 5} or failed_test(said) != test:
            SOUND.add(test)
        else:
            print(f"no judge: {test}\n{said[-1500:]}", flush=True)
    return test in SOUND


def failed_test(said: str) -> str | None:
    """Return the id of the first test that has failed."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", said, re.MULTILINE)
    return None if found is None else found[1]


def runs(tests: list[str], mutant: Mutant, *, fast: bool) -> Iterable[list[str]]:
    """Yield what to run: chosen tests, or, of a function that no test was seen to run, the group's."""
    if not tests:
        where = [f"tests/{one}" for one in GROUPS[mutant.group].tests]
        yield ["-k", "not trio", *where]
        yield [f"tests/{one}" for one in GROUPS[mutant.group].last]
        return
    yield tests
    other = [one.replace("[asyncio", "[trio").replace("-asyncio", "-trio") for one in tests]
    if not fast:
        yield [new for old, new in zip(tests, other, strict=True) if old != new]
        yield [f"tests/{one}" for one in GROUPS[mutant.group].last]
        yield [SIGNATURES]


def killer(mutant: Mutant) -> list[str]:
    """Return the test that killed a mutant the last time, if it is still there."""
    test = by_name(KILLERS).get(mutant.name, "")
    return [test] if test and (ROOT / test.partition("::")[0]).exists() else []


def newer(mutant: Mutant, known: Recording) -> set[str]:
    """Return the group's test files with tests that the recording does not know."""
    ids = {test.partition("[")[0] for tests in known.values() for test in tests}
    places = [ROOT / "tests" / one for one in GROUPS[mutant.group].tests]
    paths = [
        path for one in places for path in ([one] if one.is_file() else one.rglob("test_*.py"))
    ]
    found = set[str]()
    for path in paths:
        name = str(path.relative_to(ROOT))
        written = re.findall(
            r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        if any(f"{name}::{one}" not in ids for one in written):
            found.add(name)
    return found


def attempt(
    tree: Tree, chosen: list[str], more: set[str], options: tuple[str, ...]
) -> tuple[int | None, str]:
    """Run chosen tests, up to the first failure, and new ones of more files."""
    if not chosen:
        return 0, ""
    stop = ["-x", "--timeout", "60", *options]
    if chosen[0] == "-k":
        return tree.run([*stop, *chosen], seconds=LONGEST)
    if all(one.startswith("tests/crash/") for one in chosen):
        return tree.run(["-x", *chosen], seconds=3 * LONGEST)
    return select(tree, chosen, more, stop)


def select(
    tree: Tree, chosen: list[str], more: set[str], options: list[str]
) -> tuple[int | None, str]:
    """Run tests by their ids, of which there may be more than a command line takes."""
    ids = tree.root / "chosen.txt"
    ids.write_text("\n".join(one for one in chosen if one not in UNSOUND), encoding="utf-8")
    (tree.root / "unsound.txt").write_text("\n".join(UNSOUND), encoding="utf-8")
    files = sorted({one.partition("::")[0] for one in chosen} | more)
    told = {SELECT: str(ids), SEEN: str(tree.root / "known.txt")}
    told[NOT] = str(tree.root / "unsound.txt")
    return tree.run([*options, *files], seconds=LONGEST, **told)


# all of them


def drawn(package: Package, seed: int, count: int, only: set[str]) -> list[Mutant]:
    """Return mutants at random, each name one that finds it again."""
    sites = [
        Mutant(f"{where}: {how}", name, ((where, how),))
        for name, group in GROUPS.items()
        for _, where, how in package.sites(group.packages)
        if not only or name in only
    ]
    sites = [one for one in sites if is_possible(package, one)] if len(sites) < count else sites
    return random.Random(seed).sample(sorted(sites, key=lambda one: one.name), count)


def is_possible(package: Package, mutant: Mutant) -> bool:
    with contextlib.suppress(MutantError):
        return bool(package.mutate(mutant.changes))
    return False


def by_name(file: Path) -> dict[str, str]:
    """Return what a file of lines ``name -- text`` says of each name."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" -- ", 1) for line in lines if line and not line.startswith("#"))


def equivalent() -> dict[str, str]:
    """Return the mutants that change nothing that anybody could see, and why."""
    return by_name(EQUIVALENT)


def note_killer(result: Result) -> Result:
    """Write down which test has killed a mutant, if one has."""
    known = by_name(KILLERS)
    known.pop(result.mutant.name, None)
    if result.how == "killed" and "::" in result.by:
        known[result.mutant.name] = result.by
    head = "# Which test killed a mutant the last time: written by python -m tests.mutants.\n"
    lines = [f"{name} -- {known[name]}\n" for name in sorted(known)]
    KILLERS.write_text(head + "".join(lines), encoding="utf-8")
    return result


def chosen_mutants(options: argparse.Namespace, package: Package) -> list[Mutant]:
    only = set(options.only or ())
    if options.seed is not None:
        return drawn(package, options.seed, options.count, only)
    named = [one for one in KNOWN.values() if not only or {one.name, one.group} & only]
    new = [one for one in sorted(only) if ": " in one]
    return named + [mutant_of(one, package) for one in new]


def mutant_of(name: str, package: Package) -> Mutant:
    """Return a mutant by the name that a draw has given it."""
    where, _, how = name.partition(": ")
    module = f"{package.find(where).module}."
    fitting = (
        group
        for group, one in GROUPS.items()
        if any(module.startswith(f"perdure.{part}.") for part in one.packages)
    )
    return Mutant(name, next(fitting), ((where, how),))


def judged(mutants: list[Mutant], options: argparse.Namespace) -> list[Result]:
    """Judge mutants, two at a time; print each as it ends."""
    scratch = Path(options.scratch or ROOT / ".mutants" / f"trees-{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        known = recorded(scratch, again=options.record)
        base = Tree(scratch, "base")  # who edits the files meanwhile disturbs nothing
        package = Package(base.source / "perdure")
        trees: Queue[Tree] = Queue()
        ids = "\n".join({test for tests in known.values() for test in tests})
        for number in range(min(AT_ONCE, options.jobs)):
            tree = Tree(scratch, f"tree-{number}", base.root, deep=not options.default)
            (tree.root / "known.txt").write_text(ids, encoding="utf-8")
            trees.put(tree)

        tree = trees.get()
        vouch(tree, mutants)
        trees.put(tree)

        def one(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                result = judge(tree, package, mutant, known, fast=options.fast)
            finally:
                trees.put(tree)
            print(f"{result.how:9} {result.seconds:6.1f} s  {mutant.name}  {result.by}", flush=True)
            return result

        with ThreadPoolExecutor(trees.qsize()) as pool:
            results = pool.map(one, mutants)
            return list(results if options.default else map(note_killer, results))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    """Judge the mutants that the command line asks for."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    parser.add_argument("--seed", type=int, help="draw mutants instead of taking the known ones")
    parser.add_argument("--count", type=int, default=60, help="how many to draw")
    parser.add_argument("--only", action="append", metavar="GROUP", help="a group, or a name")
    parser.add_argument("--fast", action="store_true", help="asyncio alone, the quickest tests")
    parser.add_argument("--default", action="store_true", help="leave out the deep tests")
    parser.add_argument("--record", action="store_true", help="record the tests anew")
    parser.add_argument("--jobs", type=int, default=AT_ONCE, help="mutants at a time, 2 at most")
    parser.add_argument("--scratch", help="where to copy the tree to; it must not exist")
    options = parser.parse_args()
    package = Package(ROOT / "src" / "perdure")
    same = equivalent()
    mutants = [one for one in chosen_mutants(options, package) if one.name not in same]
    results = judged(mutants, options)
    return report(results, len(same), options.json)


def report(results: list[Result], left_out: int, file: Path | None) -> int:
    """Say what came of all of them."""
    if file is not None:
        told = [
            {"name": str(one.mutant), "how": one.how, "by": one.by, "seconds": one.seconds}
            for one in results
        ]
        file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    by_group = collections.Counter((one.mutant.group, one.how) for one in results)
    for group in GROUPS:
        counts = {how: by_group[group, how] for how in ("killed", "survived", "broken")}
        if any(counts.values()):
            print(f"{group:12}", "  ".join(f"{how} {count}" for how, count in counts.items()))
    for one in results:
        if one.how != "killed":
            print(f"{one.how}: {one.mutant}  {one.by}")
    killed = sum(one.how == "killed" for one in results)
    print(f"{killed} of {len(results)} killed; {left_out} are known to change nothing")
    broken = any(one.how == "broken" for one in results)
    return 1 if broken or killed < ENOUGH * len(results) else 0


if __name__ == "__main__":
    sys.exit(main())
