"""The session: what users append to, and what saves itself."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

import msgspec

from perdure.autosave.tracked import State
from perdure.codec.encoded import Encoded
from perdure.codec.json import encode
from perdure.errors import ConfigError
from perdure.memory.context import Retraction
from perdure.memory.documents import SessionDocument, Turned, note_turn
from perdure.model.keys import SessionKey
from perdure.model.messages import Message
from perdure.model.records import CONTEXT, RETRACT, TURN, Entry, Record
from perdure.restore.ladder import Restored
from perdure.restore.report import RestoreReport, RestoreStep
from perdure.session.contents import HistoryItem
from perdure.session.contributors import Attachment, Contributor, Contributors
from perdure.session.display import session_card, session_text
from perdure.session.entries import entry_of, meta_entry
from perdure.session.inside import attach
from perdure.session.lost import fork_unsaved, unsaved_records
from perdure.session.planned import Planned
from perdure.session.rendering import Rendered
from perdure.session.runtime import Runtime
from perdure.session.turn import Turn, TurnQueue

if TYPE_CHECKING:
    from perdure.autosave.core import Tracked
    from perdure.checkpoints.engine import CheckpointEngine
    from perdure.checkpoints.events import EventStream
    from perdure.memory.state import States
    from perdure.memory.working import WorkingMemory
    from perdure.model.manifest import Manifest
    from perdure.providers import Format, Issuer
    from perdure.session.forking import Forked
    from perdure.session.keeping import Keeper

__all__ = ["Receipt", "Session"]


class Receipt(msgspec.Struct, frozen=True):
    """Proof that a session is durable up to a version."""

    version: int
    """Every record up to this seq is durable."""
    durability: str
    """What durable means on this store: "fsync", "memory", …"""


@final
class Session(Planned, Rendered):
    """One conversation and its state, written by one process at a time.

    Made by ``SessionManager.open``. Everybody in the process who opens the same id shares the
    object; leaving ``async with`` only lets go of it, and autosave goes on.
    It belongs to the event loop that opened it.
    """

    __slots__ = (
        "_checkpoints",
        "_keeper",
        "_may_be_cut",
        "_turns",
        "_worker",
        "contributors",
        "folding",
        "pins",
        "rewrite_bytes",
    )

    def __init__(
        self, runtime: Runtime, keeper: Keeper, restored: Restored, tracked: Tracked
    ) -> None:
        super().__init__(runtime, restored, tracked)
        self._keeper = keeper
        self._turns = TurnQueue()
        self._may_be_cut = restored.turns > 0
        """Whether the newest turn may not have come to its end."""
        self._checkpoints: CheckpointEngine | None = None
        self._worker: object | None = None  # the agent that works on it, if one does
        self.contributors: Contributors | None = None  # made when the first is attached
        self.pins: int = 0
        self.folding: bool = False
        self.rewrite_bytes: int = _size(restored.manifest)

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
        self._keeper.unpin(self)

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
        return self.tracked.epoch

    @property
    def version(self) -> int:
        """The seq of the newest record that was accepted."""
        return self.tracked.version

    @property
    def durable_version(self) -> int:
        """The seq of the newest record that is durable."""
        return self.tracked.durable

    @property
    def unsaved_age(self) -> float:
        """Seconds since the oldest change that is not durable, 0 when all is saved."""
        return self._runtime.saver.unsaved_age(self.tracked)

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
            from perdure.session.checkpointing import checkpoints_of

            self._checkpoints = checkpoints_of(self)
        return self._checkpoints

    @property
    def events(self) -> EventStream:
        """Its kernel events: what an agent did, on the session's logical clock."""
        from perdure.session.checkpointing import events_of

        return events_of(self)

    # changing it

    def append(self, *items: Message | Encoded | Any) -> int:
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
        if len(items) == 1 and type(items[0]) is Encoded:
            return self.accept((items[0].entry,))
        registry = self._runtime.registry
        entries = tuple([entry_of(item, registry) for item in items])
        if not entries:
            return self.version
        return self.accept(entries)

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
        return self.accept((meta_entry(title=title, tags=tags, owner=owner, metadata=metadata),))

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
        return self._receipt(await self._runtime.saver.save(self.tracked))

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
        entry = Entry(RETRACT, encode(Retraction(after)), end=True)
        if self._contents.context.reaches(after):
            return self.accept((entry,))
        await self.save()
        context = await self._contents.as_of(after)
        return self.accept((entry, Entry(CONTEXT, context.as_record("retract"))))

    def unsaved(self) -> tuple[Record, ...]:
        """Return the records that are not durable: also of a session that was lost."""
        return unsaved_records(self.tracked)

    def retry(self) -> None:
        """Try again to save a quarantined session, now that the cause is mended."""
        self._check_open()
        self._runtime.saver.retry(self.tracked)

    async def discard_unsaved(self) -> int:
        """Drop the records that are not durable, and return how many.

        A way out of quarantine: what the session holds afterwards is what the store has. Of a
        session that was lost, it decides that nobody wants them; that session stays closed.
        """
        self._check_home()
        if self.tracked.end is State.LOST:
            return self._runtime.saver.discard(self.tracked)
        self._check_open()
        return await self._runtime.host.call(self._keeper.discard, self)

    async def fork_unsaved(self, new_id: str, *, new_session: str | None = None) -> Forked:
        """Begin a session with what is durable of this one, and what is not; it is durable then.

        A way out of quarantine and of a lost lease: nothing that was said here is lost. This
        session stays as it is; one that was lost is not named by `health` any more.

        Raises:
            SessionError: A session of the new id exists.
            StoreError: The store refuses a record there, too.

        """
        self._check_home()
        return await fork_unsaved(
            self._runtime, self._keeper, self.tracked, new_id, new_session=new_session
        )

    async def wait_durable(self, version: int | None = None) -> Receipt:
        """Wait until a version (None: the newest) is durable, without hurrying the save."""
        self._check_home()
        return self._receipt(await self._runtime.saver.wait_durable(self.tracked, version))

    def _receipt(self, version: int) -> Receipt:
        return Receipt(version, self._runtime.durability)

    # reading it

    async def history(self, *, before: int | None = None, limit: int = 50) -> list[HistoryItem]:
        """Return up to ``limit`` items, oldest first; page back by the first one's seq."""
        self._check_home()
        tracked = self.tracked
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
        await self._keeper.close(self)

    # for the manager, turns and the agent: not for users

    def renew(self, restored: Restored) -> None:
        """Hold what the store has, and what was appended while that was read."""
        restored.report = self.restore_report
        self._hold(restored)
        if self.contributors is not None:
            self.contributors.forget()

    def report_step(self, what: str, detail: str) -> None:
        """Add a step to the restore report."""
        self._behind.report = self._behind.report.with_step(RestoreStep(what, detail))

    @property
    def is_writable(self) -> bool:
        """Whether an append would be accepted, size and room aside."""
        return self.closed_by is None and self.tracked.writable

    @property
    def running_turn(self) -> int:
        """The number of the turn that is running, 0 between turns."""
        return self._turns.number

    async def begin_turn(self, turn_id: str) -> int | None:
        """Wait for room, and return the number of a turn of this id that has ended before."""
        self._check_open()
        await self._runtime.saver.room(self.tracked)
        return self._contents.turn_ids.get(turn_id)

    async def find_attempt(self, turn_id: str) -> tuple[int, tuple[Any, ...]] | None:
        """Return what an interrupted turn of this id has appended, if nothing is behind it.

        The seq of the record before it, and its messages.
        """
        if not self._may_be_cut:
            return None
        tracked = self.tracked
        pending, durable = tracked.pending, tracked.durable
        unsaved = reversed(unsaved_records(tracked)) if pending else ()
        return await self._contents.attempt(turn_id, unsaved=unsaved, durable=durable)

    def next_turn(self) -> int:
        """Return the number of a new turn."""
        self._contents.turns += 1
        return self._contents.turns

    def end_turn(self, turned: Turned, closing: tuple[Entry, ...] = ()) -> None:
        """Append a turn's last record, in one group with others; a save is due with it."""
        self.accept((*closing, Entry(TURN, encode(turned))))
        note_turn(self._contents.turn_ids, turned)
        self._may_be_cut = turned.phase != "end"
        self._runtime.saver.turn_ended(self.tracked)

    def folded(self, manifest: Manifest, tail: tuple[int, int]) -> None:
        """Take note of a fold, ``tail`` being what the tail was when it began."""
        self._contents.folded(manifest.as_of_seq, manifest.documents)
        self._shorten_tail(*tail)
        self.rewrite_bytes = _size(manifest)

    async def turns_idle(self) -> None:
        """Wait until no turn is running."""
        await self._turns.wait_idle()


def _size(manifest: Manifest | None) -> int:
    return 0 if manifest is None else sum(one.size for one in manifest.documents.values())
