"""Calls of Anthropic's own tools, and their results: the model's turn holds both.

The API pairs them itself, across messages. A search beside calls of the user's tools is run when
those are answered, one that was paused when the answer is sent again; its result stands at the
head of the next answer. Until then the call is open, and has to be sent. Once the user says
something it will never have a result, and a request with it is refused; so is one with a
result whose call is gone.

See "Server tools" in the documents of the Claude API (platform.claude.com), the issues 961 and
1339 of anthropic-sdk-python, and 1090 of anthropic-sdk-typescript.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from perdure.providers.alternating import Turns

__all__ = ["settled"]

Block = dict[str, Any]
_CALLS: Final = frozenset({"server_tool_use", "mcp_tool_use"})


def settled(turns: Turns, stop_reason: str | None) -> Turns:
    """Return turns without calls that will have no result, and results without a call.

    Args:
        turns: A conversation in Anthropic's blocks.
        stop_reason: Why the newest answer ended; None where that is not known.

    """
    gone: set[str] = set()
    waiting: set[str] = set()
    for role, blocks in turns:
        if role == "user" and any(block.get("type") != "tool_result" for block in blocks):
            gone |= waiting
            waiting.clear()
        for block in blocks if role == "assistant" else ():
            called, answered = _ids(block)
            if called:
                waiting.add(called)
            elif answered and answered not in waiting:
                gone.add(answered)
            else:
                waiting.discard(answered)
    if waiting and stop_reason != _OPEN_AFTER.get(turns[-1][0]):
        gone |= waiting
    return [(role, list(_without(blocks, gone))) for role, blocks in turns] if gone else turns


_OPEN_AFTER: Final = {"assistant": "pause_turn", "user": "tool_use"}
"""Why an answer has ended that goes on, by whose turn is the last one."""


def _without(blocks: Sequence[Block], gone: set[str]) -> Iterator[Block]:
    for block in blocks:
        caller = block.get("caller")
        if not gone.isdisjoint(_ids(block)):
            continue
        if isinstance(caller, dict) and str(caller.get("tool_id")) in gone:
            yield {name: value for name, value in block.items() if name != "caller"}
        else:
            yield block


def _ids(block: Block) -> tuple[str, str]:
    """Return which call of the provider's own tools a block is, and which one it answers."""
    kind = str(block.get("type"))
    called = str(block.get("id")) if kind in _CALLS else ""
    return called, str(block.get("tool_use_id", ""))
