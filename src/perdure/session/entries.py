"""What users hand to a session, as the log takes it: encoded, measured, without credentials."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.errors import InvalidArgumentError, NotStorableError, TooLargeError
from perdure.memory.documents import MetadataPayload
from perdure.records.json import decode, encode
from perdure.records.keys import require_text
from perdure.records.messages import EncodedRecord, Message, decode_message, encode_message
from perdure.records.records import MESSAGE_KINDS, META, Entry
from perdure.records.types import KIND_PREFIX
from perdure.records.values import encode_value, redact

if TYPE_CHECKING:
    from perdure.records.keys import SessionKey
    from perdure.records.types import Registry


def entry_of(item: Message | EncodedRecord | Any, registry: Registry) -> Entry:
    """Return an item as a record; a message without a time gets the present one.

    Raises:
        NotStorableError: It cannot be stored.

    """
    if isinstance(item, Message):
        return encode_message(item, registry, now=time.time())
    if isinstance(item, EncodedRecord):
        return item.entry
    return registry.encode_record(item)


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
    check_said(title=title, owner=owner, tags=tags)
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
        message = (
            f"the {tag} at {path_text} is not JSON and would come back changed: convert it first"
        )
        raise NotStorableError(message, path=path_text, type=tag)
    return msgspec.Raw(data)


def check_said(
    *, title: str | None = None, owner: str | None = None, tags: Sequence[str] | None = None
) -> None:
    """Refuse what could not be read back as what is said about a session.

    Raises:
        InvalidArgumentError: Something is no text, or the tags are one text instead of several.

    """
    if isinstance(tags, str):
        message = f"invalid tags={tags!r}: give a list, such as [{tags!r}]"
        raise InvalidArgumentError(message, option="tags", value=tags)
    for tag in tags or ():
        require_text("tag", tag)
    for what, value in (("title", title), ("owner", owner)):
        if value is not None:
            require_text(what, value)


def check_readable(kind: str, payload: bytes, registry: Registry) -> None:
    """Refuse a record from elsewhere that whoever reads the log could not decode.

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
                f"session {key}: a {entry.kind} of {size} bytes is over the {whose} of "
                f"{limit if size <= most else most}: store it elsewhere and append a reference"
            )
            if size <= most:
                message += f", or raise Limits(record_bytes=…), which may be up to {most}"
            facts = {"key": str(key), "kind": entry.kind, "size": size, "limit": limit}
            raise TooLargeError(message, **facts)
