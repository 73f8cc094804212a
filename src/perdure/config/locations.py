"""Locations of config values and named states: a session's state, or a file in a folder.

A location applies a change as a function of its stored values, exclusive of other writers, and
returns when the result is durable. A cancelled change is either complete or has no effect.

A persistence.yaml is applied to them as a dry run, or written. An agent does the same when it
starts; this is for a preview, and for agents that are not running. Sessions that another process
holds are skipped and listed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, final

import anyio
import anyio.to_thread
import msgspec

from perdure import errors
from perdure._lib.files import Folder, NoFileError, store_errors
from perdure._lib.platform import try_lock
from perdure.config.schema import (
    DOCUMENT,
    ConfigKey,
    ConfigPlan,
    Declaration,
    StoredValues,
    begun,
    own,
    plan,
    saved_in,
    written,
)
from perdure.errors import FormatError, LeaseHeldError
from perdure.records.json import decode
from perdure.records.keys import DEFAULT_SESSION, MAX_ID_BYTES
from perdure.records.values import encode_value
from perdure.session.internals import let_go
from perdure.session.retention import PruneReport
from perdure.stores.file.layout import decode_name, encode_name

if TYPE_CHECKING:
    from perdure.records.keys import SessionKey
    from perdure.session.manager import SessionManager
    from perdure.session.session import Session, SessionView


STATE_DIR_VARIABLE: Final = "AGENT_STATE_DIR"
FILE: Final = f"{DOCUMENT}.json"
LOCK: Final = f"{DOCUMENT}.lock"
_PAUSE: Final = 0.05
"""Seconds between attempts to write while another writer holds the location."""

Change = Callable[[StoredValues], StoredValues]
Taken = Callable[[StoredValues], object]
"""Called when a change cannot be undone any more: it will be stored, even if the caller is
cancelled or gets an error that it cannot be written right now."""


@final
class SessionPlace:
    """The state of an open session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self) -> StoredValues:
        """Return what the session holds, durable or not."""
        value = await self._session.state.get(DOCUMENT)
        return _saved(value, f"session {self._session.key}")

    async def change(self, change: Change, on_taken: Taken = lambda _: None) -> StoredValues:
        """Make a change durable, and return what is stored then; the same object is no change."""
        session = self._session
        while True:
            before = session.version
            saved = await self.read()
            if session.version == before:
                break  # otherwise a task has appended during the read, maybe to this state
        new = change(saved)
        if new is not saved:
            session.state.set(DOCUMENT, written(new))
            on_taken(new)
            await session.save()
        return new


def _saved(value: Any, owner: str) -> StoredValues:
    return saved_in(
        None if value is None else msgspec.json.encode(value), f"the state {DOCUMENT!r} of {owner}"
    )


@final
class AgentPlace:
    """State that all sessions of an agent share: that of its default session.

    Held for as long as a change takes, by a session of the same agent that is another one.

    Args:
        sessions: The manager.
        id: The agent's id.
        tenant: Whose it is.
        wait: Seconds to wait for another process that has the default session.

    """

    def __init__(self, sessions: SessionManager, id: str, *, tenant: str, wait: float) -> None:
        self._sessions = sessions
        self._id = id
        self._tenant = tenant
        self._wait = wait

    async def read(self) -> StoredValues:
        """Return what is durable; needs no lease."""
        view = await self._sessions.load(self._id, tenant=self._tenant)
        value = None if view is None else await view.state.get(DOCUMENT)
        return _saved(value, f"agent {self._id!r}")

    async def change(self, change: Change, on_taken: Taken = lambda _: None) -> StoredValues:
        """Change it under the default session's lease, if there is anything to change.

        Raises:
            LeaseHeldError: Another process keeps holding the default session.

        """
        saved = await self.read()
        if change(saved) is saved:
            return saved
        session = await self._open()
        try:
            return await SessionPlace(session).change(change, on_taken)
        finally:
            with anyio.CancelScope(shield=True):
                await let_go(session)

    async def _open(self) -> Session:
        """Open the default session, without asking its holder for a handover."""
        until = anyio.current_time() + self._wait
        while True:
            try:
                return await self._sessions.open(self._id, tenant=self._tenant, on_held="raise")
            except errors.LeaseHeldError as error:
                if anyio.current_time() >= until:
                    raise errors.LeaseHeldError(
                        f"agent {self._id!r}: another process has its default session, which keeps "
                        "the values that all of its sessions share; it was not free for "
                        f"{self._wait} s: try again later",
                        agent=self._id,
                    ) from error
            await anyio.sleep(_PAUSE)


@final
class FolderPlace:
    """``_persistence.json`` in a folder: one writer at a time by a lock, replaced as a whole.

    Args:
        path: The folder; made if it is not there.
        wait: Seconds to wait for another writer.

    """

    def __init__(self, path: Path, *, wait: float = 10.0) -> None:
        self.path: Path = path
        self._wait = wait

    async def read(self) -> StoredValues:
        """Read the file; a writer never shows it half-done."""
        return await anyio.to_thread.run_sync(self._read)

    async def change(self, change: Change, on_taken: Taken = lambda _: None) -> StoredValues:
        """Change the file under the folder's lock.

        Raises:
            LeaseHeldError: Another process keeps holding the lock.
            StoreUnavailableError: The folder cannot be written.

        """
        until = anyio.current_time() + self._wait
        while (changed := await anyio.to_thread.run_sync(self._change, change)) is None:
            if anyio.current_time() >= until:
                raise self._held()
            await anyio.sleep(_PAUSE)
        on_taken(changed)
        return changed

    def change_now(self, change: Change) -> StoredValues:
        """Change it while nothing else runs: where there is no event loop any more."""
        until = time.monotonic() + self._wait
        while (changed := self._change(change)) is None:
            if time.monotonic() >= until:
                raise self._held()
            time.sleep(_PAUSE)
        return changed

    def _held(self) -> errors.LeaseHeldError:
        return errors.LeaseHeldError(
            f"{self.path / LOCK} was held by another process for {self._wait} s: try again later",
            path=str(self.path),
        )

    def _read(self) -> StoredValues:
        with _existing(self.path) as folder:
            data = None if folder is None else folder.read(FILE)
        return saved_in(data, str(self.path / FILE))

    def _change(self, change: Change) -> StoredValues | None:
        """Apply the change; None if another process holds the lock."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(store_errors("write", str(self.path)))
            folder = stack.enter_context(made(self.path))
            fd = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, fd)
            if try_lock(fd) is False:
                return None
            saved = saved_in(folder.read(FILE), str(self.path / FILE))
            new = change(saved)
            if new is not saved:
                folder.replace(FILE, text_of(written(new)))
                folder.sync()
            return new


Location = SessionPlace | AgentPlace | FolderPlace


@contextlib.contextmanager
def _existing(path: Path, doing: str = "read") -> Iterator[Folder | None]:
    """Open a folder of state; None if it is not there."""
    with store_errors(doing, str(path)):
        if not path.is_dir():
            yield None
            return
        with Folder.root(str(path)) as folder:
            yield folder


def made(path: Path) -> Folder:
    """Open a folder; one that is not there is made, durably."""
    if not path.is_dir():
        with made(path.parent) as parent:
            return parent.make(path.name)
    return Folder.root(str(path))


def text_of(value: Any) -> bytes:
    """Return JSON as people read it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def state_folder(given: str | os.PathLike[str] | None) -> Path:
    """Return the folder of an agent's state: what is given, else ``$AGENT_STATE_DIR``.

    Raises:
        ConfigError: Neither is there.

    """
    path = os.fspath(given) if given is not None else os.environ.get(STATE_DIR_VARIABLE, "")
    if not path:
        raise errors.ConfigError(
            f"there is no folder for the state: give state_dir, or set {STATE_DIR_VARIABLE}",
            option="state_dir",
        )
    return Path(path).expanduser().absolute()


# Named states in a folder: JSON under any key, for an agent without a session


_SUFFIX: Final = ".json"


def check_state_key(key: str, reserved: Collection[str] = (DOCUMENT,)) -> str:
    """Return a key that a state may have.

    Raises:
        InvalidArgumentError: It is empty, too long, no text, or reserved.

    """
    reason, given = None, cast("object", key)
    if not isinstance(given, str) or not all(given.split("/")):
        reason = "give text of at least one character, with no empty step between slashes"
    elif key in reserved:
        reason = "it is reserved"
    elif any("\ud800" <= char <= "\udfff" for char in key):
        reason = "it holds a lone surrogate, which is not text"
    elif len(key.encode()) > MAX_ID_BYTES:
        reason = f"it is longer than {MAX_ID_BYTES} bytes"
    if reason is not None:
        raise errors.InvalidArgumentError(
            f"invalid key {str(key)[:60]!r} of a state: {reason}", option="key"
        )
    return key


@final
class PersistentState:
    """Keep JSON values in a folder, each in a file of its own.

    A key of lower-case letters, digits, ``-`` and ``_`` is its file's name; all else is encoded,
    so that no key leads out of the folder, and no two are one file.

    Args:
        state_dir: The folder; None for ``$AGENT_STATE_DIR``.

    Raises:
        InvalidArgumentError: Neither is there.

    """

    def __init__(self, state_dir: str | os.PathLike[str] | None = None) -> None:
        self._path = state_folder(state_dir)

    def __repr__(self) -> str:
        return f"<PersistentState {self._path}>"

    async def save_state(self, key: str, data: Any) -> None:
        """Keep a value under a key, and return when it is durable.

        Raises:
            InvalidArgumentError: The key is invalid.
            NotStorableError: The value is not JSON.
            StoreUnavailableError: The folder cannot be written.

        """
        name = _file(key)
        encoded, types = encode_value(data)
        if types:
            raise errors.NotStorableError(
                f"state {key!r}: the {next(iter(types.values()))} in it is not JSON", key=key
            )
        await anyio.to_thread.run_sync(self._write, name, text_of(decode(encoded)))

    async def load_state(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``.

        Raises:
            InvalidArgumentError: The key is invalid.
            CorruptRecordError: The file is damaged; it was left as it is.

        """
        name = _file(key)
        try:
            data = await anyio.to_thread.run_sync(self._read, name)
            return default if data is None else decode(data)
        except errors.CorruptRecordError as error:
            raise errors.CorruptRecordError(
                f"{self._path / name} is damaged: mend it, or move it away ({error})",
                path=str(self._path / name),
            ) from None

    async def list_state_keys(self) -> list[str]:
        """Return the keys that have a value, in order."""
        names = await anyio.to_thread.run_sync(self._names)
        keys = [
            decode_name(name.removesuffix(_SUFFIX))
            for name in names
            if name.endswith(_SUFFIX) and name != FILE and not name.startswith(".")
        ]
        return sorted(key for key in keys if key is not None)

    async def delete_state(self, key: str) -> bool:
        """Forget a key durably; say whether it was there."""
        return await anyio.to_thread.run_sync(self._remove, _file(key))

    def _write(self, name: str, data: bytes) -> None:
        with store_errors("write", str(self._path)), made(self._path) as folder:
            folder.replace(name, data)
            folder.sync()

    def _read(self, name: str) -> bytes | None:
        with _existing(self._path) as folder:
            try:
                return None if folder is None else folder.read(name)
            except NoFileError:
                return b""  # a pipe or a folder in its place is damage, as an empty file is

    def _names(self) -> list[str]:
        with _existing(self._path) as folder:
            return [] if folder is None else folder.names()

    def _remove(self, name: str) -> bool:
        with _existing(self._path, "write") as folder:
            if folder is None or not folder.remove(name):
                return False
            folder.sync()
            return True


def _file(key: str) -> str:
    name = encode_name(check_state_key(key))
    if decode_name(name) is None:  # a hash stands for it, which cannot be listed
        raise errors.InvalidArgumentError(
            f"invalid key {key[:60]!r} of a state: it is too long for a file's name", option="key"
        )
    return name + _SUFFIX


_PAGE = 500

Initial = Callable[[ConfigKey], Any]


# Application of a persistence.yaml


class ConfigChange(msgspec.Struct, frozen=True):
    """Changes to one place, planned or made."""

    place: str
    """A session, or a folder."""
    plan: ConfigPlan


class ConfigReport(msgspec.Struct, frozen=True, kw_only=True):
    """Changes by a declaration, planned or made."""

    dry_run: bool
    looked_at: int = 0
    """Places that hold values, or were asked for."""
    changes: tuple[ConfigChange, ...] = ()
    held: tuple[str, ...] = ()
    """Sessions that another process holds: they were left alone."""
    damaged: tuple[str, ...] = ()
    """Sessions that cannot be read, or whose values cannot: they were left alone, too."""
    pruned: PruneReport | None = None
    """Result of the retention; None without one."""


async def apply_to_folder(
    place: FolderPlace, declaration: Declaration, make: Initial, *, dry_run: bool
) -> ConfigReport:
    """Bring a state folder up to date, or say what that would change.

    Raises:
        CorruptRecordError: What is stored is damaged; it was left as it is.
        LeaseHeldError: Another process keeps writing it.
        TemplateError: A template cannot be evaluated; nothing was written.

    """
    keys = declaration.config
    planned = plan(await place.read(), keys)
    if planned and not dry_run:
        await place.change(partial(_resumed, keys=keys, make=make))
    changes = (ConfigChange(str(place.path), planned),) if planned else ()
    return ConfigReport(dry_run=dry_run, looked_at=1, changes=changes)


def _resumed(
    saved: StoredValues,
    keys: Mapping[str, ConfigKey],
    make: Initial,
    keep: Callable[[str], bool] = lambda _: False,
) -> StoredValues:
    return begun(saved, keys, is_new=False, initial=make, session=saved.session, keep=keep)


async def apply_to_store(
    sessions: SessionManager,
    declaration: Declaration,
    make: Initial,
    *,
    id: str | None = None,
    tenant: str = "",
    dry_run: bool,
) -> ConfigReport:
    """Bring the sessions of a store up to date, or say what that would change.

    Args:
        sessions: The manager of the store.
        declaration: What is declared.
        make: Returns the initial value of a key.
        id: Only of this agent; its default session gets values even if it has none. None: of
            all agents that have values.
        tenant: Whose they are.
        dry_run: Change nothing.

    Raises:
        TemplateError: A template cannot be evaluated.

    """
    looked_at, changes, held_keys, damaged = 0, list[ConfigChange](), list[str](), list[str]()
    keep = declaration.config.__contains__
    async for key in _keys(sessions, id, tenant):
        try:
            view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
            value = None if view is None else await view.state.get(DOCUMENT)
            if view is None or (value is None and (id is None or key.session != DEFAULT_SESSION)):
                continue
            saved = _saved(value, f"session {key}")
            looked_at += 1
            keys = _keys_of(view, saved, declaration.config)
            if not (planned := plan(saved, keys, keep)):
                continue
            if not dry_run:
                opening = sessions.open(
                    key.agent, session=key.session, tenant=key.tenant, create=False, on_held="raise"
                )
                async with opening as session:
                    resumed = partial(_resumed, keys=keys, make=make, keep=keep)
                    await SessionPlace(session).change(resumed)
            changes.append(ConfigChange(str(key), planned))
        except LeaseHeldError:
            held_keys.append(str(key))
        except FormatError:
            damaged.append(str(key))
    pruned = None
    if declaration.retention is not None:
        pruned = await sessions.prune(declaration.retention, id=id, tenant=tenant, dry_run=dry_run)
    return ConfigReport(
        dry_run=dry_run,
        looked_at=looked_at,
        changes=tuple(changes),
        held=tuple(held_keys),
        damaged=tuple(damaged),
        pruned=pruned,
    )


async def _keys(sessions: SessionManager, id: str | None, tenant: str) -> AsyncIterator[SessionKey]:
    """Give the sessions of one agent, or of all."""
    after = None
    while page := await sessions.list(tenant=tenant, prefix=id or "", after=after, limit=_PAGE):
        after = page[-1]
        for info in page:
            if id is None or info.key.agent == id:
                yield info.key


def _keys_of(
    view: SessionView, saved: StoredValues, config: Mapping[str, ConfigKey]
) -> dict[str, ConfigKey]:
    """Return the keys that apply to a session: an unused default session has the shared ones."""
    regenerated = own(config)
    if view.key.session != DEFAULT_SESSION:
        return regenerated
    known = {*saved.values, *saved.orphans}
    used = view.info.turns > 0 or not known.isdisjoint(regenerated)
    return {name: key for name, key in config.items() if used or name not in regenerated}
