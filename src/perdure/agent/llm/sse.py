"""Server-sent events, from the lines of an answer: pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = ["EventLines"]

_END: Final = "[DONE]"


class EventLines:
    """Put the lines of a stream together to events, each of which is JSON.

    >>> lines = EventLines()
    >>> lines.take('data: {"text": "Hello"}'), lines.take("")
    (None, {'text': 'Hello'})
    """

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data: list[str] = []

    def take(self, line: str) -> dict[str, Any] | None:
        """Return the event that ends with this line, None if none does.

        Raises:
            msgspec.DecodeError: It is no JSON.

        """
        name, _, value = line.partition(":")
        if line and name == "data":
            self._data.append(value.removeprefix(" "))
            return None
        if line or not self._data:
            return None  # a name, an id or a comment: the data say it all
        data = "\n".join(self._data)
        self._data.clear()
        event = {} if data.strip() == _END else msgspec.json.decode(data)
        return event if isinstance(event, dict) and event else None
