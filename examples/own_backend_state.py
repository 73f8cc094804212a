"""What examples/own_backend.py keeps, and what it decides: plain values, no file, no waiting."""

from __future__ import annotations

import msgspec

from perdure import errors, store
from perdure.model.keys import SessionKey
from perdure.model.manifest import About, Manifest
from perdure.model.records import Record


class Session(msgspec.Struct):
    """One session; its row stays when it is deleted, so that epochs never start again."""

    key: SessionKey
    epoch: int = 0
    owner: str = ""
    released: bool = False
    deleted: bool = False
    head: int = 0
    log: list[Record] = []
    manifest: Manifest | None = None
    documents: dict[str, bytes] = {}
    inbox: dict[str, store.Posted] = {}
    dead_letters: dict[str, store.DeadLetter] = {}


class Owner(msgspec.Struct):
    """A store object that is, or was, open."""

    beat: int = 0
    wanted: list[SessionKey] = []
    mail: list[SessionKey] = []


class Blob(msgspec.Struct):
    """A blob, since when it is there, and since when it is out of the way."""

    data: bytes
    renewed: float
    moved: float | None = None


class Kept(msgspec.Struct):
    """Everything."""

    sessions: list[Session] = []
    owners: dict[str, Owner] = {}
    blobs: dict[str, dict[str, Blob]] = {}

    def find(self, key: SessionKey) -> Session | None:
        return next((one for one in self.sessions if one.key == key), None)

    def made(self, key: SessionKey) -> Session:
        session = self.find(key)
        if session is None:
            session = Session(key)
            self.sessions.append(session)
        return session

    def held(self, key: SessionKey, epoch: int) -> Session:
        session = self.find(key)
        if session is None or session.epoch != epoch or session.deleted or not epoch:
            message = f"epoch {epoch} of {key} may not write: open the session again"
            raise errors.LeaseLostError(message, key=str(key), epoch=epoch)
        return session


def fresh(session: Session, batch: store.Batch, most: int) -> list[Record]:
    """Return what of a batch the log does not hold yet.

    Raises:
        NotStorableError: It will never be accepted.

    """
    largest = max([len(one.payload) for one in batch.records], default=0)
    if largest > most:
        message = f"a record has {largest} bytes, the limit is {most}: keep large values as blobs"
        raise errors.TooLargeError(message, key=str(batch.key), size=largest)
    whole = not batch.records or batch.records[-1].end
    if not 0 < batch.first <= session.head + 1 or not whole:
        message = f"a batch of {batch.key} leaves a gap or half a group: send from the head on"
        raise errors.NotStorableError(message, key=str(batch.key), first=batch.first)
    records = [
        Record(seq, batch.epoch, kind, payload, end)
        for seq, (kind, payload, end) in enumerate(batch.records, batch.first)
    ]
    known = [one for one in session.log if one.seq >= batch.first]
    if known != records[: len(known)]:  # sent again it is the same, under the same epoch
        message = f"the log of {batch.key} holds other records: read its head, append behind it"
        raise errors.NotStorableError(message, key=str(batch.key), first=batch.first)
    return records[session.head + 1 - batch.first :]


def is_there(session: Session) -> bool:
    return session.epoch > 0 and not session.deleted


def info_of(session: Session) -> store.SessionInfo:
    manifest = session.manifest
    about = manifest.about if manifest is not None else About()
    return store.SessionInfo(
        key=session.key,
        epoch=session.epoch,
        head=session.head,
        owner=about.owner,
        title=about.title,
        tags=about.tags,
        turns=manifest.counters.get("turns", 0) if manifest is not None else 0,
    )
