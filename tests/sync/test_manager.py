"""The blocking manager: its life, its threads, Ctrl-C and forks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import perdure.sync
from perdure import (
    Autosave,
    ConfigError,
    Message,
    NotStorableError,
    SessionClosedError,
    SessionError,
    SessionNotFoundError,
    Shutdown,
    StoreUnavailableError,
    UnsavedChangesError,
    WrongLoopError,
)
from perdure.autosave.options import EngineOptions
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing.faulty import FaultyStore
from tests.sync.conftest import Connect, GatedStore, phases

QUIET = Shutdown(signals=False)


def names() -> list[str]:
    return [one.name for one in threading.enumerate()]


def test_what_a_turn_appends_is_there_the_next_time(tmp_path: Path) -> None:
    url = tmp_path / "agents"
    with (
        perdure.sync.connect(url) as sessions,
        sessions.open("mia") as session,
        session.turn() as turn,
    ):
        session.append(Message.user("Hello"))
        assert (turn.id, turn.number, turn.replayed) == ("turn_0001", 1, False)
    with perdure.sync.connect(url) as sessions, sessions.open("mia") as session:
        assert [message.text for message in session.context()] == ["Hello"]
        assert session.info.turns == 1


def test_it_works_without_with(again: Connect) -> None:
    sessions = again()
    session = sessions.open("mia")
    session.append(Message.user("Hello"))
    report = sessions.close()
    assert report.clean
    assert report.saved == 1
    with again() as sessions:
        assert sessions.exists("mia")


def test_leaving_with_ends_its_threads(again: Connect) -> None:
    with again() as sessions:
        sessions.on("opened", lambda facts: None)
        sessions.open("mia")
        assert {"perdure:loop", "perdure:hooks"} <= set(names())
    assert not {"perdure:loop", "perdure:hooks"} & set(names())


def test_a_connect_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="mkdir -p"):
        perdure.sync.connect(tmp_path / "missing" / "agents")
    with pytest.raises(ConfigError, match="no store is known"):
        perdure.sync.connect("nosuch:x")
    for thread in threading.enumerate():
        if thread.name == "perdure":
            thread.join()
    assert "perdure:hooks" not in names()


def test_everybody_who_opens_an_id_shares_the_object(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as one, sessions.open("mia") as two:
        assert one is two


def test_a_post_is_taken_once(again: Connect) -> None:
    with again() as sessions:
        assert sessions.post("mia", Message.user("one"), key="k").new == 1
        assert sessions.post("mia", Message.user("one"), key="k").new == 0
        with sessions.open("mia") as session:
            assert [message.text for message in session.context()] == ["one"]


def test_a_new_session_is_never_a_resume(again: Connect) -> None:
    """S4-G3: as with `perdure.SessionManager`."""
    with again() as sessions, sessions.open("ada", new=True):
        with pytest.raises(SessionError, match="session ada exists"):
            sessions.open("ada", new=True)


def test_load_list_exists_and_delete(again: Connect) -> None:
    with again() as sessions:
        assert sessions.load("mia") is None
        with pytest.raises(SessionNotFoundError):
            sessions.open("mia", create=False)
        with sessions.open("mia", owner="ada", tags=["vip"]) as session, session.turn():
            session.append(Message.user("Hello"))
        view = sessions.load("mia")
        assert view is not None
        assert view.key.agent == "mia"
        assert view.settled
        assert view.info.metadata.owner == "ada"
        assert view.restore_report.head == view.seq == session.version
        assert view.context("openai") == [{"role": "user", "content": "Hello"}]
        assert [item.value.text for item in view.history() if item.kind == "message"] == ["Hello"]
        assert view.memory.keys() == view.state.keys() == []
        assert [info.key.agent for info in sessions.list()] == ["mia"]
        assert sessions.delete("mia")
        assert not sessions.exists("mia")


def test_autosave_goes_on_while_the_caller_blocks(again: Connect, backing: MemoryBacking) -> None:
    saved = threading.Event()
    with again(autosave=Autosave(debounce=0.01, max_delay=0.02)) as sessions:
        sessions.on("saved", lambda facts: saved.set())
        session = sessions.open("mia")
        version = session.append(Message.user("Hello"))
        assert saved.wait(30)  # the caller's own thread does nothing else
        assert session.durable_version == version
        assert session.unsaved_age == 0


def test_flush_makes_everything_durable(again: Connect) -> None:
    with again(autosave=None) as sessions:
        opened = [sessions.open(name) for name in "abc"]
        for session in opened:
            session.append(Message.user("Hello"))
        assert sessions.health().unsaved_bytes > 0
        sessions.flush()
        assert [one.version - one.durable_version for one in opened] == [0, 0, 0]
        assert sessions.health().status == "ok"


def test_settings_can_be_tuned_while_it_runs(again: Connect) -> None:
    with again(autosave=None) as sessions:
        session = sessions.open("mia")
        sessions.tune(Autosave.write_through())
        assert session.wait_durable(session.append(Message.user("Hello"))).version == 2


def test_a_manager_that_drains_opens_nothing_new(again: Connect) -> None:
    with again() as sessions:
        sessions.drain()
        with pytest.raises(SessionClosedError, match="stopping"):
            sessions.open("mia")


def test_what_cannot_be_saved_is_raised_when_with_is_left(backing: MemoryBacking) -> None:
    store = FaultyStore(MemoryStore(backing=backing), fail_on="append_many", times=None)
    sessions = perdure.sync.connect(store, shutdown=Shutdown(deadline=0, turn_grace=0))
    with pytest.raises(UnsavedChangesError, match="mia"), sessions:
        sessions.open("mia").append(Message.user("Hello"))


def test_an_error_in_the_body_is_not_replaced(again: Connect) -> None:
    with pytest.raises(ZeroDivisionError), again() as sessions:
        sessions.open("mia").append(Message.user("Hello"))
        1 / 0  # noqa: B018
    with again() as sessions:
        assert sessions.exists("mia")


def test_close_gives_its_report_as_often_as_it_is_asked(again: Connect) -> None:
    sessions = again()
    reports: list[object] = [sessions.close()]
    threads = [threading.Thread(target=lambda: reports.append(sessions.close())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(report) for report in reports}) == 1
    assert len(reports) == 4


def test_several_threads_may_close_at_once(again: Connect) -> None:
    sessions = again()
    sessions.open("mia").append(Message.user("Hello"))
    reports: list[object] = []
    threads = [threading.Thread(target=lambda: reports.append(sessions.close())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 4
    assert len(set(map(id, reports))) == 1


def test_a_closed_manager_says_so(again: Connect) -> None:
    with again() as sessions:
        session = sessions.open("mia")
        version = session.append(Message.user("Hello"))
    for act in (
        lambda: sessions.open("mia"),
        sessions.list,
        sessions.health,
        sessions.__enter__,
        lambda: session.append(Message.user("late")),
        session.save,
        session.turn().__enter__,
    ):
        with pytest.raises(SessionClosedError, match="closed"):
            act()
    assert session.durable_version == version
    assert session.context()[0].text == "Hello"
    assert session.info.messages == 1
    assert "closed" in repr(sessions)


def test_a_wait_that_nothing_will_end_ends_with_the_manager(gated: GatedStore) -> None:
    sessions = perdure.sync.connect(gated, autosave=None, shutdown=QUIET)
    session = sessions.open("mia")
    session.append(Message.user("Hello"))
    errors: list[Exception] = []

    def wait() -> None:
        try:
            session.wait_durable(session.version + 1)
        except SessionClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not sessions._loop._calls:
        pass
    sessions.close()
    thread.join()
    assert len(errors) == 1


def test_ctrl_c_ends_the_wait_and_not_the_save(
    gated: GatedStore, ctrl_c_when: Callable[[threading.Event], None]
) -> None:
    with perdure.sync.connect(gated, autosave=None, shutdown=QUIET) as sessions:
        session = sessions.open("mia")
        version = session.append(Message.user("Hello"))
        gated.gate.clear()
        ctrl_c_when(gated.entered)
        with pytest.raises(KeyboardInterrupt):
            session.save()
        assert session.durable_version < version
        gated.gate.set()
        assert session.wait_durable().version == version


def test_ctrl_c_ends_the_wait_and_not_the_closing(
    gated: GatedStore, ctrl_c_when: Callable[[threading.Event], None], again: Connect
) -> None:
    sessions = perdure.sync.connect(gated, autosave=None, shutdown=QUIET)
    sessions.open("mia").append(Message.user("Hello"))
    gated.gate.clear()
    ctrl_c_when(gated.entered)
    with pytest.raises(KeyboardInterrupt):
        sessions.close()
    gated.gate.set()
    assert sessions.close().saved == 1
    with again() as sessions:
        assert sessions.load("mia").context()[0].text == "Hello"  # type: ignore[union-attr]


def test_ctrl_c_in_a_body_saves_what_was_accepted(again: Connect, backing: MemoryBacking) -> None:
    with pytest.raises(KeyboardInterrupt), again(autosave=None) as sessions:
        session = sessions.open("mia")
        with session.turn():
            session.append(Message.user("Hello"))
            raise KeyboardInterrupt
    with again() as sessions, sessions.open("mia") as session:
        assert [message.text for message in session.context()] == ["Hello"]
        assert phases(backing, session) == ["begin", "interrupted"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_not_hang(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        session.append(Message.user("Hello"))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(WrongLoopError, match="in the child process"):
                    session.append(Message.user("from the child"))
                with pytest.raises(WrongLoopError):
                    sessions.close()
                assert repr(session)
                assert session.context()[0].text == "Hello"
                session.__exit__(None, None, None)
                sessions.__exit__(None, None, None)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        session.append(Message.user("still here"))
    with again() as sessions:
        assert len(sessions.load("mia").context()) == 2  # type: ignore[union-attr]


def test_threads_lose_and_double_nothing(again: Connect, backing: MemoryBacking) -> None:
    def work(name: str, count: int) -> None:
        with sessions.open("shared") as session:
            for number in range(count):
                with session.turn():
                    session.append(Message.user(f"{name} {number}"))
                    session.append(Message.assistant("ok"))

    with again() as sessions:
        threads = [threading.Thread(target=work, args=(name, 10)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with again() as sessions, sessions.open("shared") as session:
        texts = [message.text for message in session.context() if message.role == "user"]
        assert sorted(texts) == sorted(f"{name} {n}" for name in "abcd" for n in range(10))
        # No turn of one thread has anything of another's in it.
        assert phases(backing, session) == ["begin", "end"] * 40


def test_codec_code_of_the_user_cannot_wait_for_itself(again: Connect) -> None:
    with again() as sessions:
        found: list[Exception] = []

        def inside() -> None:
            try:
                sessions.health()
            except WrongLoopError as error:
                found.append(error)

        sessions._loop.do(inside)
        assert "wait for itself" in str(found[0])


def test_engine_options_are_passed_on(again: Connect) -> None:
    with again(engine=EngineOptions(outage_policy="reject"), autosave=None) as sessions:
        assert sessions.health().status == "ok"


def test_a_dict_of_a_role_and_text_is_a_message(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        session.append({"role": "user", "content": "hello"})
        with pytest.raises(NotStorableError, match="extend"):
            session.append({"role": "user", "content": ["hello"]})
        assert [message.text for message in session.context()] == ["hello"]


async def test_a_loop_that_it_would_block_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(RuntimeWarning, match=r"blocks the event loop .*to_thread"):
        perdure.sync.connect("memory:", shutdown=QUIET).close()
    await anyio.to_thread.run_sync(lambda: perdure.sync.connect("memory:", shutdown=QUIET).close())
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # as in a notebook
    perdure.sync.connect("memory:", shutdown=QUIET).close()
