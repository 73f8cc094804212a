"""SQLite store: one database file, with a row for each session and for each commit."""

from perdure.stores.sqlite.store import SqliteStore as SqliteStore

__all__ = ["SqliteStore"]
