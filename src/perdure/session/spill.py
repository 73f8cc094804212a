"""Spill files: what the store refused at shutdown, kept outside of it and replayed later.

A spill file holds one session's unsaved groups, in the log's own line format after a
header with the session's key and the last durable record. The next open of the
session here appends what the log does not hold yet, and removes the file. Records that
the log holds already must be the same, byte for byte; if another process has written
other ones since, the file is kept and named in the restore report. So is one of a store that
was at this place before: the log's epoch record names another owner.

Blocking: called in threads, or when nothing else can be waited for any more; `completed` is for
a disk that may hang.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeVar

import msgspec

from perdure._lib.files import Folder
from perdure._lib.logs import log_facts
from perdure.errors import ConfigError, CorruptRecordError
from perdure.memory.documents import TurnPayload
from perdure.records import records as frames
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.records.media import LIFTED_KINDS, lifted
from perdure.records.records import EPOCH, TURN, Entry, Record
from perdure.store import Store, SupportsSpill, capability

log: logging.Logger = logging.getLogger("perdure")

FORMAT = 1

AT_ONCE: Final = 8
"""Files that are written at once: a disk syncs several about as fast as one."""
PATIENCE: Final = 2.0
"""Seconds without a result after which a disk hangs: a busy one may take a second to sync."""


class SpillHeader(msgspec.Struct, frozen=True):
    """The first line of a spill file: where its records belong."""

    format: int
    key: SessionKey
    epoch: int
    """Under which they were accepted."""
    base: int
    """The last record that was known to be durable; they follow it."""
    owner: str = ""
    """The session's holder, by the id that its epoch record names."""
    begun: int = 0
    """That record's seq; 0 where it was not known any more."""


class SpillFile(msgspec.Struct, frozen=True):
    """One spill file, read back."""

    name: str
    header: SpillHeader
    records: tuple[Record, ...]
    """Whole groups."""


def folder_for(store: Store, wanted: str | Literal[False] | None) -> str | None:
    """Return where a store's spill files are: a folder of its own, unless one was named."""
    if wanted is False or (wanted is None and store.capabilities.durability == "memory"):
        return None
    if wanted is not None:
        return str(Path(wanted).expanduser())
    from platformdirs import user_state_dir

    digest = hashlib.sha256(store.location.encode()).hexdigest()
    return str(Path(user_state_dir("perdure", appauthor=False), "spill", digest[:32]))


def require_usable(folder: str) -> None:
    """Raise ConfigError if a folder that was named can hold no files; blocking, makes nothing."""
    try:
        path = Path(folder).expanduser()
        there = next((one for one in (path, *path.absolute().parents) if one.exists()), path)
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return
        reason = f"{there} " + ("cannot be written to" if there.is_dir() else "is no folder")
    except (OSError, RuntimeError, ValueError) as error:  # too long, or of no user, say
        reason = str(error)
    raise ConfigError(
        f"shutdown: spill={folder!r} cannot be used: {reason}; name another folder",
        option="spill",
        path=folder,
    )


def exists(folder: str) -> bool:
    """Return whether anything was ever spilled there, at the cost of one look."""
    try:
        return stat.S_ISDIR(os.stat(folder).st_mode)  # noqa: PTH116  # at each open: it is fast
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        # Another user's, or no folder at all: nothing of this process's can be there.
        message = "spill files in %(path)s cannot be looked for: %(reason)s"
        log_facts(log, logging.WARNING, message, path=folder, reason=error.strerror)
        return False


def write(folder: str, header: SpillHeader, entries: Sequence[Entry]) -> str:
    """Keep a session's unsaved entries in a file of its own; return its path.

    It is durable once `settle` was called after the last of several.

    Raises:
        OSError: It could not be written.

    """
    first_line = frames.seal(msgspec.json.encode(header))
    lines, _ = frames.encode(entries, first=header.base + 1, epoch=header.epoch, crc=0)
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{_prefix(header.key)}{header.epoch}-{header.base}.jsonl"
    with Folder.root(str(path)) as place:
        place.replace(name, first_line + lines)
    return str(path / name)


def settle(folder: str) -> None:
    """Make the names of spill files durable.

    Raises:
        OSError: They could not be synced.

    """
    with Folder.root(str(Path(folder))) as place:
        place.sync()


T = TypeVar("T")
R = TypeVar("R")

_late: SimpleQueue[Callable[[], object]] | None = None
"""Calls for the thread that was started while threads could be."""


def completed(
    folder: str, items: Sequence[T], act: Callable[[T], R], seconds: float = 0.0
) -> Iterator[tuple[T, R | Exception]]:
    """Write items to a folder, and yield each with its result or error, unless the disk hangs.

    They run in threads that keep no process alive. After *seconds*, and once none has ended for
    `PATIENCE`, those that have begun are left to themselves, and no other begins. An act must not
    log: in a signal handler, the interrupted code may hold a handler's lock.
    """
    results: SimpleQueue[tuple[T, R | Exception]] = SimpleQueue()
    # One iterator for all threads: each item is written once.
    remaining, until = iter(items), time.monotonic() + seconds

    def work() -> None:
        for item in remaining:
            try:
                results.put((item, act(item)))
            except Exception as error:  # noqa: BLE001  # logged, not in this thread
                results.put((item, error))

    _start(work, min(len(items), AT_ONCE))
    with contextlib.suppress(Empty):
        for _ in items:
            yield results.get(timeout=max(until - time.monotonic(), PATIENCE))
        return
    list(remaining)  # the threads find none any more
    log_facts(log, logging.ERROR, "spilling was given up: the disk hangs", path=folder)


def _start(work: Callable[[], object], most: int) -> None:
    """Work in some threads; in the caller's if there is no other."""
    for started in range(most):
        try:
            threading.Thread(target=work, name="perdure:spill", daemon=True).start()
        except RuntimeError:  # there are too many, or the interpreter is ending
            if started:
                return
            if _late is None:
                work()
            else:
                _late.put(work)
            return


def keep_thread() -> None:
    """Start the thread that `completed` uses once the interpreter starts no other."""
    global _late  # noqa: PLW0603  # the process ends once
    calls: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def work() -> None:
        while True:
            calls.get()()

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=work, name="perdure:spill", daemon=True).start()
        _late = calls


def find(folder: str, key: SessionKey) -> list[SpillFile]:
    """Return a session's spill files, oldest first; damaged ones are left and logged."""
    path = Path(folder)
    files: list[SpillFile] = []
    with contextlib.suppress(FileNotFoundError), Folder.root(str(path)) as place:
        for name in place.names():
            if not name.startswith(_prefix(key)) or not name.endswith(".jsonl"):
                continue
            spilled = _read(name, place.read(name) or b"", key)
            if spilled is None:
                message = "a spill file is damaged and was left as it is"
                log_facts(log, logging.ERROR, message, session=str(key), path=str(path / name))
            else:
                files.append(spilled)
    return sorted(files, key=lambda file: file.header.base)


def remove(folder: str, name: str) -> None:
    """Remove a spill file whose records are durable in the store."""
    with Folder.root(str(Path(folder))) as place:
        place.remove(name)
        place.sync()


def forget(folder: str, key: SessionKey, remove: bool) -> list[int]:  # noqa: FBT001  # from a thread
    """Return the sizes of a session's spill files, damaged ones too, and remove them if asked."""
    sizes: list[int] = []
    with contextlib.suppress(FileNotFoundError), Folder.root(str(Path(folder))) as at:
        for name in filter(lambda name: name.startswith(_prefix(key)), at.names()):
            file_stat = at.stat(name)
            if file_stat is not None and (not remove or at.remove(name)):
                sizes.append(file_stat.st_size)
        at.sync()
    return sizes


def missing_records(spilled: SpillFile, log: Sequence[Record]) -> tuple[Record, ...] | None:
    """Return the entries of a spill file that a log lacks, None if they do not continue it.

    Args:
        spilled: The file.
        log: The log's records from ``spilled.header.base`` on.

    """
    header = spilled.header
    if not log or log[0].seq != header.base or log[0].epoch > header.epoch:
        return None  # the session was deleted and made again: epochs never restart
    # Without what the file never has: epochs, and the record by which a replay resumes a turn.
    own_records = [
        record
        for before, record in pairwise(log)
        if record.kind != EPOCH and not (before.kind == EPOCH and _goes_on(record))
    ]
    for spilled_record, theirs in zip(spilled.records, own_records, strict=False):
        if not _is_same(spilled_record, theirs):
            return None
    return spilled.records[len(own_records) :]


def _goes_on(record: Record) -> bool:
    """Return whether it says that the records of an earlier holder follow, as a replay does."""
    return record.kind == TURN and decode(record.payload, TurnPayload).resumed


def _is_same(spilled: Record, theirs: Record) -> bool:
    """Compare records wherever their media are: what is spilled was not lifted yet."""
    if (spilled.kind, spilled.end) != (theirs.kind, theirs.end):
        return False
    if spilled.payload == theirs.payload:
        return True
    is_lifted = spilled.kind in LIFTED_KINDS
    return is_lifted and lifted(spilled.payload)[0] == lifted(theirs.payload)[0]


def transformed(store: object, header: SpillHeader, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return entries as the store would keep them: encrypted, if it encrypts.

    Raises:
        OSError: The store's key for the session is not at hand.

    """
    wrapper = capability(store, SupportsSpill)
    if wrapper is None:
        return entries
    kept = wrapper.transform_spill(header.key, header.epoch, header.base, entries)
    if kept is None:
        key = header.key
        raise OSError(
            f"the key of session {key} is not at hand, and plain text must not be spilled"
        )
    return kept


async def restored(store: object, spilled: SpillFile) -> SpillFile:
    """Return a spill file as it was before `transformed`."""
    wrapper = capability(store, SupportsSpill)
    if wrapper is None:
        return spilled
    records = await wrapper.restore_session_records(spilled.header.key, spilled.records)
    return msgspec.structs.replace(spilled, records=records)


def _prefix(key: SessionKey) -> str:
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()
    return f"spill-{digest[:32]}-"


def _read(name: str, data: bytes, key: SessionKey) -> SpillFile | None:
    line, newline, lines = data.partition(b"\n")
    body = frames.open_sealed(line + newline)
    if body is None:
        return None
    try:
        header = decode(body, SpillHeader)
    except CorruptRecordError:
        return None
    if header.format != FORMAT or header.key != key:
        return None
    scanner = frames.Scanner(header.epoch, frames.Position(0, header.base, 0))
    records = scanner.feed(lines)
    is_whole = scanner.end.offset == len(lines)
    return SpillFile(name, header, tuple(records)) if is_whole else None
