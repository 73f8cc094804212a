"""The one connection that writes, in the one thread that uses it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, final

from perdure.errors import (
    CorruptRecordError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
    UnsupportedVersionError,
)
from perdure.model.keys import SessionKey
from perdure.store import Batch, Outcome, Status
from perdure.stores.sqlite.connecting import connect, format_of, make_durable
from perdure.stores.sqlite.log import Planned, Tail, append_one, planned, save_all
from perdure.stores.sqlite.sql import MIGRATIONS, MOST_ROWS
from perdure.stores.sqlite.trouble import (
    InDoubtError,
    driver_error,
    integrity_error,
    left_nothing,
    trouble,
)

if TYPE_CHECKING:
    import sqlite3

__all__ = ["Engine"]


@final
class Engine:
    """Transactions, and what the store's holder knows of the logs that it writes.

    Blocking. Everything but the constructor runs in the writer's thread.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.tails: dict[SessionKey, Tail] = {}
        """Where the logs end that this store holds."""
        self._timeout = timeout
        self._con: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the connection; the last one of all processes tidies the write-ahead log up."""
        con, self._con = self._con, None
        if con is not None:
            con.close()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, opened anew where the last one failed."""
        if self._con is None:
            con = connect(self.path, timeout=self._timeout)
            try:
                make_durable(con, self.path)
            except BaseException:
                con.close()
                raise
            self._con = con
        return self._con

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Do everything in it durably, or nothing.

        Raises:
            InDoubtError: The commit failed, and may last or not.

        """
        con = self.connection
        con.execute("BEGIN IMMEDIATE")
        try:
            self._require_format(con)
            yield con
        except BaseException:
            self._roll_back()
            raise
        with self._committing():
            con.execute("COMMIT")

    def _require_format(self, con: sqlite3.Connection) -> None:
        """Notice a newer release beside this one, which has changed the format since.

        At the latest the next heartbeat does; then nothing is written under the older format.
        """
        ((found,),) = con.execute("PRAGMA user_version")
        if found == len(MIGRATIONS):
            return
        try:
            format_of(con, self.path)
        finally:
            self._roll_back()
            self._drop()
        message = f"{self.path} was changed to format {found} meanwhile: try again"
        raise StoreUnavailableError(message, path=self.path)

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        try:
            yield
        except driver_error() as error:
            self._roll_back()
            if left_nothing(error):
                raise
            # What a failed sync leaves in the log may come back after a crash.
            self._drop()
            raise InDoubtError from error

    def _roll_back(self) -> None:
        con = self._con
        if con is not None and con.in_transaction:
            try:
                con.execute("ROLLBACK")
            except driver_error():
                self._drop()

    def _drop(self) -> None:
        con, self._con = self._con, None
        if con is not None:
            with contextlib.suppress(driver_error()):
                con.close()

    # appending

    def append(self, batches: Sequence[Batch]) -> list[Outcome]:
        """Make batches durable in one commit; raise nothing."""
        now = time.time()
        plans = self._planned(batches)
        try:
            if plans is not None and self._save(plans, now):
                return [Outcome(Status.OK, None, len(plan.data)) for plan in plans]
            return self._one_by_one(batches, now)
        except (driver_error(), InDoubtError, PerdureError, OSError, UnicodeDecodeError) as error:
            return self._failed(batches, error, now)

    def _planned(self, batches: Sequence[Batch]) -> list[Planned] | None:
        plans: list[Planned] = []
        tails = self.tails
        for batch in batches:
            tail = tails.get(batch.key)
            try:
                plan = None if tail is None else planned(tail, batch)
            except NotStorableError:
                plan = None
            if plan is None:
                return None
            plans.append(plan)
        return plans if len({plan.tail.id for plan in plans}) == len(plans) else None

    def _save(self, plans: list[Planned], now: float) -> bool:
        """Append all of them; False if somebody's log is not where its holder left it."""
        try:
            if len(plans) <= MOST_ROWS:
                con = self.connection
                with self._committing():  # one statement is a transaction of its own
                    save_all(con, plans, now)
            else:
                with self.transaction() as con:
                    save_all(con, plans, now)
        except integrity_error():
            return False
        for plan in plans:
            plan.tail.moved(plan)
        return True

    def _one_by_one(self, batches: Sequence[Batch], now: float) -> list[Outcome]:
        done: list[tuple[Outcome, Tail | None]] = []
        with self.transaction() as con:
            for batch in batches:
                try:
                    done.append(append_one(con, batch, now, self.tails.get(batch.key)))
                except CorruptRecordError as error:
                    done.append((Outcome(Status.PERMANENT, error), None))
        for batch, (_, tail) in zip(batches, done, strict=True):
            if tail is None:
                self.tails.pop(batch.key, None)
            else:
                self.tails[batch.key] = tail
        return [outcome for outcome, _ in done]

    def _failed(self, batches: Sequence[Batch], error: Exception, now: float) -> list[Outcome]:
        status = Status.TRANSIENT
        if isinstance(error, InDoubtError):
            status = Status.IN_DOUBT
            assert isinstance(error.__cause__, driver_error())
            error = error.__cause__
        told: Exception = error
        if isinstance(error, (driver_error(), UnicodeDecodeError)):
            told = trouble(error, "append to", self.path)
            told.__cause__ = error
        if isinstance(told, UnsupportedVersionError):
            status = Status.PERMANENT
        elif isinstance(told, CorruptRecordError | NotStorableError) and status is Status.TRANSIENT:
            if len(batches) > 1:  # one session's damage must not be the others'
                return [outcome for batch in batches for outcome in self.append([batch])]
            status = Status.PERMANENT
        for batch in batches:
            self.tails.pop(batch.key, None)
        return [Outcome(status, told)] * len(batches)
