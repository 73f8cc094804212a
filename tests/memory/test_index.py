"""The index of the working memory: pure folds, hashes, evictions and searches (S2-8, S2-24)."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure.errors import ConfigError, TooLargeError
from perdure.memory.index import (
    INLINE,
    DroppedPayload,
    MemoryChange,
    MemoryEntry,
    MemoryIndex,
    blob_names,
    changes_of,
    check_priority,
    entry_text,
    evicted,
    points_of,
    ranked,
    split_memory,
    words_of,
)
from perdure.records.records import MEMORY_DROP, MEMORY_SET, MESSAGE, Record


def value_of(size: int, letter: str = "x") -> msgspec.Raw:
    return msgspec.Raw(b'"' + letter.encode() * (size - 2) + b'"')


def set_of(at: int, key: str, size: int, **fields: Any) -> Record:
    fields = {"size_bytes": size, "value": value_of(size), **fields}
    change = MemoryChange(key=key, **fields)
    return Record(at, 1, MEMORY_SET, msgspec.json.encode(change), True)


def drop_of(seq: int, key: str, **touched: int) -> Record:
    dropped = DroppedPayload(key, touched) if touched else DroppedPayload(key)
    return Record(seq, 1, MEMORY_DROP, msgspec.json.encode(dropped), True)


def test_a_large_value_lies_in_a_blob_and_a_small_one_in_the_index() -> None:
    document, blobs = split_memory(None, [set_of(1, "s", INLINE), set_of(2, "l", INLINE + 1)])
    small, large = msgspec.json.decode(document)["entries"]
    data = bytes(value_of(INLINE + 1))
    assert small["value"] == "x" * (INLINE - 2)
    assert "value" not in large
    assert large["sha256"] == hashlib.sha256(data).hexdigest()
    assert large["seq"] == 2
    assert blobs == {large["sha256"]: data}
    assert blob_names({"memory.json": document}) == {large["sha256"]}


def test_what_is_dropped_or_set_anew_is_not_referred_to() -> None:
    records = [set_of(1, "a", 2000), set_of(2, "b", 3000), set_of(3, "a", 10), drop_of(4, "b")]
    document, blobs = split_memory(None, records)
    assert blobs == {}
    assert blob_names({"memory.json": document}) == frozenset()
    assert len(blob_names({}, records[:2])) == 2
    assert blob_names({"memory.json": document}, [set_of(5, "c", 2000)]) == blob_names(
        {}, [set_of(9, "z", 2000)]
    )
    assert blob_names({}) == frozenset()


def test_a_hash_that_a_record_claims_does_not_count() -> None:
    claimed = set_of(1, "k", 2000, sha256="f" * 64, seq=77)
    small = set_of(2, "s", 10, sha256="e" * 64)
    index = changes_of(MemoryIndex(), [claimed, small])
    assert index.entries["k"].sha256 == hashlib.sha256(bytes(value_of(2000))).hexdigest()
    assert index.entries["k"].seq == 1
    assert not index.entries["s"].is_apart


changes = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from("abc"), st.integers(2, 3000), st.integers(0, 9), st.integers(0, 9)
        ),
        st.sampled_from("abc"),
    ),
    max_size=15,
)


@given(changes, st.data())
def test_a_fold_in_steps_is_byte_for_byte_the_fold_at_once(
    entries: list[Any], data: st.DataObject
) -> None:
    """A check compares documents with a fresh fold; unread values are carried over."""
    log = [
        drop_of(seq, one)
        if isinstance(one, str)
        else set_of(
            seq, one[0], one[1], created_at=2, last_accessed_at=one[2], touched={"b": one[3]}
        )
        for seq, one in enumerate(entries, 1)
    ]
    document: bytes | None = None
    blobs: dict[str, bytes] = {}
    left = log
    while left:
        count = data.draw(st.integers(1, len(left)))
        document, new = split_memory(document, left[:count])
        blobs |= new
        left = left[count:]
    assert (document or split_memory(None, [])[0]) == split_memory(None, log)[0]
    assert blob_names({"memory.json": split_memory(None, log)[0]}) <= blobs.keys()
    assert split_memory(None, log)[1].items() <= blobs.items()


def test_the_stats_are_those_of_the_entries() -> None:
    """S2-8."""
    records = [set_of(1, "a", 2000), set_of(2, "b", 20), set_of(3, "a", 1500), drop_of(4, "b")]
    document = msgspec.json.decode(split_memory(None, records)[0])
    assert document["stats"] == {"totalEntries": 1, "totalSizeBytes": 1500}


def test_times_of_access_come_with_the_next_change_and_never_go_back() -> None:
    records = [
        set_of(1, "a", 2000, created_at=5, last_accessed_at=5),
        set_of(2, "b", 20, created_at=5, last_accessed_at=5),
        drop_of(3, "gone", a=9, b=3, unknown=7),
    ]
    entries = MemoryIndex.of_document(split_memory(None, records)[0]).entries
    assert (entries["a"].last_accessed_at, entries["b"].last_accessed_at) == (9, 5)
    assert sorted(entries) == ["a", "b"]
    untouched = MemoryIndex.of_document(split_memory(None, records[:1])[0]).entries
    assert untouched["a"].last_accessed_at == 5


def test_records_of_other_kinds_change_nothing() -> None:
    index = changes_of(MemoryIndex(), [Record(1, 1, MESSAGE, b"{}", True), drop_of(2, "unknown")])
    assert (index.entries, index.size) == ({}, 0)


# room


def entry(key: str, size: int = 10, at: int = 0, **fields: Any) -> MemoryEntry:
    return MemoryEntry(key=key, size_bytes=size, last_accessed_at=at, **fields)


def gone_of(entries: list[MemoryEntry], size: int, limit: int, key: str = "new") -> list[str]:
    total = sum(one.size_bytes for one in entries)
    gone = evicted(entries, total=total, key=key, size=size, limit=limit)
    return [one.key for one in gone]


def test_the_least_in_priority_goes_first_then_the_least_recently_used() -> None:
    entries = [
        entry("critical", at=1, base_priority="critical"),
        entry("recent", at=9),
        entry("old", at=2),
        entry("low", at=99, base_priority="low"),
        entry("pinned", at=0, base_priority="low", pinned=True),
        entry("odd", at=3, base_priority="whatever"),
    ]
    assert gone_of(entries, 10, 70) == []
    assert gone_of(entries, 10, 60) == ["low"]
    assert gone_of(entries, 10, 40) == ["low", "old", "odd"]
    assert gone_of(entries, 10, 20) == ["low", "old", "odd", "recent", "critical"]


def test_an_entry_that_is_set_anew_makes_room_for_itself() -> None:
    entries = [entry("a", 50), entry("b", 50)]
    assert gone_of(entries, 50, 100, key="a") == []
    assert gone_of(entries, 60, 100, key="a") == ["b"]


def test_what_cannot_fit_is_refused_with_the_cure() -> None:
    with pytest.raises(TooLargeError, match=r"'new' has 11 bytes.*Limits\(memory_bytes=…\)"):
        gone_of([entry("a", 5)], 11, 10)
    with pytest.raises(TooLargeError, match="pinned entries have 8 of the 10"):
        gone_of([entry("a", 8, pinned=True), entry("b", 2)], 3, 10)


sized = st.builds(
    entry,
    st.text("abcdef", min_size=1, max_size=2),
    st.integers(0, 50),
    st.integers(0, 5),
    base_priority=st.sampled_from(["low", "normal", "high"]),
    pinned=st.booleans(),
)


@given(st.lists(sized, unique_by=lambda one: one.key), st.integers(0, 60), st.integers(1, 200))
def test_what_stays_fits_pinned_entries_stay_and_nothing_goes_in_vain(
    entries: list[MemoryEntry], size: int, limit: int
) -> None:
    total = sum(one.size_bytes for one in entries)
    try:
        gone = evicted(entries, total=total, key="new", size=size, limit=limit)
    except TooLargeError:
        pinned = sum(one.size_bytes for one in entries if one.pinned)
        assert size > limit or (total + size > limit and pinned + size > limit)
        return
    left = total - sum(one.size_bytes for one in gone)
    assert left + size <= limit
    assert not any(one.pinned for one in gone)
    assert not gone or left + gone[-1].size_bytes + size > limit


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(ConfigError, match="invalid priority='urgent': choose low, normal"):
        check_priority("urgent")


# search


def found(query: str, *entries: MemoryEntry) -> list[str]:
    words = words_of(query.casefold())
    points = [(points_of(words, one.key, one.description, ""), one) for one in entries]
    return [one.key for one in ranked(pair for pair in points if pair[0])]


def test_scripts_without_spaces_are_searched() -> None:
    entries = [entry("船", description="我的船叫苏拉"), entry("notes", description="天气很好")]
    assert found("我的船在哪里", *entries) == ["船"]
    assert found("天气", *entries) == ["notes"]


def test_a_word_counts_by_where_it_is_found() -> None:
    entries = [
        entry("misc", description="capitals of the world"),
        entry("notes", description="the capital of France"),
        entry("capitals"),
        entry("capital_of_france"),
        entry("capital"),
        entry("other", description="nothing"),
    ]
    assert found("CAPITAL", *entries) == [
        *("capital", "capital_of_france", "capitals"),
        *("notes", "misc"),
    ]
    assert found("capital France", *entries)[0] in {"capital_of_france", "capital"}
    assert found("  ?! ", *entries) == []


def test_equal_points_go_by_priority_then_by_use_then_by_key() -> None:
    entries = [
        entry("z note", at=5),
        entry("a note", at=5),
        entry("late note", at=9),
        entry("high note", at=1, base_priority="high"),
    ]
    assert found("note", *entries) == ["high note", "late note", "a note", "z note"]


def test_the_text_of_a_value_has_its_words_and_no_syntax() -> None:
    data = msgspec.json.encode({"Städte": ["RÖM", {"n": 3}], "none": None, "yes": True})
    assert entry_text(data) == "städte röm n 3 none yes true"
