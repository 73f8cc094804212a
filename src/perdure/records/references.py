r"""References of records to media in blobs, such that nothing that a message brings is read as one.

A reference is a string in the place of the base64. In a record its first letter is escaped, as no
encoder writes text; a value has no spelling, so no value is one:

    "\u0070erdure:media:data:image/png:1258291:1280x800:<sha256>"

What a message brings is spelled plainly, raw JSON too, and stays the text that it is. In memory,
where strings have no spelling, a reference is signed with a random key of the process. No one can
make one without it, and who has seen one can name what that one is of, and nothing else.
"""

from __future__ import annotations

import hmac
import re
from secrets import token_bytes
from typing import Final

SPELLED: Final = rb'"\u0070erdure:media:'
"""Beginning of a reference in a record."""
HELD: Final = "perdure:media:"
"""Beginning of a reference in memory; text may begin so, too."""
FIELDS: Final = (
    rb"(url|data):([A-Za-z0-9/.+-]+):([0-9]{1,12}):([0-9]{1,6})x([0-9]{1,6}):([0-9a-f]{64})"
)
"""Rest of a reference: its form, type, bytes, width, height and the blob's name."""

_KEY: Final = token_bytes(32)
_COMMON: Final = b"erdure:media:"
_SIGNED: Final = rb"([0-9a-f]{64}):(%b)" % FIELDS
_HELD: Final = re.compile(HELD.encode() + _SIGNED)
# A quote that a backslash precedes is within a string.
_ANY: Final = re.compile(rb'(?<!\\)"(?:\\u0070|p)erdure:media:(?:%b")?' % _SIGNED)
_SPELLED: Final = re.compile(rb'(?<!\\)"\\u0070erdure:media:(%b)"' % FIELDS)


def _signature(fields: bytes) -> bytes:
    return hmac.digest(_KEY, fields, "sha256").hex().encode()


def _is_signed(found: re.Match[bytes]) -> bool:
    return found[1] is not None and hmac.compare_digest(found[1], _signature(found[2]))


def held_fields(text: str) -> str | None:
    """Return the fields of a reference in memory, None for any other text."""
    if not text.startswith(HELD):
        return None
    found = _HELD.fullmatch(text.encode("utf-8", "replace"))
    return found[2].decode() if found is not None and _is_signed(found) else None


def spelled(payload: bytes) -> bytes:
    """Return JSON of values from memory as a record has it: their references alone refer."""
    if _COMMON not in payload:
        return payload

    def spell(found: re.Match[bytes]) -> bytes:
        if _is_signed(found):
            return SPELLED + found[2] + b'"'
        return b'"' + HELD.encode() + found[0].partition(_COMMON)[2]

    return _ANY.sub(spell, payload)


def held(payload: bytes) -> bytes:
    """Return a record's JSON with its references as they are in memory."""
    if b"\\" not in payload or SPELLED not in payload:  # the former is found much faster
        return payload
    return _SPELLED.sub(
        lambda found: b'"%b%b:%b"' % (HELD.encode(), _signature(found[1]), found[1]), payload
    )
