"""The rules that mend a working context (C14, S1; defect h of the seeds' projects)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, strategies as st

from perdure import Message, ToolCall
from perdure.providers.tool_pairs import INTERRUPTED, interrupted_result, is_synthetic, paired


def asks(*ids: str, text: str | None = None) -> Message:
    return Message.assistant(text, tool_calls=[ToolCall(one, "look") for one in ids])


def result(call_id: str, value: str = "seen") -> Message:
    return Message.tool(call_id, value, name="look")


def shape(messages: object) -> list[str]:
    return [
        f"result {one.tool_result.call_id}" if one.tool_result else one.role
        for one in messages  # type: ignore[attr-defined]
    ]


def test_a_call_at_the_end_is_closed_by_an_appended_result() -> None:
    given_messages = (Message.user("go"), asks("a", "b"), result("b"))
    mended = paired(given_messages)
    assert mended.appended is not None
    assert mended.messages == (*given_messages, *mended.appended)
    (made_up,) = mended.appended
    assert made_up.tool_result is not None
    assert (made_up.tool_result.call_id, made_up.tool_result.error) == ("a", INTERRUPTED)
    assert mended.closed == 1


def test_the_made_up_result_is_the_same_each_time() -> None:
    call = ToolCall("a", "look", {"at": "harbor"})
    assert interrupted_result(call) == interrupted_result(call)
    assert is_synthetic(interrupted_result(call))
    assert not is_synthetic(result("a"))


def test_a_call_in_the_middle_is_closed_in_its_place() -> None:
    mended = paired((asks("a"), Message.user("hello?")))
    assert shape(mended.messages) == ["assistant", "result a", "user"]
    assert mended.appended is None


def test_a_result_that_came_late_stands_behind_its_call() -> None:
    mended = paired((asks("a"), Message.user("hello?"), result("a")))
    assert shape(mended.messages) == ["assistant", "result a", "user"]
    assert (mended.moved, mended.closed) == (1, 0)


def test_a_real_result_takes_the_place_of_a_made_up_one() -> None:
    closed = paired((asks("a"),)).messages
    mended = paired((*closed, result("a")))
    assert mended.messages == (asks("a"), result("a"))


def test_a_result_without_a_call_is_left_out() -> None:
    mended = paired((Message.user("go"), result("nobody's"), Message.assistant("done")))
    assert shape(mended.messages) == ["user", "assistant"]
    assert mended.orphans == 1


def test_a_second_result_of_a_call_is_left_out() -> None:
    mended = paired((asks("a"), Message.user("x"), asks("a"), result("a"), result("a", "again")))
    assert shape(mended.messages) == ["assistant", "result a", "user", "assistant", "result a"]
    assert mended.orphans == 1


def test_drop_leaves_out_calls_without_results_and_keeps_the_others() -> None:
    mended = paired((Message.user("go"), asks("a", "b", text="Let me see"), result("b")), "drop")
    assert mended.messages == (Message.user("go"), asks("b", text="Let me see"), result("b"))
    assert mended.dropped == 1


def test_drop_leaves_out_a_message_of_which_nothing_is_left() -> None:
    assert paired((Message.user("go"), asks("a")), "drop").messages == (Message.user("go"),)


def test_keep_leaves_calls_as_they_are() -> None:
    messages = (Message.user("go"), asks("a"))
    assert paired(messages, "keep").messages == messages


def test_an_answer_with_nothing_in_it_is_left_out() -> None:
    mended = paired((Message.user("go"), Message.assistant(""), Message.user("well?")))
    assert shape(mended.messages) == ["user", "user"]


def test_what_the_provider_said_beside_an_empty_answer_is_kept() -> None:
    signed = Message(role="assistant", extra={"signature": msgspec.Raw(b'"s"')})
    assert paired((signed,)).messages == (signed,)


@pytest.mark.parametrize("policy", ["interrupted", "drop", "keep"])
def test_a_context_that_is_sound_is_not_touched(policy: str) -> None:
    sound = (Message.system("s"), Message.user("u"), asks("a"), result("a"), Message.assistant("x"))
    mended = paired(sound, policy)  # type: ignore[arg-type]
    assert mended.messages == sound
    assert mended.appended == ()


ids = st.sampled_from("abc")
some_messages = st.one_of(
    st.just(Message.user("u")),
    st.sampled_from(["", "said"]).map(Message.assistant),
    st.lists(ids, min_size=1, max_size=3, unique=True).map(lambda found: asks(*found)),
    st.tuples(ids, st.sampled_from(["1", "2"])).map(lambda found: result(*found)),
)
conversations = st.lists(some_messages, max_size=14)


@given(conversations, st.sampled_from(["interrupted", "drop"]))
def test_every_call_has_one_result_right_behind_it(messages: list[Message], policy: str) -> None:
    waiting: Counter[str] = Counter()
    for message in paired(messages, policy).messages:  # type: ignore[arg-type]
        if message.tool_result is not None:
            assert waiting[message.tool_result.call_id] == 1
            del waiting[message.tool_result.call_id]
        else:
            assert not waiting
            waiting.update(call.id for call in message.tool_calls)
    assert not waiting


@given(conversations, st.sampled_from(["interrupted", "drop", "keep"]))
def test_mending_what_is_mended_changes_nothing(messages: list[Message], policy: str) -> None:
    once = paired(messages, policy).messages  # type: ignore[arg-type]
    again = paired(once, policy)  # type: ignore[arg-type]
    assert again.messages == once
    assert again.appended == ()


def said_in(messages: Sequence[Message]) -> Counter[str]:
    """Return every word and every call; a reply may come as one message or several."""
    return Counter(
        said
        for one in messages
        if one.tool_result is None
        for said in (*one.text.split(), *(f"call {call.id}" for call in one.tool_calls))
    )


@given(conversations)
def test_closing_keeps_everything_that_was_said(messages: list[Message]) -> None:
    assert said_in(paired(messages).messages) == said_in(messages)


@given(conversations)
def test_what_is_appended_is_what_was_missing(messages: list[Message]) -> None:
    mended = paired(messages)
    if mended.appended is not None:
        assert (*messages, *mended.appended) == mended.messages
        assert all(map(is_synthetic, mended.appended))


@given(conversations, st.integers(0, 14))
def test_a_conversation_cut_anywhere_and_mended_goes_on_as_it_was(
    messages: list[Message], cut: int
) -> None:
    """A kill at any record, a restore, and the rest: no real result is lost by the repair."""
    whole = paired(messages)
    real = [one for one in whole.messages if one.tool_result and not is_synthetic(one)]
    went_on = paired((*paired(messages[:cut], "keep").messages, *messages[cut:]))
    assert [one for one in went_on.messages if one.tool_result and not is_synthetic(one)] == real


def test_a_reply_in_pieces_is_put_together_for_good() -> None:
    """REQUIREMENTS 2.1: the trace of an answer's text followed that of its calls."""
    mended = paired((asks("a"), asks("b"), Message.assistant("Both."), result("b"), result("a")))
    assert mended.messages == (asks("a", "b", text="Both."), result("b"), result("a"))
    assert mended.joined == 2
    assert paired(mended.messages).messages == mended.messages
