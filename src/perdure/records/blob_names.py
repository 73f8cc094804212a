"""The names of blobs: the SHA-256 of their bytes, or a wrapper's own.

A wrapper that keeps other bytes than it was given (sealed, packed) has names of its own for
them, which begin with ``x`` and prove nothing to the store; the wrapper verifies what it
gets back by itself. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from perdure.errors import CorruptRecordError, NotStorableError

_NAME = re.compile(r"(?:[0-9a-f]{64}|x[0-9a-f]{64,128})\Z")


def is_name(name: str) -> bool:
    """Say whether a blob may have this name."""
    return _NAME.match(name) is not None


def fits(name: str, data: bytes) -> bool:
    """Say whether bytes may stand under a name.

    >>> fits("x" + "0" * 64, b"whatever a wrapper made")
    True
    >>> fits("0" * 64, b"other bytes")
    False
    """
    if name.startswith("x"):
        return is_name(name)
    return hashlib.sha256(data).hexdigest() == name


def require_named(blobs: Mapping[str, bytes]) -> None:
    """Refuse blobs that are to be kept under names which are not theirs.

    Raises:
        NotStorableError: A name is not the SHA-256 of its bytes.

    """
    for name, data in blobs.items():
        if not fits(name, data):
            message = (
                f"blob {name!r} of {len(data)} bytes is not named by its SHA-256: name it by "
                "the hash of exactly these bytes"
            )
            raise NotStorableError(message, blob=name, size=len(data))


def verified(name: str, data: bytes, *, at: str = "") -> bytes:
    """Return the bytes that a store has under a name; *at* says where, for people.

    Raises:
        CorruptRecordError: They are not those of the name.

    """
    if fits(name, data):
        return data
    message = (
        f"{at or f'blob {name}'} does not match its name: put the right bytes again, or restore "
        "it from a copy"
    )
    raise CorruptRecordError(message, blob=name, size=len(data))
