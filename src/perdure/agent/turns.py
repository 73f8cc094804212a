"""Which turn is running, and which of its tool calls have no result yet.

Turns are numbered by the session, whose counter goes on after a restore, so no id is
ever used twice. A result is known by turn and call id, since providers number
their calls anew in each answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from perdure.errors import SessionError
from perdure.model.messages import ToolCall

__all__ = ["TurnTracker"]


@final
class TurnTracker:
    """Keep track of one agent's turn.

    Args:
        number: The newest turn's number, 0 before the first.

    """

    __slots__ = ("_calls", "_number", "turn_id")

    def __init__(self, number: int = 0) -> None:
        self.turn_id: str = ""
        """The turn that is running; empty between turns."""
        self._number = number
        self._calls: list[ToolCall] = []

    @property
    def number(self) -> int:
        """The newest turn's number; counting goes on after a restore."""
        return self._number

    def begin(self, turn_id: str, number: int) -> None:
        """A turn has begun."""
        self.turn_id, self._number = turn_id, number
        self._calls = []

    def end(self) -> None:
        """It is over."""
        self.turn_id = ""
        self._calls = []

    def asked(self, turn_id: str, calls: Sequence[ToolCall]) -> None:
        """The model wants tools to be called."""
        self.check(turn_id)
        self._calls.extend(calls)

    def answered(self, turn_id: str, call_id: str) -> bool:
        """A result has come; False if no call of this turn waits for it."""
        self.check(turn_id)
        for at, call in enumerate(self._calls):
            if call.id == call_id:
                del self._calls[at]
                return True
        return False

    def open_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls without a result, in their order."""
        return tuple(self._calls)

    def check(self, turn_id: str) -> None:
        """Refuse what belongs to a turn that is not the running one.

        Raises:
            SessionError: It is another turn's.

        """
        if turn_id != self.turn_id:
            running = repr(self.turn_id) if self.turn_id else "no turn"
            message = f"this belongs to turn {turn_id!r}, but {running} is running"
            raise SessionError(message, turn=turn_id, running=self.turn_id)
