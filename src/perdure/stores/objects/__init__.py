"""Object store: sessions as objects in a bucket; see `perdure.stores.objects.store`."""

from __future__ import annotations

from perdure.stores.objects.bucket import Bucket, ListedObject, StoredObject
from perdure.stores.objects.store import ObjectStore

__all__ = ["Bucket", "ListedObject", "ObjectStore", "StoredObject"]
