"""The embedded default: a folder of readable files, one process at a time for each session.

Layout, chain, leases, writing, reading and documents are a module each; `FileStore` is
what others use. Everything that blocks runs in threads, one hop a call.
"""

from perdure.stores.file.store import FileStore

__all__ = ["FileStore"]
