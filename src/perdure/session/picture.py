"""What a session was, as plain JSON: for people, for comparisons, for exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perdure.codec.json import decode
from perdure.memory.context import SNAPSHOT, Snapshot
from perdure.memory.documents import EPISODIC, SEMANTIC, StateSet
from perdure.memory.index import MEMORY, Index
from perdure.memory.values import Values

__all__ = ["picture"]

_FOLDERS = {"state": "state/", "plugins": "plugins/"}


async def picture(documents: Mapping[str, bytes], values: Values) -> dict[str, Any]:
    """Return a session's documents as one JSON value.

    ``context`` has its messages, each under the record that brought it; ``memory``, ``state`` and
    ``plugins`` have values by their keys; ``episodic`` and ``semantic`` are lists.
    """
    entries = Index.of_document(documents.get(MEMORY)).entries.values()
    return {
        "context": dict(_messages(documents)),
        "memory": {entry.key: decode(await values.read(entry)) for entry in entries},
        **{name: dict(_states(documents, folder)) for name, folder in _FOLDERS.items()},
        "episodic": [decode(line) for line in documents.get(EPISODIC, b"").splitlines()],
        "semantic": [decode(line) for line in documents.get(SEMANTIC, b"").splitlines()],
    }


def _messages(documents: Mapping[str, bytes]) -> Iterator[tuple[str, Any]]:
    if SNAPSHOT not in documents:
        return
    snapshot = decode(documents[SNAPSHOT], Snapshot)
    seqs = snapshot.message_seqs or [snapshot.seq] * len(snapshot.messages)
    before, again = 0, 0
    for seq, message in zip(seqs, snapshot.messages, strict=True):
        again = again + 1 if seq == before else 0  # one record may bring several
        before = seq
        yield f"{seq}.{again}" if again else str(seq), decode(bytes(message))


def _states(documents: Mapping[str, bytes], folder: str) -> Iterator[tuple[str, Any]]:
    for name in sorted({name.removeprefix("typed/") for name in documents}):
        if not name.startswith(folder):
            continue
        data = documents.get(name)
        if data is None:  # a value with types lies beside, in its record's form
            data = bytes(decode(documents[f"typed/{name}"], StateSet).value)
        yield name[len(folder) : -len(".json")], decode(data)
