"""When a session may be taken from whoever had it: pure decisions.

A lease is an owner process and an epoch. Owners renew one heartbeat each; a lease is
expired when its owner's heartbeat has not moved for ``ttl`` on the taker's own
monotonic clock, so that no two clocks are ever compared.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.errors import ConfigError
from perdure.store import Holder

__all__ = ["Lease", "OnHeld", "Watch", "may_take", "watched"]

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


class Watch(msgspec.Struct, frozen=True):
    """A holder's heartbeat as a taker has seen it."""

    epoch: int
    beat: int
    since: float
    """When this beat was first seen, on the taker's clock."""


def watched(before: Watch | None, holder: Holder | None, now: float) -> Watch | None:
    """Return what is known of a holder's heartbeat after another look."""
    if holder is None:
        return None
    if before is not None and (before.epoch, before.beat) == (holder.epoch, holder.beat):
        return before
    return Watch(holder.epoch, holder.beat, now)


def may_take(
    holder: Holder | None, watch: Watch | None, *, me: str, on_held: OnHeld, ttl: float, now: float
) -> bool:
    """Say whether a session may be taken now.

    >>> may_take(None, None, me="me", on_held="raise", ttl=8.0, now=0.0)
    True
    >>> live = Holder(epoch=1, owner="other", alive=True)
    >>> may_take(live, None, me="me", on_held="handover", ttl=8.0, now=0.0)
    False
    """
    if holder is None or holder.released or holder.deleted or holder.alive is False:
        return True
    if holder.owner == me:  # an open of ours that was abandoned half-way
        return True
    if on_held == "raise":
        return False
    return watch is not None and now - watch.since >= ttl
