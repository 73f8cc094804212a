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
    from perdure.autosave.options import Autosave as Autosave
    from perdure.autosave.options import Engine as Engine
    from perdure.autosave.options import Shutdown as Shutdown
    from perdure.autosave.shutdown import ShutdownReport as ShutdownReport
    from perdure.codec.encoded import Encoded as Encoded
    from perdure.codec.registry import register as register
    from perdure.codec.values import Opaque as Opaque
    from perdure.declare.archive import Archive as Archive
    from perdure.declare.archive import ArchiveLimits as ArchiveLimits
    from perdure.declare.archive import ArchiveProgress as ArchiveProgress
    from perdure.declare.archive import ArchiveRestored as ArchiveRestored
    from perdure.declare.archive import Archives as Archives
    from perdure.declare.archive import ArchiveSaved as ArchiveSaved
    from perdure.declare.archive import ArchiveSkipped as ArchiveSkipped
    from perdure.declare.config import PersistentConfig as PersistentConfig
    from perdure.declare.states import PersistentState as PersistentState
    from perdure.errors import *  # noqa: F403  # the whole tree is public
    from perdure.lease.terms import Lease as Lease
    from perdure.model.keys import SessionKey as SessionKey
    from perdure.model.messages import Message as Message
    from perdure.model.messages import ToolCall as ToolCall
    from perdure.model.messages import ToolResult as ToolResult
    from perdure.model.posts import DeadLetter as DeadLetter
    from perdure.model.posts import Posted as Posted
    from perdure.restore.plan import RestorePlan as RestorePlan
    from perdure.restore.report import RestoreReport as RestoreReport
    from perdure.session.contributors import Attachment as Attachment
    from perdure.session.contributors import Contributor as Contributor
    from perdure.session.contributors import RestoreContext as RestoreContext
    from perdure.session.exchange import Imported as Imported
    from perdure.session.exchange import export_state as export_state
    from perdure.session.exchange import import_state as import_state
    from perdure.session.forgetting import ForgetReport as ForgetReport
    from perdure.session.forking import Forked as Forked
    from perdure.session.inbox import PostReceipt as PostReceipt
    from perdure.session.lost import LostSession as LostSession
    from perdure.session.manager import SessionManager as SessionManager
    from perdure.session.options import Limits as Limits
    from perdure.session.pruning import PruneReport as PruneReport
    from perdure.session.restoring import RebuildReport as RebuildReport
    from perdure.session.retention import Retention as Retention
    from perdure.session.session import Receipt as Receipt
    from perdure.session.session import Session as Session
    from perdure.session.turn import Turn as Turn
    from perdure.session.view import SessionView as SessionView

__version__ = "0.1.0"

_HOMES = {
    "perdure._connect": ("connect", "store_for"),
    "perdure.autosave.options": ("Autosave", "Engine", "Shutdown"),
    "perdure.autosave.shutdown": ("ShutdownReport",),
    "perdure.codec.encoded": ("Encoded",),
    "perdure.codec.registry": ("register",),
    "perdure.codec.values": ("Opaque",),
    "perdure.declare.archive": (
        "Archive",
        "ArchiveLimits",
        "ArchiveProgress",
        "ArchiveRestored",
        "ArchiveSaved",
        "ArchiveSkipped",
        "Archives",
    ),
    "perdure.declare.config": ("PersistentConfig",),
    "perdure.declare.states": ("PersistentState",),
    "perdure.lease.terms": ("Lease",),
    "perdure.model.keys": ("SessionKey",),
    "perdure.model.messages": ("Message", "ToolCall", "ToolResult"),
    "perdure.model.posts": ("DeadLetter", "Posted"),
    "perdure.restore.plan": ("RestorePlan",),
    "perdure.restore.report": ("RestoreReport",),
    "perdure.session.contributors": ("Attachment", "Contributor", "RestoreContext"),
    "perdure.session.exchange": ("Imported", "export_state", "import_state"),
    "perdure.session.forgetting": ("ForgetReport",),
    "perdure.session.forking": ("Forked",),
    "perdure.session.inbox": ("PostReceipt",),
    "perdure.session.lost": ("LostSession",),
    "perdure.session.manager": ("SessionManager",),
    "perdure.session.options": ("Limits",),
    "perdure.session.pruning": ("PruneReport",),
    "perdure.session.restoring": ("RebuildReport",),
    "perdure.session.retention": ("Retention",),
    "perdure.session.session": ("Receipt", "Session"),
    "perdure.session.turn": ("Turn",),
    "perdure.session.view": ("SessionView",),
    "perdure.errors": (
        "AcknowledgedRecordsLostError",
        "CompactionError",
        "ConfigError",
        "ContextOverflowError",
        "CorruptRecordError",
        "FormatError",
        "LeaseError",
        "LeaseHeldError",
        "LeaseLostError",
        "MissingExtraError",
        "ModelError",
        "ModelUnavailableError",
        "InboxFullError",
        "NotStorableError",
        "PerdureError",
        "ReplayDivergedError",
        "ReplayError",
        "SessionAlreadyActiveError",
        "SessionClosedError",
        "SessionError",
        "SessionNotFoundError",
        "SessionQuarantinedError",
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
