"""Credentials, kept out of what is stored: by the names of their keys.

Applied to config and metadata; to tool arguments only with keys that the user lists. Pure:
returns a copy that shares whatever did not change, and says where it changed something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from perdure.records.json import MAX_VALUE_DEPTH, too_deep
from perdure.records.values import escape

REDACTED = "[redacted]"
"""What stands where a credential stood."""

DENY_KEYS = frozenset(
    {
        "access_key",
        "access_token",
        "api_key",
        "api_token",
        "auth_token",
        "authorization",
        "bearer",
        "bearer_token",
        "client_secret",
        "connection_string",
        "cookie",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "private_key",
        "pwd",
        "refresh_token",
        "secret",
        "secret_key",
        "secrets",
        "session_token",
        "token",
    }
)
"""Keys that hold credentials. A key matches if it ends with one of them, in any spelling:
``OPENAI_API_KEY``, ``openaiApiKey`` and ``openai-api-key`` all end with ``api_key``."""


def redact(value: Any, deny_keys: Iterable[str] = DENY_KEYS) -> tuple[Any, tuple[str, ...]]:
    """Return the value without credentials, and JSON pointers to where they were.

    What is empty, None or a bool is no credential and stays.

    >>> redact({"model": "m", "api_key": "k"})
    ({'model': 'm', 'api_key': '[redacted]'}, ('/api_key',))
    """
    endings = tuple(filter(None, map(_letters, deny_keys)))
    paths: list[str] = []
    clean = _redact(value, endings, "", paths, MAX_VALUE_DEPTH) if endings else value
    return clean, tuple(paths)


def _redact(value: Any, endings: tuple[str, ...], at: str, paths: list[str], room: int) -> Any:
    if isinstance(value, Mapping):
        items = [(key, item, f"{at}/{escape(str(key))}") for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(index, item, f"{at}/{index}") for index, item in enumerate(value)]
    else:
        return value
    if not room:
        raise too_deep("$", MAX_VALUE_DEPTH)
    before = len(paths)
    clean = {}
    for key, item, path in items:
        if isinstance(key, str) and _is_credential(key, item, endings):
            paths.append(path)
            clean[key] = REDACTED
        else:
            clean[key] = _redact(item, endings, path, paths, room - 1)
    if len(paths) == before:
        return value
    if isinstance(value, Mapping):
        return clean
    return list(clean.values()) if isinstance(value, list) else tuple(clean.values())


def _is_credential(key: str, value: Any, endings: tuple[str, ...]) -> bool:
    if value is None or isinstance(value, bool) or value == REDACTED:
        return False
    if isinstance(value, str | bytes | Mapping | list | tuple) and not value:
        return False
    return _letters(key).endswith(endings)


@lru_cache(maxsize=1024)
def _letters(key: str) -> str:
    return "".join(char for char in key.lower() if char.isalnum())
