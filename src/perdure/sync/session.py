"""Sessions and views of them in blocking style.

Any thread may use them. Numbers are read as they stand; everything else is done in the
manager's own thread, one thing at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from perdure.sync.checkpoints import CheckpointEngine, CheckpointReader, EventReader, EventStream
from perdure.sync.contributors import Attachment, Contributor, relayed
from perdure.sync.memory import States, WorkingMemory
from perdure.sync.rendering import Rendered
from perdure.sync.restoring import Planned
from perdure.sync.turn import InTurn, Turn

if TYPE_CHECKING:
    from perdure.codec.encoded import Encoded
    from perdure.memory.documents import SessionDocument
    from perdure.model.keys import SessionKey
    from perdure.model.messages import Message
    from perdure.model.records import Record
    from perdure.providers import Format, Issuer
    from perdure.restore.report import RestoreReport
    from perdure.session import lost, session, view
    from perdure.session.contents import HistoryItem
    from perdure.session.contributors import Contributor as AsyncContributor
    from perdure.session.forking import Forked
    from perdure.session.session import Receipt
    from perdure.sync.loop import LoopThread

__all__ = ["LostSession", "Session", "SessionView"]


@final
class LostSession:
    """A session that can be written no more, and the records of it that are only in memory.

    As `perdure.LostSession`, blocking.
    """

    def __init__(self, loop: LoopThread, inner: lost.LostSession) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._inner.key

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self._inner.id

    @property
    def epoch(self) -> int:
        """The number of the lease that was lost."""
        return self._inner.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._inner.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that the store had acknowledged."""
        return self._inner.durable_version

    @property
    def error(self) -> Exception | None:
        """What the store said when the session was lost."""
        return self._inner.error

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are only in memory."""
        return self._loop.read(self._inner.unsaved)

    def fork_unsaved(self, new_id: str, *, new_session: str | None = None) -> Forked:
        """Begin a session with what is durable of this one, and what is not; it is durable then.

        As `perdure.LostSession.fork_unsaved`.
        """
        return self._loop.call(lambda: self._inner.fork_unsaved(new_id, new_session=new_session))

    def discard_unsaved(self) -> int:
        """Drop the records that are only in memory, and return how many."""
        return self._loop.call(self._inner.discard_unsaved)


@final
class Session(Planned, Rendered):
    """One conversation and its state: ``with sessions.open("my-assistant") as session``.

    As `perdure.Session`, blocking. Whoever opens the same id shares the object, in whichever
    thread; leaving ``with`` only lets go of it, and autosave goes on.
    """

    def __init__(self, loop: LoopThread, inner: session.Session) -> None:
        self._loop = loop
        self._inner = inner
        self._in_turn = InTurn()

    def __repr__(self) -> str:
        return repr(self._inner)

    def _repr_html_(self) -> str:
        return self._loop.read(self._inner._repr_html_)

    def __enter__(self) -> Self:
        self._loop.call(self._inner.__aenter__)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._loop.usable:  # else there is nothing left to let go of
            self._loop.call(lambda: self._inner.__aexit__(exc_type, exc, traceback))

    # what it is

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._inner.key

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self._inner.id

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times, as of now."""
        return self._loop.read(lambda: self._inner.info)

    @property
    def epoch(self) -> int:
        """This holder's number, which is the fencing token."""
        return self._inner.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._inner.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that is durable."""
        return self._inner.durable_version

    @property
    def unsaved_age(self) -> float:
        """Seconds since the oldest change that is not durable, 0 when all is saved."""
        return self._loop.read(lambda: self._inner.unsaved_age)

    @property
    def restore_report(self) -> RestoreReport:
        """How it came back; a document that loads later and is damaged is added when it does."""
        return self._inner.restore_report

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first asked."""
        return WorkingMemory(self._loop, self._inner.memory)

    @property
    def state(self) -> States:
        """Named states; each loads when it is first asked for."""
        return States(self._loop, self._inner.state)

    @property
    def checkpoints(self) -> CheckpointEngine:
        """Its checkpoints: labelled points to look at and to go back to."""
        return CheckpointEngine(self._loop, self._inner.checkpoints)

    @property
    def events(self) -> EventStream:
        """Its kernel events: what an agent did, on the session's logical clock."""
        return EventStream(self._loop, self._inner.events)

    # changing it

    def append(self, *items: Message | Encoded | Any) -> int:
        """Append items as one group, and return the new version.

        As `perdure.Session.append`. What was accepted is saved even if Ctrl-C comes before this
        returns.
        """
        return self._loop.do(lambda: self._inner.append(*items))

    def extend(
        self, history: Iterable[Any], format: Format, *, issuer: Issuer | str | None = None
    ) -> Receipt:
        """Append another program's history as one group, and return once it is durable.

        As `perdure.Session.extend`.
        """
        return self._loop.call(lambda: self._inner.extend(history, format, issuer=issuer))

    def describe(
        self,
        *,
        title: str | None = None,
        tags: list[str] | None = None,
        owner: str | None = None,
        **metadata: Any,
    ) -> int:
        """Change what is said about the session, and return the new version.

        As `perdure.Session.describe`.
        """
        return self._loop.do(
            lambda: self._inner.describe(title=title, tags=tags, owner=owner, **metadata)
        )

    def attach(self, contributor: Contributor | AsyncContributor) -> Attachment:
        """Keep the state of somebody else with this session: a plugin's, a tool's.

        As `perdure.Session.attach`. Plain methods of a contributor are called in a thread of
        their own, async ones in the manager's loop.
        """
        attached = self._loop.call(lambda: self._inner.attach(relayed(self._inner, contributor)))
        return Attachment(self._loop, attached)

    def turn(self, id: str | None = None, *, resume: bool = False) -> Turn:
        """Return a turn to enter: ``with session.turn() as turn``.

        As `perdure.Session.turn`.
        """
        return Turn(self._loop, self, self._inner.turn(id, resume=resume), self._in_turn)

    def save(self) -> Receipt:
        """Make everything that was appended durable, now, and return the proof.

        As `perdure.Session.save`. Ctrl-C ends the wait, not the save.
        """
        return self._loop.call(self._inner.save)

    def retract(self, *, after: int) -> int:
        """Take the conversation back to what it was at a record, and return the new version.

        As `perdure.Session.retract`.
        """
        return self._loop.call(lambda: self._inner.retract(after=after))

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are not durable: also of a session that was lost."""
        return self._loop.read(self._inner.unsaved)

    def retry(self) -> None:
        """Try again to save a quarantined session, now that the cause is mended."""
        self._loop.do(self._inner.retry)

    def discard_unsaved(self) -> int:
        """Drop the records that are not durable, and return how many; a way out of quarantine.

        As `perdure.Session.discard_unsaved`.
        """
        return self._loop.call(self._inner.discard_unsaved)

    def fork_unsaved(self, new_id: str, *, new_session: str | None = None) -> Forked:
        """Begin a session with what is durable of this one, and what is not; it is durable then.

        As `perdure.Session.fork_unsaved`.
        """
        return self._loop.call(lambda: self._inner.fork_unsaved(new_id, new_session=new_session))

    def wait_durable(self, version: int | None = None) -> Receipt:
        """Wait until a version (None: the newest) is durable, without hurrying the save."""
        return self._loop.call(lambda: self._inner.wait_durable(version))

    # reading it

    def history(self, *, before: int | None = None, limit: int = 50) -> list[HistoryItem]:
        """Return up to ``limit`` items, oldest first; page back by the first one's seq."""
        return self._loop.call(lambda: self._inner.history(before=before, limit=limit))

    def close(self) -> None:
        """Save, fold and let go of the session for everybody in this process.

        As `perdure.Session.aclose`.

        Raises:
            SessionError: This thread is in a turn of the session.
            UnsavedChangesError: Not everything could be made durable in time; it stays open.

        """
        self._in_turn.refuse(self.key, "closing the session")
        self._loop.call(self._inner.aclose)


@final
class SessionView(Rendered):
    """What ``SessionManager.load`` returns: read-only, as of ``seq``, in nobody's way."""

    def __init__(self, loop: LoopThread, inner: view.SessionView) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def seq(self) -> int:
        """The last record that it shows."""
        return self._inner.seq

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._inner.key

    @property
    def settled(self) -> bool:
        """False when a takeover was under way, so that the newest records may be missing."""
        return self._inner.settled

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times."""
        return self._inner.info

    @property
    def restore_report(self) -> RestoreReport:
        """How it was read."""
        return self._inner.restore_report

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first asked."""
        return WorkingMemory(self._loop, self._inner.memory)

    @property
    def state(self) -> States:
        """Named states; each loads when it is first asked for."""
        return States(self._loop, self._inner.state)

    @property
    def checkpoints(self) -> CheckpointReader:
        """Its checkpoints, as of ``seq``."""
        return CheckpointReader(self._loop, self._inner.checkpoints)

    @property
    def events(self) -> EventReader:
        """Its kernel events, as of ``seq``."""
        return EventReader(self._loop, self._inner.events)

    def history(self, *, before: int | None = None, limit: int = 50) -> list[HistoryItem]:
        """Return up to ``limit`` items of the log, oldest first; as for `Session.history`."""
        return self._loop.call(lambda: self._inner.history(before=before, limit=limit))
