"""One session's storage, as `perdure.stores.state` works on it: read when it was changed,
saved whole, and whatever goes wrong said in perdure's words.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TypeVar, final

import anyio
import anyio.to_thread
import msgspec

from perdure.codec.decoders import decoder_of
from perdure.errors import (
    ConfigError,
    FormatError,
    NotStorableError,
    PerdureError,
    StoreUnavailableError,
)
from perdure.interchange.folding import state_of
from perdure.interchange.own import log_in, with_log
from perdure.interchange.state import FullAgentState
from perdure.interchange.storage import StateStorage
from perdure.interchange.unfolding import unfold
from perdure.model.keys import SessionKey
from perdure.model.records import EPOCH, Entry, Record
from perdure.stores._backing import Session

__all__ = ["Place", "copied"]

T = TypeVar("T")

_OFFLOAD = 256
"""More records than this are made a state of in a thread."""


@final
class Place:
    """One session's storage, and what was read from it last."""

    def __init__(self, key: SessionKey, storage: StateStorage, lock: anyio.Lock) -> None:
        self.key: SessionKey = key
        self._storage = storage
        self._lock = lock
        self._modified: datetime.datetime | None = None
        self._known = False
        self._other = ""
        self.session: Session | None = None
        """As it was read or saved last; None where there is none."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody is at it, or waits to be."""
        at = self._lock.statistics()
        return not at.locked and not at.tasks_waiting

    @contextlib.asynccontextmanager
    async def looked(self) -> AsyncIterator[Place]:
        """Have the place alone, and up to date."""
        async with self._lock:
            with self._trouble("read"):
                modified = await self._storage.get_last_modified()
                if not self._known or (modified is not None and modified != self._modified):
                    await self._load(modified)
            yield self

    async def _load(self, modified: datetime.datetime | None) -> None:
        state = await self._storage.load()
        deleted = self.session if self.session is not None and self.session.deleted else None
        documents = self.session
        self._other = "" if state is None else _stranger(state, self.key)
        if state is None or self._other:
            self.session = deleted
        else:
            self.session = await _in_thread(len(state.context.core.history), lambda: _read(state))
            _keep_documents(self.session, documents)
        self._modified, self._known = modified, True

    async def save(self, session: Session) -> None:
        """Replace the stored state; what is known here changes only if that was done."""
        self._known = False  # until it is sure what the storage holds
        with self._trouble("save"):
            state = await _in_thread(len(session.entries), lambda: _write(self.key, session))
            await self._storage.save(state)
            self._modified = await self._storage.get_last_modified()
        self.session, self._known = session, True

    async def remove(self) -> None:
        """Remove the stored state."""
        self._known = False
        with self._trouble("delete"):
            await self._storage.delete()
        self._modified, self._known = None, True

    def require_mine(self) -> None:
        """Refuse to write over what belongs to another session."""
        if not self._other:
            return
        where = self._storage.get_path()
        message = (
            f"{where} holds the state of {self._other}, not of {self.key}: give each session a "
            "storage of its own, StateStore(lambda key: …)"
        )
        raise ConfigError(message, key=str(self.key), path=where)

    @contextlib.contextmanager
    def _trouble(self, what: str) -> Iterator[None]:
        try:
            yield
        except PerdureError:
            raise
        except Exception as error:
            where = self._storage.get_path()
            message = f"the storage at {where} failed to {what}: {type(error).__name__}: {error}"
            raise StoreUnavailableError(message, path=where, key=str(self.key)) from error


def _stranger(state: FullAgentState, key: SessionKey) -> str:
    """Return whose state it is, if it is not this session's."""
    log = log_in(state)
    session, tenant = ("default", "") if log is None else (log.session, log.tenant)
    agent = state.agent_id or key.agent
    if (agent, session, tenant) == (key.agent, key.session, key.tenant):
        return ""
    return str(SessionKey(agent, session, tenant))


def _read(state: FullAgentState) -> Session:
    """Return the session of a state: its log, or one that is made of it."""
    log = log_in(state)
    session = Session()
    if log is not None and log.agrees and log.records:
        records: Sequence[Record] = log.records
    else:
        first = Record(1, log.epoch if log else 1, EPOCH, b'{"owner":""}', end=True)
        entries = unfold(state, now=time.time()).entries
        records = [
            first,
            *(
                Record(seq, first.epoch, entry.kind, entry.payload, entry.end)
                for seq, entry in enumerate(entries, 2)
            ),
        ]
    for record in records:
        session.entries.append(Entry(record.kind, record.payload, record.end))
        if record.epoch != session.epoch:
            session.epoch = record.epoch
            session.epoch_starts.append(record.seq)
            session.epochs.append(record.epoch)
        if record.kind == EPOCH:
            session.owner = decoder_of(_Begun).decode(record.payload).owner
    return session


class _Begun(msgspec.Struct):
    owner: str = ""


def _write(key: SessionKey, session: Session) -> FullAgentState:
    records = list(session.records(range(1, len(session.entries) + 1)))
    try:
        return with_log(state_of(key, records), key, records)
    except FormatError as error:
        message = f"the records of {key} make no state: {error}"
        raise NotStorableError(message, key=str(key)) from error


def copied(session: Session) -> Session:
    """Return a session that may be changed without changing this one."""
    copy = Session()
    for name in Session.__slots__:
        value = getattr(session, name)
        setattr(copy, name, list(value) if isinstance(value, list) else value)
    return copy


def _keep_documents(session: Session, before: Session | None) -> None:
    """Go on with documents that were folded from what is still there."""
    manifest = None if before is None else before.manifest
    if before is None or manifest is None or manifest.as_of_seq > len(session.entries):
        return
    folded = manifest.as_of_seq
    if before.entries[:folded] == session.entries[:folded]:
        session.documents, session.manifest = before.documents, manifest


async def _in_thread(size: int, act: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(act) if size > _OFFLOAD else act()
