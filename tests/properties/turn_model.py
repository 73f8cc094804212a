"""A model of what a conversation consists of while turns are cut and tried again.

What was said, by whom, and what was taken back, as a list of lines. A line belongs to the attempt at a turn that said it, or to none;
taking an attempt back makes the conversation what it were without the attempt's lines, whatever they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_NEVER = 1 << 30


class Line(NamedTuple):
    """Something that changes the conversation."""

    at: int
    """Its place among all lines."""
    attempt: int = 0
    """Whose it is: 0 for what no turn owns."""
    text: str = ""
    """What is said, if anything."""
    back_to: int | None = None
    """The conversation is again what it was after the line of this place."""
    takes: int = 0
    """The attempt that is taken back."""


def conversation(lines: Sequence[Line]) -> list[str]:
    """Return what lines amount to."""
    if not lines:
        return []
    *before, line = lines
    if line.takes:
        return conversation([one for one in before if one.attempt != line.takes])
    if line.back_to is not None:
        return conversation([one for one in before if one.at <= line.back_to])
    return [*conversation(before), line.text]


class Turns:
    """Which attempt goes on, and which is taken back: the newest turn's, if it was cut."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.ended: set[str] = set()
        self.running: str | None = None
        self.begun = _NEVER
        """How many lines there were before the newest attempt, while it may be taken back."""
        self._attempt = self._attempts = 0
        self._newest = ""

    def begin(self, turn: str, *, resume: bool) -> None:
        is_again = self._newest == turn and self._attempt
        if is_again and not resume:
            self._note(Line(len(self.lines), takes=self._attempt))
        if not is_again or not resume:
            self._attempts += 1
            self._attempt, self.begun = self._attempts, len(self.lines)
        self.running = self._newest = turn

    def cut(self) -> None:
        self.running = None

    def end(self) -> None:
        self.ended.add(self._newest)
        self.running, self._newest, self._attempt = None, "", 0
        self.begun = _NEVER

    def say(self, text: str, *, outside: bool) -> int:
        return self._note(Line(len(self.lines), self._owner(outside), text))

    def go_back(self, to: int, *, outside: bool) -> int:
        return self._note(Line(len(self.lines), self._owner(outside), back_to=to))

    def _owner(self, outside: bool) -> int:
        return 0 if outside or self.running is None else self._attempt

    def _note(self, line: Line) -> int:
        self.lines.append(line)
        return line.at
