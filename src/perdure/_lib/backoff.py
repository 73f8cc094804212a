"""Back-off before a retry: exponential, with full jitter.

Pure: the caller supplies the randomness, a number from 0 up to 1.
"""

from __future__ import annotations

_MOST_DOUBLINGS = 30
"""Limits the power; the cap is reached long before."""


def backoff(attempt: int, *, base: float, cap: float, chance: float) -> float:
    """Return the seconds to wait after the ``attempt``-th failure in a row, from 1 on.

    >>> backoff(1, base=0.25, cap=15, chance=1.0)
    0.25
    >>> backoff(4, base=0.25, cap=15, chance=0.5)
    1.0
    >>> backoff(99, base=0.25, cap=15, chance=1.0)
    15.0
    """
    doublings = min(attempt - 1, _MOST_DOUBLINGS)
    return chance * min(cap, base * (1 << doublings))
