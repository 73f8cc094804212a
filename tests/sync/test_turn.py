"""Blocking turns: bound to their thread, first come first served, safe from Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import perdure.sync
from perdure import Message, SessionError, Shutdown
from perdure.stores.memory import MemoryBacking
from perdure.sync.loop import LoopThread
from tests.sync.conftest import Connect, GatedStore, phases

QUIET = Shutdown(signals=False)


def test_a_turn_inside_a_turn_is_refused(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        with (
            session.turn(),
            pytest.raises(SessionError, match="already is in a turn"),
            session.turn(),
        ):
            pass
        with session.turn() as turn:
            assert turn.number == 2


def test_a_close_within_a_turn_is_refused_instead_of_waiting_for_it(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        with session.turn(), pytest.raises(SessionError, match="end it before closing"):
            session.close()
        session.close()


def test_a_rename_within_a_turn_is_refused_instead_of_waiting_for_it(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        with session.turn(), pytest.raises(SessionError, match="end it before renaming"):
            sessions.rename("mia", "eve")
        sessions.rename("mia", "eve")
        assert sessions.exists("eve")


def test_an_open_within_a_turn_does_not_wait_for_a_handover(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        parts = sessions._parts
        assert parts is not None
        with session.turn():
            hand_over = parts.lifecycle.hand_over
            sessions._loop.do(lambda: parts.runtime.host.spawn(hand_over, session.key))
            while session.key not in parts.runtime.pending_loads:  # then it waits for the turn
                pass
            with sessions.open("mia") as same:
                assert same is session


def test_another_thread_waits_for_its_turn(again: Connect) -> None:
    order: list[str] = []
    with again() as sessions, sessions.open("mia") as session:

        def second() -> None:
            with session.turn():
                order.append("second")

        with session.turn():
            thread = threading.Thread(target=second)
            thread.start()
            while not sessions._loop._calls:  # it waits in the queue
                pass
            order.append("first")
        thread.join()
    assert order == ["first", "second"]


def test_an_error_closes_the_turn_as_interrupted_and_saves_it(
    again: Connect, backing: MemoryBacking
) -> None:
    with again(autosave=None) as sessions, sessions.open("mia") as session:
        with pytest.raises(ZeroDivisionError), session.turn():
            session.append(Message.user("Hello"))
            1 / 0  # noqa: B018
        assert session.durable_version == session.version
        assert phases(backing, session) == ["begin", "interrupted"]


def test_a_retry_by_id_is_the_same_turn(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        with session.turn("request-7") as turn:
            session.append(Message.user("Hello"))
        with session.turn("request-7") as retry:
            assert retry.replayed
            assert retry.number == turn.number


def test_nothing_is_sent_before_it_is_durable(again: Connect) -> None:
    sent: list[tuple[str, int]] = []
    with again(autosave=None) as sessions, sessions.open("mia") as session, session.turn() as turn:
        version = session.append(Message.user("Hello"))
        turn.emit("answer", lambda item: sent.append((item, session.durable_version)))
    assert sent == [("answer", version)]


def test_ctrl_c_in_the_queue_leaves_it(
    again: Connect, ctrl_c_when: Callable[[threading.Event], None], backing: MemoryBacking
) -> None:
    waits, done = threading.Event(), threading.Event()
    with again() as sessions, sessions.open("mia") as session:

        def first() -> None:
            with session.turn():
                ready.set()
                done.wait()

        ready = threading.Event()
        thread = threading.Thread(target=first)
        thread.start()
        ready.wait()

        def watch() -> None:
            while not sessions._loop._calls:
                pass
            waits.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        ctrl_c_when(waits)
        with pytest.raises(KeyboardInterrupt):
            session.turn().__enter__()
        done.set()
        thread.join()
        watcher.join()
        with session.turn() as turn:
            assert turn.number == 2
        assert phases(backing, session) == ["begin", "end", "begin", "end"]


def test_ctrl_c_while_a_turn_is_saved_does_not_cut_it(
    gated: GatedStore, ctrl_c_when: Callable[[threading.Event], None], backing: MemoryBacking
) -> None:
    with perdure.sync.connect(gated, autosave=None, shutdown=QUIET) as sessions:
        session = sessions.open("mia")
        with pytest.raises(KeyboardInterrupt), session.turn():
            session.append(Message.user("Hello"))
            gated.gate.clear()
            gated.entered.clear()
            ctrl_c_when(gated.entered)
        gated.gate.set()
        with session.turn() as turn:  # comes after the one that is being saved
            assert turn.number == 2
        assert phases(backing, session) == ["begin", "end", "begin", "end"]


def test_a_turn_that_was_given_up_is_interrupted(again: Connect, backing: MemoryBacking) -> None:
    with again() as sessions, sessions.open("mia") as session:
        turn = session.turn()
        turn.__enter__()
        sessions._loop.post(turn._life.give_up)  # as when Ctrl-C comes just behind its beginning
        session._turn_thread = 0
        with session.turn():
            pass
        assert phases(backing, session) == ["begin", "interrupted", "begin", "end"]


class Interrupted:
    """A loop's thread where Ctrl-C comes right before a call, or right behind it."""

    def __init__(self, loop: LoopThread, *, done: bool) -> None:
        self._loop = loop
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call(self, make: Callable[[], Awaitable[object]]) -> None:
        if self._done:
            self._loop.call(make)
        raise KeyboardInterrupt


def test_ctrl_c_just_behind_the_beginning_interrupts_the_turn(
    again: Connect, backing: MemoryBacking
) -> None:
    with again() as sessions, sessions.open("mia") as session:
        turn = session.turn()
        turn._life._loop = Interrupted(sessions._loop, done=True)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            turn.__enter__()
        with session.turn():
            pass
        assert phases(backing, session) == ["begin", "interrupted", "begin", "end"]


def test_ctrl_c_just_before_the_end_ends_the_turn_all_the_same(
    again: Connect, backing: MemoryBacking
) -> None:
    with again() as sessions, sessions.open("mia") as session:
        turn = session.turn()
        turn.__enter__()
        turn._life._loop = Interrupted(sessions._loop, done=False)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            turn.__exit__(None, None, None)
        with session.turn():
            pass
        assert phases(backing, session) == ["begin", "end"] * 2


def test_a_turn_that_is_given_up_before_it_begins_never_begins(
    again: Connect, backing: MemoryBacking
) -> None:
    with again() as sessions, sessions.open("mia") as session:
        turn = session.turn()
        sessions._loop.post(turn._life.give_up)
        with pytest.raises(RuntimeError):  # nobody hears it: the thread has gone on
            turn.__enter__()
        with session.turn():
            pass
        assert phases(backing, session) == ["begin", "end"]


def test_a_turn_open_while_the_manager_closes_is_interrupted(again: Connect) -> None:
    sessions = again(shutdown=Shutdown(deadline=1, turn_grace=0, signals=False))
    session = sessions.open("mia")
    turn = session.turn()
    turn.__enter__()
    session.append(Message.user("Hello"))
    assert sessions.close().clean
    with again() as sessions:
        assert sessions.load("mia").context()[0].text == "Hello"  # type: ignore[union-attr]


def test_what_is_emitted_goes_out_behind_its_save(again: Connect) -> None:
    sent: list[tuple[str, int]] = []
    with again(autosave=None) as sessions, sessions.open("mia") as session, session.turn() as turn:
        version = session.append(Message.user("Hello"))
        turn.emit("Hi", lambda item: sent.append((item, session.durable_version)))
        assert sent == [("Hi", version)]
