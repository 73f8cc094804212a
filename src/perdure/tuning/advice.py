"""Which setting to take: what each one costs a store, and what it risks.

Pure. The best setting is the safest one that fits: saves run in the background and cost it
nothing, so that what limits them is how many the store can take, how long a stop may take,
and what they are billed. (Where a save interrupts the work, as with checkpoints of batch
jobs, the interval of Young, 1974, and Daly, 2006, balances the two; here it does not.)
Given the most that a crash may cost, the best setting within it is the one that asks the least
of the store. On a store that is idle under every setting the choice does not matter: the engine
shortens the debounce there by itself, and the default is kept.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from perdure.autosave.options import Autosave
from perdure.tuning.workload import SettingCost, Workload, replay

# What a store has shown, as values. Pure


class LoadLevel(msgspec.Struct, frozen=True):
    """So many sessions that are due at once."""

    sessions: int
    seconds: float
    """Until all of them were durable: the median."""
    rounds: int

    @property
    def rate(self) -> float:
        """Saves in a second."""
        return self.sessions / self.seconds


class StoreMeasurement(msgspec.Struct, frozen=True):
    """What a store has shown."""

    levels: tuple[LoadLevel, ...]
    size: int
    """Bytes of each save's record."""

    @property
    def rate(self) -> float:
        """The most saves in a second."""
        return max(level.rate for level in self.levels)

    @property
    def save_time(self) -> float:
        """Seconds that the save of one session takes on an idle store."""
        return self.levels[0].seconds


# Which setting to take: what each one costs a store, and what it risks


GRID: Final = (
    (0.0, 0.0),
    (0.5, 2.0),
    (1.0, 5.0),
    (2.0, 10.0),
    (2.0, 30.0),
    (5.0, 15.0),
    (10.0, 60.0),
    (30.0, 120.0),
    (60.0, 300.0),
)
"""Debounce and longest delay, in seconds."""

ROOM: Final = 0.6
"""The share of what a store can take that its saves may use; beyond it, delays grow fast."""
IDLE: Final = 0.01
"""The share of what a store can take up to which it counts as idle."""
MONTH: Final = 730 * 3600.0
"""Seconds."""
FEW: Final = 200
"""Fewer changes tell little."""


class Requirements(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting has to fit.

    Args:
        sessions: How many are active at once.
        max_loss: Seconds of work that a crash may cost at the most; None for no such limit.
        shutdown: Seconds in which everything must be saved when the process is stopped.
        price: What a million saves cost, in any currency.
        budget: What they may cost in a month; None for no such limit.

    """

    sessions: int = 100
    max_loss: float | None = None
    shutdown: float = 20.0
    price: float = 0.0
    budget: float | None = None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, and what speaks against it."""

    cost: SettingCost
    load: float
    """The share of what the store can take that the saves of all sessions use."""
    stop: float
    """Seconds to save what is unsaved at any moment, on average."""
    price: float
    """What the saves cost in a month, if the sessions are active all the time."""
    against: tuple[str, ...]
    """Why it is unsuitable; empty where it does."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that were tried, and the one to take."""

    options: tuple[Option, ...]
    """From the safest to the thriftiest."""
    best: Option | None
    """None where none fits, or nothing has changed."""
    idle: bool
    """Whether the store is idle under every setting, so that the choice does not matter."""
    warnings: tuple[str, ...]


def advise(workload: Workload, measured: StoreMeasurement, needs: Requirements) -> Advice:
    """Replay a workload with each setting, and weigh what comes out."""
    tried = [
        _option(replay(workload, option, save_time=measured.save_time), measured, needs)
        for option in _settings(measured, needs)
    ]
    fitting = [option for option in tried if not option.against] if workload.changes else []
    wanted = _safest if needs.max_loss is None else _thriftiest
    best = min(fitting, key=wanted, default=None)
    default = next((option for option in fitting if option.cost.autosave == Autosave()), None)
    idle = default is not None and all(option.load <= IDLE for option in tried)
    best = default if idle else best
    warnings = tuple(_warnings(workload, best, idle=idle))
    return Advice(options=tuple(tried), best=best, idle=idle, warnings=warnings)


def _safest(option: Option) -> tuple[float, float]:
    return option.cost.lost, option.cost.worst


def _thriftiest(option: Option) -> tuple[float, float]:
    """Order settings by what they ask of the store: all of them lose no more than is accepted."""
    return option.cost.saves, option.cost.lost


def _settings(measured: StoreMeasurement, needs: Requirements) -> list[Autosave]:
    most = math.inf if needs.max_loss is None else max(needs.max_loss - measured.save_time, 0.0)
    pairs = {(_down(min(quiet, most)), _down(min(longest, most))) for quiet, longest in GRID}
    ordered = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    return [Autosave(debounce=debounce, max_delay=longest) for debounce, longest in ordered]


def _down(seconds: float) -> float:
    """Round down to two digits.

    >>> _down(0.9996), _down(123.0), _down(0.0)
    (0.99, 120.0, 0.0)
    """
    if seconds <= 0:
        return 0.0
    digits = 1 - math.floor(math.log10(seconds))
    return float(f"{math.floor(seconds * 10.0**digits + 1e-9) / 10.0**digits:.12g}")


def _option(cost: SettingCost, measured: StoreMeasurement, needs: Requirements) -> Option:
    load = cost.saves * needs.sessions / measured.rate
    stop = measured.save_time + cost.exposed * needs.sessions / measured.rate
    price = cost.saves * needs.sessions * MONTH * needs.price / 1e6
    against = []
    if load > ROOM:
        against.append(f"the saves would keep the store {load:.0%} busy")
    if stop > needs.shutdown:
        against.append(f"a stop would take {stop:.0f} s")
    if needs.max_loss is not None and measured.save_time > needs.max_loss:
        against.append(f"a save alone takes {measured.save_time:.2g} s")
    if needs.budget is not None and price > needs.budget:
        against.append(f"the saves would cost {price:,.2f} a month")
    return Option(cost=cost, load=load, stop=stop, price=price, against=tuple(against))


def _warnings(workload: Workload, best: Option | None, *, idle: bool) -> list[str]:
    if not workload.changes:
        return ["nothing has changed, so there is nothing to tell a setting by"]
    warnings = []
    if idle:
        warnings.append(
            f"the store is at most {IDLE:.0%} busy under every setting: the choice does not "
            "matter, and the default is kept"
        )
    if workload.changes < FEW:
        warnings.append(f"{workload.changes} changes tell little: come back when there are more")
    if best is None:
        warnings.append(
            "no setting fits: accept a larger loss, spread the sessions over more stores, or take "
            "one that saves more together"
        )
    return warnings
