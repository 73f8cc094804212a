"""A batch that is sent again changes nothing; one that does not fit the log is refused."""

from __future__ import annotations

import pytest

from perdure.errors import NotStorableError, TooLargeError
from perdure.records.keys import SessionKey
from perdure.records.manifest import Batch, lease_held, lease_lost, new_entries, refusal_of
from perdure.records.records import Entry

KEY = SessionKey("ada")
ONE, TWO, THREE = (Entry("message", b"%d" % number) for number in (1, 2, 3))


def batch(first: int, *entries: Entry) -> Batch:
    return Batch(KEY, 1, first, entries)


@pytest.mark.parametrize(
    ("sent", "logged", "new"),
    [
        (batch(4, ONE, TWO), (), (ONE, TWO)),
        (batch(3, ONE, TWO), (ONE,), (TWO,)),
        (batch(2, ONE, TWO), (ONE, TWO), ()),
        (batch(2, ONE), (ONE, TWO), ()),
        (batch(3, ONE, TWO), (ONE, THREE), (TWO,)),  # what is logged after the head is not its own
        (batch(4), (), ()),
    ],
)
def test_only_what_the_log_lacks_is_new(
    sent: Batch, logged: tuple[Entry, ...], new: tuple[Entry, ...]
) -> None:
    assert new_entries(sent, 3, 1, logged) == new


@pytest.mark.parametrize(
    ("sent", "logged", "reason"),
    [
        (batch(5, ONE), (), "head at 3"),
        (batch(3, ONE), (TWO,), "other records from 3 on"),
        (batch(2, ONE, TWO), (ONE,), "other records from 2 on"),
        (batch(1, ONE), (ONE,), "other records from 1 on"),  # of the epoch before
    ],
)
def test_a_batch_that_does_not_continue_the_log_is_refused(
    sent: Batch, logged: tuple[Entry, ...], reason: str
) -> None:
    error = new_entries(sent, 3, 1, logged)
    assert isinstance(error, NotStorableError)
    assert reason in str(error)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (batch(0, ONE), "begins at 0"),
        (batch(1, Entry("message", b"1", end=False)), "ends within a group"),
    ],
)
def test_what_no_log_can_accept_is_refused(sent: Batch, reason: str) -> None:
    assert reason in str(refusal_of(sent))


def test_a_batch_without_fault_is_accepted() -> None:
    assert refusal_of(batch(1)) is None
    assert refusal_of(batch(1, Entry("message", b"1", end=False), ONE), 1) is None
    assert isinstance(refusal_of(batch(1, Entry("message", b"12")), 1), TooLargeError)


def test_a_lost_lease_says_what_is_known() -> None:
    assert "is 3, and it was deleted; open" in str(lease_lost(KEY, 1, 3, deleted=True))
    assert "may not write; open" in str(lease_lost(KEY, 1))
    assert lease_held(KEY, 1, 2).facts == {"key": "ada", "epoch": 2, "after": 1}
