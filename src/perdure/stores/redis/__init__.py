"""Redis store: sessions on a Redis or Valkey server that several hosts share."""

from __future__ import annotations

from perdure.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
