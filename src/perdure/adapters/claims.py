"""Claim checks: what is too large for a record is in blobs, and the record names them.

The blobs are durable before the record. Copies, backups, `check` and the removal of blobs that
nothing needs follow the names, as they do everywhere (`perdure.session.reach`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from perdure._lib.tasks import each
from perdure.adapters.envelopes import (
    ENVELOPE,
    PartEnvelope,
    Piece,
    SdkEnvelope,
    encode_parts,
    with_envelope,
)
from perdure.adapters.exact import is_exact
from perdure.errors import CorruptRecordError, TooLargeError
from perdure.records.chunks import is_name, name_of
from perdure.records.json import MAX_RECORD_BYTES, check_size
from perdure.records.keys import SessionKey
from perdure.records.messages import Message, encode_message
from perdure.records.records import FOREIGN, Entry, Record
from perdure.session.internals import store_of
from perdure.session.reach import CLAIM
from perdure.session.session import Session, SessionView
from perdure.store import Store

SHAPE: Final = 2
"""The version of an envelope that is a claim."""
PART: Final = 4 * 1024 * 1024
"""Bytes of one blob."""
MOST: Final = 64
"""Blobs of one claim at most: a record that repeats one name must not fill the memory."""


class Claim(SdkEnvelope, frozen=True, omit_defaults=True):
    """An envelope whose JSON is in blobs."""

    claim: tuple[str, ...] = ()
    """Their names, in order."""
    id: str = ""
    """The item's, where it has one."""


class Large(NamedTuple):
    """A message whose envelope is too large for a record."""

    shown: Message
    """The message that shows it elsewhere."""
    envelope: SdkEnvelope
    id: str
    at: float
    """Seconds since 1970."""
    error: TooLargeError
    """What is raised where a store keeps no blobs."""


def encode_item(
    data: bytes,
    shown: Sequence[Message],
    envelope: Callable[[int, int, tuple[Piece, ...]], PartEnvelope],
    *,
    now: float,
    what: str,
    path: str,
    cure: str = "",
) -> list[Entry | Large]:
    """Return an item as records, as `encode_parts` does; one that is too large for that as a whole.

    Args:
        data: The item's JSON.
        shown: The messages that show it.
        envelope: Returns the envelope of a message: which it is, of how many, and its pieces.
        now: When the item was made, in seconds since 1970.
        what: The item, as the error of a store without blobs names it,
        path: its place there,
        cure: and what that error says at its end.

    """
    try:
        return [*encode_parts(data, shown, envelope, now=now)]
    except TooLargeError as error:
        refusal = TooLargeError(f"{what}: {error}{cure}", path=path, size=len(data))
        refusal.__cause__ = error
        whole = envelope(0, 1, (data.decode(),))
        return [Large(shown[0], whole, whole.id, now, refusal)]


def check_storable(store: Store, size: int, at: str) -> None:
    """Raise TooLargeError for what neither a record nor the blobs of a claim can hold."""
    check_size(size, MOST * PART if store.capabilities.blobs else MAX_RECORD_BYTES, at=at)


async def put(store: Store, key: SessionKey, data: bytes) -> tuple[str, ...] | None:
    """Put data of a session into blobs, and return their names.

    None if the store keeps none, or it would take more than `MOST`.

    Raises:
        StoreError: The store cannot be reached.

    """
    if not store.capabilities.blobs or len(data) > MOST * PART:
        return None
    parts = [data[at : at + PART] for at in range(0, len(data), PART)]
    for part in parts:
        await store.put_blobs(key.blobs, {name_of(part): part})
    return tuple(map(name_of, parts))


async def get(source: Session | SessionView, names: Sequence[str]) -> bytes:
    """Return data that is in blobs.

    Raises:
        CorruptRecordError: One of them is lost, or a name is not one that `put` returns.

    """
    if len(names) > MOST or not all(map(is_name, names)):
        message = (
            f"session {source.key}: a record names blobs in a form that perdure does not write"
        )
        raise CorruptRecordError(message, key=str(source.key), count=len(names))
    parts: dict[str, bytes] = {}

    async def read(name: str) -> None:
        data = await store_of(source).get_blob(source.key.blobs, name)
        if data is None:
            message = (
                f"session {source.key}: blob {name} is missing, which holds a large value: put it "
                "back from a copy of the store, or restore the session from a backup"
            )
            raise CorruptRecordError(message, key=str(source.key), blob=name)
        parts[name] = data

    await each(list(dict.fromkeys(names)), read)
    return b"".join([parts[name] for name in names])


async def claimed(session: Session, entries: Iterable[Entry | Large]) -> tuple[Entry, ...]:
    """Return entries as a session stores them; the blobs of large ones are durable then.

    Raises:
        TooLargeError: The store keeps no blobs, or it is larger than 256 MiB.

    """
    return await claimed_in(store_of(session), session.key, entries)


async def claimed_in(
    store: Store, key: SessionKey, entries: Iterable[Entry | Large]
) -> tuple[Entry, ...]:
    """Do the same for a session that the store may not have yet.

    Raises:
        TooLargeError: The store keeps no blobs.

    """
    stored: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Large):
            data = msgspec.json.encode(entry.envelope)
            names = await put(store, key, data)
            if names is None:
                raise entry.error
            claim = Claim(entry.envelope.sdk, SHAPE, names, entry.id)
            note = f"[{len(data) / 1024**2:.1f} MB, kept apart]"
            shown = Message(role=entry.shown.role, content=note)
            result = entry.shown.tool_result
            if result is not None:
                shown = Message.tool(result.call_id, note, name=result.name)
            stored.append(encode_message(with_envelope(shown, claim), now=entry.at))
        else:
            stored.append(entry)
    return tuple(stored)


def claim_in(message: Message) -> Claim | None:
    """Return the claim that a message has instead of an envelope."""
    field = message.extra.get(ENVELOPE)
    return None if field is None or CLAIM not in bytes(field) else _claim_of(bytes(field))


def _claim_of(data: bytes) -> Claim | None:
    try:
        claim = msgspec.json.decode(data, type=Claim)
    except msgspec.DecodeError:  # another program's, or an item that has such a text
        return None
    return claim if claim.claim and claim.v == SHAPE else None


async def filled(
    source: Session | SessionView, messages: list[tuple[int, Message]]
) -> list[tuple[int, Message]]:
    """Return messages with their envelopes in place of claims.

    Raises:
        CorruptRecordError: A blob is lost.

    """
    whole: list[tuple[int, Message]] = []
    for seq, message in messages:
        claim = claim_in(message)
        if claim is not None:
            field = msgspec.Raw(await get(source, claim.claim))
            extra = {**message.extra, ENVELOPE: field}
            whole.append((seq, msgspec.structs.replace(message, extra=extra)))
        else:
            whole.append((seq, message))
    return whole


async def claimed_record(session: Session, payload: bytes, sdk: str, *, at: str = "$") -> Entry:
    """Return a record of an SDK's own; what is large is in blobs then.

    Raises:
        TooLargeError: The store keeps no blobs, or it is larger than 256 MiB: what is *at* there.

    """
    if len(payload) > MAX_RECORD_BYTES:
        names = await put(store_of(session), session.key, payload)
        if names is None:
            check_storable(store_of(session), len(payload), at)
        else:
            payload = msgspec.json.encode(Claim(sdk, SHAPE, names))
    return Entry(FOREIGN, payload)


async def filled_record(source: Session | SessionView, record: Record) -> Record:
    """Return a record with its payload in place of a claim.

    Raises:
        CorruptRecordError: A blob is lost.

    """
    if record.kind != FOREIGN or CLAIM not in record.payload:
        return record
    claim = _claim_of(record.payload)
    if claim is None:
        return record
    return msgspec.structs.replace(record, payload=await get(source, claim.claim))


# Values of a state

HALF: Final = MAX_RECORD_BYTES // 2
"""Bytes of values in one record at most."""
LEAST: Final = 1024 * 1024
"""Bytes above which a value may be in blobs."""

WRAPPED: Final = "perdure_json"
"""The one key of a dict that stands for a value: its JSON as text, or in blobs."""


def wrapped(value: Any, *, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what stands for a value that JSON, or a record, cannot hold."""
    return {WRAPPED: json.dumps(value) if names is None else list(names)}


def as_kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON has them, also where some have NaN, or half a character."""
    return {
        key: wrapped(value) if is_wrapped(value) or not is_exact(value) else value
        for key, value in values.items()
    }


def is_wrapped(value: Any) -> bool:
    """Whether a stored value stands for another one."""
    return isinstance(value, dict) and len(value) == 1 and WRAPPED in value


def is_large(value: Any) -> bool:
    """Whether a stored value stands for one in blobs."""
    return is_wrapped(value) and isinstance(value[WRAPPED], list)


def unwrapped_here(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they were given; none of them may be in blobs."""
    return {
        key: json.loads(value[WRAPPED]) if is_wrapped(value) else value
        for key, value in values.items()
    }


async def unwrapped(source: Session | SessionView, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they were given.

    Raises:
        CorruptRecordError: A blob is lost.

    """
    stored = dict(values)
    for key, value in values.items():
        if is_large(value):
            stored[key] = json.loads(await get(source, value[WRAPPED]))
    return unwrapped_here(stored)


async def storable(session: Session, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as records can hold them: if they take much, large ones are in blobs.

    Raises:
        StoreError: The store cannot be reached.

    """
    texts = {key: json.dumps(value).encode() for key, value in values.items()}
    if sum(map(len, texts.values())) <= HALF:
        return dict(values)
    stored = dict(values)
    for key, text in texts.items():
        if len(text) > LEAST:
            names = await put(store_of(session), session.key, text)
            if names is not None:
                stored[key] = wrapped(values[key], names=names)
    return stored


def in_parts(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return values in parts, at least one, that each fit into a record."""
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for key, value in values.items():
        length = len(json.dumps(value)) + len(key)
        if size + length > HALF and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][key] = value
        size += length
    return parts
