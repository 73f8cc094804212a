"""A bucket as this store uses it: whole objects, created once or replaced by compare-and-swap.

Whoever has a place with conditional writes of its own (another cloud's objects, a table, a
key-value server) makes a subclass, and `perdure.stores.ObjectStore` a store of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

import msgspec

from perdure._lib.ids import random_id
from perdure.errors import ConfigError

# A bucket as this store uses it: whole objects, created once or replaced by compare-and-swap


A = TypeVar("A")
B = TypeVar("B")


class StoredObject(msgspec.Struct, frozen=True):
    """An object that was read, and what to compare when it is replaced."""

    data: bytes
    tag: str
    """Another one after each write of the object; never empty."""


class ListedObject(msgspec.Struct, frozen=True):
    """An object in a listing."""

    name: str
    size: int
    modified: float
    """Seconds since 1970, by the server's clock."""
    tag: str = ""
    """As `StoredObject.tag`, where a listing tells it: then heartbeats are watched by listings."""


class Bucket(ABC):
    """Objects by name: text of ``a-z A-Z 0-9 . _ = - /``, up to 600 characters.

    Methods block, and are called from several threads at a time. What one call has written, the
    next one reads and lists, whoever makes it: no answer may be stale. What was written is durable
    when the call returns. Writes are never sent a second time by a bucket: whether the first one
    arrived, only the caller can find out. Reads may be.

    Names differ by case, and are in the order of their characters' codes, as bytes are.

    Any method may raise `StoreUnavailableError`, and nothing else that is foreseen. Its fact
    ``unwritten=True`` says that nothing was written; without it, a write is taken as in doubt.
    """

    @abstractmethod
    def get(self, name: str) -> StoredObject | None:
        """Return an object, None if there is none."""

    @abstractmethod
    def stat(self, name: str) -> ListedObject | None:
        """Return an object's size and age, None if there is none."""

    @abstractmethod
    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        """Give the objects under *prefix* whose names are above *after*, by name, in pages."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> str | None:
        """Make an object; return its tag, None where one of that name is there."""

    @abstractmethod
    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        """Replace an object; return the new tag, None where *tag* is no longer its own."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Make or replace an object, whatever is there."""

    @abstractmethod
    def remove(self, names: Collection[str]) -> None:
        """Remove objects; those that are not there have no effect."""

    # what a subclass may do better

    def part(self, name: str, start: int, end: int) -> bytes | None:
        """Return bytes of an object, None if there is none or it is shorter."""
        found = self.get(name)
        data = b"" if found is None else found.data[start:end]
        return data if len(data) == end - start else None

    def copy(self, name: str, to: str) -> bool:
        """Copy an object; False if there is none."""
        found = self.get(name)
        if found is not None:
            self.put(to, found.data)
        return found is not None

    def folders(self, prefix: str) -> list[str]:
        """Return what stands between *prefix* and the next slash, each once."""
        names = (one.name.removeprefix(prefix) for page in self.pages(prefix) for one in page)
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def listed(self, prefix: str, after: str | None = None) -> list[ListedObject]:
        """Return the objects under *prefix* (which ends in a slash), by name."""
        return [one for page in self.pages(prefix, after) for one in page]

    def many(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Call a function on items, perhaps several at a time; return the results in order.

        The function must not call this: threads that wait for one another would never end.
        """
        return [function(item) for item in items]

    def close(self) -> None:
        """Let go of connections and threads.

        Calls that were abandoned may still be running: they may fail, and must not crash.
        """
        return


# What a service must be able to do, tried out: conditional writes
#
# Some services take If-None-Match or If-Match and do nothing with them. On these, two holders
# could write at one place and both be told that it was done; so the store refuses to open.


def require_conditions(bucket: Bucket, where: str) -> None:
    """Try conditional writes on an object of its own.

    Raises:
        ConfigError: The service ignores a condition.
        StoreUnavailableError: It cannot be reached or written.

    """
    name = f"probe/{random_id()}"
    tag = bucket.create(name, b"1")
    try:
        ignored = None
        if tag is None or bucket.create(name, b"2") is not None:
            ignored = "If-None-Match"
        elif not tag or bucket.replace(name, b"3", tag) is None:
            ignored = "If-Match (it refuses the object's own ETag)"
        elif bucket.replace(name, b"4", tag) is not None:
            ignored = "If-Match"
    finally:
        bucket.remove([name])
    if ignored is not None:
        message = (
            f"{where} does not keep to conditional writes ({ignored}), so it cannot keep two "
            "writers apart: use a service, or a newer release of it, that does"
        )
        raise ConfigError(message, condition=ignored, path=where)
