"""A step store of Pydantic AI's harness in a store of perdure: `PerdureStepStore`.

A run is one session, whose log has the run's registrations, events, snapshots and tool effects in
the order of the calls. A snapshot repeats the history of the one before: it is stored as how many
messages it begins with alike, and the bytes of those that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import pydantic

from perdure._lib.lazy import import_extra
from perdure.adapters.envelopes import SdkEnvelope
from perdure.adapters.exact import as_value, dumped_by, loaded_by, not_json_at, of_value, shown
from perdure.adapters.items import AdapterManager, LogFold, Recent, StoreAdapter, named_key
from perdure.adapters.versions import require_readable, unreadable, warn_untested
from perdure.errors import NotStorableError
from perdure.records.keys import SessionKey
from perdure.session.internals import LogPlace
from perdure.session.manager import SessionManager
from perdure.session.session import Session

if TYPE_CHECKING:
    from perdure.lease import OnHeld

_ABOUT: Final = {
    "used_by": "PerdureStepStore",
    "name": "Pydantic AI's harness",
    "extra": "pydantic-ai-harness",
}
sdk: Any = import_extra("pydantic_ai_harness.step_persistence", **_ABOUT)
sdk_messages: Any = import_extra("pydantic_ai.messages", **_ABOUT)
warn_untested("pydantic-ai-harness")

SDK: Final = "pydantic-ai-harness"
SHAPE: Final = 1
"""The version of what is stored here."""
SESSION: Final = "steps"
"""The session of an id that is its run; the default one may be a conversation."""
MESSAGES: Final[Any] = sdk_messages.ModelMessagesTypeAdapter
KINDS: Final[dict[str, Any]] = {
    "run": pydantic.TypeAdapter(sdk.RunRecord),
    "event": pydantic.TypeAdapter(sdk.StepEvent),
    "effect": pydantic.TypeAdapter(sdk.ToolEffectRecord),
    "snapshot": pydantic.TypeAdapter(sdk.ContinuableSnapshot),
}
"""Contents of a record, by its field."""
KNOWN: Final = 10_000
"""Number of runs that are remembered as written here."""


class StepRecord(SdkEnvelope, frozen=True):
    """One record of a run."""

    kind: str
    """One of `KINDS`."""
    value: msgspec.Raw
    """The SDK's own, as JSON, or as its text; a snapshot without its messages."""
    keep: int = 0
    """Number of messages that a snapshot shares with the one before,"""
    add: tuple[msgspec.Raw, ...] = ()
    """and those that follow."""


class _Run:
    """Stored form of a run."""

    def __init__(self) -> None:
        self.record: bytes | None = None
        self.events: list[bytes] = []
        self.snapshots: list[tuple[bytes, tuple[bytes, ...]]] = []
        """Each with its messages."""
        self.effects: dict[str, bytes] = {}
        self._keys: set[tuple[str, str]] = set()
        self._sequence: int = -1

    def knows(self, kind: str, key: str | None) -> bool:
        """Whether an append with an idempotency key is a repetition, or older than what is here."""
        if key is None:
            return False
        return (kind, key) in self._keys or (
            kind == "snapshot" and -1 < _sequence_of(key) < self._sequence
        )

    def add(self, stored: StepRecord) -> None:
        """Take a record in."""
        value = of_value(bytes(stored.value))
        about = shown(value)
        key = about.get("idempotency_key")
        if key is not None and stored.kind in ("event", "snapshot"):
            self._keys.add((stored.kind, key))
        if stored.kind == "run":
            self.record = value
        elif stored.kind == "event":
            self.events.append(value)
        elif stored.kind == "effect":
            self.effects[about["tool_call_id"]] = value
        else:
            before = self.messages()[: stored.keep]
            self.snapshots.append((value, (*before, *map(of_value, map(bytes, stored.add)))))
            self._sequence = max(self._sequence, _sequence_of(key or ""))

    def messages(self) -> tuple[bytes, ...]:
        """Return those of the newest snapshot."""
        return self.snapshots[-1][1] if self.snapshots else ()


def _sequence_of(key: str) -> int:
    """Return the number that the SDK's keys of snapshots begin with, or -1."""
    number, colon, _ = key.partition(":")
    try:
        return max(int(number), -1) if colon else -1
    except ValueError:
        return -1


@final
class PerdureStepStore(StoreAdapter):
    """A ``StepStore`` of Pydantic AI's harness in any store of perdure.

    Each run is a session, and a call returns once what it stores is durable. Reading takes no
    lease; a write asks the process that has the run's session for it.

    Args:
        sessions: Where they are kept: what ``perdure.connect(url)`` returns, once that is open.
            None for a manager of its own: see `from_url`.
        tenant: Whose they are, where customers share a store.
        owner: Who its runs belong to: a label, by which ``sessions.forget(owner=…)`` finds them.
        tags: Labels for listing.
        on_held: What a write does if another process holds the session: ``"handover"`` asks for it,
            ``"steal"`` waits for it to be released or to expire, ``"raise"`` raises at once.
        wait: Seconds to wait for another process.

    Raises:
        InvalidArgumentError: ``sessions`` is no manager.

    """

    def __init__(
        self,
        sessions: SessionManager | None,
        *,
        tenant: str = "",
        owner: str | None = None,
        tags: Sequence[str] = (SDK,),
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        self._connection = AdapterManager(
            sessions,
            instead="PerdureStepStore.from_url(url)",
            tenant=tenant,
            owner=owner,
            tags=tags,
            on_held=on_held,
            wait=wait,
        )
        self._runs = LogFold(_Run, StepRecord, sdk=SDK, newest=SHAPE)
        self._written: Recent[SessionKey, LogPlace] = Recent(KNOWN)
        """Ends of the logs of runs that were last written here."""

    # What the SDK calls

    async def register_run(self, record: Any) -> None:
        """Store what a run is, and return once it is durable; the newest registration counts.

        Raises:
            NotStorableError: It is not JSON, or could not be read back. So do the other methods
                that store something.
            TooLargeError: It is larger than the limit for a record. So do they.
            LeaseHeldError: Another process keeps holding the session. So do they.
            LeaseLostError: The run was deleted since it was registered: only by the others.

        """
        await self._append("run", record)

    async def get_run(self, *, run_id: str) -> Any | None:
        """Return what a run is; None if it was not registered."""
        run = await self._read(self._key(run_id))
        return None if run.record is None else _loaded("run", run.record)

    async def list_runs(
        self, *, parent_run_id: str | None = None, conversation_id: str | None = None
    ) -> list[Any]:
        """Return the runs, the oldest first; reads every run."""
        runs = []
        async for info in self._connection.listed():
            if info.key.session != SESSION:
                continue
            run = await self._read(info.key)
            if run.record is not None:
                record = _loaded("run", run.record)
                is_child = parent_run_id in (None, record.parent_run_id)
                if is_child and conversation_id in (None, record.conversation_id):
                    runs.append(record)
        return sorted(runs, key=lambda record: record.started_at)

    async def append_event(self, event: Any) -> None:
        """Store an event, unless one with its key is stored, and return once it is durable."""
        await self._append("event", event)

    async def list_events(self, *, run_id: str) -> list[Any]:
        """Return a run's events in the order in which they were stored."""
        run = await self._read(self._key(run_id))
        return [_loaded("event", event) for event in run.events]

    async def save_snapshot(self, snapshot: Any) -> None:
        """Store a snapshot, unless it is a repetition, and return once it is durable."""
        await self._append("snapshot", snapshot)

    async def latest_snapshot(
        self, *, run_id: str, include_interrupted: bool = False
    ) -> Any | None:
        """Return a run's newest complete snapshot, or the newest of all; None if there is none."""
        run = await self._read(self._key(run_id))
        for value, messages in reversed(run.snapshots):
            if include_interrupted or shown(value)["state"] == "complete":
                return _snapshot(value, messages)
        return None

    async def list_snapshots(self, *, run_id: str, include_interrupted: bool = False) -> list[Any]:
        """Return a run's snapshots in the order in which they were stored."""
        run = await self._read(self._key(run_id))
        found = [_snapshot(*each) for each in run.snapshots]
        return [each for each in found if include_interrupted or each.state == "complete"]

    async def record_tool_effect(self, record: Any) -> None:
        """Store what is known of a tool call's effect, and return once it is durable."""
        await self._append("effect", record)

    async def get_tool_effect(self, *, run_id: str, tool_call_id: str) -> Any | None:
        """Return what was stored last of a tool call's effect; None if nothing was."""
        effect = (await self._read(self._key(run_id))).effects.get(tool_call_id)
        return None if effect is None else _loaded("effect", effect)

    async def list_unresolved_tool_effects(self, *, run_id: str) -> list[Any]:
        """Return the effects of tool calls that have begun, and of which no end is known."""
        run = await self._read(self._key(run_id))
        effects = [_loaded("effect", effect) for effect in run.effects.values()]
        return [effect for effect in effects if effect.status == "started"]

    # Inside

    def _key(self, run_id: str) -> SessionKey:
        tenant = self._connection.tenant
        return named_key(run_id, SESSION, tenant, agent_is="run_id", session_is="session id")

    async def _read(self, key: SessionKey) -> _Run:
        source = await self._connection.peek(key)
        return _Run() if source is None else await self._runs.read(source)

    async def _append(self, kind: str, value: Any) -> None:
        """Append to a run's session, and return once it is durable."""
        key = self._key(value.run_id)
        plain, messages = _encoded(kind, value)
        # A run that goes on does not bring back what was deleted; one that is registered begins.
        written = None if kind == "run" else self._written.get(key)

        async def append(session: Session) -> bool:
            run = await self._runs.read_to_append(session)
            if run is None:
                return False
            if not run.knows(kind, getattr(value, "idempotency_key", None)):
                stored = _record(kind, plain, messages, run.messages())
                fresh = map(of_value, map(bytes, stored.add))
                read = partial(_messages_of, fresh)
                require_readable("the history of a run's snapshot", SDK, read)
                return await self._runs.append(session, stored)
            return True

        known = () if written is None else (written,)
        self._written.put(key, await self._connection.change(key, append, of=known), 1)


# What is stored


def _encoded(kind: str, value: Any) -> tuple[bytes, tuple[bytes, ...]]:
    """Return a value of the SDK's as JSON, and apart from it a snapshot's messages.

    Raises:
        NotStorableError: It is not JSON.

    """
    messages: list[Any] = []
    if kind == "snapshot":
        messages, value = value.messages, dataclasses.replace(value, messages=[])
    what = f"the {kind} of run {value.run_id!r}"
    try:
        plain = dumped_by(KINDS[kind], value)
        encoded = tuple([dumped_by(MESSAGES, [message])[1:-1] for message in messages])
    except ValueError as error:
        path, part = not_json_at({kind: value, "messages": messages}, "")
        path = path.removeprefix(".")
        message = f"{what}: the {type(part).__name__} at {path} is not JSON ({error})"
        raise NotStorableError(message, path=path, type=type(part).__name__) from error
    require_readable(what, SDK, partial(loaded_by, KINDS[kind], plain))
    return plain, encoded


def _messages_of(messages: Iterable[bytes]) -> Any:
    return loaded_by(MESSAGES, b"[%b]" % b",".join(messages))


def _record(
    kind: str, plain: bytes, messages: tuple[bytes, ...], before: tuple[bytes, ...]
) -> StepRecord:
    keep = 0
    if kind == "snapshot":
        pairs = enumerate(zip(messages, before, strict=False))
        size = min(len(messages), len(before))
        keep = next((at for at, (message, known) in pairs if message != known), size)
    add = tuple(map(msgspec.Raw, map(as_value, messages[keep:])))
    return StepRecord(SDK, SHAPE, kind, msgspec.Raw(as_value(plain)), keep, add)


def _loaded(kind: str, data: bytes) -> Any:
    try:
        return loaded_by(KINDS[kind], data)
    except pydantic.ValidationError as error:
        raise unreadable(f"a run's {kind}", SDK, error) from error


def _snapshot(value: bytes, messages: Sequence[bytes]) -> Any:
    try:
        history = _messages_of(messages)
    except pydantic.ValidationError as error:
        raise unreadable("the history of a run's snapshot", SDK, error) from error
    return dataclasses.replace(_loaded("snapshot", value), messages=history)
