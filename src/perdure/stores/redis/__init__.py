"""The Redis store: sessions on a Redis or Valkey server, for many servers at once."""

from __future__ import annotations

from perdure.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
