"""A conversation store of Pydantic AI in a store of perdure: `PerdureConversationStore`.

A conversation is one session, and an entry of it one message or several: a request with the
results of two tools has two. Their envelopes hold what the messages alone do not give back, so that
the entry's bytes are those of the SDK's own `ModelMessagesTypeAdapter`. The conversation's record
is a named state of the session.

A save is one group of the log: a crash leaves all of it or nothing. The session's context is always
the history up to the record's head: a branch is a retraction, a fork is a fork of the log.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, cast, final
from weakref import WeakKeyDictionary

import msgspec
import pydantic

from perdure._lib.lazy import from_extra
from perdure.adapters.claims import Large, claimed, claimed_in, encode_item, filled
from perdure.adapters.envelopes import (
    PartEnvelope,
    Piece,
    joined,
    read_envelope,
    read_parts,
)
from perdure.adapters.exact import dumped_by, loaded_by, not_json_at, shown
from perdure.adapters.items import (
    AdapterManager,
    Recent,
    StoreAdapter,
    append_turn,
    named_key,
    newest_messages,
)
from perdure.adapters.versions import require_readable, unreadable, warn_untested
from perdure.errors import (
    InvalidArgumentError,
    NotStorableError,
    SessionError,
    SessionNotFoundError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.records.keys import DEFAULT_SESSION, SessionKey
from perdure.records.media import decode_read
from perdure.records.messages import Message, ToolCall, encode_message
from perdure.records.records import Entry
from perdure.session.contents import meta_entry
from perdure.session.internals import (
    delete_unchanged,
    fork_at,
    messages_in_log,
    replace_tail,
    state_entry,
    store_below,
)
from perdure.session.manager import SessionManager
from perdure.session.session import Session, SessionView

with from_extra(
    "pydantic_ai", used_by="PerdureConversationStore", name="Pydantic AI", extra="pydantic-ai"
):
    from pydantic_ai import conversation_store as sdk, messages as sdk_messages

if TYPE_CHECKING:
    from perdure.lease import OnHeld
warn_untested("pydantic-ai-slim")

SDK: Final = "pydantic-ai"
SHAPE: Final = 1
"""The version of what is stored here of an entry."""
RECORD: Final = "pydantic-ai/conversation"
"""The named state that keeps the conversation's record."""
MESSAGES: Final[pydantic.TypeAdapter[list[sdk_messages.ModelMessage]]] = (
    sdk_messages.ModelMessagesTypeAdapter
)
RECORDS: Final = pydantic.TypeAdapter(sdk.ConversationRecord)
KNOWN: Final = 10_000
"""Entries whose conversation is remembered."""


class EntryEnvelope(PartEnvelope, frozen=True, omit_defaults=False):
    """Fields stored with a message that is an entry, or a part of one."""


class _Head(msgspec.Struct, frozen=True):
    """Facts about a stored record that a write needs."""

    revision: str
    head_id: str | None = None
    scope: str | None = None
    format_version: int = 1


class _Stored(NamedTuple):
    """An entry as it is stored."""

    id: str
    parent: str | None
    seq: int
    """Its last record."""
    parts: tuple[tuple[Message, EntryEnvelope], ...]

    @property
    def data(self) -> bytes:
        return joined(self.parts)


@final
class PerdureConversationStore(StoreAdapter, sdk.ConversationStore):
    """A ``ConversationStore`` of Pydantic AI in any store of perdure.

    Each conversation is a session. A save returns once it is durable. Several processes may save
    the same conversation: a save that does not know the newest one raises the SDK's
    ``ConversationConflict``. Reading takes no lease; a write asks the process that has the session
    for it, and the session is given back when it has been idle for some minutes, or by `aclose`.

    Args:
        sessions: Where they are kept: what ``perdure.connect(url)`` returns, once that is open.
            None for a manager of its own: see `from_url`.
        tenant: Whose they are, where customers share a store.
        tags: Labels for listing.
        on_held: What a write does if another process holds the session: ``"handover"`` asks for it,
            ``"steal"`` waits for it to be released or to expire, ``"raise"`` raises at once.
        wait: Seconds to wait for another process.

    Raises:
        InvalidArgumentError: ``sessions`` is no manager.

    """

    def __init__(
        self,
        sessions: SessionManager | None,
        *,
        tenant: str = "",
        tags: Sequence[str] = (),
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        self._connection = AdapterManager(
            sessions,
            instead="PerdureConversationStore.from_url(url)",
            tenant=tenant,
            tags=tags,
            on_held=on_held,
            wait=wait,
        )
        self._conversation_of: Recent[str, str] = Recent(KNOWN)
        self._records: WeakKeyDictionary[Session, tuple[int, str]] = WeakKeyDictionary()
        """Of sessions that are held here: a version, and the record's JSON as of it."""

    # What the SDK calls

    async def read_record(self, conversation_id: str) -> sdk.ConversationRecord | None:
        """Return a conversation's record; None if there is none."""
        source = await self._connection.peek(self._key(conversation_id))
        return None if source is None else await self._record(source)

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> list[sdk.ConversationRecord]:
        """Return the records, or those of a scope, the newest first; reads every conversation."""
        records = []
        async for source in self._conversations():
            record = await self._record(source)
            if record is not None and scope in (None, record.scope):
                records.append(record)
        records.sort(key=lambda record: record.updated_at, reverse=True)
        return records[:limit]

    async def write_record(
        self,
        record: sdk.ConversationRecord,
        *,
        new_entries: Sequence[sdk.ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        """Store a record and its new entries, all or nothing, and return once they are durable.

        Raises:
            ConversationConflict: The stored record is another one than expected, or there is no
                such entry as its history ends with.
            NotStorableError: A message is not JSON, or could not be read back; nothing was stored.
            TooLargeError: A message is larger than a record, and the store keeps no blobs; nothing
                was stored.
            LeaseHeldError: Another process keeps holding the session.
            LeaseLostError: Another process has taken it over meanwhile; the error names it.

        """
        key = self._key(record.conversation_id)
        change = _Change(record, expected_revision, new_entries)
        base = change.base
        if expected_revision is None and base is not None:
            await self._fork(key, change, base)
        else:
            apply, create = partial(self._apply, change), expected_revision is None
            try:
                await self._connection.change(key, apply, create=create)
            except SessionNotFoundError:
                change.conflict()
        self._remember(key, [record.head_id, *record.branches])

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        """Delete a conversation, and its entries; a fork keeps its own.

        Raises:
            ConversationConflict: The stored record is another one than expected.
            LeaseHeldError: Another process keeps holding the session.

        """
        key = self._key(conversation_id)

        async def drop(session: Session) -> bool:
            version = session.version
            stored = await self._head(session)
            if stored is None or stored.revision != expected_revision:
                raise sdk.ConversationConflict(conversation_id)
            return await replace_tail(session, 0, state_entry(RECORD, None), version=version)

        # First for the SDK, and for all processes: what is removed then is no conversation.
        try:
            place = await self._connection.change(key, drop, create=False)
        except SessionNotFoundError as error:
            raise sdk.ConversationConflict(conversation_id) from error
        sessions = await self._connection.manager()
        await delete_unchanged(sessions, key, place.seq, wait=self._connection.wait)

    async def read_entry(self, entry_id: str) -> sdk.ConversationEntry:
        """Return an entry.

        It is looked for in the conversation that it was last seen in, and then in all of them.

        Raises:
            KeyError: There is no such entry.

        """
        (entry,) = await self.read_history(entry_id, limit=1)
        return entry

    async def read_history(
        self, head_id: str | None, *, limit: int | None = None
    ) -> list[sdk.ConversationEntry]:
        """Return the entries up to one, oldest first, or the last of them, in one read.

        What `prune` has removed is not among them.

        Raises:
            KeyError: There is no such entry.
            FormatError: Another version of the SDK wrote one that the installed one cannot read.

        """
        if head_id is None or (limit is not None and limit <= 0):
            return []
        found = await self._find(head_id, limit)
        if found is None:
            raise KeyError(head_id)
        key, chain = found
        self._remember(key, [stored.id for stored in chain])
        try:
            messages = loaded_by(MESSAGES, b"[%b]" % b",".join(stored.data for stored in chain))
        except ValueError as error:
            what = f"conversation {key}: its history up to entry {head_id}"
            raise unreadable(what, "pydantic-ai-slim", error) from error
        return [
            sdk.ConversationEntry(id=stored.id, parent_id=stored.parent, message=message)
            for stored, message in zip(chain, messages, strict=True)
        ]

    # Inside

    def _key(self, conversation_id: str) -> SessionKey:
        tenant = self._connection.tenant
        return named_key(
            conversation_id,
            DEFAULT_SESSION,
            tenant,
            agent_is="conversation_id",
            session_is="session id",
        )

    async def _record(self, source: Session | SessionView) -> sdk.ConversationRecord | None:
        text = await self._record_text(source)
        if text is None:
            return None
        try:
            record = loaded_by(RECORDS, text.encode())
        except pydantic.ValidationError as error:
            version = json.loads(text).get("format_version")
            if version in (None, 1):
                raise
            raise _newer(source.key, version) from error
        if record.conversation_id != source.key.agent:  # a copy or a fork that perdure has made
            record = dataclasses.replace(record, conversation_id=source.key.agent)
        self._remember(source.key, [record.head_id, *record.branches])
        return record

    async def _head(self, session: Session) -> _Head | None:
        text = await self._record_text(session)
        if text is None:
            return None
        head = msgspec.convert(json.loads(text), _Head)
        if head.format_version != 1:
            raise _newer(session.key, head.format_version)
        return head

    async def _record_text(self, source: Session | SessionView) -> str | None:
        if not isinstance(source, Session):
            return cast("str | None", await source.state.get(RECORD))
        known, version = self._records.get(source), source.version
        if known is not None and known[0] == version:  # only its holder changes a session
            return known[1]
        text: str | None = await source.state.get(RECORD)
        if text is not None and version == source.version:
            self._records[source] = version, text
        return text

    def _remember(self, key: SessionKey, entries: Iterable[str | None]) -> None:
        for entry in entries:
            if entry is not None:
                self._conversation_of.put(entry, key.agent, 1)

    async def _conversations(self) -> AsyncIterator[Session | SessionView]:
        async for info in self._connection.listed():
            if info.key.session == DEFAULT_SESSION:
                source = await self._connection.peek(info.key)
                if source is not None:
                    yield source

    async def _find(
        self, entry_id: str, limit: int | None, *hints: str | None
    ) -> tuple[SessionKey, list[_Stored]] | None:
        """Return an entry with those before it, and a conversation that has them."""
        tried = set[SessionKey]()
        for hint in (self._conversation_of.get(entry_id), *hints):
            source = None if hint is None else await self._connection.peek(self._key(hint))
            if source is not None and source.key not in tried:
                tried.add(source.key)
                chain = await self._chain_in(source, entry_id, limit)
                if chain:
                    return source.key, chain
        async for source in self._conversations():
            if source.key not in tried:
                chain = await self._chain_in(source, entry_id, limit)
                if chain:
                    return source.key, chain
        return None

    async def _chain_in(
        self, source: Session | SessionView, entry_id: str, limit: int | None
    ) -> list[_Stored]:
        if await source.state.get(RECORD) is None:  # of none, or of one that is being deleted
            return []
        return await _chain(source, entry_id, limit)

    async def _fork(self, key: SessionKey, change: _Change, base: str) -> None:
        """Begin a conversation with the entries of another one."""
        found = await self._find(base, 1, change.record.forked_from)
        if found is None or found[0] == key:
            change.conflict()
        parent, chain = found
        sessions = await self._connection.manager()
        entries = await claimed_in(store_below(sessions), key, change.entries())
        try:
            await fork_at(sessions, parent, key, chain[-1].seq, *entries)
        except SessionNotFoundError:
            change.conflict()
        except SessionError:
            if await self.read_record(key.agent) is not None:
                change.conflict()
            raise

    async def _apply(self, change: _Change, session: Session) -> bool:
        """Append a change; False if something was appended while this was reading."""
        version = session.version
        stored = await self._head(session)
        is_used = stored is None and bool((await newest_messages(session, 1))[0])
        if session.version != version:
            return False
        if (None if stored is None else stored.revision) != change.expected:
            change.conflict()
        if is_used:
            message = (
                f"session {session.key} exists, and is no conversation of Pydantic AI: choose "
                "another conversation_id, or delete it first"
            )
            raise SessionError(message, key=str(session.key))
        large = change.entries(scope=None if stored is None else stored.scope)
        entries = await claimed(session, large)
        if session.version != version:
            return False
        if change.base != (None if stored is None else stored.head_id):
            after, copied = await self._rewind(session, change)
            return await replace_tail(session, after, *copied, *entries, version=version)
        append_turn(session, entries, is_asked=change.is_asked)
        self._records[session] = session.version, change.text
        return True

    async def _rewind(self, session: Session, change: _Change) -> tuple[int, list[Entry]]:
        """Return the record of the entry to continue from; or 0, and that entry's history."""
        if change.base is None:
            return 0, []
        chain = await _chain(session, change.base, 1)
        if chain:
            return chain[-1].seq, []
        found = await self._find(change.base, None)
        if found is None:
            change.conflict()
        _, chain = found
        parts = [message for stored in chain for message, _ in stored.parts]
        return 0, [*await claimed(session, map(_again, parts))]


class _Change:
    """Records of one write."""

    def __init__(
        self,
        record: sdk.ConversationRecord,
        expected: str | None,
        new_entries: Sequence[sdk.ConversationEntry],
    ) -> None:
        self.record: sdk.ConversationRecord = record
        self.expected: str | None = expected
        self.base: str | None = new_entries[0].parent_id if new_entries else record.head_id
        """The entry that the new ones follow."""
        at = self.base
        for entry in new_entries:
            if entry.parent_id != at:
                break
            at = entry.id
        if at != record.head_id:
            message = "new_entries are each after the one before, and head_id is the last of them"
            raise InvalidArgumentError(message, option="new_entries")
        first = new_entries[0].message if new_entries else None
        self.is_asked: bool = isinstance(first, sdk_messages.ModelRequest) and any(
            isinstance(part, sdk_messages.UserPromptPart) for part in first.parts
        )
        """Whether a user's message is the first, as at the beginning of a run."""
        self._messages = tuple(
            each for at, entry in enumerate(new_entries) for each in _encoded(entry, at)
        )
        self.text: str = _json(record)
        self._state = state_entry(RECORD, self.text)

    def entries(self, *, scope: str | None = None) -> tuple[Entry | Large, ...]:
        """Return the group to append, to a session whose conversation has that scope."""
        owner = self.record.scope
        about = () if not owner or owner == scope else (meta_entry(owner=owner),)
        return (*about, *self._messages, self._state)

    def conflict(self) -> NoReturn:
        """Raise ConversationConflict."""
        raise sdk.ConversationConflict(self.record.conversation_id)


def _newer(key: SessionKey, version: int) -> UnsupportedVersionError:
    message = (
        f"conversation {key} has format {version}, and the installed Pydantic AI reads 1: "
        "upgrade pydantic-ai-slim"
    )
    return UnsupportedVersionError(message, version=version)


def _json(record: sdk.ConversationRecord) -> str:
    what = f"the record of conversation {record.conversation_id!r}"
    try:
        data = dumped_by(RECORDS, record)
    except ValueError as error:
        raise _not_json(record, "record", error) from error
    require_readable(what, "pydantic-ai-slim", partial(loaded_by, RECORDS, data))
    return data.decode()


# Entries as messages


def _encoded(entry: sdk.ConversationEntry, at: int) -> list[Entry | Large]:
    """Return an entry as records; one that is too large for that as a whole.

    Raises:
        NotStorableError: Its message is not JSON.

    """
    what = f"new_entries[{at}]"
    try:
        data = dumped_by(MESSAGES, [entry.message])[1:-1]
    except ValueError as error:
        raise _not_json(entry.message, f"{what}.message", error) from error
    require_readable(what, "pydantic-ai-slim", partial(loaded_by, MESSAGES, b"[%b]" % data))
    try:
        plain = msgspec.json.decode(data)
    except ValueError:  # a number or a character that only Python's own reads
        plain = shown(data)
    when = getattr(entry.message, "timestamp", None)
    now = time.time() if when is None else when.timestamp()

    def envelope(at: int, of: int, pieces: tuple[Piece, ...]) -> EntryEnvelope:
        return EntryEnvelope(SDK, SHAPE, entry.id, entry.parent_id, at, of, pieces)

    return encode_item(data, _shown(plain), envelope, now=now, what=what, path=f"{what}.message")


def _again(message: Message) -> Entry | Large:
    """Return an entry's message as a record of another conversation."""
    try:
        return encode_message(message)
    except TooLargeError as error:
        envelope = read_envelope(message, EntryEnvelope, sdk=SDK, newest=SHAPE)
        if envelope is None:
            raise
        return Large(message, envelope, envelope.id, message.created_at or time.time(), error)


def _not_json(value: Any, at: str, error: ValueError) -> NotStorableError:
    path, part = not_json_at(value, at)
    message = f"the {type(part).__name__} at {path} is not JSON ({error}): return JSON from tools"
    return NotStorableError(message, path=path, type=type(part).__name__)


def _shown(message: dict[str, Any]) -> list[Message]:
    """Return what a message of the SDK says, as perdure's messages; at least one."""
    if message["kind"] == "response":
        return [_shown_response(message["parts"])]
    shown = [each for part in message["parts"] for each in _shown_request(part)]
    return shown or [Message(role="user")]


def _shown_request(part: dict[str, Any]) -> Iterator[Message]:
    kind = part["part_kind"]
    content: Any = part.get("content")
    if kind == "system-prompt":
        yield Message.system(content)
    elif kind == "user-prompt":
        yield _shown_user([content] if isinstance(content, str) else content)
    elif part.get("tool_call_id") and kind in ("tool-return", "retry-prompt"):
        is_error = kind == "retry-prompt" or part.get("outcome", "success") != "success"
        text = content if isinstance(content, str) else json.dumps(content)
        yield Message.tool(
            part["tool_call_id"],
            None if is_error else content,
            name=part.get("tool_name"),
            error=text if is_error else None,
        )
    elif isinstance(content, str):
        yield Message.user(content)


def _shown_user(content: Sequence[Any]) -> Message:
    texts: list[str] = []
    urls: dict[str, list[str]] = {"image-url": [], "audio-url": [], "video-url": []}
    for item in content:
        if isinstance(item, str):
            texts.append(item)
        elif item.get("kind") in urls:
            urls[item["kind"]].append(item["url"])
        elif item.get("kind") == "text-content":
            texts.append(item["content"])
    images, audios, videos = urls.values()
    text = "\n".join(texts) if texts else None
    return Message.user(text, image_urls=images, audio_urls=audios, video_urls=videos)


def _shown_response(parts: Sequence[dict[str, Any]]) -> Message:
    texts = [part["content"] for part in parts if part["part_kind"] == "text"]
    thoughts = [part["content"] for part in parts if part["part_kind"] == "thinking"]
    calls = [
        ToolCall(part["tool_call_id"], part["tool_name"], _arguments(part["args"]))
        for part in parts
        if part["part_kind"] == "tool-call"
    ]
    return Message.assistant(
        "".join(texts) if texts else None,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=calls,
    )


def _arguments(given: Any) -> Any:
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        return json.loads(given)
    except ValueError:
        return given


# Reading


def _stored(messages: Iterable[tuple[int, Message]]) -> dict[str, _Stored]:
    """Return the entries that messages are; of some that began before these, nothing."""
    found: dict[str, _Stored] = {}
    for seq, _, parts in read_parts(messages, EntryEnvelope, sdk=SDK, newest=SHAPE):
        if parts:
            about = parts[0][1]
            found[about.id] = _Stored(about.id, about.parent, seq, parts)
    return found


async def _chain(source: Session | SessionView, head: str, limit: int | None) -> list[_Stored]:
    """Return an entry after those before it, within a limit; nothing if it is not there.

    It is looked for in the newest messages, then in all of the context, then in the log, which has
    those that were retracted, too.
    """
    count = None if limit is None else 2 * limit + 2
    messages, is_all = await newest_messages(source, count)
    known = _stored(messages)
    chain, missing = _walked(known, head, limit)
    if missing is not None and not is_all:
        messages, _ = await newest_messages(source, None)
        known = _stored(messages)
        chain, missing = _walked(known, head, limit)
    if missing is not None:
        unsaved = source.unsaved() if isinstance(source, Session) else ()
        log = await messages_in_log(source, unsaved)
        known |= _stored(
            await filled(source, [(seq, decode_read(payload)) for seq, payload in log])
        )
        chain, _ = _walked(known, head, limit)
    return chain


def _walked(
    known: dict[str, _Stored], head: str, limit: int | None
) -> tuple[list[_Stored], str | None]:
    """Return the chain that ends with an entry, and the first one of it that is not known."""
    chain: list[_Stored] = []
    entry: str | None = head
    while entry is not None and (limit is None or len(chain) < limit):
        stored = known.get(entry)
        if stored is None:
            return chain[::-1], entry
        chain.append(stored)
        entry = stored.parent
    return chain[::-1], None
