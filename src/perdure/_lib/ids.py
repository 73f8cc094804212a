"""Unguessable random ids, for owners, temporary files and other new names."""

from __future__ import annotations

import base64
import secrets


def random_id(size: int = 15) -> str:
    """Return *size* random bytes in lower-case base32, safe in any file name."""
    return base64.b32encode(secrets.token_bytes(size)).decode().rstrip("=").lower()


def first_beat() -> int:
    """Return a random start for a heartbeat's counter, so that it repeats no earlier value."""
    return secrets.randbits(40) + 1
