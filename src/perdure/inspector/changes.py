"""The changes that an inspector may be allowed to make: what each would do, and doing it.

Each is one that the command line has. All that is done, or was tried, is in the log of actions and
in that of the process, under ``perdure.inspector``.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial
from typing import Final, Literal, cast, final, get_args

import msgspec

from perdure.errors import CheckpointNotFoundError, InvalidArgumentError, PerdureError
from perdure.inspector.pages import LongReads, facts_of, load
from perdure.inspector.query import Page, Query
from perdure.records.keys import SessionKey
from perdure.session.internals import release_unused, store_below
from perdure.session.manager import SessionManager

log: logging.Logger = logging.getLogger("perdure.inspector")

KEPT: Final = 200
"""Actions that the log keeps."""

Change = Literal["rollback", "fork", "rebuild", "forget"]


class RequestedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a session, as a person asks for it."""

    change: Change
    key: SessionKey
    checkpoint: int | None = None
    """Of a rollback: where to."""
    at: int | None = None
    """Of a fork: the last record that both have; None for the end."""
    new_id: str = ""
    """Of a fork."""
    confirmed: str = ""
    """Of a forgetting: the agent's id again."""

    @property
    def text(self) -> str:
        """The change in words."""
        match self.change:
            case "rollback":
                return f"roll back to checkpoint {self.checkpoint}"
            case "fork":
                where = "the end" if self.at is None else f"record {self.at}"
                return f"fork at {where}" + (f" as {self.new_id}" if self.new_id else "")
            case "rebuild":
                return "rebuild the documents from the log"
            case _:
                return "forget the session"


def requested(query: Query) -> RequestedChange:
    """Return the change that an address, or a form, asks for.

    Raises:
        InvalidArgumentError: Something is missing, or invalid.

    """
    return RequestedChange(
        change=cast("Change", query.choice("change", ("", *get_args(Change)))),
        key=query.key(),
        checkpoint=query.number("checkpoint"),
        at=query.number("at"),
        new_id=query.text("new_id"),
        confirmed=query.text("confirmed"),
    )


@final
class Changes:
    """The changes of one manager's sessions."""

    def __init__(self, sessions: SessionManager) -> None:
        self.sessions: SessionManager = sessions
        self._actions: deque[Page] = deque(maxlen=KEPT)

    def page(self) -> Page:
        """Return what was done, newest first."""
        return {
            "location": store_below(self.sessions).location,
            "actions": list(self._actions),
        }

    async def preview(self, wanted: RequestedChange, reads: LongReads) -> Page:
        """Return what a change would do; change nothing."""
        view = await load(self.sessions, wanted.key)
        found, looking = await reads.result(wanted, partial(self._consequences, wanted))
        return {
            "head": await facts_of(reads, view),
            "wanted": wanted,
            "text": wanted.text,
            "consequences": found or [],
            # true while they are being read
            "looking": looking,
        }

    async def _consequences(self, wanted: RequestedChange) -> list[str]:
        sessions, agent = self.sessions, wanted.key.agent
        session, tenant = wanted.key.session, wanted.key.tenant
        match wanted.change:
            case "rollback":
                view = await load(sessions, wanted.key)
                number = wanted.checkpoint or 0
                checkpoint = await view.checkpoints.get(number)
                if checkpoint is None:
                    raise CheckpointNotFoundError(
                        f"session {wanted.key} has no checkpoint {number}", checkpoint=number
                    )
                record, label = checkpoint.event_seq, checkpoint.label
                return [
                    f"Context, memory and states become what they were at record {record}: {label}",
                    "Nothing is erased: a later rollback to an earlier checkpoint undoes it.",
                ]
            case "fork":
                return ["The new session has the same history up to there, and then its own."]
            case "rebuild":
                report = await sessions.rebuild_working_context(
                    agent, dry_run=True, session=session, tenant=tenant
                )
                return [*report.wrong, f"{report.records} records are read."]
            case _:
                gone = await sessions.forget(agent, dry_run=True, session=session, tenant=tenant)
                parts = f"{gone.records} records, {gone.documents} documents, {gone.blobs} blobs"
                return [
                    f"This removes {parts}: {gone.bytes} bytes. It cannot be undone.",
                    *(f"{kept.of}: kept: {kept.what}: {kept.why}" for kept in gone.kept),
                ]

    async def make(self, wanted: RequestedChange, *, by: str) -> Page:
        """Make a change, and log it, done or failed.

        Raises:
            PerdureError: It failed.

        """
        try:
            outcome = await self._make(wanted)
        except PerdureError as error:
            self._log(wanted, f"{type(error).__name__}: {error}", done=False, by=by)
            raise
        return self._log(wanted, outcome, done=True, by=by)

    async def _make(self, wanted: RequestedChange) -> str:
        sessions, agent = self.sessions, wanted.key.agent
        session, tenant = wanted.key.session, wanted.key.tenant
        match wanted.change:
            case "rollback":
                return await self._roll_back(wanted.key, wanted.checkpoint or 0)
            case "fork":
                if not wanted.new_id:
                    raise InvalidArgumentError("give the fork an id", option="new_id")
                fork = await sessions.fork(
                    agent,
                    wanted.new_id,
                    at=wanted.at,
                    history="context",
                    session=session,
                    tenant=tenant,
                )
                return f"{fork.key} continues after record {fork.at}"
            case "rebuild":
                report = await sessions.rebuild_working_context(
                    agent, session=session, tenant=tenant
                )
                return f"rebuilt {', '.join(report.rebuilt) or 'nothing'}"
            case _:
                if wanted.confirmed != agent:
                    raise InvalidArgumentError(
                        f"type the agent's id, {agent}, to confirm: nothing was removed",
                        option="confirmed",
                    )
                gone = await sessions.forget(agent, session=session, tenant=tenant)
                return f"{gone.records} records and {gone.blobs} blobs removed"

    async def _roll_back(self, key: SessionKey, number: int) -> str:
        opened = self.sessions.open(key.agent, session=key.session, tenant=key.tenant, create=False)
        async with opened as session:
            done = await session.checkpoints.rollback(number)
        await release_unused(session)  # so that its program need not ask for it
        return f"it is checkpoint {done.checkpoint.id} now"

    def _log(self, wanted: RequestedChange, outcome: str, *, done: bool, by: str) -> Page:
        action = {
            # seconds since 1970
            "at": time.time(),
            "key": wanted.key,
            "text": wanted.text,
            "outcome": outcome,
            "done": done,
            # the address that it was asked from
            "by": by,
        }
        self._actions.appendleft(action)
        level = logging.INFO if done else logging.WARNING
        log.log(level, "session %s: %s, asked from %s: %s", wanted.key, wanted.text, by, outcome)
        return action
