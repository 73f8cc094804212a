"""When a session may be taken from whoever had it: pure decisions.

A lease is an owner process and an epoch. Owners renew one heartbeat each; all of an owner's
leases are expired when its heartbeat has not moved for ``ttl`` on the taker's own monotonic
clock (`perdure.lease.watch`), so that no two clocks are ever compared.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.errors import ConfigError
from perdure.store import Holder

__all__ = ["Lease", "OnHeld", "may_take"]

OnHeld = Literal["handover", "raise", "steal"]
"""What to do about a session that somebody else holds: ask and wait, give up, or take it."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """How the right to write is kept.

    Args:
        heartbeat: Seconds between two renewals of this process.
        ttl: Seconds without a renewal after which others may take over.

    Raises:
        ConfigError: A value does not fit.

    """

    heartbeat: float = 2.0
    ttl: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat < self.ttl < float("inf"):
            message = (
                f"lease: heartbeat={self.heartbeat!r} and ttl={self.ttl!r} do not fit: "
                "choose 0 < heartbeat < ttl, best with several heartbeats in a ttl"
            )
            raise ConfigError(message, heartbeat=self.heartbeat, ttl=self.ttl)


def may_take(holder: Holder | None, *, me: str, silent: bool) -> bool:
    """Say whether a session may be taken now.

    >>> may_take(None, me="me", silent=False)
    True
    >>> may_take(Holder(epoch=1, owner="other", alive=True), me="me", silent=False)
    False
    """
    if holder is None or holder.released or holder.deleted or holder.alive is False:
        return True
    # Ours: an open that was abandoned half-way.
    return silent or holder.owner == me
