"""Decoders that are ready: a type is learned by one thread at a time.

msgspec learns a struct's fields when the struct is decoded first, calls Python code
meanwhile, and shows what it has half to every other thread, which then dies of a segmentation fault
and takes the process along. So whatever may be decoded in threads gets its decoder here.

Pure.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

__all__ = ["decoder_of"]

T = TypeVar("T")

_MOST = 4096
_ready: dict[Any, msgspec.json.Decoder[Any]] = {}
_learning = threading.RLock()


@overload
def decoder_of(type: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def decoder_of(type: Any) -> msgspec.json.Decoder[Any]: ...
def decoder_of(type: Any) -> msgspec.json.Decoder[Any]:  # msgspec's word
    """Return the decoder of a type, which any thread may use.

    >>> decoder_of(list[int]).decode(b"[1,2]")
    [1, 2]
    """
    found = _ready.get(type)
    if found is None:
        with _learning:
            found = _ready.get(type) or msgspec.json.Decoder(type)
            if len(_ready) < _MOST:
                _ready[type] = found
    return found
