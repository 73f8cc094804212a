"""Ids that nobody can guess: for owners, temporary files and whatever needs a new name."""

from __future__ import annotations

import base64
import secrets

__all__ = ["random_id"]


def random_id(size: int = 15) -> str:
    """Return *size* random bytes in lower-case base32, safe in any file name."""
    return base64.b32encode(secrets.token_bytes(size)).decode().rstrip("=").lower()
