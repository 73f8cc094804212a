"""Messages that an agent has admitted, read back.

One whose turn began at once stands in the log once, in its turn: the ledger just has its record's
number. All others stand in the ledger itself. A number counts as long as its record is in the turn:
a log that was made of somebody else's state has others.
"""

from __future__ import annotations

import contextlib

from perdure.memory.ledger import Admitted, Ledger
from perdure.memory.traces import begun_by
from perdure.model.records import MESSAGE, TURN
from perdure.session.inside import ledger_of, store_of
from perdure.session.session import Session
from perdure.session.view import SessionView

__all__ = ["whole_ledger"]


async def whole_ledger(session: Session | SessionView) -> Ledger:
    """Return what is under way, with all messages; one that is not in the store is left out."""
    ledger = await ledger_of(session)
    for one in ledger.messages():
        if not one.message:
            ledger.fill(one.id, await _said(session, one))
    return ledger


async def _said(session: Session | SessionView, one: Admitted) -> bytes | None:
    """Return a message from where its turn has it; None if that turn is not there."""
    if one.seq is None:
        return None
    payload = None
    log = store_of(session).read_log(session.key, before=one.seq + 1, reverse=True)
    async with contextlib.aclosing(log) as chunks:
        async for chunk in chunks:
            for record in chunk.records:
                if payload is not None and record.kind == TURN:
                    return payload if begun_by(record) == one.turn else None
                if payload is None and (record.seq, record.kind) != (one.seq, MESSAGE):
                    return None
                payload = payload or record.payload
    return None
