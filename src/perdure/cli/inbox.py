"""``perdure inbox``: list the dead letters of a store, retry or drop them."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Annotated, Any

from cyclopts import Parameter

from perdure.cli.access import existing, managed, opened
from perdure.cli.output import SessionOption, ago, clip, print_json, print_table, say
from perdure.errors import ConfigError
from perdure.records.keys import SessionKey
from perdure.records.posts import DeadLetter
from perdure.store import Store

PREVIEW = 72


async def inbox(
    id: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *keys: Annotated[str, Parameter(name="KEY")],
    retry: bool = False,
    drop: bool = False,
    all: bool = False,
    where: SessionOption = SessionOption(),  # noqa: B008  # frozen
) -> int:
    """Show the dead letters: posts that could not be delivered and were set aside.

    Without an id, it lists the sessions that have some; with one, its letters; with keys, their
    contents. They stay until they are retried or dropped, or until their session is deleted.

    Args:
        id: The agent's id.
        keys: The keys of the posts.
        retry: Post the letters of these keys again, after what waits.
        drop: Remove the letters of these keys permanently.
        all: Retry or drop all letters of the session.

    """
    if retry and drop:
        raise ConfigError("--retry and --drop exclude each other: give one of them")
    if not (retry or drop):
        if all:
            raise ConfigError("--all goes with --retry or --drop: without them, all are listed")
        await _show(id, keys, where)
        return 0
    if id is None or bool(keys) == all:
        what = "--retry" if retry else "--drop"
        raise ConfigError(
            f"{what} takes an id, and the keys of posts or --all: `perdure inbox` lists them"
        )
    key = where.key(id)
    async with managed(existing(where.store), write=True) as sessions:
        act = sessions.retry_dead_letters if retry else sessions.drop_dead_letters
        count = await act(id, keys or None, session=key.session, tenant=key.tenant)
    done = "retried" if retry else "dropped"
    where.show({done: count}, f"{done} {count} items of {key}")
    return 0


async def _show(id: str | None, keys: tuple[str, ...], where: SessionOption) -> None:
    async with opened(where.store) as store:
        letters = await _letters(store, id, where)
    for key, all_ in letters.items():
        unknown = set(keys).difference(letter.item.key for letter in all_)
        if unknown:
            raise ConfigError(f"session {key} has no dead letter {min(unknown)!r}")
        letters[key] = [item for item in all_ if not keys or item.item.key in keys]
    if where.json:
        shown = [
            _listed(key, item, whole=bool(keys)) for key, all_ in letters.items() for item in all_
        ]
        print_json({"location": store.location, "dead_letters": shown})
    elif not any(letters.values()):
        say(f"no dead letters in {store.location}")
    elif keys:
        _print_whole(letters)
    else:
        _print_table(letters)


async def _letters(
    store: Store, id: str | None, where: SessionOption
) -> dict[SessionKey, list[DeadLetter]]:
    if id is not None:
        key = where.key(id)
        return {key: await store.dead_letters(key)}
    return {
        key: await store.dead_letters(key)
        for key in await store.sessions_with_pending_items(dead_letters=True)
        if where.tenant in {"", key.tenant}
    }


def _listed(key: SessionKey, letter: DeadLetter, *, whole: bool) -> dict[str, Any]:
    item = letter.item
    shown = {
        "agent": key.agent,
        "session": key.session,
        "tenant": key.tenant,
        "post": item.key,
        "op_id": item.op_id,
        "kind": item.kind,
        "size": len(item.payload),
        "reason": letter.reason,
        "tries": letter.tries,
        "at": letter.at,
        "posted_at": item.posted_at,
        "damage": item.damage or None,
    }
    if whole:
        shown["payload"] = item.payload.decode(errors="backslashreplace")
    return shown


def _print_table(letters: dict[SessionKey, list[DeadLetter]]) -> None:
    now = time.time()
    rows = []
    for key, all_ in letters.items():
        for post, items in groupby(all_, lambda row: row.item.key):
            first, *others = items
            rows.append(
                (
                    key.agent,
                    key.session,
                    post,
                    str(1 + len(others)),
                    str(first.tries),
                    ago(first.at, now),
                    clip(first.reason, PREVIEW),
                )
            )
    columns = ("agent", "session", "post", "items", "tries", "set aside", "why")
    print_table(columns, rows, right="items tries")


def _print_whole(letters: dict[SessionKey, list[DeadLetter]]) -> None:
    now = time.time()
    for key, letter in [(key, letter) for key, all_ in letters.items() for letter in all_]:
        item = letter.item
        say(f"{key}: {item.op_id}, a {item.kind or 'damaged item'} of {len(item.payload)} bytes")
        say(f"  posted    {ago(item.posted_at, now)}")
        say(f"  set aside {ago(letter.at, now)}, after {letter.tries} tries")
        say(f"  why       {letter.reason}")
        if item.damage:
            say(f"  damage    {item.damage}")
        say(f"  {item.payload.decode(errors='backslashreplace')}")
