"""Rows of a log, page by page: nothing is missing between pages, and what was removed is no damage."""

from __future__ import annotations

import pytest

from perdure.errors import CorruptRecordError
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry, encode
from perdure.records.rows import CommitRow, LogExtent, LogPart, LogReader

KEY = SessionKey("agent")


def log_of(*sizes: int, seed: int = 7, low: int = 1) -> tuple[list[CommitRow], LogExtent]:
    """Return rows with so many records each, and the session's row."""
    rows: list[CommitRow] = []
    crc, first = seed, low
    for size in sizes:
        entries = [Entry(MESSAGE, b'"%d"' % (first + n)) for n in range(size)]
        lines, after = encode(entries, first=first, epoch=1, crc=crc)
        rows.append(CommitRow(first, first + size - 1, 1, crc, lines))
        first, crc = first + size, after
    return rows, LogExtent(1, 1, low, first - 1, crc, seed)


def reader(state: LogExtent, part: LogPart = LogPart()) -> LogReader:  # noqa: B008  # frozen
    return LogReader(KEY, state, part, table="log")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("before", [3, 5, 9])
@pytest.mark.parametrize("limit", [1, 2, 4, 9])
def test_any_part_is_read_in_pages_of_a_row(
    after: int, before: int, limit: int, *, reverse: bool
) -> None:
    rows, state = log_of(1, 3, 2, 2)
    wanted = [seq for seq in range(1, 9) if after < seq < before]
    one = reader(state, LogPart(after, before, limit, reverse))
    found: list[int] = []
    while not one.is_done:
        near = one.high if reverse else one.low
        rest = [row for row in rows if (row.first <= near if reverse else row.last >= near)]
        page = one.take(rest[::-1] if reverse else rest, max_bytes=1)
        assert len({next(row for row in rows if r.seq <= row.last) for r in page}) == 1
        found += [record.seq for record in page]
    assert found == (wanted[::-1] if reverse else wanted)[:limit]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_row_that_is_missing_between_two_pages_is_noticed(*, reverse: bool) -> None:
    rows, state = log_of(2, 2, 2)
    others, _ = log_of(2, 2, 2, seed=8)
    one = reader(state, LogPart(reverse=reverse))
    order = rows[::-1] if reverse else rows
    one.take(order[:1], max_bytes=1)
    for wrong in ([], order[2:], [others[1]]):
        with pytest.raises(CorruptRecordError, match="log of agent"):
            one.take(wrong, max_bytes=1)
    # What was refused has not moved it.
    rest = [record.seq for record in one.take(order[1:])]
    assert rest == ([4, 3, 2, 1] if reverse else [3, 4, 5, 6])


@pytest.mark.parametrize(("field", "rows"), [("head", 2), ("crc", 2), ("seed", 1)])
def test_a_log_that_is_not_the_sessions_own_is_refused(field: str, rows: int) -> None:
    own, state = log_of(2, 2)
    other = state._replace(**{field: getattr(state, field) - 1})
    with pytest.raises(CorruptRecordError) as raised:
        reader(other).take(own[:rows])
    assert raised.value.facts["table"] == "log"


def test_what_is_trimmed_under_a_reader_is_passed_over() -> None:
    rows, state = log_of(2, 2, 2)
    one = reader(state)
    one.take(rows[:1], max_bytes=1)
    assert one.take_page(rows[2:], lambda: state._replace(low=5)) == []
    assert [record.seq for record in one.take(rows[2:])] == [5, 6]
    assert one.is_done


@pytest.mark.parametrize("now", [None, LogExtent(1, 2, 1, 9, 0)], ids=["deleted", "begun anew"])
def test_a_session_that_ends_under_a_reader_is_no_damage(now: LogExtent | None) -> None:
    rows, state = log_of(2, 2, 2)
    one = reader(state)
    one.take(rows[:1], max_bytes=1)
    assert one.take_page([], lambda: now) == []
    assert one.is_done


def test_rows_that_nobody_removed_are_missing() -> None:
    rows, state = log_of(2, 2, 2)
    one = reader(state)
    one.take(rows[:1], max_bytes=1)
    with pytest.raises(CorruptRecordError, match="rows are missing"):
        one.take_page(rows[2:], lambda: state)
