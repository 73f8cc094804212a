"""Whether a stored document may be used: pure, and never raising.

Its bytes are those that its manifest names, so nothing was lost on the way. What is asked here
is whether they mean something to this release, and to this session: a newer release may
have written them, or somebody may have put another session's document here. Whatever may not
be used is made anew from the log.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from perdure.errors import FormatError
from perdure.memory.context import SCHEMA_VERSION, SNAPSHOT, Snapshot
from perdure.memory.documents import EPISODIC, SEMANTIC, SESSION, SessionDocument
from perdure.memory.index import MEMORY
from perdure.records.json import decode
from perdure.records.keys import SessionKey
from perdure.store import Documents

VERSION = 1
"""Of session.json and memory.json, as this release writes them."""


class _Versioned(msgspec.Struct):
    version: int = VERSION


class _Schema(msgspec.Struct):
    schema_version: int


def judged(
    have: Documents, key: SessionKey, *, known: Mapping[str, str | None] | None = None
) -> Documents:
    """Return the documents with those that may not be used among the damaged.

    Args:
        have: What was read.
        key: Whose they are.
        known: What was found out about some of them: why they may not be used, or None.

    """
    problems: dict[str, str] = {}
    for name, document in have.found.items():
        if known is not None and name in known:
            problem = known[name]
        else:
            problem = problem_of(name, document.data, key, document.as_of_seq)
        if problem is not None and name not in have.damaged:
            problems[name] = problem
    if not problems:
        return have
    return msgspec.structs.replace(
        have,
        found={name: document for name, document in have.found.items() if name not in problems},
        damaged=(*have.damaged, *problems),
        why={**have.why, **problems},
        remains={**have.remains, **{name: have.found[name].data for name in problems}},
    )


def problem_of(name: str, data: bytes, key: SessionKey, as_of_seq: int) -> str | None:
    """Return why a document of this name may not be used, None if it may.

    >>> problem_of("memory.json", b'{"version": 9}', SessionKey("ada"), 4)
    'its version is 9, this release reads 1'
    """
    try:
        if name == SNAPSHOT:
            snapshot = snapshot_of(data, key, as_of_seq)
            return snapshot if isinstance(snapshot, str) else None
        if name == SESSION:
            return _session_problem(decode(data, SessionDocument), key)
        if name == MEMORY:
            return _version_problem(decode(data, _Versioned).version)
        if name in {EPISODIC, SEMANTIC}:
            for line in data.splitlines():
                decode(line, dict[str, msgspec.Raw])
        elif name.endswith(".json"):
            decode(data, msgspec.Raw)
    except FormatError as error:
        return f"it is not well-formed ({error})"
    return None


def _session_problem(document: SessionDocument, key: SessionKey) -> str | None:
    if (document.agent_id, document.session_id) != (key.agent, key.session):
        return f"it belongs to {document.agent_id}/{document.session_id}"
    return _version_problem(document.version)


def _version_problem(version: int) -> str | None:
    return None if version == VERSION else f"its version is {version}, this release reads {VERSION}"


def snapshot_of(data: bytes, key: SessionKey, as_of_seq: int) -> Snapshot | str:
    """Return the snapshot, or why it cannot be used.

    Valid means: well-formed, of this schema version, of this very session, and as of the record
    that the manifest says. Everything else is rebuilt from the log.
    """
    try:
        snapshot = decode(data, Snapshot)
    except FormatError as error:
        return _schema_problem(data) or f"it is not well-formed ({error})"
    if snapshot.schema_version != SCHEMA_VERSION:
        return _other_schema(snapshot.schema_version)
    if (snapshot.agent_id, snapshot.session_id) != (key.agent, key.session):
        return f"it belongs to {snapshot.agent_id}/{snapshot.session_id}"
    if snapshot.seq != as_of_seq:
        return f"it is as of record {snapshot.seq}, the manifest says {as_of_seq}"
    return _shape_problem(snapshot) or snapshot


def _schema_problem(data: bytes) -> str | None:
    """Return what is wrong with the version of a snapshot that cannot be read otherwise."""
    try:
        version = decode(data, _Schema).schema_version
    except FormatError:
        return None
    return None if version == SCHEMA_VERSION else _other_schema(version)


def _other_schema(version: int) -> str:
    return f"its schema version is {version}, not {SCHEMA_VERSION}"


def _shape_problem(snapshot: Snapshot) -> str | None:
    behind = len(snapshot.messages) - snapshot.pinned
    if behind < 0 or len(snapshot.message_seqs) != len(snapshot.messages):
        return "its messages and their seqs differ in number"
    if sum(snapshot.atoms) != behind or any(length < 1 for length in snapshot.atoms):
        return "its atoms do not add up to its messages"
    return None
