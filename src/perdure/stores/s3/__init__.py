"""The S3 store: sessions as objects in a bucket; see `perdure.stores.s3.store`."""

from __future__ import annotations

from perdure.stores.s3.store import S3Store

__all__ = ["S3Store"]
