"""The workload: an agent's chat, with a tool call in every turn.

A turn is what one exchange with a tool amounts to: the user's text, the assistant's wish
to search, what the search found, and the answer; about 7 KB of JSON. Sizes are those of a
message's JSON as an application would send it, and know nothing of how perdure stores it.
Texts are made up, but always the same for the same seed.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

from perdure import Message, ToolCall

__all__ = ["Chat", "Turn"]

USER, CALL, RESULT, ANSWER = 600, 1400, 4200, 900
"""Bytes of JSON of a turn's four messages."""

SENTENCE = (
    "the harbor of a quiet town where ships come in at dawn and leave before night; nobody "
    "asked why until the pilot wrote it down: tide, wind, depth, cargo, crew, port fees, "
    "naïve plans, 42 crates, 7% late, weather from the north-west, see the log for details"
)
CORPUS = 100_000
"""Characters of text, out of which every message is cut."""
TOOL = "search_notes"


class Turn(NamedTuple):
    """One turn: its messages, as perdure gets them and as others would send them."""

    messages: tuple[Message, ...]
    plain: tuple[dict[str, Any], ...]

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return sum(map(_size, self.plain))


class Chat:
    """A conversation that never ends."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        words = SENTENCE.split()
        self._corpus = " ".join(self._random.choices(words, k=CORPUS // 4))
        self._turns = 0

    def turn(self) -> Turn:
        """Return the next turn."""
        self._turns += 1
        call_id = f"call_{self._turns:08d}"
        said, wish, answer = self._text(USER - 31), self._text(CALL - 364), self._text(ANSWER - 36)
        request = {"query": self._text(200), "limit": 10, "filters": {"lang": "en", "new": True}}
        found = self._found()
        call = {"id": call_id, "name": TOOL, "arguments": request}
        messages = (
            Message.user(said),
            Message.assistant(wish, tool_calls=[ToolCall(call_id, TOOL, request)]),
            Message.tool(call_id, found, name=TOOL),
            Message.assistant(answer),
        )
        plain = (
            {"role": "user", "content": said},
            {"role": "assistant", "content": wish, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "name": TOOL, "content": found},
            {"role": "assistant", "content": answer},
        )
        return Turn(messages, plain)

    def _found(self) -> dict[str, Any]:
        """Return a search result as tools give it: rows of text, numbers and flags."""
        rows = [
            {
                "id": self._random.randrange(10**9),
                "score": round(self._random.random(), 4),
                "title": self._text(60),
                "url": f"https://example.org/notes/{self._random.randrange(10**6)}",
                "snippet": self._text(250),
                "tags": ["harbor", "log"],
                "archived": False,
            }
            for _ in range(8)
        ]
        return {"total": 8, "rows": rows, "summary": self._text(RESULT - 119 - _size(rows))}

    def _text(self, size: int) -> str:
        start = self._random.randrange(len(self._corpus) - size)
        return self._corpus[start : start + size]


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
