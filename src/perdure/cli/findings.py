"""Findings of ``perdure check`` and ``doctor``: their severities, and a line for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from perdure.cli.output import say

Level = Literal["ok", "note", "warning", "problem"]
"""``note`` and ``warning`` are in order, and worth knowing; only a ``problem`` is a failure."""


class CheckFinding(msgspec.Struct, frozen=True):
    """The result of one look."""

    what: str
    """What was looked at: a log, a document, a blob, the clock …"""
    level: Level
    detail: str
    cure: str = ""
    repairable: bool = False
    """True if a rebuild from the log repairs it."""

    @property
    def problem(self) -> bool:
        """True if something is wrong."""
        return self.level == "problem"


def say_findings(findings: Iterable[CheckFinding], where: object = "") -> None:
    """Print a line for each finding: where it is, how bad it is, what it is, and the cure."""
    place = f"{where}: " if where else ""
    for finding in findings:
        level = "PROBLEM" if finding.problem else finding.level
        cure = f": {finding.cure}" if finding.cure else ""
        say(f"{place}{level}: {finding.what}: {finding.detail}{cure}")
