"""Encryption as a wrapper: AES-256-GCM, a data key for each session, a master key for all.

What the store sees, and what it does not, is in docs/stores.md. Whatever is read is
verified: a flipped bit, a record at another place or in another session, and a wrong key are
errors, and never an empty session. Not noticed is a whole store put back to an older copy.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import final

import anyio
import msgspec

from perdure.errors import LeaseHeldError, LeaseLostError
from perdure.model.keys import SessionKey
from perdure.store import Grant, Store
from perdure.stores.wrapped import keyring
from perdure.stores.wrapped.data_key import GROWTH, DataKey
from perdure.stores.wrapped.keys import KEY_BYTES, MasterKeys, ciphers
from perdure.stores.wrapped.layer import Layer
from perdure.stores.wrapped.packing import Packing, packing_of
from perdure.stores.wrapped.sealing import Seal, from_text

__all__ = ["EncryptedStore", "Rewrapped"]

_MOST_AT_HAND = 4096
"""Sessions whose keys are kept in memory."""
_PAGE = 100


class Rewrapped(msgspec.Struct, frozen=True):
    """What a rotation of the master key did."""

    done: int
    """Keys that the current master key wraps now, and did not before."""
    left: tuple[SessionKey, ...]
    """Sessions that somebody holds: their keys are wrapped anew when they are opened next."""


@final
class EncryptedStore(Layer):
    """Keep everything in a store, encrypted.

    Args:
        store: The store that keeps it.
        keys: The master key, with older ones to read what they wrapped.
        compression: ``zstd`` packs before it encrypts; lengths then tell a little of the content.

    Raises:
        ConfigError: The key or the compression does not fit.
        MissingExtraError: cryptography, or zstandard, is not installed.

    Example:
        >>> from perdure.stores.memory import MemoryStore
        >>> store = EncryptedStore(MemoryStore(), MasterKeys(MasterKeys.new()))
    """

    def __init__(
        self, store: Store, keys: MasterKeys | bytes | str, *, compression: str | None = None
    ) -> None:
        masters = keys if isinstance(keys, MasterKeys) else MasterKeys(keys)
        super().__init__(store, _Encryption(masters, packing_of(compression)))
        self._masters = masters

    async def rewrap(self) -> Rewrapped:
        """Wrap all data keys by the current master key; older ones are not needed then.

        Takes each session's lease for a moment, and leaves those out that somebody holds.
        """
        done = 0
        left: list[SessionKey] = []
        for tenant in sorted({"", *await self._store.tenants()}):
            after: SessionKey | None = None
            while page := await self._store.sessions(tenant=tenant, after=after, limit=_PAGE):
                for info in page:
                    try:
                        done += await self._rewrap(info.key)
                    except (LeaseHeldError, LeaseLostError):
                        left.append(info.key)
                after = page[-1].key
        return Rewrapped(done, tuple(left))

    async def _rewrap(self, key: SessionKey) -> bool:
        found = await keyring.find(self._store, key, self._masters)
        if found is None or found.is_current:
            return False
        holder = await self._store.holder(key)
        if holder is None or not (holder.released or holder.alive is False):
            message = f"{key} is held: its key is wrapped anew when it is opened next"
            raise LeaseHeldError(message, key=str(key))
        grant = await self._store.acquire(key, after=holder.epoch)
        try:
            found = await keyring.find(self._store, key, self._masters)
            if found is not None:
                await keyring.write(self._store, grant, found.key, self._masters, found.manifest)
        finally:
            with anyio.CancelScope(shield=True):
                await self._store.release(key, grant.epoch)
        return True


class _Encryption:
    """Seals of sessions and tenants, with the keys that were used last at hand."""

    kind = "encrypted"
    hidden: str | None = keyring.KEYRING
    takes_plain = False

    def __init__(self, masters: MasterKeys, packing: Packing | None) -> None:
        ciphers()  # missing: said now, and not at the first save
        self._masters = masters
        self._packing = packing
        self._sessions: OrderedDict[SessionKey, DataKey] = OrderedDict()
        self._tenants: dict[str, DataKey] = {}

    def fits(self, most: int) -> int:
        return (most - 2) // 4 * 3 - GROWTH - 2

    def overhead(self) -> int:
        return GROWTH

    async def require_fit(self, store: Store) -> None:
        await keyring.require_sealed(store)

    async def check(self, store: Store, key: SessionKey) -> None:
        self._sessions.pop(key, None)  # it may have been deleted and begun anew
        await keyring.find(store, key, self._masters)

    async def begin(self, store: Store, grant: Grant) -> None:
        self._sessions.pop(grant.key, None)
        found = None
        if not grant.created:
            found = await keyring.find(store, grant.key, self._masters)
            if found is None:
                await keyring.require_new(store, grant.key)
        await self.of_tenant(store, grant.key.tenant, make=True)
        if found is None:
            new = secrets.token_bytes(KEY_BYTES)
            await keyring.write(store, grant, new, self._masters, None)
            self._remember(grant.key, new)
            return
        if not found.is_current:
            await keyring.write(store, grant, found.key, self._masters, found.manifest)
        self._remember(grant.key, found.key)

    async def of_session(self, store: Store, key: SessionKey, data: bytes = b"") -> Seal | None:
        known = self._sessions.get(key)
        if known is not None and _opens(known, data):
            self._sessions.move_to_end(key)
            return known
        found = await keyring.find(store, key, self._masters)
        if found is None:
            if data:
                await keyring.require_new(store, key)  # says how it came to be without a key
            return None
        return self._remember(key, found.key)

    def _remember(self, key: SessionKey, data_key: bytes) -> DataKey:
        whose = ("session", key.tenant, key.agent, key.session)
        seal = self._sessions[key] = DataKey(data_key, whose, self._packing)
        while len(self._sessions) > _MOST_AT_HAND:
            self._sessions.popitem(last=False)
        return seal

    async def of_tenant(self, store: Store, tenant: str, *, make: bool) -> Seal | None:
        if make and tenant and "" not in self._tenants:
            await self.of_tenant(store, "", make=True)  # the mark that the store is encrypted
        known = self._tenants.get(tenant)
        if known is None:
            if make:
                key = await keyring.tenant_key(store, tenant, self._masters)
            else:
                found = await keyring.find(store, keyring.keyring_of(tenant), self._masters)
                if found is None:
                    return None
                key = found.key
            known = self._tenants[tenant] = DataKey(key, ("tenant", tenant), self._packing)
        return known

    def at_hand(self, key: SessionKey) -> Seal | None:
        return self._sessions.get(key)

    def is_own(self, name: str) -> bool:
        return keyring.is_key(name)

    def own_anew(self, key: SessionKey, seal: Seal) -> dict[str, bytes]:
        assert isinstance(seal, DataKey)  # as `of_session` gave it
        return dict([keyring.wrapped(key, seal.key, self._masters)])

    def forget(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)


def _opens(seal: DataKey, data: bytes) -> bool:
    if not data:
        return True
    raw = from_text(data, "a record") if data[:1] == b'"' else data
    return seal.opens(raw)
