"""Permissions: which tools an agent may use, and who said so.

A blocked tool never runs. What is on the allowlist, or was approved, runs. Anything else runs
unless the agent has an ``approve`` function, which is asked then.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, Final, Literal, final

from perdure.session.contributors import RestoreContext

Verdict = Literal["allowed", "blocked", "open"]
"""What is known of a tool; ``open`` means that nobody has decided."""

_FORMAT: Final = 1


@final
class Permissions:
    """An agent's permissions, kept with its session: ``agent.permissions``."""

    name: Final = "agent_permissions"
    version: Final = 1

    def __init__(self) -> None:
        self._approvals: dict[str, Any] = {}
        self._blocked: dict[str, None] = {}
        self._allowed: dict[str, None] = {}
        self._beyond: dict[str, Any] = {}

    def __repr__(self) -> str:
        return (
            f"<Permissions allowed={len(self._allowed)} blocked={len(self._blocked)} "
            f"approved={len(self._approvals)}>"
        )

    @property
    def allowlist(self) -> tuple[str, ...]:
        """Tools that always may run."""
        return tuple(self._allowed)

    @property
    def blocklist(self) -> tuple[str, ...]:
        """Tools that never may run."""
        return tuple(self._blocked)

    @property
    def approvals(self) -> dict[str, Any]:
        """Tools that somebody has approved, and what is known of that."""
        return dict(self._approvals)

    def verdict(self, tool: str) -> Verdict:
        """Say what is known of a tool; a block counts before everything else."""
        if tool in self._blocked:
            return "blocked"
        return "allowed" if tool in self._allowed or tool in self._approvals else "open"

    def allow(self, *tools: str) -> None:
        """Let tools always run, blocked before or not."""
        self._allowed.update(dict.fromkeys(tools))
        _forget(self._blocked, tools)

    def block(self, *tools: str) -> None:
        """Let tools never run, allowed or approved before or not."""
        self._blocked.update(dict.fromkeys(tools))
        _forget(self._allowed, tools)
        _forget(self._approvals, tools)

    def approve(
        self, tool: str, *, by: str | None = None, at: datetime.datetime | None = None
    ) -> None:
        """Remember that somebody has approved a tool.

        Args:
            tool: Its name.
            by: Who did.
            at: When; None for now.

        """
        when = at or datetime.datetime.now(datetime.UTC)
        approval = {"scope": "always", "approvedAt": when.isoformat()}
        self._approvals[tool] = {**approval, **({} if by is None else {"approvedBy": by})}

    def revoke(self, *tools: str) -> None:
        """Forget whatever was decided on tools."""
        for known in (self._blocked, self._allowed, self._approvals):
            _forget(known, tools)

    # as a contributor

    async def capture(self) -> dict[str, Any] | None:
        """Return the state; None while nobody has decided anything."""
        if not (self._approvals or self._blocked or self._allowed or self._beyond):
            return None
        return {
            "version": _FORMAT,
            "approvals": self._approvals,
            "blocklist": list(self._blocked),
            "allowlist": list(self._allowed),
            **self._beyond,
        }

    async def restore(self, state: dict[str, Any], context: RestoreContext) -> None:
        """Take over what was stored; what this release does not know is kept."""
        known = ("version", "approvals", "blocklist", "allowlist")
        self._approvals = dict(state.get("approvals") or {})
        self._blocked = dict.fromkeys(state.get("blocklist") or ())
        self._allowed = dict.fromkeys(state.get("allowlist") or ())
        self._beyond = {key: value for key, value in state.items() if key not in known}


def _forget(known: dict[str, Any], tools: Iterable[str]) -> None:
    for tool in tools:
        known.pop(tool, None)
