"""What is said to whoever uses a store that is not open in this process."""

from __future__ import annotations

from perdure.errors import StoreUnavailableError

__all__ = ["unopened"]


def unopened(where: str, *, elsewhere: bool) -> StoreUnavailableError:
    """Return the error for a store that was not opened, or in another process *elsewhere*."""
    message = (
        f"the store at {where} was opened in another process: open a store of its own in this one"
        if elsewhere
        else f"the store at {where} is not open: await its open() first"
    )
    return StoreUnavailableError(message, path=where)
