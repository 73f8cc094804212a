"""Which facts are kept (seed 1's redesign: five categories, salience 500 to 100, noise out)."""

from __future__ import annotations

import pytest

from perdure import ConfigError
from perdure.memory.compaction import (
    Compactor,
    ExtractiveSummarizer,
    Fact,
    FactLimits,
    Summary,
    distilled,
    key_of,
    salience_of,
)
from perdure.records.messages import Message
from tests.memory.turns import said

CATEGORIES = [
    "critical_issue",
    "unresolved_work",
    "user_preference",
    "durable_fact",
    "important_artifact",
]


def texts(*facts: Fact, known: dict[str, float] | None = None, **limits: int) -> list[str]:
    return [one.text for one in distilled(facts, known or {}, FactLimits(**limits))]


def test_salience_follows_the_category() -> None:
    """S1-14: semantic items are weighed, from 500 to 100."""
    assert [salience_of(one) for one in CATEGORIES] == [500, 400, 300, 200, 100]


def test_the_weightiest_come_first_whatever_the_order() -> None:
    facts = [Fact(f"It is about {one}.", one) for one in reversed(CATEGORIES)]
    assert texts(*facts) == [f"It is about {one}." for one in CATEGORIES]


def test_a_category_that_nobody_knows_is_a_durable_fact() -> None:
    (fact,) = distilled([Fact("The sea is salty.", "poetry")], {}, FactLimits())
    assert fact.category == "durable_fact"


@pytest.mark.parametrize(
    "noise", ["ok", "Thanks!", "Hello, thank you.", "n/a", "…", "What is the tide?", "no facts", ""]
)
def test_noise_is_left_out(noise: str) -> None:
    assert texts(Fact(noise), Fact("Likes herring.")) == ["Likes herring."]


def test_what_is_said_twice_counts_once_with_its_weight() -> None:
    facts = [Fact("Likes herring.", "durable_fact"), Fact("likes  HERRING", "user_preference")]
    assert distilled(facts, {}, FactLimits()) == (Fact("likes HERRING", "user_preference"),)


def test_what_is_known_is_not_added_unless_it_weighs_more_now() -> None:
    known = {key_of("The pump leaks."): 200.0}
    assert texts(Fact("the pump leaks"), known=known) == []
    assert texts(Fact("the pump leaks", "critical_issue"), known=known) == ["the pump leaks"]


def test_each_category_has_its_limit() -> None:
    facts = [Fact(f"Fact number {n}.", one) for one in CATEGORIES for n in range(5)]
    one_each = [Fact(f"{one} {n}", one) for one in CATEGORIES for n in range(5)]
    assert len(texts(*one_each, per_category=2)) == 10
    assert len(texts(*facts, per_category=9)) == 5  # the same five facts, by their words


def test_a_long_fact_is_cut() -> None:
    (text,) = texts(Fact("x" * 100), chars=20)
    assert len(text) == 20
    assert text.endswith("…")


@pytest.mark.parametrize("bad", [{"per_category": -1}, {"chars": 3}])
def test_a_limit_that_does_not_fit_is_named(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        FactLimits(**bad)


@pytest.mark.parametrize(
    ("sentence", "category"),
    [
        ("The build is broken since Monday.", "critical_issue"),
        ("Remind me to call the harbor master.", "unresolved_work"),
        ("I prefer short answers.", "user_preference"),
        ("My boat is called Sula.", "durable_fact"),
        ("The plan is in docs/plan.md now.", "important_artifact"),
        ("See https://example.org/tides for it.", "important_artifact"),
    ],
)
async def test_quotes_find_facts_of_each_category(sentence: str, category: str) -> None:
    """S1-14."""
    summary = await ExtractiveSummarizer().summarize([said(1, Message.user(f"Well. {sentence}"))])
    assert summary.facts == (Fact(sentence, category),)


class Says:
    """A summarizer that always says the same."""

    def __init__(self, *facts: Fact) -> None:
        self.facts = facts

    async def summarize(self, turns: object) -> Summary:
        return Summary("It went on.", self.facts)


async def test_items_have_category_and_salience() -> None:
    """S1-14."""
    summarizer = Says(Fact("Likes herring.", "user_preference"), Fact("ok"))
    done = await Compactor(summarizer).compact([said(3, Message.user("x"))], now=5.0)
    (item,) = done.semantic
    assert (item.category, item.salience, item.fact) == ("user_preference", 300, "Likes herring.")


@pytest.mark.parametrize("part", ["a-", "a.p-", "/-", "~/a.", "my ", "...", "x"])
async def test_a_long_text_that_looks_like_something_does_not_stop_the_loop(part: str) -> None:
    """S1-14: what a user pastes is read in a time that its length allows."""
    summary = await ExtractiveSummarizer().summarize([said(1, Message.user(part * 100_000 + "?"))])
    assert summary.facts == ()
