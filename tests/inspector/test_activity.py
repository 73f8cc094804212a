"""What the end of a log tells about work in it, and which turns a run of records has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure import Message
from perdure.inspector.activity import (
    Heading,
    Tokens,
    headings,
    status_of,
    tokens_in,
    tokens_of,
    turns_in,
)
from perdure.records.messages import encode_message
from perdure.records.records import TURN, Record


def record(seq: int, phase: str, *, end: bool = True, **facts: Any) -> Record:
    about = {"turn": f"turn_{seq}", "number": 1, "phase": phase, **facts}
    return Record(seq=seq, epoch=1, kind=TURN, payload=msgspec.json.encode(about), end=end)


def said(seq: int, message: Message) -> Record:
    entry = encode_message(message, now=1.0)
    return Record(seq=seq, epoch=1, kind=entry.kind, payload=entry.payload, end=True)


ASKED, ANSWERED = said(2, Message.user("?")), said(3, Message.assistant("!"))


@pytest.mark.parametrize(
    ("newest_first", "held", "expected"),
    [
        ([], True, "idle"),
        ([record(1, "begin")], True, "running"),
        ([ASKED, record(1, "begin")], False, "interrupted"),
        ([record(4, "end"), ANSWERED, ASKED], True, "idle"),
        ([record(4, "interrupted", error="CancelledError")], True, "interrupted"),
        ([record(4, "interrupted", error="ValueError")], True, "failed"),
        # an SDK's turn begins in the group of its first message, and ends with the next one
        ([ASKED, record(1, "begin", end=False)], True, "running"),
        ([ASKED, record(1, "begin", end=False)], False, "interrupted"),
        ([ANSWERED, ASKED, record(1, "begin", end=False)], True, "idle"),
        # a turn that another holder goes on with
        ([ANSWERED, record(1, "begin", end=False, resumed=True)], True, "running"),
        ([ASKED], False, "interrupted"),
        ([ANSWERED, ASKED], True, "idle"),
        ([Record(seq=1, epoch=1, kind=TURN, payload=b"[]", end=True)], True, "idle"),
    ],
)
def test_the_end_of_a_log_tells_the_status(
    newest_first: list[Record], held: bool, expected: str
) -> None:
    assert status_of(newest_first, held=held).name == expected


def test_a_turn_without_an_end_was_interrupted_unless_it_is_the_newest() -> None:
    records = [
        record(1, "begin", at=10.0, number=1),
        record(5, "begin", at=20.0, number=2, given=True, turn="order"),
        record(9, "end", at=22.5, number=2, input_tokens=7, output_tokens=3),
        record(10, "begin", at=30.0, number=3),
    ]
    first, second, third = turns_in(records, held=True)
    assert (first.status, first.last, first.took) == ("interrupted", 4, None)
    assert (second.status, second.name, second.took) == ("done", "order", 2.5)
    assert second.tokens == Tokens(7, 3)
    assert third.status == "running"
    assert turns_in(records, held=False)[-1].status == "interrupted"


def test_messages_without_recorded_turns_begin_one_with_each_user() -> None:
    heads = [
        Heading(seq, role, float(seq), Tokens(1, 1))
        for seq, role in enumerate(("user", "user", "assistant", "tool", "user"), 1)
    ]
    found = headings(heads, [])
    assert [(seq, turn.took, turn.tokens.input) for seq, turn in found.items()] == [
        (1, 3.0, 4),
        (5, 0.0, 1),
    ]


def test_tokens_are_found_in_the_accounts_of_providers() -> None:
    assert tokens_in({"prompt_tokens": 3, "completion_tokens": 4}) == Tokens(3, 4)
    assert tokens_in({"promptTokenCount": 3}) == Tokens(3, 0)
    assert tokens_in([]) == tokens_in(None) == Tokens()
    usage = msgspec.Raw(b'{"input_tokens": 5, "output_tokens": 6}')
    assert tokens_of(Message(role="assistant", content="x", extra={"usage": usage})) == Tokens(5, 6)
    broken = msgspec.Raw(b'{"sdk": 3}')
    assert (
        tokens_of(Message(role="assistant", content="x", extra={"perdure_foreign": broken}))
        == Tokens()
    )
