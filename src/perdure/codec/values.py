"""Values of the user's: JSON as it is, and more than JSON with tags beside the data.

``encode_value`` gives the value's JSON and a table ``{JSON pointer: tag}`` of the places
where JSON cannot tell what was there. The caller stores the table next to the value, never
inside, so that no dict of a user's can be taken for a tag, whatever its keys. In a message
the table is ``arguments_types`` beside ``arguments`` and ``tool_result_types`` beside
``tool_result``; plain JSON has no table, and costs one look over its containers.

    {"at": datetime(2026, 1, 2), "raw": b"x"}
    value  {"at": "2026-01-02T00:00:00", "raw": "eA=="}
    types  {"/at": "datetime", "/raw": "bytes"}

Comes back as itself: None, bool, int (any size up to 4,300 digits), finite float, str, list,
dict with str keys; bytes, bytearray, datetime, date, time, timedelta (a zone comes back as
its offset), Decimal, UUID, Path, tuple, set, frozenset; instances of registered types. An
instance of a subclass of str, int, float, list or dict comes back as that. Everything else
raises NotStorableError, which names the path, the type and the cure; so do NaN, infinities,
lone surrogates, circular references and what is too deep. With ``on_unstorable="repr"`` such
a part becomes its repr instead, under the tag ``repr``.

What comes back is checked before it is stored for registered types (a field may hold what
its annotation does not say), and follows by construction for the others. A tag that is not
known on reading gives an `Opaque`, which encodes to what it was.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.codec import json
from perdure.codec.lifting import lift
from perdure.codec.lowering import Lowering, OnUnstorable, is_plain
from perdure.codec.tags import NO_TYPES, Opaque, Tags, Types
from perdure.errors import NotStorableError

__all__ = [
    "NO_TYPES",
    "OnUnstorable",
    "Opaque",
    "Tags",
    "Types",
    "decode_value",
    "encode_value",
    "lift",
    "lower",
]


def encode_value(
    value: Any, types: Types = NO_TYPES, *, on_unstorable: OnUnstorable = "raise", at: str = "$"
) -> tuple[bytes, Tags | None]:
    """Return a value's JSON, and the table of its tags, or None where JSON says it all.

    Raises:
        NotStorableError: Some part of it cannot be stored.
        TooLargeError: It has more items or levels than fit.

    """
    lowered, tags = lower(value, types, on_unstorable=on_unstorable, at=at)
    try:
        return json.encode(lowered), tags
    except NotStorableError:
        Lowering(types, on_unstorable, at).run(value)  # names the place from the value's own root
        raise


def decode_value(data: bytes, tags: Mapping[str, str] | None, types: Types = NO_TYPES) -> Any:
    """Return the value that `encode_value` was given.

    Raises:
        CorruptRecordError: The bytes, or the table, are damaged.

    """
    return lift(json.decode(data), tags, types)


def lower(
    value: Any, types: Types = NO_TYPES, *, on_unstorable: OnUnstorable = "raise", at: str = "$"
) -> tuple[Any, Tags | None]:
    """Return what of a value JSON can hold, and the table of tags; errors as `encode_value`.

    Text is looked at only where the value is not plain JSON: a lone surrogate in a plain one
    shows when it is encoded.
    """
    if on_unstorable == "raise" and is_plain(value):
        return value, None
    return Lowering(types, on_unstorable, at).run(value)
