"""Contributors in blocking style: owners of further state, with plain methods or async ones.

Plain methods are called in threads of their own, so they may take their time and use the
blocking API; a save waits for them, as long as ``EngineOptions(capture_timeout=…)`` allows. A
contributor that was written for the async API is awaited in the manager's loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, cast, final

from anyio import to_thread

if TYPE_CHECKING:
    from perdure.session import contributors
    from perdure.session.contributors import Contributor as AsyncContributor, RestoreContext
    from perdure.session.session import Session
    from perdure.sync.loop import LoopThread


class Contributor(Protocol):
    """An owner of state that is kept with a session.

    A contributor whose state changes its form raises ``version``, and has a method
    ``migrate(state, from_version)``, which returns the state in the form of
    ``from_version + 1``; it is called once for each step.
    """

    @property
    def name(self) -> str:
        """Its name: its state is in ``plugins/<name>.json``."""
        ...

    @property
    def version(self) -> int:
        """The version of its state's form, from 1 up."""
        ...

    def capture(self) -> Any:
        """Return the state: JSON, or what a session's state can hold; None for none."""
        ...

    def restore(self, state: Any, context: RestoreContext) -> None:
        """Restore a stored state; called once, and only if there is one."""
        ...


@final
class Attachment:
    """An attached contributor; made by `Session.attach`."""

    def __init__(self, loop: LoopThread, inner: contributors.Attachment) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def contributor(self) -> Contributor | AsyncContributor:
        """The contributor that was attached."""
        inner = self._inner.contributor
        return inner.contributor if isinstance(inner, ContributorAdapter) else inner

    def changed(self) -> None:
        """Report that the state has changed: it is captured soon, even if nothing is appended.

        Not needed for changes within a turn, or before an explicit save.
        """
        self._loop.do(self._inner.changed)

    def detach(self) -> None:
        """Stop capturing. The stored state stays; changes since the last capture are not saved."""
        self._loop.do(self._inner.detach)


class ContributorAdapter:
    """An async contributor that wraps a blocking one."""

    def __init__(self, contributor: Contributor) -> None:
        self.contributor: Contributor = contributor
        self._step: Callable[[Any, int], Any] | None = getattr(contributor, "migrate", None)
        self.migrate: Callable[[Any, int], Awaitable[Any]] | None
        self.migrate = None if self._step is None else self._migrate

    @property
    def name(self) -> str:
        """The contributor's own."""
        return self.contributor.name

    @property
    def version(self) -> int:
        """The contributor's own."""
        return self.contributor.version

    async def capture(self) -> Any:
        """Capture the state in a worker thread."""
        return await to_thread.run_sync(self.contributor.capture, abandon_on_cancel=True)

    async def restore(self, state: Any, context: RestoreContext) -> None:
        """Restore the state in a worker thread."""
        await to_thread.run_sync(self.contributor.restore, state, context)

    async def _migrate(self, state: Any, from_version: int) -> Any:
        assert self._step is not None
        return await to_thread.run_sync(self._step, state, from_version)


def as_async(session: Session, contributor: Contributor | AsyncContributor) -> AsyncContributor:
    """Return a contributor as an async one: the same object each time."""
    if inspect.iscoroutinefunction(contributor.capture):
        return cast("AsyncContributor", contributor)
    attached = session._contributors._attached.values() if session._contributors else ()
    for attachment in attached:
        if (
            isinstance(attachment.contributor, ContributorAdapter)
            and attachment.contributor.contributor is contributor
        ):
            return attachment.contributor
    return ContributorAdapter(cast("Contributor", contributor))
