"""The values that an agent declares in persistence.yaml: found, read at once, written durably.

Arguments come first, then the environment, then the file, then the defaults. Paths in the file are
relative to its folder. Finding and reading it blocks. Template variables get their values here, in
the only module of this package with a clock and randomness.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, final

import anyio
import anyio.to_thread
import msgspec

from perdure._lib.files import open_regular
from perdure._lib.logs import log_facts
from perdure.config.locations import FolderPlace, Initial, Location, state_folder
from perdure.config.schema import (
    ConfigKey,
    Declaration,
    Initial as InitialValue,
    StoredValues,
    begun,
    changed,
    declaration_of,
    evaluate,
)
from perdure.config.yaml_reader import MAX_BYTES, name_in, read
from perdure.errors import (
    ConfigError,
    NotStorableError,
    StoreUnavailableError,
    TemplateError,
    TooLargeError,
    UnknownConfigKeyError,
)
from perdure.memory.documents import iso_of
from perdure.records.json import decode
from perdure.records.values import encode_value, redact

if TYPE_CHECKING:
    from perdure.stores.wrapped.keys import MasterKeys


# Discovery: persistence.yaml and agent.yaml next to the agent's code


FILE: Final = "persistence.yaml"
AGENT_FILE: Final = "agent.yaml"


class Declared(msgspec.Struct, frozen=True):
    """Declaration that was found, and its place."""

    declaration: Declaration = Declaration()
    path: Path | None = None
    """The persistence.yaml; None if there is none."""
    agent_name: str | None = None
    """The name in the agent.yaml next to it."""


def declared_at(path: str | os.PathLike[str]) -> Declared:
    """Read a persistence.yaml, and the agent.yaml next to it.

    Raises:
        ConfigError: It does not exist, or is invalid.
        MissingExtraError: PyYAML is not installed.

    """
    file = Path(path).expanduser().absolute()
    declared = _declared(file)
    if declared is None:
        raise ConfigError(
            f"there is no {file}: name another file, or none if nothing is declared",
            path=str(file),
        )
    return declared


def declared_beside(folder: str | os.PathLike[str] | None) -> Declared:
    """Read the persistence.yaml of a folder; nothing is declared where there is none.

    Raises:
        ConfigError: It is invalid.
        MissingExtraError: PyYAML is not installed.

    """
    if folder is None:
        return Declared()
    return _declared(Path(folder).expanduser().absolute() / FILE) or Declared()


def _declared(file: Path) -> Declared | None:
    data = _bytes(file)
    if data is None:
        return None
    declaration = declaration_of(read(data, str(file)), str(file))
    beside = file.with_name(AGENT_FILE)
    about = _bytes(beside)
    name = None if about is None else name_in(about, str(beside))
    return Declared(declaration, file, name)


def _bytes(file: Path) -> bytes | None:
    """Return what a file holds, at most a byte more than fits; None if it is not there."""
    try:
        with open_regular(file) as opened:
            return opened.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror or error}", path=str(file)
        ) from error


def program_dir() -> Path | None:
    """Return the folder of the program that runs, None in an interpreter or a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else Path(file).absolute().parent


# The settings that a persistence.yaml gives to ``connect``


_ENCRYPTED: Final = "encrypted+"


def url_of(declared: Declared, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the store, None if the file names none.

    Raises:
        ConfigError: The variable that should hold it is not set.

    """
    place = declared.declaration.store
    if place is None or declared.path is None:
        return None
    if place.url:
        return anchored(place.url, declared.path.parent)
    url = environment.get(place.url_env)
    if not url:
        raise ConfigError(
            f"{declared.path}: store: the variable {place.url_env} is not set: set it",
            variable=place.url_env,
        )
    return url


def anchored(url: str, folder: Path) -> str:
    """Return a URL whose path, if it is relative, begins at a folder.

    >>> anchored("./data", Path("/agents/gus")), anchored("redis://h", Path("/x"))
    ('/agents/gus/data', 'redis://h')
    """
    if url.lower().startswith(_ENCRYPTED):
        return url[: len(_ENCRYPTED)] + anchored(url[len(_ENCRYPTED) :], folder)
    scheme, colon, path = url.partition(":")
    if not colon or len(scheme) == 1:
        local = _from(folder, url)
        return f"file:{local}" if ":" in local else local  # the folder's own name has a colon
    if scheme.lower() == "file" and not path.startswith("//"):
        return f"{scheme}:{_from(folder, path)}"
    if scheme.lower() == "sqlite" and path.startswith("///"):
        return f"{scheme}:///{_from(folder, path[3:])}"
    return url


def _from(folder: Path, path: str) -> str:
    return path if path.startswith("~") or not path else str(folder / path)


def keys_of(declared: Declared, environment: Mapping[str, str]) -> MasterKeys | None:
    """Return the master keys; None if the file asks for no encryption.

    Raises:
        ConfigError: There is no key where the file says.
        MissingExtraError: cryptography is not installed.

    """
    from perdure.stores.wrapped.keys import KEY_FILE_VARIABLE, KEY_VARIABLE, MasterKeys

    source = declared.declaration.encryption
    if source is None or declared.path is None:
        return None
    if not (environment.get(KEY_VARIABLE) or environment.get(KEY_FILE_VARIABLE)):
        if source.key_file:
            key_file = _from(declared.path.parent, source.key_file)
            return MasterKeys.from_environment({KEY_FILE_VARIABLE: key_file})
        key = environment.get(source.key_env)
        if not key:
            raise ConfigError(
                f"{declared.path}: encryption: the variable {source.key_env} is not set: set it to "
                "the master key",
                variable=source.key_env,
            )
        environment = {KEY_VARIABLE: key}
    return MasterKeys.from_environment(environment)


# The values


Now = Callable[[], float]
"""Returns seconds since 1970."""
Random = Callable[[int], bytes]
"""Returns so many random bytes."""


def initial_values(
    agent_name: str | None, *, now: Now = time.time, random: Random = secrets.token_bytes
) -> Callable[[ConfigKey], InitialValue]:
    """Return what makes a key's initial value.

    Each occurrence of a variable is evaluated separately: two ``{{ random_id }}`` are two ids.

    Raises:
        TemplateError: A template uses the agent's name, and none was given.

    """

    def name() -> str:
        if agent_name is None:
            raise TemplateError(
                "a template names agent_name, which nobody has said: put an agent.yaml with "
                "`name: …` beside persistence.yaml, or give agent_name",
                variable="agent_name",
            )
        return agent_name

    variables: Mapping[str, Callable[[], str]] = {
        "agent_name": name,
        "random_id": lambda: random(4).hex(),
        "timestamp": lambda: iso_of(now()),
        "uuid": lambda: str(uuid.UUID(bytes=random(16), version=4)),
    }

    def initial(key: ConfigKey) -> InitialValue:
        return evaluate(key.init, variables) if isinstance(key.init, str) else key.init

    return initial


log: logging.Logger = logging.getLogger("perdure.config")

MAX_VALUE_BYTES: Final = 64 * 1024
"""The largest value, as JSON."""


class ConfigPart(NamedTuple):
    """Some of the keys, and where their values lie."""

    place: Location
    keys: Mapping[str, ConfigKey]
    is_new: bool | None = None
    """True if they begin for a new session; None to decide by the session's id."""
    keeps: Collection[str] = ()
    """Keys whose values lie there as well, and are others' to show."""
    session: str | None = None
    """The session whose values they are; None where several share them."""
    is_branch: bool = False
    """True if another session's values may have been copied: they are initialized again."""


@final
class _Setting:
    """A change that was taken, and has to become durable."""

    __slots__ = ("data", "error", "is_awaited", "is_done", "key", "part")

    def __init__(self, part: ConfigPart, key: str, data: bytes) -> None:
        self.part, self.key, self.data = part, key, data
        self.error: Exception | None = None
        self.is_awaited: bool = False
        self.is_done: bool = False

    async def durable(self, until: Callable[[_Setting], Awaitable[None]]) -> None:
        """Wait until it is durable."""
        self.is_awaited = True
        await until(self)
        if self.error is not None:
            raise self.error

    def failed(self, error: Exception) -> None:
        """Take note of why it was not kept."""
        self.error = error
        if not self.is_awaited:
            message = "config.%(key)s was set and could not be kept"
            log_facts(log, logging.ERROR, message, error, key=self.key)


@final
class _Optional(Coroutine[Any, Any, None]):
    """A coroutine that nobody has to await.

    Task groups and `inspect` take only Python's own class for a coroutine, and look at its state.
    So it answers all that with the coroutine that it holds.
    """

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine

    @property  # type: ignore[misc]  # what isinstance asks, and nobody sets
    def __class__(self) -> Any:
        return CoroutineType

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        """Resume, as a task does."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise where it waits, as a task does."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Wait no more."""
        self._coroutine.close()

    def __del__(self) -> None:
        self._coroutine.close()  # one that was never awaited would warn


def _keep_left(place: FolderPlace, pending: list[_Setting]) -> None:
    """Keep what was set and never awaited, when the config is gone or the process ends."""
    for setting in pending:
        try:
            place.change_now(partial(changed, key=setting.key, value=setting.data))
        except Exception as error:  # noqa: BLE001  # nobody is left to raise it to
            setting.failed(error)


@final
class PersistentConfig:
    """Keep the values that persistence.yaml declares.

    An agent has one as ``agent.config``. By itself it keeps them in a folder, as
    ``_persistence.json``: ``async with PersistentConfig(folder) as config``, or await it. Reading
    is synchronous; it shows what was stored when the agent started, and what was set here since.

    Args:
        state_dir: The folder; None for ``$AGENT_STATE_DIR``.
        schema_path: The persistence.yaml; None for the one beside the program that runs. Without
            any, nothing is declared.
        agent_name: What ``{{ agent_name }}`` is where no agent.yaml beside it has a name.
        session: The id of the session: values are regenerated when it is another than the last
            time. None: each load begins a new session.
        strict: Whether only keys that are declared can be set.

    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str] | None = None,
        schema_path: str | os.PathLike[str] | None = None,
        *,
        agent_name: str | None = None,
        session: str | None = None,
        strict: bool = True,
    ) -> None:
        self._state_dir = state_dir
        self._schema_path = schema_path
        self._agent_name = agent_name
        self._session = session
        self._strict = strict
        self._parts: Sequence[ConfigPart] | None = None
        self._keys: Mapping[str, ConfigKey] = {}
        self._values: dict[str, bytes] = {}
        self._pending: list[_Setting] = []  # set, and not kept yet
        self._start: Callable[[Callable[[], Awaitable[object]]], None] | None = None
        self._lock = anyio.Lock()

    @classmethod
    async def of(
        cls,
        keys: Mapping[str, ConfigKey],
        parts: Sequence[ConfigPart],
        make: Initial,
        start: Callable[[Callable[[], Awaitable[object]]], None],
    ) -> Self:
        """Return the config of keys whose values lie in several places; for agents.

        Args:
            keys: What is declared.
            parts: Where the values lie.
            make: Makes a value.
            start: Runs something in the background.

        """
        config = cls()
        config._start = start
        await config._begin(keys, parts, make)
        return config

    def __repr__(self) -> str:
        state = f"{len(self._keys)} keys" if self._parts is not None else "not loaded"
        return f"<PersistentConfig {state}>"

    def __await__(self) -> Generator[Any, None, Self]:
        return self._load().__await__()

    async def __aenter__(self) -> Self:
        return await self._load()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Keep what was set, so that all of it is durable."""
        await self.flush()

    async def _load(self) -> Self:
        """Read the schema and the values, and make those that are not there yet.

        Raises:
            ConfigError: The file is invalid, or there is no folder.
            TemplateError: A template cannot be evaluated; nothing was written.
            CorruptRecordError: What is stored is damaged; it was left as it is.
            LeaseHeldError: Another process keeps writing it.
            StoreUnavailableError: The folder cannot be read or written.

        """
        place = FolderPlace(state_folder(self._state_dir))
        weakref.finalize(self, _keep_left, place, self._pending)
        if self._schema_path is not None:
            declared = await anyio.to_thread.run_sync(declared_at, self._schema_path)
        else:
            declared = await anyio.to_thread.run_sync(declared_beside, program_dir())
        keys = declared.declaration.config
        make = initial_values(declared.agent_name or self._agent_name)
        await self._begin(keys, [ConfigPart(place, keys)], make)
        return self

    async def _begin(
        self, keys: Mapping[str, ConfigKey], parts: Sequence[ConfigPart], make: Initial
    ) -> None:
        values: dict[str, bytes] = {}
        for part in parts if keys or not self._strict else ():
            saved = await part.place.change(partial(self._begun, part, make))
            values |= self._shown(part, saved)
        self._keys, self._values, self._parts = keys, values, parts

    def _begun(self, part: ConfigPart, make: Initial, saved: StoredValues) -> StoredValues:
        session = self._session if part.is_new is None else part.session or saved.session
        is_new = part.is_new or (part.is_branch and saved.session not in {None, session})
        if part.is_new is None:
            is_new = session is None or saved.session != session
        return begun(
            saved,
            part.keys,
            is_new=is_new,
            initial=make,
            session=session,
            keep=lambda name: not self._strict or name in part.keeps,
        )

    # reading

    def get(self, key: str, default: Any = None) -> Any:
        """Return a copy of a value, or ``default`` where there is none, or it is null."""
        data = self._loaded().get(key)
        value = None if data is None else decode(data)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Say whether a key has a value; null is none."""
        return self._loaded().get(key, b"null") != b"null"

    def declared(self, key: str) -> bool:
        """Say whether persistence.yaml declares a key, whether it has a value or not."""
        self._loaded()
        return key in self._keys

    def all(self) -> dict[str, Any]:
        """Return copies of all values by their keys, with None for those that have none."""
        return {key: decode(data) for key, data in self._loaded().items()}

    def _loaded(self) -> dict[str, bytes]:
        if self._parts is None:
            raise ConfigError(
                "this config is not loaded: use `async with PersistentConfig(…) as config`"
            )
        return self._values | {change.key: change.data for change in self._pending}

    # writing

    def set(self, key: str, value: Any) -> Coroutine[Any, Any, None]:
        """Change a value; await it to have it durable: it survives a kill then.

        The change is accepted and visible at once. Without an await it is saved all the same: by an
        agent in the background, otherwise with the next change, at the end of ``async with``, or
        when the process ends; only a kill can lose it. A change that cannot be saved is reverted,
        and logged if it is not awaited. A cancelled change is complete or has no effect.

        Args:
            key: One that is declared.
            value: Any JSON value; None counts as no value.

        Raises:
            UnknownConfigKeyError: The key is not declared.
            NotStorableError: The value is not JSON.
            TooLargeError: It is larger than 64 KiB.
            LeaseHeldError: Another process keeps writing.
            StoreUnavailableError: It cannot be written right now; a session keeps it, and saves it
                as soon as it can be.

        """
        self._loaded()
        if self._strict and key not in self._keys:
            known = ", ".join([*self._keys][:10]) or "it declares nothing"
            raise UnknownConfigKeyError(
                f"config: {key[:60]!r} is not declared in persistence.yaml ({known}): declare it "
                "there",
                key=key,
            )
        parts = self._parts or ()
        part = next((part for part in parts if key in part.keys), parts[0])
        setting = _Setting(part, key, _encoded(key, value))
        if self._start is not None:
            self._start(self._soon)
        self._pending.append(setting)
        return _Optional(setting.durable(self._until))

    async def flush(self) -> None:
        """Keep what was set and not awaited; what cannot be kept is logged."""
        await self._until(None)

    async def _soon(self) -> None:
        """Save a change that is not awaited; while the store is down, it waits for `flush`."""
        await self._until(None, patiently=True)

    async def _until(self, wanted: _Setting | None, *, patiently: bool = False) -> None:
        """Keep what was set, in its order, up to one; None for all."""
        async with self._lock:
            while self._pending and (wanted is None or not wanted.is_done):
                setting = self._pending[0]
                try:
                    await self._save(setting.part, setting.key, setting.data)
                except Exception as error:  # noqa: BLE001  # whoever awaits it gets it
                    if patiently and isinstance(error, StoreUnavailableError):
                        return
                    setting.failed(error)
                setting.is_done = True
                self._pending.remove(setting)

    async def _save(self, part: ConfigPart, key: str, data: bytes) -> None:
        def show(saved: StoredValues) -> None:
            self._values |= self._shown(part, saved)

        show(await part.place.change(lambda saved: changed(saved, key, data), show))

    def _shown(self, part: ConfigPart, saved: StoredValues) -> dict[str, bytes]:
        shown = part.keys if self._strict else saved.values
        return {name: bytes(raw) for name, raw in saved.values.items() if name in shown}


def _encoded(key: str, value: Any) -> bytes:
    data, types = encode_value(value, at=f"config.{key}")
    if types:
        path, tag = next(iter(types.items()))
        place = f"config.{key}{path}".rstrip("/")
        raise NotStorableError(f"the {tag} at {place} is not JSON: convert it first", key=key)
    if len(data) > MAX_VALUE_BYTES:
        raise TooLargeError(
            f"config.{key} would have {len(data)} bytes, the limit is {MAX_VALUE_BYTES}: "
            "keep it by save_state, or in a file",
            key=key,
            size=len(data),
        )
    if redact({key: value})[1]:
        message = "config.%(key)s looks like a credential: keep it elsewhere"
        log_facts(log, logging.WARNING, message, key=key)
    return data
