"""What a restore did, step by step, for people and tests."""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure._lib.display import card

Source = Literal["fresh", "snapshot", "catch_up", "rebuild"]
"""Where the working context came from: nothing was there; the snapshot as it lay; the
snapshot and the log after it; the log alone."""


class RestoreStep(msgspec.Struct, frozen=True):
    """One thing that a restore did or found."""

    what: str
    """``read``, ``caught up``, ``rebuilt``, ``damaged``, ``unsettled`` …"""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.detail}".strip()


def lost_step(name: str, reason: str | None) -> RestoreStep:
    """Return the step for a document that cannot be used."""
    reason = reason or "it is lost, or not what its manifest says"
    return RestoreStep("damaged", f"{name}: {reason}; made anew from the log")


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """How a session came back."""

    source: Source
    steps: tuple[RestoreStep, ...] = ()
    damaged: tuple[str, ...] = ()
    """Documents that were unusable; they were left as evidence and are made anew."""
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
        return f"restored from {self.source} at record {self.head}: {steps}"

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {"source": self.source, "head": self.head}
        facts["records read"] = self.records_read
        facts.update({step.what: step.detail for step in self.steps})
        if self.damaged:
            facts["damaged"] = ", ".join(self.damaged)
        return card("RestoreReport", facts)
