"""Interaction blocks, and which of them leave (seed 1's redesign of compaction)."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from perdure.memory.compaction import Frontier, TurnBlock, blocks_of
from perdure.providers.tool_pairs import interrupted_result
from perdure.records.messages import Message, ToolCall

USER = Message.user("go")
ANSWER = Message.assistant("done")
MUCH = 1e9


def asks(*ids: str) -> Message:
    return Message.assistant(tool_calls=[ToolCall(one, "look") for one in ids])


def result(call_id: str) -> Message:
    return Message.tool(call_id, 1)


def blocks(*messages: Message, turn_id: str = "turn_0001", start: int = 1) -> list[TurnBlock]:
    parts = [(seq, message, 0.1) for seq, message in enumerate(messages, start)]
    return blocks_of(turn_id, parts)


def leaving(frontier: Frontier, *found: TurnBlock) -> list[TurnBlock]:
    return list(frontier.add(found))


def test_a_user_and_the_continuation_after_tools_open_blocks() -> None:
    """S1-14: blocks are what is compacted, and not turns of any length."""
    found = blocks(USER, asks("a", "b"), result("b"), result("a"), asks("c"), result("c"), ANSWER)
    assert [one.opener for one in found] == ["user", "tool_continuation", "tool_continuation"]
    assert [len(one.messages) for one in found] == [4, 2, 1]
    assert [one.last for one in found] == [4, 6, 7]
    assert all(one.is_complete for one in found)


def test_a_call_does_not_leave_without_the_result_that_replaces_a_made_up_one() -> None:
    """S1-14: a kill within a tool call; the restore closes it, and the turn then goes on."""
    made_up = interrupted_result(asks("a").tool_calls[0])
    killed, went_on = blocks(USER, asks("a"), made_up), blocks(result("a"), ANSWER, start=4)
    later = blocks(USER, ANSWER, turn_id="turn_0002", start=6)
    assert killed[0].is_complete
    frontier = Frontier(keep_turns=9, room=0.45)
    assert leaving(frontier, *killed) == []
    assert leaving(frontier, *went_on, *later) == [*killed, went_on[0]]
    assert tuple(frontier.raw) == (went_on[1], *later)


@pytest.mark.parametrize(
    ("messages", "complete"),
    [
        ((USER,), False),
        ((USER, ANSWER), True),
        ((USER, asks("a")), False),
        ((USER, asks("a", "b"), result("a")), False),
        ((USER, asks("a"), result("a")), True),
        ((USER, asks("a"), result("z")), False),
        ((USER, asks("a", "a"), result("a")), False),
        ((ANSWER,), False),
    ],
)
def test_a_block_is_complete_when_every_call_is_matched(
    messages: tuple[Message, ...], complete: bool
) -> None:
    (block,) = blocks(*messages)
    assert block.is_complete is complete


def test_what_comes_before_any_opener_is_a_recovery_block() -> None:
    assert [one.opener for one in blocks(ANSWER, USER, ANSWER)] == ["recovery", "user"]


def test_the_newest_turns_stay_and_older_ones_leave_in_order() -> None:
    frontier = Frontier(2, MUCH)
    left = [
        block.turn_id
        for number in range(5)
        for block in frontier.add(blocks(USER, ANSWER, turn_id=f"t{number}"))
    ]
    assert left == ["t0", "t1", "t2"]
    assert [one.turn_id for one in frontier.raw] == ["t3", "t4"]


def test_a_trailing_incomplete_suffix_stays_raw() -> None:
    """S1-14: the frontier; what may still be answered is never summed up."""
    frontier = Frontier(0, MUCH)
    left = leaving(frontier, *blocks(USER, ANSWER), *blocks(USER, asks("a"), turn_id="t2"))
    assert [one.turn_id for one in left] == ["turn_0001"]
    assert [one.turn_id for one in frontier.raw] == ["t2"]


def test_what_was_left_incomplete_leaves_once_something_complete_has_followed() -> None:
    frontier = Frontier(0, MUCH)
    left = leaving(frontier, *blocks(USER, asks("a")), *blocks(USER, ANSWER, turn_id="t2"))
    assert [one.turn_id for one in left] == ["turn_0001", "t2"]


def test_a_late_result_leaves_with_its_call_or_not_at_all() -> None:
    """S1-14: never between a call and its result."""
    late = [*blocks(USER, asks("a")), *blocks(USER, result("a"), ANSWER, turn_id="t2")]
    frontier = Frontier(1, MUCH)
    assert leaving(frontier, *late) == late[:2]
    whole = Frontier(2, MUCH)
    assert leaving(whole, *late) == []


def test_a_turn_of_many_legs_leaves_leg_by_leg() -> None:
    """The reason for blocks: such a turn could never be compacted before."""
    legs = [message for n in range(9) for message in (asks(f"c{n}"), result(f"c{n}"))]
    found = blocks(USER, *legs, ANSWER)
    frontier = Frontier(1, 0.5)
    left = leaving(frontier, *found)
    assert left == found[: len(left)]
    assert 0 < len(left) < len(found)
    assert frontier.share <= 0.5


def test_a_smaller_room_lets_more_leave() -> None:
    frontier = Frontier(9, MUCH)
    assert leaving(frontier, *blocks(USER, ANSWER), *blocks(USER, ANSWER, turn_id="t2")) == []
    assert [one.turn_id for one in frontier.shrink(0.25)] == ["turn_0001"]
    assert [one.turn_id for one in frontier.shrink(0.0)] == ["t2"]
    assert frontier.share == 0.0


steps = st.lists(st.sampled_from(["user", "answer", "ask", "result"]), max_size=25)


def talk(kinds: list[str], turn: int) -> list[Message]:
    messages: list[Message] = []
    waiting: list[str] = []
    for number, kind in enumerate(kinds):
        if kind == "user":
            messages.append(USER)
        elif kind == "ask":
            waiting.append(f"c{turn}_{number}")
            messages.append(asks(waiting[-1]))
        elif kind == "result" and waiting:
            messages.append(result(waiting.pop()))
        else:
            messages.append(ANSWER)
    return messages


@given(st.lists(steps, max_size=6), st.integers(0, 4), st.floats(0, 3))
def test_whatever_was_said_no_pair_is_split_and_nothing_is_lost(
    turns: list[list[str]], keep: int, room: float
) -> None:
    """S1-14."""
    frontier = Frontier(keep, room)
    everything: list[TurnBlock] = []
    left: list[TurnBlock] = []
    for number, kinds in enumerate(turns):
        new = blocks(*talk(kinds, number), turn_id=f"t{number}", start=100 * number)
        everything += new
        left += frontier.add(new)
    assert [*left, *frontier.raw] == everything
    calls = {call.id for block in left for one in block.messages for call in one.tool_calls}
    results = {
        one.tool_result.call_id
        for block in frontier.raw
        for one in block.messages
        if one.tool_result is not None
    }
    answered = {id for block in frontier.raw for id in block.orphans()}
    assert not answered & calls & results
    if left:  # something complete stood behind all that left, or was the last of it
        assert any(block.is_complete for block in [left[-1], *frontier.raw])
