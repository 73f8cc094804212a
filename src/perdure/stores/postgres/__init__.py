"""PostgreSQL store: many servers, one database; see `perdure.stores.postgres.store`."""

from perdure.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
