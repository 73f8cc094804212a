"""Reading only the end of a conversation, in whole groups."""

from __future__ import annotations

import pkgutil

from hypothesis import given, strategies as st

import perdure.providers
from perdure import Message
from perdure.providers import groups, newest
from perdure.providers.tool_pairs import paired
from tests.providers.conversations import conversations
from tests.providers.test_known_failures import asks, result

TALK = [Message.user("u"), asks("a", "b"), result("a"), result("b"), Message.assistant("x")]


def test_a_call_and_its_results_are_one_group() -> None:
    assert [len(group) for group in groups(TALK)] == [1, 3, 1]


def test_the_newest_groups_are_never_cut() -> None:
    """FIELD 2: a limit by messages would begin with a result whose call is gone."""
    assert newest(TALK, 3) == tuple(TALK[4:])
    assert newest(TALK, 4) == tuple(TALK[1:])
    assert newest(TALK, 5) == tuple(TALK)


def test_the_newest_group_stays_even_if_it_is_too_large() -> None:
    assert newest(TALK[:4], 1) == tuple(TALK[1:4])
    assert newest([], 1) == ()


def test_groups_are_measured_as_the_caller_says() -> None:
    assert newest(TALK, 100, size=lambda _: 50) == tuple(TALK[4:])


@given(conversations(), st.integers(0, 20))
def test_a_tail_of_a_sound_conversation_is_sound(messages: list[Message], limit: int) -> None:
    sound = paired(messages).messages
    tail = newest(sound, limit)
    assert paired(tail).messages == tail
    assert sound[len(sound) - len(tail) :] == tail


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing a module sets its name in the package, over a function of that name."""
    found = {module.name for module in pkgutil.iter_modules(perdure.providers.__path__)}
    assert found.isdisjoint(perdure.providers.__all__)
