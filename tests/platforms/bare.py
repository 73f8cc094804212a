"""A pytest plugin that leaves a process no locks at all: ``pytest -p tests.platforms.bare``.

Whether an owner lives is then told by its heartbeat alone, as between machines.
"""

from __future__ import annotations

import asyncio  # noqa: F401  # what uses fcntl by itself is imported before it goes
import subprocess  # noqa: F401
import sys

import anyio  # noqa: F401
import trio  # noqa: F401

assert "perdure" not in sys.modules
sys.modules["fcntl"] = None  # type: ignore[assignment]

from perdure._lib import platform  # noqa: E402  # behind the line that hides it

assert platform.fcntl is platform.msvcrt is None
