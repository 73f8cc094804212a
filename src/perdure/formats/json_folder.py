"""A state as files in one folder: session.json, memory.json, plugins/<name>.json.

Each file is replaced in one step, and session.json is the last; ``custom_instructions.md``, and
everything else in there, is not touched. A damaged file is copied to ``quarantine/``,
reported, and left out: the rest is read. Files of a newer release are not touched at all.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import TypeVar, final

import anyio.to_thread
import msgspec

from perdure._lib.files import Folder
from perdure._lib.logs import log_facts
from perdure.errors import FormatError, StoreUnavailableError, UnsupportedVersionError
from perdure.formats.migrations import (
    MIGRATIONS,
    Finding,
    MigratedState,
    Migrations,
    merge_plugins,
    read_memory,
    read_state,
)
from perdure.formats.state import FullAgentState, write_open, write_state
from perdure.records.json import decode

log: logging.Logger = logging.getLogger("perdure")

T = TypeVar("T")
R = TypeVar("R")

SESSION = "session.json"
MEMORY = "memory.json"
PLUGINS = "plugins"
QUARANTINE = "quarantine"

_SUFFIX = ".json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}\Z")


async def read_folder(
    path: str | os.PathLike[str], *, migrations: Migrations = MIGRATIONS
) -> MigratedState:
    """Read a state from its files.

    Raises:
        UnsupportedVersionError: A newer release wrote a file; nothing was touched.
        ConfigError: They are documents of a perdure store.
        StoreUnavailableError: The folder cannot be read.

    """
    return await anyio.to_thread.run_sync(guarded, _read, os.fspath(path), migrations)


async def write_folder(path: str | os.PathLike[str], state: FullAgentState) -> list[str]:
    """Write a state to its files, durably, and return their names.

    A memory that is None leaves the one that is there.

    Raises:
        StoreUnavailableError: The folder cannot be written.

    """
    return await anyio.to_thread.run_sync(guarded, _write, os.fspath(path), state)


def guarded(act: Callable[..., R], path: object, *args: object) -> R:
    """Do something in a folder; an error of the disk becomes one of ours."""
    try:
        return act(path, *args)
    except OSError as error:
        raise StoreUnavailableError(
            f"the state in {path} cannot be reached: {error}: look at its permissions",
            path=str(path),
            errno=error.errno,
        ) from error


# reading


def _read(path: str, migrations: Migrations) -> MigratedState:
    try:
        folder = Folder.root(path)
    except FileNotFoundError:
        return MigratedState(None)
    with folder:
        content = FolderFiles(folder)
        read = content.document(
            SESSION, lambda data: read_state(data, migrations=migrations, where=SESSION)
        )
        memory = content.document(MEMORY, lambda data: read_memory(data, migrations=migrations))
        plugins = content.plugins()
    if not content.any:
        return MigratedState(None)
    findings = [*content.findings, *(read.findings if read else ()), *(memory[1] if memory else ())]
    state = (read.state if read else None) or FullAgentState()
    if memory is not None:
        state.memory = memory[0]
    merge_plugins(state, plugins, findings)
    return MigratedState(state, tuple(findings))


class FolderFiles:
    """Contents of a folder, and the problems with it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.findings: list[Finding] = []
        self.any: bool = False

    def document(
        self, name: str, parse: Callable[[bytes], T], *, within: Folder | None = None
    ) -> T | None:
        """Return a file's content; a damaged one is put aside, and None."""
        folder = within or self._folder
        data = folder.read(name)
        if data is None:
            return None
        self.any = True
        path = os.path.join(folder.path, name)  # noqa: PTH118
        try:
            return parse(data)
        except UnsupportedVersionError as error:
            raise UnsupportedVersionError(
                f"{path}: {error}", **{**error.facts, "path": path}
            ) from error
        except FormatError as error:
            self._quarantine(path, name, data, error)
            return None

    def _quarantine(self, path: str, name: str, data: bytes, error: FormatError) -> None:
        copy = f"{name}.corrupt-{hashlib.sha256(data).hexdigest()[:12]}"
        try:
            with self._folder.make(QUARANTINE) as quarantine:
                quarantine.publish(copy, data)
        except OSError as refused:
            evidence = f"it could not be copied ({refused}), and is where it was"
        else:
            evidence = f"a copy is {self._folder.path}/{QUARANTINE}/{copy}"
        message = "the stored state %(path)s is damaged, and was left out: %(evidence)s"
        log_facts(log, logging.WARNING, message, path=path, evidence=evidence)
        self.findings.append(Finding("quarantined", path, f"{error}; {evidence}"))

    def plugins(self) -> dict[str, bytes]:
        """Return the bytes of each plugin's file that holds JSON."""
        try:
            folder = self._folder.enter(PLUGINS)
        except FileNotFoundError:
            return {}
        plugins = {}
        with folder:
            for name in sorted(folder.names()):
                if not name.endswith(_SUFFIX) or name.startswith("."):
                    continue
                data = self.document(name, _checked, within=folder)
                if data is not None:
                    plugins[name.removesuffix(_SUFFIX)] = data
        return plugins


def _checked(data: bytes) -> bytes:
    decode(data)
    return data


# writing


def _write(path: str, state: FullAgentState) -> list[str]:
    os.makedirs(path, mode=0o700, exist_ok=True)  # noqa: PTH103
    with Folder.root(path) as folder:
        names = _write_plugins(folder, state.plugins)
        if state.memory is not None:
            folder.replace(MEMORY, pretty(write_open(state.memory)))
            names.append(MEMORY)
        inline = {name: raw for name, raw in state.plugins.items() if not _FILE_NAME.match(name)}
        other_fields = msgspec.structs.replace(state, memory=None, plugins=inline)
        folder.replace(SESSION, pretty(write_state(other_fields)))
        folder.sync()
    return [*names, SESSION]


def _write_plugins(folder: Folder, states: Mapping[str, msgspec.Raw]) -> list[str]:
    """Write the plugins' files, and remove those of others; return their names."""
    files = {f"{name}{_SUFFIX}": raw for name, raw in states.items() if _FILE_NAME.match(name)}
    if not files and folder.stat(PLUGINS) is None:
        return []
    with folder.make(PLUGINS) as plugins:
        for name, raw in files.items():
            plugins.replace(name, pretty(bytes(raw)))
        for name in plugins.names():
            if name.endswith(_SUFFIX) and name not in files:
                plugins.remove(name)
        plugins.sync()
    return [f"{PLUGINS}/{name}" for name in files]


def pretty(data: bytes) -> bytes:
    """Return JSON as people read it."""
    return msgspec.json.format(data, indent=2) + b"\n"


@final
class FolderStorage:
    """Keep one agent's state in a folder of its own, in the files that an export writes.

    Args:
        path: The folder; made when something is saved.
        migrations: The steps from older versions of the format.

    """

    def __init__(
        self, path: str | os.PathLike[str], *, migrations: Migrations = MIGRATIONS
    ) -> None:
        self._path = os.path.abspath(os.path.expanduser(os.fspath(path)))  # noqa: PTH100, PTH111
        self._migrations = migrations

    def __repr__(self) -> str:
        return f"<FolderStorage {self._path}>"

    async def save(self, state: FullAgentState) -> None:
        """Write the files."""
        await write_folder(self._path, state)

    async def load(self) -> FullAgentState | None:
        """Read the files; a damaged one is quarantined, and left out.

        Raises: as `read_folder`.
        """
        return (await read_folder(self._path, migrations=self._migrations)).state

    async def exists(self) -> bool:
        """Say whether there is a session.json."""
        return await self.get_last_modified() is not None

    async def delete(self) -> None:
        """Remove session.json, memory.json and the plugins' files, and nothing else."""
        await anyio.to_thread.run_sync(guarded, _delete, self._path)

    def get_path(self) -> str:
        """Return the folder."""
        return self._path

    async def get_last_modified(self) -> datetime.datetime | None:
        """Return when session.json was written."""
        path = anyio.Path(self._path) / SESSION
        try:
            modified = (await path.stat()).st_mtime
        except FileNotFoundError:
            return None
        return datetime.datetime.fromtimestamp(modified, datetime.UTC)


def _delete(path: str) -> None:
    try:
        folder = Folder.root(path)
    except FileNotFoundError:
        return
    with folder:
        folder.remove(SESSION)
        folder.remove(MEMORY)
        _write_plugins(folder, {})
        folder.remove_folder(PLUGINS)
        folder.sync()
