"""Summarizers: what a compaction makes of old turns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, final

from perdure.memory.compaction import Summary, TurnTrace
from perdure.memory.facts import Fact

# Summaries without a model: quotes, and users' sentences that tell something
#
# The same turns always give the same summary. It does not invent anything, and it understands no
# language: facts are known by English turns of phrase. Use a model's summaries for others.
# Pure.


_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n+")


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)(?:{'|'.join(patterns)})(?!\w)", re.IGNORECASE)


_CATEGORIES: Final = {
    "critical_issue": _words(
        "urgent", "critical", "outage", r"broken?", r"crash\w*", "data loss", "corrupt(?:ed)?"
    ),
    "unresolved_work": _words(
        "to-?do",
        r"still (?:need|have|must)\w*",
        "not (?:done|finished) yet",
        "unfinished",
        "remind me",
        "do(?: not|n't) forget",
        "deadline",
        "follow up",
    ),
    "user_preference": _words(
        r"i (?:really )?(?:like|love|prefer|hate|dislike)",
        "i (?:do not|don't) like",
        r"my favou?rite \w+",
        "call me",
        "always",
        "never",
    ),
    "durable_fact": _words(r"my \w+", "i am", "i'm", "i live", "i work", "i need", "remember"),
    "important_artifact": re.compile(
        r"https?://\S+|(?<![\w/])(?:~|\.{1,2})?/[\w.-]+/[\w./-]+|(?<![\w-])\w[\w-]*\.(?:py|md|json|ya?ml|toml|csv|pdf|txt|sql|ipynb)\b"
    ),
}
"""How a sentence of each category is known, the weightiest first."""


@final
class ExtractiveSummarizer:
    """Quote the beginning of each question and of its last answer; facts are users' sentences
    about themselves, their wishes and their work.

    Args:
        quote_chars: How long a quote is.
        max_facts: How many facts one summary has.

    """

    def __init__(self, *, quote_chars: int = 160, max_facts: int = 16) -> None:
        self._quote_chars = quote_chars
        self._max_facts = max_facts

    async def summarize(self, turns: Sequence[TurnTrace]) -> Summary:
        """Return quotes of the turns; deterministic."""
        lines = [line for turn in turns for line in self._lines(turn)]
        facts = dict.fromkeys(fact for turn in turns for fact in _facts(turn))
        return Summary("\n".join(lines), tuple(facts)[: self._max_facts])

    def _lines(self, turn: TurnTrace) -> Iterable[str]:
        questions = [
            spoken.text for spoken in turn.messages if spoken.role == "user" and spoken.text
        ]
        tools = [call.name for message in turn.messages for call in message.tool_calls]
        failed = [
            spoken.tool_result.name or spoken.tool_result.call_id
            for spoken in turn.messages
            if spoken.tool_result is not None and spoken.tool_result.error is not None
        ]
        answers = [
            spoken.text for spoken in turn.messages if spoken.role == "assistant" and spoken.text
        ]
        yield from (f"User: {self._quote(text)}" for text in questions)
        if tools:
            yield f"Tools used: {', '.join(dict.fromkeys(tools))}"
        if failed:
            yield f"Tools that failed: {', '.join(dict.fromkeys(failed))}"
        if answers:
            yield f"Assistant: {self._quote(answers[-1])}"

    def _quote(self, text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= self._quote_chars else line[: self._quote_chars - 1] + "…"


def _facts(turn: TurnTrace) -> Iterable[Fact]:
    for message in turn.messages:
        if message.role != "user":
            continue
        for sentence in _SENTENCE.split(message.text):
            line = " ".join(sentence.split())
            category = _category_of(line)
            if category is not None and not line.endswith("?"):
                yield Fact(line, category)


def _category_of(sentence: str) -> str | None:
    return next((name for name, words in _CATEGORIES.items() if words.search(sentence)), None)
