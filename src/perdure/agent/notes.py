"""In-context memory: notes that a model keeps for itself, and sees in each request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Literal, final, get_args

import msgspec

from perdure.agent.tools import Tool
from perdure.errors import InvalidArgumentError
from perdure.records.messages import Message
from perdure.session.contributors import RestoreContext

Priority = Literal["low", "normal", "high", "critical"]

_WEIGHT: Final = {name: weight for weight, name in enumerate(get_args(Priority))}
_HEADING: Final = "[Notes that you keep for yourself. Change them with note_set and note_drop.]"


@final
class InContextMemory:
    """Keep notes, the weightiest of them: ``agent.notes``.

    Args:
        max_entries: How many notes are kept; the least weighty goes first, then the oldest.

    Raises:
        InvalidArgumentError: The number is invalid.

    """

    name: Final = "in_context_memory"
    version: Final = 1

    def __init__(self, *, max_entries: int = 20) -> None:
        if max_entries < 1:
            message = f"in_context_memory: invalid max_entries={max_entries!r}: from 1 up"
            raise InvalidArgumentError(message, option="max_entries", value=max_entries)
        self._max_entries = max_entries
        self._entries: dict[str, dict[str, Any]] = {}
        self._others: list[Any] = []
        self._config: dict[str, Any] = {}
        self._beyond: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<InContextMemory {len(self._entries)} notes>"

    @property
    def keys(self) -> tuple[str, ...]:
        """The notes' keys, oldest first."""
        return tuple(self._entries)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a note's value, or ``default``."""
        entry = self._entries.get(key)
        return default if entry is None else entry.get("value")

    def set(
        self, key: str, value: Any, *, description: str = "", priority: Priority = "normal"
    ) -> None:
        """Keep a note; one of the same key is replaced."""
        old = self._entries.pop(key, {})
        self._entries[key] = {
            **old,
            "key": key,
            "description": description,
            "value": value,
            "priority": priority,
            "updatedAt": time.time_ns() // 1_000_000,
        }
        while len(self._entries) > self._max_entries:
            del self._entries[min(self._entries, key=self._weight)]

    def drop(self, key: str) -> bool:
        """Forget a note; False if there was none."""
        return self._entries.pop(key, None) is not None

    def _weight(self, key: str) -> int:
        return _WEIGHT.get(self._entries[key].get("priority", "normal"), _WEIGHT["normal"])

    def text(self) -> str:
        """Return the notes as the model sees them; empty without any."""
        if not self._entries:
            return ""
        return "\n".join([_HEADING, *map(_line, self._entries.values())])

    def tools(self) -> tuple[Tool, ...]:
        """Return what the model changes its notes with."""

        async def note_set(
            key: str, value: Any, description: str = "", priority: Priority = "normal"
        ) -> str:
            """Keep a note that you will see in every later request.

            Args:
                key: A short name; a note of the same name is replaced.
                value: What to remember.
                description: What it is about.
                priority: The least important notes are dropped first when there are too many.

            """
            self.set(key, value, description=description, priority=priority)
            return f"kept {key!r}"

        async def note_drop(key: str) -> str:
            """Forget a note.

            Args:
                key: Its name.

            """
            return f"forgot {key!r}" if self.drop(key) else f"there was no note {key!r}"

        return Tool(note_set), Tool(note_drop)

    # as a contributor

    async def capture(self) -> dict[str, Any] | None:
        """Return the state; None while there is nothing."""
        if not (self._entries or self._others or self._beyond or self._config):
            return None
        entries = [*self._entries.values(), *self._others]
        return {"entries": entries, "config": self._config, **self._beyond}

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Take over what was stored; what this release does not know is kept."""
        entries = list(state.get("entries") or ())
        notes = [
            entry
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("key"), str)
        ]
        self._entries = {entry["key"]: entry for entry in notes}
        self._others = [entry for entry in entries if entry not in notes]
        self._config = dict(state.get("config") or {})
        known = ("entries", "config")
        self._beyond = {key: value for key, value in state.items() if key not in known}


def with_notes(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return messages with notes after the system prompt; the result is not stored."""
    if not text:
        return tuple(messages)
    if not messages or messages[0].role != "system":
        return (Message.system(text), *messages)
    prompt = messages[0]
    content: str | list[Any]
    if isinstance(prompt.content, list):
        content = [*prompt.content, {"type": "text", "text": text}]
    else:
        content = f"{prompt.content or ''}\n\n{text}".lstrip()
    return (msgspec.structs.replace(prompt, content=content), *messages[1:])


def _line(entry: dict[str, Any]) -> str:
    value = entry.get("value")
    shown = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    about = f" ({entry['description']})" if entry.get("description") else ""
    return f"- {entry['key']}{about}: {shown}"
