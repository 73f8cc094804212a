"""Checkpoints of the Agent Framework's workflows in a store of perdure: `PerdureCheckpointStorage`.

A storage is one session. Its log has the checkpoints in the order of the saves, each as what it
changes of the one that it continues, so a state that grows costs what was added. The framework's
own encoder decides what a checkpoint may hold, and its own restricted decoder reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from math import copysign
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from perdure._lib.lazy import from_extra
from perdure.adapters.envelopes import SdkEnvelope
from perdure.adapters.items import AdapterManager, LogFold, SessionAdapter
from perdure.adapters.versions import warn_untested
from perdure.errors import CorruptRecordError, LeaseHeldError, SessionNotFoundError
from perdure.records.json import encode
from perdure.records.keys import session_key
from perdure.records.values import is_plain
from perdure.session.internals import LogPlace, drop_history, place_of
from perdure.session.manager import SessionManager
from perdure.session.session import Session

with from_extra(
    "agent_framework",
    used_by="PerdureCheckpointStorage",
    name="the Agent Framework",
    extra="agent-framework",
):
    import agent_framework as sdk
    from agent_framework._workflows import _checkpoint_encoding as encoding

if TYPE_CHECKING:
    from perdure.lease import OnHeld
warn_untested("agent-framework-core")

SDK: Final = "agent-framework"
SHAPE: Final = 1
"""The version of what is stored here."""
SESSION: Final = "checkpoints"
"""The session of an id that has its checkpoints; the default one is its conversation."""
SLACK: Final = 16
"""Dead records that a log may have beyond the number of its checkpoints, before it is rewritten."""


class CheckpointRecord(SdkEnvelope, frozen=True, omit_defaults=True):
    """One record of a storage."""

    id: str = ""
    """Which checkpoint,"""
    base: str | None = None
    """the one that it is a change of,"""
    change: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """and the change, as JSON or as a string of JSON that has more than that; none: it is deleted.
    """
    reset: bool = False
    """Whether nothing counts that was stored before."""


class _Checkpoints:
    """Stored form of all checkpoints."""

    def __init__(self) -> None:
        self.trees: dict[str, Any] = {}
        """By id, the oldest first. Nothing in them is ever changed: they share what is equal."""
        self.records: int = 0

    def add(self, stored: CheckpointRecord) -> None:
        """Take a record in."""
        if stored.reset:
            self.trees, self.records = {}, 0
        self.records += 1
        if isinstance(stored.change, msgspec.Raw):
            change = json.loads(bytes(stored.change))
            change = json.loads(change) if isinstance(change, str) else change
            if stored.base is not None and stored.base not in self.trees:
                message = f"checkpoint {stored.id} continues {stored.base}, which is not stored"
                raise CorruptRecordError(message, value=stored.base)
            self.trees[stored.id] = changed(self.trees.get(stored.base or ""), change)
        else:
            self.trees.pop(stored.id, None)

    def of(self, workflow_name: str) -> dict[str, Any]:
        """Return those of a workflow."""
        stored = self.trees.items()
        return {id_: tree for id_, tree in stored if tree["workflow_name"] == workflow_name}

    def latest(self, workflow_name: str) -> Any | None:
        """Return the newest one that no other continues."""
        trees = self.of(workflow_name)
        continued = {tree["previous_checkpoint_id"] for tree in trees.values()}
        ends = [id_ for id_ in trees if id_ not in continued]
        newest = next(reversed(ends or list(trees)), None)  # ids are what callers say: a circle
        return None if newest is None else trees[newest]


@final
class PerdureCheckpointStorage(SessionAdapter):
    """A ``CheckpointStorage`` of the Agent Framework in any store of perdure.

    Its checkpoints are one session, as those of a ``FileCheckpointStorage`` are one folder: give
    each conversation a storage of its own. A save returns once it is durable. Reading takes no
    lease; a write asks the process that has the session for it, and the session is given back when
    it has been idle for some minutes, or by `aclose`.

    Args:
        session_id: The id of the session in the store; the conversation of a
            `PerdureHistoryProvider` may have the same.
        sessions: Where it is kept: what ``perdure.connect(url)`` returns, once that is open. None
            for a manager of its own: see `from_url`.
        session: Which of the id's sessions.
        allowed_checkpoint_types: Your classes that may be read back, each as ``"module:qualname"``;
            the framework's own always are, and those that ``register_checkpoint_type`` was given.
        tenant: Whose it is, where customers share a store.
        owner: Who it belongs to: a label, which a session that has one keeps.
        tags: Labels for listing.
        on_held: What a write does if another process holds the session: ``"handover"`` asks for it,
            ``"steal"`` waits for it to be released or to expire, ``"raise"`` raises at once.
        wait: Seconds to wait for another process.

    Raises:
        InvalidArgumentError: An id is invalid, or ``sessions`` is no manager.

    """

    def __init__(
        self,
        session_id: str,
        sessions: SessionManager | None,
        *,
        session: str = SESSION,
        allowed_checkpoint_types: Sequence[str] = (),
        tenant: str = "",
        owner: str | None = None,
        tags: Sequence[str] = (SDK,),
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        self._connection = AdapterManager(
            sessions,
            instead="PerdureCheckpointStorage.from_url(session_id, url)",
            tenant=tenant,
            owner=owner,
            tags=tags,
            on_held=on_held,
            wait=wait,
        )
        self._key = session_key(session_id, session, tenant)
        self._allowed = frozenset(allowed_checkpoint_types)
        self._stored = LogFold(_Checkpoints, CheckpointRecord, sdk=SDK, newest=SHAPE)
        self._place: LogPlace | None = None
        """Where the log ended when it was read or written here last."""

    # What the framework calls

    async def save(self, checkpoint: sdk.WorkflowCheckpoint) -> str:
        """Store a checkpoint, or what one of its id is from now on; return its id once durable.

        Raises:
            WorkflowCheckpointException: It cannot be encoded, or could not be read back; nothing
                was stored.
            NotStorableError: A text in it is not valid Unicode; nothing was stored.
            TooLargeError: What it changes is larger than the limit for a record, and the store
                keeps no blobs; nothing was stored.
            LeaseHeldError: Another process keeps holding the session.
            LeaseLostError: It was deleted since it was read here, or another process has taken it
                over meanwhile, which the error names.

        """
        tree = self._encoded(checkpoint)

        async def append(session: Session) -> bool:
            stored = await self._stored.read_to_append(session)
            if stored is None:
                return False
            return await self._stored.append(session, _record(stored, tree))

        known = () if self._place is None else (self._place,)
        change = self._connection.change(self._key, append, of=known)
        self._place = await change
        return checkpoint.checkpoint_id

    async def load(self, checkpoint_id: str) -> sdk.WorkflowCheckpoint:
        """Return a checkpoint, which shares nothing with what is stored.

        Raises:
            WorkflowCheckpointException: There is none of that id, or it has a class that is not
                allowed. So do the other methods that return checkpoints.

        """
        tree = (await self._read()).trees.get(checkpoint_id)
        if tree is None:
            message = f"No checkpoint found with ID {checkpoint_id} in session {self._key}"
            raise sdk.WorkflowCheckpointException(message)
        return self._decoded(tree)

    async def list_checkpoints(self, *, workflow_name: str) -> list[sdk.WorkflowCheckpoint]:
        """Return the checkpoints of a workflow in the order in which they were first saved."""
        return list(map(self._decoded, (await self._read()).of(workflow_name).values()))

    async def list_checkpoint_ids(self, *, workflow_name: str) -> list[str]:
        """Return the ids of a workflow's checkpoints, in the same order."""
        return list((await self._read()).of(workflow_name))

    async def get_latest(self, *, workflow_name: str) -> sdk.WorkflowCheckpoint | None:
        """Return the newest checkpoint of a workflow that no other one continues; None without one.

        The order of the saves decides, not a clock.
        """
        tree = (await self._read()).latest(workflow_name)
        return None if tree is None else self._decoded(tree)

    async def delete(self, checkpoint_id: str) -> bool:
        """Delete a checkpoint, and return whether there was one, once that is durable.

        The others stay as they are. When most of the log belongs to deleted ones, it is rewritten
        without them.

        Raises:
            LeaseHeldError: Another process keeps holding the session.

        """
        if checkpoint_id not in (await self._read()).trees:
            return False
        was_there, below = False, 0

        async def append(session: Session) -> bool:
            nonlocal was_there, below
            stored = await self._stored.read_to_append(session)
            if stored is None:
                return False
            was_there, below = checkpoint_id in stored.trees, 0
            if was_there:
                records = [CheckpointRecord(SDK, SHAPE, checkpoint_id)]
                if stored.records > 2 * len(stored.trees) + SLACK:
                    records, below = _anew(stored, checkpoint_id), session.version + 1
                return await self._stored.append(session, *records)
            return True

        try:
            self._place = await self._connection.change(self._key, append, create=False)
        except SessionNotFoundError:
            return False
        if below:
            sessions = await self._connection.manager()
            # Another process may have taken the session by now: the next time removes these, too.
            with suppress(LeaseHeldError):
                await drop_history(sessions, self._key, below, wait=self._connection.wait)
        return was_there

    # Inside

    async def _read(self) -> _Checkpoints:
        source = await self._connection.peek(self._key)
        self._place = None if source is None else place_of(source)
        return _Checkpoints() if source is None else await self._stored.read(source)

    def _encoded(self, checkpoint: sdk.WorkflowCheckpoint) -> Any:
        """Return a checkpoint as JSON has it."""
        what = f"checkpoint {checkpoint.checkpoint_id}"
        try:
            encoded = encoding.encode_checkpoint_value(checkpoint.to_dict())
            tree = json.loads(json.dumps(encoded))
        except Exception as error:  # a class of the program's own may raise any
            message = f"{what} cannot be stored ({type(error).__name__}: {error})"
            raise sdk.WorkflowCheckpointException(message) from error
        self._decoded(tree)
        return tree

    def _decoded(self, tree: Any) -> sdk.WorkflowCheckpoint:
        plain = encoding.decode_checkpoint_value(tree, allowed_types=self._allowed)
        return sdk.WorkflowCheckpoint.from_dict(plain)


# Checkpoints as changes of others


def _record(stored: _Checkpoints, tree: Any) -> CheckpointRecord:
    """Return the record that adds a checkpoint, or replaces one."""
    base: str | None = tree["previous_checkpoint_id"]
    if base not in stored.trees:
        base = next(reversed(stored.trees), None)
    change = [tree] if base is None else change_of(stored.trees[base], tree) or [{}, []]
    # What is no JSON for others, such as NaN, is a string for them.
    data = encode(change) if is_plain(change) else encode(json.dumps(change))
    return CheckpointRecord(SDK, SHAPE, tree["checkpoint_id"], base, msgspec.Raw(data))


def _anew(stored: _Checkpoints, deleted: str) -> list[CheckpointRecord]:
    """Return records that replace all before them: those of the checkpoints but one."""
    fresh = _Checkpoints()
    records = [CheckpointRecord(SDK, SHAPE, reset=True)]
    for id_, tree in stored.trees.items():
        if id_ != deleted:
            records.append(_record(fresh, tree))
            fresh.add(records[-1])
    return records


def change_of(before: Any, after: Any) -> list[Any] | None:
    """Return how JSON becomes other JSON; None if it is the same.

    ``[value]`` replaces it, ``[{key: change, …}, [key, …]]`` changes and removes items of a dict,
    ``[n, [value, …]]`` keeps the first n items of a list and adds others.

    >>> change_of({"a": [1, 2], "b": 1}, {"a": [1, 2, 3]})
    [{'a': [2, [3]]}, ['b']]
    """
    if type(before) is dict and type(after) is dict:
        kept = [key for key in before if key in after]
        if [*kept, *(key for key in after if key not in before)] != list(after):
            return [after]  # in another order
        changes = {}
        for key, value in after.items():
            change = change_of(before[key], value) if key in before else [value]
            if change is not None:
                changes[key] = change
        removed = [key for key in before if key not in after]
        return [changes, removed] if changes or removed else None
    if type(before) is list and type(after) is list:
        pairs = enumerate(zip(before, after, strict=False))
        alike = min(len(before), len(after))
        keep = next((at for at, both in pairs if change_of(*both) is not None), alike)
        return None if keep == len(before) == len(after) else [keep, after[keep:]]
    is_same = type(before) is type(after) and before == after
    if is_same and isinstance(after, float):
        is_same = copysign(1, before) == copysign(1, after)  # 0.0 is equal to -0.0
    return None if is_same else [after]


def changed(before: Any, change: list[Any]) -> Any:
    """Return what `change_of` has described.

    >>> changed({"a": [1, 2], "b": 1}, [{"a": [2, [3]]}, ["b"]])
    {'a': [1, 2, 3]}
    """
    if len(change) == 1:
        return change[0]
    if isinstance(change[0], int):
        return [*before[: change[0]], *change[1]]
    changes, removed = change
    after = {key: value for key, value in before.items() if key not in removed}
    for key, inner in changes.items():
        after[key] = changed(after.get(key), inner)
    return after
