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
    'asked "why" until the pilot wrote it down: tide, wind, depth, cargo, crew, port fees, '
    "naïve plans, 42 crates, 7% late, weather from the north-west, see the log for details"
)
WORDS = SENTENCE.split()


class Turn(NamedTuple):
    """One turn: its messages, and how many bytes of JSON they are."""

    messages: tuple[Message, ...]
    size: int


class Chat:
    """A conversation that never ends."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._turns = 0

    def turn(self) -> Turn:
        """Return the next turn."""
        self._turns += 1
        call_id = f"call_{self._turns:08d}"
        text, request = self._texts()
        answer = {"role": "assistant", "content": self._text(ANSWER - 34)}
        said = {"role": "user", "content": self._text(USER - 29)}
        call = {"id": call_id, "name": "search_notes", "arguments": request}
        asked = {"role": "assistant", "content": text, "tool_calls": [call]}
        found = self._found()
        told = {"role": "tool", "tool_call_id": call_id, "name": "search_notes", "content": found}
        messages = (
            Message.user(said["content"]),
            Message.assistant(text, tool_calls=[ToolCall(call_id, "search_notes", request)]),
            Message.tool(call_id, found, name="search_notes"),
            Message.assistant(answer["content"]),
        )
        return Turn(messages, sum(map(_size, (said, asked, told, answer))))

    def _texts(self) -> tuple[str, dict[str, Any]]:
        request = {"query": self._text(200), "limit": 10, "filters": {"lang": "en", "new": True}}
        return self._text(CALL - 158 - _size(request)), request

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
        rest = RESULT - 130 - _size(rows)
        return {"total": 8, "rows": rows, "summary": self._text(max(rest, 1))}

    def _text(self, size: int) -> str:
        """Return text whose JSON is of about this size."""
        words: list[str] = []
        left = size
        while left > 0:
            word = self._random.choice(WORDS)
            words.append(word)
            left -= len(json.dumps(word, ensure_ascii=False).encode()) - 1
        return " ".join(words)[:size]


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
