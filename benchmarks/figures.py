"""Figures with their targets, the table that people read, and the file that machines read."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["AT_LEAST", "TARGETS", "Report", "Row"]

TARGETS = {
    "adapters.agent_framework.checkpoint_cpu": 1.5,
    "adapters.agent_framework.cpu": 1.2,
    "adapters.claude.cpu": 3.5,
    "adapters.langgraph.bytes": 0.005,
    "adapters.langgraph.bytes_delta": 1.5,
    "adapters.langgraph.disk": 0.005,
    "adapters.langgraph.disk_delta": 1.5,
    "adapters.langgraph.time": 0.2,
    "adapters.pydantic_ai.overhead": 1.3,
    "save.over_limit": 1.3,
    "save.growth": 1.1,
    "save.p99_with_folds_over_without": 1.3,
    "save.bytes": 1.2,
    "save.bytes_with_folds": 1.6,
    "live.mark_us": 3.0,
    "live.worst_slice_ms": 20.0,
    "live.tasks": 20,
    "live.timers": 20,
    "live.mark_over_floor": 16.0,
    "live.append_over_msgspec": 6.0,
    "live.bytes_per_session": 3_000.0,
    "closed.held_mb": 30.0,
    "deploy.failed": 0,
    "deploy.wrong": 0,
    "deploy.tracebacks": 0,
    "forks.file.full_over_copy": 1.2,
    "forks.file.context_over_open": 3.0,
    "forks.file.old_over_read": 1.2,
    "forks.sqlite.full_over_copy": 1.2,
    "forks.sqlite.context_over_open": 3.0,
    "forks.sqlite.old_over_read": 1.2,
    "imports.over_anyio_msgspec": 1.5,
    "imports.first_open": 3.0,
    "listing.adk": 2.0,
    "listing.langgraph": 2.0,
    "listing.s3.requests": 1,
    "listing.turn_over_base": 1.03,
    "memory.open_bytes_share": 0.02,
    "memory.touch_bytes_over_value": 2.0,
    "history.any_of_1000000": 3.0,
    "inspector.file.first_ms": 300.0,
    "inspector.file.slowest_ms": 300.0,
    "inspector.sqlite.first_ms": 300.0,
    "inspector.sqlite.slowest_ms": 300.0,
    "opening.agent.over_open": 1.5,
    "opening.agent.snapshot_reads": 1,
    "opening.file.hops": 2,
    "opening.file.listings": 4,
    "opening.file.opens": 20,
    "opening.file.over_floor": 1.3,
    "opening.file.twice": 0,
    "opening.postgres.new_round_trips": 1,
    "opening.postgres.round_trips": 2,
    "opening.postgres.twice": 0,
    "opening.redis.new_round_trips": 1,
    "opening.redis.round_trips": 1,
    "opening.redis.twice": 0,
    "opening.s3.new_requests": 3,
    "opening.s3.requests": 4,
    "opening.s3.twice": 0,
    "opening.sqlite.hops": 1,
    "opening.sqlite.over_base": 0.55,
    "opening.sqlite.twice": 0,
    "observe.overhead": 1.03,
    "observe.scrape_10000_ms": 50.0,
    "scale.reopen_10000": 10.0,
    "scale.close_10000": 10.0,
    "stores.lag_over_memory": 3.0,
    "stores.postgres.open_round_trips": 3.0,
    "stores.postgres.close_round_trips": 3.0,
    "stores.postgres.open_many": 1.0,
    "stores.postgres.close_many": 0.2,
    "stores.postgres.idle_beat": 1.5,
    "stores.s3.open_requests": 6.0,
    "stores.s3.idle_beat": 3.0,
    "tune.error": 0.15,
    "checkpoints.bytes": 1.5,
    "checkpoints.growth": 1.3,
    "checkpoints.disk": 1.3,
    "checkpoints.given_bytes": 12.0,
    "checkpoints.replay_memory_growth": 1.2,
    "restart.both_over_base": 0.6,
    "restore.growth": 1.5,
    "restore.first_context": 1.1,
    "restore.load_over_openai": 1.5,
    "restore.open_over_openai": 3.5,
    "restore.bytes_growth": 1.5,
    "restore.memory_growth": 1.5,
    "peers.one.sqlite_cpu_over_openai": 1.0,
    "peers.one.file_cpu_over_openai": 1.0,
    "peers.one.sqlite_p99_over_jsonl": 2.0,
    "peers.one.file_p99_over_jsonl": 2.0,
    "peers.one.sqlite_bytes_over_openai": 1.0,
    "peers.one.file_bytes_over_openai": 0.34,
    "peers.many200.sqlite_cpu_over_limit": 3.0,
    "peers.many200.sqlite_lag_over_openai": 2.5,
    "peers.many200.sqlite_peak_over_openai": 0.4,
}
"""The most that each figure may be. What is in neither table is reported, and not judged."""

AT_LEAST = {
    "adapters.adk.turns": 10.0,
    "adapters.openai.turns": 1.2,
    "adapters.openai.turns_many": 3.0,
    "stores.file.of_limit": 0.6,
    "stores.sqlite.of_limit": 0.6,
    "stores.postgres.of_limit": 0.6,
    "stores.redis.of_limit": 0.6,
    "stores.s3.of_limit": 0.6,
    "stores.postgres.processes_2_over_1": 1.1,
    "peers.one.sqlite_over_openai": 1.0,
    "peers.one.file_over_jsonl": 0.9,
    "peers.many200.sqlite_over_openai": 4.0,
    "peers.many200.sqlite_over_limit": 0.65,
    "peers.many200.file_over_jsonl": 0.65,
}
"""The least that each of these figures has to be."""

PACKAGES = ("perdure", "anyio", "msgspec", "trio")


class Row(NamedTuple):
    """One figure, and what it says in words."""

    name: str
    value: float
    meaning: str

    @property
    def target(self) -> float | None:
        """The most, or the least, that it may be; None for what is only reported."""
        return TARGETS.get(self.name, AT_LEAST.get(self.name))

    @property
    def met(self) -> bool:
        """Whether it keeps its target; true where it has none."""
        if self.target is None:
            return True
        return self.value >= self.target if self.name in AT_LEAST else self.value <= self.target


class Report(NamedTuple):
    """What one benchmark has found."""

    rows: list[Row]
    details: dict[str, Any]
    """How it was measured, and what the figures were made of."""

    @property
    def met(self) -> bool:
        """Whether every figure keeps its target."""
        return all(row.met for row in self.rows)

    def table(self) -> str:
        """Return the figures as a table."""
        head = ("figure", "value", "target", "", "meaning")
        lines = [head, *map(_cells, self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(4)]
        return "\n".join(
            "  ".join(
                [line[0].ljust(widths[0])]
                + [line[at].rjust(widths[at]) for at in (1, 2)]
                + [line[3].ljust(widths[3]), line[4]]
            ).rstrip()
            for line in lines
        )

    def document(self) -> dict[str, Any]:
        """Return figures, environment and details, as they are written."""
        return {
            "figures": {row.name: row.value for row in self.rows},
            "targets": {row.name: row.target for row in self.rows if row.target is not None},
            "environment": environment(),
            "details": self.details,
        }

    def save(self, path: Path) -> None:
        """Write figures, environment and details as JSON."""
        path.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    if row.target is None:
        return row.name, f"{row.value:,.2f}", "", "", row.meaning
    judgement = "pass" if row.met else "MISS"
    least = ">=" if row.name in AT_LEAST else "<="
    return row.name, f"{row.value:,.2f}", f"{least} {row.target:g}", judgement, row.meaning


def environment() -> dict[str, Any]:
    """Return what the figures were measured on; the load says who else was at work."""
    return {
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "packages": {name: version(name) for name in PACKAGES},
    }
