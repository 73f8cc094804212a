"""A history of Microsoft's Agent Framework in a store of perdure: `PerdureHistoryProvider`.

A conversation is one session, and a message of the framework one message of it or several: one with
the results of two tools has two. Their envelopes hold what the messages alone do not give back, so
that it comes back as the framework's own ``to_dict`` has it. The state of an `AgentSession` is a
named state of the session.

A save is one group of the log: a crash leaves all of it or nothing. Nothing is rewritten.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakKeyDictionary

from perdure._lib.lazy import from_extra
from perdure.adapters.claims import Large, claimed, encode_item, storable, unwrapped
from perdure.adapters.envelopes import PartEnvelope, Piece, joined, read_parts
from perdure.adapters.items import (
    AdapterManager,
    Recent,
    StoreAdapter,
    append_turn,
    newest_messages,
)
from perdure.adapters.versions import require_readable, unreadable, warn_untested
from perdure.errors import InvalidArgumentError, NotStorableError
from perdure.records.keys import SessionKey, session_key
from perdure.records.messages import Message, ToolCall
from perdure.records.records import Entry
from perdure.session.internals import (
    LogPlace,
    accept,
    place_of,
    state_entry,
)
from perdure.session.manager import SessionManager
from perdure.session.session import Session, SessionView

with from_extra(
    "agent_framework",
    used_by="PerdureHistoryProvider",
    name="the Agent Framework",
    extra="agent-framework",
):
    import agent_framework as sdk
    from agent_framework._sessions import filter_new_messages
    from agent_framework.exceptions import ContentError

if TYPE_CHECKING:
    from perdure.lease import OnHeld
PACKAGE: Final = "agent-framework-core"
warn_untested(PACKAGE)

SDK: Final = "agent-framework"
SHAPE: Final = 1
"""The version of what is stored here of a message."""
SESSION_STATE: Final = "agent-framework/session"
"""The named state that keeps an `AgentSession`."""
KNOWN: Final = 10_000
"""Number of sessions whose last place read or written here is remembered."""

END: Final = 64
"""Number of a session's newest messages that are kept in memory, to compare with the next save."""


class MessageEnvelope(PartEnvelope, frozen=True, omit_defaults=True):
    """Fields stored with a message that is one of the framework's, or a part of one."""


@final
class PerdureHistoryProvider(StoreAdapter, sdk.HistoryProvider):
    """A ``HistoryProvider`` of the Agent Framework in any store of perdure.

    Each conversation is a session, whose id is the ``session_id`` of the `AgentSession`. A save
    returns once it is durable, and appends only what the history does not end with already, by the
    framework's own rule. Reading takes no lease; a write asks the process that has the session for
    it, and the session is given back when it has been idle for some minutes, or by `aclose`.

    Args:
        sessions: Where they are kept: what ``perdure.connect(url)`` returns, once that is open.
            None for a manager of its own: see `from_url`.
        source_id: The provider's name in the framework, also in the state of an `AgentSession`.
            A new conversation takes its owner from ``"owner"`` there.
        load_messages: As for ``HistoryProvider``, like the next four.
        store_inputs: As there.
        store_context_messages: As there.
        store_context_from: As there.
        store_outputs: As there.
        skip_excluded: Leaves out messages that a compaction has marked as excluded.
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
        source_id: str = "perdure",
        load_messages: bool = True,
        store_inputs: bool = True,
        store_context_messages: bool = False,
        store_context_from: set[str] | None = None,
        store_outputs: bool = True,
        skip_excluded: bool = False,
        tenant: str = "",
        tags: Sequence[str] = (),
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        super().__init__(
            source_id,
            load_messages=load_messages,
            store_inputs=store_inputs,
            store_context_messages=store_context_messages,
            store_context_from=store_context_from,
            store_outputs=store_outputs,
        )
        self.skip_excluded: bool = skip_excluded
        self._connection = AdapterManager(
            sessions,
            instead="PerdureHistoryProvider.from_url(url)",
            tenant=tenant,
            tags=tags,
            on_held=on_held,
            wait=wait,
        )
        self._places: Recent[SessionKey, LogPlace | None] = Recent(KNOWN)
        """Ends of sessions' logs when they were last read or written here."""
        self._ends: WeakKeyDictionary[Session, tuple[int, list[sdk.Message]]] = WeakKeyDictionary()
        """The newest messages of sessions held here, and the version that they are as of."""

    # What the framework calls

    async def get_messages(
        self, session_id: str | None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[sdk.Message]:
        """Return a conversation's messages, oldest first; they share nothing with what is stored.

        Args:
            session_id: Which.
            state: Not used.
            kwargs: Not used.

        Raises:
            FormatError: Another version of the framework wrote one that this one cannot read.

        """
        source = await self._peek(self._key(session_id))
        if source is None:
            return []
        messages = await _newest(source, None)
        if self.skip_excluded:
            return [each for each in messages if not each.additional_properties.get("_excluded")]
        return messages

    async def save_messages(
        self,
        session_id: str | None,
        messages: Sequence[sdk.Message],
        *,
        state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append messages, all or none of them, and return once they are durable.

        If the first new one is a user's, a turn of the session begins with it.

        Args:
            session_id: Which conversation.
            messages: New ones, or a transcript that ends with them.
            state: The provider's part of the state of an `AgentSession`, for its ``"owner"``.
            kwargs: Not used.

        Raises:
            NotStorableError: A message is not JSON, or could not be read back; nothing was stored.
            TooLargeError: A message is larger than 256 MiB, or than the limit for a record, and the
                store keeps no blobs; nothing was stored.
            LeaseHeldError: Another process keeps holding the session.
            LeaseLostError: It was deleted since it was read here, or another process has taken it
                over meanwhile, which the error names.

        """
        key = self._key(session_id)
        encoded = [_encoded(message, at) for at, message in enumerate(messages)]
        given = [message for message, _ in encoded]

        async def append(session: Session) -> bool:
            version, count = session.version, len(given) + 1  # the rule looks no further back
            seen, known = self._ends.get(session, (0, []))
            if seen != version or len(known) < count:
                known = await _newest(session, count)
            new = len(filter_new_messages(known[-count:], given))
            fresh = encoded[len(given) - new :]
            entries = await claimed(session, (entry for _, each in fresh for entry in each))
            if session.version != version:
                return False
            if new:
                append_turn(session, entries, is_asked=fresh[0][0].role == "user")
            end = [*known, *(message for message, _ in fresh)][-END:]
            self._ends[session] = session.version, end
            return True

        if encoded:
            await self._change(key, append, _owner_in(state))

    # The rest of an AgentSession

    async def save_session(self, session: sdk.AgentSession) -> None:
        """Store the state of an `AgentSession`, beside its messages; return once it is durable.

        Raises as `save_messages` does.
        """
        key = self._key(session.session_id)
        what = f"the state of session {key}"
        try:
            text = json.dumps(session.to_dict())
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{what} is not JSON ({error}): register its types with register_state_type"
            raise NotStorableError(message, path="state") from error
        require_readable(what, PACKAGE, partial(_session, text, session.session_id))

        async def append(stored: Session) -> bool:
            state = await storable(stored, {SESSION_STATE: text})
            accept(stored, (state_entry(SESSION_STATE, state[SESSION_STATE]),))
            return True

        await self._change(key, append, _owner_in(session.state.get(self.source_id)))

    async def load_session(self, session_id: str) -> sdk.AgentSession:
        """Return the `AgentSession` of a conversation, as it was stored; else a new one.

        Raises:
            FormatError: Its state cannot be read, such as for a type that is not registered.

        """
        key = self._key(session_id)
        source = await self._peek(key)
        state = None if source is None else await source.state.get(SESSION_STATE)
        if source is None or state is None:
            return sdk.AgentSession(session_id=session_id)
        text = (await unwrapped(source, {SESSION_STATE: state}))[SESSION_STATE]
        try:
            return _session(text, session_id)
        except (ValueError, TypeError, KeyError) as error:
            raise unreadable(f"the state of session {key}", PACKAGE, ValueError(error)) from error

    # Inside

    def _key(self, session_id: str | None) -> SessionKey:
        if session_id is None:
            message = "session_id is None: run the agent with session=AgentSession(session_id=…)"
            raise InvalidArgumentError(message, option="session_id")
        return session_key(session_id, tenant=self._connection.tenant)

    async def _peek(self, key: SessionKey) -> Session | SessionView | None:
        source = await self._connection.peek(key)
        self._places.put(key, None if source is None else place_of(source), 1)
        return source

    async def _change(
        self, key: SessionKey, append: Callable[[Session], Awaitable[bool]], owner: str | None
    ) -> None:
        # A run that goes on does not bring back what was deleted since it began.
        place = self._places.get(key)
        known = () if place is None else (place,)
        after = await self._connection.change(key, append, owner=owner, of=known)
        self._places.put(key, after, 1)


def _owner_in(state: Any) -> str | None:
    owner = state.get("owner") if isinstance(state, dict) else None
    return owner if isinstance(owner, str) else None


def _session(text: str, session_id: str) -> sdk.AgentSession:
    # A fork or a copy that perdure has made has another id than it was stored with.
    return sdk.AgentSession.from_dict({**json.loads(text), "session_id": session_id})


# Messages as they are stored


def _encoded(message: sdk.Message, at: int) -> tuple[sdk.Message, list[Entry | Large]]:
    """Return a message as it will be read back, and as records.

    Raises:
        NotStorableError: It is not JSON.

    """
    path = f"messages[{at}]"
    try:
        plain = message.to_dict()
        data = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        text = f"{path} is not JSON ({error}): give its contents values that are"
        raise NotStorableError(text, path=path) from error
    copy = require_readable(path, PACKAGE, partial(_decoded, data))

    def envelope(at: int, of: int, pieces: tuple[Piece, ...]) -> MessageEnvelope:
        return MessageEnvelope(
            SDK, SHAPE, id=str(message.message_id or ""), at=at, of=of, pieces=pieces
        )

    shown = _shown(json.loads(data))
    return copy, encode_item(data, shown, envelope, now=time.time(), what=path, path=path)


def _decoded(data: bytes) -> sdk.Message:
    """Return a message of the framework.

    Raises:
        ValueError: It cannot be read.

    """
    try:
        return sdk.Message.from_dict(json.loads(data))
    except (ContentError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{error}") from error


def _shown(message: dict[str, Any]) -> list[Message]:
    """Return what a message of the framework says, as perdure's messages; at least one."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in message["contents"]:
        kinds.setdefault(each["type"], []).append(each)
    texts = [each["text"] for each in kinds.get("text", ()) if _has_text(each)]
    thoughts = [each["text"] for each in kinds.get("text_reasoning", ()) if _has_text(each)]
    role = {"user": "user", "system": "system", "developer": "system"}.get(message["role"])
    said = Message(
        role=role or "assistant",
        content="\n".join(texts) if texts else None,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=tuple(map(_shown_call, kinds.get("function_call", ()))),
        image_urls=tuple(each["uri"] for each in kinds.get("uri", ()) if _is_image(each)),
    )
    results = [_shown_result(each) for each in kinds.get("function_result", ())]
    is_said = texts or thoughts or said.tool_calls or said.image_urls
    return [said, *results] if is_said or not results else results


def _has_text(content: dict[str, Any]) -> bool:
    return isinstance(content.get("text"), str) and content["text"] != ""


def _is_image(content: dict[str, Any]) -> bool:
    return str(content.get("media_type")).startswith("image/")


def _shown_call(content: dict[str, Any]) -> ToolCall:
    arguments = content.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return ToolCall(content.get("call_id", ""), content.get("name", ""), arguments)


def _shown_result(content: dict[str, Any]) -> Message:
    result, error = content.get("result"), content.get("exception")
    return Message.tool(content.get("call_id", ""), None if error else result, error=error)


# Reading


async def _newest(source: Session | SessionView, count: int | None) -> list[sdk.Message]:
    """Return the newest messages, so many or more of them if there are; all for None."""
    size = count
    while True:
        stored, is_all = await newest_messages(source, size)
        found = list(_messages(stored, source.key))
        if size is None or count is None or is_all or len(found) >= count:
            return found
        size *= 2


def _messages(stored: Iterable[tuple[int, Message]], key: SessionKey) -> Iterator[sdk.Message]:
    for seq, message, parts in read_parts(stored, MessageEnvelope, sdk=SDK, newest=SHAPE):
        try:
            yield _decoded(joined(parts)) if parts else _made_of(message)
        except ValueError as error:
            raise unreadable(
                f"session {key}: the message of record {seq}", PACKAGE, error
            ) from error


def _made_of(message: Message) -> sdk.Message:
    """Return a message that the framework has not stored, as its model would see it."""
    contents: list[sdk.Content] = []
    if message.reasoning:
        contents.append(sdk.Content.from_text_reasoning(text=message.reasoning))
    if message.text:
        contents.append(sdk.Content.from_text(message.text))
    contents += [sdk.Content.from_uri(url, media_type="image/*") for url in message.image_urls]
    contents += [
        sdk.Content.from_function_call(call.id, call.name, arguments=call.arguments)
        for call in message.tool_calls
    ]
    if message.tool_result is not None:
        call_id, result = message.tool_result.call_id, message.tool_result.result
        error = message.tool_result.error
        made = sdk.Content.from_function_result(call_id, result=result, exception=error)
        contents.append(made)
    return sdk.Message(message.role, contents)
