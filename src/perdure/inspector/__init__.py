"""A web page to look at the sessions of a store: lists, conversations, states, live charts.

Mount ``perdure.inspector.app(sessions, token=…)`` in your own application, or run
``perdure inspect``. An extra, ``perdure[inspector]``. It is a thin view over what the library
offers, and reads without a lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.inspector.application import app as app

_HOME_OF = {"app": "perdure.inspector.application"}

__all__ = list(_HOME_OF)

if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
