"""Retention: which old turns of a session's history, and which unused sessions, to remove.

Pure decisions; the caller brings the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure._lib.options import Options
from perdure.errors import InvalidArgumentError
from perdure.records.keys import SessionKey
from perdure.store import SessionInfo

DAY = 86_400.0


class TurnEndAt(msgspec.Struct, frozen=True):
    """The end of a turn."""

    seq: int
    at: float
    """Seconds since 1970."""


class Retention(Options, frozen=True, kw_only=True):
    """The part of sessions that ``prune`` keeps.

    Nothing is ever removed without that call, or ``connect(retention=…)``, which makes it.

    With both of the first two, a turn stays if either keeps it. What the model sees next, memory
    and states stay in any case: only history goes.

    Args:
        keep_turns: The newest turns of each session stay.
        keep_days: Turns that ended within these days stay.
        expire_days: Sessions that were not used for so many days are forgotten; an agent's default
            session, which keeps what all of them share, not before the others. Scopes stay.

    Raises:
        InvalidArgumentError: A value is invalid, or there is none.

    """

    keep_turns: int | None = None
    keep_days: float | None = None
    expire_days: float | None = None

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, value in values.items():
            kind = int if name == "keep_turns" else int | float
            if value is not None and not (
                isinstance(value, kind) and not isinstance(value, bool) and value >= 0
            ):
                what = "a whole number" if kind is int else "a number"
                raise InvalidArgumentError(
                    f"invalid Retention({name}={value!r}): it must be {what} from 0 up",
                    option=name,
                    value=value,
                )
        if all(value is None for value in values.values()):
            raise InvalidArgumentError(
                "Retention() says nothing: give keep_turns, keep_days or expire_days",
                option="keep_turns",
            )

    @property
    def cuts(self) -> bool:
        """Return whether it lets go of history."""
        return self.keep_turns is not None or self.keep_days is not None


def cut_after(turns: Sequence[TurnEndAt], retention: Retention, now: float) -> int:
    """Return the last record that may go, 0 for none; *turns* are in the order of the log.

    >>> turns = [TurnEndAt(5, 0.0), TurnEndAt(9, 100_000.0), TurnEndAt(14, 200_000.0)]
    >>> cut_after(turns, Retention(keep_turns=1), now=200_000.0)
    9
    >>> cut_after(turns, Retention(keep_turns=1, keep_days=2), now=200_000.0)
    5
    """
    if not retention.cuts:
        return 0
    old = list(turns)
    if retention.keep_turns is not None:
        old = old[: max(len(old) - retention.keep_turns, 0)]
    if retention.keep_days is not None:
        since = now - retention.keep_days * DAY
        young = next((place for place, turn in enumerate(old) if turn.at >= since), len(old))
        old = old[:young]
    return old[-1].seq if old else 0


def is_expired(info: SessionInfo, retention: Retention, now: float) -> bool:
    """Return whether a session was unused for so long that it is removed.

    A session whose last use is not known stays.
    """
    if retention.expire_days is None or info.updated_at is None:
        return False
    return now - info.updated_at > retention.expire_days * DAY


class Pruned(msgspec.Struct, frozen=True):
    """One session's history that was removed."""

    key: SessionKey
    cut: int
    """The last record that is gone."""
    turns: int
    """Number of turns that were removed."""
    bytes: int = 0
    """Bytes that the store has freed at once; it removes whole files or rows."""


class CheckpointHold(msgspec.Struct, frozen=True):
    """A session of which a checkpoint keeps more history than the retention asks for."""

    key: SessionKey
    checkpoint: int
    """The oldest checkpoint of the session itself: prune it first, to let the history go."""


class PruneRefusal(msgspec.Struct, frozen=True):
    """A session that may not be pruned, and why not, with the cure."""

    key: SessionKey
    why: str


class PruneReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a prune, or of its dry run."""

    pruned: tuple[Pruned, ...] = ()
    expired: tuple[SessionKey, ...] = ()
    """Sessions that were forgotten."""
    held: tuple[SessionKey, ...] = ()
    """Sessions that another process holds: they were left alone."""
    damaged: tuple[SessionKey, ...] = ()
    """Sessions that cannot be read: they were left alone, too."""
    refused: tuple[PruneRefusal, ...] = ()
    """Sessions that may not be pruned, unless it was one alone: then its error is raised."""
    kept_for: tuple[CheckpointHold, ...] = ()
    """Sessions that keep more than the retention asks for, since they have checkpoints."""
    dry_run: bool = False
