"""What a look at a session finds: values only."""

from __future__ import annotations

import msgspec

__all__ = ["Finding"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a session, or worth knowing."""

    what: str
    """log, document, lease, leftover, or dead letters."""
    detail: str
    cure: str = ""
    problem: bool = True
    """False for what is worth knowing and in order."""
    repairable: bool = False
    """Whether rebuilding the documents mends it."""
