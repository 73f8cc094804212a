"""A password that is asked for at each new connection, since it may have expired by then."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import anyio.from_thread
import anyio.lowlevel

from perdure.errors import ConfigError, PerdureError, StoreUnavailableError

__all__ = ["Password", "password_reader"]

Password: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""A password, or what returns one."""


def password_reader(password: Password, location: str, timeout: float) -> Callable[[], str]:
    """Return what gives the password, for threads of the event loop that this is called on.

    A plain function is called in the thread that connects; what it returns is awaited on the
    event loop if it is awaitable.
    """
    token = anyio.lowlevel.current_token()

    async def awaited(coming: Awaitable[str]) -> str:
        with anyio.fail_after(timeout):
            return await coming

    def read() -> str:
        try:
            found = password if isinstance(password, str) else password()
            if inspect.isawaitable(found):
                found = anyio.from_thread.run(awaited, found, token=token)
        except PerdureError:
            raise
        except Exception as error:
            kind = type(error).__name__  # its text may hold anything
            message = (
                f"cannot reach {location}: its password= failed with {kind}: see that it returns "
                "a password; saving goes on by itself"
            )
            raise StoreUnavailableError(message) from error
        if not isinstance(found, str):
            message = f"password= returned a {type(found).__name__}: it has to return text"
            raise ConfigError(message, option="password")
        return found

    return read
