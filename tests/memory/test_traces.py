"""Turns, read back from the log."""

from __future__ import annotations

import msgspec

from perdure import Message
from perdure.memory.context import RetractionPayload
from perdure.memory.documents import TurnPayload
from perdure.memory.traces import BEGIN, RawTurn, Turns, find_turn, newest_turns, read_turns
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.messages import encode_message
from perdure.records.records import CONTEXT, RETRACT, TURN, Entry, Record
from perdure.store import Batch, take_after
from perdure.stores.memory import MemoryStore

KEY = SessionKey("a")


def turn(number: int, phase: str) -> Entry:
    return Entry(TURN, encode(TurnPayload(turn=f"turn_{number:04d}", number=number, phase=phase)))


def said(text: str, role: str = "user") -> Entry:
    return encode_message(Message(role=role, content=text))


def whole(number: int) -> list[Entry]:
    return [
        turn(number, "begin"),
        said(f"q{number}"),
        said(f"a{number}", "assistant"),
        turn(number, "end"),
    ]


def grouped(entries: list[Entry]) -> list[RawTurn]:
    turns = Turns()
    records = (Record(seq, 1, *entry) for seq, entry in enumerate(entries, 1))
    found = [turns.feed(record) for record in records]
    return [one for one in (*found, turns.unfinished) if one is not None]


def texts(turn: RawTurn) -> list[str]:
    return [msgspec.json.decode(payload)["content"] for payload in turn.messages]


def test_each_turn_has_its_messages_and_how_it_ended() -> None:
    first, second, third = grouped(
        [
            *whole(1),
            turn(2, "begin"),
            said("q2"),
            turn(2, "interrupted"),
            turn(3, "begin"),
            said("q3"),
        ]
    )
    assert (first.id, texts(first), first.phase, first.last) == (
        "turn_0001",
        ["q1", "a1"],
        "end",
        4,
    )
    assert (second.id, second.phase) == ("turn_0002", "interrupted")
    assert (third.id, texts(third), third.phase) == ("turn_0003", ["q3"], "open")


def test_a_turn_that_a_kill_cut_ends_where_the_next_begins() -> None:
    first, second = grouped([turn(1, "begin"), said("q1"), *whole(2)])
    assert (first.id, first.phase) == ("turn_0001", "open")
    assert second.phase == "end"


def test_messages_outside_of_turns_make_turns_of_their_own() -> None:
    found = grouped([said("x"), said("y", "assistant"), said("z"), *whole(1)])
    assert [(one.id, texts(one)) for one in found] == [
        ("", ["x", "y"]),
        ("", ["z"]),
        ("turn_0001", ["q1", "a1"]),
    ]


async def filled(entries: list[Entry]) -> MemoryStore:
    store = MemoryStore()
    await store.open()
    grant = await take_after(store, KEY, after=0)
    await store.append_many([Batch(KEY, grant.epoch, grant.head + 1, tuple(entries))])
    return store


async def test_turns_are_read_behind_a_record() -> None:
    store = await filled([*whole(1), *whole(2), *whole(3)])
    found = [one.id async for one in read_turns(store, KEY, after=5)]
    assert found == ["turn_0002", "turn_0003"]


async def test_the_newest_turns_come_oldest_first() -> None:
    store = await filled([entry for number in range(1, 8) for entry in whole(number)])
    found = await newest_turns(store, KEY, 2)
    assert [one.id for one in found] == ["turn_0006", "turn_0007"]


async def test_a_turn_can_be_left_out() -> None:
    """S1-16: the running turn is no part of the tail."""
    store = await filled([*whole(1), *whole(2), turn(3, "begin"), said("q3")])
    found = await newest_turns(store, KEY, 1, exclude="turn_0003")
    assert [one.id for one in found] == ["turn_0002"]


async def test_a_log_without_turns_is_counted_by_its_users() -> None:
    store = await filled([said("x"), said("y", "assistant"), said("z")])
    found = await newest_turns(store, KEY, 1)
    assert [texts(one) for one in found] == [["z"]]


async def test_no_turns_are_none() -> None:
    assert await newest_turns(await filled(whole(1)), KEY, 0) == []


def retract(after: int) -> Entry:
    return Entry(RETRACT, encode(RetractionPayload(after)))


async def both_ways(entries: list[Entry]) -> list[str]:
    """Return the messages that still count, read forwards and backwards alike."""
    store = await filled(entries)
    forwards = [text async for one in read_turns(store, KEY) for text in texts(one)]
    backwards = [text for one in await newest_turns(store, KEY, 99) for text in texts(one)]
    assert forwards == backwards
    return forwards


async def test_what_was_retracted_does_not_count() -> None:
    # The epoch record has seq 1, so the first turn ends with seq 5.
    assert await both_ways([*whole(1), *whole(2), retract(5), *whole(3)]) == [
        "q1",
        "a1",
        "q3",
        "a3",
    ]


async def test_of_an_attempt_that_was_taken_back_only_what_was_outside_counts() -> None:
    def taken(*spans: tuple[int, int]) -> Entry:
        return Entry(RETRACT, encode(RetractionPayload(of=("turn_0001", 1), spans=spans)))

    entries = [*whole(1), taken((2, 3), (5, 5)), *whole(2)]
    assert await both_ways(entries) == ["a1", "q2", "a2"]
    again = [*entries, retract(5), *whole(3)]  # to before that: it counts no more
    assert await both_ways(again) == ["q1", "a1", "q3", "a3"]


async def test_what_a_second_retraction_brings_back_counts_again() -> None:
    entries = [*whole(1), *whole(2), retract(5), *whole(3), retract(9), *whole(4)]
    assert await both_ways(entries) == ["q1", "a1", "q2", "a2", "q4", "a4"]


async def test_a_new_beginning_sets_aside_what_is_older() -> None:
    begin = Entry(CONTEXT, encode({"messages": [], "reason": BEGIN}))
    assert await both_ways([*whole(1), begin, *whole(2)]) == ["q2", "a2"]


async def test_a_turn_is_found_by_its_id() -> None:
    store = await filled([*whole(1), *whole(2), *whole(3)])
    found = await find_turn(store, KEY, "turn_0002")
    assert found is not None
    assert (texts(found), found.phase) == (["q2", "a2"], "end")
    assert await find_turn(store, KEY, "turn_0009") is None
