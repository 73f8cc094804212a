"""A session as it was at a moment, to read without a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

from perdure.errors import SessionError
from perdure.records.records import Entry
from perdure.session.contents import Contents, HistoryItem
from perdure.session.session import Rendered

if TYPE_CHECKING:
    from perdure.checkpoints.engine import CheckpointReader
    from perdure.checkpoints.events import KernelEventReader
    from perdure.memory.documents import SessionDocument
    from perdure.memory.state import States
    from perdure.memory.working_memory import WorkingMemory
    from perdure.records.keys import SessionKey
    from perdure.records.types import Registry
    from perdure.restore.ladder import RestoredSession
    from perdure.restore.report import RestoreReport
    from perdure.store import Store


@final
class SessionView(Rendered):
    """What ``SessionManager.load`` returns: read-only, as of ``seq``, in nobody's way."""

    __slots__ = ("_contents", "seq")

    def __init__(self, store: Store, registry: Registry, restored: RestoredSession) -> None:
        self._contents = Contents(store, registry, restored, self._refuse)
        self.seq: int = restored.head
        """The last record that it shows."""

    def __repr__(self) -> str:
        return f"<SessionView {self.key} seq={self.seq}>"

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._contents.key

    @property
    def settled(self) -> bool:
        """False when a takeover was under way, so that the newest records may be missing."""
        return self._contents.report.settled

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times."""
        return self._contents.describe()

    @property
    def restore_report(self) -> RestoreReport:
        """How it was read."""
        return self._contents.report

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first awaited."""
        return self._contents.memory

    @property
    def state(self) -> States:
        """Named states; each loads when it is first awaited."""
        return self._contents.state

    @property
    def checkpoints(self) -> CheckpointReader:
        """Its checkpoints, as of ``seq``."""
        from perdure.session.checkpoints import view_checkpoints

        return view_checkpoints(self)

    @property
    def events(self) -> KernelEventReader:
        """Its kernel events, as of ``seq``."""
        from perdure.session.checkpoints import view_events

        return view_events(self)

    async def history(self, *, before: int | None = None, limit: int = 50) -> list[HistoryItem]:
        """Return up to ``limit`` items of the log, oldest first; as for `Session.history`."""
        before = self.seq + 1 if before is None else min(before, self.seq + 1)
        return await self._contents.history(before=before, limit=limit)

    def _refuse(self, entries: tuple[Entry, ...]) -> NoReturn:
        message = f"this view of session {self.key} is read-only: open the session to change it"
        raise SessionError(message, key=str(self.key), entries=len(entries))
