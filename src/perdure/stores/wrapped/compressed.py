"""Zstandard compression of a store's content, with a limit on the decompressed size.

Compressed bytes begin with a mark: stored plain, or zstandard. Data whose header states more than
the limit, or nothing, is refused; all other data is decompressed to exactly the size that its
header states. Records have their own limit, the largest record that a store accepts, so a few bytes
that were put into a log cannot fill the reader's memory. One release of zstandard compresses equal
bytes to equal bytes, so a batch that is sent again stays the same.
"""

from __future__ import annotations

from typing import final

from perdure.errors import ConfigError, CorruptRecordError, MissingExtraError
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.store import Store
from perdure.stores.wrapped.coded import CodedStore, max_restored_bytes, require_store
from perdure.stores.wrapped.transform import (
    Place,
    Transform,
    describe_place,
    from_text,
    to_text,
)

_PLAIN = b"\x00"
_ZSTD = b"\x01"
_LEVEL = 3
_MIN_SIZE = 200
"""Bytes from which on compression is tried."""
_WINDOW = 8 * 1024 * 1024
_LINK = 1024
"""Bytes that a link of the hash chain may add to a payload."""
_PAYLOADS = frozenset({"record", "linked", "inbox"})
"""Kinds of places whose data is, or will be, appended to a log."""
LIMIT = 256 * 1024 * 1024
"""Largest size that is compressed, and that decompression may return, in bytes."""


@final
class Compression:
    """Compress bytes with zstandard.

    Args:
        limit: Largest decompressed document, blob or dead letter, in bytes.
        record_limit: Largest decompressed record or inbox item, in bytes.

    Raises:
        MissingExtraError: zstandard is not installed.

    """

    def __init__(self, limit: int = LIMIT, *, record_limit: int = MAX_RECORD_BYTES) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtraError(
                "compression needs zstandard: pip install 'perdure[compression]'",
                extra="compression",
            ) from error
        self._module = zstandard
        self._limit = limit
        self._record_limit = record_limit + _LINK

    def compress(self, data: bytes) -> bytes:
        """Return the bytes compressed, or plain if that is not longer, after a mark."""
        if _MIN_SIZE <= len(data) <= self._limit:
            # A compressor is not safe to share between threads: one for each call.
            compressed = self._module.ZstdCompressor(level=_LEVEL).compress(data)
            if len(compressed) < len(data):
                return _ZSTD + compressed
        return _PLAIN + data

    def decompress(self, data: bytes, what: str, kind: object = None) -> bytes:
        """Return the original bytes.

        Args:
            data: The result of `compress`.
            what: A description of the data, for errors.
            kind: The first part of their place.

        Raises:
            CorruptRecordError: They are damaged, or decompress to more than the limit.

        """
        limit = self._record_limit if kind in _PAYLOADS else self._limit
        mark, body = data[:1], data[1:]
        if mark == _PLAIN:
            return body
        if mark != _ZSTD:
            raise CorruptRecordError(
                f"{what} is damaged: it is not compressed: restore it from a copy"
            )
        try:
            stated = self._module.frame_content_size(body)
            if not 0 <= stated <= limit:  # it has always been stated
                raise _too_large(what, len(data), limit)
            # It never gives more than was stated: any data after that is an error.
            decompressor = self._module.ZstdDecompressor(max_window_size=_WINDOW)
            original: bytes = decompressor.decompress(body)
        except self._module.ZstdError as error:
            raise CorruptRecordError(
                f"{what} of {len(data)} bytes is damaged: it cannot be decompressed to the size in "
                "its header; restore it from a copy",
                size=len(data),
            ) from error
        return original


def _too_large(what: str, size: int, limit: int) -> CorruptRecordError:
    return CorruptRecordError(
        f"{what} of {size} bytes decompresses to more than the limit of {limit} bytes: perdure did "
        "not write it; restore the session from a copy, or export its other records with "
        "`perdure export ID --salvage`",
        size=size,
        limit=limit,
    )


def compression_for(
    name: str | None, *, record_limit: int = MAX_RECORD_BYTES
) -> Compression | None:
    """Return the compression that an option ``compression`` names.

    Raises:
        ConfigError: The name is not known.
        MissingExtraError: zstandard is not installed.

    """
    if name is None:
        return None
    if name != "zstd":
        raise ConfigError(
            f"compression={name!r} is not known: use zstd, or leave it out",
            option="compression",
            value=name,
        )
    return Compression(record_limit=record_limit)


# The wrapper store
#
# A compressed payload is a JSON string that begins with a mark. A plain payload that begins with
# the mark is always compressed too, so that it is never mistaken for a compressed one. A store that
# was used without compression may be used with it at any time.


_MARK = b'"~zstd~'


@final
class CompressedStore(CodedStore):
    """Store that compresses all content with zstandard.

    Args:
        store: The inner store.

    Raises:
        MissingExtraError: zstandard is not installed.

    Example:
        >>> from perdure.stores.memory import MemoryStore
        >>> store = CompressedStore(MemoryStore())
    """

    _kind = "compressed"
    _accepts_plain = True

    def __init__(self, store: Store) -> None:
        require_store(store, "CompressedStore")
        self._compression = Compression(record_limit=max_restored_bytes(store))
        super().__init__(store, store.capabilities.max_record_bytes)

    def _cached_transform(self, key: SessionKey) -> Transform:
        return _CompressionTransform(self._compression, ("session", str(key)))

    async def _transform(self, key: SessionKey, data: bytes = b"") -> Transform:
        return self._cached_transform(key)

    async def _shared_transform(self, tenant: str, *, create: bool) -> Transform:
        return _CompressionTransform(self._compression, ("tenant", tenant))


class _CompressionTransform(Transform):
    """Compresses; names stay as they are.

    Args:
        compression: The compressor.
        owner: The session or tenant that errors name.

    """

    def __init__(self, compression: Compression, owner: Place) -> None:
        self._compression = compression
        self._owner = owner

    def transform(self, place: Place, data: bytes) -> bytes:
        return self._compression.compress(data)

    def restore(self, place: Place, data: bytes) -> bytes:
        return self._compression.decompress(data, self._describe(place), place[0])

    def transform_payload(self, place: Place, payload: bytes) -> bytes:
        # Payloads as short as this gain next to nothing.
        if len(payload) < 256 and not payload.startswith(_MARK):
            return payload
        text = to_text(self._compression.compress(payload))
        if len(text) + len(_MARK) > len(payload) and not payload.startswith(_MARK):
            return payload
        # The mark has the opening quote already.
        return _MARK + text[1:]

    def restore_payload(self, place: Place, payload: bytes) -> bytes:
        if not payload.startswith(_MARK):
            return payload
        what = self._describe(place)
        data = from_text(payload, what, len(_MARK))
        return self._compression.decompress(data, what, place[0])

    def _describe(self, place: Place) -> str:
        return describe_place((*self._owner, *place))

    def inner_name(self, name: str) -> str:
        return "x" + name

    def outer_name(self, inner: str) -> str | None:
        return inner[1:]
