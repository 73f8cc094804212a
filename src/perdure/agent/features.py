"""Which parts of an agent are kept: a part that is off is neither saved nor restored."""

from __future__ import annotations

import msgspec

__all__ = ["Features"]


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts of an agent are kept with its session.

    What is stored of a part stays stored while the part is off: it comes back when
    it is on again.

    Args:
        memory: The working memory: ``agent.working_memory``.
        in_context_memory: Notes that the model keeps for itself, and sees in each request.
        persistent_instructions: The agent's ``custom_instructions.md``, behind the system
            prompt. The file is read, and never written.
        history: The conversation. Without it each run begins with an empty context, and
            what is said leaves no record.
        permissions: Which tools were allowed, blocked and approved.
        persistent_session: Another way to say ``persistent_session=True``; False says nothing.

    """

    memory: bool = True
    in_context_memory: bool = False
    persistent_instructions: bool = False
    history: bool = True
    permissions: bool = True
    persistent_session: bool = False
