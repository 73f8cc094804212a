"""The end of a manager as a killed process has it: for tests of what comes after.

Nothing more is saved, folded, released or told. The store closes as it would when its
process died, so that another manager on the same place finds leases of a dead owner.
"""

from __future__ import annotations

from perdure.errors import SessionClosedError
from perdure.session.manager import SessionManager


async def kill(manager: SessionManager) -> None:
    """Kill a manager, but leave the process alive; what it had not saved is lost.

    Saves that are with the store are cancelled: as in a real crash, they may have arrived.
    Whoever waits for a save, or uses a session of the manager afterwards, gets an error.
    """
    connected = manager._connected
    if connected is None or connected.closing.report is not None:
        return
    runtime, closing = connected.runtime, connected.closing
    connected.signals.uninstall()
    runtime.draining = True
    closing.begun = True
    await runtime.host.aclose()
    for session in runtime.sessions.values():
        message = f"session {session.key} ended with its manager's crash: open it again"
        session._close_with(SessionClosedError(message, key=str(session.key)))
    # Its host has ended: this only takes stock, and lets nobody wait in vain.
    closing.report = await runtime.saver.aclose(deadline=0, hard_grace=0)
    closing.done.set()
    await runtime.store.aclose()
