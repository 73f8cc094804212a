r"""How records refer to media in blobs, such that nothing that a message brings is read as that.

A reference is a string in the place of the base64. In a record its first letter is escaped, as no
encoder writes text; a value has no spelling, so no value is one:

    "\u0070erdure:media:data:image/png:1258291:1280x800:<sha256>"

What a message brings is spelled plainly, raw JSON too, and stays the text that it is. In memory,
where strings have no spelling, a reference has a random word of the process, which no record has.
"""

from __future__ import annotations

import re
from secrets import token_hex
from typing import Final

SPELLED: Final = rb'"\u0070erdure:media:'
"""How a reference begins in a record."""
HELD: Final = f"perdure:media:{token_hex(16)}:"
"""How a reference begins in memory."""

_COMMON: Final = b"erdure:media:"
# A quote that a backslash precedes is within a string.
_ANY: Final = re.compile(rb'(?<!\\)"(?:\\u0070|p)erdure:media:(%b)?' % HELD[14:].encode())
_SPELLED: Final = re.compile(rb'(?<!\\)"\\u0070erdure:media:')


def spelled(payload: bytes) -> bytes:
    """Return JSON of values from memory as a record has it: their references alone refer."""
    if _COMMON not in payload:
        return payload
    return _ANY.sub(lambda found: SPELLED if found[1] else b'"perdure:media:', payload)


def held(payload: bytes) -> bytes:
    """Return a record's JSON with its references as they are in memory."""
    return _SPELLED.sub(f'"{HELD}'.encode(), payload) if SPELLED in payload else payload
