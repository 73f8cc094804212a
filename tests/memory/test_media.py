"""The budget for media: what each takes by provider, and what leaves when it is spent."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from perdure import Message
from perdure.memory.context import WorkingContext
from perdure.memory.media import STEP, MediaBudget, estimated, fitted, kept_of
from perdure.records.media import Medium, decode_held, lifted
from perdure.records.messages import encode_message
from perdure.records.records import MESSAGE
from tests.images import part, png, shown

PROVIDERS = ["anthropic", "openai", "gemini"]


@pytest.mark.parametrize(
    ("provider", "width", "height", "tokens"),
    [
        ("anthropic", 1092, 1092, 1590),
        ("anthropic", 8000, 8000, 1600),
        ("anthropic", 200, 200, 54),
        ("openai", 1024, 1024, 765),
        ("openai", 2048, 4096, 1105),
        ("openai", 512, 512, 255),
        ("gemini", 384, 384, 258),
        ("gemini", 960, 540, 1548),
    ],
)
def test_an_image_takes_what_its_provider_says(
    provider: str, width: int, height: int, tokens: int
) -> None:
    assert estimated(Medium("image/png", 10**6, width, height), provider) == tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_image_of_unknown_size_takes_a_large_ones_tokens(provider: str) -> None:
    assert estimated(Medium("image/png", 10), provider) == 1_600


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("kind", ["application/pdf", "audio/mpeg", "audio/wav", "video/mp4"])
def test_more_bytes_take_more_tokens(provider: str, kind: str) -> None:
    few, many = (estimated(Medium(kind, size), provider) for size in (10**6, 10**7))
    assert 0 < few < many


def test_without_a_provider_the_most_counts() -> None:
    medium = Medium("image/png", 10**6, 1280, 800)
    assert estimated(medium) == max(estimated(medium, one) for one in PROVIDERS)
    assert MediaBudget().least(medium) == min(estimated(medium, one) for one in PROVIDERS)


@given(st.lists(st.floats(0.001, 0.9), max_size=40))
def test_what_stays_fits_and_no_more_leaves_than_a_step(costs: list[float]) -> None:
    first = kept_of(costs)
    assert sum(costs[first:]) <= 1.0 + 1e-6
    if first:
        assert sum(costs[first:]) + costs[first - 1] > 1.0 - STEP - 1e-6


def test_a_context_holds_the_newest_media_and_no_more_than_may_be_shown() -> None:
    context = WorkingContext(100_000)
    context.lifts, context.budget = True, MediaBudget(500, 100)
    images = [png(70_000, number) for number in range(12)]
    for seq, image in enumerate(images, 1):
        payload = context.lifted(encode_message(Message.user([part(image)])).payload)
        context.feed(seq, MESSAGE, payload)
    assert {medium.name for medium in context.wanted()} <= set(context.media)
    assert len(context.media) <= 7
    messages = [Message.user([part(image)]) for image in images]
    assert context.size < 5_000
    assert list(context.messages()) == [
        lifted(encode_message(message).payload)[0] for message in messages
    ]


def test_media_that_are_not_held_leave_a_note() -> None:
    message = Message.user([part(png(70_000))])
    payload, blobs = lifted(encode_message(message).payload)
    stored = decode_held(payload)
    assert shown(fitted([stored], MediaBudget(), blobs).messages[0].content) == [png(70_000)]
    lost = fitted([stored], MediaBudget(), {})
    assert len(lost.lost) == 1
    assert "lost" in str(lost.messages[0].content)
