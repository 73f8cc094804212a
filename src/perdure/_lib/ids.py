"""Ids that nobody can guess: for owners, temporary files and whatever needs a new name."""

from __future__ import annotations

import base64
import secrets


def random_id(size: int = 15) -> str:
    """Return *size* random bytes in lower-case base32, safe in any file name."""
    return base64.b32encode(secrets.token_bytes(size)).decode().rstrip("=").lower()


def first_beat() -> int:
    """Return where a heartbeat's counter begins: where no earlier one of that owner's was."""
    return secrets.randbits(40) + 1
