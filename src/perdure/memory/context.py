"""The working context: the messages that the model will see next, and their budget.

A pure fold of the log: a bounded suffix of its messages, in atoms that are never split (a message
with the tool results that answer it), after the newest system message. The same records give the
same context, whether they are fed live, after a snapshot, or from the log's beginning; so its
snapshot is a cache that may disappear at any time.

Media do not count as bytes. Where the store keeps blobs, messages refer to them, as they do in the
log, and the newest are held next to them: `perdure.memory.media` says how many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from perdure.errors import CorruptRecordError
from perdure.memory.media import HELD_BYTES, MediaBudget, estimated
from perdure.records.json import decode, decoder_of
from perdure.records.media import (
    SEEN,
    Medium,
    holds_references,
    lifted,
    media_of,
    referred,
    text_bytes,
)
from perdure.records.messages import Message
from perdure.records.records import CONTEXT, MESSAGE_KINDS, RETRACT, TOOL_RESULT, Record
from perdure.records.references import SPELLED

CONTEXT_KINDS = MESSAGE_KINDS | {CONTEXT, RETRACT}
"""Kinds that change a working context; other kinds only advance its ``seq``."""

SNAPSHOT = "working_context_snapshot.json"
"""The document that caches the working context."""

SCHEMA_VERSION = 1

Kept = tuple[int, bytes, bool]
"""A message: the seq of its record, its JSON, and whether it begins an atom."""


class Snapshot(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The stored form of a working context; the field names are the format.

    Each idle session may hold one: the garbage collector knows neither it nor its tuples.
    """

    schema_version: int
    agent_id: str
    session_id: str = "default"
    epoch_id: int = msgspec.field(default_factory=int)  # a factory, so that 0 is written, too
    """Number of rebuilds (compaction, reset)."""
    last_compaction_ts: float | None = msgspec.field(default_factory=lambda: None)
    seq: int = 0
    """The watermark: the last record that is folded in."""
    system_prompt_sha256: str | None = None
    messages: tuple[msgspec.Raw, ...]
    message_seqs: tuple[int, ...] = ()
    """The seq of each message's record."""
    atoms: tuple[int, ...] = ()
    """Number of messages of each atom, after a pinned system message."""
    pinned: bool = False
    """True if the first message is a system message from before the cut."""
    cut: bool = False
    """True if older messages were left out."""
    rebuilt_at: int = 0
    """The last record that replaced or took back messages."""


class WorkingContextSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A working context at a moment."""

    messages: tuple[Message, ...] = ()
    epoch_id: int = 0
    """Number of rebuilds by compactions."""
    last_compaction_ts: float | None = None


class MessageRole(msgspec.Struct):
    """The role of a stored message, and nothing else of it."""

    role: str = ""


_NO_SYSTEM: Final = tuple(b'{"role":"%b"' % role for role in (b"user", b"assistant", b"tool"))
"""Beginnings of most messages' records; one that begins otherwise has to be decoded."""


class _Rebuilt(msgspec.Struct):
    """The payload of a record that replaces the context."""

    messages: list[msgspec.Raw]
    epoch_id: int = 0
    last_compaction_ts: float | None = None
    system_prompt_sha256: str | None = None
    reason: str = ""


Span = tuple[int, int]
"""The first and the last of some records."""


class RetractionPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload of a record that takes others back: all after one, or some.

    Only the working context and histories obey it: memory, states and effects stay.
    """

    after: int | None = None
    """The last record that stays."""
    of: tuple[str, int] | None = None
    """The turn's id, and the number of the attempt."""
    spans: tuple[Span, ...] = ()
    """The records. An attempt's are those from its begin to its end or the next epoch, but for what
    is marked as outside, and the results that a restore made up for its calls: they are given by
    their numbers, so that no reader needs to know where turns begin and end."""
    replaces: bool = False
    """True if the next record replaces the one message that it takes back."""

    def __post_init__(self) -> None:
        if (self.after is None) != bool(self.spans):
            raise ValueError("a retraction has either `after` or `spans`")

    @property
    def first(self) -> int:
        """The first record that it may take back."""
        return min(self.spans)[0] if self.after is None else self.after + 1

    def takes(self, seq: int) -> bool:
        """Return True if it takes an earlier record back."""
        if self.after is not None:
            return seq > self.after
        return any(first <= seq <= last for first, last in self.spans)


def replaced_in(payload: bytes) -> int:
    """Return how many messages a retraction's group replaces, so that they count no more."""
    return int(decode(payload, RetractionPayload).replaces)


class Retractions:
    """Retractions of a log, read from its end: one that is itself taken back does not count."""

    __slots__ = ("_after", "_spans")

    def __init__(self) -> None:
        self._after: float = float("inf")
        self._spans: list[Span] = []

    def takes(self, seq: int) -> bool:
        """Return True if a record before all that were shown was taken back."""
        if not self._spans:  # nearly always
            return seq > self._after
        return seq > self._after or any(first <= seq <= last for first, last in self._spans)

    def shows(self, record: Record) -> bool:
        """Return True if the next older record counts; if it takes others back, they will not."""
        if self.takes(record.seq):
            return False
        if record.kind == RETRACT:
            taken = decode(record.payload, RetractionPayload)
            self._spans = [span for span in (*self._spans, *taken.spans) if span[0] < record.seq]
            self._after = self._after if taken.after is None else taken.after
        return True


class WorkingContext(msgspec.Struct, eq=False):
    """The newest whole atoms of a session, within a number of bytes.

    Used by one task at a time. Messages stay encoded until they are read.
    """

    limit: int
    """Bytes of message JSON to keep, without media; the newest atom stays even if it alone is
    larger."""
    lifts: bool = False
    """True if media are taken out of what is fed, as they are when it is saved."""
    has_lifted: bool = False
    """True if that has happened."""
    media: dict[str, bytes] = {}
    """What messages refer to, by name: of the newest, as many as the budget has room for."""
    budget: MediaBudget = MediaBudget()
    _size: int = 0
    inline: int = 0
    """Bytes of media that no blob holds, once they are counted."""
    _is_exact: bool = False
    """Looking for media costs more than all else here. Until the limit is reached, or somebody
    asks, `_size` counts them as text, and what that lets in fits into both limits."""
    seq: int = 0
    """The last record that was fed, of any kind."""
    cut: bool = False
    """True if older messages were left out."""
    rebuilt_at: int = 0
    """The last record that replaced or took back messages."""
    system: Kept | None = None
    """The newest system message among those that were cut."""
    epoch_id: int = 0
    last_compaction_ts: float | None = None
    system_prompt_sha256: str | None = None
    _messages: list[Kept] | None = None
    """None until they are asked for."""
    _snapshot: Snapshot | None = None
    """Where the messages are until they are needed, and what it was decoded from."""
    _source: bytes | None = None
    _replaced_at: int = 0
    """The last record that replaced the messages, as far as is known."""
    _retracted: list[tuple[int, int]] | None = None
    """Since then, in order: how far each retraction went back, and its own record."""

    def __repr__(self) -> str:
        return object.__repr__(self)  # a log has no messages

    def __post_init__(self) -> None:
        self._is_exact = self.limit > HELD_BYTES

    @property
    def size(self) -> int:
        """Bytes of message JSON, without media."""
        self._count_exactly()
        return self._size

    @property
    def unread(self) -> bytes | None:
        """The bytes of the snapshot that it was restored from, until its messages are used."""
        return None if self._snapshot is None else self._source

    @property
    def _kept(self) -> list[Kept]:
        if self._messages is None:
            self._messages = []
            snapshot, self._snapshot, self._source = self._snapshot, None, None
            if snapshot is not None:
                kept = zip(snapshot.message_seqs, map(bytes, snapshot.messages), strict=True)
                self._regroup(list(kept), snapshot.atoms)
        return self._messages

    def feed(self, seq: int, kind: str, payload: bytes) -> None:
        """Apply the next record of the log."""
        if kind in MESSAGE_KINDS:
            self.add(seq, kind, payload)
            self.trim()
            return
        self.seq = seq
        if kind == CONTEXT:
            self._replace(seq, payload)
        elif kind == RETRACT:
            self.trim()  # first: what has left does not come back when there is room
            self._take_back(seq, decode(payload, RetractionPayload))

    def add(self, seq: int, kind: str, payload: bytes) -> None:
        """Apply a record with a message; `trim` is called after the last of several."""
        self.seq = seq
        kept = self._kept
        kept.append((seq, payload, kind != TOOL_RESULT or not kept))
        if len(payload) < SEEN or not self._is_exact:  # for each append
            self._size += len(payload)
        else:
            self._count(payload)

    def lifted(self, payload: bytes) -> bytes:
        """Return what is appended as it will be stored, and hold its media."""
        payload, blobs = lifted(payload)
        if blobs:
            self.has_lifted = True
            self.media |= blobs
            held = sum(map(len, self.media.values()))
            if held > HELD_BYTES or len(self.media) * _LEAST_MEDIUM > self.budget.tokens:
                wanted = {medium.name for medium in self.wanted()} | blobs.keys()  # these come next
                self.media = {name: raw for name, raw in self.media.items() if name in wanted}
        return payload

    def wanted(self) -> list[Medium]:
        """Return the media that may be shown, each once, the newest first."""
        names: dict[str, Medium] = {}
        size = tokens = 0
        for payload in reversed(self._referring()):
            mentioned = referred(payload)
            for medium in reversed(mentioned):
                size += medium.bytes if medium.name not in names else 0
                tokens += self.budget.least(medium)
                names.setdefault(medium.name, medium)
            if size > HELD_BYTES or tokens > self.budget.tokens:
                break
        return list(names.values())

    def _referring(self) -> list[bytes]:
        """Return the messages that refer to media."""
        if self._snapshot is None:
            return [payload for _, payload, _ in self._kept if SPELLED in payload]
        raws = self._snapshot.messages  # they stay there
        if not holds_references(self._source or b"".join(raws)):
            return []
        return [payload for payload in map(bytes, raws) if SPELLED in payload]

    def messages(self) -> Iterator[bytes]:
        """Return the messages as they would be sent: the system message first.

        After a cut, messages before the first user message are skipped.
        """
        if self.system is not None:
            yield self.system[1]
        for _, payload, _ in self._from_user() if self.cut else self._kept:
            yield payload

    def _from_user(self) -> list[Kept]:
        for at, (_, payload, begins) in enumerate(self._kept):
            if begins and _role(payload) in {"user", "system"}:
                return self._kept[at:]
        return self._kept

    def since(self, after: int) -> list[bytes] | None:
        """Return the messages after a record; None if earlier ones were replaced or retracted."""
        if self.rebuilt_at > after:
            return None
        return [payload for seq, payload, _ in self._kept if seq > after]

    def whole(self) -> list[tuple[int, bytes]] | None:
        """Return all messages of the conversation with their records; None if some are not here.

        They were cut off, or a record that replaced the context has them.
        """
        seqs = [seq for seq, _, _ in self._kept]
        if self.cut or any(later <= seq for seq, later in pairwise([self._replaced_at, *seqs])):
            return None
        return self.by_seq()

    def by_seq(self) -> list[tuple[int, bytes]]:
        """Return the messages, each with the record that brought it; one may bring several."""
        return [(seq, payload) for seq, payload, _ in self._kept]

    def by_record(self) -> list[tuple[int, bytes]]:
        """Return the messages that have a record of their own, with its seq."""
        return [(seq, payload) for seq, payload, _ in self._kept if seq != self.rebuilt_at]

    def reaches(self, taken: RetractionPayload) -> bool:
        """Return whether all that is needed to take something back is in this context.

        If not, older messages must be read from the log: the retraction then includes the
        context. That is so if it takes back another retraction, which may bring some back.
        """
        first = taken.first
        if self.cut or first <= self._replaced_at:
            return False
        for back, seq in reversed(self._retracted or ()):
            if seq < first:
                break
            # Messages that this retraction had hidden come back, and may not be here.
            if taken.takes(seq) and (taken.spans or first > back + 1):
                return False
        return True

    def _take_back(self, seq: int, taken: RetractionPayload) -> None:
        first = taken.first
        stays: list[Kept] = []
        while self._kept and self._kept[-1][0] >= first:
            message = self._kept.pop()
            if taken.takes(message[0]):
                self._count(message[1], -1)
            else:
                stays.append(message)
        # The oldest that stays has nothing before it any more, so it begins an atom.
        if stays and not self._kept:
            stays[-1] = (*stays[-1][:2], True)
        self._kept.extend(reversed(stays))
        earlier = self._retracted or []
        while taken.after is not None and earlier and earlier[-1][0] >= taken.after:
            earlier.pop()  # this one includes it
        earlier.append((first - 1, seq))
        self._retracted = earlier
        self.rebuilt_at = seq

    def follow(self, other: WorkingContext, after: int) -> bool:
        """Take over what another context of this log has after a record; False if it cannot."""
        if other.rebuilt_at > after:
            return False
        for message in other._kept:
            if message[0] > after:
                self._kept.append(message)
                self._count(message[1])
        self.trim()
        return True

    def _count(self, payload: bytes, sign: int = 1) -> None:
        size = len(payload)
        text = text_bytes(payload) if self._is_exact and size >= SEEN else size
        self._size += sign * text
        self.inline += sign * (size - text)

    def _count_exactly(self) -> None:
        """Count text and media apart, from now on."""
        if not self._is_exact:
            self._is_exact = True
            self._size = self.inline = 0
            for _, payload, _ in self._kept:
                self._count(payload)

    def trim(self) -> None:
        """Drop the oldest atoms until the others fit; the newest stays."""
        if self._size <= self.limit and self.inline <= HELD_BYTES:
            return
        self._count_exactly()
        kept, end = self._kept, 0
        size, inline = left = self._size, self.inline
        for at, (_, payload, begins) in enumerate(kept):
            if begins:
                end, left = at, (size, inline)
                if size <= self.limit and inline <= HELD_BYTES:
                    break
            text = text_bytes(payload) if inline else len(payload)  # dear: only if there are any
            size -= text
            inline -= len(payload) - text
        # As they were at the atom where the loop has stopped: that and all after it stay.
        self._size, self.inline = left
        for dropped in kept[:end]:
            self.cut = True
            payload = dropped[1]
            if not payload.startswith(_NO_SYSTEM) and _role(payload) == "system":
                self.system = dropped
        del kept[:end]

    def _replace(self, seq: int, payload: bytes) -> None:
        rebuilt = decode(payload, _Rebuilt)
        self.rebuilt_at = self._replaced_at = seq
        self._retracted = None
        self._kept.clear()
        self._size = self.inline = 0
        self.system = None
        self.cut = False
        self.epoch_id = rebuilt.epoch_id
        self.last_compaction_ts = rebuilt.last_compaction_ts
        self.system_prompt_sha256 = rebuilt.system_prompt_sha256
        for raw in rebuilt.messages:
            self._add(seq, bytes(raw))
        self.trim()

    def snapshot(self, agent_id: str, session_id: str) -> bytes:
        """Return the stored form, as of the last record that was fed."""
        begins = [at for at, kept in enumerate(self._kept) if kept[2]]
        retained = self._kept if self.system is None else [self.system, *self._kept]
        return msgspec.json.encode(
            Snapshot(
                schema_version=SCHEMA_VERSION,
                agent_id=agent_id,
                session_id=sys.intern(session_id),  # msgspec knows a default by identity
                epoch_id=self.epoch_id,
                last_compaction_ts=self.last_compaction_ts,
                seq=self.seq,
                system_prompt_sha256=self.system_prompt_sha256,
                messages=tuple([msgspec.Raw(payload) for _, payload, _ in retained]),
                message_seqs=tuple([seq for seq, _, _ in retained]),
                atoms=tuple([end - at for at, end in pairwise([*begins, len(self._kept)])]),
                pinned=self.system is not None,
                cut=self.cut,
                rebuilt_at=self.rebuilt_at,
            )
        )

    def as_record(self, reason: str) -> bytes:
        """Return the payload of a record that restores this context."""
        retained = self._kept if self.system is None else [self.system, *self._kept]
        return msgspec.json.encode(
            _Rebuilt(
                messages=[msgspec.Raw(payload) for _, payload, _ in retained],
                epoch_id=self.epoch_id,
                last_compaction_ts=self.last_compaction_ts,
                system_prompt_sha256=self.system_prompt_sha256,
                reason=reason,
            )
        )

    @classmethod
    def of_snapshot(
        cls, snapshot: Snapshot, limit: int, source: bytes | None = None
    ) -> WorkingContext:
        """Return the context that a valid snapshot holds; *source* is what it was decoded from."""
        context = cls(limit)
        context.cut = snapshot.cut
        context.rebuilt_at = context._replaced_at = min(snapshot.rebuilt_at, snapshot.seq)
        context.seq = snapshot.seq
        context.epoch_id = snapshot.epoch_id
        context.last_compaction_ts = snapshot.last_compaction_ts
        context.system_prompt_sha256 = snapshot.system_prompt_sha256
        size = sum([memoryview(raw).nbytes for raw in snapshot.messages])
        counts = {len(snapshot.messages), sum(snapshot.atoms), len(snapshot.message_seqs)}
        is_regular = len(counts) == 1 and min(snapshot.atoms, default=0) > 0
        # Nothing has to be cut: it stays encoded until it is used.
        if is_regular and not snapshot.pinned and size <= limit and not context._is_exact:
            context._snapshot, context._source = snapshot, source
            context._size = size
        else:
            context._take_out(snapshot)
            context.trim()
        return context

    def _take_out(self, snapshot: Snapshot) -> None:
        """Copy and count the messages of a snapshot: a good part of a restore, if it is long."""
        self._size = self.inline = 0
        seqs = snapshot.message_seqs or [snapshot.seq] * len(snapshot.messages)
        retained = [(seq, bytes(raw)) for seq, raw in zip(seqs, snapshot.messages, strict=True)]
        if snapshot.pinned:
            self.system = (*retained.pop(0), True)
        if snapshot.atoms:
            self._regroup(retained, snapshot.atoms)
            for _, message in retained:
                self._count(message)
        else:  # written by another program: the roles define the atoms
            for seq, message in retained:
                self._add(seq, message)

    def _add(self, seq: int, message: bytes) -> None:
        """Add a message; its role decides whether it begins an atom."""
        self._kept.append((seq, message, _role(message) != "tool" or not self._kept))
        self._count(message)

    def _regroup(self, messages: list[tuple[int, bytes]], atoms: Sequence[int]) -> None:
        if sum(atoms) != len(messages) or min(atoms) < 1:
            raise CorruptRecordError(
                f"the snapshot's atoms count {sum(atoms)} messages, it holds {len(messages)}"
            )
        begins = {0, *accumulate(atoms)}
        self._kept.extend(
            (seq, message, at in begins) for at, (seq, message) in enumerate(messages)
        )


def _role(payload: bytes) -> str:
    return decoder_of(MessageRole).decode(payload).role


# Budgets count bytes of the stored JSON, and tokens by ``count_tokens``: by default a quarter of
# the bytes, which is close for English text and too much for most other JSON. Pass your model's own
# counter where that matters. Images and other media count as tokens alone.


CountTokens = Callable[[Message], int]
"""Return how many tokens a message takes."""

BYTES_A_TOKEN: Final = 4
_LEAST_MEDIUM: Final = 85
"""Fewer tokens than that no image takes: as long as that fits, nothing has to be counted."""


def bytes_of(message: Message) -> int:
    """Return about how many bytes of JSON a message takes, exact enough for a budget.

    Without its images and other media, which count as tokens.
    """
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_payload"] = message.tool_calls
    if message.tool_result is not None:
        fields["tool_payload"] = message.tool_result
    for name in ("image_urls", "audio_urls", "video_urls"):
        if getattr(message, name):
            fields[name] = getattr(message, name)
    extra = sum(len(bytes(raw)) for raw in message.extra.values())
    return text_bytes(msgspec.json.encode(fields, enc_hook=repr)) + extra


def estimated_tokens(message: Message) -> int:
    """Return a quarter of a message's bytes, rounded up, and what its media take.

    >>> estimated_tokens(Message.user("Where is the harbor?"))
    12
    """
    media = sum(estimated(medium) for medium, _ in media_of(message))
    return -(-bytes_of(message) // BYTES_A_TOKEN) + media


def tokens_of(messages: Iterable[Message], count: CountTokens) -> int:
    """Return how many tokens messages take in total."""
    return sum(count(message) for message in messages)
