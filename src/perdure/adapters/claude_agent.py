"""A session store of the Claude Agent SDK in a store of perdure: `PerdureSessionStore`.

A transcript is one session, and an entry of it one record, with the entry's own JSON; a large one
is in blobs (`perdure.adapters.claims`). A subagent's transcript is a session of the same agent id,
so that it is listed and removed with the main one.

What one call appends is one group of the log, with the summary of the main transcript: a crash
leaves all of it or nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from perdure._lib.lazy import import_extra
from perdure.adapters.claims import claimed_record, filled_record
from perdure.adapters.envelopes import SdkEnvelope, read_entry
from perdure.adapters.items import AdapterManager, Recent, StoreAdapter, quoted
from perdure.adapters.versions import warn_untested
from perdure.errors import NotStorableError, SessionError
from perdure.memory.documents import StateSet
from perdure.memory.state import FOLDER
from perdure.records.json import MAX_VALUE_DEPTH, decode, encode, is_deeper
from perdure.records.keys import DEFAULT_SESSION, SessionKey, session_key
from perdure.records.records import STATE, Entry, Record
from perdure.session.contents import meta_entry
from perdure.session.internals import (
    LogPlace,
    accept,
    contents_of,
    has_content,
    read_stored,
    session_open_here,
    store_of,
)
from perdure.session.manager import SessionManager
from perdure.session.reach import CLAIM
from perdure.session.session import Session, SessionView
from perdure.store import all_records

if TYPE_CHECKING:
    from perdure.lease import OnHeld

sdk: Any = import_extra(
    "claude_agent_sdk",
    used_by="PerdureSessionStore",
    name="the Claude Agent SDK",
    extra="claude-agent-sdk",
)
warn_untested("claude-agent-sdk")

SDK: Final = "claude-agent-sdk"
SHAPE: Final = 1
"""The version of what is stored here of an entry."""
PREFIX: Final = "claude/"
"""The beginning of all ids: the SDK's project keys begin with a dash, as options of commands do."""
SUMMARY: Final = f"{FOLDER}{SDK}.json"
"""The named state that keeps the summary of a main transcript."""
UUID_BYTES: Final = 150
"""Memory for the uuid of an entry, in bytes."""
KNOWN_BYTES: Final = 64 * 1024 * 1024
"""Memory for the uuids of the transcripts last read or written here, in bytes."""


class EntryRecord(SdkEnvelope, frozen=True, omit_defaults=True):
    """One entry of a transcript."""

    entry: Any = None
    text: str = ""
    """The JSON of an entry that msgspec would not read back as it is."""


class TranscriptSummary(msgspec.Struct, frozen=True):
    """The SDK's summary of a main transcript."""

    mtime: int = 0
    """When it was written, in milliseconds since 1970."""
    data: dict[str, Any] = {}


class _Known:
    """State of one transcript that this process knows: of its log up to a record."""

    def __init__(self) -> None:
        self.proof: LogPlace | None = None
        """A durable record: a later session of the same id does not have it."""
        self.restart()

    def restart(self) -> None:
        """Forget the log, to read it from its beginning."""
        self.at: LogPlace = LogPlace(0, 0)
        self.uuids: set[str] = set()
        self.summary: TranscriptSummary | None = None

    def fresh(self, entries: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the indexes of the entries that are not stored yet."""
        fresh, new = [], set[str]()
        for at, entry in enumerate(entries):
            uuid = entry.get("uuid")
            if not isinstance(uuid, str):
                fresh.append(at)
            elif uuid not in self.uuids and uuid not in new:
                new.add(uuid)
                fresh.append(at)
        return fresh

    def add(self, entries: Iterable[Mapping[str, Any]], at: LogPlace) -> None:
        """Take in what the log has up to a record."""
        uuids = (entry.get("uuid") for entry in entries)
        self.uuids.update(uuid for uuid in uuids if isinstance(uuid, str))
        self.at = at


@final
class PerdureSessionStore(StoreAdapter):
    """A ``SessionStore`` of the Claude Agent SDK in any store of perdure.

    Each transcript is a session. ``append`` returns once its entries are durable, all or none of
    them. An entry whose ``uuid`` is stored is not stored again, whichever process has stored it.
    Several processes may append to one transcript: each asks the one that has it. Reading takes no
    lease.

    Args:
        sessions: Where they are kept: what ``perdure.connect(url)`` returns, once that is open.
            None for a manager of its own: see `from_url`.
        tenant: Whose they are, where customers share a store.
        owner: Who new transcripts belong to: a label.
        tags: Labels for listing.
        on_held: What an append does if another process holds the session: ``"handover"`` asks for
            it, ``"steal"`` waits for it to be released or to expire, ``"raise"`` raises at once.
        wait: Seconds to wait for another process.

    Raises:
        InvalidArgumentError: ``sessions`` is no manager.

    """

    def __init__(
        self,
        sessions: SessionManager | None,
        *,
        tenant: str = "",
        owner: str | None = None,
        tags: Sequence[str] = (SDK,),
        on_held: OnHeld = "handover",
        wait: float = 10.0,
    ) -> None:
        self._connection = AdapterManager(
            sessions,
            instead="PerdureSessionStore.from_url(url)",
            tenant=tenant,
            owner=owner,
            tags=tags,
            on_held=on_held,
            wait=wait,
        )
        self._transcripts: Recent[SessionKey, _Known] = Recent(KNOWN_BYTES)

    # What the SDK calls

    async def append(self, key: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
        """Append entries, and return once they are durable; what is stored already is left out.

        Raises:
            InvalidArgumentError: The key cannot be used.
            NotStorableError: An entry is not JSON; nothing was stored.
            TooLargeError: An entry is larger than 256 MiB, or than the limit for a record, and the
                store keeps no blobs; nothing was stored.
            SessionError: The session has messages, and is no transcript.
            LeaseHeldError: Another process keeps holding the session.
            LeaseLostError: The transcript was deleted since it was read or written here; or
                another process has taken it over meanwhile.

        """
        if not entries:
            return
        transcript = self._key(key)
        encoded = [_encoded(entry, f"entries[{at}]") for at, entry in enumerate(entries)]
        known = self._known(transcript)

        async def add(session: Session) -> bool:
            if has_content(session):
                message = f"session {transcript} has messages, and is no transcript: use another id"
                raise SessionError(message, key=str(transcript))
            if not await self._catch_up(session, known):
                return False
            fresh = known.fresh(entries)
            if fresh:
                version = session.version
                added = [entries[at] for at in fresh]
                records = [
                    await claimed_record(session, encoded[at], SDK, at=f"entries[{at}]")
                    for at in fresh
                ]
                if session.version != version:
                    return False
                summary = None
                if transcript.session == DEFAULT_SESSION:
                    summary = _folded(known.summary, key, added)
                    records += _summary_entries(known.summary, summary)
                version = accept(session, tuple(records))
                known.add(added, LogPlace(version, session.epoch))
                known.summary = summary
            return True

        proof = () if known.proof is None else (known.proof,)
        try:
            place = await self._connection.change(transcript, add, of=proof)
        except BaseException:  # what was appended may never be durable
            known.restart()
            raise
        known.proof = max(place, known.proof or place)  # a later call may have ended before
        self._remember(transcript, known)

    async def load(self, key: Mapping[str, Any]) -> list[Any] | None:
        """Return a transcript's entries in the order in which they were stored; None for none.

        Raises:
            CorruptRecordError: One cannot be read.

        """
        transcript = self._key(key)
        source = await self._connection.peek(transcript)
        records: list[Record] = []
        if source is not None:
            records = await all_records(store_of(source).read_log(transcript))
        if source is None or not records:
            self._forget(transcript)
            return None
        entries = await _entries_in(source, records)
        sessions = await self._connection.manager()
        if session_open_here(sessions, transcript) is None:  # else that knows it better
            known = _Known()
            known.add(entries, LogPlace(records[-1].seq, records[-1].epoch))
            known.proof = known.at
            self._remember(transcript, known)
        return entries or None

    async def list_sessions(self, project_key: str) -> list[Any]:
        """Return the ids of a project's sessions, with when they were written last."""
        found = await self._summaries(project_key)
        return [{"session_id": id_, "mtime": summary.mtime} for id_, summary in found.items()]

    async def list_session_summaries(self, project_key: str) -> list[Any]:
        """Return the summaries of a project's sessions, without reading their transcripts."""
        found = await self._summaries(project_key)
        return [_as_sdk(id_, summary) for id_, summary in found.items()]

    async def delete(self, key: Mapping[str, Any]) -> None:
        """Delete a transcript, if there is one; a main one with those of its subagents.

        To erase all that is stored of somebody, see ``sessions.forget``.

        Raises:
            LeaseHeldError: Another process keeps holding one.

        """
        transcript = self._key(key)
        keys = [transcript]
        if transcript.session == DEFAULT_SESSION:  # the last one to go: a repetition finds all
            keys = [*await self._subkeys(transcript.agent), transcript]
        for each in keys:
            await self._connection.delete(each)
            self._forget(each)

    async def list_subkeys(self, key: Mapping[str, Any]) -> list[str]:
        """Return the subpaths of a session's other transcripts."""
        agent = _agent(key["project_key"], key["session_id"])
        return [_subpath(each.session) for each in await self._subkeys(agent)]

    # Inside

    def _key(self, key: Mapping[str, Any]) -> SessionKey:
        agent = _agent(key["project_key"], key["session_id"])
        subpath = key.get("subpath")
        session = DEFAULT_SESSION if subpath is None else _session(subpath)
        return session_key(agent, session, self._connection.tenant)

    def _known(self, transcript: SessionKey) -> _Known:
        known = self._transcripts.get(transcript)
        if known is None:
            known = _Known()
            self._remember(transcript, known)
        return known

    def _remember(self, transcript: SessionKey, known: _Known) -> None:
        self._transcripts.put(transcript, known, UUID_BYTES * (len(known.uuids) + 1))

    def _forget(self, transcript: SessionKey) -> None:
        """Let the next append begin a transcript."""
        self._remember(transcript, _Known())

    async def _catch_up(self, session: Session, known: _Known) -> bool:
        """Take in what was appended since; False if that went on meanwhile."""
        if known.at.epoch != session.epoch and known.at != known.proof:
            known.restart()  # what another call has appended was lost
        begin = known.at
        if begin.seq < session.version:
            unsaved = session.unsaved()
            stored = await all_records(store_of(session).read_log(session.key, after=begin.seq))
            records = {record.seq: record for record in (*unsaved, *stored)}
            newer = [records[seq] for seq in sorted(records) if seq > begin.seq]
            entries = await _entries_in(session, newer)
            data = await contents_of(session).state_document(SUMMARY)
            if known.at != begin:
                return False
            known.add(entries, LogPlace(newer[-1].seq, newer[-1].epoch))
            known.summary = None if data is None else decode(data, TranscriptSummary)
        return known.at.seq == session.version

    async def _subkeys(self, agent: str) -> list[SessionKey]:
        listed = self._connection.listed(prefix=agent)
        keys = [info.key async for info in listed]
        return [key for key in keys if key.agent == agent and key.session != DEFAULT_SESSION]

    async def _summaries(self, project_key: str) -> dict[str, TranscriptSummary]:
        """Return the summaries of a project's sessions by their ids."""
        prefix = _agent(project_key, "")
        listed = self._connection.listed(prefix=prefix)
        keys = [info.key async for info in listed if info.key.session == DEFAULT_SESSION]
        found: dict[str, TranscriptSummary] = {}
        read = await read_stored(await self._connection.manager(), keys, SUMMARY)
        for key in keys:
            if key in read:
                data = read[key].document
            else:  # it takes more than a look
                source = await self._connection.peek(key)
                if source is None:
                    continue
                data = await contents_of(source).state_document(SUMMARY)
            if data is not None:
                found[key.agent.removeprefix(prefix)] = decode(data, TranscriptSummary)
        return found


# Keys


def _agent(project_key: str, session_id: str) -> str:
    return f"{PREFIX}{quoted(project_key)}/{session_id}"


def _session(subpath: str) -> str:
    """Return the id of a subpath's session, which is not that of the main transcript."""
    session = subpath.replace("%", "%25")
    return f"%{session}" if session == DEFAULT_SESSION else session


def _subpath(session: str) -> str:
    if session == f"%{DEFAULT_SESSION}":
        return DEFAULT_SESSION
    return session.replace("%25", "%")


# What is stored


def _encoded(entry: Mapping[str, Any], at: str) -> bytes:
    """Return an entry as a record has it.

    Raises:
        NotStorableError: It is not JSON.

    """
    try:
        data = msgspec.json.encode(entry)
        is_same = not is_deeper(data, MAX_VALUE_DEPTH) and msgspec.json.decode(data) == entry
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        data, is_same = b"", False
    if is_same:
        return encode(EntryRecord(SDK, SHAPE, entry=msgspec.Raw(data)))
    try:
        text = json.dumps(entry)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"{at} is not JSON ({error}): append entries as the SDK gives them, dicts"
        raise NotStorableError(message, path=at, type=type(entry).__name__) from error
    return encode(EntryRecord(SDK, SHAPE, text=text))


async def _entries_in(source: Session | SessionView, records: Iterable[Record]) -> list[Any]:
    """Return the entries that records hold."""
    entries: list[Any] = []
    for record in records:
        # A call for each of 20,000 entries is a tenth of what their load costs.
        whole = await filled_record(source, record) if CLAIM in record.payload else record
        stored = read_entry(whole, EntryRecord, sdk=SDK, newest=SHAPE)
        if stored is not None:
            entries.append(json.loads(stored.text) if stored.text else stored.entry)
    return entries


def _folded(
    before: TranscriptSummary | None, key: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> TranscriptSummary:
    """Return the summary with entries that are added; each is newer than the one before."""
    id_ = key["session_id"]
    folded = sdk.fold_session_summary(
        None if before is None else _as_sdk(id_, before), key, entries
    )
    earliest = 0 if before is None else before.mtime + 1
    return TranscriptSummary(max(int(time.time() * 1000), earliest), folded["data"])


def _as_sdk(session_id: str, summary: TranscriptSummary) -> dict[str, Any]:
    return {"session_id": session_id, "mtime": summary.mtime, "data": summary.data}


def _summary_entries(
    before: TranscriptSummary | None, summary: TranscriptSummary
) -> Iterator[Entry]:
    """Yield the records that change a summary, or begin it, and the title that listings show."""
    fields: dict[str, Any] = {"mtime": summary.mtime}
    if before is None or before.data != summary.data:
        fields["data"] = summary.data
    value = msgspec.Raw(encode(fields))
    yield Entry(STATE, encode(StateSet(SUMMARY, value, partial=before is not None)))
    title = _title(summary)
    if title is not None and (before is None or title != _title(before)):
        yield meta_entry(title=title)


def _title(summary: TranscriptSummary) -> str | None:
    """Return what a listing shows; None if the SDK's summary has no such fields."""
    titles = map(summary.data.get, ("custom_title", "ai_title", "first_prompt"))
    return next((title for title in titles if title and isinstance(title, str)), None)
