"""The scripts that the server runs: each one step, whole or not at all, in one slot."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, Final

__all__ = ["Call", "Script", "all_scripts", "script"]

_NAMES: Final = (
    "acquire",
    "aged",
    "append",
    "ask",
    "beat",
    "delete",
    "drop",
    "fold",
    "look",
    "post",
    "put",
    "read",
    "reject",
    "release",
    "remove",
    "retire",
    "settle",
    "sweep",
    "take",
    "trim",
    "unlist",
)


class Call:
    """One command with its arguments, as a connection takes it."""

    __slots__ = ("name", "serialized_arguments")

    decode: bool = False
    """Answers stay bytes."""

    def __init__(self, name: bytes, *arguments: bytes | str | float) -> None:
        self.name: bytes = name
        self.serialized_arguments: tuple[bytes | str | float, ...] = arguments


class Script:
    """A script, and the name by which the server knows it."""

    __slots__ = ("_sha", "text")

    def __init__(self, text: bytes) -> None:
        self.text: bytes = text
        # How the protocol names a script; it protects nothing.
        self._sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()

    def __call__(self, keys: tuple[bytes, ...], *arguments: Any) -> Call:
        """Return the call of the script with these keys and arguments."""
        return Call(b"EVALSHA", self._sha, len(keys), *keys, *arguments)


@cache
def script(name: str) -> Script:
    """Return a script by its name."""
    return Script((files(__package__) / "lua" / f"{name}.lua").read_bytes())


def all_scripts() -> list[Script]:
    """Return every script, to be loaded into a server that has started anew."""
    return [script(name) for name in _NAMES]
