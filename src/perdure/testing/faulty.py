"""Fault-injecting wrappers of a real store: `FaultyStore` by counting, `SwitchedStore` on demand.

The inner store is a real one and keeps its promises; the wrapper decides which call fails and how.
`FaultyStore` counts calls, so that a run can be repeated. Wrap again for a second fault:

    FaultyStore(FaultyStore(store, fail_on="head", nth=2), fail_on="append_many", how="hang")

To fail "at the k-th call for every k", give no ``fail_on`` and raise ``nth`` until a run
ends with ``injected`` at 0.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, cast, final

import anyio

from perdure.errors import (
    InvalidArgumentError,
    LeaseLostError,
    NotStorableError,
    StoreUnavailableError,
)
from perdure.records.keys import SessionKey
from perdure.store import LogChunk, Outcome, Status, Store
from perdure.stores.delegate import DelegatingStore

How = Literal[
    "transient",
    "in_doubt_lost",
    "in_doubt_applied",
    "permanent",
    "conflict",
    "crash",
    "crash_applied",
    "hang",
]
"""The way a call fails. ``…_applied``: after it had its effect; else it has none."""

_APPLIED = frozenset({"in_doubt_applied", "crash_applied"})

_STATUS = {
    "transient": Status.TRANSIENT,
    "in_doubt_lost": Status.IN_DOUBT,
    "in_doubt_applied": Status.IN_DOUBT,
    "permanent": Status.PERMANENT,
    "conflict": Status.CONFLICT,
}


class Crash(BaseException):
    """A simulated kill of the process: after catching it, a test may only open a new manager."""


_METHODS = {name for name, value in inspect.getmembers(Store, callable) if name[0] != "_"}


class _Intercepted:
    """A store as `DelegatingStore` sees it, whose calls all pass through a function."""

    def __init__(self, store: Store, call: Callable[..., Awaitable[Any]]) -> None:
        self._store = store
        self._call = call

    def __repr__(self) -> str:
        return repr(self._store)

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return partial(self._call, name)
        if name in vars(Store):
            return getattr(self._store, name)
        raise AttributeError(name)


def _fault(method: str, how: How) -> BaseException:
    message = f"{method} was made to fail ({how}): nothing to mend, a test did it"
    match how:
        case "crash" | "crash_applied":
            return Crash(message)
        case "permanent":
            return NotStorableError(message)
        case "conflict":
            return LeaseLostError(message)
        case _:
            return StoreUnavailableError(message)


class _FailingStore(DelegatingStore, ABC):
    """A store wrapper that forwards every call, and asks how it is to fail."""

    def __init__(self, store: Store) -> None:
        super().__init__(cast("Store", _Intercepted(store, self._call)))
        self._store = store
        self.delay: float = 0.0
        """Seconds that each call takes longer, as on a slow disk."""

    @abstractmethod
    def _due(self, method: str) -> How | None:
        """Return how this call fails, None if it does not."""

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        call = partial(getattr(self._store, method), *args, **options)
        how = self._due(method)
        if self.delay:
            await anyio.sleep(self.delay)
        if how is None:
            return await call()
        if how == "hang":
            await anyio.sleep_forever()
        if how in _APPLIED:
            await call()
        error = _fault(method, how)
        if method == "append_many" and isinstance(error, Exception):
            return [Outcome(_STATUS[how], error) for _ in args[0]]
        raise error

    async def read_log(
        self,
        key: SessionKey,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Read; a fault comes before the first chunk, or with ``…_applied`` after the last."""
        how = self._due("read_log")
        if self.delay:
            await anyio.sleep(self.delay)
        if how == "hang":
            await anyio.sleep_forever()
        if how is not None and how not in _APPLIED:
            raise _fault("read_log", how)
        chunks = self._store.read_log(key, after=after, before=before, limit=limit, reverse=reverse)
        async with aclosing(chunks):  # also when the reader leaves early
            async for chunk in chunks:
                yield chunk
        if how is not None:
            raise _fault("read_log", how)


@final
class FaultyStore(_FailingStore):
    """A store wrapper that forwards every call, but fails some.

    Args:
        store: The store that does the work.
        fail_on: The method that fails; None counts the calls of all methods together.
        nth: The first call that fails, from 1 on.
        how: What happens then. ``append_many`` answers with the status where there is one;
            other methods raise the error that a store would.
        times: How many calls in a row fail; None for all from ``nth`` on.

    Example:
        >>> from perdure.stores.memory import MemoryStore
        >>> store = FaultyStore(MemoryStore(), fail_on="append_many", nth=3, how="in_doubt_applied")
    """

    def __init__(
        self,
        store: Store,
        *,
        fail_on: str | None = None,
        nth: int = 1,
        how: How = "transient",
        times: int | None = 1,
    ) -> None:
        if fail_on is not None and fail_on not in _METHODS:
            raise ValueError(f"fail_on={fail_on!r} is no method of a store")
        self.calls: Counter[str] = Counter()
        """Number of calls of each method."""
        self.injected: int = 0
        """Number of calls that failed so far."""
        super().__init__(store)
        self._fail_on = fail_on
        self._how: How = how
        self._fails = range(nth, nth + times) if times is not None else None
        self._nth = nth

    def mend(self) -> None:
        """Fail no more."""
        self._fails = range(0)

    def _due(self, method: str) -> How | None:
        self.calls[method] += 1
        if self._fail_on not in (None, method):
            return None
        count = self.calls.total() if self._fail_on is None else self.calls[method]
        due = count >= self._nth if self._fails is None else count in self._fails
        self.injected += due
        return self._how if due else None


# A switched store: `FaultyStore` decides before a run which calls fail, by counting; this one is
# switched during the run.


@final
class Faults:
    """The planned failures; several stores may share them."""

    def __init__(self) -> None:
        self.is_down: bool = False
        self._planned: list[tuple[str | None, How]] = []

    def plan(self, method: str | None, how: How, times: int) -> None:
        """Plan failures of the next calls of a method, or of any method for None."""
        self._planned += [(method, how)] * times

    def forget(self) -> None:
        """Cancel all planned failures."""
        self.is_down = False
        self._planned.clear()

    def take(self, method: str) -> How | None:
        """Return how this call fails, None if it does not."""
        for place, (planned, how) in enumerate(self._planned):
            if planned in (None, method):
                del self._planned[place]
                return how
        # Closing needs no server: a store that is down can still be closed.
        return "transient" if self.is_down and method != "aclose" else None


@final
class SwitchedStore(_FailingStore):
    """A store wrapper that forwards every call, unless the test has switched it off.

    Args:
        store: The store that does the work.
        faults: The planned failures; stores that share them go down together.

    Example:
        >>> from perdure.stores.memory import MemoryStore
        >>> store = SwitchedStore(MemoryStore())
        >>> store.down()
        >>> store.is_down
        True

    """

    def __init__(self, store: Store, *, faults: Faults | None = None) -> None:
        super().__init__(store)
        self._faults = faults or Faults()

    # the switches

    @property
    def is_down(self) -> bool:
        """Whether every call fails."""
        return self._faults.is_down

    def down(self) -> None:
        """Fail every call from now on, like a store that cannot be reached."""
        self._faults.is_down = True

    def up(self) -> None:
        """Work again, and cancel the planned failures."""
        self._faults.forget()

    def fail_next(
        self, method: str | None = "append_many", *, how: How = "transient", times: int = 1
    ) -> None:
        """Let the next calls fail.

        Args:
            method: The method that fails; None for the next calls of any method.
            how: As for `FaultyStore`: ``transient`` can be retried, ``permanent`` never
                works, ``in_doubt_applied`` takes effect but reports a failure, …
            times: How many calls fail.

        Raises:
            InvalidArgumentError: A store has no such method, cannot fail in that way while its
                process runs, or ``times`` is less than 1.

        """
        if method is not None and method not in _METHODS:
            raise InvalidArgumentError(
                f"fail_next({method!r}): a store has no such method; see perdure.store.Store",
                method=method,
            )
        if how.startswith("crash"):
            raise InvalidArgumentError(
                f"fail_next(how={how!r}): to crash a manager, use `await sandbox.reopen()`", how=how
            )
        if times < 1:
            raise InvalidArgumentError(
                f"fail_next: invalid times={times}: it must be at least 1", times=times
            )
        self._faults.plan(method, how, times)

    def _due(self, method: str) -> How | None:
        return self._faults.take(method)
