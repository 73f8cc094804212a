"""Which checkpoints are let go when some are kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from perdure.errors import ConfigError

__all__ = ["let_go"]


def let_go(ids: Sequence[int], keep: int | Collection[int]) -> tuple[int, ...]:
    """Return the ids that go; *ids* are in their order, *keep* is how many or which.

    >>> let_go([1, 2, 5], keep=1)
    (1, 2)
    >>> let_go([1, 2, 5], keep=[2])
    (1, 5)

    Raises:
        ConfigError: A number is below 0, or an id is not among them.

    """
    if isinstance(keep, int):
        if keep < 0:
            message = f"prune: keep={keep} does not fit: give a number from 0, or ids to keep"
            raise ConfigError(message, option="keep", value=keep)
        return tuple(ids[: max(len(ids) - keep, 0)])
    unknown = sorted(set(keep) - set(ids))
    if unknown:
        message = (
            f"prune: keep names {unknown}, which are no checkpoints: nothing was pruned; "
            "checkpoints.states() lists them"
        )
        raise ConfigError(message, option="keep", unknown=unknown)
    return tuple(one for one in ids if one not in keep)
