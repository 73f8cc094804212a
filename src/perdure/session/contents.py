"""Contents of a session for its readers: the context, and what loads when it is awaited.

Shared by the writable session and the read-only view. Records that came after the last
fold stay here until the documents that they change have them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec

from perdure.checkpoints.chain import CheckpointChain, LogDigest
from perdure.errors import (
    InvalidArgumentError,
    NotStorableError,
    SessionError,
    StoreError,
    TooLargeError,
)
from perdure.memory.context import (
    CONTEXT_KINDS,
    SNAPSHOT,
    RetractionPayload,
    Retractions,
    WorkingContext,
    replaced_in,
)
from perdure.memory.documents import (
    DATED_KINDS,
    MetadataPayload,
    SessionCounts,
    SessionDocument,
    TurnPayload,
    fold_items,
    fold_state,
    in_one_form,
    iso_of,
    names_of,
    note_record,
    note_times,
    stamp_of,
    time_of,
)
from perdure.memory.media import FittedMedia, fitted
from perdure.memory.state import States
from perdure.memory.working_memory import NO_LIMIT, Lazy, MemoryLimit, SessionValues, WorkingMemory
from perdure.records.checkpoints import CHECKPOINTS
from perdure.records.json import decode, encode
from perdure.records.keys import (
    SessionKey,
    require_list,
    require_owner,
    require_text,
    require_whole,
)
from perdure.records.manifest import About, Manifest
from perdure.records.media import (
    LEAST,
    LIFTED_KINDS,
    decode_held,
    decode_read,
    holds_references,
)
from perdure.records.messages import (
    RESERVED_KINDS,
    Message,
    decode_message,
)
from perdure.records.records import (
    EVENT,
    MEMORY_DROP,
    MEMORY_SET,
    MESSAGE_KINDS,
    META,
    RETRACT,
    TURN,
    Entry,
    Record,
)
from perdure.records.types import KIND_PREFIX, Registry
from perdure.records.values import encode_value, redact
from perdure.restore.ladder import KEPT_FOR_LATER, RestoredSession, validated
from perdure.restore.report import RestoreReport
from perdure.session.fold import OpenTail, system_prompt_of
from perdure.session.media import Filled, load_media, with_its_media
from perdure.session.point_in_time import context_at
from perdure.session.stored import followed
from perdure.store import Store, all_records

if TYPE_CHECKING:
    from perdure.providers import Issuer, ReasoningPolicy, RenderedContext

_NONE: frozenset[str] = frozenset()
_UNSHOWN = RESERVED_KINDS - MESSAGE_KINDS
_MARGIN = 16
"""Records that a page of history reads beyond those that it takes on average."""
PAGE = 50
"""Items of a page of history, unless another number is asked for."""
MOST_FOLDS = 100
"""Folds at most that a read may meet in a row."""


class HistoryItem(msgspec.Struct, frozen=True):
    """One record of a session's history."""

    seq: int
    kind: str
    value: Any
    """A Message, an object of a registered type, or the record's JSON as plain values."""


class HistoryPage(msgspec.Struct):
    """Items of a history, newest first, up to a number of them and of bytes."""

    limit: int
    bytes_left: float
    shown: Callable[[HistoryItem], Any] | None
    """Returns what is kept of an item; None for all of it."""
    is_full: bool
    """True if it takes no more, so that there may be older items."""
    items: list[Any] = []


class Contents:
    """A session's state in memory, as of its newest record, durable or not."""

    __slots__ = (
        "_chain",
        "_first_dated",
        "_has_unsaved",
        "_knows_dates",
        "_listed",
        "_memory",
        "_newest_dated",
        "_owner",
        "_registry",
        "_state",
        "_store",
        "_tail",
        "_told",
        "_turn",
        "as_of_seq",
        "context",
        "damaged",
        "digest",
        "document",
        "epoch",
        "has_context",
        "key",
        "may_lack_media",
        "report",
    )

    def __init__(
        self,
        store: Store,
        registry: Registry,
        restored: RestoredSession,
        owner: ReadableSession,
    ) -> None:
        is_filled = isinstance(store, Filled) or not store.capabilities.blobs
        self._store: Store = store if is_filled else Filled(followed(store))
        self._owner = owner
        self._registry = registry
        self.key: SessionKey = restored.key
        self.epoch: int = restored.epoch
        """The epoch of the newest record that it was restored from."""
        self.report: RestoreReport = restored.report
        """The report of its restore; a document that loads later and is damaged is added then."""
        self.damaged: frozenset[str] = _NONE
        """Documents that were rebuilt when they were loaded; the next fold writes them."""
        self.context: WorkingContext = restored.context
        self.has_context: bool = restored.has_context
        self.document: SessionDocument = restored.info
        """session.json: counters and labels as of now, times as of the last fold."""
        self.may_lack_media: bool = False
        """True if media that the model may be shown again are in their blobs alone."""
        self.digest: LogDigest | None = None
        """Of the log since the last checkpoint, once a checkpoint is made."""
        manifest = restored.manifest
        self.as_of_seq: int = 0 if manifest is None else manifest.as_of_seq
        """The record that the newest fold was as of; 0 before the first."""
        # The names of what was folded; None if that is unknown.
        self._listed = None if restored.documents.damaged else _listed(manifest)
        # The records that came since the last fold, of the kinds that documents need.
        # No list while it is empty: Python's garbage collector walks over those, too.
        self._tail: list[Record] | tuple[()] = list(restored.tail) or ()
        # The first and the newest record since the last fold that have a time, as far as `note` has
        # met them; whether it has met all of them.
        self._first_dated: Record | None = None
        self._newest_dated: Record | None = None
        self._knows_dates = not (restored.tail_records or restored.documents.damaged)
        # The newest record of a turn that `note` has met.
        self._turn: bytes | None = None
        # Whether the context has what is not in the log.
        self._has_unsaved = False
        # Whether it was reported that media are left out, and that some are lost.
        self._told: tuple[bool, bool] = (False, False)
        # Made at the first use: most sessions use none of them.
        self._memory: WorkingMemory | None = None
        self._state: States | None = None
        self._chain: Lazy[CheckpointChain] | None = None

    @property
    def memory(self) -> WorkingMemory:
        """The working memory."""
        if self._memory is None:
            owner, values = self._owner, SessionValues(self._store, self.key, seen=self.epoch)
            self._memory = WorkingMemory(
                self._read, owner._accept_now, self._registry, values, owner._memory_limit()
            )
        return self._memory

    @property
    def state(self) -> States:
        """The named states."""
        if self._state is None:
            accept = self._owner._accept_now
            self._state = States(self._read, self._state_names, accept, self._registry)
        return self._state

    @property
    def chain(self) -> Lazy[CheckpointChain]:
        """The chain of checkpoints."""
        if self._chain is None:
            self._chain = Lazy(self._load_chain)
        return self._chain

    @property
    def clock(self) -> int:
        """The session's logical clock: the newest time that an event or a checkpoint has."""
        return self.document.clock or 0

    @property
    def was_folded(self) -> bool:
        """Return whether there was a fold."""
        return self.as_of_seq > 0

    def primed_snapshot(self) -> Callable[[], bytes | None]:
        """Return a function for the stored snapshot as it is known here, without reading it.

        It returns the snapshot's bytes, b"" if there is none; None if it has to be read.
        """
        listed, snapshot = self._listed, self.context.unread

        def primed() -> bytes | None:
            if listed is None or self._listed is not listed:  # folded or written since
                return None
            return snapshot if SNAPSHOT in listed else b""

        return primed

    def documents_changed(self) -> None:
        """Note that documents were written besides a fold: their list is out of date."""
        self._listed = None

    def note(self, first: int, entries: Sequence[Entry], epoch: int) -> None:
        """Take in entries that were accepted, ``first`` being the seq of the first."""
        context, digest, document = self.context, self.digest, self.document
        for seq, (kind, payload, end) in enumerate(entries, first):
            if len(payload) >= LEAST and kind in LIFTED_KINDS and context.lifts:
                payload = context.lifted(payload)  # noqa: PLW2901  # as it will be stored
            if digest is not None:
                digest.feed(seq, kind, payload)
            if kind in MESSAGE_KINDS:
                context.add(seq, kind, payload)
                document.messages += 1
                continue
            if kind in CONTEXT_KINDS:
                context.feed(seq, kind, payload)
                self.may_lack_media = True  # older ones may be shown again
                if kind == RETRACT:
                    document.messages -= replaced_in(payload)
                continue
            context.seq = seq  # an application's own kind changes nothing else
            if kind == TURN:
                self._turn = payload  # a turn counts itself: it need not be decoded here
                continue
            record = Record(seq, epoch, kind, payload, end)
            note_record(document, record)
            if kind in KEPT_FOR_LATER:
                self._note_later(record)
        context.trim()
        dated = [at for at, entry in enumerate(entries) if entry[0] in DATED_KINDS]
        if dated:
            oldest, newest = dated[0], dated[-1]
            self._newest_dated = Record(first + newest, epoch, *entries[newest])
            if self._first_dated is None:
                self._first_dated = Record(first + oldest, epoch, *entries[oldest])

    def open_tail(self, upto: int) -> OpenTail | None:
        """Return a fold's input as of the newest record, *upto*; None if memory has too little."""
        created, active = self._times()
        is_whole = self._knows_dates and not (self._has_unsaved or self.damaged)
        if not is_whole or created is None or active is None:
            return None
        turns, turn = self.document.turns, self._turn
        if turn is not None:  # one that was appended as a record has not counted itself
            turns = max(turns, decode(turn, TurnPayload).number)
        self.context.seq = upto
        return OpenTail(
            since=self.as_of_seq,
            records=list(self._tail),
            snapshot=self.context.snapshot(self.key.agent, self.key.session),
            system_prompt=system_prompt_of(self.context),
            refers=self.context.has_lifted,
            counts=SessionCounts(
                seq=upto,
                created_at=iso_of(created),
                last_active_at=iso_of(active),
                turns=turns,
                messages=self.document.messages,
                turn_ids=dict(self.document.turn_ids),
                taken=dict(self.document.taken),
                clock=self.clock,
            ),
        )

    def add_unsaved_context(self, entries: Sequence[Entry]) -> None:
        """Take entries into the context that are in no log."""
        self._has_unsaved = True
        for kind, payload, _ in entries:
            self.context.feed(self.context.seq, kind, payload)

    def changes(self, kinds: Collection[str]) -> list[Record]:
        """Return the records of these kinds that came since the last fold."""
        return [record for record in self._tail if record.kind in kinds]

    def _note_later(self, record: Record) -> None:
        if isinstance(self._tail, list):
            self._tail.append(record)
        else:
            self._tail = [record]
        if record.kind in {MEMORY_SET, MEMORY_DROP}:
            if self._memory is not None:
                self._memory.note((record,))
        elif record.kind != META and self._chain is not None and self._chain.value is not None:
            self._chain.value.apply(record.kind, record.payload)

    def folded(self, manifest: Manifest) -> None:
        """Drop the records that the documents have taken in."""
        as_of_seq = self.as_of_seq = manifest.as_of_seq
        self._listed = _listed(manifest)
        self.damaged = _NONE
        self._set_times(self.document)
        self._tail = [record for record in self._tail if record.seq > as_of_seq] or ()
        self._knows_dates = True
        first, newest = self._first_dated, self._newest_dated
        if first is not None and first.seq <= as_of_seq:
            self._first_dated = newest if newest is not None and newest.seq > as_of_seq else None
        if self._memory is not None:
            self._memory.folded(as_of_seq)

    async def _read(self, name: str) -> tuple[bytes | None, list[Record]]:
        """Return a document, and the records on top of it; nothing is awaited in between."""
        self._owner._catch_up()
        # Known not to be stored: most sessions have few of the documents.
        if self._listed is not None and name not in self._listed:
            return None, [record for record in self._tail if name in names_of(record)]
        for _ in range(MOST_FOLDS):
            documents = validated(await self._store.read_documents(self.key, {name}), self.key)
            document = documents.found.get(name)
            as_of = 0 if document is None else document.as_of_seq
            lost = name in documents.damaged
            if lost:
                self.damaged |= {name}
                self.report = self.report.with_damaged(name, documents.why.get(name))
            older: list[Record] = []
            if lost:  # it was folded from durable records
                log = await all_records(self._store.read_log(self.key, after=as_of))
                older = [record for record in log if name in names_of(record)]
            manifest = documents.manifest
            folded_up_to = 0 if manifest is None else manifest.as_of_seq
            # Else its records would be in neither: the older document, or what is left of the tail.
            if folded_up_to < self.as_of_seq:  # a fold came between
                continue
            # Of the tail, only what neither the document nor the log has.
            floor = max(as_of, older[-1].seq if older else 0)
            newer = [
                record for record in self._tail if record.seq > floor and name in names_of(record)
            ]
            return (None if document is None else document.data), older + newer
        raise StoreError(
            f"session {self.key}: what was folded as of record {self.as_of_seq} is gone: another "
            "process has deleted or replaced the session; open it again",
            key=str(self.key),
            as_of_seq=self.as_of_seq,
        )

    async def state_document(self, name: str) -> bytes | None:
        """Return a document of states, with what is not folded yet; None for none."""
        return fold_state(name, *await self._read(name))

    async def lines(self, name: str) -> list[bytes]:
        """Return the lines of a memory document, with what is not folded yet."""
        return fold_items(*await self._read(name)).splitlines()

    async def _load_chain(self) -> CheckpointChain:
        return CheckpointChain.of(*await self._read(CHECKPOINTS))

    async def _state_names(self) -> set[str]:
        self._owner._catch_up()
        documents = await self._store.read_documents(self.key, ())
        names = set() if documents.manifest is None else set(documents.manifest.documents)
        names.update(name for record in self._tail for name in names_of(record))
        states = [name for name in names if name.startswith(("state/", "typed/"))]
        return {name for name in states if await self.state_document(name) is not None}

    def describe(self) -> SessionDocument:
        """Return session.json with what came since the last fold."""
        document = decode(msgspec.json.encode(self.document), SessionDocument)
        self._set_times(document)
        return document

    def _set_times(self, document: SessionDocument) -> None:
        note_times(in_one_form(document), self.changes((META,)))
        _, newest = self._times()
        if newest is not None:
            document.last_active_at = iso_of(newest)

    def _times(self) -> tuple[float | None, float | None]:
        """Return the times of the first and the newest dated record that are known here."""
        first, newest = self._first_dated, self._newest_dated
        return (
            None if first is None else time_of(first),
            None if newest is None else time_of(newest),
        )

    def about(self) -> About:
        """Return the part of session.json that a listing shows, as of now."""
        about = self.document.about
        first, newest = self._times()
        return msgspec.structs.replace(
            about,
            created_at=first if about.created_at is None else about.created_at,
            updated_at=about.updated_at if newest is None else newest,
        )

    async def newest_first(
        self, unsaved: Iterable[Record], durable: int
    ) -> AsyncGenerator[Record, None]:
        """Yield the records of the log from its end: those that the store does not have first."""
        for record in unsaved:
            yield record
        # Up to what was durable then: what became durable meanwhile was in the first part.
        log = self._store.read_log(self.key, before=durable + 1, reverse=True)
        async with contextlib.aclosing(log):
            async for chunk in log:
                for record in chunk.records:
                    yield record

    async def history(
        self,
        *,
        before: int | None,
        limit: int,
        unsaved: Iterable[Record] = (),
        durable: int | None = None,
        shown: Callable[[HistoryItem], Any] | None = None,
    ) -> list[Any]:
        """Return the newest ``limit`` items before a seq, oldest first; no other is decoded.

        *unsaved* is what the store does not have yet, newest first, after the seq *durable*.
        *shown* returns what is kept of each item, which may be large; None for all of it.
        """
        page = await self.page(
            before=before, limit=limit, unsaved=unsaved, durable=durable, shown=shown
        )
        return page.items[::-1]

    async def page(
        self,
        *,
        before: int | None,
        limit: int,
        max_bytes: int | None = None,
        unsaved: Iterable[Record] = (),
        durable: int | None = None,
        shown: Callable[[HistoryItem], Any] | None = None,
    ) -> HistoryPage:
        """Return the newest items before a seq: as `history`, but no more than so many bytes.

        One item at least, however large. Nothing is read beyond what the store reads at a time.
        """
        require_whole(before=before, limit=limit)
        most = inf if max_bytes is None else max_bytes
        page = HistoryPage(limit, most, shown, is_full=limit <= 0)
        retractions = Retractions()
        newer = (record for record in unsaved if before is None or record.seq < before)
        self._show_newest(filter(retractions.shows, newer), page)
        stop = before
        if durable is not None:
            stop = durable + 1 if before is None else min(before, durable + 1)
        more = stop is None or stop > 1
        while more and not page.is_full:
            items = limit - len(page.items)
            # As many records as have so many items among them, on average.
            size = items * self.context.seq // max(self.document.messages, 1) + _MARGIN
            log = self._store.read_log(self.key, before=stop, limit=size, reverse=True)
            more = False
            async with contextlib.aclosing(log):
                async for chunk in log:
                    if not chunk.records:
                        continue  # it only says that the log may have gone on
                    self._show_newest(filter(retractions.shows, chunk.records), page)
                    size -= len(chunk.records)
                    # If fewer came than were asked for, the log begins here.
                    stop, more = chunk.records[-1].seq, size <= 0
                    if page.is_full:
                        break
        return page

    def _show_newest(self, records: Iterable[Record], page: HistoryPage) -> None:
        for record in records:
            if page.is_full:
                return
            kind, payload = record.kind, record.payload
            is_message = kind in MESSAGE_KINDS
            if not is_message and kind in _UNSHOWN:
                # An event without a stamp is an application's, from before the kind was reserved.
                is_event = kind == EVENT and not stamp_of(payload)
                if not is_event:
                    continue
            if page.items and len(payload) > page.bytes_left:
                page.is_full = True
                return
            page.bytes_left -= len(payload)
            if is_message:
                value: Any = decode_read(payload, self._registry)
            elif kind.startswith("x:"):
                value = self._registry.decode_record(kind, payload)
            else:
                value = decode(payload)
            item = HistoryItem(record.seq, kind, value)
            page.items.append(item if page.shown is None else page.shown(item))
            page.is_full = len(page.items) >= page.limit

    async def before_log(self, unsaved: Iterable[Record]) -> list[tuple[int, bytes]]:
        """Return the messages that a pruned log continues, without those retracted since.

        *unsaved* is what the store does not have yet, newest first.
        """
        store = followed(self._store)  # without media: only retractions are looked at
        cut = (await store.beginning_of(self.key)).cut
        if not cut:
            return []
        context = await context_at(self._store, self.key, cut, self.context.limit)
        retractions = Retractions()
        for record in (*unsaved, *await all_records(store.read_log(self.key, reverse=True))):
            retractions.shows(record)
        messages = [
            (seq, payload) for seq, payload in context.by_seq() if not retractions.takes(seq)
        ]
        return await self.filled(messages)

    async def filled(self, messages: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Return messages with their media in place, regardless of the budget."""
        store, held = self._store, self.context.media
        return [
            (seq, await with_its_media(store, self.key, payload, held)) for seq, payload in messages
        ]

    async def as_of(self, seq: int, *, without: RetractionPayload | None = None) -> WorkingContext:
        """Return the working context at a durable record, as if some had never been there."""
        return await context_at(self._store, self.key, seq, self.context.limit, without=without)

    def shown(self, provider: str | None = None) -> FittedMedia:
        """Return the working context's messages, with the media that the budget has room for.

        That depends on the provider that is to read them, if it is known.

        Raises:
            SessionError: The session was loaded without.

        """
        context = self.context
        media = fitted(self.stored(), context.budget, context.media, provider=provider)
        if media.lost:
            self.may_lack_media = True  # a save looks again
        left_out, lost = self._told  # each is reported once
        news = FittedMedia(
            [],
            left_out=() if left_out else media.left_out,
            lost=() if lost else media.lost,
        )
        if news.left_out or news.lost:
            self._told = left_out or bool(news.left_out), lost or bool(news.lost)
            self._owner._left_out(news)
        return media

    async def load_media(self) -> None:
        """Load the media that the model may be shown, and that are not in memory."""
        await load_media(self._store, self.key, self.context)
        self.may_lack_media = False

    def stored(self) -> list[Message]:
        """Return the working context's messages as they are stored: with references to media.

        Raises:
            SessionError: The session was loaded without.

        """
        if not self.has_context:
            raise SessionError(
                f"session {self.key} was loaded with context=False: load it without that",
                key=str(self.key),
            )
        payloads = list(self.context.messages())
        read = decode_held if holds_references(b"".join(payloads)) else decode_message
        return [read(payload, self._registry) for payload in payloads]


Listed = Literal["openai", "openai-responses"]
"""Formats whose conversation holds the instructions too: a context is a list of dicts."""
Separate = Literal["anthropic", "gemini"]
"""Formats with the instructions apart: a context is a `RenderedContext`."""
ContextFormat = Literal["openai", "openai-responses", "anthropic", "gemini"] | None
"""None for `Message` objects, else whose API the context is for."""


class ReadableSession:
    """The part that a session and a read-only view of one have in common."""

    __slots__ = ("_behind",)

    _behind: Contents

    @property
    def _contents(self) -> Contents:
        """The contents as of the newest record."""
        self._catch_up()
        return self._behind

    # what a session does, and a view does not

    def _catch_up(self) -> None:
        """Take what was appended into the contents."""

    def _accept_now(self, entries: tuple[Entry, ...]) -> int:
        """Append entries as one group, and apply them to the contents; return the new version."""
        raise SessionError(
            f"this view of session {self.key} is read-only: open the session to change it",
            key=str(self.key),
            entries=len(entries),
        )

    def _memory_limit(self) -> MemoryLimit:
        """Return the limit of the working memory."""
        return NO_LIMIT

    def _left_out(self, media: FittedMedia) -> None:
        """Report, once, that the model is not shown all media of the context."""

    @property
    def key(self) -> SessionKey:
        """Tenant, agent id and session id."""
        return self._behind.key

    @property
    def info(self) -> SessionDocument:
        """Title, tags, owner, counters and times, as of now or as of the view."""
        return self._contents.describe()

    @property
    def restore_report(self) -> RestoreReport:
        """The report of its restore; a document that loads later and is damaged is added then."""
        return self._contents.report

    @property
    def memory(self) -> WorkingMemory:
        """The working memory; it loads when it is first awaited."""
        return self._contents.memory

    @property
    def state(self) -> States:
        """Named states; each loads when it is first awaited."""
        return self._contents.state

    @overload
    def context(
        self,
        format: None = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Message]: ...

    @overload
    def context(
        self,
        format: Listed,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any]: ...

    @overload
    def context(
        self,
        format: Separate,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> RenderedContext: ...

    def context(
        self,
        format: ContextFormat = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any] | RenderedContext:
        """Return what the model sees next: the newest whole messages within the limit.

        Images and other media are shown up to ``Limits.context_media_tokens``, the newest; older
        ones are replaced by a note. It keeps the provider's rules (docs/contexts.md has them),
        however the last turn ended.
        Calls without a result are shown as interrupted.

        Args:
            format: None for `Message` objects, as they are in the log. ``"openai"`` and
                ``"openai-responses"`` give a list of dicts; ``"anthropic"`` and ``"gemini"`` a
                `RenderedContext` with ``messages`` and ``system``.
            to: Who reads it, if that is not the one whose format it is: ``"deepseek"``, or an
                `Issuer` with a model.
            reasoning: Who gets reasoning, signatures and unknown fields: ``"strip_foreign"``
                sends them to the provider that issued them, ``"strip_all"`` to none, ``"keep"`` to
                every provider of the format.

        Raises:
            InvalidArgumentError: There is no such format or policy.

        """
        provider = format.partition("-")[0] if isinstance(format, str) else None
        shown = self._contents.shown(provider)
        if format is None:
            return shown.messages
        # Imported when used: who opens a session need not render it.
        from perdure.providers.formats import FORMATS, render, rendered

        if format not in FORMATS:
            choices = ", ".join(map(repr, FORMATS))
            raise InvalidArgumentError(
                f"context format {format!r} is unknown: choose None, {choices}", format=format
            )
        # Without media there is nothing to look for once more.
        made = render if shown.had_media else rendered
        context = made(shown.messages, format, to=to, reasoning=reasoning)
        return context if format in {"anthropic", "gemini"} else context.messages


def _listed(manifest: Manifest | None) -> tuple[str, ...]:
    return () if manifest is None else tuple(manifest.documents)


def meta_entry(
    *,
    title: str | None = None,
    tags: list[str] | None = None,
    owner: str | None = None,
    agent_type: str | None = None,
    created_at: float | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Entry:
    """Return the record of a change to what is said about a session.

    Credentials in the metadata, known by their keys, are left out, and the record says where.

    Raises:
        InvalidArgumentError: A title, an owner or a tag is no text.
        NotStorableError: The metadata cannot be stored.

    """
    validate_labels(title=title, owner=owner, tags=tags)
    clean, redacted = redact(dict(metadata or {}))
    meta = MetadataPayload(
        title=title,
        tags=tags,
        owner=owner,
        metadata={name: _plain(name, value) for name, value in clean.items()},
        at=time.time(),
        agent_type=agent_type,
        created_at=created_at,
        redacted=list(redacted),
    )
    return Entry(META, encode(meta))


def _plain(name: str, value: Any) -> msgspec.Raw:
    """Return a value of the metadata as JSON, if it is exactly that."""
    data, tags = encode_value(value, at=f"metadata.{name}")
    for path, tag in (tags or {}).items():
        path_text = f"metadata.{name}{path}".rstrip("/")
        raise NotStorableError(
            f"the {tag} at {path_text} is not JSON and would come back changed: convert it first",
            path=path_text,
            type=tag,
        )
    return msgspec.Raw(data)


def validate_labels(
    *, title: str | None = None, owner: str | None = None, tags: Sequence[str] | None = None
) -> None:
    """Refuse what could not be read back as what is said about a session.

    Raises:
        InvalidArgumentError: Something is no text, or the tags are one text instead of several.

    """
    require_list("tags", tags)
    for tag in tags or ():
        require_text("tag", tag)
    if title is not None:
        require_text("title", title)
    if owner is not None:
        require_owner(owner)


def check_readable(kind: str, payload: bytes, registry: Registry) -> None:
    """Refuse a foreign record that readers of the log could not decode.

    Raises:
        FormatError: It is no JSON, or no such message or object. An upcast may raise anything.

    """
    if kind in MESSAGE_KINDS:
        decode_message(payload, registry)
    elif kind.startswith(KIND_PREFIX):
        registry.decode_record(kind, payload)
    else:
        decode(payload, msgspec.Raw)


def check_sizes(key: SessionKey, entries: tuple[Entry, ...], limit: int, *, most: int) -> None:
    """Refuse a record that is larger than the limit, which may be raised to the store's own.

    Raises:
        TooLargeError: One is.

    """
    for entry in entries:
        size = len(entry.payload)
        if size > limit:
            whose = "limit" if size <= most else "store's own limit"
            message = (
                f"session {key}: a {entry.kind} record of {size} bytes is over the {whose} of "
                f"{limit if size <= most else most}: store it elsewhere and append a reference"
            )
            if size <= most:
                message += f", or raise Limits(record_bytes=…), which may be up to {most}"
            facts = {"key": str(key), "kind": entry.kind, "size": size, "limit": limit}
            raise TooLargeError(message, **facts)
