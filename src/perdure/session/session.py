"""The session that users hold: history, memory, state, checkpoints, and views of it.

A session belongs to the event loop that opened it, and is written by one process at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from perdure._lib.designs import lookup
from perdure._lib.logs import card
from perdure._lib.misnamed import Misnamed
from perdure._lib.task_scope import turns
from perdure.autosave.tracked import State
from perdure.errors import InvalidArgumentError
from perdure.records.media import holds_references
from perdure.records.records import Record
from perdure.restore.ladder import RestoredSession
from perdure.session.base import Receipt, SessionBase
from perdure.session.contents import PAGE, Contents, HistoryItem, ReadableSession, meta_entry
from perdure.session.contributors import Attachment, Contributor
from perdure.session.fork import fork_unsaved
from perdure.session.runtime import Runtime

if TYPE_CHECKING:
    from perdure.autosave.options import AutosaveStatus
    from perdure.autosave.tracked import Tracked
    from perdure.checkpoints.engine import CheckpointEngine, CheckpointReader
    from perdure.checkpoints.events import KernelEventReader, KernelEventStream
    from perdure.providers import Issuer
    from perdure.providers.context_fit import Format
    from perdure.records.types import Registry
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.restore.report import RestorePlan
    from perdure.session.fork import Fork, History
    from perdure.session.lifecycle import SessionLifecycle
    from perdure.store import Store


@final
class Session(SessionBase):
    """One conversation and its state, written by one process at a time.

    Made by ``SessionManager.open``. Callers in the process that open the same id share the
    object; leaving ``async with`` only lets go of it, and autosave continues.
    It belongs to the event loop that opened it.
    """

    __slots__ = ("__weakref__", "_checkpoints", "_lifecycle")  # adapters know more of a session

    if not TYPE_CHECKING:
        __getattr__ = lookup

    def __init__(
        self,
        runtime: Runtime,
        lifecycle: SessionLifecycle,
        restored: RestoredSession,
        tracked: Tracked,
    ) -> None:
        super().__init__(runtime, restored, tracked)
        self._lifecycle = lifecycle
        self._checkpoints: CheckpointEngine | None = None

    def __repr__(self) -> str:
        return (
            f"<Session {self.key} {self._state()} version={self.version} "
            f"durable={self.durable_version}>"
        )

    def _repr_html_(self) -> str:
        about = self.info
        facts = {
            "title": about.metadata.title or "",
            "state": self._state(),
            "turns": about.turns,
            "records": self.version,
            "durable up to": self.durable_version,
            "unsaved for": f"{self.unsaved_age:.1f} s",
        }
        return card(f"Session {self.key}", facts)

    def _state(self) -> str:
        if self._closed_by is not None or not self._runtime.host.running:
            return "closed"
        return "open" if self._tracked.end is None else self._tracked.end.value

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lifecycle.unpin(self)

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self._contents.key.agent

    @property
    def unsaved_age(self) -> float:
        """Seconds since the oldest change that is not durable, 0 when all is saved."""
        return self._runtime.saver.unsaved_age(self._tracked)

    @property
    def autosave(self) -> AutosaveStatus:
        """The settings by which it saves itself, the manager's or its own, and those in force."""
        return self._runtime.saver.status(self._tracked)

    @property
    def checkpoints(self) -> CheckpointEngine:
        """Its checkpoints: labelled points to inspect and to roll back to."""
        if self._checkpoints is None:
            from perdure.checkpoints.engine import CheckpointEngine
            from perdure.session.checkpoints import journal_of

            self._checkpoints = CheckpointEngine(journal_of(self))
        return self._checkpoints

    @property
    def events(self) -> KernelEventStream:
        """Its kernel events: what an agent did, on the session's logical clock."""
        from perdure.checkpoints.events import KernelEventStream
        from perdure.session.checkpoints import journal_of

        return KernelEventStream(journal_of(self))

    async def extend(
        self, history: Iterable[Any], format: Format, *, issuer: Issuer | str | None = None
    ) -> Receipt:
        """Append another program's history as one group, and return once it is durable.

        Nothing of it is lost: `context` in the same format gives it back as it came, and in any
        other what that provider takes.

        Args:
            history: The messages as the provider's API takes them, oldest first: dicts, or the
                SDK's objects. Instructions that stand apart come with it in a dict of the
                request: ``{"system": …, "messages": …}``.
            format: Whose API it is for: ``"openai"``, ``"openai-responses"``, ``"anthropic"``
                or ``"gemini"``.
            issuer: Who wrote its answers, if that is not the one whose format it is.

        Raises:
            InvalidArgumentError: There is no such format.
            FormatError: Something in it is invalid; nothing was appended. The error names
                the message by its ``index``, the ``field``, and the cure.
            NotStorableError: A message cannot be stored; nothing was appended.
            TooLargeError: A message is larger than ``Limits.record_bytes``; nothing was appended.

        """
        self._append(self._parsed(history, format, issuer), self._turn_of(turns.get()))
        return await self.save()

    def describe(
        self,
        *,
        title: str | None = None,
        tags: list[str] | None = None,
        owner: str | None = None,
        **metadata: Any,
    ) -> int:
        """Change what is said about the session, and return the new version.

        Credentials in the metadata, known by keys such as ``api_key``, are not stored.

        Raises:
            InvalidArgumentError: The title, the owner or a tag is no text.
            NotStorableError: The metadata is not JSON; the error names path and type.

        """
        return self._accept((meta_entry(title=title, tags=tags, owner=owner, metadata=metadata),))

    async def attach(self, contributor: Contributor) -> Attachment:
        """Keep a contributor's state with this session: a plugin's, a tool's.

        What is stored of it is restored before this returns. From then on it is asked for its
        state before each save; a state that has not changed writes nothing.

        Raises:
            InvalidArgumentError: Another contributor of this name is attached.
            UnsupportedVersionError: What is stored is newer than the contributor, or older
                and it cannot migrate; it stays as it is.

        """
        return await self._attach(contributor, restore=True)

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are not durable: also of a session that was lost."""
        return self._tracked.pending_records()

    def retry(self) -> None:
        """Try again to save a quarantined session, now that the cause is mended."""
        self._check_open()
        self._runtime.saver.retry(self._tracked)

    async def discard_unsaved(self) -> int:
        """Drop the records that are not durable, and return how many.

        A way out of quarantine: what the session holds afterwards is what the store has. What is
        appended meanwhile goes with it. Of a session that was lost, it confirms that they are not
        needed; that session stays closed.

        Raises:
            SessionError: The session is neither quarantined nor lost.
            StoreError: The store cannot be read: nothing was dropped.

        """
        self._check_home()
        if self._tracked.end is State.LOST:
            return self._runtime.saver.discard(self._tracked)
        self._check_open()
        return await self._runtime.host.call(self._lifecycle.discard, self)

    async def fork_unsaved(
        self, new_id: str, *, new_session: str | None = None, history: History = "full"
    ) -> Fork:
        """Begin a session with what is durable of this one, and what is not; it is durable then.

        A way out of quarantine and of a lost lease: nothing that was said here is lost. This
        session stays as it is; one that was lost is not named by `health` any more.

        Raises:
            SessionError: A session of the new id exists.
            StoreError: The store refuses a record there, too.

        """
        self._check_home()
        return await fork_unsaved(
            self._runtime,
            self._lifecycle,
            self._tracked,
            new_id,
            new_session=new_session,
            history=history,
        )

    async def wait_durable(self, version: int | None = None) -> Receipt:
        """Wait until a version (None: the newest) is durable, without hurrying the save.

        One that no append has returned yet is waited for as well.
        """
        self._check_home()
        if version is not None and type(version) is not int:
            raise InvalidArgumentError(
                f"invalid version={version!r}: give what append returned, or None", option="version"
            )
        runtime = self._runtime
        durable = await runtime.saver.wait_durable(self._tracked, version)
        return Receipt(durable, runtime.durability)

    async def history(self, *, before: int | None = None, limit: int = PAGE) -> list[HistoryItem]:
        """Return up to ``limit`` items, oldest first; page back by the first one's seq."""
        self._check_home()
        tracked = self._tracked
        unsaved = reversed(tracked.pending_records())
        return await self._contents.history(
            before=before, limit=limit, unsaved=unsaved, durable=tracked.durable
        )

    if not TYPE_CHECKING:
        close = Misnamed("await session.aclose()")
        add_message = Misnamed("session.append(Message.user(…))")
        messages = Misnamed("session.context(), or await session.history()")

    async def aclose(self) -> None:
        """Save, fold and release the session for every caller in this process.

        Turns that run or wait end first. A session that is closed already stays so.

        Raises:
            LeaseLostError: Another process has taken it over, and records are unsaved here that
                were neither forked nor discarded.
            SessionError: This task is in a turn of the session.
            UnsavedChangesError: Not everything could be made durable in time; it stays open.

        """
        self._check_home()
        await self._lifecycle.close(self)

    async def plan_restore(
        self,
        target: Format | None = None,
        *,
        system_prompt: str | None = None,
        options: WorkingContextSnapshotBootstrapOptions | None = None,
    ) -> RestorePlan:
        """Plan what would come back after a kill at this moment, and what would be mended, and why.

        Changes nothing; `apply` does what it says. As `SessionManager.plan_restore`, which
        does the same for a session that is not open.

        Args:
            target: The provider that the context is meant for: what would be stripped for it.
            system_prompt: The processed prompt that an agent would be restored with.
            options: How an agent would be restored. Without either, the plan is for a session
                that no agent of perdure works on.

        Raises:
            InvalidArgumentError: The target is unknown; or the system prompt has changed, and the
                options' policy is "error".
            CorruptRecordError: A document is damaged, and the options are strict.

        """
        from perdure.session.plan import plan_of

        self._check_open()
        return await plan_of(
            self._runtime,
            self._tracked.key,
            target=target,
            system_prompt=system_prompt,
            options=options,
        )

    async def apply(self, plan: RestorePlan) -> int:
        """Do what a plan says, durably, and return the new version.

        Results that were made up are appended; where that is not enough, a record replaces the
        working context. Nothing is erased.

        Raises:
            StalePlanError: The session has changed since the plan was made, or has unsaved
                changes: save it, and plan again.

        """
        from perdure.session.plan import carry_out

        self._check_open()
        carry_out(self, plan)
        return await self._runtime.saver.save(self._tracked)


@final
class SessionView(ReadableSession):
    """Read-only view of a session as of ``seq``, without a lease: from ``SessionManager.load``."""

    __slots__ = ("_epoch", "_newest", "seq")

    def __init__(self, store: Store, registry: Registry, restored: RestoredSession) -> None:
        self._behind = Contents(store, registry, restored, self)
        self.seq: int = restored.head
        """The last record that it shows."""
        self._epoch = restored.epoch
        newest = restored.newest
        # With media, their blobs have to be read.
        has_media = any(holds_references(record.payload) for record in newest)
        self._newest = () if has_media else newest

    def __repr__(self) -> str:
        return f"<SessionView {self.key} seq={self.seq}>"

    @property
    def settled(self) -> bool:
        """False when a takeover was under way, so that the newest records may be missing."""
        return self._behind.report.settled

    @property
    def checkpoints(self) -> CheckpointReader:
        """Its checkpoints, as of ``seq``."""
        from perdure.checkpoints.engine import CheckpointReader
        from perdure.session.checkpoints import reading_of

        return CheckpointReader(reading_of(self, self.seq))

    @property
    def events(self) -> KernelEventReader:
        """Its kernel events, as of ``seq``."""
        from perdure.checkpoints.events import KernelEventReader
        from perdure.session.checkpoints import reading_of

        return KernelEventReader(reading_of(self, self.seq))

    async def history(self, *, before: int | None = None, limit: int = PAGE) -> list[HistoryItem]:
        """Return up to ``limit`` items of the log, oldest first; as for `Session.history`."""
        before = self.seq + 1 if before is None else min(before, self.seq + 1)
        newest = self._newest
        durable = newest[-1].seq - 1 if newest else None
        return await self._behind.history(
            before=before, limit=limit, unsaved=newest, durable=durable
        )
