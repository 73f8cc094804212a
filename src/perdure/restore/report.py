"""Restore reports and restore plans: what a restore did, and what one would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from perdure._lib.logs import card
from perdure.memory.context import SNAPSHOT
from perdure.memory.documents import SESSION, names_of
from perdure.providers.context_fit import ContextTarget, Format
from perdure.providers.issued import Issuer, stamp_of
from perdure.providers.parts import without_reasoning
from perdure.records.keys import SessionKey
from perdure.records.messages import Message
from perdure.records.records import HOLDER_KINDS, Record
from perdure.store import Documents

Source = Literal["fresh", "snapshot", "catch_up", "rebuild", "left_out"]
"""The source of the working context: nothing, since the session is new; the snapshot as it is;
the snapshot and the log after it; the log alone. Left out: it was not asked for."""


class RestoreStep(msgspec.Struct, frozen=True, gc=False):
    """One step or finding of a restore."""

    what: str
    """``read``, ``caught up``, ``rebuilt``, ``damaged``, ``unsettled`` …"""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.detail}".strip()


def lost_step(name: str, reason: str | None) -> RestoreStep:
    """Return the step for a document that cannot be used."""
    reason = reason or "it is lost, or not what its manifest says"
    return RestoreStep("damaged", f"{name}: {reason}; rebuilt from the log")


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, gc=False):
    """The report of a session's restore."""

    source: Source
    steps: tuple[RestoreStep, ...] = ()
    damaged: tuple[str, ...] = ()
    """Unusable documents; they were left as evidence and are rebuilt."""
    records_read: int = 0
    head: int = 0
    """The log's last record."""
    settled: bool = True
    """False when a takeover was under way, so that the newest records may be missing."""

    def with_step(self, *steps: RestoreStep) -> RestoreReport:
        """Return the report with more steps."""
        return msgspec.structs.replace(self, steps=(*self.steps, *steps))

    def with_damaged(self, name: str, reason: str | None) -> RestoreReport:
        """Return the report with one more document that was unusable, once."""
        if name in self.damaged:
            return self
        known = msgspec.structs.replace(self, damaged=(*self.damaged, name))
        return known.with_step(lost_step(name, reason))

    def __str__(self) -> str:
        steps = "; ".join(map(str, self.steps))
        return f"restored from {SOURCES[self.source]}, at record {self.head}: {steps}"

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {"source": self.source, "head": self.head}
        facts["records read"] = self.records_read
        facts.update({step.what: step.detail for step in self.steps})
        if self.damaged:
            facts["damaged"] = ", ".join(self.damaged)
        return card("RestoreReport", facts)


Fate = Literal["use", "catch up", "rebuild"]
"""The treatment of a document: read as it is, read with the log after it, or rebuilt."""


class PlannedDocument(msgspec.Struct, frozen=True):
    """The treatment of one document."""

    name: str
    fate: Fate
    as_of_seq: int = 0
    """Its seq; 0 if it cannot be used."""
    why: str = ""


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """All that a restore would use, repair, strip and rebuild, and why. Nothing was changed."""

    key: SessionKey
    source: Source
    """The source that the working context would come from."""
    head: int = 0
    """The log's last record."""
    documents: tuple[PlannedDocument, ...] = ()
    steps: tuple[RestoreStep, ...] = ()
    """All steps, in order; a restore's report has the same steps."""
    records_read: int = 0
    target: Format | None = None
    """The provider that ``stripped`` is about."""
    stripped: tuple[RestoreStep, ...] = ()
    """Parts that the provider would not get, since another one issued them. They stay stored."""
    messages: tuple[Message, ...] = ()
    """The working context as it would be."""
    appended: tuple[Message, ...] = ()
    """The made-up results among them, which would be appended."""
    replaces: bool = False
    """True if a record would replace the whole context; nothing is erased."""
    system_prompt: str | None = None
    """The prompt that the context would have."""
    settled: bool = True
    """False when a takeover was under way, so that the newest records may be missing."""

    @property
    def is_sound(self) -> bool:
        """True if everything would be used as it is, and nothing repaired."""
        rebuilt = any(document.fate == "rebuild" for document in self.documents)
        return not (rebuilt or self.appended or self.replaces)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        text = [f"{self.key}: the context comes from {SOURCES[self.source]}, up to {self.head}"]
        text += [
            f"{document.fate:9} {document.name}{_reason(document)}" for document in self.documents
        ]
        text += [f"step      {step}" for step in self.steps]
        text += [f"strip     {step}" for step in self.stripped]
        results = [message.tool_result for message in self.appended]
        calls = ["" if result is None else result.call_id for result in results]
        text += [f"append    a result for call {call}" for call in calls]
        if self.replaces:
            text.append(f"replace   the context, by {len(self.messages)} messages")
        if self.is_sound:
            text.append("nothing to repair")
        return text

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {"source": self.source, "head": self.head}
        facts.update(
            {document.name: f"{document.fate}{_reason(document)}" for document in self.documents}
        )
        facts.update({step.what: step.detail for step in (*self.steps, *self.stripped)})
        return card("RestorePlan", facts)


SOURCES: dict[Source, str] = {
    "fresh": "nothing: the session is new",
    "snapshot": "the snapshot as it is",
    "catch_up": "the snapshot and the log after it",
    "rebuild": "the log alone",
    "left_out": "nothing: the context was not asked for",
}


def planned_documents(have: Documents, tail: Sequence[Record]) -> tuple[PlannedDocument, ...]:
    """Return what happens to each document that the manifest lists, by name.

    All of them were validated; *tail* is the records after the last fold, or more.
    """
    later: dict[str, list[int]] = {}  # the seqs of the records that change each document
    for record in tail:
        if record.kind not in HOLDER_KINDS:
            for name in (SESSION, SNAPSHOT, *names_of(record)):
                later.setdefault(name, []).append(record.seq)
    planned = [
        PlannedDocument(
            name, "rebuild", 0, have.why.get(name, "it is lost, or not what its manifest says")
        )
        for name in have.damaged
    ]
    for name, step in have.found.items():
        if name in have.damaged:
            continue  # an older version, which a pruned session keeps
        count = sum(seq > step.as_of_seq for seq in later.get(name, ()))
        fate: Fate = "catch up" if count else "use"
        reason = f"{count} records came after record {step.as_of_seq}" if count else ""
        planned.append(PlannedDocument(name, fate, step.as_of_seq, reason))
    return tuple(sorted(planned, key=lambda step: step.name))


def stripped_for(messages: Sequence[Message], target: Format) -> tuple[RestoreStep, ...]:
    """Return what a provider would not get of a context: reasoning and signatures of others."""
    reader = ContextTarget(target, Issuer(target))
    stamps = [
        stamp_of(message)
        for message in messages
        if without_reasoning(message, reader) is not message
    ]
    foreign = Counter("its unknown issuer" if stamp is None else stamp.provider for stamp in stamps)
    return tuple(
        RestoreStep("stripped", f"what only {who} understands, in {count} messages")
        for who, count in sorted(foreign.items())
    )


def _reason(document: PlannedDocument) -> str:
    return f": {document.why}" if document.why else ""
