"""Assertions about what is saved, with the facts in their messages."""

from __future__ import annotations

import anyio

from perdure.session.session import Session

__all__ = ["assert_saved", "wait_saved"]


def assert_saved(*sessions: Session) -> None:
    """Assert that everything appended to these sessions is durable.

    Raises:
        AssertionError: Something is not; it says which session, how many records, and why.

    """
    unsaved = [_unsaved(session) for session in sessions if not _is_saved(session)]
    if unsaved:
        raise AssertionError("; ".join(unsaved))


async def wait_saved(*sessions: Session, timeout: float = 5.0) -> None:  # noqa: ASYNC109  # no scope is left to the test
    """Wait until autosave has made everything in these sessions durable; hurry nothing.

    Args:
        sessions: Which.
        timeout: Seconds after which it gives up, by the loop's own clock.

    Raises:
        AssertionError: It is not durable in time.
        LeaseLostError: Somebody else has taken a session over.
        SessionQuarantinedError: The store refuses a record for good.
        SessionClosedError: The manager stopped before.

    """
    with anyio.move_on_after(timeout):
        for session in sessions:
            await session.wait_durable()
    assert_saved(*sessions)


def _is_saved(session: Session) -> bool:
    return session.durable_version == session.version


def _unsaved(session: Session) -> str:
    tracked = session.tracked
    count = session.version - session.durable_version
    why = f", the last save failed: {tracked.last_error}" if tracked.last_error else ""
    return (
        f"session {session.key} has {count} records that are not durable "
        f"(version {session.version}, durable up to {session.durable_version}, "
        f"{tracked.state.value}{why})"
    )
