"""What must be on the disk after a crash, from what the children have said.

For each session and epoch: the log holds a prefix of the groups that were sent, and every
group that was acknowledged. Documents hold what the log says as of their record. Whoever
opens the session next can write.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from perdure.records.keys import SessionKey
from perdure.records.records import EPOCH, Record
from perdure.store import Documents, Store
from tests.crash.forks import Child, Event, Report
from tests.crash.work import Writer, read, run, texts_of

Place = tuple[str, int]
"""An agent's id and an epoch."""


class Ledger:
    """All that the children of one root have sent and been promised."""

    def __init__(self) -> None:
        self.sent: dict[Place, list[list[str]]] = defaultdict(list)
        self.acknowledged: dict[Place, int] = defaultdict(int)
        self.granted: dict[str, list[int]] = defaultdict(list)
        self.views: dict[Place, list[str]] = {}
        """What a holder found when it had taken the session."""
        self.folded: dict[str, int] = defaultdict(int)
        self.ended: dict[str, int] = defaultdict(int)
        """The last epoch of a life that was ended."""
        self.deleting: dict[str, int] = {}
        """Epochs whose life may have been ended; nobody knows of that until it is judged."""
        self.copies: dict[str, list[str]] = {}
        """What a whole copy has, of agents that are copies."""
        self.published: set[str] = set()
        """Copies whose publish was reported."""
        self.problems: list[str] = []

    @property
    def total(self) -> int:
        """How many groups were acknowledged."""
        return sum(self.acknowledged.values())

    def add(self, events: Iterable[Event]) -> None:
        """Note what one child has said, in its order."""
        for what, *rest in events:
            self._note(what, rest)

    def _note(self, what: str, rest: Event) -> None:
        match what, rest:
            case "problem", [text]:
                self.problems.append(text)
            case "granted", [agent, epoch, _, texts]:
                if epoch in self.granted[agent]:
                    self.problems.append(f"{agent}: epoch {epoch} was granted twice")
                self.granted[agent].append(epoch)
                self.views[agent, epoch] = texts
            case "sent", [agent, epoch, texts]:
                self.sent[agent, epoch].append(texts)
            case "ok", [agent, epoch, count]:
                self.acknowledged[agent, epoch] = count
            case "folded", [agent, as_of]:
                self.folded[agent] = max(self.folded[agent], as_of)
            case "copying", [agent, texts]:
                self.copies[agent] = texts
            case "published", [agent]:
                self.published.add(agent)
            case "deleting", [agent, epoch]:
                self.deleting[agent] = epoch
            case "deleted", [agent, epoch]:
                self.forget(agent)

    def forget(self, agent: str) -> None:
        """Expect nothing any more of a life that was ended, but that its epochs are used up."""
        epoch = self.deleting.pop(agent)
        for place in [place for place in self.sent if place[0] == agent and place[1] <= epoch]:
            del self.sent[place]
            self.acknowledged.pop(place, None)
        self.ended[agent] = epoch
        self.folded.pop(agent, None)

    def agents(self) -> set[str]:
        """Return every agent that anybody took."""
        return {*self.granted, *self.copies} | {agent for agent, _ in self.sent}


def judge_log(ledger: Ledger, agent: str, records: list[Record]) -> list[str]:
    """Compare one session's log with what was said about it."""
    problems: list[str] = []
    first = 501 if agent in ledger.copies and records else 1
    if [record.seq for record in records] != list(range(first, first + len(records))):
        problems.append(f"{agent}: seqs have a gap: {[record.seq for record in records]}")
    epochs = [record.epoch for record in records]
    if epochs != sorted(epochs):
        problems.append(f"{agent}: epochs go back: {epochs}")
    if records and not records[-1].end:
        problems.append(f"{agent}: the log ends within a group")
    found = {epoch: texts_of(list(run_)) for epoch, run_ in groupby(records, lambda r: r.epoch)}
    if agent in ledger.copies:
        whole = ledger.copies[agent]
        if records and found.pop(records[0].epoch) != whole:
            problems.append(f"{agent}: half a copy is there: {texts_of(records)} of {whole}")
        if agent in ledger.published and not records:
            problems.append(f"{agent}: a copy that was published is gone")
    for epoch in sorted({*found, *(of for name, of in ledger.acknowledged if name == agent)}):
        problems += _judge_epoch(ledger, (agent, epoch), found.get(epoch, []))
    starts = {record.epoch for record in records if record.kind == EPOCH}
    alive = [epoch for epoch in ledger.granted[agent] if epoch > ledger.ended[agent]]
    missing = set(alive) - starts
    if missing:
        problems.append(f"{agent}: granted epochs {sorted(missing)} have no record in the log")
    return problems + _judge_views(ledger, agent, records)


def _judge_epoch(ledger: Ledger, place: Place, found: list[str]) -> list[str]:
    groups = ledger.sent[place]
    prefixes = [[text for group in groups[:n] for text in group] for n in range(len(groups) + 1)]
    if found not in prefixes:
        return [f"{place}: the log holds {found}, no prefix of what was sent: {groups}"]
    if prefixes.index(found) < ledger.acknowledged[place]:
        return [f"{place}: lost an acknowledged group: {found} of {groups}"]
    return []


def _judge_views(ledger: Ledger, agent: str, records: list[Record]) -> list[str]:
    """What a holder found below its epoch is what stays there: the seal holds."""
    problems: list[str] = []
    for epoch in ledger.granted[agent]:
        if epoch <= ledger.ended[agent]:
            continue
        below = texts_of([record for record in records if record.epoch < epoch])
        if below != ledger.views[agent, epoch]:
            problems.append(f"{agent}: below epoch {epoch} the log changed behind the seal")
    return problems


def judge_documents(
    ledger: Ledger, agent: str, records: list[Record], documents: Documents
) -> list[str]:
    """Compare documents with the log that they were folded from."""
    problems = [f"{agent}: {name} is damaged" for name in documents.damaged]
    as_of = documents.manifest.as_of_seq if documents.manifest else 0
    if as_of < ledger.folded[agent]:
        problems.append(f"{agent}: the fold of {ledger.folded[agent]} is lost, there is {as_of}")
    for name, document in documents.found.items():
        texts = texts_of([record for record in records if record.seq <= document.as_of_seq])
        value = json.loads(document.data)
        if value not in (texts, len(texts)):
            problems.append(f"{agent}: {name} as of {document.as_of_seq} is not the log: {value}")
    return problems


async def judge(store: Store, ledger: Ledger, report: Report, *, damage: bool = False) -> None:
    """Open every session anew, compare, and write on. Reports what is wrong.

    ``damage``: documents may be damaged (they can be folded anew), the log may not.
    """
    for agent in sorted(ledger.agents()):
        key = SessionKey(agent)
        holder = await store.holder(key)
        if holder is not None and holder.alive:
            report("problem", f"{agent}: its dead holder looks alive: {holder}")
        records = await read(store, key)
        if agent in ledger.deleting and not records:
            ledger.forget(agent)  # A deletion that nobody was told of: it is over, or not begun.
        problems = judge_log(ledger, agent, records)
        if agent in ledger.copies and bool(await store.sessions()) != bool(records):
            problems.append(f"{agent}: it is listed, and not there, or the other way around")
        if await store.head(key) != (records[-1].seq if records else 0):
            problems.append(f"{agent}: the head is not the log's end")
        found = await store.read_documents(key)
        judged = judge_documents(ledger, agent, records, found)
        problems += [text for text in judged if not (damage and "damaged" in text)]
        for problem in problems:
            report("problem", problem)
        writer = await Writer.take(store, key, report)
        await writer.append(2)
        await writer.fold()
        await writer.append(1)
        after = texts_of(await read(store, key))
        if (
            after[: len(texts_of(records))] != texts_of(records)
            or len(after) != len(texts_of(records)) + 3
        ):
            report("problem", f"{agent}: after the next append the log is {after}")


def verify(root: Path, ledger: Ledger, *, damage: bool = False) -> Ledger:
    """Judge a root in a process of its own, and note what that one did as well."""
    before = len(ledger.problems)

    def program(report: Report) -> None:
        run(root, lambda store, tell: judge(store, ledger, tell, damage=damage), report)

    child = Child(program)
    ledger.add(child.wait())
    if child.status and len(ledger.problems) == before:
        ledger.problems.append(f"the judge died with status {child.status}")
    return ledger
