"""What exceptions and short answers of a store mean."""

from __future__ import annotations

import pytest

from perdure.autosave.core import complete, outcome_of
from perdure.errors import LeaseLostError, NotStorableError, StoreUnavailableError, TooLargeError
from perdure.store import Outcome, Status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LeaseLostError(), Status.CONFLICT),
        (NotStorableError(), Status.PERMANENT),
        (TooLargeError(), Status.PERMANENT),
        (TypeError(), Status.PERMANENT),
        (UnicodeEncodeError("utf-8", "x", 0, 1, "no"), Status.PERMANENT),
        (StoreUnavailableError(), Status.IN_DOUBT),
        (OSError(), Status.IN_DOUBT),
        (TimeoutError(), Status.IN_DOUBT),
        (RuntimeError(), Status.IN_DOUBT),
    ],
)
def test_an_exception_means(error: Exception, status: Status) -> None:
    assert outcome_of(error) == Outcome(status, error)


def test_answers_that_are_missing_are_in_doubt() -> None:
    outcomes = complete([Outcome(Status.OK)], 3)
    assert [one.status for one in outcomes] == [Status.OK, Status.IN_DOUBT, Status.IN_DOUBT]
    assert "1 of 3" in str(outcomes[1].error)


def test_answers_that_nobody_asked_for_are_dropped() -> None:
    assert complete([Outcome(Status.OK), Outcome(Status.CONFLICT)], 1) == [Outcome(Status.OK)]
