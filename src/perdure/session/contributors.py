"""State that others own: plugins, tools and frameworks that keep theirs with a session.

A contributor is asked for its state before each save; what has changed becomes a record at
that moment. Its state is restored when it is attached, never later, so nothing that it
holds can overwrite what was stored before it has seen it. The state of a contributor
that is not attached is carried along untouched.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from typing import TYPE_CHECKING, Any, Protocol, final

import anyio
import msgspec

from perdure._lib.logs import log_facts
from perdure._lib.tasks import was_cancelled
from perdure.errors import InvalidArgumentError, UnsupportedVersionError
from perdure.memory.documents import StateSet, typed
from perdure.memory.state import state_of
from perdure.records.json import decode, encode
from perdure.records.keys import SessionKey
from perdure.records.records import STATE, Entry
from perdure.records.values import Types, encode_value

if TYPE_CHECKING:
    from perdure.session.base import SessionBase


# What a contributor's state becomes in the log: nothing, a part of it, or the whole
#
# Pure. A state that has not changed since the last record writes nothing. One above 32 KiB writes
# only the top-level keys that changed, if it is an object and nothing but JSON.


KIB = 1024
Fields = dict[str, msgspec.Raw]
LARGE = 32 * KIB
"""Above this, only what changed is written."""


class StoredContribution(msgspec.Struct, frozen=True):
    """Hashes of a contributor's state as the log has it."""

    digest: bytes = b""
    """Empty for no state."""
    version: int = 1
    keys: dict[str, bytes] | None = None
    """The hash of each top-level value, of a large object."""


def state_name(name: str) -> str:
    """Return the name of the document with a contributor's state."""
    return f"plugins/{name}.json"


def kept_of(
    state: Any, version: int, types: Types
) -> tuple[StoredContribution, bytes, dict[str, str] | None]:
    """Return a state's hashes, its JSON, and the table of the types that JSON lacks.

    Raises:
        NotStorableError: Some part of it cannot be stored.

    """
    data, tags = encode_value(state, types)
    keys = None
    if len(data) > LARGE and not tags and isinstance(state, dict):
        keys = {key: _hash(bytes(raw)) for key, raw in decode(data, Fields).items()}
    typed_data = data if not tags else data + encode(tags)
    return StoredContribution(_hash(typed_data), version, keys), data, tags


def change_of(
    name: str, state: Any, version: int, before: StoredContribution, types: Types
) -> tuple[Entry, StoredContribution] | None:
    """Return the record that brings what the log had *before* up to date, and what it has then.

    None if it is up to date.

    Raises:
        NotStorableError: Some part of the state cannot be stored.

    """
    document = state_name(name)
    if state is None:
        if not before.digest:
            return None
        return _entry(StateSet(document, dropped=True)), StoredContribution()
    now, data, tags = kept_of(state, version, types)
    if (now.digest, now.version) == (before.digest, before.version):
        return None
    full_state = StateSet(document, msgspec.Raw(data), tags, version=version)
    if now.keys is None or before.keys is None:
        return _entry(full_state), now
    fields = decode(data, Fields)
    changed = {key: fields[key] for key, hash_ in now.keys.items() if before.keys.get(key) != hash_}
    part = StateSet(
        document,
        msgspec.Raw(encode(changed)),
        version=version,
        partial=True,
        gone=sorted(before.keys.keys() - now.keys.keys()),
    )
    return _entry(part), now


def _entry(change: StateSet) -> Entry:
    return Entry(STATE, encode(change))


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


log: logging.Logger = logging.getLogger("perdure")


class RestoreContext(msgspec.Struct, frozen=True, kw_only=True):
    """Facts for a contributor whose state is restored."""

    key: SessionKey
    """Whose session it is."""
    stored_version: int
    """The version that was stored, before ``migrate``."""


class Contributor(Protocol):
    """Owner of state that is kept with a session.

    A contributor whose state changes its form raises ``version``, and has a method
    ``migrate(state, from_version)``, plain or async, which returns the state in the form of
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

    async def capture(self) -> Any:
        """Return the state: JSON, or what a session's state can hold; None for none."""
        ...

    async def restore(self, state: Any, context: RestoreContext) -> None:
        """Take over a stored state; called once, and only if there is one."""
        ...


@final
class Attachment:
    """A contributor's place at a session; made by `Session.attach`."""

    __slots__ = ("_owner", "contributor", "kept")

    def __init__(
        self, owner: Contributors, contributor: Contributor, kept: StoredContribution
    ) -> None:
        self._owner = owner
        self.contributor: Contributor = contributor
        self.kept: StoredContribution = kept  # what the log has of it

    def __repr__(self) -> str:
        return f"<Attachment {self.contributor.name}>"

    def changed(self) -> None:
        """Note that the state has changed: it is asked for soon, though nothing is appended.

        Not needed for what changes within a turn, or before an explicit save.
        """
        self._owner.ask_soon()

    def detach(self) -> None:
        """Ask no more. What is stored stays; what was not captured is not."""
        self._owner.detach(self)


@final
class Contributors:
    """The contributors of one session, in the order in which they were attached."""

    __slots__ = (
        "_attached",
        "_capture_due",
        "_coming",
        "_session",
        "_suspended",
        "_takes",
    )

    def __init__(self, session: SessionBase) -> None:
        self._session = session
        self._capture_due = False  # a capture was requested, and has not begun
        self._attached: dict[str, Attachment] = {}
        self._coming: set[str] = set()
        self._suspended: dict[str, Attachment] = {}  # while their states are rolled back
        self._takes = 0  # how often that was

    async def attach(self, contributor: Contributor, *, restore: bool = True) -> Attachment:
        """Restore a contributor's state, if it wants that, then ask it before each save."""
        name = _checked(contributor)
        known = self._attached.get(name) or self._suspended.get(name)
        if known is not None and known.contributor is contributor:
            return known
        if known is not None or name in self._coming:
            raise InvalidArgumentError(
                f"session {self._session._tracked.key} has a contributor {name!r} already: "
                "give this one another name, or detach the other first",
                contributor=name,
            )
        # Another attach of this name is refused from here on, although nothing is attached yet.
        self._coming.add(name)
        try:
            stored = await self._restore(contributor, wanted=restore)
        finally:
            self._coming.discard(name)
        attachment = self._attached[name] = Attachment(self, contributor, stored)
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """Forget a contributor."""
        name = attachment.contributor.name
        for those in (self._attached, self._suspended):
            if those.get(name) is attachment:
                del those[name]

    def forget(self) -> None:
        """Write every state again: the log's records of them were dropped."""
        for attachment in self._attached.values():
            attachment.kept = StoredContribution()

    def set_aside(self) -> None:
        """Capture nothing until `take_back`: the stored states are about to be rolled back."""
        self._takes += 1
        self._suspended |= self._attached
        self._attached = {}

    async def take_back(self) -> None:
        """Have those who were set aside restore what is stored of them by now.

        Raises:
            Exception: As for `capture`; a failure does not affect the other contributors.

        """
        errors: list[Exception] = []
        try:
            for attachment in tuple(self._suspended.values()):
                try:
                    attachment.kept = await self._restore(attachment.contributor, wanted=True)
                except Exception as error:  # noqa: BLE001  # raised when all are done
                    errors.append(_named(error, attachment))
        finally:
            # In their old order; those that were attached meanwhile come after them.
            self._attached = {**self._suspended, **self._attached}
            self._suspended = {}
        _raise_if_any(errors)

    def ask_soon(self) -> None:
        """Capture all contributors in the background."""
        self._session._check_open()
        if not self._capture_due:
            self._capture_due = True
            try:
                self._session._runtime.host.spawn(self._contribute)
            except BaseException:
                self._capture_due = False
                raise

    async def _contribute(self) -> None:
        try:
            await self._session._runtime.saver.contribute(self._session._tracked)
        finally:
            self._capture_due = False

    async def _restore(self, contributor: Contributor, *, wanted: bool) -> StoredContribution:
        session = self._session
        types = session._runtime.registry
        document = state_name(contributor.name)
        stored_state = state_of(
            await session._contents.state_document(document),
            await session._contents.state_document(typed(document)),
            types,
        )
        if stored_state is None:
            return StoredContribution()
        state, version = stored_state
        contribution, _, _ = kept_of(state, version, types)
        if not wanted:
            return contribution
        migrated = await _migrated(contributor, state, version, session.key)
        context = RestoreContext(key=session.key, stored_version=version)
        await contributor.restore(migrated, context)
        return contribution

    async def capture(self) -> None:
        """Ask all contributors concurrently, and append what has changed.

        One that fails, or does not answer before this is cancelled, does not keep other states
        from being kept.

        Raises:
            Exception: What the one that failed has raised; a group of them if several have.

        """
        self._capture_due = False  # what changes from here on is asked for again
        attachments, takes = tuple(self._attached.values()), self._takes
        states: dict[Attachment, Any] = {}
        errors: list[Exception] = []
        try:
            async with anyio.create_task_group() as group:
                for attachment in attachments:
                    group.start_soon(
                        self._ask, attachment, states, errors, name="perdure:contributor"
                    )
        except anyio.get_cancelled_exc_class():
            late = [
                attachment.contributor.name
                for attachment in attachments
                if attachment not in states
            ]
            log_facts(
                log,
                logging.WARNING,
                "contributors did not answer in time",
                session=str(self._session._tracked.key),
                contributors=late,
            )
            raise
        finally:
            if takes == self._takes:  # else what they held does not count any more
                self._keep(attachments, states, errors)
        _raise_if_any(errors)

    async def _ask(
        self, attachment: Attachment, states: dict[Attachment, Any], errors: list[Exception]
    ) -> None:
        try:
            states[attachment] = await attachment.contributor.capture()
        except (KeyboardInterrupt, SystemExit) as error:
            self._session._runtime.host.leave(error)  # raised here it would end the loop at once
        except anyio.get_cancelled_exc_class() as error:
            if was_cancelled(error):
                raise
            # It awaited what was cancelled, which is its failure.
            errors.append(_named(RuntimeError(f"it ended with {error!r}"), attachment))
        except Exception as error:  # noqa: BLE001  # raised when all are done
            errors.append(_named(error, attachment))

    def _keep(
        self,
        attachments: tuple[Attachment, ...],
        states: dict[Attachment, Any],
        errors: list[Exception],
    ) -> None:
        """Append what has changed, in the order of attachment: nothing is awaited here."""
        for attachment in attachments:
            # It did not answer, or was detached while it was asked.
            if (
                attachment not in states
                or self._attached.get(attachment.contributor.name) is not attachment
            ):
                continue
            types, contributor = self._session._runtime.registry, attachment.contributor
            try:
                change = change_of(
                    contributor.name,
                    states[attachment],
                    contributor.version,
                    attachment.kept,
                    types,
                )
                if change is not None:
                    entry, kept = change
                    self._session._accept((entry,))
                    attachment.kept = kept
            except Exception as error:  # noqa: BLE001  # one's failure is not the others'
                errors.append(_named(error, attachment))


def _checked(contributor: Contributor) -> str:
    name: Any = contributor.name
    version: Any = contributor.version
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidArgumentError(
            f"a contributor's name must be text without a slash, not {name!r}", contributor=name
        )
    if not isinstance(version, int) or version < 1:
        raise InvalidArgumentError(
            f"contributor {name!r}: invalid version={version!r}: give a whole number from 1",
            contributor=name,
            version=version,
        )
    return str(name)


async def _migrated(contributor: Contributor, state: Any, version: int, key: SessionKey) -> Any:
    """Return a state in the form of the contributor's version, step by step."""
    name, wanted = contributor.name, contributor.version
    if version > wanted:
        raise UnsupportedVersionError(
            f"session {key}: the stored state of {name!r} has version {version}, this "
            f"contributor reads up to {wanted}: use a newer one; the state was left as it is",
            key=str(key),
            contributor=name,
            version=version,
        )
    migrate = getattr(contributor, "migrate", None)
    for at in range(version, wanted):
        if migrate is None:
            raise UnsupportedVersionError(
                f"session {key}: the stored state of {name!r} has version {at}, this contributor "
                f"is at {wanted}: give it a method migrate(state, from_version); the state was "
                "left as it is",
                key=str(key),
                contributor=name,
                version=at,
            )
        state = migrate(state, at)
        if inspect.isawaitable(state):
            state = await state
    return state


def _named(error: Exception, attachment: Attachment) -> Exception:
    error.add_note(f"raised by the contributor {attachment.contributor.name!r}")
    return error


def _raise_if_any(errors: list[Exception]) -> None:
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("contributors failed", errors)
