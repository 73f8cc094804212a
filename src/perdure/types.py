"""Types that the public API returns and accepts, for annotations; callers do not construct them.

    from perdure.types import HistoryItem

    def shown(items: list[HistoryItem]) -> str: ...

What callers construct or call is in `perdure` itself, `perdure.agent`, `perdure.checkpoints`,
`perdure.formats`, `perdure.restore`, `perdure.providers`, and the port in `perdure.store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure.autosave.health import Health as Health
    from perdure.autosave.options import Inherit as Inherit
    from perdure.autosave.shutdown import Unsaved as Unsaved
    from perdure.memory.documents import ContextState as ContextState
    from perdure.memory.documents import HistorySource as HistorySource
    from perdure.memory.documents import SessionCounters as SessionCounters
    from perdure.memory.documents import SessionDocument as SessionDocument
    from perdure.memory.documents import SessionLabels as SessionLabels
    from perdure.memory.index import MemoryEntry as MemoryEntry
    from perdure.memory.state import States as States
    from perdure.memory.state import TypedState as TypedState
    from perdure.memory.storage import MemoryOwner as MemoryOwner
    from perdure.memory.working_memory import WorkingMemory as WorkingMemory
    from perdure.records.types import Registered as Registered
    from perdure.records.values import Types as Types
    from perdure.restore.plan import PlannedDocument as PlannedDocument
    from perdure.session.contents import HistoryItem as HistoryItem
    from perdure.session.delete import RetainedItem as RetainedItem
    from perdure.session.open import SessionOpening as SessionOpening
    from perdure.session.prune import CheckpointHold as CheckpointHold
    from perdure.session.prune import Pruned as Pruned

_HOMES = {
    "perdure.autosave.health": ("Health",),
    "perdure.autosave.options": ("Inherit",),
    "perdure.autosave.shutdown": ("Unsaved",),
    "perdure.records.types": ("Registered",),
    "perdure.records.values": ("Types",),
    "perdure.memory.documents": (
        "ContextState",
        "SessionCounters",
        "HistorySource",
        "SessionDocument",
        "SessionLabels",
    ),
    "perdure.memory.storage": ("MemoryOwner",),
    "perdure.memory.index": ("MemoryEntry",),
    "perdure.memory.state": ("States", "TypedState"),
    "perdure.memory.working_memory": ("WorkingMemory",),
    "perdure.restore.plan": ("PlannedDocument",),
    "perdure.session.contents": ("HistoryItem",),
    "perdure.session.delete": ("RetainedItem",),
    "perdure.session.open": ("SessionOpening",),
    "perdure.session.prune": ("CheckpointHold", "Pruned"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
