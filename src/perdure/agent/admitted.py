"""Messages that an agent has admitted, read back.

One whose turn began at once stands in the log once, in its turn: the ledger just has its record's
number. All others stand in the ledger itself.
"""

from __future__ import annotations

import contextlib

from perdure.memory.ledger import Admitted, Ledger
from perdure.memory.traces import find_turn
from perdure.model.keys import SessionKey
from perdure.model.records import MESSAGE
from perdure.session.inside import ledger_of, store_of
from perdure.session.session import Session
from perdure.session.view import SessionView
from perdure.store import Store

__all__ = ["whole_ledger"]


async def whole_ledger(session: Session | SessionView) -> Ledger:
    """Return what is under way, with all messages; one that is not in the store is left out."""
    ledger = await ledger_of(session)
    for one in ledger.messages():
        if not one.message:
            ledger.fill(one.id, await _said(session, one))
    return ledger


async def _said(session: Session | SessionView, one: Admitted) -> bytes | None:
    """Return a message by its record's number; by its turn, where records were numbered anew."""
    store = store_of(session)
    found = None if one.seq is None else await _message_at(store, session.key, one.seq)
    if found is None and one.turn is not None:
        turn = await find_turn(store, session.key, one.turn)
        found = turn.messages[0] if turn is not None and turn.messages else None
    return found


async def _message_at(store: Store, key: SessionKey, seq: int) -> bytes | None:
    log = store.read_log(key, after=seq - 1)
    async with contextlib.aclosing(log) as chunks:
        async for chunk in chunks:
            for record in chunk.records:
                if record.seq >= seq:
                    is_it = record.seq == seq and record.kind == MESSAGE
                    return record.payload if is_it else None
    return None
