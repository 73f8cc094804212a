"""Bytes made smaller where that pays, and back with a limit on how large they become.

Packed bytes begin with a mark: plain, or zstandard. What promises to be larger than anything
that perdure packs is not unpacked at all; the rest grows piece by piece and is given up at
the limit, whatever its header promises. A record has a limit of its own, the largest that a
store takes: few bytes that somebody put into a log cannot fill the memory of who reads it.
The same bytes are always packed the same, by one release of zstandard: sending a batch again
stays the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from perdure.errors import ConfigError, CorruptRecordError, MissingExtraError
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.manifest import Manifest
from perdure.records.records import Record
from perdure.store import Batch, Documents, HeldLease, Store
from perdure.stores.wrapped.batches import sealed_batch
from perdure.stores.wrapped.chain import ChainLink
from perdure.stores.wrapped.chain_reader import ChainReader, ReadRequest
from perdure.stores.wrapped.layer import TransformingStore, largest_record
from perdure.stores.wrapped.manifests import HiddenManifest, ManifestProof
from perdure.stores.wrapped.transform import Place, Transform, from_text, said, to_text

# Bytes made smaller where that pays, and back with a limit on how large they become


_PLAIN = b"\x00"
_ZSTD = b"\x01"
_LEVEL = 3
_WORTH = 200
"""Bytes from which on packing is tried."""
_PIECE = 64 * 1024
_WINDOW = 8 * 1024 * 1024
_LINK = 1024
"""Bytes that a link to the records before may add to a payload."""
_PAYLOADS = frozenset({"record", "linked", "inbox"})
"""Places of what is appended to a log, or will be."""
LIMIT = 256 * 1024 * 1024
"""The most bytes that are packed, and that come out again."""


@final
class Compression:
    """Pack bytes with zstandard.

    Args:
        limit: The most bytes that come out of a document, a blob or a dead letter.
        record_limit: The most that come out of a record or a post.

    Raises:
        MissingExtraError: zstandard is not installed.

    """

    def __init__(self, limit: int = LIMIT, *, record_limit: int = MAX_RECORD_BYTES) -> None:
        try:
            import zstandard
        except ImportError as error:
            message = "compression needs zstandard: pip install 'perdure[compression]'"
            raise MissingExtraError(message, extra="compression") from error
        self._module = zstandard
        self._limit = limit
        self._record_limit = record_limit + _LINK

    def pack(self, data: bytes) -> bytes:
        """Return the bytes packed, or plain where that is no shorter."""
        if _WORTH <= len(data) <= self._limit:
            # One for each call: a compressor is for one thread at a time.
            packed = self._module.ZstdCompressor(level=_LEVEL).compress(data)
            if len(packed) < len(data):
                return _ZSTD + packed
        return _PLAIN + data

    def unpack(self, data: bytes, what: str, kind: object = None) -> bytes:
        """Return the bytes again.

        Args:
            data: As they were packed.
            what: What they are, for people.
            kind: What the name of their place begins with.

        Raises:
            CorruptRecordError: They are damaged, or grow beyond the limit.

        """
        limit = self._record_limit if kind in _PAYLOADS else self._limit
        mark, body = data[:1], data[1:]
        if mark == _PLAIN:
            return body
        if mark != _ZSTD:
            raise CorruptRecordError(f"{what} is damaged: it is not packed: restore it from a copy")
        pieces: list[bytes] = []
        size = 0
        try:
            stated = self._module.frame_content_size(body)
            if stated > limit:
                raise _too_large(what, len(data), limit)
            decompressor = self._module.ZstdDecompressor(max_window_size=_WINDOW)
            with decompressor.stream_reader(body) as reader:
                while piece := reader.read(_PIECE):
                    size += len(piece)
                    if size > limit:
                        raise _too_large(what, len(data), limit)
                    pieces.append(piece)
            whole = b"".join(pieces)
        except self._module.ZstdError as error:
            message = f"{what} is damaged: it cannot be unpacked: restore it from a copy"
            raise CorruptRecordError(message, size=len(data)) from error
        if stated != len(whole):
            message = (
                f"{what} of {len(data)} bytes unpacks to {len(whole)} bytes, and not to what it "
                "says: perdure did not write it so; restore it from a copy"
            )
            raise CorruptRecordError(message, size=len(data))
        return whole


def _too_large(what: str, size: int, limit: int) -> CorruptRecordError:
    message = (
        f"{what} of {size} bytes unpacks to more than the limit of {limit} bytes: perdure did not "
        "write it so, and somebody else did; restore the session from a copy, or get at the rest "
        "with `perdure export ID --salvage`"
    )
    return CorruptRecordError(message, size=size, limit=limit)


def packing_of(name: str | None, *, record_limit: int = MAX_RECORD_BYTES) -> Compression | None:
    """Return what an option ``compression`` names.

    Raises:
        ConfigError: Nothing has this name.
        MissingExtraError: It is not installed.

    """
    if name is None:
        return None
    if name != "zstd":
        message = f"compression={name!r} is not known: use zstd, or leave it out"
        raise ConfigError(message, option="compression", value=name)
    return Compression(record_limit=record_limit)


# Compression as a wrapper: what is large is kept packed, by zstandard
#
# A payload stays JSON: a packed one is a string that begins with a mark, and a plain one that
# begins so is packed as well, so that nobody's data can be taken for packed. A store that was used
# without compression may be used with it from then on.


_MARK = b'"~zstd~'


@final
class CompressedStore(TransformingStore):
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
        packing = Compression(record_limit=largest_record(store))
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

    def __init__(self, packing: Compression, whose: Place = ()) -> None:
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

    async def begin(self, store: Store, grant: HeldLease) -> None:
        pass

    async def of_session(
        self, store: Store, key: SessionKey, data: bytes = b""
    ) -> Transform | None:
        return self._of(key)

    async def of_tenant(self, store: Store, tenant: str, *, make: bool) -> Transform | None:
        return _Packed(self._packing, ("tenant", tenant))

    async def following(
        self, store: Store, key: SessionKey, asked: ReadRequest, records: Sequence[Record]
    ) -> ChainReader | None:
        return None

    def followed(self, key: SessionKey, link: ChainLink | None) -> None:
        pass

    async def sealer(self, store: Store, batch: Batch) -> Callable[[Batch], Batch] | None:
        return partial(sealed_batch, self)

    async def proof(self, store: Store, manifest: Manifest) -> ManifestProof | None:
        return None

    def folded(self, manifest: Manifest, proof: ManifestProof) -> None:
        pass

    async def trimming(self, store: Store, key: SessionKey, epoch: int, below: int) -> None:
        pass

    async def unproven(self, store: Store, inner: Documents, key: SessionKey) -> str | None:
        return None

    def proven(self, manifest: Manifest, hidden: HiddenManifest) -> None:
        pass

    def at_hand(self, key: SessionKey) -> Transform | None:
        return self._of(key)

    def _of(self, key: SessionKey) -> Transform:
        return _Packed(self._packing, ("session", str(key)))

    def is_own(self, name: str) -> bool:
        return False

    def own_anew(self, key: SessionKey, seal: Transform) -> dict[str, bytes]:
        return {}

    def forget(self, key: SessionKey) -> None:
        pass
