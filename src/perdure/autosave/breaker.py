"""A circuit breaker with a slow start, one for a store.

Decisions only. Closed, everything may be sent. After ``failures`` failed batches in a row
it opens: nothing is sent but one probe now and then, so that a store which is down does not
get every session's retry. The first probes come soon, since most outages are short. The first
success begins a slow start: two sessions at once, four, eight, … up to ``full``, because
whatever piled up comes all together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, final

BreakerState = Literal["closed", "open", "recovering"]

MOST_DOUBLED: Final = 32
_HURRIED_RESET: Final = 1.0


@final
class Breaker:
    """Say how many sessions may be sent to the store now.

    Args:
        failures: Failed batches in a row that open it.
        base: Seconds until the first probe, at most; each that fails doubles it. At least half.
        reset: Seconds between probes, at most.
        full: How many sessions can be with the store at once.
        chance: Returns a random number from 0 up to 1.

    """

    __slots__ = (
        "_base",
        "_chance",
        "_failed",
        "_failures",
        "_full",
        "_probes",
        "_reset",
        "_window",
        "opened_at",
        "probe_at",
        "state",
    )

    def __init__(
        self, *, failures: int, base: float, reset: float, full: int, chance: Callable[[], float]
    ) -> None:
        self.state: BreakerState = "closed"
        self.probe_at: float = float("inf")
        """When the next probe may go; infinite unless open."""
        self.opened_at: float | None = None
        """Since when the store has not been well, None while closed."""
        self._base = base
        self._failures = failures
        self._probes = 0
        """How many have failed in a row."""
        self._reset = reset
        self._full = full
        self._chance = chance
        self._failed = 0
        self._window = full

    def allowance(self, now: float, in_flight: int) -> int:
        """Return how many more sessions may be sent while ``in_flight`` are with the store."""
        if self.state == "closed":
            return self._full
        if self.state == "recovering":
            return max(0, self._window - in_flight)
        return 1 if now >= self.probe_at and not in_flight else 0

    def succeeded(self, *, waiting: bool) -> bool:
        """Take note that the store answered; return whether it is now well again.

        It is when it gets all that it can take, or when nothing is ``waiting`` for it.
        """
        self._failed = self._probes = 0
        if self.state == "closed":
            return False
        self._window = 2 if self.state == "open" else self._window * 2
        self.state = "recovering"
        self.probe_at = float("inf")
        if waiting and self._window < self._full:
            return False
        self.state = "closed"
        self.opened_at = None
        return True

    def failed(self, now: float) -> bool:
        """Take note that the store did not answer; return whether this opened the breaker."""
        self._failed += 1
        if self.state == "closed" and self._failed < self._failures:
            return False
        opened = self.state == "closed"
        if opened:
            self.opened_at = now
        self.state = "open"
        pause = min(self._reset, self._base * 2.0 ** min(self._probes, MOST_DOUBLED))
        self._probes += 1
        self.probe_at = now + pause * (0.5 + 0.5 * self._chance())
        return opened

    def hurry(self, now: float) -> None:
        """Probe at least once a second from now on: the process is about to end."""
        self._reset = min(self._reset, _HURRIED_RESET)
        if self.state == "open":
            self.probe_at = min(self.probe_at, now + self._reset * self._chance())
