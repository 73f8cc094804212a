"""Cache breakpoints in a request to Anthropic: pure.

Anthropic caches a request's beginning up to each block that is marked, in the order tools,
instructions, messages, and takes at most four marks. One stands at the end of the conversation
and moves with it, one where the request before ended, so that what that one wrote is found however
much a tool loop has added since; two hold what stays: the tools and the instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

__all__ = ["CacheTime", "with_breakpoints"]

CacheTime = Literal["5m", "1h"]
"""How long a cached beginning stays after it was used."""

MOST: Final = 4
"""The marks that a request may have."""
_NEVER: Final = frozenset({"thinking", "redacted_thinking"})
"""Blocks that take no mark."""

Block = dict[str, Any]


def with_breakpoints(request: dict[str, Any], stay: CacheTime) -> dict[str, Any]:
    """Return a request with marks; it is not changed itself.

    Marks that it has stay as they are, except for the oldest ones in the messages if there are
    so many that none is left for the end.
    """
    marked = {**request, "messages": [_copied(one) for one in request.get("messages", ())]}
    for name in ("tools", "system"):
        if request.get(name):
            marked[name] = _blocks(request[name])
    _make_room(marked)
    free = MOST - sum("cache_control" in block for block in _all(marked))
    for place in _places(marked)[: max(free, 0)]:
        place["cache_control"] = _mark(marked, place, stay)
    return marked


def _copied(message: Any) -> Any:
    return (
        {**message, "content": _blocks(message["content"])} if message.get("content") else message
    )


def _blocks(content: Any) -> list[Block]:
    """Return content as blocks that may be changed, those in results of tools too."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {**block, "content": _blocks(block["content"])} if _is_nested(block) else {**block}
        for block in content
    ]


def _is_nested(block: Block) -> bool:
    return block.get("type") == "tool_result" and isinstance(block.get("content"), list)


def _all(request: dict[str, Any]) -> Iterator[Block]:
    """Return everything that may have a mark, in the order in which it is cached."""
    for name in ("tools", "system"):
        yield from request.get(name) or ()
    for message in request["messages"]:
        yield from _inside(message.get("content") or [])


def _inside(blocks: list[Block]) -> Iterator[Block]:
    for block in blocks:
        if _is_nested(block):
            yield from _inside(block["content"])
        yield block


def _make_room(request: dict[str, Any]) -> None:
    fixed: dict[str, Any] = {
        "tools": request.get("tools"),
        "system": request.get("system"),
        "messages": [],
    }
    standing = sum("cache_control" in block for block in _all(fixed))
    moving = [
        block
        for message in request["messages"]
        for block in _inside(message.get("content") or [])
        if "cache_control" in block
    ]
    for block in moving[: max(standing + len(moving) - (MOST - 1), 0)]:
        del block["cache_control"]


def _places(request: dict[str, Any]) -> list[Block]:
    """Return the blocks to mark, the most useful first; none that has a mark."""
    messages = request["messages"]
    answers = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
    before = messages[answers[-1] - 1] if answers and answers[-1] else None
    wanted = [
        _last(messages[-1].get("content") if messages else None),
        _last(before and before.get("content")),
        _last(request.get("system")),
        _last(request.get("tools")),
    ]
    return [block for block in wanted if block is not None and "cache_control" not in block]


def _last(blocks: list[Block] | None) -> Block | None:
    fit = [one for one in blocks or () if one.get("type") not in _NEVER and one.get("text") != ""]
    return fit[-1] if fit else None


def _mark(request: dict[str, Any], place: Block, stay: CacheTime) -> Block:
    """Return a mark that fits its place: those that stay longer come before those that do not."""
    blocks = list(_all(request))
    at = next(number for number, block in enumerate(blocks) if block is place)
    if any(_stay(block) == "1h" for block in blocks[at:]):
        stay = "1h"
    elif any(_stay(block) == "5m" for block in blocks[:at]):
        stay = "5m"
    return {"type": "ephemeral"} if stay == "5m" else {"type": "ephemeral", "ttl": stay}


def _stay(block: Block) -> str | None:
    mark = block.get("cache_control")
    return str(mark.get("ttl", "5m")) if isinstance(mark, dict) else None
