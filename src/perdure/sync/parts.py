"""Parts of a session in blocking style: checkpoints, kernel events, contributors.

Plain methods of a contributor are called in threads of their own, so they may take their time and
use the blocking API; a save waits for them, as long as ``EngineOptions(capture_timeout=…)``
allows. A contributor that was written for the async API is awaited in the manager's loop.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, final

from anyio import to_thread

from perdure.checkpoints import engine, events
from perdure.session import contributors
from perdure.sync.mirror import Mirror, awaited, done

if TYPE_CHECKING:
    from perdure.checkpoints.engine import CheckpointState, Difference, RolledBack
    from perdure.checkpoints.replay import ReplayReport, TimelineRow
    from perdure.checkpoints.verify import Verification
    from perdure.records.checkpoints import Checkpoint, KernelEvent
    from perdure.session import session
    from perdure.session.contributors import Contributor as AsyncContributor, RestoreContext


class CheckpointReader(Mirror[engine.CheckpointReader]):
    """The checkpoints of a session, to read: ``view.checkpoints``."""

    @awaited
    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that was not pruned, None if there is none."""

    @awaited
    def get(self, id: int) -> Checkpoint | None:
        """Return a checkpoint, without the state that it leads to; None for an unknown id."""

    @awaited
    def states(self) -> list[Checkpoint]:
        """Return all checkpoints that were not pruned, by id, without the states."""

    @awaited
    def restore(self, id: int) -> CheckpointState | None:
        """Return a checkpoint with a copy of its state, None for an unknown id; changes nothing."""

    @awaited
    def diff(self, a: int, b: int) -> Difference:
        """Return what was added, removed and changed from one checkpoint's state to another's."""

    @awaited
    def verify(self) -> Verification:
        """Look through the chain, the log and the states for anything changed or lost."""


@final
class CheckpointEngine(CheckpointReader):
    """A session's checkpoints: ``session.checkpoints``."""

    _inner: engine.CheckpointEngine

    @awaited
    def create(self, label: str, state: Any = None) -> Checkpoint:
        """Make a checkpoint, durable when this returns."""

    @awaited
    def rollback(self, id: int, *, replay: bool = False) -> RolledBack:
        """Go back to a checkpoint; everything is durable when this returns."""

    @contextmanager
    def guard(self, label: str) -> Iterator[Checkpoint]:
        """Make a checkpoint, and go back to it if the block fails."""
        checkpoint = self.create(label)
        try:
            yield checkpoint
        except BaseException as error:
            self._loop.call(partial(self._inner._undo, checkpoint.id, error))
            raise

    @awaited
    def prune(self, *, keep: int | Collection[int]) -> tuple[int, ...]:
        """Let go of checkpoints, and return their ids; nothing else ever does."""


class KernelEventReader(Mirror[events.KernelEventReader]):
    """The kernel events of a session, to read: ``view.events``."""

    @awaited
    def read(self, *, after: int = 0, before: int | None = None) -> list[KernelEvent]:
        """Return the durable events with ``after < seq < before``, by their times."""

    @awaited
    def replay(
        self,
        *,
        since: int | None = None,
        on_row: Callable[[TimelineRow], object] | None = None,
        strict: bool = False,
    ) -> ReplayReport:
        """Feed the durable events to a dry run, and return what it saw.

        As ``events.replay`` of a `perdure.SessionView`; ``on_row`` is called in the loop's thread.
        """


@final
class KernelEventStream(KernelEventReader):
    """A session's kernel events: ``session.events``."""

    @done
    def emit(
        self, kind: str, label: str | None = None, detail: dict[str, Any] | None = None
    ) -> KernelEvent:
        """Append an event, and return it. As ``session.events.emit`` of `perdure.Session`."""


# Contributors: owners of further state, with plain methods or async ones


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
class Attachment(Mirror[contributors.Attachment]):
    """An attached contributor; made by `Session.attach`."""

    @property
    def contributor(self) -> Contributor | AsyncContributor:
        """The contributor that was attached."""
        inner = self._inner.contributor
        return inner.contributor if isinstance(inner, ContributorAdapter) else inner

    @done
    def changed(self) -> None:
        """Report that the state has changed: it is captured soon, even if nothing is appended.

        Not needed for changes within a turn, or before an explicit save.
        """

    @done
    def detach(self) -> None:
        """Stop capturing. The stored state stays; changes since the last capture are not saved."""


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


def as_async(
    inner: session.Session, contributor: Contributor | AsyncContributor
) -> AsyncContributor:
    """Return a contributor as an async one: the same object each time."""
    if inspect.iscoroutinefunction(contributor.capture):
        return cast("AsyncContributor", contributor)
    attached = inner._contributors._attached.values() if inner._contributors else ()
    for attachment in attached:
        if (
            isinstance(attachment.contributor, ContributorAdapter)
            and attachment.contributor.contributor is contributor
        ):
            return attachment.contributor
    return ContributorAdapter(cast("Contributor", contributor))
