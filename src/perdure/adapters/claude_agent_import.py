"""Transcripts of the Claude Agent SDK's program, to be imported into `PerdureSessionStore`.

They are in ``projects`` below its configuration folder: ``PROJECT/SESSION.jsonl``, and below
``PROJECT/SESSION`` those of its subagents.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from anyio import to_thread

from perdure._lib.files import open_regular
from perdure.adapters.claude_agent import PerdureSessionStore
from perdure.adapters.imports import Moved, Source, not_equal
from perdure.errors import ConfigError, CorruptRecordError, StoreUnavailableError
from perdure.session.manager import SessionManager

BATCH: Final = 500
"""Entries that are appended at a time, at most,"""
BATCH_SIZE: Final = 4 * 1024 * 1024
"""and about so many characters of them."""
TRANSCRIPT: Final = ".jsonl"
METADATA: Final = ".meta.json"
"""What follows the name of a subagent's transcript in that of its description."""


class Transcript(NamedTuple):
    """A file, and the key that the SDK gives what is in it."""

    path: Path
    project_key: str
    session_id: str
    subpath: str | None = None

    @property
    def key(self) -> dict[str, str]:
        """The key of the SDK's stores."""
        key = {"project_key": self.project_key, "session_id": self.session_id}
        return key if self.subpath is None else {**key, "subpath": self.subpath}

    def __str__(self) -> str:
        return "/".join(self.key.values())


@asynccontextmanager
async def source_of(url: str) -> AsyncGenerator[ClaudeAgentSource, None]:
    """Open a folder of projects, to be read.

    Args:
        url: The folder: ``~/.claude/projects``, or the one of another ``CLAUDE_CONFIG_DIR``.

    Raises:
        StoreUnavailableError: It cannot be read.
        ConfigError: It is no folder, or has no transcripts.

    """
    try:
        found = await to_thread.run_sync(_transcripts, url)
    except OSError as error:
        message = f"{url} cannot be read: {error.strerror or error}"
        raise StoreUnavailableError(message, path=url) from error
    yield ClaudeAgentSource(found)


def _transcripts(url: str) -> list[Transcript]:
    """Return a folder's transcripts, each main one before those of its subagents.

    Raises:
        ConfigError: It is no folder, or has none.

    """
    folder = Path(url).expanduser()
    if not folder.is_dir():
        message = f"{folder} is no folder: give the SDK's folder of projects, ~/.claude/projects"
        raise ConfigError(message, option="URL")
    found = []
    for main in sorted(folder.glob(f"*/*{TRANSCRIPT}")):
        project, session = main.parent.name, main.stem
        found.append(Transcript(main, project, session))
        below = main.with_suffix("")
        for path in sorted(below.glob(f"*/**/*{TRANSCRIPT}")):
            subpath = path.relative_to(below).with_suffix("").as_posix()
            found.append(Transcript(path, project, session, subpath))
    if not found:
        message = f"{folder} has no PROJECT/SESSION{TRANSCRIPT}: is it the SDK's projects folder?"
        raise ConfigError(message, option="URL")
    return found


@final
class ClaudeAgentSource(Source):
    """The transcripts of a folder of projects."""

    def __init__(self, transcripts: Sequence[Transcript]) -> None:
        self.total: int = len(transcripts)
        self._transcripts = transcripts

    async def names(self) -> AsyncIterator[Transcript]:
        """Return the transcripts."""
        for transcript in self._transcripts:
            yield transcript

    async def move(self, name: Transcript, sessions: SessionManager, tenant: str) -> Moved:
        """Add the entries that the store lacks, and look for all of them.

        One is there if one with its uuid is, or without a uuid, as many that are equal to it: a
        mirror may have failed in the middle, and may go on.
        """
        entries = await to_thread.run_sync(_read, name.path)
        store = PerdureSessionStore(sessions, tenant=tenant)
        stored = await store.load(name.key)
        missing = _missing(entries, stored or ())
        for batch in _batches(missing):
            await store.append(name.key, batch)
        if missing and _missing(entries, await store.load(name.key) or ()):
            raise not_equal(name, "an entry")
        return Moved(len(stored or ()), len(missing))


def _missing(entries: Sequence[Any], stored: Sequence[Any]) -> list[Any]:
    """Return the entries that are not among what is stored."""
    known = Counter(map(_name, stored))
    missing = []
    for entry in entries:
        name = _name(entry)
        if not known[name]:
            missing.append(entry)
        if _has_uuid(entry):
            known[name] = 1
        elif known[name]:
            known[name] -= 1
    return missing


def _batches(entries: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield entries in groups that are not too large."""
    batch: list[Any] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(json.dumps(entry))
        if len(batch) == BATCH or size >= BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _has_uuid(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("uuid"), str)


def _name(entry: Mapping[str, Any]) -> str:
    return entry["uuid"] if _has_uuid(entry) else json.dumps(entry, sort_keys=True)


def _read(path: Path) -> list[Any]:
    """Return the entries of a transcript; not one at its end that is still being written.

    Raises:
        CorruptRecordError: A line is no entry.

    """
    with open_regular(path) as file:
        *lines, last = file.read().split(b"\n")
    entries = [
        _entry(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if last.strip():
        with suppress(CorruptRecordError):
            entries.append(_entry(last, str(path)))
    described = path.with_suffix(METADATA)
    if described.is_file():
        with open_regular(described) as file:
            about = _entry(file.read(), str(described))
        entries.append({**about, "type": "agent_metadata"})  # as the SDK mirrors it
    return entries


def _entry(line: bytes, place: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        message = f"{place} is no JSON ({error}): mend or remove it, and import again"
        raise CorruptRecordError(message) from error
    if not isinstance(entry, dict):
        raise CorruptRecordError(f"{place} is no entry: mend or remove it, and import again")
    return entry
