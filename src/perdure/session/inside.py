"""What an agent's worker may see and do of a session that its users do not.

The one door from `perdure.agent` into a session: the working context as it is folded, the
store behind it, long-term memory, and the claim that makes a worker the only one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.errors import SessionAlreadyActiveError
from perdure.memory.documents import fold_items
from perdure.session.contributors import Attachment, Contributor, Contributors

if TYPE_CHECKING:
    from perdure._lib.affinity import Affinity
    from perdure.codec.registry import Registry
    from perdure.memory.context import WorkingContext
    from perdure.model.records import Entry
    from perdure.session.session import Session
    from perdure.store import Store

__all__ = [
    "attach",
    "claim",
    "disclaim",
    "folder_of",
    "has_content",
    "home_of",
    "lines_of",
    "overhear",
    "registry_of",
    "store_of",
    "working_context",
]


def claim(session: Session, worker: object) -> None:
    """Make a worker the session's only one in this process.

    Raises:
        SessionAlreadyActiveError: Another worker has it.

    """
    if session._worker is not None and session._worker is not worker:
        message = (
            f"an agent is already active on session {session.key}: "
            "post to that one, or stop it first"
        )
        raise SessionAlreadyActiveError(message, key=str(session.key))
    session._worker = worker


def disclaim(session: Session, worker: object) -> None:
    """Let another worker have the session."""
    if session._worker is worker:
        session._worker = None


def has_content(session: Session) -> bool:
    """Say whether anything was ever said in a session."""
    contents = session._contents
    return bool(contents.turns or contents.messages or contents.context.size)


def home_of(session: Session) -> Affinity:
    """Return the loop, thread and process that the session belongs to."""
    return session._runtime.home


def registry_of(session: Session) -> Registry:
    """Return the application's types."""
    return session._runtime.registry


def store_of(session: Session) -> Store:
    """Return the store that the session lies in."""
    return session._runtime.store


def working_context(session: Session) -> WorkingContext:
    """Return the working context, to look at."""
    return session._contents.context


async def lines_of(session: Session, name: str) -> list[bytes]:
    """Return the lines of a memory document, with what is not folded or saved yet."""
    data, records = await session._contents._read(name)
    return fold_items(data, records).splitlines()


async def attach(session: Session, contributor: Contributor, *, restore: bool) -> Attachment:
    """Attach a contributor; without ``restore``, what is stored of it will be replaced."""
    session._check_open()
    if session.contributors is None:
        session.contributors = Contributors(session)
    return await session.contributors.attach(contributor, restore=restore)


def overhear(session: Session, *entries: Entry) -> None:
    """Take entries into the working context, and keep nothing of them."""
    context = session._contents.context
    for entry in entries:
        context.feed(context.seq, entry.kind, entry.payload)


def folder_of(session: Session) -> str | None:
    """Return the folder that the store keeps the session in, None if it has none."""
    find = getattr(session._runtime.store, "folder_of", None)
    return None if find is None else str(find(session.key))
