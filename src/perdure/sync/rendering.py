"""What a model is shown of a session, in blocking style."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, overload

if TYPE_CHECKING:
    from perdure.providers import Issuer, ReasoningPolicy, RenderedContext
    from perdure.session import session, view
    from perdure.session.rendering import ContextFormat, Listed, Separate
    from perdure.sync.loop import LoopThread

__all__ = ["Rendered"]


class _Blocking(Protocol):
    """What the method below needs of a session, or of a view of one."""

    _loop: LoopThread

    @property
    def _inner(self) -> session.Session | view.SessionView: ...


class Rendered:
    """What a model is shown of a session; `Session` and `SessionView` have this method."""

    __slots__ = ()

    @overload
    def context(
        self: _Blocking,
        format: Listed | None = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any]: ...

    @overload
    def context(
        self: _Blocking,
        format: Separate,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> RenderedContext: ...

    def context(
        self: _Blocking,
        format: ContextFormat = None,
        *,
        to: Issuer | str | None = None,
        reasoning: ReasoningPolicy = "strip_foreign",
    ) -> list[Any] | RenderedContext:
        """Return what the model sees next, as a provider takes it.

        As `perdure.Session.context`.
        """
        return self._loop.read(lambda: self._inner.context(format, to=to, reasoning=reasoning))
