"""Options of a manager: limits, the checks of option objects, and which stores hold sessions."""

from __future__ import annotations

from perdure._lib.options import Options
from perdure._lib.tasks import each
from perdure.autosave.options import Autosave, EngineOptions, Shutdown
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.lease import LeaseOptions
from perdure.memory.media import BUDGET, MediaTokens, require_media_tokens
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import BACKUP_JOURNAL, SessionKey, keyring_of
from perdure.session.retention import Retention
from perdure.store import Store, is_begun

KIB = 1024
MIB = 1024 * KIB


_WHOLE = (
    "context_bytes",
    "context_media_tokens",
    "record_bytes",
    "fold_records",
    "loads",
    "inbox_items",
    "inbox_bytes",
    "memory_bytes",
)


class Limits(Options, frozen=True, kw_only=True):
    """Limits on how large things may become. Sizes are bytes.

    Args:
        context_bytes: The working context of a session without an agent: its newest
            whole messages. Images and other media do not count.
        context_media_tokens: The media that a model is shown: the newest, up to so many tokens.
            Older ones are replaced by a note.
        media_tokens: How many tokens an image or other media takes: a number for each, or a
            function of a `Medium`, which always returns the same for the same one; None for an
            estimate by the provider. Once a function raises, or returns no whole number from 0,
            the estimate counts, with a warning.
        record_bytes: One appended item, encoded; at most 16 MiB.
        fold_ratio: Fold when the log's tail is this many times what a fold rewrites, and the
            session is at rest, or at half as much again; infinite: only when it leaves memory.
        fold_records: Fold small documents after this many records at the latest.
        loads: How many sessions load at once.
        inbox_items: How many items may wait for a session, posted by this process or others.
        inbox_bytes: How many bytes of them: who posts beyond that gets an InboxFullError.
        memory_bytes: All values of a session's working memory together: what does not fit
            evicts others. None: no limit. With a limit the memory's index is read at open.

    Raises:
        ConfigError: A value is invalid.

    """

    context_bytes: int = 512 * KIB
    context_media_tokens: int = BUDGET
    media_tokens: int | MediaTokens | None = None
    record_bytes: int = 16 * MIB
    fold_ratio: float = 4.0
    fold_records: int = 2000
    loads: int = 16
    inbox_items: int = 10_000
    inbox_bytes: int = 64 * MIB
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if name == "memory_bytes" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgumentError(
                    f"limits: invalid {name}={value!r}: it must be a whole number from 1",
                    option=name,
                    value=value,
                )
        if self.record_bytes > MAX_RECORD_BYTES:
            raise InvalidArgumentError(
                f"limits: invalid record_bytes={self.record_bytes}: no store takes a record of "
                f"more than {MAX_RECORD_BYTES} bytes; keep what is larger in a file, or as media",
                option="record_bytes",
                value=self.record_bytes,
            )
        require_media_tokens(self.media_tokens)
        if not self.fold_ratio > 0:
            raise InvalidArgumentError(
                f"limits: invalid fold_ratio={self.fold_ratio!r}: it must be above 0",
                fold_ratio=self.fold_ratio,
            )


_KINDS = {
    "autosave": Autosave,
    "lease": LeaseOptions,
    "shutdown": Shutdown,
    "limits": Limits,
    "engine": EngineOptions,
    "retention": Retention,
}


def require_options(**given: object) -> None:
    """Raise ConfigError for what is no such group of options; some may be None."""
    for name, value in given.items():
        if name in {"autosave", "retention"} and value is None:
            continue
        kind = _KINDS[name]
        if not isinstance(value, kind):
            several = "(…), such as Autosave.server(), or None" if kind is Autosave else "(…)"
            raise InvalidArgumentError(
                f"invalid {name}={value!r}: give {kind.__name__}{several}", option=name
            )


async def require_sessions(store: Store) -> None:
    """Refuse a store that is encrypted when nothing around it has its keys, and a backup.

    What is written would be plain text, next to encrypted data. A wrapper that
    encrypts does not show its keys' sessions, so they are seen only without it.

    Raises:
        ConfigError: It is one.

    """
    if not store.capabilities.blobs:
        return  # a storage of whole states: there is no place for keys, and no need to read it yet
    keys, keys_found = keyring_of(""), set[SessionKey]()

    async def look(key: SessionKey) -> None:
        if await is_begun(store, key):
            keys_found.add(key)

    await each((keys, BACKUP_JOURNAL), look)
    if keys in keys_found:
        raise ConfigError(
            f"{store.location} is encrypted: put encrypted+ before its URL, and set PERDURE_KEY or "
            "PERDURE_KEY_FILE; a store object goes into an EncryptedStore",
            option="store",
            location=store.location,
        )
    if BACKUP_JOURNAL in keys_found:
        raise _backup(store)


async def require_no_backup(store: Store) -> None:
    """Refuse a backup where a store is needed whose sessions can be used.

    Raises:
        ConfigError: It is one.

    """
    if store.capabilities.blobs and await is_begun(store, BACKUP_JOURNAL):
        raise _backup(store)


def _backup(store: Store) -> ConfigError:
    return ConfigError(
        f"{store.location} is a backup, whose sessions cannot be used as they are: `perdure "
        "restore-backup BACKUP STORE` writes them into a store",
        option="store",
        location=store.location,
    )
