"""An append without a thread: sent from the event loop, which also waits for the answer.

In a process whose event loop is busy a thread waits up to 5 ms for the interpreter's lock
each time that it has something to do. Where a connection stands ready and every batch is what
the log expects next, nothing blocks: the statement goes out and the loop is told when
its answer is there. Whatever is not that plain is left to a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from perdure.errors import StoreUnavailableError
from perdure.store import Batch, Outcome, Status
from perdure.stores.postgres.connections import Connection, Connections
from perdure.stores.postgres.errors import is_broken, outcome_of
from perdure.stores.postgres.log import AppendMany, EncodedBatch, arrays
from perdure.stores.postgres.prepared import PreparedStatement
from perdure.stores.postgres.rows import Holding
from perdure.stores.postgres.statements import Statements

MOST_BYTES = 1024 * 1024
"""Payloads in one statement; encoding more would hold up the event loop."""


async def append(
    connections: Connections, sql: Statements, held: Holding, batches: Sequence[Batch]
) -> list[Outcome | None]:
    """Append what can be appended at once; None for each batch that a thread has to look at.

    Cancelling it closes its connection: the server has the whole statement, or does nothing.
    """
    nothing: list[Outcome | None] = [None] * len(batches)
    size = sum([len(entry.payload) for batch in batches for entry in batch.records])
    connection = None if size > MOST_BYTES else connections.take_ready(sql.append.is_ready)
    if connection is None:
        return nothing
    try:
        work = AppendMany(sql, held, batches)
        ready, unknown = work.first_round()
        if unknown or not ready:
            return nothing
        with connections.watched(connection):
            return await _send(connections, sql.append, connection, work, ready)
    except BaseException:
        connection.close()
        raise
    finally:
        connections.give_back(connection)


async def _send(
    connections: Connections,
    statement: PreparedStatement,
    connection: Connection,
    work: AppendMany,
    ready: list[EncodedBatch],
) -> list[Outcome | None]:
    ready.sort(key=lambda one: one.held.id)
    try:
        moved = await _exchange(statement, connection, arrays(ready))
    except connections.errors as error:
        broken = is_broken(error, connection)
        mapped = connections.failed(error, connection, "write to")
        return list(work.end(outcome_of(mapped, broken=broken)))
    except OSError as error:  # the loop could not watch a connection that has just ended
        connection.close()
        message = "the connection was lost while its answer was due"
        lost = StoreUnavailableError(message)
        lost.__cause__ = error
        return list(work.end(Outcome(Status.IN_DOUBT, lost)))
    if moved is not None:
        work.settle(ready, moved)
    return work.outcomes


async def _exchange(
    statement: PreparedStatement, connection: Connection, values: Sequence[bytes]
) -> set[int] | None:
    """Send the statement and wait for its answer; None when it has to be prepared again."""
    pgconn = connection.pgconn
    place = connection.fileno()
    statement.send(connection, values)
    while pgconn.flush():
        await anyio.wait_writable(place)
    while pgconn.is_busy():
        await anyio.wait_readable(place)
        pgconn.consume_input()
    result = pgconn.get_result()
    while pgconn.get_result() is not None:
        pass
    return statement.received(connection, result)
