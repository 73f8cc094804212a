"""Large tool results: a blob of their own, and in the conversation a preview and a reference.

    "tool_result": "<preview>"
    "tool_result_ref": {"sha256", "bytes", "media_type", "preview", "types"?}

The blob is durable before the record that names it, and shared between forks, since its name is
its hash. Text and bytes lie in it as they are, everything else as JSON. The model is shown
the whole result: `resolved` brings it back. A blob that is lost leaves the preview, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from perdure.errors import CorruptRecordError, FormatError, NotStorableError, StoreError
from perdure.records.chunks import name_of
from perdure.records.json import decode, encode
from perdure.records.messages import Extra, Message, ToolResult
from perdure.records.values import OnUnstorable, Tags, Types, decode_value, encode_value
from perdure.session.internals import registry_of, store_of
from perdure.session.session import Session, SessionView

REFERENCE: Final = "tool_result_ref"
"""The field of a stored result that says where all of it is."""
PREVIEW_CHARS: Final = 1000
BYTES: Final = "application/octet-stream"
TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"


class ResultReference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reference to a large tool result."""

    sha256: str
    """The blob's name, and its hash."""
    bytes: int
    media_type: str
    preview: str
    """How it begins."""
    types: Tags | None = None
    """What JSON cannot tell of it."""


def reference_of(message: Message) -> ResultReference | None:
    """Return the reference to a message's tool result, None if the message has it."""
    result = message.tool_result
    raw = None if result is None else result.extra.get(REFERENCE)
    if raw is None:
        return None
    try:
        return decode(bytes(raw), ResultReference)
    except FormatError:  # a field of somebody else's
        return None


async def claimed(
    result: ToolResult,
    session: Session,
    *,
    max_inline_bytes: int,
    unstorable: OnUnstorable = "raise",
) -> ToolResult:
    """Return a result as it is to be kept: a large one's blob is durable then.

    A result that cannot be stored is returned as it is, and so is a large one where the store
    keeps no blobs, or cannot be reached: the log takes it then.
    """
    types = registry_of(session)
    if _is_small(result.result, max_inline_bytes) and unstorable == "raise":
        return result
    try:
        data, tags = encode_value(result.result, types, on_unstorable=unstorable)
    except NotStorableError:
        return result
    if unstorable == "repr":
        result = _with(result, decode_value(data, tags, types))
    store = store_of(session)
    if len(data) <= max_inline_bytes or not store.capabilities.blobs:
        return result
    blob, reference = _blob(result.result, data, tags)
    try:
        await store.put_blobs(session.key.tenant, {reference.sha256: blob})
    except StoreError:
        return result
    extra = {**result.extra, REFERENCE: msgspec.Raw(encode(reference))}
    shown = f"{reference.preview}\n[… {reference.bytes} bytes in all; this is how it begins]"
    return _with(result, shown, extra)


async def resolved(session: Session | SessionView, messages: Sequence[Message]) -> list[Message]:
    """Return messages with their large tool results brought back from their blobs.

    A result whose blob is lost or damaged keeps its preview, and a line that says so.

    Raises:
        StoreUnavailableError: The store cannot be reached.

    """
    return [await _resolved(session, message) for message in messages]


async def _resolved(session: Session | SessionView, message: Message) -> Message:
    reference, result = reference_of(message), message.tool_result
    if reference is None or result is None:
        return message
    data = await _read(session, reference)
    if data is None:
        lost = f"{reference.preview}\n[… the rest of {reference.bytes} bytes is lost]"
        return msgspec.structs.replace(message, tool_result=_with(result, lost))
    value = _value(data, reference, registry_of(session))
    extra = {name: raw for name, raw in result.extra.items() if name != REFERENCE}
    return msgspec.structs.replace(message, tool_result=_with(result, value, extra))


async def _read(session: Session | SessionView, reference: ResultReference) -> bytes | None:
    """Return a blob's bytes, None if they are lost or damaged."""
    try:
        return await store_of(session).get_blob(session.key.tenant, reference.sha256)
    except CorruptRecordError:
        return None


def _is_small(value: Any, limit: int) -> bool:
    """Say at a glance whether a value is small; False where that needs a look."""
    if isinstance(value, str | bytes):
        return 6 * len(value) + 2 <= limit  # at worst, each character is escaped
    return value is None or isinstance(value, bool | float)


def _blob(value: Any, data: bytes, tags: Tags | None) -> tuple[bytes, ResultReference]:
    kind = JSON
    if type(value) is str:
        kind, data = TEXT, value.encode()
    elif type(value) is bytes:
        kind, data = BYTES, value
    types = tags if kind == JSON else None
    preview = "" if kind == BYTES else data[: 4 * PREVIEW_CHARS].decode(errors="ignore")
    return data, ResultReference(name_of(data), len(data), kind, preview[:PREVIEW_CHARS], types)


def _value(data: bytes, reference: ResultReference, types: Types) -> Any:
    if reference.media_type == BYTES:
        return data
    if reference.media_type == TEXT:
        return data.decode()
    return decode_value(data, reference.types, types)


def _with(result: ToolResult, value: Any, extra: Extra | None = None) -> ToolResult:
    new_extra = result.extra if extra is None else extra
    return ToolResult(result.call_id, result.name, value, result.error, new_extra)
