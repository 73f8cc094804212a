"""Files as the format's own description shows them, with what it leaves open filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SESSION: dict[str, Any] = {
    "version": 1,
    "agentId": "my-assistant",
    "agentType": "agent",
    "createdAt": "2026-01-31T10:00:00.000Z",
    "lastActiveAt": "2026-01-31T15:30:00.000Z",
    "context": {
        "version": 1,
        "core": {
            "systemPrompt": "You are a helpful assistant",
            "instructions": "Be brief.",
            "history": [
                {"role": "user", "content": "Hello!", "id": "msg_1"},
                {"role": "assistant", "content": "Hi. How can I help?"},
            ],
            "toolCalls": [{"id": "c1", "name": "add", "arguments": {"a": 1}, "state": "done"}],
        },
        "tools": {"enabled": {"shell": False}, "namespaces": {"shell": "os"}, "priorities": {}},
        "permissions": {
            "version": 1,
            "approvals": {"read": {"scope": "session"}},
            "blocklist": ["rm"],
            "allowlist": [],
        },
        "plugins": {"in_context_memory": {"entries": [{"key": "k", "value": 1}], "config": {}}},
        "config": {"model": "gpt-4", "maxContextTokens": 128000, "strategy": "proactive"},
    },
    "metadata": {"title": "My Assistant Session", "tags": ["personal"]},
}

MEMORY: dict[str, Any] = {
    "version": 1,
    "entries": [
        {
            "key": "user_preferences",
            "description": "User prefers dark mode and concise responses",
            "value": {"theme": "dark", "verbosity": "concise"},
            "scope": "persistent",
            "sizeBytes": 128,
            "basePriority": "high",
            "pinned": False,
            "createdAt": 1706699400000,
            "lastAccessedAt": 1706699500000,
        }
    ],
    "stats": {"totalEntries": 1, "totalSizeBytes": 128},
}

PLUGIN: dict[str, Any] = {
    "entries": [{"key": "k", "description": "", "value": "of the file", "later": None}],
    "config": {"maxEntries": 20},
}


def copy_of(value: Any) -> Any:
    return json.loads(json.dumps(value))


def with_unknown_fields() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return session and memory with a field at every level that nobody knows."""
    session, memory = copy_of(SESSION), copy_of(MEMORY)
    context = session["context"]
    for at, place in enumerate(
        [
            session,
            context,
            context["core"],
            context["core"]["history"][0],
            context["core"]["toolCalls"][0],
            context["tools"],
            context["permissions"],
            context["permissions"]["approvals"]["read"],
            context["config"],
            session["metadata"],
            memory,
            memory["entries"][0],
            memory["entries"][0]["value"],
            memory["stats"],
        ]
    ):
        place["x_unknown"] = {"at": at, "list": [1, 2.5, None, True], "text": "é\n\"'"}
    return session, memory


def write(folder: Path, **files: Any) -> Path:
    """Write files into a folder; ``session``, ``memory``, and plugins by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        data = value if isinstance(value, bytes) else json.dumps(value, indent=2).encode()
        path = folder / f"{name}.json"
        if name not in {"session", "memory"}:
            path = folder / "plugins" / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, Any]:
    """Return all JSON files below a folder by their path in it."""
    return {
        str(path.relative_to(folder)): json.loads(path.read_bytes())
        for path in folder.rglob("*.json")
    }
