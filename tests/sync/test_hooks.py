"""Hooks of blocking code: in order, in their own thread, told to the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import perdure.sync
from perdure import ConfigError, Message, Shutdown
from perdure.sync.loop import HookThread
from tests.sync.conftest import Connect


def test_before_save_may_change_the_session(again: Connect) -> None:
    with again(autosave=None) as sessions:

        def note(session: perdure.sync.Session) -> None:
            assert isinstance(session, perdure.sync.Session)
            session.state.set("saves", 1)

        sessions.on("before_save", note)
        session = sessions.open("mia")
        session.append(Message.user("Hello"))
        session.save()
    with again() as sessions, sessions.open("mia") as session:
        assert session.state.get("saves") == 1


def test_events_are_told_in_order_and_to_the_end(again: Connect) -> None:
    told: list[str] = []
    sessions = again()
    sessions.on("opened", lambda facts: told.append(f"opened {facts.key}"))
    sessions.on("closed", lambda facts: told.append(f"closed {facts.key}"))
    for name in "abc":
        sessions.open(name).close()
    sessions.close()
    assert told == [f"{what} {name}" for name in "abc" for what in ("opened", "closed")]


def test_a_hook_may_use_the_api_and_does_not_hold_up_the_loop(again: Connect) -> None:
    seen: list[str] = []
    asked, answered, done = threading.Event(), threading.Event(), threading.Event()
    with again() as sessions:

        def look(facts: Any) -> None:
            asked.set()
            answered.wait(30)
            seen.append(sessions.health().status)
            done.set()

        sessions.on("opened", look)
        session = sessions.open("mia")
        assert asked.wait(30)
        session.append(Message.user("the hook still waits"))
        session.save()
        answered.set()
        assert done.wait(30)
    assert seen == ["ok"]


def test_a_hook_may_close_its_manager(again: Connect) -> None:
    sessions = again()
    closed = threading.Event()

    def close(facts: Any) -> None:
        sessions.close()
        closed.set()

    sessions.on("opened", close)
    sessions.open("mia")
    assert closed.wait(30)
    assert sessions.close().clean


def test_a_hook_is_taken_off_again(again: Connect) -> None:
    told: list[Any] = []
    with again() as sessions:
        off = sessions.on("opened", told.append)
        sessions.open("a")
        off()
        sessions.open("b")
    assert [str(facts.key) for facts in told] == ["a"]


def test_an_unknown_event_is_refused(again: Connect) -> None:
    with again() as sessions, pytest.raises(ConfigError, match="choose"):
        sessions.on("opnd", print)  # type: ignore[arg-type]


def test_a_hook_that_fails_is_logged_and_the_next_is_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[int] = []
    hooks = HookThread("test hooks", pytest.fail)
    hooks.schedule(lambda facts: 1 / 0, None)
    hooks.schedule(told.append, 2)
    hooks.finish(30)
    assert told == [2]
    assert "a hook failed" in caplog.text


def test_a_hook_that_never_ends_does_not_hold_up_the_closing() -> None:
    release = threading.Event()
    sessions = perdure.sync.connect(
        "memory:", shutdown=Shutdown(deadline=1.0, turn_grace=0.0, signals=False)
    )
    sessions.on("opened", lambda facts: release.wait(30))
    sessions.open("mia")
    assert sessions.close().clean
    release.set()


class OddError(BaseException):
    """As test frameworks use to skip or to fail."""


def test_a_hook_that_ends_badly_does_not_end_the_others(again: Connect) -> None:
    told: list[Any] = []

    def odd(facts: Any) -> None:
        raise OddError

    with again() as sessions:
        sessions.on("saved", odd)
        sessions.on("saved", told.append)
        session = sessions.open("mia")
        for _ in range(2):
            session.append(Message.user("Hello"))
            session.save()
    assert len(told) == 2


def test_what_is_given_and_ends_badly_comes_back_to_who_gave_it(again: Connect) -> None:
    class Odd(dict[str, int]):
        def items(self) -> Any:
            raise OddError

        def __iter__(self) -> Any:
            raise OddError

    raised: list[BaseException] = []

    def describe() -> None:
        try:
            session.describe(note=Odd(a=1))
        except OddError as error:
            raised.append(error)

    with again() as sessions:
        session = sessions.open("mia")
        thread = threading.Thread(target=describe, daemon=True)
        thread.start()
        thread.join(60)
        assert len(raised) == 1
