"""Whatever became of a conversation: no provider refuses it, and nothing that was done is lost.

The judges (`rules`, and the SDKs' own types) know nothing of how a context is rendered.
"""

from __future__ import annotations

import re

import msgspec
from hypothesis import given, strategies as st

from perdure import Message
from perdure.providers import FORMATS, ReasoningPolicy, RenderedContext, render
from perdure.providers.tool_pairs import paired
from perdure.records.messages import decode_message, encode_message
from tests.providers.conversations import conversations
from tests.providers.rules import wrongs
from tests.providers.sdk import assert_accepted

policies = st.sampled_from(["keep", "strip_foreign", "strip_all"])


def text_of(context: RenderedContext) -> str:
    return msgspec.json.encode(context.request).decode()


def is_waiting(shown: str, whole: str) -> bool:
    """Say whether a call of Anthropic's own tool has no result yet, or is gone later."""
    ids = set(re.findall(r"srvtoolu_\d", shown))
    return any(shown.count(one) % 2 or whole.count(one) < shown.count(one) for one in ids)


def done_in(messages: list[Message]) -> set[str]:
    """Return the marks of the completed results whose calls are there, each call's first."""
    kept = [one for each in paired(messages).exchanges for one in each.results]
    return set(re.findall(r"result#\d+#", repr(kept)))


@given(messages=conversations(), reasoning=policies)
def test_no_provider_refuses_what_is_rendered(
    messages: list[Message], reasoning: ReasoningPolicy
) -> None:
    """C14, S0-3: cut at any record, with any tool cancelled or failed."""
    for format in FORMATS:
        context = render(messages, format, reasoning=reasoning)
        assert wrongs(context) == [], format
        assert_accepted(context)
        if format == "openai-responses":  # what nobody stored cannot be looked up
            thoughts = [one for one in context.messages if one.get("type") == "reasoning"]
            assert all(one.get("encrypted_content") for one in thoughts)


@given(messages=conversations())
def test_every_completed_result_is_shown(messages: list[Message]) -> None:
    done = done_in(messages)
    for format in FORMATS:
        shown = text_of(render(messages, format))
        assert {mark for mark in done if mark not in shown} == set(), format


@given(messages=conversations())
def test_the_first_result_of_a_call_is_kept(messages: list[Message]) -> None:
    """Counted without the pairing, for ids that stand for one call only."""
    asked = [call.id for message in messages for call in message.tool_calls]
    kept = {id(one) for each in paired(messages).exchanges for one in each.results}
    seen: set[str] = set()
    for at, message in enumerate(messages):
        found = message.tool_result
        if found is None or asked.count(found.call_id) != 1 or found.call_id in seen:
            continue
        before = [call.id for one in messages[:at] for call in one.tool_calls]
        if found.call_id in before:
            seen.add(found.call_id)
            assert id(message) in kept


@given(messages=conversations(), policy=st.sampled_from(["interrupted", "drop"]))
def test_a_second_repair_changes_nothing(messages: list[Message], policy: str) -> None:
    once = paired(messages, policy)  # type: ignore[arg-type]
    again = paired(once.messages, policy)  # type: ignore[arg-type]
    assert again.messages == once.messages
    assert again.appended == ()
    for format in FORMATS:
        assert wrongs(render(once.messages, format)) == [], format


@given(messages=conversations())
def test_a_durable_repair_shows_what_the_projection_showed(messages: list[Message]) -> None:
    """What a model sees does not depend on whether the repair has been written down yet."""
    repaired = paired(messages).messages
    for format in FORMATS:
        assert render(repaired, format) == render(messages, format)


@given(messages=conversations())
def test_stored_messages_are_shown_as_they_were(messages: list[Message]) -> None:
    """S0-2, S0-9: what went through a record is rendered to the same request."""
    stored = [decode_message(encode_message(one).payload) for one in messages]
    for format in FORMATS:
        assert render(stored, format) == render(messages, format)


@given(messages=conversations())
def test_nobody_gets_what_others_issued(messages: list[Message]) -> None:
    """REQUIREMENTS 2.1: signatures and opaque fields go back to their issuer only."""
    for format in FORMATS:
        shown = text_of(render(messages, format))
        issuers = set(re.findall(r"sig:([a-z-]+)", shown))
        assert issuers <= {format}
        assert format == "gemini" or "thoughtSignature" not in shown
        assert "sig:" not in text_of(render(messages, format, reasoning="strip_all")), format


@given(messages=conversations(), at=st.integers(0, 30))
def test_what_was_shown_stays_shown_as_the_conversation_goes_on(
    messages: list[Message], at: int
) -> None:
    """A provider's prompt cache needs a stable beginning: whole exchanges are rendered the same."""
    exchanges = paired(messages).exchanges
    closed = [one for each in exchanges for one in (each.head, *each.results)]
    begun = [one for each in exchanges[:at] for one in (each.head, *each.results)]
    for format in FORMATS:
        shown, whole = render(begun, format), render(closed, format)
        if format in {"openai", "openai-responses"}:
            assert whole.messages[: len(shown.messages)] == shown.messages
        elif not is_waiting(text_of(shown), text_of(whole)):  # what follows may put an end to that
            before = shown.messages[:-1]  # the last turn may go on
            assert whole.messages[: len(before)] == before, format
