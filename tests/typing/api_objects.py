"""The object store's public types, as a type checker sees them."""

from collections.abc import Collection, Iterator
from typing import assert_type

from perdure.store import Capabilities
from perdure.stores import Bucket, ListedObject, ObjectStore, StoredObject


class Shelf(Bucket):
    def get(self, name: str) -> StoredObject | None:
        return StoredObject(b"data", "tag")

    def stat(self, name: str) -> ListedObject | None:
        return ListedObject(name, size=4, modified=0.0)

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[ListedObject]]:
        yield []

    def create(self, name: str, data: bytes) -> str | None:
        return "tag"

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        return None

    def put(self, name: str, data: bytes) -> None: ...

    def remove(self, names: Collection[str]) -> None: ...


shelf = Shelf()
store = ObjectStore(
    Shelf, location="a shelf", owner="me", capabilities=Capabilities(durability="object")
)
assert_type(store.location, str)
assert_type(shelf.part("name", 0, 4), bytes | None)
assert_type(shelf.copy("name", "other"), bool)
assert_type(shelf.folders("s/"), list[str])
assert_type(shelf.listed("s/"), list[ListedObject])
assert_type(shelf.many(len, ["name"]), list[int])
shelf.close()
