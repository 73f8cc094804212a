"""What a store's answer means, and what an exception means where an answer was due.

Decisions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perdure.errors import (
    AcknowledgedRecordsLostError,
    ConfigError,
    FormatError,
    LeaseError,
    NotStorableError,
    StoreUnavailableError,
)
from perdure.store import Outcome, Status

__all__ = ["ANSWERS", "REFUSALS", "all_permanent", "complete", "in_doubt", "outcome_of"]

ANSWERS: Final = frozenset({Status.OK, Status.CONFLICT, Status.PERMANENT})
"""What only a store that works can say."""

REFUSALS: Final = frozenset({Status.CONFLICT, Status.PERMANENT})
"""What is final for a session."""

_PERMANENT: Final = (
    NotStorableError,
    FormatError,
    ConfigError,
    TypeError,
    ValueError,
    OverflowError,
)
"""Errors of the values that were sent: sending them again cannot help."""


def outcome_of(error: Exception) -> Outcome:
    """Return what an exception from ``append_many`` means, which should raise nothing.

    An unknown error leaves open what was written: in doubt, so it is sent again.
    """
    if isinstance(error, (LeaseError, AcknowledgedRecordsLostError)):
        return Outcome(Status.CONFLICT, error)
    if isinstance(error, _PERMANENT):
        return Outcome(Status.PERMANENT, error)
    return Outcome(Status.IN_DOUBT, error)


def in_doubt(why: str) -> Outcome:
    """Return the outcome of a save that was given up."""
    return Outcome(Status.IN_DOUBT, StoreUnavailableError(why))


def complete(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Return one outcome for each batch, even if the store gave fewer."""
    missing = count - len(outcomes)
    if missing <= 0:
        return list(outcomes[:count])
    why = f"the store answered for {len(outcomes)} of {count} sessions: report it to its author"
    return [*outcomes, *[in_doubt(why)] * missing]


def all_permanent(outcomes: Sequence[Outcome]) -> bool:
    """Whether a batch was refused whole, perhaps because of one session in it."""
    return all(outcome.status is Status.PERMANENT for outcome in outcomes)
