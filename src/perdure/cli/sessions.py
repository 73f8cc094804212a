"""``perdure ls``, ``show``, ``fork``, ``copy``, ``rename``, ``forget`` and ``prune``.

The commands on the sessions of a store: list and show only read; the others change sessions.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal, cast

import msgspec
from cyclopts import Parameter, validators

from perdure._lib.tasks import each
from perdure.cli.access import (
    existing,
    load_view,
    managed,
    no_session,
    opened,
    require_key,
)
from perdure.cli.check import incomplete
from perdure.cli.checkpoints import checkpoint_of
from perdure.cli.output import (
    SessionOption,
    StoreOption,
    ago,
    clip,
    confirmed,
    counted,
    days,
    is_interactive,
    note,
    print_json,
    print_table,
    say,
    size,
)
from perdure.errors import ConfigError
from perdure.inspector.activity import (
    Heading,
    StatusName,
    Tokens,
    TurnShown,
    headings,
    is_held,
    tokens_of,
    turns_in,
)
from perdure.inspector.conversation import ShownItem, shown_step, thread_message
from perdure.inspector.state import stored_status
from perdure.inspector.stored import (
    has_thread,
    records_of,
    thread_counts,
    turn_records,
)
from perdure.inspector.threads import ThreadReader, ThreadView
from perdure.lease import held_by
from perdure.memory.documents import DATED_KINDS, iso_of, time_of
from perdure.providers.context_fit import Format
from perdure.providers.issued import stamp_of
from perdure.records.checkpoints import Checkpoint
from perdure.records.keys import DEFAULT_SESSION, SCOPES, SessionKey, require_filters, stored_key
from perdure.records.manifest import Manifest, SessionQuery
from perdure.records.messages import Message
from perdure.records.records import Record
from perdure.session.contents import HistoryItem
from perdure.session.delete import ForgetReport, SessionFilter
from perdure.session.fork import Fork
from perdure.session.internals import contents_of, described, parts_of, store_of
from perdure.session.lifecycle import HandoverTerms
from perdure.session.retention import PruneReport, Retention
from perdure.session.session import SessionView
from perdure.session.stored import followed
from perdure.store import LeaseState, SessionInfo, Store, all_records, first_record
from perdure.transfer.backup_view import require_backup
from perdure.transfer.backups import follow_deletions

_PLANNED = (
    *("source", "head", "documents", "steps", "records_read", "target", "stripped"),
    *("replaces", "settled", "is_sound"),
)
"""The fields of a plan that are shown as JSON: all but the messages."""

ROLLBACK = "rollback::"
"""The beginning of the label of the checkpoint that a rollback makes."""
PREVIEW = 96
MESSAGES = 20


async def ls(
    prefix: str = "",
    *,
    owner: str | None = None,
    tag: str | None = None,
    tenant: str = "",
    after: str | None = None,
    after_session: str = DEFAULT_SESSION,
    limit: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 1000,
    by_id: bool = False,
    waiting: bool = False,
    scopes: bool = False,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """List the sessions of a store, those first that were used last.

    Counts, owners and tags are as of a session's last save; `show` reads the log as well.

    Args:
        prefix: Only agents whose id begins with this.
        owner: Only sessions of this owner.
        tag: Only sessions with this tag.
        tenant: The tenant, in a store that several tenants share.
        after: With --by-id, --waiting or --scopes: start after this agent's session, the last one
            of the previous page.
        after_session: Which of its sessions that was.
        limit: The maximum number to list.
        by_id: List them in the order of their ids instead, which reads no more than is listed.
        waiting: List the sessions for which a post waits instead, opened before or not.
        scopes: List the scopes instead, which sessions share; `show` and `forget` take their
            agent and session as they are listed.

    """
    if after is not None and not (by_id or waiting or scopes):
        raise ConfigError("--after continues a list by id: give --by-id", option="after")
    filters = {"tenant": tenant, "owner": owner, "tag": tag, "prefix": SCOPES if scopes else prefix}
    last = None
    if after is not None:
        last = SessionKey(*((SCOPES, after) if scopes else (after, after_session)), tenant)
    if waiting:
        await _ls_waiting(filters, last, limit, where)
    else:
        await _ls(filters, last, limit, where, by_id=by_id or scopes)
    return 0


async def _ls(
    filters: dict[str, Any],
    after: SessionKey | None,
    limit: int,
    where: StoreOption,
    *,
    by_id: bool,
) -> None:
    async with opened(where.store) as store:
        require_filters(**filters)
        without = () if filters["prefix"] == SCOPES else (SCOPES,)
        sessions = await store.sessions(
            SessionQuery(
                **filters, without=without, newest_first=not by_id, after=after, limit=limit
            )
        )
        copied: dict[SessionKey, str | None] = {}

        async def look(info: SessionInfo) -> None:
            copied[info.key] = _copied_from(info.key, await store.holder(info.key))

        if where.json:  # a listing does not say it
            await each(sessions, look)
    if where.json:
        listed = [{**_listed(info), "copied_from": copied[info.key]} for info in sessions]
        print_json({"location": store.location, "sessions": listed})
    elif not sessions and limit:
        fitting = "fitting " * any(filters[name] for name in filters if filters[name] != SCOPES)
        what = "scopes" if filters["prefix"] == SCOPES else "sessions"
        say(f"no {'more ' * (after is not None)}{fitting}{what} in {store.location}")
    else:
        now = time.time()
        columns = ("agent", "session", "turns", "records", "active", "title")
        print_table(columns, (_row(info, now) for info in sessions), right="turns records")
        damaged = sum(info.damaged for info in sessions)
        if damaged:
            say(
                f"what was folded of {damaged} of them is damaged: `perdure check --repair` "
                "rebuilds it from the log"
            )


async def _ls_waiting(
    filters: dict[str, Any], after: SessionKey | None, limit: int, where: StoreOption
) -> None:
    require_filters(**filters)
    if filters["owner"] is not None or filters["tag"] is not None:
        raise ConfigError(
            "--waiting goes without --owner and --tag: a session never opened has neither",
            option="waiting",
        )
    async with opened(where.store) as store:
        keys = [
            key
            for key in await store.sessions_with_pending_items()
            if (after is None or key > after)
            and key.tenant == filters["tenant"]
            and key.agent.startswith(filters["prefix"])
        ]
        pairs = [(key, await store.head(key) > 0) for key in keys[:limit]]
    if where.json:
        print_json(
            {
                "location": store.location,
                "waiting": [
                    {**msgspec.structs.asdict(key), "exists": exists} for key, exists in pairs
                ],
            }
        )
    elif not pairs:
        say(f"nothing waits for any session in {store.location}")
    else:
        rows = ((key.agent, key.session, "yes" if exists else "no") for key, exists in pairs)
        print_table(("agent", "session", "opened before"), rows)


def _row(info: SessionInfo, now: float) -> tuple[str, ...]:
    key = info.key
    active = ago(info.updated_at, now)
    if info.damaged:
        return (key.agent, key.session, "?", "?", active, "(damaged)")
    return (key.agent, key.session, str(info.turns), str(info.head), active, info.title or "")


def _copied_from(key: SessionKey, holder: LeaseState | None) -> str | None:
    """Return which session another one is a copy of: a fork, a copy, or under another name."""
    source = None if holder is None or holder.draft is None else holder.draft.source
    return None if source in (None, key) else str(source)  # a restored one is its own


async def _rolled_back(view: SessionView) -> str | None:
    """Return the checkpoint that the session was taken back to, if that is its newest one."""
    newest = (await view.checkpoints.states())[-1:]
    if not newest or not newest[0].label.startswith(ROLLBACK):
        return None
    label, _, number = newest[0].label.removeprefix(ROLLBACK).rpartition("#")
    return f"checkpoint {number} ({label}), at record {newest[0].event_seq}"


def _listed(info: SessionInfo) -> dict[str, Any]:
    fields = msgspec.structs.asdict(info)
    key: SessionKey = fields.pop("key")
    return {"agent": key.agent, "session": key.session, "tenant": key.tenant, **fields}


async def show(
    id: Annotated[str, Parameter(name="ID")],
    /,
    *,
    log: bool = False,
    restore_plan: bool = False,
    target: str | None = None,
    limit: Annotated[int | None, Parameter(validator=validators.Number(gte=0))] = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Show a session: its facts and newest messages, its log, or its restore plan.

    Reads without a lease, also while the session is in use.

    Args:
        id: The agent's id.
        log: Show the log's records instead of the messages.
        restore_plan: Show what opening it would use, repair, strip and rebuild, and why.
        target: With --restore-plan, the provider that the context is for: openai,
            openai-responses, anthropic or gemini.
        limit: How many of the newest messages or records. Default: 20 messages, all records.

    """
    if restore_plan and (log or limit is not None):
        raise ConfigError("--restore-plan goes without --log and --limit: it shows no records")
    if target is not None and not restore_plan:
        raise ConfigError("--target goes with --restore-plan: it says what a provider would get")
    if restore_plan:
        await _show_plan(id, target=target, where=where)
    else:
        await _show(id, log=log, limit=limit, where=where)
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
    shown = {name: getattr(plan, name) for name in _PLANNED}
    where.show({**msgspec.structs.asdict(key), **shown}, str(plan))


async def _show(id: str, *, log: bool, limit: int | None, where: SessionOption) -> None:
    store = followed(existing(where.store))
    async with managed(store) as sessions:
        view = await load_view(sessions, id, where)
        thread = await ThreadReader().read(store, view.key) if await has_thread(view) else None
        holder = await store.holder(view.key)
        facts = await _facts(store, view, thread, holder)
        if log:
            await _show_log(store, view, facts, limit, where)
        elif where.json:
            print_json({**facts, "context": view.context("openai")})
        else:
            newest = MESSAGES if limit is None else limit
            entries: list[str] = []
            if thread is None:
                lines = await _history_lines(store, view, newest, held=is_held(holder))
                entries = [] if lines else await _entry_lines(store, view, newest)
            else:
                lines = await _thread_lines(view, thread, facts["status"], newest)
            _print_facts(facts, is_transcript=bool(entries))
            for line in lines + entries:
                say(line)


async def _history_lines(store: Store, view: SessionView, limit: int, *, held: bool) -> list[str]:
    """Return lines for the newest items of a session, and for the turns among them."""
    shown = await contents_of(view).history(before=view.seq + 1, limit=limit, shown=_said)
    if not shown:
        return []
    records = await turn_records(store, view.key, after=shown[0][0].seq - 2)
    turns = turns_in(records, held=held)
    begun = headings([heading for heading, _ in shown], turns)
    lines: list[str] = []
    for heading, said in shown:
        lines += _turn_lines(begun.get(heading.seq)) + said
    last = shown[-1][0].seq
    return lines + [line for turn in turns if turn.first > last for line in _turn_lines(turn)]


async def _entry_lines(store: Store, view: SessionView, limit: int) -> list[str]:
    """Return lines for the newest entries of a transcript, which has no messages of its own."""
    log = store.read_log(view.key, before=view.seq + 1, limit=limit, reverse=True)
    records = (await all_records(log))[:limit]
    steps = [shown_step(record, only_messages=True) for record in reversed(records)]
    return [line for step in steps if step is not None for line in _part_lines(step)]


def _part_lines(item: ShownItem) -> list[str]:
    lines = []
    for part in item.parts:
        who = {"text": item.role, "result": "tool"}.get(part.kind, part.kind)
        name = f"{part.name}: " if part.name else ""
        lines.append(f"{item.seq:>6}  {who:9} {clip(name + part.text, PREVIEW)}")
    return lines


async def _thread_lines(
    view: SessionView, thread: ThreadView, status: StatusName, limit: int
) -> list[str]:
    """Return lines for the newest messages of a LangGraph thread."""
    newest = thread.messages[max(len(thread.messages) - limit, 0) :]
    records = await records_of(view, {message.seq for message in newest})
    lines: list[str] = []
    turns = [
        turn
        for turn in thread.turns_as_of(status)
        if newest and (turn.last or 0) >= newest[0].checkpoint
    ]
    for message in newest:
        while turns and turns[0].first <= message.checkpoint:
            lines += _turn_lines(turns.pop(0))
        lines += _part_lines(thread_message(message, records[message.seq], in_state=True))
    return lines


def _turn_lines(turn: TurnShown | None) -> list[str]:
    """Return a line with a turn's number, end, time and tokens; none if it has no number."""
    if turn is None or not turn.number:
        return []
    parts = [turn.name, turn.status if turn.status != "done" else "", turn.error]
    if turn.took is not None:
        parts.append(f"{turn.took:.1f} s")
    if turn.tokens.input or turn.tokens.output:
        parts.append(f"{turn.tokens.input} tokens in, {turn.tokens.output} out")
    said = ", ".join(filter(None, parts))
    return [f"{turn.first or '…':>6}  turn {turn.number}{said and f': {said}'}"]


async def _facts(
    store: Store, view: SessionView, thread: ThreadView | None, holder: LeaseState | None
) -> dict[str, Any]:
    """Return what `show` says of a session first."""
    key = view.key
    manifest: Manifest | None = (await store.read_documents(key, ())).manifest
    folded = {} if manifest is None else manifest.documents
    status = await stored_status(store, key, holder)
    return {
        "location": store.location,
        "agent": key.agent,
        "session": key.session,
        "tenant": key.tenant,
        **described(view),
        **({} if view.info.created_at else await _times(view)),
        **({} if thread is None else thread_counts(thread)),
        "status": status.name,
        "status_detail": status.detail,
        "held_by": held_by(holder),
        "epoch": 0 if holder is None else holder.epoch,
        "in_context": len(contents_of(view).context.by_seq()),
        "rolled_back": await _rolled_back(view),
        "copied_from": _copied_from(key, holder),  # it may be gone
        "restored": str(view.restore_report),
        "incomplete": await incomplete(store, key),
        "documents": {name: record.size for name, record in sorted(folded.items())},
        "memory": await view.memory.keys(),
        "state": await view.state.keys(),
    }


async def _times(view: SessionView) -> dict[str, str]:
    """Return the times of a session that was never folded, out of its log."""
    store, key, before = store_of(view), view.key, view.seq + 1

    def is_dated(record: Record) -> bool:
        return record.kind in DATED_KINDS and time_of(record) is not None

    first = await first_record(store.read_log(key, before=before), is_dated)
    last = await first_record(store.read_log(key, before=before, reverse=True), is_dated)
    dated = {"created_at": first, "last_active_at": last}
    return {name: iso_of(time_of(one) or 0) for name, one in dated.items() if one is not None}


def _print_facts(facts: dict[str, Any], *, is_transcript: bool = False) -> None:
    documents = (f"{name} ({size(count)})" for name, count in facts["documents"].items())
    tenant = facts["tenant"] and f"{facts['tenant']}: "
    title = facts["title"] and f"  {facts['title']}"
    holds = ", ".join(counted(facts[f"{noun}s"], noun) for noun in ("turn", "message", "record"))
    shown = facts["in_context"]
    if shown != facts["messages"] and "checkpoints" not in facts:
        holds += f"; {counted(shown, 'message')} in the context"
    if "checkpoints" in facts:
        holds += f", {facts['checkpoints']} checkpoints of LangGraph's"
    if is_transcript:
        holds = f"{counted(facts['records'], 'record')} of a transcript"
    status = facts["status"] + (facts["status_detail"] and f": {facts['status_detail']}")
    dated = bool(facts["created_at"])
    say(f"{tenant}{facts['agent']}, session {facts['session']}{title or ''}")
    for name, text in (
        ("in", facts["location"]),
        ("active", f"{facts['last_active_at']} (since {facts['created_at']})" * dated),
        ("status", status),
        ("holds", holds),
        ("rollback", facts["rolled_back"] and f"to {facts['rolled_back']}"),
        ("held by", f"{facts['held_by']}, epoch {facts['epoch']}"),
        ("reading", facts["restored"]),
        ("warning", facts["incomplete"]),
        ("documents", ", ".join(documents) or "none folded yet"),
        ("copy of", facts["copied_from"]),
        ("owner", facts["owner"]),
        ("tags", ", ".join(facts["tags"])),
        ("memory", ", ".join(facts["memory"])),
        ("state", ", ".join(facts["state"])),
    ):
        if text:
            say(f"  {name:9} {text}")
    say("")


def _said(item: HistoryItem) -> tuple[Heading, list[str]]:
    """Return an item's place, and the lines that are shown of it: few, of many megabytes maybe."""
    heading = Heading(item.seq, "", None, Tokens())
    if isinstance(item.value, Message):
        message = item.value
        heading = Heading(item.seq, message.role, message.created_at, tokens_of(message))
    return heading, [f"{item.seq:>6}  {who:9} {text}" for who, text in _parts(item)]


def _parts(item: HistoryItem) -> list[tuple[str, str]]:
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
    if not lines and message.reasoning:
        lines = [("reasoning", clip(message.reasoning, PREVIEW))]
    return lines or [(message.role, f"({_issued_kind(message) or 'empty'})")]


def _issued_kind(message: Message) -> str | None:
    """Return what a provider calls a part without text: its search, its reasoning."""
    stamp = stamp_of(message)
    if stamp is None or not stamp.items:
        return None
    kind = msgspec.json.decode(stamp.items[0].block).get("type")
    return kind if isinstance(kind, str) else None


def _json(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


async def _show_log(
    store: Store, view: SessionView, facts: dict[str, Any], limit: int | None, where: SessionOption
) -> None:
    if not where.json:
        _print_facts(facts)
    shown: list[dict[str, Any]] = []
    after = 0 if limit is None else max(view.seq - limit, 0)
    reader = store.read_log(view.key, after=after, before=view.seq + 1)
    async with contextlib.aclosing(reader) as chunks:
        async for chunk in chunks:
            for record in chunk.records:
                if where.json:
                    shown.append(
                        {
                            "seq": record.seq,
                            "epoch": record.epoch,
                            "kind": record.kind,
                            "end": record.end,
                            "payload": msgspec.Raw(record.payload),
                        }
                    )
                else:
                    mark = " " if record.end else "┐"
                    payload = clip(record.payload.decode(errors="backslashreplace"), PREVIEW)
                    say(f"{record.seq:>6} {mark} e{record.epoch} {record.kind:12} {payload}")
    if where.json:
        print_json({**facts, "log": shown})


# ``perdure fork``, ``copy`` and ``rename``: sessions that begin with the history of others


Id = Annotated[str, Parameter(name="ID")]
NewId = Annotated[str, Parameter(name="NEW-ID")]


async def fork(
    id: Id,
    new_id: NewId,
    /,
    *,
    at: str | None = None,
    at_checkpoint: int | None = None,
    history: Annotated[Literal["full", "context"], Parameter(show_choices=False)] = "full",
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Fork a session: a new one begins with its history, and both continue.

    A fork is a copy, and takes no lease on the parent.

    Args:
        id: The agent's id.
        new_id: The id of the fork.
        at: Where it continues: the number of the last record that both have, or the id of a turn.
            Default: the end.
        at_checkpoint: Where it continues: the number of a checkpoint.
        history: "context" leaves the records out: the fork begins with what they fold to.
        new_session: The fork's session; default: as --session.

    """
    if at is not None and at_checkpoint is not None:
        raise ConfigError(
            "fork: --at and --at-checkpoint are two places: give one of them", option="at"
        )
    point: int | str | Checkpoint | None = int(at) if at is not None and at.isdecimal() else at
    async with managed(existing(where.store), write=True) as sessions:
        if at_checkpoint is not None:
            point = await checkpoint_of(sessions, id, at_checkpoint, where)
        done = await sessions.fork(
            id,
            new_id,
            at=point,
            history=history,
            session=where.session,
            new_session=new_session,
            tenant=where.tenant,
        )
    return _report(done, where, f"continues after record {done.at} of {done.parent}")


async def copy(
    id: Id,
    new_id: NewId,
    /,
    *,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Copy a session, its history included: the copy does not need the original.

    Args:
        id: The agent's id.
        new_id: The id of the copy.
        new_session: The copy's session; default: as --session.

    """
    async with managed(existing(where.store), write=True) as sessions:
        done = await sessions.copy(
            id, new_id, session=where.session, new_session=new_session, tenant=where.tenant
        )
    return _report(done, where, f"has all {done.at} records of {done.parent}")


async def rename(
    id: Id,
    new_id: NewId,
    /,
    *,
    new_session: str | None = None,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Give a session another id.

    If it is killed, one of the two ids opens with everything: run it again, and it finishes.

    Args:
        id: The agent's id.
        new_id: The new id.
        new_session: The new session; default: as --session.

    """
    async with managed(existing(where.store), write=True) as sessions:
        done = await sessions.rename(
            id, new_id, session=where.session, new_session=new_session, tenant=where.tenant
        )
    return _report(done, where, f"was {done.parent}")


def _report(done: Fork, where: SessionOption, text: str) -> int:
    where.show(
        {
            **msgspec.structs.asdict(done.key),
            "parent": {"agent": done.parent.agent, "session": done.parent.session},
            "at": done.at,
        },
        f"{done.key} {text}",
    )
    return 0


SHOWN = 5
"""The number of sessions that a question names."""


async def forget(
    id: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *,
    session: str | None = None,
    owner: str | None = None,
    tag: str | None = None,
    tenant: str = "",
    dry_run: bool = False,
    yes: Annotated[bool, Parameter(negative=())] = False,
    backup: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Forget sessions: logs, documents, quarantine, posts, and blobs that only they reference.

    What others still reference stays, and is listed. This cannot be undone, so on a terminal it
    shows what would go, and asks first. A backup forgets them with its next run; with --backup at
    once, so that a lost store does not bring them back.

    Args:
        id: Only sessions of this agent.
        session: Only this one of its sessions; default: all.
        owner: Only sessions of this owner.
        tag: Only sessions with this tag.
        tenant: The tenant, in a store that several tenants share.
        dry_run: Only show what would be removed.
        yes: Do not ask. Where stdin or stderr is no terminal, as in a script, nothing asks.
        backup: A backup of the store, which forgets at once what the store has forgotten, now and
            before; may be repeated.

    """
    async with AsyncExitStack() as stack:
        retained: list[Store] = []
        for url in backup:  # a wrong one is refused before anything goes
            target = existing(url)
            await target.open()
            stack.push_async_callback(target.aclose)
            await require_key(target)
            await require_backup(target)
            retained.append(target)
        if id is not None:
            stored_key(id, tenant=tenant)
        wanted = SessionFilter(id, session, tenant, owner, tag)
        if not (dry_run or yes) and is_interactive():
            found = await _forget(wanted, where, dry_run=True)
            names = ", ".join(map(str, found.sessions[:SHOWN]))
            if len(found.sessions) > SHOWN:
                names += f" and {len(found.sessions) - SHOWN} more"
            many = f"{len(found.sessions)} sessions ({names})"
            if found.sessions and not confirmed(f"forget {many}? This cannot be undone."):
                note("nothing was removed")
                return 1
        report = await _forget(wanted, where, dry_run=dry_run)
        removed: dict[str, list[SessionKey]] = {}
        if not dry_run and retained:
            async with opened(where.store) as store:
                for target in retained:
                    removed[target.location] = await follow_deletions(store, target)
    where.show(
        {**msgspec.to_builtins(report), "backups": removed},
        lambda: _print_forgotten(report, removed),
    )
    return 0


async def _forget(wanted: SessionFilter, where: StoreOption, *, dry_run: bool) -> ForgetReport:
    async with managed(existing(where.store), write=not dry_run) as sessions:
        return await parts_of(sessions).forget(wanted, HandoverTerms(), dry_run=dry_run)


def _print_forgotten(report: ForgetReport, backups: dict[str, list[SessionKey]]) -> None:
    for key in report.sessions:
        say(f"{key}: {'would be forgotten' if report.dry_run else 'forgotten'}")
    for retained in report.kept:
        say(f"{retained.of}: kept: {retained.what}: {retained.why}")
    for key in report.carriers:
        say(f"{key}: has a copy of what was forgotten: forget it, too, if that is to go")
    counts = {"record": report.records, "document": report.documents, "blob": report.blobs}
    parts = ", ".join(counted(count, noun) for noun, count in counts.items())
    what = f"{counted(len(report.sessions), 'session')} with {parts} ({size(report.bytes)})"
    say(f"{what} in {', '.join(report.places)}{'; nothing was removed' * report.dry_run}")
    for place, keys in backups.items():
        say(
            f"{counted(len(keys), 'session')} removed from the backup in {place}, which will not "
            "bring them back"
        )


async def prune(
    *,
    id: str | None = None,
    session: str | None = None,
    tenant: str = "",
    keep_turns: int | None = None,
    keep_days: float | None = None,
    older_than: str | None = None,
    dry_run: bool = False,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Prune old history, and forget sessions that were not used for long.

    Context, memory and states of a session stay as they are. With both --keep options, a turn
    stays if either keeps it. Sessions that another process holds are left alone. If some may not be
    pruned, the others are, and the exit status is 1.

    Args:
        id: Only this agent; default: all.
        session: Only this one of its sessions; default: all.
        tenant: The tenant, in a store that several tenants share.
        keep_turns: Keep this many of the newest turns of each session.
        keep_days: Keep turns that ended within this many days.
        older_than: Forget sessions that were not used for this long, such as 90d, 12h or 8w.
        dry_run: Only show what would be removed.

    """
    if keep_turns is None and keep_days is None and older_than is None:
        raise ConfigError("say what to prune: give --keep-turns, --keep-days or --older-than")
    retention = Retention(
        keep_turns=keep_turns,
        keep_days=keep_days,
        expire_days=None if older_than is None else days(older_than),
    )
    async with managed(existing(where.store), write=not dry_run) as sessions:
        report = await sessions.prune(
            retention, id=id, session=session, tenant=tenant, dry_run=dry_run
        )
    where.show(report, lambda: say_pruned(report, counts=True))
    return 1 if report.refused else 0


def say_pruned(report: PruneReport, *, counts: bool = False) -> None:
    """Print what was removed, or would be, and what was left alone; with *counts* the sums."""
    would = "would be " * report.dry_run
    for key in report.expired:
        say(f"{key}: {would}forgotten: long unused")
    for session in report.pruned:
        freed = f", {size(session.bytes)} freed" if session.bytes else ""
        turns = counted(session.turns, "turn")
        say(f"{session.key}: {would}pruned: {turns} up to record {session.cut}{freed}")
    for retained in report.kept_for:
        say(f"{retained.key}: keeps more for checkpoint {retained.checkpoint}: prune that first")
    for key in report.held:
        say(f"{key}: another process holds it: left alone")
    for key in report.damaged:
        say(f"{key}: cannot be read: left alone; `perdure check` says why")
    for refusal in report.refused:
        say(f"{refusal.key}: not pruned: {refusal.why}")
    if counts:
        say(
            f"{counted(len(report.pruned), 'session')} pruned, {len(report.expired)} forgotten"
            f"{'; nothing was removed' * report.dry_run}"
        )
