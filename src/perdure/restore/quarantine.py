"""Evidence: what lay in a damaged document's place, kept before it is made anew.

The file store copies what does not match its manifest into the session's ``quarantine/`` by
itself. What only a closer look has found is kept as a blob under the hash of its bytes;
nothing refers to it, so `perdure check --gc` lets go of it in the end.
"""

from __future__ import annotations

import hashlib
import logging

from perdure.model.keys import SessionKey
from perdure.store import Documents, Store

__all__ = ["keep_evidence"]

log: logging.Logger = logging.getLogger("perdure")


async def keep_evidence(store: Store, key: SessionKey, have: Documents) -> dict[str, str]:
    """Make durable what is about to be overwritten; return the blobs by document.

    Raises:
        StoreUnavailableError: It could not be kept, so nothing may be overwritten.

    """
    if not have.remains or not store.capabilities.blobs:
        return {}
    kept = {name: hashlib.sha256(data).hexdigest() for name, data in have.remains.items()}
    await store.put_blobs(key.tenant, {kept[name]: data for name, data in have.remains.items()})
    for name, blob in kept.items():
        extra = {"session": str(key), "document": name, "why": have.why.get(name), "blob": blob}
        message = "%s of session %s cannot be used, its bytes are kept as the blob %s"
        log.warning(message, name, key, blob, extra=extra)
    return kept
