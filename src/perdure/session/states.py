"""What a contributor's state becomes in the log: nothing, a part of it, or the whole.

Pure. A state that has not changed since the last record writes nothing. One above 32 KiB
writes only the top-level keys that changed, if it is an object and nothing but JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.codec.json import decode, encode
from perdure.codec.values import Types, decode_value, encode_value
from perdure.memory.documents import StateSet
from perdure.model.records import STATE, Entry

__all__ = ["Kept", "change_of", "kept_of", "state_name", "state_of"]

KIB = 1024
LARGE = 32 * KIB
"""Above this, only what changed is written."""


class Kept(msgspec.Struct, frozen=True):
    """What the log has of a contributor's state, by hashes."""

    digest: bytes = b""
    """Empty for no state."""
    version: int = 1
    keys: dict[str, bytes] | None = None
    """The hash of each top-level value, of a large object."""


def state_name(name: str) -> str:
    """Return the document that a contributor's state lies in."""
    return f"plugins/{name}.json"


def kept_of(state: Any, version: int, types: Types) -> tuple[Kept, bytes, dict[str, str] | None]:
    """Return a state's hashes, its JSON, and the table of what JSON cannot tell of it.

    Raises:
        NotStorableError: Some part of it cannot be stored.

    """
    data, tags = encode_value(state, types)
    keys = None
    if len(data) > LARGE and not tags and isinstance(state, dict):
        keys = {key: _hash(bytes(raw)) for key, raw in _fields(data).items()}
    told = data if not tags else data + encode(tags)
    return Kept(_hash(told), version, keys), data, tags


def change_of(name: str, state: Any, version: int, before: Kept, types: Types) -> _Change | None:
    """Return the record that brings a state up to date, None if it is.

    Args:
        name: The contributor.
        state: Its state now; None for none.
        version: The version of its form.
        before: What the log has.
        types: The application's.

    Raises:
        NotStorableError: Some part of the state cannot be stored.

    """
    document = state_name(name)
    if state is None:
        if not before.digest:
            return None
        return _Change(_entry(StateSet(document, dropped=True)), Kept())
    now, data, tags = kept_of(state, version, types)
    if (now.digest, now.version) == (before.digest, before.version):
        return None
    whole = StateSet(document, msgspec.Raw(data), tags, version=version)
    if now.keys is None or before.keys is None:
        return _Change(_entry(whole), now)
    fields = _fields(data)
    changed = {key: fields[key] for key, hash_ in now.keys.items() if before.keys.get(key) != hash_}
    part = StateSet(
        document,
        msgspec.Raw(encode(changed)),
        version=version,
        partial=True,
        gone=sorted(before.keys.keys() - now.keys.keys()),
    )
    return _Change(_entry(part), now)


def state_of(bare: bytes | None, beside: bytes | None, types: Types) -> tuple[Any, int] | None:
    """Return a state and its version from its two documents, None if there is none."""
    said = None if beside is None else decode(beside, StateSet)
    if said is not None and said.types:
        return decode_value(bytes(said.value), said.types, types), said.version
    if bare is None:
        return None
    return decode_value(bare, None, types), 1 if said is None else said.version


class _Change(msgspec.Struct, frozen=True):
    entry: Entry
    kept: Kept


def _entry(change: StateSet) -> Entry:
    return Entry(STATE, encode(change))


def _fields(data: bytes) -> dict[str, msgspec.Raw]:
    fields: dict[str, msgspec.Raw] = decode(data, dict[str, msgspec.Raw])
    return fields


def _hash(data: bytes) -> bytes:
    import hashlib  # slow to import, and most sessions have no contributor

    return hashlib.sha256(data).digest()
