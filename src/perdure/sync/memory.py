"""Working memory and named states in blocking style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from perdure.memory import state, working
    from perdure.memory.documents import MemoryEntry
    from perdure.sync.loop import LoopThread

__all__ = ["States", "WorkingMemory"]


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

        Raises:
            NotStorableError: The value cannot be stored; the error names path and type.

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

    def entries(self) -> list[MemoryEntry]:
        """Return the entries as they are stored."""
        return self._loop.call(self._inner.entries)


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
        """Keep a value under a key, and return the session's version.

        Raises:
            NotStorableError: The value cannot be stored; the error names path and type.

        """
        return self._loop.do(lambda: self._inner.set(key, value))

    def drop(self, key: str) -> int:
        """Forget a key (no error if it is not there), and return the session's version."""
        return self._loop.do(lambda: self._inner.drop(key))

    def keys(self) -> list[str]:
        """Return the keys in order."""
        return self._loop.call(self._inner.keys)
