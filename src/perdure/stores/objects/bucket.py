"""Abstract bucket: objects that are created once or replaced by compare-and-swap.

To use another service with conditional writes (another cloud's object storage, a table, a
key-value server), subclass `Bucket` and pass it to `perdure.stores.ObjectStore`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

import msgspec

from perdure._lib.ids import random_id
from perdure.errors import ConfigError

A = TypeVar("A")
B = TypeVar("B")


class StoredObject(msgspec.Struct, frozen=True):
    """An object that was read, and the tag to compare when it is replaced."""

    data: bytes
    tag: str
    """Changes with each write of the object; never empty."""


class ListedObject(msgspec.Struct, frozen=True):
    """An object in a listing."""

    name: str
    size: int
    modified: float
    """Seconds since 1970, by the server's clock."""
    tag: str = ""
    """As `StoredObject.tag`, if listings have it: then heartbeats are read from one listing."""


class Bucket(ABC):
    """Objects by name: text of ``a-z A-Z 0-9 . _ = - /``, up to 600 characters.

    Methods block, and are called from several threads at a time. After a call has written, the next
    read or listing of any process returns it: no stale results. A write is durable when the call
    returns. A bucket never retries a write, since only the caller can find out whether the first
    attempt arrived. It may retry reads.

    Names are case-sensitive, and ordered by their characters' codes, like bytes.

    Any method may raise `StoreUnavailableError`, and no other expected error. Its fact
    ``unwritten=True`` states that nothing was written; without it, a write is in doubt.
    """

    @abstractmethod
    def get(self, name: str) -> StoredObject | None:
        """Return an object, None if there is none."""

    @abstractmethod
    def stat(self, name: str) -> ListedObject | None:
        """Return an object's size and age, None if there is none."""

    @abstractmethod
    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        """Yield the objects under *prefix* whose names are after *after*, by name, in pages."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> str | None:
        """Create an object; return its tag, None if the name exists."""

    @abstractmethod
    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        """Replace an object; return the new tag, None if *tag* is not its current one."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object unconditionally."""

    @abstractmethod
    def remove(self, names: Collection[str]) -> None:
        """Remove objects; names that do not exist are ignored."""

    # Defaults that a subclass may improve.

    def part(self, name: str, start: int, end: int) -> bytes | None:
        """Return bytes of an object, None if there is none or it is shorter."""
        stored = self.get(name)
        data = b"" if stored is None else stored.data[start:end]
        return data if len(data) == end - start else None

    def copy(self, name: str, to: str) -> bool:
        """Copy an object; False if there is none."""
        stored = self.get(name)
        if stored is not None:
            self.put(to, stored.data)
        return stored is not None

    def folders(self, prefix: str) -> list[str]:
        """Return the distinct parts of names between *prefix* and the next slash."""
        names = (entry.name.removeprefix(prefix) for page in self.pages(prefix) for entry in page)
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def listed(self, prefix: str, after: str | None = None) -> list[ListedObject]:
        """Return the objects under *prefix* (which ends in a slash), by name."""
        entries = [entry for page in self.pages(prefix, after) for entry in page]
        return sorted(entries, key=lambda entry: entry.name)

    def many(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Call a function on items, possibly concurrently; return the results in order.

        The function must not call this method: nested calls could wait for each other forever.
        """
        return [function(item) for item in items]

    def close(self) -> None:
        """Close connections and threads.

        Abandoned calls may still be running: they may fail, but must not crash.
        """
        return


# Probe of conditional writes
#
# Some services accept If-None-Match or If-Match and ignore them. On these, two holders could write
# to the same name and both succeed; so the store refuses to open.


def require_conditions(bucket: Bucket, location: str) -> None:
    """Check that a bucket honors conditional writes, with an object of its own.

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
        raise ConfigError(
            f"{location} ignores conditions of writes ({ignored}), so it cannot keep two "
            "writers apart: use a service, or a newer release of it, that does",
            condition=ignored,
            path=location,
        )
