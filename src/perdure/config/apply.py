"""Application of a persistence.yaml to stored values: as a dry run, or written.

An agent does the same when it starts; this is for a preview, and for agents that are not running.
Sessions that another process holds are skipped and listed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.config.locations import FolderPlace, SessionPlace
from perdure.config.schema import (
    DOCUMENT,
    ConfigKey,
    ConfigPlan,
    Declaration,
    StoredValues,
    begun,
    own,
    plan,
    saved_in,
)
from perdure.errors import FormatError, LeaseHeldError
from perdure.records.keys import DEFAULT_SESSION
from perdure.session.prune import PruneReport

if TYPE_CHECKING:
    from perdure.records.keys import SessionKey
    from perdure.session.manager import SessionManager
    from perdure.session.session import SessionView


_PAGE = 500

Initial = Callable[[ConfigKey], Any]


class ConfigChange(msgspec.Struct, frozen=True):
    """What changes, or has changed, in one place."""

    place: str
    """A session, or a folder."""
    plan: ConfigPlan


class ConfigReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a declaration changes, or has changed."""

    dry_run: bool
    looked_at: int = 0
    """Places that hold values, or were asked for."""
    changes: tuple[ConfigChange, ...] = ()
    held: tuple[str, ...] = ()
    """Sessions that another process holds: they were left alone."""
    damaged: tuple[str, ...] = ()
    """Sessions that cannot be read, or whose values cannot: they were left alone, too."""
    pruned: PruneReport | None = None
    """What the retention lets go; None without one."""


async def apply_to_folder(
    place: FolderPlace, declaration: Declaration, make: Initial, *, dry_run: bool
) -> ConfigReport:
    """Bring a state folder up to date, or say what that would change.

    Raises:
        CorruptRecordError: What is stored is damaged; it was left as it is.
        LeaseHeldError: Another process keeps writing it.
        TemplateError: A template cannot be evaluated; nothing was written.

    """
    keys = declaration.config
    planned = plan(await place.read(), keys)
    if planned and not dry_run:
        await place.change(
            lambda saved: begun(saved, keys, is_new=False, initial=make, session=saved.session)
        )
    changes = (ConfigChange(str(place.path), planned),) if planned else ()
    return ConfigReport(dry_run=dry_run, looked_at=1, changes=changes)


async def apply_to_store(
    sessions: SessionManager,
    declaration: Declaration,
    make: Initial,
    *,
    id: str | None = None,
    tenant: str = "",
    dry_run: bool,
) -> ConfigReport:
    """Bring the sessions of a store up to date, or say what that would change.

    Args:
        sessions: The manager of the store.
        declaration: What is declared.
        make: Returns the initial value of a key.
        id: Only of this agent; its default session gets values even if it has none. None: of
            all agents that have values.
        tenant: Whose they are.
        dry_run: Change nothing.

    Raises:
        TemplateError: A template cannot be evaluated.

    """
    looked_at, changes, held_keys, damaged = 0, list[ConfigChange](), list[str](), list[str]()
    keep = declaration.config.__contains__
    async for key in _keys(sessions, id, tenant):
        try:
            view = await sessions.load(key.agent, session=key.session, tenant=key.tenant)
            saved = None if view is None else await _stored(view)
            if view is None or (saved is None and (id is None or key.session != DEFAULT_SESSION)):
                continue
            looked_at += 1
            keys = _keys_of(view, saved, declaration.config)
            if not (planned := plan(saved or StoredValues(), keys, keep)):
                continue
            if not dry_run:
                await _apply(sessions, key, keys, make, keep)
            changes.append(ConfigChange(str(key), planned))
        except LeaseHeldError:
            held_keys.append(str(key))
        except FormatError:
            damaged.append(str(key))
    pruned = None
    if declaration.retention is not None:
        pruned = await sessions.prune(declaration.retention, id=id, tenant=tenant, dry_run=dry_run)
    return ConfigReport(
        dry_run=dry_run,
        looked_at=looked_at,
        changes=tuple(changes),
        held=tuple(held_keys),
        damaged=tuple(damaged),
        pruned=pruned,
    )


async def _keys(sessions: SessionManager, id: str | None, tenant: str) -> AsyncIterator[SessionKey]:
    """Give the sessions of one agent, or of all."""
    after = None
    while page := await sessions.list(tenant=tenant, prefix=id or "", after=after, limit=_PAGE):
        after = page[-1]
        for info in page:
            if id is None or info.key.agent == id:
                yield info.key


async def _stored(view: SessionView) -> StoredValues | None:
    value = await view.state.get(DOCUMENT)
    if value is None:
        return None
    return saved_in(msgspec.json.encode(value), f"the state {DOCUMENT!r} of session {view.key}")


def _keys_of(
    view: SessionView, saved: StoredValues | None, config: Mapping[str, ConfigKey]
) -> dict[str, ConfigKey]:
    """Return the keys that apply to a session: an unused default session has the shared ones."""
    regenerated = own(config)
    if view.key.session != DEFAULT_SESSION:
        return regenerated
    known = set() if saved is None else {*saved.values, *saved.orphans}
    used = view.info.turns > 0 or not known.isdisjoint(regenerated)
    return {name: key for name, key in config.items() if used or name not in regenerated}


async def _apply(
    sessions: SessionManager,
    key: SessionKey,
    keys: Mapping[str, ConfigKey],
    make: Initial,
    keep: Callable[[str], bool],
) -> None:
    opening = sessions.open(
        key.agent, session=key.session, tenant=key.tenant, create=False, on_held="raise"
    )
    async with opening as session:
        await SessionPlace(session).change(
            lambda saved: begun(
                saved, keys, is_new=False, initial=make, session=saved.session, keep=keep
            )
        )
