"""Checkpoints to look at: which there are, what they hold, whether anything was changed."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.checkpoints.chain import problems_of
from perdure.checkpoints.difference import Difference, difference
from perdure.checkpoints.journal import Reading, Walk
from perdure.checkpoints.states import read_bytes, read_state
from perdure.checkpoints.verifying import Verification, state_problems, verified
from perdure.codec.json import decode
from perdure.errors import ConfigError, CorruptRecordError
from perdure.model.checkpoints import Captured, Checkpoint

__all__ = ["CheckpointReader", "CheckpointState"]


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint with a copy of its state."""

    id: int
    label: str
    timestamp: int
    """When, on the session's logical clock."""
    state: Any
    """What the caller gave; of the session itself ``context``, ``memory``, ``state`` and so on."""


class CheckpointReader:
    """The checkpoints of a session, to read: ``view.checkpoints``."""

    __slots__ = ("_reading",)

    def __init__(self, reading: Reading) -> None:
        self._reading: Reading = reading

    async def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that was not pruned, None if there is none."""
        return (await self._reading.chain()).latest

    async def get(self, id: int) -> Checkpoint | None:
        """Return a checkpoint, without the state that it leads to; None for an unknown id."""
        return (await self._reading.chain()).by_id.get(id)

    async def states(self) -> list[Checkpoint]:
        """Return all checkpoints that were not pruned, by id, without the states."""
        return list((await self._reading.chain()).by_id.values())

    async def restore(self, id: int) -> CheckpointState | None:
        """Return a checkpoint with a copy of its state, None for an unknown id; changes nothing.

        Raises:
            ConfigError: It is of the session itself, whose history before it was pruned.
            CorruptRecordError: A part of the state is lost or damaged.

        """
        checkpoint = await self.get(id)
        if checkpoint is None:
            return None
        reading = self._reading
        if isinstance(checkpoint.state, Captured):
            state: Any = await reading.walk().at(checkpoint.event_seq)
            state["context"] = list(state["context"].values())
        else:
            tenant = reading.key.tenant
            state = await read_state(reading.store, tenant, checkpoint.state, reading.types)
        return CheckpointState(
            id=checkpoint.id,
            label=checkpoint.label,
            timestamp=checkpoint.timestamp,
            state=state,
        )

    async def diff(self, a: int, b: int) -> Difference:
        """Return what was added, removed and changed from one checkpoint's state to another's.

        Paths are JSON pointers. The context's messages are named by the records that brought
        them, so that a message keeps its path.

        Raises:
            ConfigError: There is no such checkpoint.
            CorruptRecordError: A part of a state is lost or damaged.

        """
        before, after = await self._known(a), await self._known(b)
        walk = self._reading.walk()
        return difference(await self._plain(before, walk), await self._plain(after, walk))

    async def verify(self) -> Verification:
        """Look through the chain, the log and the states for anything that was changed or lost.

        Reads the session's whole log, and every state that a caller gave.
        """
        return await verified(self._reading)

    async def _plain(self, checkpoint: Checkpoint, walk: Walk) -> Any:
        """Return a checkpoint's state as JSON has it."""
        reading = self._reading
        if isinstance(checkpoint.state, Captured):
            return await walk.at(checkpoint.event_seq)
        return decode(await read_bytes(reading.store, reading.key.tenant, checkpoint.state))

    async def _known(self, id: int) -> Checkpoint:
        chain = await self._reading.chain()
        found = chain.by_id.get(id)
        if found is None:
            gone = "was pruned" if chain.had(id) else "was never made"
            message = (
                f"session {self._reading.key} has no checkpoint {id}: it {gone}; "
                "checkpoints.states() lists those that there are"
            )
            raise ConfigError(message, key=str(self._reading.key), checkpoint=id)
        return found

    async def _sound(self, id: int) -> Checkpoint:
        """Return a checkpoint that is as it was made, and so is what it is of."""
        found = await self._known(id)
        bad = [one for one in problems_of((await self._reading.chain()).links) if one.id == id]
        bad += await state_problems(self._reading, found)
        if bad:
            what = "; ".join(one.what for one in bad)
            message = (
                f"checkpoint {id} of session {self._reading.key} cannot be gone back to: {what}; "
                "nothing was changed"
            )
            raise CorruptRecordError(message, key=str(self._reading.key), checkpoint=id)
        return found
