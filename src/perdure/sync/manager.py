"""The session manager in blocking style, and how to get one.

It keeps a loop in a thread of its own. Closing happens there, so that a second Ctrl-C ends the
wait and not the closing.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from perdure import _connect
from perdure._connect import DEFAULT
from perdure.autosave.options import INHERIT, Inherit
from perdure.model.keys import DEFAULT_SESSION
from perdure.sync import exiting
from perdure.sync.hooks import HookThread
from perdure.sync.loop import LoopThread, closed
from perdure.sync.session import Session, SessionView

if TYPE_CHECKING:
    from perdure.autosave.driver import Health
    from perdure.autosave.shutdown import ShutdownReport
    from perdure.model.keys import SessionKey
    from perdure.session import manager, session
    from perdure.session.hooks import EventName
    from perdure.session.options import Autosave, Engine, Lease, Limits, OnHeld, Shutdown
    from perdure.store import SessionInfo, Store

__all__ = ["SessionManager", "connect"]


def connect(
    url: str | os.PathLike[str] | Store | None = None,
    *,
    autosave: Autosave | None = DEFAULT,
    lease: Lease = DEFAULT,
    shutdown: Shutdown = DEFAULT,
    limits: Limits = DEFAULT,
    types: Sequence[Any] = (),
    engine: Engine | None = None,
) -> SessionManager:
    """Connect, and return a session manager: ``with connect(…) as sessions``.

    The arguments are those of `perdure.connect`.

    Raises:
        ConfigError: The URL or an option does not fit.
        StoreUnavailableError: The store cannot be reached or written.

    """
    inner = _connect.connect(
        url,
        autosave=autosave,
        lease=lease,
        shutdown=shutdown,
        limits=limits,
        types=types,
        engine=engine,
    )
    return SessionManager(inner)


@final
class SessionManager:
    """Keep the sessions of one process, for blocking code. As `perdure.SessionManager`.

    Any thread may use it. A process that ends without closing it still saves what it accepted.
    """

    def __init__(self, inner: manager.SessionManager) -> None:
        self._inner = inner
        self._loop = LoopThread("perdure")
        self._hooks = HookThread("perdure hooks")
        self._wrapped: weakref.WeakValueDictionary[SessionKey, Session]
        self._wrapped = weakref.WeakValueDictionary()
        self._closing = threading.Lock()
        try:
            self._loop.call(lambda: _awaited(inner))
        except BaseException:
            self._loop.post(self._loop.stop)
            raise
        exiting.remember(self)
