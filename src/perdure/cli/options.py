"""The options that several commands share, each described once."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import Parameter

from perdure.model.keys import DEFAULT_SESSION, SessionKey

__all__ = ["Answer", "Named", "Stored"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a command answers."""

    json: bool = False
    """Print one JSON value on stdout, and nothing else there."""
    debug: bool = False
    """Show the traceback of an error."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Stored(Answer):
    """Which store a command works on."""

    store: str | None = None
    """Where the sessions are: a path, or a URL such as sqlite:///agents.db. Default: PERDURE_URL,
    else PERDURE_HOME, else the user's folder."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Named(Stored):
    """Which of an agent's sessions a command works on."""

    session: str = DEFAULT_SESSION
    """Which of the agent's sessions."""
    tenant: str = ""
    """Whose it is, where customers share a store."""

    def key(self, id: str) -> SessionKey:
        """Return the session's key."""
        return SessionKey(id, self.session, self.tenant)
