"""``perdure ls`` and ``perdure show``: what is in a store. Both only read."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Annotated, Any, cast

import anyio
import msgspec
from cyclopts import Parameter, validators

from perdure.cli.access import existing, holder_of, managed, no_session, opened
from perdure.cli.audit import incomplete
from perdure.cli.checkpoints import checkpoint_of
from perdure.cli.output import (
    SessionOption,
    StoreOption,
    ago,
    clip,
    note,
    print_json,
    print_table,
    say,
    size,
)
from perdure.errors import ConfigError
from perdure.lineage.store import followed
from perdure.providers.context_fit import Format
from perdure.records.checkpoints import Checkpoint
from perdure.records.keys import DEFAULT_SESSION, SessionKey, require_filters
from perdure.records.manifest import Manifest
from perdure.records.messages import Message
from perdure.records.records import Record
from perdure.session.contents import HistoryItem
from perdure.session.fork import Fork
from perdure.session.manager import SessionManager
from perdure.session.session import SessionView
from perdure.store import LeaseState, SessionInfo, Store

_PLANNED = (
    *("source", "head", "documents", "steps", "records_read", "target", "stripped"),
    *("replaces", "settled", "is_sound"),
)
"""What is said of a plan as JSON: not the messages."""

PAGE = 500
PREVIEW = 96
MESSAGES = 20


def ls(
    prefix: str = "",
    *,
    owner: str | None = None,
    tag: str | None = None,
    tenant: str = "",
    after: str | None = None,
    after_session: str = DEFAULT_SESSION,
    limit: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 1000,
    waiting: bool = False,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """List the sessions of a store, in the order of their ids.

    The counts are those of a session's last fold, and so are owners and tags; `show` reads the
    log as well.

    Args:
        prefix: Only agents whose id begins with this.
        owner: Only sessions of this owner.
        tag: Only sessions with this tag.
        tenant: Whose sessions, where customers share a store.
        after: Begin behind this agent's session: the last one of the page before.
        after_session: Which of its sessions that was.
        limit: How many to list at most.
        waiting: List those for which a post waits instead, opened or not yet.

    """
    filters = {"tenant": tenant, "owner": owner, "tag": tag, "prefix": prefix}
    last = None if after is None else SessionKey(after, after_session, tenant)
    anyio.run(_ls_waiting if waiting else _ls, filters, last, limit, where)
    return 0


async def _ls(
    filters: dict[str, Any], after: SessionKey | None, limit: int, where: StoreOption
) -> None:
    async with opened(where.store) as store:
        sessions = await _list(store, filters, after, limit)
        location = store.location
    if where.json:
        print_json({"location": location, "sessions": [_listed(info) for info in sessions]})
    elif not sessions:
        say(f"no {'more ' * (after is not None)}sessions in {location}")
    else:
        now = time.time()
        columns = ("agent", "session", "turns", "records", "active", "title")
        print_table(columns, (_row(info, now) for info in sessions), right="turns records")
        damaged = sum(info.damaged for info in sessions)
        if damaged:
            say(
                f"what was folded of {damaged} of them is damaged: `perdure check --repair` makes "
                "it anew from the log"
            )


async def _list(
    store: Store, filters: dict[str, Any], after: SessionKey | None, limit: int
) -> list[SessionInfo]:
    sessions: list[SessionInfo] = []
    require_filters(**filters)
    while len(sessions) < limit:
        last = sessions[-1].key if sessions else after
        count = min(PAGE, limit - len(sessions))
        page = await store.sessions(**filters, after=last, limit=count)
        sessions += page
        if len(page) < count:
            break
    return sessions


async def _ls_waiting(
    filters: dict[str, Any], after: SessionKey | None, limit: int, where: StoreOption
) -> None:
    require_filters(**filters)
    if filters["owner"] is not None or filters["tag"] is not None:
        message = "--waiting goes without --owner and --tag: what nobody has opened has neither"
        raise ConfigError(message, option="waiting")
    async with opened(where.store) as store:
        keys = [key for key in await store.waiting() if _fits(key, filters, after)]
        known = [await store.head(key) > 0 for key in keys[:limit]]
        location = store.location
    pairs = list(zip(keys, known, strict=False))
    if where.json:
        waiting = [{**msgspec.structs.asdict(key), "exists": exists} for key, exists in pairs]
        print_json({"location": location, "waiting": waiting})
    elif not pairs:
        say(f"nothing waits for any session in {location}")
    else:
        rows = ((key.agent, key.session, "yes" if exists else "no") for key, exists in pairs)
        print_table(("agent", "session", "opened before"), rows)


def _fits(key: SessionKey, filters: dict[str, Any], after: SessionKey | None) -> bool:
    behind = after is None or key > after
    return behind and key.tenant == filters["tenant"] and key.agent.startswith(filters["prefix"])


def _row(info: SessionInfo, now: float) -> tuple[str, ...]:
    key = info.key
    active = ago(info.updated_at, now)
    if info.damaged:
        return (key.agent, key.session, "?", "?", active, "(damaged)")
    return (key.agent, key.session, str(info.turns), str(info.head), active, info.title or "")


def _listed(info: SessionInfo) -> dict[str, Any]:
    fields = msgspec.structs.asdict(info)
    key: SessionKey = fields.pop("key")
    return {"agent": key.agent, "session": key.session, "tenant": key.tenant, **fields}


def show(
    id: Annotated[str, Parameter(name="ID")],
    /,
    *,
    log: bool = False,
    restore_plan: bool = False,
    target: str | None = None,
    limit: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Show a session: what it is, and its newest messages, its log, or how it would come back.

    Reads without a lease, so it is in nobody's way and works while the session is in use.

    Args:
        id: The agent's id.
        log: Show the log's records instead of the messages.
        restore_plan: Show what opening it would use, repair, strip and make anew, and why.
        target: With --restore-plan, the provider that the context is meant for: openai,
            openai-responses, anthropic or gemini.
        limit: How many of the newest messages or records. Default: 20 messages, all records.

    """
    if restore_plan and (log or limit is not None):
        raise ConfigError("--restore-plan goes without --log and --limit: it shows no records")
    if target is not None and not restore_plan:
        raise ConfigError("--target goes with --restore-plan: it says what a provider would get")
    if restore_plan:
        anyio.run(partial(_show_plan, id, target=target, where=where))
    else:
        anyio.run(partial(_show, id, log=log, limit=limit, where=where))
    return 0


async def _show_plan(id: str, *, target: str | None, where: SessionOption) -> None:
    store, key = existing(where.store), where.key(id)
    async with managed(store) as sessions:
        if not await sessions.exists(key.agent, session=key.session, tenant=key.tenant):
            raise no_session(key, store)
        plan = await sessions.plan_restore(
            key.agent, session=key.session, tenant=key.tenant, target=cast("Format | None", target)
        )
        if warning := await incomplete(store, key):
            note(warning)
    if where.json:
        shown = {name: getattr(plan, name) for name in _PLANNED}
        print_json({"agent": key.agent, "session": key.session, "tenant": key.tenant, **shown})
    else:
        say(str(plan))


async def _show(id: str, *, log: bool, limit: int | None, where: SessionOption) -> None:
    store, key = followed(existing(where.store)), where.key(id)
    async with managed(store) as sessions:
        view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
        if view is None:
            raise no_session(key, store)
        described = await _describe(store, view)
        if log:
            await _show_log(store, view, described, limit, json=where.json)
        else:
            items = await view.history(limit=MESSAGES if limit is None else limit)
            _show_messages(view, described, items, json=where.json)


class SessionDescription(msgspec.Struct, kw_only=True):
    """What `show` says about a session, whatever follows."""

    location: str
    agent: str
    session: str
    tenant: str
    title: str | None
    owner: str | None
    tags: list[str]
    created_at: str
    last_active_at: str
    turns: int
    messages: int
    records: int
    settled: bool
    held_by: str
    epoch: int
    restored: str
    incomplete: str
    """Why records may be missing at its end; empty where nothing says so."""
    documents: dict[str, int]
    """Sizes by name."""
    memory: list[str]
    """Its keys."""
    state: list[str]
    """Its keys."""


async def _describe(store: Store, view: SessionView) -> SessionDescription:
    key, info = view.key, view.info
    holder: LeaseState | None = await store.holder(key)
    manifest: Manifest | None = (await store.read_documents(key, ())).manifest
    folded = {} if manifest is None else manifest.documents
    return SessionDescription(
        location=store.location,
        agent=key.agent,
        session=key.session,
        tenant=key.tenant,
        title=info.metadata.title,
        owner=info.metadata.owner,
        tags=info.metadata.tags,
        created_at=info.created_at,
        last_active_at=info.last_active_at,
        turns=info.turns,
        messages=info.messages,
        records=view.seq,
        settled=view.settled,
        held_by=holder_of(holder),
        epoch=0 if holder is None else holder.epoch,
        restored=str(view.restore_report),
        incomplete=await incomplete(store, key),
        documents={name: record.size for name, record in sorted(folded.items())},
        memory=await view.memory.keys(),
        state=await view.state.keys(),
    )


def _print_described(shown: SessionDescription) -> None:
    tenant = f"{shown.tenant}: " if shown.tenant else ""
    title = f"  {shown.title}" if shown.title else ""
    say(f"{tenant}{shown.agent}, session {shown.session}{title}")
    say(f"  in        {shown.location}")
    say(f"  active    {shown.last_active_at} (since {shown.created_at})")
    say(f"  holds     {shown.turns} turns, {shown.messages} messages, {shown.records} records")
    say(f"  held by   {shown.held_by}, epoch {shown.epoch}")
    say(f"  reading   {shown.restored}")
    if shown.incomplete:
        say(f"  warning   {shown.incomplete}")
    documents = (f"{name} ({size(count)})" for name, count in shown.documents.items())
    say(f"  documents {', '.join(documents) or 'none folded yet'}")
    for name, keys in (("owner", [shown.owner] if shown.owner else []), ("tags", shown.tags)):
        if keys:
            say(f"  {name:9} {', '.join(keys)}")
    for name, keys in (("memory", shown.memory), ("state", shown.state)):
        if keys:
            say(f"  {name:9} {', '.join(keys)}")


def _show_messages(
    view: SessionView, described: SessionDescription, items: list[HistoryItem], *, json: bool
) -> None:
    if json:
        context = view.context("openai")
        print_json({**msgspec.structs.asdict(described), "context": context})
        return
    _print_described(described)
    say("")
    for item in items:
        for who, text in _said(item):
            say(f"{item.seq:>6}  {who:9} {text}")


def _said(item: HistoryItem) -> list[tuple[str, str]]:
    message = item.value
    if not isinstance(message, Message):
        return [(item.kind, clip(str(message), PREVIEW))]
    lines = [(message.role, clip(message.text, PREVIEW))] if message.text else []
    lines += [
        ("call", clip(f"{call.name}({_json(call.arguments)})", PREVIEW))
        for call in message.tool_calls
    ]
    if message.tool_result is not None:
        result = message.tool_result
        body = _json(result.result) if result.error is None else f"error: {result.error}"
        lines.append(("tool", clip(f"{result.name or result.call_id}: {body}", PREVIEW)))
    return lines or [(message.role, "(empty)")]


def _json(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


async def _show_log(
    store: Store, view: SessionView, described: SessionDescription, limit: int | None, *, json: bool
) -> None:
    after = 0 if limit is None else max(view.seq - limit, 0)
    if not json:
        _print_described(described)
        say("")
    shown: list[dict[str, Any]] = []
    reader = store.read_log(view.key, after=after, before=view.seq + 1)
    async with contextlib.aclosing(reader) as chunks:
        async for chunk in chunks:
            for record in chunk.records:
                if json:
                    shown.append(_logged(record))
                else:
                    say(_log_line(record))
    if json:
        print_json({**msgspec.structs.asdict(described), "log": shown})


def _logged(record: Record) -> dict[str, Any]:
    return {
        "seq": record.seq,
        "epoch": record.epoch,
        "kind": record.kind,
        "end": record.end,
        "payload": msgspec.Raw(record.payload),
    }


def _log_line(record: Record) -> str:
    mark = " " if record.end else "┐"
    payload = clip(record.payload.decode(errors="backslashreplace"), PREVIEW)
    return f"{record.seq:>6} {mark} e{record.epoch} {record.kind:12} {payload}"


# ``perdure fork``, ``copy`` and ``rename``: sessions that begin with the history of others


Id = Annotated[str, Parameter(name="ID")]
NewId = Annotated[str, Parameter(name="NEW-ID")]


def fork(
    id: Id,
    new_id: NewId,
    /,
    *,
    at: str | None = None,
    at_checkpoint: int | None = None,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Fork a session: a new one begins with its history, and both go on.

    Writes one short record, however long the history is, and takes no lease on it.

    Args:
        id: The agent's id.
        new_id: The id of the fork.
        at: Where it goes on: the number of the last record that both have, or the id of a turn.
            Default: the end.
        at_checkpoint: Where it goes on: the number of a checkpoint.
        new_session: The fork's session; default: as --session.

    """
    if at is not None and at_checkpoint is not None:
        message = "fork: --at and --at-checkpoint are two places: give one of them"
        raise ConfigError(message, option="at")

    async def act(sessions: SessionManager) -> Fork:
        point: int | str | Checkpoint | None = at
        if at is not None and at.isdecimal():
            point = int(at)
        if at_checkpoint is not None:
            point = await checkpoint_of(sessions, id, at_checkpoint, where)
        return await sessions.fork(
            id,
            new_id,
            at=point,
            session=where.session,
            new_session=new_session,
            tenant=where.tenant,
        )

    return anyio.run(partial(_do, act, where, "goes on behind record {at} of {parent}"))


def copy(
    id: Id,
    new_id: NewId,
    /,
    *,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Copy a session, its history included: the copy does not need the other one.

    Args:
        id: The agent's id.
        new_id: The id of the copy.
        new_session: The copy's session; default: as --session.

    """

    async def act(sessions: SessionManager) -> Fork:
        return await sessions.copy(
            id, new_id, session=where.session, new_session=new_session, tenant=where.tenant
        )

    return anyio.run(partial(_do, act, where, "has all {at} records of {parent}"))


def rename(
    id: Id,
    new_id: NewId,
    /,
    *,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Give a session another id.

    Killed anywhere, one of the ids opens with everything: run it again, and it finishes.

    Args:
        id: The agent's id.
        new_id: The new id.
        new_session: The new session; default: as --session.

    """

    async def act(sessions: SessionManager) -> Fork:
        return await sessions.rename(
            id, new_id, session=where.session, new_session=new_session, tenant=where.tenant
        )

    return anyio.run(partial(_do, act, where, "was {parent}"))


async def _do(act: Any, where: SessionOption, text: str) -> int:
    async with managed(existing(where.store), write=True) as sessions:
        done: Fork = await act(sessions)
    if where.json:
        print_json({"agent": done.key.agent, "session": done.key.session, **_parts(done)})
    else:
        say(f"{done.key} {text.format(at=done.at, parent=done.parent)}")
    return 0


def _parts(done: Fork) -> dict[str, Any]:
    parent = {"agent": done.parent.agent, "session": done.parent.session}
    return {"tenant": done.key.tenant, "parent": parent, "at": done.at}
