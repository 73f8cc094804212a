"""Planning a restore: the very strategy of a restore, over a memory that only takes notes.

A plan reads what a restore reads, all documents besides, and writes nothing; it needs no
lease. Doing it is a second step, and fails if the session has moved on since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from perdure.errors import InvalidArgumentError, StalePlanError
from perdure.memory.retrieval import Retriever
from perdure.memory.traces import newest_turns
from perdure.providers.formats import FORMATS
from perdure.providers.tool_pairs import paired
from perdure.records.media import decode_held
from perdure.records.messages import Message, encode_message
from perdure.restore.bootstrapper import (
    Bootstrapped,
    WorkingContextSnapshotBootstrapOptions,
    WorkingContextSnapshotBootstrapper,
    apply_repair,
    repair_steps,
)
from perdure.restore.ladder import restore, validated
from perdure.restore.rebuild import context_entry, prompt_sha256, raw_part, system_prompt_of
from perdure.restore.report import RestorePlan, planned_documents, stripped_for
from perdure.restore.serializer import WorkingContextSnapshotSerializer
from perdure.restore.snapshot_store import WorkingContextSnapshotStore
from perdure.session.session import SessionView
from perdure.store import all_records

if TYPE_CHECKING:
    from perdure.providers.context_fit import Format
    from perdure.records.keys import SessionKey
    from perdure.restore.report import Source
    from perdure.session.base import SessionBase
    from perdure.session.contents import Contents
    from perdure.session.runtime import Runtime
    from perdure.session.stored import SessionStore


async def plan_of(
    runtime: Runtime,
    key: SessionKey,
    *,
    target: Format | None = None,
    system_prompt: str | None = None,
    options: WorkingContextSnapshotBootstrapOptions | None = None,
) -> RestorePlan:
    """Return what a restore of a session would do.

    With a system prompt or options it is an agent's restore; else the session's own, which
    mends nothing by itself, and what would have to be mended.

    Raises:
        InvalidArgumentError: There is no such target.
        ConfigError: The system prompt has changed, and the options' policy is "error".
        CorruptRecordError: The log is damaged before its tail; or a document is, and the
            options are strict.

    """
    if target is not None and target not in FORMATS:
        raise InvalidArgumentError(
            f"target {target!r} is unknown: choose None or {', '.join(FORMATS)}",
            option="target",
            value=target,
        )
    as_agent = options is not None or system_prompt is not None
    options = options or WorkingContextSnapshotBootstrapOptions()
    store = runtime.store
    restored = await restore(
        store, key, context_bytes=runtime.limits.context_bytes, strict=options.strict
    )
    have = validated(await store.read_documents(key, None), key)
    after = min((document.as_of_seq for document in have.found.values()), default=0)
    tail = await all_records(store.read_log(key, after=after)) if have.found else []
    contents = SessionView(runtime.filled, runtime.registry, restored)._contents
    memory = _Noting(store, contents)
    if as_agent:
        serializer = WorkingContextSnapshotSerializer(contents._registry)
        bootstrapper = WorkingContextSnapshotBootstrapper(serializer)
        done = await bootstrapper.bootstrap(memory, system_prompt or "", options)
    else:
        context = memory.messages
        mended = paired(context)
        prompt = system_prompt_of(mended.messages)
        await apply_repair(memory, context, context, mended, None)
        done = Bootstrapped(restored.report.source, tuple(repair_steps(mended)), prompt)
    messages = memory.messages
    return RestorePlan(
        key=key,
        source=done.source,
        head=restored.head,
        documents=planned_documents(have, tail),
        steps=(*restored.report.steps, *done.steps),
        records_read=restored.report.records_read,
        target=target,
        stripped=() if target is None else stripped_for(messages, target),
        messages=messages,
        appended=memory.appended,
        replaces=memory.replaces,
        system_prompt=done.system_prompt,
        settled=restored.report.settled,
    )


def carry_out(session: SessionBase, plan: RestorePlan) -> None:
    """Append to a session what a plan says.

    Raises:
        StalePlanError: The plan is of another session, or of another moment.

    """
    key, version = session._tracked.key, session._tracked.version
    if plan.key != key or plan.head != version:
        raise StalePlanError(
            f"the plan is of session {plan.key} at record {plan.head}, and session {key} "
            f"is at {version}: save it, and plan again",
            key=str(key),
            head=plan.head,
            version=version,
        )
    if plan.appended and not plan.replaces:
        types = session._runtime.registry
        session._accept(tuple(encode_message(message, types) for message in plan.appended))
    elif plan.replaces:
        context, prompt = session._contents.context, plan.system_prompt
        entry = context_entry(
            plan.messages,
            epoch_id=context.epoch_id,
            last_compaction_ts=context.last_compaction_ts,
            system_prompt_sha256=prompt_sha256(prompt) if prompt else None,
            reason="restore",
            types=session._runtime.registry,
        )
        session._accept((entry,))


@final
class _Noting:
    """A session's memory as the bootstrapper needs it; what it would write is noted."""

    def __init__(self, store: SessionStore, contents: Contents) -> None:
        self._store = store
        self._contents = contents
        self.agent_id: str = contents.key.agent
        self.restored_from: Source = contents.report.source
        self.snapshot_was_written: bool = contents.was_folded
        self.system_prompt_sha256: str | None = contents.context.system_prompt_sha256
        self.messages: tuple[Message, ...] = tuple(contents.stored())
        self.appended: tuple[Message, ...] = ()
        self.replaces: bool = False
        self.retriever: Retriever = Retriever(contents.lines)
        self.working_context_snapshot_store: WorkingContextSnapshotStore = (
            WorkingContextSnapshotStore(store, contents.key)
        )

    def get_working_context_messages(self) -> list[Message]:
        return self._contents.stored()

    async def get_raw_tail(
        self, tail_turns: int | None, exclude_turn_id: str | None = None
    ) -> Sequence[Message]:
        if tail_turns is None:
            return raw_part(self._contents.stored())
        turns = await newest_turns(
            self._store, self._contents.key, tail_turns, exclude=exclude_turn_id
        )
        payloads = [payload for turn in turns for payload in turn.messages]
        return [decode_held(payload, self._contents._registry) for payload in payloads]

    async def reset_working_context_snapshot(
        self, messages: Sequence[Message], *, system_prompt: str | None, reason: str
    ) -> None:
        self.messages, self.replaces = tuple(messages), True

    async def append_repairs(self, messages: Sequence[Message]) -> None:
        self.messages, self.appended = (*self.messages, *messages), tuple(messages)
