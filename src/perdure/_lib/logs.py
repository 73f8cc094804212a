"""Log lines that say once what is wrong: one line for an outage, one for each damaged thing."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import final

from perdure.errors import StoreUnavailableError

_MOST = 1000


def log_failure(
    log: logging.Logger,
    level: int,
    message: str,
    error: BaseException | None,
    *,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Log what has failed, and why.

    A store that cannot be reached says in its own message all that there is to know: one line, and
    the traceback for those who debug. Whatever else it is comes with its traceback.
    """
    if isinstance(error, StoreUnavailableError):
        log.log(level, "%s: %s", message, error, extra=extra)
        log.debug("%s", message, extra=extra, exc_info=error)
    else:
        log.log(level, message, extra=extra, exc_info=error)


@final
class LogOnce:
    """What was told already, as far as it can be remembered. From any thread."""

    def __init__(self) -> None:
        self._told: dict[Hashable, None] = {}

    def first(self, what: Hashable) -> bool:
        """Say whether this is the first time."""
        if what in self._told:
            return False
        if len(self._told) >= _MOST:
            self._told.clear()
        self._told[what] = None
        return True
