"""Whether stored documents are what the log amounts to: each compared with a fresh fold of it.

A document whose checksum is right may still be wrong, if somebody wrote it who had no
business to; only the log can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from perdure.codec.json import decode, encode
from perdure.errors import FormatError
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import SESSION, SessionDocument, WholeSessionDocument
from perdure.model.keys import SessionKey
from perdure.model.records import Record
from perdure.session.options import Limits
from perdure.session.rebuilding import context_bytes_of, fold_afresh
from perdure.store import Document, Documents

__all__ = ["Difference", "WholeLog", "differences"]


class Difference(NamedTuple):
    """A document that is not what it should be."""

    name: str
    detail: str
    """What is wrong, in words."""


class WholeLog(msgspec.Struct):
    """A session's whole log, and the documents that it goes on from."""

    key: SessionKey
    records: list[Record]
    began: Mapping[str, Document]

    @property
    def head(self) -> int:
        """The last record."""
        return self.records[-1].seq if self.records else 0

    def fold(self, upto: int, limits: Limits) -> dict[str, bytes]:
        """Return the documents as of a record."""
        records = self.records[: upto - self.records[0].seq + 1]
        return fold_afresh(self.key, records, limits=limits, began=self.began)


def differences(log: WholeLog, documents: Documents) -> Iterator[Difference]:
    """Give what is wrong with the documents."""
    for name in documents.damaged:
        why = documents.why.get(name)
        lost = f"{name} is lost, or not what its manifest says"
        yield Difference(name, f"{name}: {why}" if why else lost)
    manifest = documents.manifest
    if manifest is None:
        return
    folds: dict[int, dict[str, bytes]] = {}
    for name, document in sorted(documents.found.items()):
        upto = document.as_of_seq
        if upto not in folds:
            folds[upto] = log.fold(upto, Limits())
        if name in documents.damaged or _is_same(name, folds[upto].get(name), document.data):
            continue
        if name in {SNAPSHOT, SESSION} and _is_cut_elsewhere(log, name, documents):
            continue
        yield Difference(name, f"{name} differs from a fresh fold of the log up to record {upto}")
    upto = manifest.as_of_seq
    fresh = folds.get(upto) or log.fold(upto, Limits())
    for name in sorted(fresh.keys() - documents.found.keys() - set(documents.damaged)):
        yield Difference(name, f"{name} is missing from the manifest")


def _is_cut_elsewhere(log: WholeLog, name: str, documents: Documents) -> bool:
    """Whether a document is sound, and was only made under another limit than the default."""
    snapshot, document = documents.found.get(SNAPSHOT), documents.found[name]
    if snapshot is None:
        return False
    limits = Limits(context_bytes=max(context_bytes_of(snapshot.data), 1))
    fresh = log.fold(document.as_of_seq, limits)
    return _is_same(name, fresh[name], document.data)


def _is_same(name: str, fresh: bytes | None, stored: bytes) -> bool:
    """Whether a document is what a fresh fold of the log gives.

    One of an older release may lack fields that are written now.
    """
    if fresh is None or fresh == stored:
        return fresh == stored
    try:
        if name == SNAPSHOT:
            return encode(decode(fresh, Snapshot)) == encode(decode(stored, Snapshot))
        if name == SESSION and not decode(stored, WholeSessionDocument).tells_of_agent:
            return decode(fresh, SessionDocument) == decode(stored, SessionDocument)
    except FormatError:
        return False
    return False
