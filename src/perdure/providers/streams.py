"""Whole answers, put together from the parts that a stream brings: pure.

A provider's answer is kept as the provider would have sent it in one piece, so that nothing of
it is lost, whether this release knows a field or not: `perdure.providers` makes a message of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from perdure.errors import InvalidArgumentError
from perdure.providers.replies import arguments, plain_text

_NAMES: Final = frozenset({"id", "type", "role", "name", "index", "object", "format", "status"})
"""Fields that a later part repeats, and does not continue."""


def merged_delta(merged: Any, part: Any, field: str = "") -> Any:
    """Return a value with the next part of it added.

    Text is continued, except for what names something; lists are joined, by ``index``
    where their elements have one; objects are merged field by field.

    >>> merged_delta({"role": "assistant", "content": "He"}, {"content": "llo"})
    {'role': 'assistant', 'content': 'Hello'}
    """
    if part is None or merged is None:
        return merged if part is None else part
    if isinstance(merged, str) and isinstance(part, str):
        return (part or merged) if field in _NAMES else merged + part
    if isinstance(merged, dict) and isinstance(part, Mapping):
        fields = {key: merged_delta(merged.get(key), value, key) for key, value in part.items()}
        return {**merged, **fields}
    if isinstance(merged, list) and isinstance(part, list):
        return _joined(merged, part)
    return part


def _joined(merged: list[Any], part: list[Any]) -> list[Any]:
    joined = list(merged)
    for element in part:
        index = element.get("index") if isinstance(element, Mapping) else None
        places = [
            at
            for at, known in enumerate(joined)
            if isinstance(known, dict) and known.get("index") == index
        ]
        if index is not None and places:
            at = places[-1]
            ids = {joined[at].get("id"), element.get("id")} - {None, ""}
            if len(ids) < 2:  # some servers give all elements the index 0
                joined[at] = merged_delta(joined[at], element)
                continue
        joined.append(element)
    return joined


class _Answer:
    """An answer whose events are still coming.

    Its subclasses write the types of its attributes again: pyright takes none from a base.
    """

    def __init__(self) -> None:
        self.complete: bool = False
        """True once the last event has come."""
        self.error: Any = None
        """The provider's error, in its own shape; None if there is none."""
        self.usage: dict[str, Any] | None = None
        """Tokens used, as the provider counts them."""


class ChatAnswer(_Answer):
    """An answer of Chat Completions, from its chunks."""

    complete: bool
    error: Any
    usage: dict[str, Any] | None

    def __init__(self) -> None:
        super().__init__()
        self._fields: dict[str, Any] = {}
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._finish_reason: str | None = None

    def take(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """Add an event; return what it says of the text and of the reasoning."""
        self.error = event.get("error")
        extra = {key: value for key, value in event.items() if key not in {"choices", "usage"}}
        self._fields.update(extra)
        self.usage = event.get("usage") or self.usage
        choice = next(iter(event.get("choices") or ()), None)
        if choice is None:
            return "", ""
        delta = dict(choice.get("delta") or {})
        # A tool call without an index is a whole one: some servers send them so.
        delta["tool_calls"] = list(delta.get("tool_calls") or ()) or None
        self._message = merged_delta(self._message, delta)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self.complete = self._finish_reason is not None
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        return plain_text(delta.get("content")), plain_text(reasoning)

    def whole(self) -> dict[str, Any]:
        """Return the answer as it would have come in one piece."""
        message = dict(self._message)
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [
                {"type": "function", **{key: call[key] for key in call if key != "index"}}
                for call in calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        usage = {} if self.usage is None else {"usage": self.usage}
        return {**self._fields, "object": "chat.completion", "choices": [choice], **usage}


class ResponsesAnswer(_Answer):
    """An answer of the Responses API, from its events."""

    complete: bool
    error: Any
    usage: dict[str, Any] | None

    _TEXT: Final = frozenset({"response.output_text.delta", "response.refusal.delta"})
    _REASONING: Final = frozenset(
        {"response.reasoning_text.delta", "response.reasoning_summary_text.delta"}
    )
    _LAST: Final = frozenset({"response.completed", "response.incomplete"})

    def __init__(self) -> None:
        super().__init__()
        self._items: list[Any] = []
        self._response: dict[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """Add an event; return what it says of the text and of the reasoning."""
        kind = event.get("type")
        if kind in self._TEXT:
            return plain_text(event.get("delta")), ""
        if kind in self._REASONING:
            return "", plain_text(event.get("delta"))
        if kind == "response.output_item.done":
            self._items.append(event.get("item"))
        elif kind in self._LAST:
            self.complete = True
            self._response = event.get("response") or {}
            self.usage = self._response.get("usage")
        elif kind == "response.failed":
            self.error = (event.get("response") or {}).get("error") or {}
        elif kind == "error":
            self.error = event.get("error") or event
        return "", ""

    def whole(self) -> dict[str, Any]:
        """Return the answer as it would have come in one piece."""
        return {**self._response, "output": self._response.get("output") or self._items}


class AnthropicAnswer(_Answer):
    """An answer of the Messages API, from its events."""

    complete: bool
    error: Any
    usage: dict[str, Any] | None

    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] = {"type": "message", "role": "assistant"}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._json: dict[int, str] = {}

    def take(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """Add an event; return what it says of the text and of the reasoning."""
        kind, index = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            self._message.update(event.get("message") or {})
            self.usage = self._message.get("usage")
        elif kind == "content_block_start":
            self._blocks[index] = dict(event.get("content_block") or {})
        elif kind == "content_block_delta":
            return self._delta(index, event.get("delta") or {})
        elif kind == "message_delta":
            self._message.update(event.get("delta") or {})
            later = {k: v for k, v in (event.get("usage") or {}).items() if v is not None}
            self.usage = self._message["usage"] = {**(self.usage or {}), **later}
        elif kind == "message_stop":
            self.complete = True
        elif kind == "error":
            self.error = event.get("error") or event
        return "", ""

    def _delta(self, index: int, delta: Mapping[str, Any]) -> tuple[str, str]:
        block = self._blocks.setdefault(index, {})
        kind = delta.get("type")
        if kind == "input_json_delta":
            self._json[index] = self._json.get(index, "") + plain_text(delta.get("partial_json"))
            return "", ""
        if kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]
            return "", ""
        fields = {key: value for key, value in delta.items() if key != "type"}
        block.update(merged_delta(block, fields))
        if kind == "text_delta":
            return plain_text(delta.get("text")), ""
        return "", plain_text(delta.get("thinking"))

    def whole(self) -> dict[str, Any]:
        """Return the answer as it would have come in one piece.

        Arguments that are no JSON, as those of an answer that became too long, stay text.
        """
        for index, text in self._json.items():
            self._blocks[index]["input"] = arguments(text)
        return {**self._message, "content": [self._blocks[at] for at in sorted(self._blocks)]}


class GeminiAnswer(_Answer):
    """An answer of generateContent, from its chunks; its client raises its errors."""

    complete: bool
    error: Any
    usage: dict[str, Any] | None

    def __init__(self) -> None:
        super().__init__()
        self._around: dict[str, Any] = {}
        self._candidate: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []

    def take(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """Add an event; return what it says of the text and of the reasoning."""
        apart = {"candidates", "sdkHttpResponse", "automaticFunctionCallingHistory", "parsed"}
        said = {key: value for key, value in event.items() if key not in apart}
        self._around.update(said)
        self.usage = self._around.get("usageMetadata")
        candidate = dict(next(iter(event.get("candidates") or ()), {}))
        content = candidate.pop("content", None) or {}
        self._candidate.update(candidate)
        self.complete = "finishReason" in self._candidate
        text = reasoning = ""
        for part in content.get("parts") or ():
            self._add(dict(part))
            if part.get("thought"):
                reasoning += plain_text(part.get("text"))
            else:
                text += plain_text(part.get("text"))
        return text, reasoning

    def _add(self, part: dict[str, Any]) -> None:
        """Continue the last part with the next one, if both are only words of one kind."""
        last = self._parts[-1] if self._parts else {}
        are_words = {"text"} <= set(part) <= {"text", "thought"} >= set(last) >= {"text"}
        if are_words and bool(part.get("thought")) == bool(last.get("thought")):
            last["text"] += part["text"]
        else:
            self._parts.append(part)

    def whole(self) -> dict[str, Any]:
        """Return the answer as it would have come in one piece."""
        content = {"role": "model", "parts": self._parts}
        return {**self._around, "candidates": [{**self._candidate, "content": content}]}


StreamedAnswer = ChatAnswer | ResponsesAnswer | AnthropicAnswer | GeminiAnswer
"""An answer, put together from the events of its stream."""


_ANSWERS: Final[dict[str, Callable[[], StreamedAnswer]]] = {
    "openai": ChatAnswer,
    "openai-responses": ResponsesAnswer,
    "anthropic": AnthropicAnswer,
    "gemini": GeminiAnswer,
}


def answer_of(format: str) -> StreamedAnswer:
    """Return an empty answer of a format, to be filled from its stream.

    Raises:
        InvalidArgumentError: There is no such format.

    """
    if format not in _ANSWERS:
        known = ", ".join(_ANSWERS)
        message = f"format {format!r} is unknown: choose {known}, or None for plain text"
        raise InvalidArgumentError(message, option="format", value=format)
    return _ANSWERS[format]()
