"""What a retention lets go: decided without a store."""

from __future__ import annotations

import pytest

from perdure import ConfigError
from perdure.records.keys import SessionKey
from perdure.session.retention import DAY, Retention, TurnEndAt, cut_after, is_expired
from perdure.store import SessionInfo

TURNS = [
    TurnEndAt(4, 1 * DAY),
    TurnEndAt(8, 2 * DAY),
    TurnEndAt(12, 3 * DAY),
    TurnEndAt(16, 4 * DAY),
]


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (Retention(keep_turns=0), 16),
        (Retention(keep_turns=1), 12),
        (Retention(keep_turns=4), 0),
        (Retention(keep_turns=9), 0),
        (Retention(keep_days=0), 12),
        (Retention(keep_days=1), 8),
        (Retention(keep_days=30), 0),
        (Retention(keep_turns=1, keep_days=2), 4),
        (Retention(keep_turns=3, keep_days=0), 4),
        (Retention(expire_days=0), 0),
    ],
)
def test_a_turn_stays_if_either_keeps_it(retention: Retention, expected: int) -> None:
    assert cut_after(TURNS, retention, now=4 * DAY) == expected


def test_without_turns_nothing_goes() -> None:
    assert cut_after([], Retention(keep_turns=0), now=0.0) == 0


def test_a_clock_that_went_back_keeps_what_comes_behind() -> None:
    turns = [TurnEndAt(4, 1 * DAY), TurnEndAt(8, 9 * DAY), TurnEndAt(12, 2 * DAY)]
    assert cut_after(turns, Retention(keep_days=1), now=9 * DAY) == 4


def test_a_session_expires_by_its_last_use() -> None:
    retention = Retention(expire_days=90)
    used = SessionInfo(key=SessionKey("a"), updated_at=10 * DAY)
    assert not is_expired(used, retention, now=100 * DAY)
    assert is_expired(used, retention, now=100.1 * DAY)
    assert not is_expired(SessionInfo(key=SessionKey("a")), retention, now=1e12)
    assert not is_expired(used, Retention(keep_turns=1), now=1e12)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="says nothing"):
        Retention()
    with pytest.raises(ConfigError, match=r"keep_turns=-1"):
        Retention(keep_turns=-1)
    with pytest.raises(ConfigError, match=r"keep_turns=1.5\): it must be a whole number"):
        Retention(keep_turns=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"keep_days=True"):
        Retention(keep_days=True)
    with pytest.raises(ConfigError, match=r"expire_days=nan"):
        Retention(expire_days=float("nan"))
