"""Working memory and named states in blocking style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

if TYPE_CHECKING:
    from perdure.memory import state, working
    from perdure.memory.storage import MemoryInfo
    from perdure.sync.loop import LoopThread

__all__ = ["States", "TypedState", "WorkingMemory"]

T = TypeVar("T")


@final
class WorkingMemory:
    """A session's working memory: ``session.memory``."""

    def __init__(self, loop: LoopThread, inner: working.WorkingMemory) -> None:
        self._loop = loop
        self._inner = inner

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        return self._loop.call(lambda: self._inner.get(key, default))

    def set(
        self,
        key: str,
        value: Any,
        *,
        description: str = "",
        scope: str = "session",
        priority: str = "normal",
        pinned: bool = False,
    ) -> int:
        """Keep a value under a key, and return the session's version.

        As ``session.memory.set`` of `perdure.Session`.
        """
        return self._loop.do(
            lambda: self._inner.set(
                key,
                value,
                description=description,
                scope=scope,
                priority=priority,
                pinned=pinned,
            )
        )

    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""
        return self._loop.do(lambda: self._inner.drop(key))

    def keys(self) -> list[str]:
        """Return the keys, oldest entry first."""
        return self._loop.call(self._inner.keys)

    def entries(self) -> list[MemoryInfo]:
        """Return what is known of the entries, oldest first; reads no value."""
        return self._loop.call(self._inner.entries)

    def search(
        self, query: str, *, scope: str | None = None, limit: int = 10, values: bool = False
    ) -> list[MemoryInfo]:
        """Return the entries that a query's words are found in, the best first.

        As ``session.memory.search`` of `perdure.Session`.
        """
        return self._loop.call(
            lambda: self._inner.search(query, scope=scope, limit=limit, values=values)
        )


@final
class States:
    """A session's named states: ``session.state``."""

    def __init__(self, loop: LoopThread, inner: state.States) -> None:
        self._loop = loop
        self._inner = inner

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under a key, or ``default``."""
        return self._loop.call(lambda: self._inner.get(key, default))

    def set(self, key: str, value: Any) -> int:
        """Keep a value under a key, and return the session's version."""
        return self._loop.do(lambda: self._inner.set(key, value))

    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""
        return self._loop.do(lambda: self._inner.drop(key))

    def keys(self) -> list[str]:
        """Return the keys in order."""
        return self._loop.call(self._inner.keys)

    def typed(self, key: str, type: type[T]) -> TypedState[T]:
        """Return one key's value as a type: ``session.state.typed("app", MyState)``.

        As ``session.state.typed`` of `perdure.Session`.
        """
        return TypedState(self._loop, self._inner.typed(key, type))


@final
class TypedState(Generic[T]):
    """One named state as a type; made by ``session.state.typed``."""

    def __init__(self, loop: LoopThread, inner: state.TypedState[T]) -> None:
        self._loop = loop
        self._inner = inner

    def get(self) -> T | None:
        """Return the value, None if there is none."""
        return self._loop.call(self._inner.get)

    def set(self, value: T) -> int:
        """Keep a value, and return the session's version."""
        return self._loop.do(lambda: self._inner.set(value))

    def drop(self) -> int:
        """Forget it (no error if it is not there), and return the session's version."""
        return self._loop.do(self._inner.drop)
