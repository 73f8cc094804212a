"""Budget of a context: how many tokens a model may be asked with, and how many it has read.

The application says when to compact, the session how large its context may be, and the model, in
its own tokens, how large its window is and what a request took. All of it becomes one policy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, final

import msgspec

from perdure.agent.llm.failures import Overflow
from perdure.agent.llm.model import ToolSpec
from perdure.memory.compaction import CompactionPolicy
from perdure.memory.context import tokens_of
from perdure.records.messages import Message
from perdure.session.internals import working_context
from perdure.session.session import Session

log: logging.Logger = logging.getLogger("perdure.agent")

SPARE: Final = 0.85
"""How much of a window may be asked with: the rest is the answer's, and for miscounting."""
NEAR: Final = 0.75
"""Of how much of it to warn."""
HALF: Final = 0.5
"""How much of a request that was too long to keep, if nobody says how much too long it was."""


@final
class ContextBudget:
    """Tokens of one agent's context.

    Args:
        session: Whose context.
        policy: When to compact, as the application says.

    """

    def __init__(self, session: Session, policy: CompactionPolicy) -> None:
        self._session = session
        self._policy = policy
        self._window: int | None = None  # the model's, in its own tokens, if it is known
        self._room: int | None = None  # the same, as tokens are counted here, with room to spare
        self._scale = 1.0  # tokens as they are counted here, for one of the model's
        self._is_near = False
        self._was_told = False  # whether the model has said what a request took
        self.beside: int = 0
        """Tokens of a request that are not counted here, such as those of the tools."""

    @property
    def policy(self) -> CompactionPolicy:
        """When to compact: as was said, and as the session and the model's window allow."""
        policy = self._policy.within(working_context(self._session).limit)
        if self._room is None or self._room >= (policy.max_tokens or self._room + 1):
            return policy
        return msgspec.structs.replace(policy, max_tokens=self._room)

    def count(self, messages: Sequence[Message]) -> int:
        """Return how many tokens a request with these messages has, as counted here."""
        return tokens_of(messages, self._policy.count_tokens) + self.beside

    def is_over(self, messages: Sequence[Message]) -> bool:
        """Say whether messages are more than what the model may be asked with."""
        policy = self.policy
        tokens = None if policy.max_tokens is None else self.count(messages)
        return policy.is_due(working_context(self._session).size, tokens)

    def note_window(self, tokens: int | None) -> None:
        """Take note of how many tokens the model may be asked with, if that is known."""
        if tokens is not None and self._room is None:
            self._window, self._room = tokens, int(tokens * SPARE)

    def note_tools(self, specs: Sequence[ToolSpec]) -> None:
        """Take note of the tools that the next request has, until the model says what they took."""
        if self._was_told or self.policy.max_tokens is None:
            return
        shown = Message.system(msgspec.json.encode(specs, enc_hook=repr).decode())
        self.beside = self._policy.count_tokens(shown) if specs else 0

    def note_usage(self, asked_with: Sequence[Message], tokens: int) -> bool:
        """Take note of how many tokens the model has read; say whether they are too many."""
        size, policy = working_context(self._session).size, self.policy
        if policy.max_tokens is None:
            return policy.is_due(size, None)
        scaled = int(tokens * self._scale)
        self.beside = max(scaled - tokens_of(asked_with, policy.count_tokens), 0)
        self._was_told = True
        is_near = self._window is not None and tokens > self._window * NEAR
        if is_near and not self._is_near:
            name = self._session.id
            facts = {"agent": name, "tokens": tokens, "window": self._window}
            log.warning("the context of %s nears the model's window", name, extra=facts)
        self._is_near = is_near
        return policy.is_due(size, scaled) or self._policy.is_due(size, tokens)

    def note_overflow(self, asked_with: Sequence[Message], overflow: Overflow) -> int:
        """Take note that the model was asked with too much, and return how much that was.

        What fits is what the provider says, as tokens are counted here; half of the request, where
        it says nothing.
        """
        tokens = self.count(asked_with)
        if overflow.window and overflow.tokens:
            self._scale = tokens / overflow.tokens
            room = overflow.window * self._scale * SPARE
        elif overflow.window:
            room = min(overflow.window * SPARE, tokens * HALF)
        else:
            room = tokens * HALF
        self._window, self._room = overflow.window or self._window, max(int(room), 1)
        self.beside = 0  # it is part of what the scale was made of
        return tokens
