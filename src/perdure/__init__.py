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
    from perdure._connect import connect as connect, store_for as store_for
    from perdure.autosave.options import (
        Autosave as Autosave,
        EngineOptions as EngineOptions,
        Shutdown as Shutdown,
    )
    from perdure.config.locations import PersistentState as PersistentState
    from perdure.config.persistent_config import PersistentConfig as PersistentConfig
    from perdure.errors import *  # noqa: F403  # the whole tree is public
    from perdure.lease import LeaseOptions as LeaseOptions
    from perdure.records.keys import SessionKey as SessionKey
    from perdure.records.messages import (
        EncodedRecord as EncodedRecord,
        Message as Message,
        ToolCall as ToolCall,
        ToolResult as ToolResult,
    )
    from perdure.records.types import register as register
    from perdure.session.base import Turn as Turn
    from perdure.session.contributors import Contributor as Contributor
    from perdure.session.export import export_state as export_state, import_state as import_state
    from perdure.session.manager import SessionManager as SessionManager
    from perdure.session.options import Limits as Limits
    from perdure.session.retention import Retention as Retention
    from perdure.session.session import Session as Session, SessionView as SessionView

__version__ = "0.1.0"

_HOMES = {
    "perdure.records.messages": ("EncodedRecord", "Message", "ToolCall", "ToolResult"),
    "perdure._connect": ("connect", "store_for"),
    "perdure.autosave.options": ("Autosave", "EngineOptions", "Shutdown"),
    "perdure.records.types": ("register",),
    "perdure.config.persistent_config": ("PersistentConfig",),
    "perdure.config.locations": ("PersistentState",),
    "perdure.lease": ("LeaseOptions",),
    "perdure.records.keys": ("SessionKey",),
    "perdure.session.contributors": ("Contributor",),
    "perdure.session.export": ("export_state", "import_state"),
    "perdure.session.manager": ("SessionManager",),
    "perdure.session.options": ("Limits",),
    "perdure.session.retention": ("Retention",),
    "perdure.session.session": ("Session", "SessionView"),
    "perdure.session.base": ("Turn",),
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
        "OwnerMismatchError",
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
        "TurnReusedError",
        "UnknownConfigKeyError",
        "UnsavedChangesError",
        "UnsupportedVersionError",
        "WrongLoopError",
    ),
}
_ELSEWHERE = dict.fromkeys(
    (
        "PerdureConversationStore",
        "PerdureSaver",
        "PerdureSession",
        "PerdureSessionService",
        "PerdureStepStore",
        "PerdureStore",
    ),
    "perdure.adapters",
) | {"Agent": "perdure.agent"}
"""Names that people look for here."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604  # all of them strings


if not TYPE_CHECKING:  # a checker would take any name for a public one
    __getattr__, __dir__ = lazy(__name__, _HOME_OF, "__version__", elsewhere=_ELSEWHERE)
