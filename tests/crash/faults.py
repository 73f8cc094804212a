"""Let each call that changes the disk fail, one after the other, once or from then on.

What was written to a file since its last sync is lost when a sync fails: memory goes on showing
it, and it is gone when the process is. Whatever fails, nobody hangs, every error is one of
perdure's, what was acknowledged stays, and the next holder goes on.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from perdure.errors import StoreUnavailableError
from perdure.store import Store
from tests.crash import work as working
from tests.crash.forks import Child, Report
from tests.crash.hooks import CHANGING, Real, changes, install
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import SCENARIOS, Lost, Scenario, run

_SYNCS = ("fsync", "fdatasync")
_TRIES = 3
_truncate, _write, _fstat = os.ftruncate, os.pwrite, os.fstat  # as they are before they are hooked


class Faults:
    """Fail at the k-th call, or from it on."""

    def __init__(self, at: int, code: int, *, lasting: bool) -> None:
        self.calls = 0
        self.failed = 0
        self._at = at
        self._code = code
        self._lasting = lasting
        self._lock = threading.Lock()
        self._synced: dict[int, int] = {}
        self._lost: list[tuple[int, int, int]] = []

    def __call__(self, name: str, real: Real, *args: Any, **kwargs: Any) -> Any:
        if not changes(name, args):
            return real(*args, **kwargs)
        with self._lock:
            self.calls += 1
            due = self.calls == self._at or (self._lasting and self.calls > self._at)
            self.failed += due
        if due:
            if name in _SYNCS:
                self._lose(args[0])
            raise OSError(self._code, os.strerror(self._code))
        result = real(*args, **kwargs)
        if name in _SYNCS:
            found = _fstat(args[0])
            self._synced[found.st_ino] = found.st_size
        return result

    def _lose(self, fd: int) -> None:
        found = _fstat(fd)
        if stat.S_ISREG(found.st_mode):
            self._lost.append((os.dup(fd), self._synced.get(found.st_ino, 0), found.st_size))

    def cut(self) -> None:
        """Cut the power: what failed syncs have lost is gone."""
        for fd, start, stop in self._lost:
            if _fstat(fd).st_size <= stop:
                _truncate(fd, start)
            else:
                _write(fd, b"\0" * (stop - start), start)


class Fault(NamedTuple):
    """One run with a fault, or one that came to its end without."""

    at: int
    code: int
    failed: int
    told: int
    """How often the caller was told."""
    ledger: Ledger


def fault_at(work: Scenario, at: int, code: int, *, lasting: bool) -> Fault:
    """Run a scenario on an empty root with a fault, cut the power, and judge what is left."""
    ledger = Ledger()
    with scratch() as top:

        def program(report: Report) -> None:
            faults = Faults(at, code, lasting=lasting)
            install(CHANGING, faults)
            working._TRIES = _TRIES  # In this process, which ends with this work.
            try:
                run(top / "store", _enduring(work), _without_doubt(report))
            except (StoreUnavailableError, Lost) as error:  # it was never open, or not closed
                report("failed", str(error))
            report("faults", faults.failed)
            faults.cut()

        child = Child(program)
        ledger.add(child.wait())
        if child.status:
            ledger.problems.append(f"the child ended with status {child.status}")
        verify(top / "store", ledger, damage=True)
    said = [event[0] for event in child.events]
    failed = sum(event[1] for event in child.events if event[0] == "faults")
    return Fault(at, code, failed, said.count("failed") + said.count("waits"), ledger)


def _enduring(work: Scenario) -> Scenario:
    async def until_it_fails(store: Store, report: Report) -> None:
        try:
            await work(store, report)
        except StoreUnavailableError as error:
            report("failed", str(error))

    return until_it_fails


def _without_doubt(report: Report) -> Report:
    """A batch that stays in doubt is what a disk that fails for ever leaves of it."""

    def tell(*event: Any) -> None:
        doubt = event[0] == "problem" and ("IN_DOUBT" in event[1] or "TRANSIENT" in event[1])
        report("failed", *event[1:]) if doubt else report(*event)

    return tell


def every_call(work: Scenario, *, every: int) -> Iterator[Fault]:
    """Let call 1, 2, 3 … fail, until a run is through by then."""
    for code, lasting in ((errno.EIO, False), (errno.EIO, True), (errno.ENOSPC, False)):
        for at in itertools.count(1, every):
            fault = fault_at(work, at, code, lasting=lasting)
            yield fault
            if not fault.failed:
                break


def faults(name: str, *, every: int = 1) -> dict[str, object]:
    """Let every n-th call of a scenario fail."""
    found = list(every_call(SCENARIOS[name], every=every))
    return {
        "scenario": name,
        "faults": sum(bool(one.failed) for one in found),
        "told": sum(one.told for one in found),
        "acknowledged": sum(one.ledger.total for one in found),
        "problems": [
            f"{errno.errorcode[one.code]} at {one.at}: {text}"
            for one in found
            for text in one.ledger.problems
        ],
    }
