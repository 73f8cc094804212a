"""perdure keeps the state of long-running asynchronous agents.

    async with perdure.connect("file:~/agents") as sessions:
        async with sessions.open("my-assistant") as session:
            async with session.turn():
                session.append(Message.user("Hello"))

Names resolve when they are first used, so importing perdure stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure._lib.lazy import lazy

if TYPE_CHECKING:
    from perdure._connect import connect as connect
    from perdure._connect import store_for as store_for
    from perdure.archive import Archive as Archive
    from perdure.archive import ArchiveLimits as ArchiveLimits
    from perdure.archive import ArchiveProgress as ArchiveProgress
    from perdure.archive import ArchiveRestored as ArchiveRestored
    from perdure.archive import Archives as Archives
    from perdure.archive import ArchiveSaved as ArchiveSaved
    from perdure.archive import ArchiveSkipped as ArchiveSkipped
    from perdure.autosave.options import Autosave as Autosave
    from perdure.autosave.options import EngineOptions as EngineOptions
    from perdure.autosave.options import Shutdown as Shutdown
    from perdure.autosave.shutdown import ShutdownReport as ShutdownReport
    from perdure.config.persistent_config import PersistentConfig as PersistentConfig
    from perdure.config.states import PersistentState as PersistentState
    from perdure.errors import *  # noqa: F403  # the whole tree is public
    from perdure.lease import LeaseOptions as LeaseOptions
    from perdure.records.keys import SessionKey as SessionKey
    from perdure.records.message_format import EncodedRecord as EncodedRecord
    from perdure.records.messages import Message as Message
    from perdure.records.messages import ToolCall as ToolCall
    from perdure.records.messages import ToolResult as ToolResult
    from perdure.records.posts import DeadLetter as DeadLetter
    from perdure.records.posts import PendingItem as PendingItem
    from perdure.records.types import register as register
    from perdure.records.values import OpaqueValue as OpaqueValue
    from perdure.restore.plan import RestorePlan as RestorePlan
    from perdure.restore.report import RestoreReport as RestoreReport
    from perdure.session.base import Receipt as Receipt
    from perdure.session.contributors import Attachment as Attachment
    from perdure.session.contributors import Contributor as Contributor
    from perdure.session.contributors import RestoreContext as RestoreContext
    from perdure.session.delete import ForgetReport as ForgetReport
    from perdure.session.export import Imported as Imported
    from perdure.session.export import export_state as export_state
    from perdure.session.export import import_state as import_state
    from perdure.session.fork import Fork as Fork
    from perdure.session.inbox import PostReceipt as PostReceipt
    from perdure.session.lost import LostSession as LostSession
    from perdure.session.manager import SessionManager as SessionManager
    from perdure.session.options import Limits as Limits
    from perdure.session.prune import PruneReport as PruneReport
    from perdure.session.rebuild import RebuildReport as RebuildReport
    from perdure.session.retention import Retention as Retention
    from perdure.session.session import Session as Session
    from perdure.session.turn import Turn as Turn
    from perdure.session.view import SessionView as SessionView

__version__ = "0.1.0"

_HOMES = {
    "perdure._connect": ("connect", "store_for"),
    "perdure.autosave.options": ("Autosave", "EngineOptions", "Shutdown"),
    "perdure.autosave.shutdown": ("ShutdownReport",),
    "perdure.records.message_format": ("EncodedRecord",),
    "perdure.records.types": ("register",),
    "perdure.records.values": ("OpaqueValue",),
    "perdure.archive": (
        "Archive",
        "ArchiveLimits",
        "ArchiveProgress",
        "ArchiveRestored",
        "ArchiveSaved",
        "ArchiveSkipped",
        "Archives",
    ),
    "perdure.config.persistent_config": ("PersistentConfig",),
    "perdure.config.states": ("PersistentState",),
    "perdure.lease": ("LeaseOptions",),
    "perdure.records.keys": ("SessionKey",),
    "perdure.records.messages": ("Message", "ToolCall", "ToolResult"),
    "perdure.records.posts": ("DeadLetter", "PendingItem"),
    "perdure.restore.plan": ("RestorePlan",),
    "perdure.restore.report": ("RestoreReport",),
    "perdure.session.contributors": ("Attachment", "Contributor", "RestoreContext"),
    "perdure.session.export": ("Imported", "export_state", "import_state"),
    "perdure.session.delete": ("ForgetReport",),
    "perdure.session.fork": ("Fork",),
    "perdure.session.inbox": ("PostReceipt",),
    "perdure.session.lost": ("LostSession",),
    "perdure.session.manager": ("SessionManager",),
    "perdure.session.options": ("Limits",),
    "perdure.session.prune": ("PruneReport", "Retention"),
    "perdure.session.rebuild": ("RebuildReport",),
    "perdure.session.base": ("Receipt",),
    "perdure.session.session": ("Session",),
    "perdure.session.turn": ("Turn",),
    "perdure.session.view": ("SessionView",),
    "perdure.errors": (
        "AcknowledgedRecordsLostError",
        "CheckpointNotFoundError",
        "CompactionError",
        "ConfigError",
        "ContextOverflowError",
        "CorruptRecordError",
        "FormatError",
        "HistoryPrunedError",
        "InboxFullError",
        "InvalidArgumentError",
        "LeaseError",
        "LeaseHeldError",
        "LeaseLostError",
        "MissingExtraError",
        "ModelError",
        "ModelUnavailableError",
        "NotStorableError",
        "PerdureError",
        "ReplayDivergedError",
        "ReplayError",
        "SessionAlreadyActiveError",
        "SessionClosedError",
        "SessionError",
        "SessionNotFoundError",
        "SessionQuarantinedError",
        "StalePlanError",
        "StoreError",
        "StoreUnavailableError",
        "TemplateError",
        "TooLargeError",
        "ToolOutcomeUnknownError",
        "ToolServerError",
        "UnknownConfigKeyError",
        "UnsavedChangesError",
        "UnsupportedVersionError",
        "WrongLoopError",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604  # all of them strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF, "__version__")
