"""An agent with an HTTP API: the server of ``perdure serve``, above `perdure.asgi`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.serve.access import Access as Access, Token as Token
    from perdure.serve.api import AgentServer as AgentServer

_HOME_OF = {
    "Access": "perdure.serve.access",
    "AgentServer": "perdure.serve.api",
    "Token": "perdure.serve.access",
}

__all__ = list(_HOME_OF)

if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
