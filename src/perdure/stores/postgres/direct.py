"""Append without a thread: sent from the event loop, which also waits for the answer.

In a process with a busy event loop, a thread waits up to 5 ms for the interpreter's lock each time
it has something to do. If a connection is idle and every batch is what its log expects next,
nothing blocks: the statement is sent, and the loop waits for the socket. All other appends are
left to a thread.
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
from perdure.stores.postgres.rows import HeldSessionsByKey
from perdure.stores.postgres.statements import Statements

MAX_BYTES = 1024 * 1024
"""Maximum bytes of payload in one statement; encoding more would block the event loop."""


async def append(
    connections: Connections,
    sql: Statements,
    held_sessions: HeldSessionsByKey,
    batches: Sequence[Batch],
) -> list[Outcome | None]:
    """Append the batches without blocking, or return None for each that needs a thread.

    Cancelling it closes its connection: the server has the whole statement, or does nothing.
    """
    unsent: list[Outcome | None] = [None] * len(batches)
    size = sum([len(entry.payload) for batch in batches for entry in batch.records])
    connection = None if size > MAX_BYTES else connections.take_ready(sql.append.is_ready)
    if connection is None:
        return unsent
    try:
        appends = AppendMany(sql, held_sessions, batches)
        ready, unknown = appends.encode_ready()
        if unknown or not ready:
            return unsent
        with connections.watched(connection):
            return await _send(connections, sql.append, connection, appends, ready)
    except BaseException:
        connection.close()
        raise
    finally:
        connections.give_back(connection)


async def _send(
    connections: Connections,
    statement: PreparedStatement,
    connection: Connection,
    appends: AppendMany,
    ready: list[EncodedBatch],
) -> list[Outcome | None]:
    ready.sort(key=lambda batch: batch.session.id)
    try:
        moved = await _exchange(statement, connection, arrays(ready))
    except connections.errors as error:
        is_lost = is_broken(error, connection)
        converted = connections.handle_error(error, connection, "write to")
        return list(appends.fill_outcomes(outcome_of(converted, is_lost=is_lost)))
    except OSError as error:  # the loop could not watch a connection that was just closed
        connection.close()
        message = "the connection was lost while its answer was due"
        unavailable = StoreUnavailableError(message)
        unavailable.__cause__ = error
        return list(appends.fill_outcomes(Outcome(Status.IN_DOUBT, unavailable)))
    if moved is not None:
        appends.mark_appended(ready, moved)
    return appends.outcomes


async def _exchange(
    statement: PreparedStatement, connection: Connection, values: Sequence[bytes]
) -> set[int] | None:
    """Send the statement and wait for its answer; None if it has to be prepared again."""
    pgconn = connection.pgconn
    fd = connection.fileno()
    statement.send(connection, values)
    while pgconn.flush():
        await anyio.wait_writable(fd)
    while pgconn.is_busy():
        await anyio.wait_readable(fd)
        pgconn.consume_input()
    result = pgconn.get_result()
    while pgconn.get_result() is not None:
        pass
    return statement.result_ids(connection, result)
