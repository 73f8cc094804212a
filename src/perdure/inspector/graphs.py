"""LangGraph's records as a page shows them: the values that a step has stored, in plain words.

Values are msgpack that names Python classes. It is decoded without LangGraph: no class is
imported, and nothing that is stored runs.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from perdure.records.json import decode
from perdure.records.records import FOREIGN, Record

LARGEST: Final = 100_000
"""Bytes of a value that a page decodes."""
ROLES: Final = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system"}
"""By the type of a message of LangChain's."""

_Part = tuple[str, str, Any]
"""Kind, name, value."""


class _Checkpoint(msgspec.Struct):
    channels: dict[str, str] = {}
    body: dict[str, Any] = {}


class _GraphRecord(msgspec.Struct):
    sdk: str = ""
    values: list[list[Any]] = []
    put: _Checkpoint | None = None


class GraphStep(msgspec.Struct, frozen=True):
    """What one record of a thread says."""

    role: str
    """Of its last message; "" if it has none."""
    at: float | None
    parts: list[_Part]
    is_checkpoint: bool
    """Whether it is the state after a step; else it is what a task has written before."""


def step_of(record: Record) -> GraphStep | None:
    """Return what a record of LangGraph's says; None for any other record, or an unreadable one."""
    if record.kind != FOREIGN:
        return None
    try:
        stored = decode(record.payload, _GraphRecord)
        if stored.sdk != "langgraph":
            return None
        values = list(_leaves(stored.values))
        at = _time(stored.put)
    except (ValueError, TypeError, RecursionError):
        return None
    roles = [ROLES[value["type"]] for value in values if _is_message(value)]
    parts = [part for value in values for part in _parts(value)]
    return GraphStep(roles[-1] if roles else "", at, parts, stored.put is not None)


def _leaves(values: list[list[Any]]) -> Iterator[Any]:
    for kind, _, encoding, *rest in values:
        if kind != "leaf" or encoding == "null":
            continue
        data = base64.b64decode(rest[0])
        if encoding != "msgpack" or len(data) > LARGEST:
            yield f"{len(data):,} bytes of {encoding}"
        else:
            yield msgspec.msgpack.decode(data, ext_hook=_plain)


def _plain(_: int, data: memoryview) -> Any:
    """Return an object's fields, or its only argument: it is stored as module, class, argument."""
    value = msgspec.msgpack.decode(data, ext_hook=_plain)
    if isinstance(value, list) and len(value) > 2:
        return value[2]
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value and value.get("type") in ROLES


def _parts(value: Any) -> list[_Part]:
    if not _is_message(value):
        return [("json", "", value)]
    if value["type"] == "tool":
        return [("result", str(value.get("name") or ""), value["content"])]
    content = value["content"]
    parts: list[_Part] = []
    if content:
        parts.append(("text" if isinstance(content, str) else "json", "", content))
    calls = value.get("tool_calls") or ()
    return [*parts, *(("call", str(call.get("name")), call.get("args")) for call in calls)]


def _time(checkpoint: _Checkpoint | None) -> float | None:
    if checkpoint is None:
        return None
    text = checkpoint.body.get("checkpoint", {}).get("ts")
    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
