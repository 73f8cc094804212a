"""Code that type checkers must accept: how people use `perdure.sync`. It is never run."""

# pyright: strict
from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

from perdure import Autosave, Message
from perdure.sync import (
    Attachment,
    Contributor,
    PartialReply,
    Scope,
    Session,
    SessionManager,
    SessionView,
    States,
    Turn,
    TypedState,
    WorkingMemory,
    connect,
)
from perdure.types import PostReceipt, Receipt, ScopeChange, ShutdownReport


def a_script() -> None:
    with connect("file:~/agents", autosave=Autosave()) as sessions:
        assert_type(sessions, SessionManager)
        with sessions.open("mia") as session:
            assert_type(session, Session)
            with session.turn() as turn:
                assert_type(turn, Turn)
                assert_type(session.append(Message.user("Hello")), int)
                turn.emit("Hello", print)
                with turn.partial() as reply:
                    assert_type(reply, PartialReply)
                    assert_type(reply.add("Hello"), str)
                assert_type(reply.message, Message | None)
            assert_type(session.save(), Receipt)
            assert_type(session.memory, WorkingMemory)
            assert_type(session.state, States)
            assert_type(session.memory.get("city"), Any)
            assert_type(session.memory.search("city", limit=3)[0].key, str)
        assert_type(sessions.post("mia", Message.user("Hello"), key="k"), PostReceipt)
        assert_type(sessions.load("mia"), SessionView | None)
        scope = sessions.scope("user:mia")
        assert_type(scope, Scope)
        with scope.edit() as values:
            assert_type(values, dict[str, Any])
        assert_type(scope.history(), list[ScopeChange])
        assert_type(sessions.on("saved", lambda event: event.took), Callable[[], None])
        sessions.on("before_save", lambda session: session.append(Message.user("Hello")))
        assert_type(sessions.close(), ShutdownReport)


class Counter:
    """A contributor with plain methods."""

    name = "counter"
    version = 1

    def capture(self) -> int:
        return 1

    def restore(self, state: Any, context: object) -> None: ...


def a_contributor(session: Session) -> None:
    plugin: Contributor = Counter()
    assert_type(session.attach(plugin), Attachment)


def a_typed_state(session: Session) -> None:
    app = session.state.typed("app", list[int])
    assert_type(app, TypedState[list[int]])
    assert_type(app.get(), list[int] | None)
    assert_type(app.set([1]), int)
