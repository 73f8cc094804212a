"""What figures and attributes are called.

perdure's own names are stable. Those of OpenTelemetry for databases are stable, too; those for
generative AI are in development, and stand here as of semantic conventions 1.43.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

SEMCONV: Final = "https://opentelemetry.io/schemas/1.43.0"

Kind = Literal["counter", "gauge", "histogram"]

SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""The upper bounds of a histogram's buckets."""
_UNITS: Final = {"s": "_seconds", "By": "_bytes"}


class Figure(NamedTuple):
    """One thing that is counted or measured."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    """In UCUM, as OpenTelemetry wants it."""
    label: str = ""
    """What divides it, if anything does. Never a session's id."""

    @property
    def in_prometheus(self) -> str:
        """Its name there, as OpenTelemetry's exporter for Prometheus makes it, too."""
        total = "_total" if self.kind == "counter" else ""
        return self.name.replace(".", "_") + _UNITS.get(self.unit, "") + total


SAVES = Figure(
    "perdure.saves",
    "counter",
    "Saves of a session: ok, failed (it is tried again), in_doubt (the same, and some of it may"
    " be stored), or refused (the store refuses a record permanently).",
    label="outcome",
)
SAVE_DURATION = Figure("perdure.save.duration", "histogram", "How long saves took.", "s")
SAVE_WINDOW = Figure(
    "perdure.save.window",
    "histogram",
    "How old the oldest change was when its save was done: what a crash just before could have"
    " lost.",
    "s",
)
SAVED_RECORDS = Figure("perdure.saved.records", "counter", "Records that became durable.")
SAVED_BYTES = Figure("perdure.saved", "counter", "Bytes that the store wrote for saves.", "By")
UNSAVED_AGE = Figure(
    "perdure.unsaved.age", "gauge", "For how long the oldest change has not been durable.", "s"
)
UNSAVED_BYTES = Figure("perdure.unsaved", "gauge", "Bytes that are only in memory.", "By")
UNSAVED_SESSIONS = Figure(
    "perdure.unsaved.sessions",
    "gauge",
    "Sessions with changes that are not durable.",
    label="state",
)
OPEN_SESSIONS = Figure("perdure.open.sessions", "gauge", "Sessions that are open here.")
LEASE_CHANGES = Figure(
    "perdure.lease.changes",
    "counter",
    "Sessions that were acquired, released, or lost to another process.",
    label="change",
)
RESTORE_DURATION = Figure(
    "perdure.restore.duration",
    "histogram",
    "How long opening a session took, lease included, by where it came from.",
    "s",
    "source",
)
FOLDS = Figure("perdure.folds", "counter", "Folds of a session's log.", label="outcome")
POSTS = Figure("perdure.inbox.posts", "counter", "Posts that entered a session that is open here.")
DEAD_LETTERS = Figure(
    "perdure.inbox.dead_letters", "gauge", "Posts that could not be received, and wait for you."
)
UNDELIVERED = Figure(
    "perdure.inbox.undelivered", "gauge", "Sessions whose posts cannot be received right now."
)
LOST_RECORDS = Figure(
    "perdure.lost.records",
    "gauge",
    "Records of lost sessions that are only in memory, until they are forked or discarded.",
)
STALLS = Figure("perdure.stalls", "counter", "Times that due saves made no progress.")
LOOP_LAG = Figure(
    "perdure.loop.lag", "histogram", "How late the event loop was, looked at each 0.25 s.", "s"
)
HEALTH = Figure("perdure.health", "gauge", "0: ok, 1: degraded, 2: failing.")
STORE_UP = Figure("perdure.store.up", "gauge", "Whether the store answers: 1 or 0.")
BUILD = Figure("perdure.build.info", "gauge", "Always 1.", label="version")

FIGURES: Final = (
    *(SAVES, SAVE_DURATION, SAVE_WINDOW, SAVED_RECORDS, SAVED_BYTES),
    *(UNSAVED_AGE, UNSAVED_BYTES, UNSAVED_SESSIONS, OPEN_SESSIONS, LEASE_CHANGES),
    *(RESTORE_DURATION, FOLDS, POSTS, DEAD_LETTERS, UNDELIVERED, LOST_RECORDS, STALLS, LOOP_LAG),
    *(HEALTH, STORE_UP, BUILD),
)

# OpenTelemetry's, for spans and for what an agent and a store do

CONVERSATION: Final = "gen_ai.conversation.id"
AGENT: Final = "gen_ai.agent.name"
OPERATION: Final = "gen_ai.operation.name"
TOOL: Final = "gen_ai.tool.name"
ERROR: Final = "error.type"
DB_SYSTEM: Final = "db.system.name"
DB_OPERATION: Final = "db.operation.name"
DB_POOL: Final = "db.client.connection.pool.name"
DB_STATE: Final = "db.client.connection.state"

INVOKE_AGENT = Figure(
    "gen_ai.invoke_agent.duration", "histogram", "How long an agent's turns took.", "s"
)
EXECUTE_TOOL = Figure(
    "gen_ai.execute_tool.duration", "histogram", "How long an agent's tools took.", "s"
)
DB_DURATION = Figure(
    "db.client.operation.duration", "histogram", "How long the store's operations took.", "s"
)
DB_CONNECTIONS = Figure(
    "db.client.connection.count", "gauge", "Connections to the store, idle and used."
)
