"""Documents against the manifest that lists them: only bytes with the right hash count. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from perdure.model.manifest import Manifest
from perdure.model.stored import Document, Documents

__all__ = ["matched"]


def matched(
    manifest: Manifest, stored: Mapping[str, bytes], names: Collection[str] | None
) -> Documents:
    """Return the documents of these names (None: all) that a manifest lists.

    Where there is nothing, or something else, they are damaged.
    """
    found: dict[str, Document] = {}
    damaged: list[str] = []
    for name, folded in manifest.documents.items():
        if names is not None and name not in names:
            continue
        data = stored.get(name)
        if data is not None and hashlib.sha256(data).hexdigest() == folded.sha256:
            found[name] = Document(data, folded.as_of_seq)
        else:
            damaged.append(name)
    remains = {name: stored[name] for name in damaged if name in stored}
    return Documents(manifest, found, tuple(damaged), remains=remains)
