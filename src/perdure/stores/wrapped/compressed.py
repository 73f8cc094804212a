"""Compression as a wrapper: what is large is kept packed, by zstandard.

A payload stays JSON: a packed one is a string that begins with a mark, and a plain one that
begins so is packed as well, so that nobody's data can be taken for packed. A store that was
used without compression may be used with it from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from perdure.model.keys import SessionKey
from perdure.model.manifest import Manifest
from perdure.model.records import Record
from perdure.store import Batch, Documents, Grant, Store
from perdure.stores.wrapped.batches import sealed_batch
from perdure.stores.wrapped.chain import Link
from perdure.stores.wrapped.following import Asked, Following
from perdure.stores.wrapped.layer import Layer, largest_record
from perdure.stores.wrapped.manifests import Hidden, Proof
from perdure.stores.wrapped.packing import Packing
from perdure.stores.wrapped.sealing import Place, Seal, from_text, said, to_text

__all__ = ["CompressedStore"]

_MARK = b'"~zstd~'


@final
class CompressedStore(Layer):
    """Keep everything in a store, packed by zstandard.

    Args:
        store: The store that keeps it.

    Raises:
        MissingExtraError: zstandard is not installed.

    Example:
        >>> from perdure.stores.memory import MemoryStore
        >>> store = CompressedStore(MemoryStore())
    """

    def __init__(self, store: Store) -> None:
        packing = Packing(record_limit=largest_record(store))
        super().__init__(store, _Packed(packing))


class _Packed:
    """Both ports: nothing has to be fetched, and all sessions are packed alike.

    Args:
        packing: What packs.
        whose: What is packed, so that errors name it.

    """

    kind = "compressed"
    hidden: str | None = None
    takes_plain = True

    def __init__(self, packing: Packing, whose: Place = ()) -> None:
        self._packing = packing
        self._whose = whose

    def seal(self, place: Place, data: bytes) -> bytes:
        return self._packing.pack(data)

    def open(self, place: Place, data: bytes) -> bytes:
        return self._packing.unpack(data, self._said(place), place[0])

    def seal_payload(self, place: Place, payload: bytes) -> bytes:
        if len(payload) < 256 and not payload.startswith(_MARK):
            return payload
        packed = to_text(self._packing.pack(payload))
        if len(packed) + len(_MARK) > len(payload) and not payload.startswith(_MARK):
            return payload
        return _MARK + packed[1:]

    def open_payload(self, place: Place, payload: bytes) -> bytes:
        if not payload.startswith(_MARK):
            return payload
        what = self._said(place)
        return self._packing.unpack(from_text(payload, what, len(_MARK)), what, place[0])

    def _said(self, place: Place) -> str:
        return said((*self._whose, *place))

    def token(self, text: str) -> str:
        return text

    def name(self, blob: str) -> str:
        return "x" + blob

    def named(self, inner: str) -> str | None:
        return inner[1:]

    def fits(self, most: int) -> int:
        return most

    def overhead(self) -> int:
        return 1

    async def require_fit(self, store: Store) -> None:
        pass

    async def check(self, store: Store, key: SessionKey) -> None:
        pass

    async def begin(self, store: Store, grant: Grant) -> None:
        pass

    async def of_session(self, store: Store, key: SessionKey, data: bytes = b"") -> Seal | None:
        return self._of(key)

    async def of_tenant(self, store: Store, tenant: str, *, make: bool) -> Seal | None:
        return _Packed(self._packing, ("tenant", tenant))

    async def following(
        self, store: Store, key: SessionKey, asked: Asked, records: Sequence[Record]
    ) -> Following | None:
        return None

    def followed(self, key: SessionKey, link: Link | None) -> None:
        pass

    async def sealer(self, store: Store, batch: Batch) -> Callable[[Batch], Batch] | None:
        return partial(sealed_batch, self)

    async def proof(self, store: Store, manifest: Manifest) -> Proof | None:
        return None

    def folded(self, manifest: Manifest, proof: Proof) -> None:
        pass

    async def trimming(self, store: Store, key: SessionKey, epoch: int, below: int) -> None:
        pass

    async def unproven(self, store: Store, inner: Documents, key: SessionKey) -> str | None:
        return None

    def proven(self, manifest: Manifest, hidden: Hidden) -> None:
        pass

    def at_hand(self, key: SessionKey) -> Seal | None:
        return self._of(key)

    def _of(self, key: SessionKey) -> Seal:
        return _Packed(self._packing, ("session", str(key)))

    def is_own(self, name: str) -> bool:
        return False

    def own_anew(self, key: SessionKey, seal: Seal) -> dict[str, bytes]:
        return {}

    def forget(self, key: SessionKey) -> None:
        pass
