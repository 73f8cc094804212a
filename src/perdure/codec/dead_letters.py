"""Dead letters as stores keep them: JSON with a checksum, bound to its session."""

from __future__ import annotations

import msgspec

from perdure.codec import json
from perdure.codec.frames import open_sealed, seal
from perdure.errors import ConfigError, FormatError
from perdure.model.keys import SessionKey
from perdure.model.posts import DeadLetter, Posted

__all__ = [
    "decode_dead_letter",
    "encode_dead_letter",
    "key_of_dead_letter",
    "oldest_first",
]


class _Stored(msgspec.Struct, frozen=True):
    key: SessionKey
    letter: DeadLetter


def encode_dead_letter(key: SessionKey, letter: DeadLetter) -> bytes:
    """Return a dead letter of a session as bytes."""
    return seal(msgspec.json.encode(_Stored(key, letter)))


def key_of_dead_letter(data: bytes) -> SessionKey | None:
    """Return whose dead letter it is, None if it is damaged."""
    stored = _stored(data)
    return None if stored is None else stored.key


def decode_dead_letter(key: SessionKey, op_id: str, data: bytes) -> DeadLetter:
    """Return the dead letter of `encode_dead_letter`; one that is damaged says so."""
    stored = _stored(data)
    if stored is not None and stored.key == key:
        return stored.letter
    damage = "what the store keeps of the dead letter does not fit its checksum, or its session"
    return DeadLetter(Posted(op_id, "", data, 0.0, damage), "unknown: it is damaged", 0, 0.0)


def oldest_first(letters: list[DeadLetter]) -> list[DeadLetter]:
    """Return dead letters in the order of their times; those of one time stay in theirs."""
    return sorted(letters, key=lambda letter: letter.at)


def _stored(data: bytes) -> _Stored | None:
    body = open_sealed(data)
    try:
        return None if body is None else json.decode(body, _Stored)
    except (FormatError, ConfigError):  # ConfigError: ids that nobody could have given
        return None
