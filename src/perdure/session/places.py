"""Which stores sessions are not kept in: those that keep something else, or keep it otherwise."""

from __future__ import annotations

from perdure._lib.several import each
from perdure.errors import ConfigError
from perdure.model.keys import BACKUP_JOURNAL, SessionKey, keyring_of
from perdure.store import Store

__all__ = ["require_no_backup", "require_sessions"]


async def require_sessions(store: Store) -> None:
    """Refuse a store that is encrypted when nothing around it has its keys, and a backup.

    What is written would lie there in plain text, among what is sealed. A wrapper that
    encrypts does not show its keys' sessions, so they are seen only without it.

    Raises:
        ConfigError: It is one.

    """
    if not store.capabilities.blobs:
        return  # a storage of whole states: there is no place for keys, and no need to read it yet
    keys, found = keyring_of(""), set[SessionKey]()

    async def look(key: SessionKey) -> None:
        if await store.holder(key) is not None:
            found.add(key)

    await each((keys, BACKUP_JOURNAL), look)
    if keys in found:
        message = (
            f"{store.location} is encrypted: put encrypted+ before its URL, and set PERDURE_KEY or "
            "PERDURE_KEY_FILE; a store object goes into an EncryptedStore"
        )
        raise ConfigError(message, option="store", location=store.location)
    if BACKUP_JOURNAL in found:
        raise _backup(store)


async def require_no_backup(store: Store) -> None:
    """Refuse a backup where a store is needed whose sessions can be used.

    Raises:
        ConfigError: It is one.

    """
    if store.capabilities.blobs and await store.holder(BACKUP_JOURNAL) is not None:
        raise _backup(store)


def _backup(store: Store) -> ConfigError:
    message = (
        f"{store.location} is a backup, whose sessions cannot be used as they are: `perdure "
        "restore-backup BACKUP STORE` writes them into a store"
    )
    return ConfigError(message, option="store", location=store.location)
