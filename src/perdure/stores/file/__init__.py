"""File store, the embedded default: a folder of readable files, one writer for each session.

`FileStore` is the public class. `layout` names the files, `segments` reads the chain of log
files, `log` appends to it, `reader` plans and streams reads; leases, documents, blobs, inbox,
owners and directory have a module each. Blocking work runs in threads, one thread call for
each method of the store.
"""

from perdure.stores.file.store import FileStore

__all__ = ["FileStore"]
