"""A store as another machine has it: only heartbeats tell who is alive."""

from __future__ import annotations

import msgspec

from perdure.errors import LeaseHeldError
from perdure.records.keys import SessionKey
from perdure.store import Held, LeaseState, Taken, Terms
from perdure.stores.delegate import DelegatingStore


class Remote(DelegatingStore):
    """Around a store that sees which processes live."""

    async def holder(self, key: SessionKey) -> LeaseState | None:
        found = await self.inner.holder(key)
        return None if found is None else msgspec.structs.replace(found, alive=None)

    async def acquire(self, key: SessionKey, terms: Terms) -> Held | Taken:
        holder = await self.holder(key)
        if not terms.allows(holder):
            return Held(holder)
        after = 0 if holder is None else holder.epoch
        answer = await self.inner.acquire(key, msgspec.structs.replace(terms, after=after))
        if isinstance(answer, Held) and terms.after is None:
            raise LeaseHeldError(f"{key} was taken meanwhile: no test has such a race")
        return answer
