"""The session: what users append to, and what saves itself.

An append touches as little as it can, because with very many sessions fetching a session's
memory is most of what it costs. What was appended reaches the contents when somebody looks at
them, or while the store is busy with it; never later than that, since it leaves memory then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, final, overload

import msgspec

from perdure.autosave.tracked import State
from perdure.errors import ConfigError
from perdure.memory.context import RetractionPayload
from perdure.memory.documents import SessionDocument, TurnPayload, note_turn
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.message_format import EncodedRecord
from perdure.records.messages import Message
from perdure.records.records import CONTEXT, RETRACT, TURN, Entry, Record
from perdure.restore.ladder import RestoredSession
from perdure.restore.report import RestoreReport, RestoreStep
from perdure.session.contents import Contents, HistoryItem, room_of
from perdure.session.contributors import Attachment, Contributor, Contributors
from perdure.session.display import session_card, session_text
from perdure.session.entries import check_sizes, entry_of, meta_entry
from perdure.session.internals import attach
from perdure.session.lost import fork_unsaved, unsaved_records
from perdure.session.runtime import Runtime, wrong_loop
from perdure.session.turn import Turn, TurnQueue

if TYPE_CHECKING:
    from perdure.autosave.tracked import Tracked
    from perdure.checkpoints.engine import CheckpointEngine
    from perdure.checkpoints.events import KernelEventStream
    from perdure.memory.state import States
    from perdure.memory.working_memory import WorkingMemory
    from perdure.providers import Issuer, ReasoningPolicy, RenderedContext
    from perdure.providers.target import Format
    from perdure.records.manifest import Manifest
    from perdure.restore.bootstrapper import WorkingContextSnapshotBootstrapOptions
    from perdure.restore.plan import RestorePlan
    from perdure.session.fork import Fork
    from perdure.session.lifecycle import SessionLifecycle


# How a session takes records in: at once into autosave, and into what it shows later


class _Hot:
    """What an append touches comes first, and so lies side by side in memory."""

    __slots__ = ("_closed_by", "_runtime", "_tracked")


class Accepting(_Hot):
    """The part of a session that every record passes."""

    __slots__ = ("_behind", "_noted", "_tail_bytes", "_tail_records")

    def __init__(self, runtime: Runtime, restored: RestoredSession, tracked: Tracked) -> None:
        self._runtime: Runtime = runtime
        self._tracked: Tracked = tracked
        self._closed_by: Exception | None = None
        self._hold(restored)
        tracked.on_captured = self._catch_up

    def _hold(self, restored: RestoredSession) -> None:
        """Begin with what the store has."""
        runtime = self._runtime
        self._behind: Contents = Contents(
            runtime.store,
            runtime.registry,
            restored,
            self._accept_now,
            self._catch_up,
            room_of(runtime, restored.key),
        )
        # What a save under way has brought to the store may have been read already.
        self._noted: int = max(self._tracked.durable, restored.head)
        self._tail_bytes: int = restored.tail_bytes
        self._tail_records: int = restored.tail_records

    def _accept(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in as one group; every change of the session comes through here."""
        runtime, tracked = self._runtime, self._tracked
        if tracked.refuses or runtime.running() is not runtime.loop:
            self._check_open()
        for entry in entries:
            if len(entry[1]) > runtime.max_record_bytes:
                check_sizes(
                    tracked.key, entries, runtime.max_record_bytes, most=runtime.store_record_bytes
                )
        return runtime.append(tracked, entries)

    def _accept_now(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in, and show them at once: for who holds a part of the contents."""
        version = self._accept(entries)
        self._catch_up()
        return version

    @property
    def _contents(self) -> Contents:
        """What the session holds, as of its newest record."""
        self._catch_up()
        return self._behind

    def _catch_up(self) -> None:
        """Take what was appended into the contents."""
        tracked, noted = self._tracked, self._noted
        if tracked.version <= noted:
            return
        entries = tracked.pending
        if noted > tracked.durable:
            entries = entries[noted - tracked.durable :]
        self._noted = tracked.version
        self._tail_records += len(entries)
        self._tail_bytes += sum([len(entry[1]) for entry in entries])
        self._behind.note(noted + 1, entries, tracked.epoch)

    def _shorten_tail(self, size: int, records: int) -> None:
        """Take note that so much of the log was folded."""
        self._tail_bytes = max(self._tail_bytes - size, 0)
        self._tail_records = max(self._tail_records - records, 0)

    # where, and for how long

    def _close_with(self, error: Exception) -> None:
        """Refuse every append from now on."""
        self._closed_by = error
        self._tracked.refuses = True  # so that an append has to ask for one thing only

    def _check_home(self) -> None:
        stray = self._runtime.home.stray()
        if stray is not None:
            raise wrong_loop(f"session {self._tracked.key}", stray)

    def _check_open(self) -> None:
        self._check_home()
        if self._closed_by is not None:
            raise self._closed_by


# A session's plan of its own restore: the part of the session that says so


# A working context in the shape that a model's client takes: pure


Listed = Literal["openai", "openai-responses"]
"""Formats whose conversation holds the instructions too: a context is a list of dicts."""
Separate = Literal["anthropic", "gemini"]
"""Formats with the instructions apart: a context is a `RenderedContext`."""
ContextFormat = Literal["openai", "openai-responses", "anthropic", "gemini"] | None
"""None for `Message` objects, else whose API the context is for."""


def render(
    messages: Sequence[Message],
    format: ContextFormat,
    *,
    to: Issuer | str | None = None,
    reasoning: ReasoningPolicy = "strip_foreign",
) -> list[Any] | RenderedContext:
    """Return messages in a format, as every provider of it takes them.

    Raises:
        ConfigError: There is no such format or policy.

    """
    if format is None:
        return list(messages)
    # Imported when used: who opens a session need not render it.
    from perdure.providers import FORMATS
    from perdure.providers import render as rendered

    if format not in FORMATS:
        choices = ", ".join(map(repr, FORMATS))
        message = f"context format {format!r} is unknown: choose None, {choices}"
        raise ConfigError(message, format=format)
    context = rendered(messages, format, to=to, reasoning=reasoning)
    return context if format in {"anthropic", "gemini"} else context.messages


class _Decoding(Protocol):
    def decoded(self) -> list[Message]: ...


class _SupportsContents(Protocol):
    """What the method below needs of a session, or of a view of one."""

    @property
    def _contents(self) -> _Decoding: ...


class Rendered:
    """What a model is shown of a session; `Session` and `SessionView` have this method."""

    __slots__ = ()

    @overload
    def context(
        self: _SupportsContents,
        format: Listed | None = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any]: ...

    @overload
    def context(
        self: _SupportsContents,
        format: Separate,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> RenderedContext: ...

    def context(
        self: _SupportsContents,
        format: ContextFormat = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any] | RenderedContext:
        """Return what the model sees next: the newest whole messages within the limit.

        A provider takes it as it is, whatever became of the last turn. Calls without a result are
        shown as interrupted.

        Args:
            format: None for `Message` objects, as they are in the log. ``"openai"`` and
                ``"openai-responses"`` give a list of dicts; ``"anthropic"`` and ``"gemini"`` a
                `RenderedContext` with ``messages`` and ``system``.
            to: Who reads it, if that is not the one whose format it is: ``"deepseek"``, or an
                `Issuer` with a model.
            reasoning: Who gets reasoning, signatures and unknown fields: ``"strip_foreign"``
                sends them to the one who issued them, ``"strip_all"`` to nobody, ``"keep"`` to
                whoever speaks the format.

        Raises:
            ConfigError: There is no such format or policy.

        """
        return render(self._contents.decoded(), format, to=to, reasoning=reasoning)


class Receipt(msgspec.Struct, frozen=True):
    """Proof that a session is durable up to a version."""

    version: int
    """Every record up to this seq is durable."""
    durability: str
    """What durable means on this store: "fsync", "memory", …"""


@final
class Session(Accepting, Rendered):
    """One conversation and its state, written by one process at a time.

    Made by ``SessionManager.open``. Everybody in the process who opens the same id shares the
    object; leaving ``async with`` only lets go of it, and autosave goes on.
    It belongs to the event loop that opened it.
    """

    __slots__ = (
        "_checkpoints",
        "_contributors",
        "_folding",
        "_lifecycle",
        "_may_be_cut",
        "_pins",
        "_rewrite_bytes",
        "_turns",
        "_worker",
    )

    def __init__(
        self,
        runtime: Runtime,
        lifecycle: SessionLifecycle,
        restored: RestoredSession,
        tracked: Tracked,
    ) -> None:
        super().__init__(runtime, restored, tracked)
        self._lifecycle = lifecycle
        self._turns = TurnQueue()
        self._may_be_cut = restored.turns > 0
        """Whether the newest turn may not have come to its end."""
        self._checkpoints: CheckpointEngine | None = None
        self._worker: object | None = None  # the agent that works on it, if one does
        self._contributors: Contributors | None = None  # made when the first is attached
        self._pins: int = 0
        self._folding: bool = False
        self._rewrite_bytes: int = _size(restored.manifest)

    __repr__ = session_text
    _repr_html_ = session_card

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

    # what it is

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._contents.key

    @property
    def id(self) -> str:
        """The id that it was opened with."""
        return self._contents.key.agent

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times, as of now."""
        return self._contents.describe()

    @property
    def epoch(self) -> int:
        """This holder's number, which is the fencing token."""
        return self._tracked.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self._tracked.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that is durable."""
        return self._tracked.durable

    @property
    def is_writable(self) -> bool:
        """Whether an append would be accepted: the session is open and held here."""
        return self._closed_by is None and self._tracked.writable

    @property
    def unsaved_age(self) -> float:
        """Seconds since the oldest change that is not durable, 0 when all is saved."""
        return self._runtime.saver.unsaved_age(self._tracked)

    @property
    def restore_report(self) -> RestoreReport:
        """How it came back; a document that loads later and is damaged is added when it does."""
        return self._behind.report

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first awaited."""
        return self._contents.memory

    @property
    def state(self) -> States:
        """Named states; each loads when it is first awaited."""
        return self._contents.state

    @property
    def checkpoints(self) -> CheckpointEngine:
        """Its checkpoints: labelled points to look at and to go back to."""
        if self._checkpoints is None:
            from perdure.session.checkpoints import checkpoints_of

            self._checkpoints = checkpoints_of(self)
        return self._checkpoints

    @property
    def events(self) -> KernelEventStream:
        """Its kernel events: what an agent did, on the session's logical clock."""
        from perdure.session.checkpoints import events_of

        return events_of(self)

    # changing it

    def append(self, *items: Message | EncodedRecord | Any) -> int:
        """Append items as one group, and return the new version.

        Cheap and synchronous; autosave makes it durable within its window, ``save`` at once.

        Args:
            items: Messages, encoded records, or objects of registered types.

        Raises:
            NotStorableError: An item cannot be stored; nothing was appended. It names
                the path, the type and the cure.
            TooLargeError: An item is larger than ``Limits.record_bytes``.
            LeaseLostError: Somebody else has taken the session over.
            SessionClosedError: The session, or its manager, was closed.
            SessionQuarantinedError: The store refuses a record of this session for good.
            StoreUnavailableError: Too much is unsaved, since the store is down.
            WrongLoopError: The session belongs to another loop, thread or process.

        """
        if len(items) == 1 and type(items[0]) is EncodedRecord:
            return self._accept((items[0].entry,))
        registry = self._runtime.registry
        entries = tuple([entry_of(item, registry) for item in items])
        if not entries:
            return self.version
        return self._accept(entries)

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
            ConfigError: There is no such format.
            FormatError: Something in it does not fit; nothing was appended. The error names
                the message by its ``index``, the ``field``, and the cure.
            NotStorableError: A message cannot be stored; nothing was appended.
            TooLargeError: A message is larger than ``Limits.record_bytes``; nothing was appended.

        """
        from perdure.providers import parse_history  # imported when used: few sessions need it

        self._check_open()
        self.append(*parse_history(history, format, issuer=issuer))
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
            ConfigError: The title, the owner or a tag is no text.
            NotStorableError: The metadata is not JSON; the error names path and type.

        """
        return self._accept((meta_entry(title=title, tags=tags, owner=owner, metadata=metadata),))

    async def attach(self, contributor: Contributor) -> Attachment:
        """Keep the state of somebody else with this session: a plugin's, a tool's.

        What is stored of it is restored before this returns. From then on it is asked for its
        state before each save; a state that has not changed writes nothing.

        Raises:
            ConfigError: Another contributor of this name is attached.
            UnsupportedVersionError: What is stored is newer than the contributor, or older
                and it cannot migrate; it stays as it is.

        """
        return await attach(self, contributor, restore=True)

    def turn(self, id: str | None = None, *, resume: bool = False) -> Turn:
        """Return a turn to enter: ``async with session.turn() as turn``.

        Turns run one at a time, first come, first served. Leaving one waits until it is durable.
        Entering one raises SessionError if the running turn waits for this very task: in
        ``gather``, ``wait_for``, a task group. A task that outlives the running turn waits for it.

        Args:
            id: The caller's own name for it, such as a request's id. A retry with the same
                id is the same turn: if it has ended before, ``turn.replayed`` is True. If it was
                cut before its end, what it left of the conversation is taken back.
            resume: Leave that there, to go on from it: ``turn.resumed``, ``turn.messages``.

        """
        return Turn(self, self._turns, id, resume=resume)

    async def save(self) -> Receipt:
        """Make everything that was appended durable, now, and return the proof.

        Saves of different sessions share their commits where the store can. Cancelling
        the caller does not stop the save.

        Raises:
            LeaseLostError: Somebody else has taken the session over.
            SessionQuarantinedError: The store refuses a record of this session for good.
            SessionClosedError: The manager stopped before it was durable.

        """
        self._check_home()
        return self._receipt(await self._runtime.saver.save(self._tracked))

    async def retract(self, *, after: int) -> int:
        """Take the conversation back to what it was at a record, and return the new version.

        For undo, edit and regenerate. It is appended as a record of its own: nothing is erased,
        and retracting to after it brings the rest back. Memory and states stay as they are.

        Args:
            after: The seq of the last record that stays, as ``append`` returned it.

        Raises:
            ConfigError: There is no such record.

        """
        self._check_open()
        if type(after) is not int or not 0 <= after <= self.version:
            message = f"session {self.key} has records up to {self.version}, none at {after}"
            raise ConfigError(message, after=after, version=self.version)
        entry = Entry(RETRACT, encode(RetractionPayload(after)), end=True)
        if self._contents.context.reaches(after):
            return self._accept((entry,))
        await self.save()
        context = await self._contents.as_of(after)
        return self._accept((entry, Entry(CONTEXT, context.as_record("retract"))))

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are not durable: also of a session that was lost."""
        return unsaved_records(self._tracked)

    def retry(self) -> None:
        """Try again to save a quarantined session, now that the cause is mended."""
        self._check_open()
        self._runtime.saver.retry(self._tracked)

    async def discard_unsaved(self) -> int:
        """Drop the records that are not durable, and return how many.

        A way out of quarantine: what the session holds afterwards is what the store has. Of a
        session that was lost, it decides that nobody wants them; that session stays closed.
        """
        self._check_home()
        if self._tracked.end is State.LOST:
            return self._runtime.saver.discard(self._tracked)
        self._check_open()
        return await self._runtime.host.call(self._lifecycle.discard, self)

    async def fork_unsaved(self, new_id: str, *, new_session: str | None = None) -> Fork:
        """Begin a session with what is durable of this one, and what is not; it is durable then.

        A way out of quarantine and of a lost lease: nothing that was said here is lost. This
        session stays as it is; one that was lost is not named by `health` any more.

        Raises:
            SessionError: A session of the new id exists.
            StoreError: The store refuses a record there, too.

        """
        self._check_home()
        return await fork_unsaved(
            self._runtime, self._lifecycle, self._tracked, new_id, new_session=new_session
        )

    async def wait_durable(self, version: int | None = None) -> Receipt:
        """Wait until a version (None: the newest) is durable, without hurrying the save."""
        self._check_home()
        return self._receipt(await self._runtime.saver.wait_durable(self._tracked, version))

    def _receipt(self, version: int) -> Receipt:
        return Receipt(version, self._runtime.durability)

    # reading it

    async def history(self, *, before: int | None = None, limit: int = 50) -> list[HistoryItem]:
        """Return up to ``limit`` items, oldest first; page back by the first one's seq."""
        self._check_home()
        tracked = self._tracked
        pending, durable = tracked.pending, tracked.durable
        unsaved = (
            Record(durable + at, self.epoch, entry.kind, entry.payload, entry.end)
            for at, entry in zip(range(len(pending), 0, -1), reversed(pending), strict=True)
        )
        return await self._contents.history(
            before=before, limit=limit, unsaved=unsaved, durable=durable
        )

    async def aclose(self) -> None:
        """Save, fold and let go of the session for everybody in this process.

        Turns that run or wait end first. A session that is closed already stays so.

        Raises:
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
        """Say what would come back after a kill at this moment, and what would be mended, and why.

        Changes nothing; `apply` does what it says. As `SessionManager.plan_restore`, which
        tells the same of a session that nobody has opened.

        Args:
            target: The provider that the context is meant for: what would be stripped for it.
            system_prompt: The processed prompt that an agent would be restored with.
            options: How an agent would be restored. Without either, the plan is for a session
                that no agent of perdure works on.

        Raises:
            ConfigError: The target is unknown; or the system prompt has changed, and the
                options' policy is "error".
            CorruptRecordError: A document is damaged, and the options are strict.

        """
        from perdure.session.plan import plan_of

        self._check_open()
        runtime = self._runtime
        return await plan_of(
            runtime.store,
            runtime.registry,
            self._tracked.key,
            context_bytes=runtime.limits.context_bytes,
            target=target,
            system_prompt=system_prompt,
            options=options,
        )

    async def apply(self, plan: RestorePlan) -> int:
        """Do what a plan says, durably, and return the new version.

        Results that were made up are appended; where that is not enough, a record replaces the
        working context. Nothing is erased.

        Raises:
            ConfigError: The session has moved on since the plan, or has unsaved changes: save it,
                and plan again.

        """
        from perdure.session.plan import carry_out

        self._check_open()
        carry_out(self, plan)
        return await self._runtime.saver.save(self._tracked)

    # for the manager, turns and the agent

    def _renew(self, restored: RestoredSession) -> None:
        """Hold what the store has, and what was appended while that was read."""
        restored.report = self.restore_report
        self._hold(restored)
        if self._contributors is not None:
            self._contributors.forget()

    def _report_step(self, what: str, detail: str) -> None:
        """Add a step to the restore report."""
        self._behind.report = self._behind.report.with_step(RestoreStep(what, detail))

    @property
    def _running_turn(self) -> int:
        """The number of the turn that is running, 0 between turns."""
        return self._turns.number

    async def _begin_turn(self, turn_id: str) -> int | None:
        """Wait for room, and return the number of a turn of this id that has ended before."""
        self._check_open()
        await self._runtime.saver.room(self._tracked)
        return self._contents.turn_ids.get(turn_id)

    async def _find_attempt(self, turn_id: str) -> tuple[int, tuple[Any, ...]] | None:
        """Return what an interrupted turn of this id has appended, if nothing is behind it.

        The seq of the record before it, and its messages.
        """
        if not self._may_be_cut:
            return None
        tracked = self._tracked
        pending, durable = tracked.pending, tracked.durable
        unsaved = reversed(unsaved_records(tracked)) if pending else ()
        return await self._contents.attempt(turn_id, unsaved=unsaved, durable=durable)

    def _next_turn(self) -> int:
        """Return the number of a new turn."""
        self._contents.turns += 1
        return self._contents.turns

    def _end_turn(self, turned: TurnPayload, closing: tuple[Entry, ...] = ()) -> None:
        """Append a turn's last record, in one group with others; a save is due with it."""
        self._accept((*closing, Entry(TURN, encode(turned))))
        note_turn(self._contents.turn_ids, turned)
        self._may_be_cut = turned.phase != "end"
        self._runtime.saver.turn_ended(self._tracked)

    def _folded(self, manifest: Manifest, tail: tuple[int, int]) -> None:
        """Take note of a fold, ``tail`` being what the tail was when it began."""
        self._contents.folded(manifest.as_of_seq, manifest.documents)
        self._shorten_tail(*tail)
        self._rewrite_bytes = _size(manifest)

    async def _turns_idle(self) -> None:
        """Wait until no turn is running."""
        await self._turns.wait_idle()


def _size(manifest: Manifest | None) -> int:
    return 0 if manifest is None else sum(one.size for one in manifest.documents.values())
