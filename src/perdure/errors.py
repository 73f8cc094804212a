"""Every error that perdure raises, in one tree.

Each class's docstring is its default message; ``facts`` holds the facts (which session, which
option, which file); a driver's own error is the ``__cause__``. Messages say what failed, where,
and how to fix it. They contain ids and sizes, never content.

    PerdureError
    ├── ConfigError
    │   ├── InvalidArgumentError (also a ValueError)
    │   ├── MissingExtraError
    │   ├── TemplateError
    │   └── UnknownConfigKeyError (also a KeyError)
    ├── StoreError
    │   ├── StoreUnavailableError
    │   ├── AcknowledgedRecordsLostError
    │   ├── InboxFullError
    │   ├── NotStorableError
    │   └── TooLargeError
    ├── FormatError
    │   ├── CorruptRecordError
    │   └── UnsupportedVersionError
    ├── LeaseError
    │   ├── LeaseHeldError
    │   └── LeaseLostError
    ├── SessionError
    │   ├── CheckpointNotFoundError (also a LookupError)
    │   ├── CompactionError
    │   ├── HistoryPrunedError
    │   ├── OwnerMismatchError
    │   ├── SessionNotFoundError
    │   ├── SessionAlreadyActiveError
    │   ├── SessionClosedError
    │   ├── SessionQuarantinedError
    │   ├── StalePlanError
    │   ├── TurnReusedError
    │   ├── UnsavedChangesError
    │   └── WrongLoopError
    ├── ReplayError
    │   └── ReplayDivergedError
    ├── ModelError
    │   ├── ContextOverflowError
    │   └── ModelUnavailableError
    └── ToolServerError
        └── ToolOutcomeUnknownError
"""

from __future__ import annotations

import inspect

__all__ = [
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
]


class PerdureError(Exception):
    """perdure could not complete the request."""

    def __init__(self, message: str | None = None, **facts: object) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or ""))
        self.facts = facts
        """The facts of the message, by name: ids, sizes, paths; never content."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(PerdureError):
    """A setting is missing, wrong, or contradicts another one."""


class InvalidArgumentError(ConfigError, ValueError):
    """An argument has an invalid value."""


class MissingExtraError(ConfigError):
    """This needs an optional part of perdure that is not installed, or is too old."""


class TemplateError(ConfigError):
    """A template names a variable that does not exist."""


class UnknownConfigKeyError(ConfigError, KeyError):
    """This key is not declared in persistence.yaml."""


class StoreError(PerdureError):
    """The store could not complete the request."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached or written right now; nothing stored is lost."""


class AcknowledgedRecordsLostError(StoreError):
    """The store no longer has records that it acknowledged: it was set back to an older state."""


class InboxFullError(StoreError):
    """The session's inbox is full: nothing was posted."""


class NotStorableError(StoreError):
    """A value cannot be stored as it is."""


class TooLargeError(NotStorableError):
    """A value is larger than the limit for it."""


class FormatError(PerdureError):
    """Stored data does not have the expected format."""


class CorruptRecordError(FormatError):
    """Stored data is damaged; it was left unchanged."""


class UnsupportedVersionError(FormatError):
    """Stored data has a format that this release does not know; it was left untouched."""


class LeaseError(PerdureError):
    """The lease of a session cannot be acquired."""


class LeaseHeldError(LeaseError):
    """Another process holds this session."""


class LeaseLostError(LeaseError):
    """Another process has taken this session over; nothing more can be written here."""


class SessionError(PerdureError):
    """The session cannot complete the request."""


class CheckpointNotFoundError(SessionError, LookupError):
    """The session has no such checkpoint."""


class CompactionError(SessionError):
    """Old turns could not be summarized; nothing has changed."""


class HistoryPrunedError(SessionError):
    """The history that this needs was pruned."""


class OwnerMismatchError(SessionError):
    """The session belongs to another owner than the one that was named."""


class SessionNotFoundError(SessionError):
    """There is no session with this id."""


class SessionAlreadyActiveError(SessionError):
    """A worker already runs on this session."""


class SessionClosedError(SessionError):
    """This session is closed; open it again."""


class SessionQuarantinedError(SessionError):
    """The store refuses a record of this session permanently; it is held in memory."""


class StalePlanError(SessionError):
    """The session has changed since the plan was made; nothing was applied."""


class TurnReusedError(SessionError):
    """The id of this turn was used for another request."""


class UnsavedChangesError(SessionError):
    """Some changes are neither durable nor spilled; the report says which."""


class WrongLoopError(SessionError):
    """A session belongs to the event loop, thread and process that opened it."""


class ReplayError(PerdureError):
    """A replay could not continue."""


class ReplayDivergedError(ReplayError):
    """A replay gave a different result than the recorded one."""


class ModelError(PerdureError):
    """The model's provider refused a request, or gave an answer that cannot be used."""


class ContextOverflowError(ModelError):
    """The request is longer than the model's context window."""


class ModelUnavailableError(ModelError):
    """The model cannot answer right now; the request can be repeated."""


class ToolServerError(PerdureError):
    """A tool server could not be started, reached, or used."""


class ToolOutcomeUnknownError(ToolServerError):
    """It is unknown whether a tool took effect; it was not called again."""
