"""Whole states out of sessions, and sessions out of whole states."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec

from perdure.checkpoints.chain import Chain
from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    FormatError,
    PerdureError,
    SessionError,
    UnsupportedVersionError,
)
from perdure.interchange.folding import state_of
from perdure.interchange.own import with_log
from perdure.interchange.reading import Finding
from perdure.interchange.state import FullAgentState
from perdure.interchange.unfolding import Unfolded, unfold
from perdure.model.checkpoints import CHECKPOINTS
from perdure.model.keys import SessionKey
from perdure.model.records import Entry, Record
from perdure.session.inside import grouped
from perdure.session.lineage import followed
from perdure.session.options import Limits
from perdure.session.rebuilding import fold_afresh
from perdure.session.remains import remains
from perdure.session.remembering import read_again
from perdure.session.traced import unfold_with

if TYPE_CHECKING:
    from perdure.interchange.remembering import Remembered
    from perdure.session.manager import SessionManager
    from perdure.store import Store

__all__ = ["Imported", "export_state", "import_state", "import_with", "state_from"]


class Imported(msgspec.Struct, frozen=True):
    """What an import did."""

    key: SessionKey
    version: int
    """The session's, and durable."""
    findings: tuple[Finding, ...] = ()
    """What was not as it should be, and what was done about it."""


async def export_state(
    sessions: SessionManager,
    id: str,
    *,
    session: str = "default",
    tenant: str = "",
    log: bool = True,
) -> FullAgentState | None:
    """Return all of a session as one state, its history included; None if there is none.

    Of a session that is open here, what is unsaved is saved first.

    Args:
        sessions: The manager.
        id: The agent's id.
        session: Which of its conversations.
        tenant: Whose it is.
        log: Whether the state carries the log, for an import that loses nothing. Without it:
            only what the format has a place for.

    """
    connected, key = sessions._check(), SessionKey(id, session, tenant)
    mine = connected.runtime.sessions.get(key)
    if mine is not None:
        await mine.save()
    return await state_from(connected.runtime.store, key, log=log)


async def state_from(store: Store, key: SessionKey, *, log: bool = True) -> FullAgentState | None:
    """Return what is durable of a session as one state, None if there is no such session."""
    records = await remains(store, key)
    async with contextlib.aclosing(followed(store).read_log(key)) as chunks:
        async for chunk in chunks:
            records.extend(chunk.records)
    if not records:
        return None

    def fold() -> FullAgentState:
        state = state_of(key, records)
        return with_log(state, key, records) if log else state

    return await anyio.to_thread.run_sync(fold)


async def import_state(
    sessions: SessionManager,
    state: FullAgentState,
    *,
    id: str | None = None,
    session: str = "default",
    tenant: str = "",
) -> Imported:
    """Make a session of a state; return when it is durable. All of it is there then, or nothing.

    Args:
        sessions: The manager.
        state: Read by `perdure.interchange.read_state`, or exported.
        id: The agent's id; None for the one that the state names.
        session: Which of its conversations it becomes.
        tenant: Whose it is.

    Raises:
        ConfigError: No id is given, and the state names none.
        SessionError: The session exists: nothing was changed.
        TooLargeError: A record of it is over ``Limits.record_bytes``.

    """
    return await import_with(sessions, state, None, id=id, session=session, tenant=tenant)


async def import_with(
    sessions: SessionManager,
    state: FullAgentState,
    read: Remembered | None,
    *,
    id: str | None,
    session: str,
    tenant: str,
) -> Imported:
    """Make a session of a state, and of what files said beside it; errors as `import_state`."""
    agent = id or state.agent_id
    if not agent:
        raise ConfigError("the state names no agent: give its id")
    key = SessionKey(agent, session, tenant)
    unfolded = await anyio.to_thread.run_sync(partial(_unfolded, state, read, key))
    if await sessions.exists(agent, session=session, tenant=tenant):
        raise _exists(key)
    opened = await sessions.open(agent, session=session, tenant=tenant)
    async with opened:
        if opened.version != opened.durable_version or opened.restore_report.source != "fresh":
            raise _exists(key)
        try:
            with grouped(opened):  # no save comes between two groups
                for group in _groups(unfolded.entries):
                    opened.accept(group)
            receipt = await opened.save()
        except Exception:
            with contextlib.suppress(PerdureError):  # not ours any more: whoever has it decides
                await sessions.delete(agent, session=session, tenant=tenant)
            raise
        await read_again(opened)  # it knows its turns then, as one that was restored does
    return Imported(key, receipt.version, unfolded.findings)


def _unfolded(state: FullAgentState, read: Remembered | None, key: SessionKey) -> Unfolded:
    """Return the records of a state, of which it is known that they amount to a session."""
    now = time.time()
    try:
        unfolded = unfold(state, now=now) if read is None else unfold_with(state, read, now=now)
        records = [Record(seq, 1, *entry) for seq, entry in enumerate(unfolded.entries, 2)]
        _check(fold_afresh(key, records, limits=Limits()))
    except UnsupportedVersionError:
        raise
    except (FormatError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        message = (
            f"the state of {state.agent_id!r} holds records that make no session: {error}; import "
            "it without its field `perdure`; nothing was changed"
        )
        raise CorruptRecordError(message, agent=state.agent_id) from error
    return unfolded


def _check(documents: Mapping[str, bytes]) -> None:
    """Raise what is wrong with documents that a fold makes without a look at it."""
    Chain.of(documents.get(CHECKPOINTS))
    for name in documents:
        if not all(name.split("/")):
            raise ValueError(f"nothing can be stored as {name!r}")


def _groups(entries: tuple[Entry, ...]) -> Iterator[tuple[Entry, ...]]:
    group: list[Entry] = []
    for entry in entries:
        group.append(entry)
        if entry.end:
            yield tuple(group)
            group = []


def _exists(key: SessionKey) -> SessionError:
    message = f"session {key} exists: import into another id, or delete it first"
    return SessionError(message, key=str(key))
