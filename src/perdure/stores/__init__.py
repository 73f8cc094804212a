"""Store backends: implementations of the port in `perdure.store`.

`StateStore` adapts your own storage of whole states, `ObjectStore` your own bucket with conditional
writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.formats.state import StateStorage as StateStorage
    from perdure.stores.objects import (
        Bucket as Bucket,
        ListedObject as ListedObject,
        ObjectStore as ObjectStore,
        StoredObject as StoredObject,
    )
    from perdure.stores.postgres import PostgresStore as PostgresStore
    from perdure.stores.redis import RedisStore as RedisStore
    from perdure.stores.s3 import S3Store as S3Store
    from perdure.stores.sqlite import SqliteStore as SqliteStore
    from perdure.stores.state import StateStore as StateStore
    from perdure.stores.wrapped import (
        CompressedStore as CompressedStore,
        EncryptedStore as EncryptedStore,
        MasterKeys as MasterKeys,
    )
    from perdure.stores.wrapped.encrypted import RewrapResult as RewrapResult
    from perdure.stores.wrapped.keys import UnwrappedKey as UnwrappedKey

_HOME_OF = {
    "Bucket": "perdure.stores.objects",
    "CompressedStore": "perdure.stores.wrapped",
    "EncryptedStore": "perdure.stores.wrapped",
    "StoredObject": "perdure.stores.objects",
    "ListedObject": "perdure.stores.objects",
    "MasterKeys": "perdure.stores.wrapped",
    "ObjectStore": "perdure.stores.objects",
    "PostgresStore": "perdure.stores.postgres",
    "RedisStore": "perdure.stores.redis",
    "RewrapResult": "perdure.stores.wrapped.encrypted",
    "S3Store": "perdure.stores.s3",
    "SqliteStore": "perdure.stores.sqlite",
    "StateStorage": "perdure.formats.state",
    "StateStore": "perdure.stores.state",
    "UnwrappedKey": "perdure.stores.wrapped.keys",
}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
