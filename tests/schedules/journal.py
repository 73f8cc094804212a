"""What an episode's tasks asked of perdure, what each was answered, and what that promises.

Events are plain values, so that a second process can send them through a pipe; times are the system's monotonic clock, which all
processes share. An act without an end was killed: it may have happened or not, as one that was cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HAPPENED, REFUSED, DOUBT = "ok", "refused", "in doubt"

NOTHING_DONE = {
    "CheckpointNotFoundError",
    "HistoryPrunedError",
    "InvalidArgumentError",
    "LeaseHeldError",
    "SessionNotFoundError",
}
"""Errors after which the store is as before."""


@dataclass
class Act:
    """One call of one task."""

    id: str
    who: str
    name: str
    ids: tuple[str, ...]
    detail: str
    began: float
    ended: float = float("inf")
    """Infinite while it may go on: in the background, after its caller was cancelled."""
    left: float = float("inf")
    """When its caller had an answer, or was cancelled."""
    outcome: str = DOUBT
    result: Any = None

    @property
    def may_have_happened(self) -> bool:
        """Whether it had its effect, or may have had it."""
        return self.outcome != REFUSED or self.result.split(":")[0] not in NOTHING_DONE

    def told(self) -> str:
        """Return a line of the story."""
        said = "" if self.result is None else f" {self.result}"
        ended = "?" if self.left == float("inf") else f"{self.left * 1000 % 1e6:.1f}"
        return (
            f"{self.began * 1000 % 1e6:9.1f}–{ended:8} {self.who:8} {self.name}({', '.join(self.ids)}"
            f"{', ' if self.detail and self.ids else ''}{self.detail}) → {self.outcome}{said}"
        )


@dataclass
class Token:
    """One message that was appended or posted: its text is told once in an episode."""

    text: str
    id: str
    act: Act
    group: tuple[str, ...]
    manager: str
    key: str = ""
    """What names the post, if it was posted."""
    seq: int = 0
    """Its record's number, once ``append`` has returned; 0 of a post."""
    epoch: int = 0
    accepted: float = float("inf")
    durable: float = float("inf")


@dataclass
class Journal:
    """All of it, in the order in which it came."""

    acts: dict[str, Act] = field(default_factory=dict)
    tokens: dict[str, Token] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    """How each manager ended: "clean", "killed", or what was raised."""
    errors: list[tuple[str, str, str]] = field(default_factory=list)
    """What escaped that is no answer: label, act, text."""
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What was done to processes."""
    send: Callable[[tuple[Any, ...]], None] | None = None
    """Where events go as well, in a second process."""

    def note(self, kind: str, *facts: Any) -> None:
        """Take an event in, with the time of now."""
        event = (kind, time.monotonic(), *facts)
        if self.send is not None:
            self.send(event)
        self.take(event)

    def take(self, event: tuple[Any, ...]) -> None:
        """Take an event in that another process has told."""
        kind, at, *facts = event
        getattr(self, f"_{kind}")(at, *facts)

    def _begin(self, at: float, id: str, who: str, name: str, ids: Any, detail: str) -> None:
        self.acts[id] = Act(id, who, name, tuple(ids), detail, at)

    def _end(self, at: float, id: str, outcome: str, result: Any) -> None:
        act = self.acts[id]
        act.left, act.outcome, act.result = at, outcome, result
        if outcome != DOUBT:
            act.ended = at

    def _result(self, at: float, id: str, result: Any) -> None:
        self.acts[id].result = result

    def _intend(self, at: float, act: str, manager: str, id: str, texts: Any, key: str) -> None:
        for text in texts:
            self.tokens[text] = Token(text, id, self.acts[act], tuple(texts), manager, key)

    def _accept(self, at: float, texts: Any, epoch: int, version: int) -> None:
        for seq, text in enumerate(texts, version - len(texts) + 1):
            token = self.tokens[text]
            token.seq, token.epoch, token.accepted = seq, epoch, at

    def _durable(self, at: float, id: str, epoch: int, version: int) -> None:
        for token in self.tokens.values():
            if (token.id, token.epoch) == (id, epoch) and 0 < token.seq <= version:
                token.durable = min(token.durable, at)

    def _posted(self, at: float, texts: Any) -> None:
        for text in texts:
            self.tokens[text].accepted = self.tokens[text].durable = at

    def _closed(self, at: float, manager: str, how: str) -> None:
        self.closed[manager] = how

    def _error(self, at: float, label: str, act: str, text: str) -> None:
        self.errors.append((label, act, text))

    def _note(self, at: float, text: str) -> None:
        self.notes.append((at, text))

    # questions

    def named(self, *names: str, id: str | None = None, at: int = 0) -> Iterator[Act]:
        """Yield the acts of these names that may have happened; with *id*, whose ids[at] that is."""
        for act in self.acts.values():
            if act.name in names and act.may_have_happened:
                if id is None or (len(act.ids) > at and act.ids[at] == id):
                    yield act

    def ends(self, id: str, since: float) -> list[Act]:
        """Return what may have ended a session after a moment, renames included."""
        return [one for one in self.named("delete", "forget", "rename", id=id) if one.ended > since]

    def makes(self, id: str, since: float, until: float) -> bool:
        """Whether a session of this id may have come to be within that time."""
        return any(
            one.ended > since
            and one.began < until
            and id in (one.ids[-1:] if one.name in TAKES else one.ids[:1])
            for one in self.acts.values()
            if one.name in WRITES or one.name in TAKES
        )

    def kin(self, id: str) -> set[str]:
        """Return a session's id and those that it shares history with, whichever way."""
        found, size = {id}, 0
        while size < len(found):
            size = len(found)
            for act in self.named(*TAKES):
                if found & set(act.ids[:2]):
                    found |= set(act.ids[:2])
        return found


TAKES = ("fork", "copy", "rename")
WRITES = (
    "append",
    "checkpoint",
    "close",
    "failed turn",
    "memory",
    "post",
    "prune checkpoints",
    "retract",
    "rollback",
    "save",
    "named turn",
    "turn",
    "verify",
)
