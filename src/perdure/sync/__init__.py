"""perdure for blocking code: scripts, notebooks, frameworks without an event loop.

    import perdure.sync
    from perdure import Message

    with perdure.sync.connect("file:~/agents") as sessions:
        with sessions.open("my-assistant") as session:
            with session.turn():
                session.append(Message.user("Hello"))

The same names as in `perdure`, without ``await``; ``aclose`` is ``close``. A manager keeps a
loop in a thread of its own, so autosave continues while the caller's code blocks, and every
thread of the process may use it. This package only passes calls on, as `perdure.sync.mirror` does
it; why each method is declared is in docs/decisions/0107-the-blocking-mirror-is-declared.md. A
docstring here says what a method does and what is different about it; its arguments and errors are
those of the method of the same name in `perdure`.
"""

from __future__ import annotations

from perdure.sync.manager import SessionManager, connect
from perdure.sync.session import (
    Archives,
    Attachment,
    CheckpointEngine,
    CheckpointReader,
    Contributor,
    KernelEventReader,
    KernelEventStream,
    LostSession,
    PartialReply,
    Scope,
    Session,
    SessionView,
    States,
    Turn,
    TypedState,
    WorkingMemory,
)

__all__ = [
    "Archives",
    "Attachment",
    "CheckpointEngine",
    "CheckpointReader",
    "Contributor",
    "KernelEventReader",
    "KernelEventStream",
    "LostSession",
    "PartialReply",
    "Scope",
    "Session",
    "SessionManager",
    "SessionView",
    "States",
    "Turn",
    "TypedState",
    "WorkingMemory",
    "connect",
]
