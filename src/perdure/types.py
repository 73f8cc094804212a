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
    from perdure.autosave.options import AutosaveStatus as AutosaveStatus, Inherit as Inherit
    from perdure.autosave.reports import (
        Health as Health,
        ShutdownReport as ShutdownReport,
        Unsaved as Unsaved,
    )
    from perdure.memory.documents import (
        ContextState as ContextState,
        HistorySource as HistorySource,
        SessionCounters as SessionCounters,
        SessionDocument as SessionDocument,
        SessionLabels as SessionLabels,
    )
    from perdure.memory.index import MemoryEntry as MemoryEntry
    from perdure.memory.state import States as States, TypedState as TypedState
    from perdure.memory.working_memory import (
        MemoryOwner as MemoryOwner,
        MemorySearch as MemorySearch,
        WorkingMemory as WorkingMemory,
    )
    from perdure.records.media import Medium as Medium
    from perdure.records.posts import DeadLetter as DeadLetter, PendingItem as PendingItem
    from perdure.records.types import Registered as Registered
    from perdure.records.values import OpaqueValue as OpaqueValue, Types as Types
    from perdure.restore.report import (
        PlannedDocument as PlannedDocument,
        RestorePlan as RestorePlan,
        RestoreReport as RestoreReport,
    )
    from perdure.session.base import Receipt as Receipt
    from perdure.session.contents import HistoryItem as HistoryItem
    from perdure.session.contributors import (
        Attachment as Attachment,
        RestoreContext as RestoreContext,
    )
    from perdure.session.delete import ForgetReport as ForgetReport, RetainedItem as RetainedItem
    from perdure.session.export import Imported as Imported
    from perdure.session.fork import Fork as Fork, LostSession as LostSession
    from perdure.session.inbox import PostReceipt as PostReceipt
    from perdure.session.open import SessionOpening as SessionOpening
    from perdure.session.partial import PartialReply as PartialReply
    from perdure.session.rebuild import RebuildReport as RebuildReport
    from perdure.session.retention import (
        CheckpointHold as CheckpointHold,
        Pruned as Pruned,
        PruneRefusal as PruneRefusal,
        PruneReport as PruneReport,
    )
    from perdure.session.scope import Scope as Scope, ScopeChange as ScopeChange

_HOMES = {
    "perdure.autosave.reports": ("Health", "ShutdownReport", "Unsaved"),
    "perdure.autosave.options": ("AutosaveStatus", "Inherit"),
    "perdure.memory.documents": (
        "ContextState",
        "HistorySource",
        "SessionCounters",
        "SessionDocument",
        "SessionLabels",
    ),
    "perdure.memory.index": ("MemoryEntry",),
    "perdure.memory.state": ("States", "TypedState"),
    "perdure.memory.working_memory": ("MemoryOwner", "MemorySearch", "WorkingMemory"),
    "perdure.records.media": ("Medium",),
    "perdure.records.posts": ("DeadLetter", "PendingItem"),
    "perdure.records.types": ("Registered",),
    "perdure.records.values": ("OpaqueValue", "Types"),
    "perdure.restore.report": ("PlannedDocument", "RestorePlan", "RestoreReport"),
    "perdure.session.base": ("Receipt",),
    "perdure.session.contents": ("HistoryItem",),
    "perdure.session.contributors": ("Attachment", "RestoreContext"),
    "perdure.session.delete": ("ForgetReport", "RetainedItem"),
    "perdure.session.export": ("Imported",),
    "perdure.session.fork": ("Fork", "LostSession"),
    "perdure.session.inbox": ("PostReceipt",),
    "perdure.session.open": ("SessionOpening",),
    "perdure.session.retention": ("CheckpointHold", "PruneRefusal", "PruneReport", "Pruned"),
    "perdure.session.rebuild": ("RebuildReport",),
    "perdure.session.partial": ("PartialReply",),
    "perdure.session.scope": ("Scope", "ScopeChange"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # a list of strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
