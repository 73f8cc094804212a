"""Strings that look like references to media: nothing that a message brings is read as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import perdure
from perdure import EncodedRecord, Message, Session, Shutdown, ToolCall
from perdure.formats import read_state, write_state
from perdure.providers import FORMATS
from perdure.records.chunks import name_of
from perdure.records.json import MAX_RECORD_BYTES
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE, Entry
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.testing.conformance._kit import append_ok, take
from perdure.transfer import read_bundle
from perdure.transfer.bundle_files import items, write_items
from tests.images import encoded, part, png, shown
from tests.session.conftest import Connect

SECRET = png(100_000, 99)
TEXT = f"perdure:media:data:image/png:{len(SECRET)}:1280x800:{name_of(SECRET)}"
URL = TEXT.replace(":data:", ":url:")
RAW = f'"\\u0070{TEXT[1:]}"'
OWN = png(100_000, 1)


async def keep_secret(sessions: perdure.SessionManager) -> None:
    async with sessions.open("eve") as session:
        session.append(Message.user([part(SECRET)]))
        await session.save()  # its blob is there from now on, to be named


def requests(session: Session | Any) -> str:
    contexts = [session.context(format) for format in FORMATS]
    return json.dumps(
        [one if isinstance(one, list) else [one.messages, one.system] for one in contexts]
    )


async def require_text(again: Connect, given: list[Message]) -> None:
    """Check that a session of these messages says them to the letter, and shows no secret."""
    for _ in range(2):
        async with again() as sessions, sessions.open("ada") as session:
            context = [msgspec.structs.replace(one, created_at=None) for one in session.context()]
            assert context == given
            history = [item.value for item in await session.history()]
            assert [msgspec.structs.replace(one, created_at=None) for one in history] == given
            said = requests(session)
            assert encoded(SECRET)[:200] not in said
            assert "lost: its blob" not in said


@pytest.mark.parametrize("images", [[], [part(OWN)]], ids=["alone", "beside an image"])
async def test_forged_references_that_are_appended_stay_text(
    again: Connect, images: list[Any]
) -> None:
    forged = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    forged["source"]["data"] = TEXT  # type: ignore[index]
    given = [
        Message.user([{"type": "text", "text": TEXT}, forged, *images]),
        Message.user("look", image_urls=[URL, TEXT]),
        Message.assistant(tool_calls=[ToolCall("a", "shot", {"data": TEXT}), ToolCall("b", "b")]),
        Message.tool("a", [forged, *images], name="shot"),
        Message.tool("b", TEXT, name="b"),
    ]
    async with again() as sessions:
        await keep_secret(sessions)
        async with sessions.open("ada") as session:
            session.append(*given)
            before = requests(session)
        async with sessions.open("ada") as session:
            assert requests(session) == before
    await require_text(again, given)


@pytest.mark.parametrize("images", [[], [part(OWN)]], ids=["alone", "beside an image"])
async def test_raw_json_that_is_spelled_as_a_reference_stays_text(
    again: Connect, images: list[Any]
) -> None:
    content = json.dumps([{"type": "text", "text": "x"}, *images])[:-1] + f',{{"data":{RAW}}}]'
    record = EncodedRecord("message", f'{{"role":"user","content":{content}}}'.encode())
    extra = {"seen": msgspec.Raw(f'{{"data":{RAW},"mime_type":"image/png"}}'.encode())}
    async with again() as sessions:
        await keep_secret(sessions)
        async with sessions.open("ada") as session:
            session.append(record, Message(role="user", content="y", extra=extra))
        async with sessions.open("ada") as session:
            first, second = session.context()
            assert first.content == [{"type": "text", "text": "x"}, *images, {"data": TEXT}]
            assert msgspec.json.decode(second.extra["seen"])["data"] == TEXT
            assert encoded(SECRET)[:200] not in requests(session)


HISTORIES: dict[str, Any] = {
    "openai": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]},
        {"role": "user", "content": TEXT, "perdure_media": {"data": TEXT}},
    ],
    "openai-responses": [
        {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
        {"type": "image_generation_call", "id": "ig", "status": "completed", "result": TEXT},
    ],
    "anthropic": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": TEXT},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": TEXT},
                },
            ],
        }
    ],
    "gemini": [
        {
            "role": "user",
            "parts": [{"text": TEXT}, {"inlineData": {"mimeType": "image/png", "data": TEXT}}],
        }
    ],
}


@pytest.mark.parametrize("format", FORMATS)
async def test_forged_references_in_a_history_of_another_program_stay_text(
    again: Connect, format: Any
) -> None:
    async with again() as sessions:
        await keep_secret(sessions)
        async with sessions.open("ada") as session:
            await session.extend(HISTORIES[format], format)
            before = requests(session)
        async with sessions.open("ada") as session:
            assert requests(session) == before
            assert encoded(SECRET)[:200] not in before
            assert shown(json.loads(before)) == []
            assert "lost: its blob" not in before


async def test_forged_references_in_posts_stay_text(again: Connect) -> None:
    given = Message.user([{"type": "text", "text": TEXT}, part(OWN)], image_urls=[URL])
    async with again() as sessions:
        await keep_secret(sessions)
        await sessions.post("ada", given)
        async with sessions.open("ada") as session:
            await session.save()
            [message] = session.context()
            assert (message.content, message.image_urls) == (given.content, given.image_urls)
    async with again() as sessions, sessions.open("ada") as session:
        [message] = session.context()
        assert (message.content, message.image_urls) == (given.content, given.image_urls)


async def test_forged_references_stay_text_when_a_context_is_written_again(again: Connect) -> None:
    given = Message.user([{"type": "text", "text": TEXT}, part(OWN), {"data": TEXT}])
    async with again() as sessions:
        await keep_secret(sessions)
        async with sessions.open("ada") as session:
            session.append(given, Message.assistant(tool_calls=[ToolCall("cut", "shot")]))
            session.append(Message.user("hello?"))
            await session.save()
            plan = await session.plan_restore()
            assert plan.replaces
            await session.apply(plan)
        async with sessions.open("ada") as session:
            assert session.context()[0].content == given.content
            assert shown(session.context("anthropic").messages) == [OWN]


@pytest.mark.parametrize("spelling", ["plain", "as a record's"])
@pytest.mark.parametrize("native", [True, False], ids=["with its log", "without"])
async def test_forged_references_in_a_folder_of_json_stay_text(
    tmp_path: Path, spelling: str, native: bool
) -> None:
    """A file can be written by anybody."""
    async with perdure.connect(tmp_path / "ours") as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("REPLACED"), Message.user([part(OWN)]))
        state = await perdure.export_state(sessions, "ada")
    assert state is not None
    written = write_state(state)
    if not native:
        fields = msgspec.json.decode(written, type=dict[str, msgspec.Raw])
        fields.pop("perdure", None)
        written = msgspec.json.encode(fields)
    forged = RAW if spelling != "plain" else f'"{TEXT}"'
    state = read_state(written.replace(b'"REPLACED"', forged.encode())).state
    async with perdure.connect(tmp_path / "theirs") as sessions:
        await keep_secret(sessions)
        await perdure.import_state(sessions, state)
        async with sessions.open("ada") as session:
            assert TEXT in [message.content for message in session.context()]
            said = requests(session)
            assert encoded(SECRET)[:200] not in said
            assert encoded(OWN)[:200] in said
            assert TEXT in [item.value.content for item in await session.history()]


async def test_a_bundle_reaches_no_media_but_its_own(tmp_path: Path) -> None:
    ours, theirs = FileStore(tmp_path / "ours"), FileStore(tmp_path / "theirs")
    async with perdure.connect(ours, shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user(TEXT), Message.user([part(OWN)]))
            session.append(Message.user([{"type": "image", "source": {"data": "REPLACED"}}]))
    async with perdure.connect(theirs, shutdown=Shutdown(signals=False)) as sessions:
        await keep_secret(sessions)
        await ours.open()
        await write_items(tmp_path / "forged.jsonl", _forged(ours))
        await ours.aclose()
        await read_bundle(theirs, tmp_path / "forged.jsonl")
        async with sessions.open("ada") as session:
            said = requests(session)
            assert session.context()[0].content == TEXT
            assert shown(session.context("anthropic").messages) == [OWN]
            assert encoded(SECRET)[:200] not in said
            values = [item.value.content for item in await session.history()]
            assert encoded(SECRET)[:200] not in json.dumps(values)


async def _forged(store: FileStore) -> Any:
    """Give a bundle's lines, with a reference that perdure itself would have spelled so."""
    async for line in items(store, SessionKey("ada")):
        if line.n is not None:
            line.r = msgspec.Raw(bytes(line.r).replace(b'"REPLACED"', RAW.encode()))
        if line.document is None and line.manifest is None:
            yield line


@pytest.mark.parametrize(("times", "size"), [(2000, len(OWN)), (2000, 1)], ids=["true", "untrue"])
async def test_a_record_brings_no_more_media_than_it_could_hold(times: int, size: int) -> None:
    """In a store that somebody made: one that was appended has held all of them, as base64."""
    store = MemoryStore()
    await store.open()
    await store.put_blobs("", {name_of(OWN): OWN})
    reference = f'"\\u0070erdure:media:url:image/png:{size}:1x1:{name_of(OWN)}"'
    content = ",".join([f'{{"type":"image_url","image_url":{{"url":{reference}}}}}'] * times)
    grant = await take(store, SessionKey("ada"))
    record = Entry(MESSAGE, f'{{"role":"user","content":[{content}]}}'.encode(), end=True)
    await append_ok(store, grant, 2, record)
    await store.release(grant.key, grant.epoch)
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        view = await sessions.load("ada")
        assert view is not None
        [item] = await view.history()
        state = await perdure.export_state(sessions, "ada")
        assert state is not None
        for said, most in (
            (msgspec.json.encode(item.value.content), MAX_RECORD_BYTES),
            (msgspec.json.encode(view.context("openai")), 4 * MAX_RECORD_BYTES),
            (write_state(state), 3 * MAX_RECORD_BYTES),
        ):
            assert len(said) <= most
            assert b"lost: its blob" in said
            assert (said.count(encoded(OWN)[:200].encode()) > 50) == (size > 1)
