"""How a session takes records in: at once into autosave, and into what it shows later.

An append touches as little as it can, because with very many sessions fetching a session's
memory is most of what it costs. What was appended reaches the contents when somebody looks at
them, or while the store is busy with it; never later than that, since it leaves memory then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.session.contents import Contents
from perdure.session.entries import check_sizes
from perdure.session.remembering import room_of
from perdure.session.runtime import Runtime, wrong_loop

if TYPE_CHECKING:
    from perdure.autosave.core import Tracked
    from perdure.model.records import Entry
    from perdure.restore.ladder import Restored

__all__ = ["Accepting"]


class _Hot:
    """What an append touches comes first, and so lies side by side in memory."""

    __slots__ = ("_closed_by", "_runtime", "tracked")


class Accepting(_Hot):
    """The part of a session that every record passes."""

    __slots__ = ("_behind", "_noted", "tail_bytes", "tail_records")

    def __init__(self, runtime: Runtime, restored: Restored, tracked: Tracked) -> None:
        self._runtime: Runtime = runtime
        self.tracked: Tracked = tracked
        self._closed_by: Exception | None = None
        self._hold(restored)
        tracked.on_captured = self.catch_up

    def _hold(self, restored: Restored) -> None:
        """Begin with what the store has."""
        runtime = self._runtime
        self._behind: Contents = Contents(
            runtime.store,
            runtime.registry,
            restored,
            self._accept_now,
            self.catch_up,
            room_of(runtime, restored.key),
        )
        # What a save under way has brought to the store may have been read already.
        self._noted: int = max(self.tracked.durable, restored.head)
        self.tail_bytes: int = restored.tail_bytes
        self.tail_records: int = restored.tail_records

    def accept(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in as one group; every change of the session comes through here."""
        runtime, tracked = self._runtime, self.tracked
        if tracked.refuses or runtime.running() is not runtime.loop:
            self._check_open()
        for entry in entries:
            if len(entry[1]) > runtime.max_record_bytes:
                check_sizes(
                    tracked.key, entries, runtime.max_record_bytes, most=runtime.store_record_bytes
                )
        return runtime.append(tracked, entries)

    def _accept_now(self, entries: tuple[Entry, ...]) -> int:
        """Take entries in, and show them at once: for who holds a part of the contents."""
        version = self.accept(entries)
        self.catch_up()
        return version

    @property
    def _contents(self) -> Contents:
        """What the session holds, as of its newest record."""
        self.catch_up()
        return self._behind

    def catch_up(self) -> None:
        """Take what was appended into the contents."""
        tracked, noted = self.tracked, self._noted
        if tracked.version <= noted:
            return
        entries = tracked.pending
        if noted > tracked.durable:
            entries = entries[noted - tracked.durable :]
        self._noted = tracked.version
        self.tail_records += len(entries)
        self.tail_bytes += sum([len(entry[1]) for entry in entries])
        self._behind.note(noted + 1, entries, tracked.epoch)

    def _shorten_tail(self, size: int, records: int) -> None:
        """Take note that so much of the log was folded."""
        self.tail_bytes = max(self.tail_bytes - size, 0)
        self.tail_records = max(self.tail_records - records, 0)

    # where, and for how long

    @property
    def closed_by(self) -> Exception | None:
        """What an append is refused with; None while the session is open."""
        return self._closed_by

    @closed_by.setter
    def closed_by(self, error: Exception | None) -> None:
        self._closed_by = error
        self.tracked.refuses = True  # so that an append has to ask for one thing only

    def _check_home(self) -> None:
        stray = self._runtime.home.stray()
        if stray is not None:
            raise wrong_loop(f"session {self.tracked.key}", stray)

    def _check_open(self) -> None:
        self._check_home()
        if self._closed_by is not None:
            raise self._closed_by
