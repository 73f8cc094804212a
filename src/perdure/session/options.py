"""What a user can set when connecting: the option groups, in one place."""

from __future__ import annotations

import msgspec

from perdure.autosave.options import INHERIT, Autosave, Engine, Shutdown
from perdure.errors import ConfigError
from perdure.lease.terms import Lease, OnHeld

__all__ = ["Autosave", "Engine", "Lease", "Limits", "OnHeld", "Shutdown", "require_options"]

KIB = 1024
MIB = 1024 * KIB


_WHOLE = (
    "context_bytes",
    "record_bytes",
    "fold_records",
    "loads",
    "inbox_items",
    "inbox_bytes",
    "memory_bytes",
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How large things may become. Sizes are bytes.

    Args:
        context_bytes: The working context of a session without an agent: its newest
            whole messages.
        record_bytes: One appended item, encoded.
        fold_ratio: Fold when the log's tail is this many times what a fold rewrites; infinite:
            only when the session leaves memory.
        fold_records: Fold small documents after this many records at the latest.
        loads: How many sessions load at once.
        inbox_items: How many items may wait for a session, posted by this process or others.
        inbox_bytes: How many bytes of them: who posts beyond that gets an InboxFullError.
        memory_bytes: All values of a session's working memory together: what does not fit
            evicts others. None: no limit. With a limit the memory's index is read at open.

    Raises:
        ConfigError: A value does not fit.

    """

    context_bytes: int = 512 * KIB
    record_bytes: int = 16 * MIB
    fold_ratio: float = 1.0
    fold_records: int = 500
    loads: int = 16
    inbox_items: int = 10_000
    inbox_bytes: int = 64 * MIB
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if name == "memory_bytes" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                message = f"limits: {name}={value!r} does not fit: it must be a whole number from 1"
                raise ConfigError(message, option=name, value=value)
        if not self.fold_ratio > 0:
            message = f"limits: fold_ratio={self.fold_ratio!r} does not fit: it must be above 0"
            raise ConfigError(message, fold_ratio=self.fold_ratio)


_KINDS = {
    "autosave": Autosave,
    "lease": Lease,
    "shutdown": Shutdown,
    "limits": Limits,
    "engine": Engine,
}


def require_options(**given: object) -> None:
    """Raise ConfigError for what is no such group of options; autosave may be None."""
    for name, value in given.items():
        if name == "autosave" and (value is None or value is INHERIT):
            continue
        kind = _KINDS[name]
        if not isinstance(value, kind):
            several = "(…), such as Autosave.server(), or None" if kind is Autosave else "(…)"
            message = f"{name}={value!r} does not fit: give {kind.__name__}{several}"
            raise ConfigError(message, option=name)
