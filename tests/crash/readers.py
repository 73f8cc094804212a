"""Processes that read in a loop beside a process that appends, folds and takes over."""

from __future__ import annotations

import json
import time

from perdure.store import Store
from tests.crash.forks import Child, Report
from tests.crash.oracle import Ledger, verify
from tests.crash.scratch import scratch
from tests.crash.work import AGENT, Writer, read, run, texts_of


async def write(store: Store, report: Report) -> None:
    """Take the session over from oneself now and then; append and fold in between, until killed."""
    while True:
        writer = await Writer.take(store, AGENT, report)
        for round_ in range(6):
            await writer.append(3)
            if round_ % 2:
                await writer.fold()


async def watch(store: Store, report: Report, *, until: float) -> None:
    """Read documents and log in a loop, some views at least; each must continue the one before."""
    before: list[str] = []
    views = 0
    while time.monotonic() < until or views < 3:
        found = await store.read_documents(AGENT)
        records = await read(store, AGENT)
        texts = texts_of(records)
        if texts[: len(before)] != before:
            report("problem", f"a view of {len(texts)} does not continue one of {len(before)}")
        if records and not records[-1].end:
            report("problem", "a view ends within a group")
        if found.damaged:
            report("problem", f"a reader finds {found.damaged} damaged")
        for name, document in found.found.items():
            folded = texts_of(records[: document.as_of_seq])
            if json.loads(document.data) not in (folded, len(folded)):
                report("problem", f"{name} as of {document.as_of_seq} is not the log")
        views += texts != before
        before = texts
    report("views", views)


def readers(*, seconds: float) -> dict[str, object]:
    """Let two readers and a writer run for some seconds."""
    until = time.monotonic() + seconds
    ledger = Ledger()
    with scratch() as top:
        place = top / "store"
        writer = Child(lambda report: run(place, write, report))
        watchers = [
            Child(lambda report: run(place, lambda s, r: watch(s, r, until=until), report))
            for _ in range(2)
        ]
        reading = watchers
        while reading and writer.listen_on():
            reading = [one for one in reading if one.listen_on()]
        ledger.add(writer.kill())
        for child in watchers:
            ledger.add(child.kill() if child in reading else child.wait())
            if child.status:
                ledger.problems.append(f"a child ended with status {child.status}")
        verify(place, ledger)
    views = [event[1] for child in watchers for event in child.events if event[0] == "views"]
    return {"acknowledged": ledger.total, "views": views, "problems": ledger.problems}
