"""The SQLite store: one database file, one row for each session and commit."""

from perdure.stores.sqlite.store import SqliteStore as SqliteStore

__all__ = ["SqliteStore"]
