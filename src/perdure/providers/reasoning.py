"""Reasoning taken out of a message for good."""

from __future__ import annotations

import msgspec

from perdure.model.messages import Extra, Message
from perdure.providers.issued import STAMP, marks, stamp_of
from perdure.providers.target import Target

__all__ = ["without_reasoning"]


def without_reasoning(message: Message, target: Target) -> Message:
    """Return a message without what its reader may not get; the same object if it may get all.

    Reasoning, signatures and unknown fields go; what was said, the calls, and who said it stay.
    """
    stamp = stamp_of(message)
    if stamp is None or target.own(stamp) is not None:
        return message
    bare = msgspec.structs.replace(stamp, items=(), reasoning_field=None)
    extra: Extra = {**marks(message.extra), STAMP: msgspec.Raw(msgspec.json.encode(bare))}
    stripped = msgspec.structs.replace(
        message,
        reasoning=None,
        extra=extra,
        tool_calls=tuple(
            msgspec.structs.replace(call, extra=marks(call.extra)) for call in message.tool_calls
        ),
    )
    return message if stripped == message else stripped
