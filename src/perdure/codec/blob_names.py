"""The names of blobs: the SHA-256 of their bytes, or a wrapper's own.

A wrapper that keeps other bytes than it was given (sealed, packed) has names of its own for
them, which begin with ``x`` and prove nothing to the store; the wrapper verifies what it
gets back by itself. Pure.
"""

from __future__ import annotations

import hashlib
import re

__all__ = ["fits", "is_name"]

_NAME = re.compile(r"(?:[0-9a-f]{64}|x[0-9a-f]{64,128})\Z")


def is_name(name: str) -> bool:
    """Say whether a blob may have this name."""
    return _NAME.match(name) is not None


def fits(name: str, data: bytes) -> bool:
    """Say whether bytes may stand under a name.

    >>> fits("x" + "0" * 64, b"whatever a wrapper made")
    True
    >>> fits("0" * 64, b"other bytes")
    False
    """
    if name.startswith("x"):
        return is_name(name)
    return hashlib.sha256(data).hexdigest() == name
