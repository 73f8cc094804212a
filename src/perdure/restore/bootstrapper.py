"""The strategy of a restore: the cached context if it is valid, else a rebuild; then repairs.

The session restored its working context when it was opened: from the snapshot and the log after it.
Here the context is checked against the agent: whose snapshot it is, which system prompt it was made
with, and whether a provider would accept it. A valid cache is read, nothing is retrieved. Without
one the context is rebuilt from long-term memory and the raw tail. Only the difference from the log
is appended, and no counter changes.

The rules of a repair are those of rendering (`perdure.providers`): each tool call has one result,
right after the message with the call, and each result has its call. Rendering applies them each
time, so a bad log never reaches a provider; a repair makes them durable. It is appended, as made-up
results or as a context that replaces the previous one; no message is rewritten. It is
deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, final

import msgspec

from perdure._lib.options import Options
from perdure.errors import ConfigError, InvalidArgumentError
from perdure.memory.retrieval import Retriever
from perdure.memory.traces import BEGIN
from perdure.providers.tool_pairs import Dangling, PairedHistory, paired
from perdure.records.messages import Message
from perdure.restore.rebuild import (
    CompactionSnapshotBuilder,
    prompt_sha256,
    system_prompt_of,
)
from perdure.restore.report import RestoreStep, Source
from perdure.restore.serializer import WorkingContextSnapshotSerializer

PromptPolicy = Literal["replace", "rebuild", "keep", "error"]
"""The policy for an agent whose system prompt differs from the one that the context was made with:
replace it, rebuild the context, keep the old one, or raise."""


class WorkingContextSnapshotBootstrapOptions(Options, frozen=True, kw_only=True):
    """Options for restoring a working context.

    Args:
        max_episodic: How many episodes a rebuild includes.
        max_semantic: How many facts a rebuild includes.
        raw_tail_turns: How many turns a rebuild keeps raw; None for all that are not in
            long-term memory yet and fit the context.
        system_prompt_policy: What to do about a changed system prompt.
        dangling_calls: What to do about tool calls without results.
        rebuild: Rebuild the context even if the cache is valid.
        strict: Raise for a session with an unusable document, instead of rebuilding it.

    Raises:
        ConfigError: A value is invalid.

    """

    max_episodic: int = 3
    max_semantic: int = 20
    raw_tail_turns: int | None = None
    system_prompt_policy: PromptPolicy = "replace"
    dangling_calls: Dangling = "interrupted"
    rebuild: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("max_episodic", "max_semantic", "raw_tail_turns"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidArgumentError(
                    f"restore: invalid {name}={value!r}: it must be from 0 up",
                    option=name,
                    value=value,
                )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InvalidArgumentError(
                    f"restore: {name}={getattr(self, name)!r}: choose {', '.join(choices)}",
                    option=name,
                )


_CHOICES = {
    "system_prompt_policy": ("replace", "rebuild", "keep", "error"),
    "dangling_calls": ("interrupted", "drop", "keep"),
}


class Bootstrapped(msgspec.Struct, frozen=True):
    """The result of a bootstrap."""

    source: Source
    steps: tuple[RestoreStep, ...] = ()
    system_prompt: str | None = None
    """The prompt that the context has now: the stored one if none was given."""


class SnapshotStore(Protocol):
    """The storage of the snapshot."""

    async def exists(self, agent_id: str) -> bool:
        """Return whether there is a snapshot."""

    async def read(self, agent_id: str) -> dict[str, Any] | None:
        """Return the snapshot, None if there is none."""


class RestorableMemory(Protocol):
    """The part of a memory manager that the bootstrapper needs."""

    @property
    def agent_id(self) -> str:
        """The agent's id."""

    @property
    def restored_from(self) -> Source:
        """The source of the working context when the session was opened.

        With "snapshot" and no messages, the manager is filled from the snapshot.
        """

    @property
    def system_prompt_sha256(self) -> str | None:
        """The hash of the prompt that the context was made with, if known."""

    @property
    def snapshot_was_written(self) -> bool:
        """True if the cache was ever written."""

    @property
    def working_context_snapshot_store(self) -> SnapshotStore:
        """The storage of the snapshot."""

    @property
    def retriever(self) -> Retriever:
        """The retriever of memories."""

    def get_working_context_messages(self) -> list[Message]:
        """Return the working context."""

    async def get_raw_tail(
        self, tail_turns: int | None, exclude_turn_id: str | None = None
    ) -> Sequence[Message]:
        """Return the newest turns' messages."""

    async def reset_working_context_snapshot(
        self, messages: Sequence[Message], *, system_prompt: str | None, reason: str
    ) -> None:
        """Replace the working context, durably."""

    async def append_repairs(self, messages: Sequence[Message]) -> None:
        """Append made-up results, durably."""


@final
class WorkingContextSnapshotBootstrapper:
    """Restore an agent's working context.

    Args:
        serializer: Validates the snapshot.
        builder: Rebuilds a context.

    """

    def __init__(
        self,
        serializer: WorkingContextSnapshotSerializer | None = None,
        builder: CompactionSnapshotBuilder | None = None,
    ) -> None:
        self._serializer = serializer or WorkingContextSnapshotSerializer()
        self._builder = builder or CompactionSnapshotBuilder()

    async def bootstrap(
        self,
        memory_manager: RestorableMemory,
        system_prompt: str,
        options: WorkingContextSnapshotBootstrapOptions,
    ) -> Bootstrapped:
        """Make the working context ready for the next call of the model.

        Raises:
            ConfigError: The system prompt has changed, and the policy is "error".
            StoreUnavailableError: The store cannot be reached.

        """
        memory = memory_manager
        held = current = tuple(memory.get_working_context_messages())
        prompt, changed = _prompt(memory, current, system_prompt, options)
        steps: list[RestoreStep] = []
        rebuild = options.rebuild or (changed and options.system_prompt_policy == "rebuild")
        cached = None if rebuild else await self._cached(memory, steps)
        if cached is not None and not held and memory.restored_from == "snapshot":
            # No session has filled this manager: the cache is its context.
            current = self._serializer.deserialize(cached)[0].messages
            prompt, changed = _prompt(memory, current, system_prompt, options)
            if changed and options.system_prompt_policy == "rebuild":
                cached, steps, current = None, [], held
        if cached is not None:
            source: Source = "catch_up" if memory.restored_from == "catch_up" else "snapshot"
            target = _with_prompt(current, prompt)
        else:
            bundle = await memory.retriever.retrieve(options.max_episodic, options.max_semantic)
            tail = await memory.get_raw_tail(options.raw_tail_turns)
            target = self._builder.build(prompt or "", bundle, tail)
            had = current or tail or bundle.episodic or bundle.semantic
            source = "rebuild" if had else "fresh"
            what = f"{len(bundle.episodic)} episodes, {len(bundle.semantic)} facts, {len(tail)} raw"
            steps.append(RestoreStep("rebuilt", f"from {what} messages"))
        if changed:
            steps.append(RestoreStep("system prompt", options.system_prompt_policy))
        mended = paired(target, options.dangling_calls)
        steps.extend(repair_steps(mended))
        # A hash that was never stored is stored with the first context that is written.
        await apply_repair(memory, held, target, mended, prompt)
        return Bootstrapped(source, tuple(steps), prompt)

    async def _cached(
        self, memory: RestorableMemory, steps: list[RestoreStep]
    ) -> dict[str, Any] | None:
        """Return the snapshot if it is valid; add a step that says what was found."""
        store, agent_id = memory.working_context_snapshot_store, memory.agent_id
        if not await store.exists(agent_id):
            steps.append(
                RestoreStep("missing", "the snapshot")
                if memory.snapshot_was_written
                else RestoreStep("no snapshot", "yet: it comes with the first fold")
            )
            return None
        payload = await store.read(agent_id)
        if payload is None or not self._serializer.validate(payload, agent_id):
            steps.append(RestoreStep("invalid", "the snapshot"))
            return None
        if memory.restored_from in {"rebuild", "fresh"}:
            # Folded since: the session's own context was made from the log, and is equivalent.
            steps.append(RestoreStep("read", "the context, as the session has it"))
        else:
            steps.append(RestoreStep("read", "the snapshot, caught up with the log"))
        return payload


async def apply_repair(
    memory: RestorableMemory,
    current: tuple[Message, ...],
    target: tuple[Message, ...],
    mended: PairedHistory,
    prompt: str | None,
) -> None:
    """Make a context that is *current* the one that mends *target*."""
    messages = mended.messages
    if messages == current:
        return
    # Results at its end are all that it lacks: the context itself stays.
    if target == current and (made_up := mended.appended):
        await memory.append_repairs(made_up)
        return
    reason = "restore" if current else BEGIN
    await memory.reset_working_context_snapshot(messages, system_prompt=prompt, reason=reason)


def _prompt(
    memory: RestorableMemory,
    current: Sequence[Message],
    system_prompt: str,
    options: WorkingContextSnapshotBootstrapOptions,
) -> tuple[str | None, bool]:
    """Return the prompt to use, and whether it has changed."""
    had = system_prompt_of(current)
    if not system_prompt:
        return had, False  # no prompt given: keep the stored one
    known = memory.system_prompt_sha256
    if known is None and had is not None:
        known = prompt_sha256(had)
    changed = bool(current) and known != prompt_sha256(system_prompt)
    if not changed:
        return system_prompt, False
    policy = options.system_prompt_policy
    if policy == "error" and known is not None:
        raise ConfigError(
            f"the system prompt of {memory.agent_id!r} is not the one that its context was made "
            "with: give that one, or choose system_prompt_policy replace, rebuild or keep",
            agent=memory.agent_id,
        )
    if policy == "keep":
        return had, True
    return system_prompt, True


def _with_prompt(messages: Sequence[Message], prompt: str | None) -> tuple[Message, ...]:
    """Return the messages with another system prompt; the same object if it has not changed."""
    if system_prompt_of(messages) == prompt:
        return tuple(messages)
    others = messages[1:] if messages and messages[0].role == "system" else messages
    return (*((Message.system(prompt),) if prompt else ()), *others)


def repair_steps(mended: PairedHistory) -> list[RestoreStep]:
    """Return the steps of a repair."""
    counts = {
        "closed": (mended.closed, "tool calls as interrupted"),
        "dropped": (mended.dropped, "tool calls without a result"),
        "left out": (mended.orphans, "results without a call"),
        "moved": (mended.moved, "late results to their calls"),
        "emptied": (mended.empty, "answers with nothing in them"),
        "joined": (mended.joined, "parts of replies that were apart"),
    }
    return [RestoreStep(what, f"{count} {of}") for what, (count, of) in counts.items() if count]
