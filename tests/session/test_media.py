"""Images and other media: counted as tokens, in blobs once, and back for the model."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import perdure
from perdure import Limits, Message, Session, Shutdown, ToolCall, register
from perdure.errors import (
    InvalidArgumentError,
    LeaseLostError,
    SessionQuarantinedError,
    UnsavedChangesError,
)
from perdure.events import MediaLeftOut
from perdure.formats import FullAgentState, read_state, write_state
from perdure.providers import FORMATS
from perdure.records.checkpoints import CapturedState
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import MESSAGE_KINDS, Record
from perdure.session.internals import store_below
from perdure.store import Capabilities, Store, take_after
from perdure.stores import EncryptedStore, StateStore
from perdure.stores.delegate import DelegatingStore
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from perdure.testing import FaultyStore
from perdure.transfer import (
    backup,
    migrate,
    read_bundle,
    restore_backup,
    verify_backup,
    write_bundle,
)
from perdure.types import Medium
from tests._virtual import BACKENDS, run
from tests.images import encoded, part, png, shown, url, words
from tests.session.conftest import Connect

KB = 1000
KEY = SessionKey("ada")


def look(session: Session, number: int, size: int = 100 * KB, image: bytes | None = None) -> bytes:
    """Append a question that a tool answers with a screenshot; return that."""
    image = png(size, number) if image is None else image
    session.append(
        Message.user(f"look {number}"),
        Message.assistant(tool_calls=[ToolCall(f"c{number}", "shot")]),
        Message.tool(f"c{number}", [part(image)], name="shot"),
        Message.assistant(f"saw {number}"),
    )
    return image


async def records(store: Store, key: SessionKey = KEY) -> list[Record]:
    return [record async for chunk in store.read_log(key) for record in chunk.records]


class WholeState:
    """A storage of one whole state, in memory."""

    def __init__(self) -> None:
        self.state: FullAgentState | None = None

    async def load(self) -> FullAgentState | None:
        return self.state

    async def save(self, state: FullAgentState) -> None:
        self.state = state

    async def exists(self) -> bool:
        return self.state is not None

    async def delete(self) -> None:
        self.state = None

    async def get_last_modified(self) -> None:
        return None

    def get_path(self) -> str:
        return "memory"


async def test_a_large_image_lies_in_a_blob_and_comes_back(again: Connect) -> None:
    image = png(100 * KB)
    said = Message.user([{"type": "text", "text": "What is it?"}, part(image)])
    async with again() as sessions, sessions.open("ada") as session:
        session.append(said)
        await session.save()
        [record] = [
            one for one in await records(store_below(sessions)) if one.kind in MESSAGE_KINDS
        ]
        assert len(record.payload) < 500
        assert await store_below(sessions).get_blob("", name_of(image)) == image
        assert session.context()[0].content == said.content
        assert (await session.history())[0].value.content == said.content
    async with again() as sessions, sessions.open("ada") as session:
        assert session.context()[0].content == said.content
        assert (await session.history())[0].value.content == said.content
        assert shown(session.context("anthropic").messages) == [image]
    async with again() as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert view.context()[0].content == said.content


@pytest.mark.parametrize(
    "message",
    [
        Message.user("look", image_urls=[url(png(80 * KB, 1)), "https://example.org/a.png"]),
        Message.user([{"type": "image_url", "image_url": {"url": url(png(80 * KB, 2))}}]),
        Message.user([{"inlineData": {"mimeType": "image/png", "data": encoded(png(80 * KB, 3))}}]),
        Message.user([{"type": "input_image", "image_url": url(png(80 * KB, 4))}]),
        Message.user(
            [{"type": "input_audio", "input_audio": {"data": "QUJD" * 30_000, "format": "wav"}}]
        ),
        Message.user(
            [
                {
                    "type": "file",
                    "file": {"file_data": "data:application/pdf;base64," + "QUJD" * 40_000},
                }
            ]
        ),
        Message.user("listen", audio_urls=["data:audio/mpeg;base64," + "QUJD" * 40_000]),
        Message.user("watch", video_urls=["data:video/mp4;base64," + "QUJD" * 40_000]),
    ],
    ids=["urls", "chat", "gemini", "responses", "audio", "pdf", "audio url", "video url"],
)
async def test_media_of_each_shape_lie_in_blobs_and_come_back(
    again: Connect, message: Message
) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        session.append(message)
        await session.save()
        [record] = [
            one for one in await records(store_below(sessions)) if one.kind in MESSAGE_KINDS
        ]
        assert len(record.payload) < 600
    async with again() as sessions, sessions.open("ada") as session:
        [back] = session.context()
        kept = ("content", "image_urls", "audio_urls", "video_urls")
        assert [getattr(back, name) for name in kept] == [getattr(message, name) for name in kept]


async def test_a_tool_may_return_one_image_by_itself_or_as_a_data_url(again: Connect) -> None:
    image, other = png(100 * KB, 1), png(100 * KB, 2)
    async with again() as sessions, sessions.open("ada") as session:
        calls = [ToolCall("a", "shot"), ToolCall("b", "shot")]
        session.append(Message.user("look"), Message.assistant(tool_calls=calls))
        session.append(Message.tool("a", part(image), name="shot"))
        session.append(Message.tool("b", url(other), name="shot"))
        for format in FORMATS:
            context = session.context(format)
            request = context if isinstance(context, list) else context.messages
            assert shown(request) == [image, other], format


async def test_each_image_lies_in_the_store_once(again: Connect) -> None:
    image = png(100 * KB)
    async with again() as sessions, sessions.open("ada") as session:
        for number in range(3):
            look(session, number, image=image)
            session.append(Message.user("and this", image_urls=[url(image)]))
            await session.save()
        await session.aclose()
        assert await store_below(sessions).blob_names("") == [name_of(image)]
        documents = await store_below(sessions).read_documents(KEY, None)
        assert all(
            encoded(image)[:1000].encode() not in one.data for one in documents.found.values()
        )


async def test_a_small_image_stays_in_its_record_and_takes_no_room_of_text(again: Connect) -> None:
    async with again(limits=Limits(context_bytes=20_000)) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("My code word is herring."))
            images = [look(session, number, 30 * KB) for number in range(8)]
            await session.save()
            assert await store_below(sessions).blob_names("") == []
            context = session.context("anthropic").messages
            assert "herring" in words(context)
            assert shown(context) == images


async def test_screenshots_push_no_text_out_of_the_context(again: Connect) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        session.append(Message.system("Be careful."), Message.user("My code word is herring."))
        images = [look(session, number, 300 * KB) for number in range(6)]
        before = {format: session.context(format) for format in FORMATS}
        assert "herring" in words(before["anthropic"].messages)
        assert shown(before["anthropic"].messages) == images
    async with again() as sessions, sessions.open("ada") as session:
        assert {format: session.context(format) for format in FORMATS} == before


@pytest.mark.parametrize("format", FORMATS)
async def test_the_oldest_media_leave_a_note_when_the_budget_is_spent(
    again: Connect, format: Any
) -> None:
    limits = Limits(context_media_tokens=1000, media_tokens=100)
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        images = [look(session, number, 70 * KB) for number in range(14)]
        context = session.context(format)
        request = context if isinstance(context, list) else context.messages
        # Some at a time, so that a provider's cache holds for a while.
        assert shown(request) == images[-9:]
        assert words(request).count("[image/png, 68 KB, left out: the budget") == 5
        assert encoded(images[0])[:200] not in json.dumps(request)
        assert all(f"look {number}" in words(request) for number in range(14))
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        assert session.context(format) == context
        items = await session.history(limit=100)
        results = [one.value for one in items if one.value.tool_result]
        assert [shown(one.tool_result.result) for one in results] == [[one] for one in images]


async def test_what_stays_is_the_same_while_some_room_is_left(again: Connect) -> None:
    limits = Limits(context_media_tokens=800, media_tokens=100)
    firsts = []
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        for number in range(13):
            look(session, number, 66 * KB)
            firsts.append(session.context("anthropic").messages[2])
    assert [json.dumps(one) == json.dumps(firsts[0]) for one in firsts] == [True] * 8 + [False] * 5


async def test_the_newest_media_stay_though_they_alone_are_more_than_the_budget(
    again: Connect,
) -> None:
    limits = Limits(context_media_tokens=100, media_tokens=90)
    images = [png(70 * KB, number) for number in range(3)]
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        look(session, 7)
        session.append(Message.user([part(image) for image in images]))
        session.append(Message.assistant("Three boats."), Message.user("And?"))
        assert shown(session.context("anthropic").messages) == images
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        assert shown(session.context("anthropic").messages) == images


async def test_what_is_left_out_is_told_once(
    again: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    events: list[MediaLeftOut] = []
    limits = Limits(context_media_tokens=300, media_tokens=100)
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        sessions.on("media_left_out", events.append)
        for number in range(6):
            look(session, number, 70 * KB)
            session.context("anthropic")
    told = [one for one in caplog.records if "left out" in one.getMessage()]
    assert len(told) == 1
    assert "session ada" in told[0].getMessage()
    assert [(str(one.key), one.count, one.lost) for one in events] == [("ada", 2, 0)]


async def test_tokens_of_media_are_what_the_program_says(again: Connect) -> None:
    seen: list[Medium] = []

    def count(medium: Medium) -> int:
        seen.append(medium)
        return 10 if medium.width < 1000 else 600

    limits = Limits(context_media_tokens=1000, media_tokens=count)
    small = [png(70 * KB, number, width=640, height=480) for number in range(3)]
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        look(session, 7)
        session.append(Message.user([part(image) for image in small]))
        assert len(shown(session.context("anthropic").messages)) == 4
        look(session, 8)
        assert len(shown(session.context("anthropic").messages)) == 4  # the first one has left
    assert (seen[0].type, seen[0].width, seen[0].height) == ("image/png", 1280, 800)


@pytest.mark.parametrize("wrong", [-1, "many", 1.5, True])
def test_tokens_of_media_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="media_tokens"):
        Limits(media_tokens=wrong)


async def test_a_lost_blob_leaves_a_note_and_the_session_goes_on(
    again: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        lost, kept = look(session, 1), look(session, 2)
        await session.save()
        await store_below(sessions).remove_blobs("", [name_of(lost)])
    async with again() as sessions, sessions.open("ada") as session:
        for format in FORMATS:
            context = session.context(format)
            request = context if isinstance(context, list) else context.messages
            assert shown(request) == [kept]
            assert words(request).count("[image/png, 97 KB, lost: its blob is") == 1
        results = [one.value for one in await session.history() if one.value.tool_result]
        assert "lost: its blob" in results[0].tool_result.result[0]["text"]
        assert [one.getMessage() for one in caplog.records if "are lost" in one.getMessage()]
        third = look(session, 3)
        await session.save()
        assert shown(session.context("anthropic").messages) == [kept, third]


async def test_blobs_are_durable_before_the_record_that_names_them() -> None:
    backing = MemoryBacking()
    store = FaultyStore(MemoryStore(backing=backing), fail_on="put_blobs", times=None)
    quiet = Shutdown(signals=False)
    async with perdure.connect(store, autosave=None, shutdown=quiet) as sessions:
        session = await sessions.open("ada")
        session.append(Message.user("Hello"))
        await session.save()
        image = look(session, 1)
        with anyio.move_on_after(0.05) as waiting:
            await session.save()
        assert waiting.cancelled_caught
        held = await records(MemoryStore(backing=backing))
        assert [one.kind for one in held if one.kind in MESSAGE_KINDS] == ["message"]
        store.mend()
        session.retry()
        await session.save()
        assert await store.blob_names("") == [name_of(image)]
        assert shown(session.context("anthropic").messages) == [image]


async def test_media_come_back_to_forks_copies_and_new_names(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("ada") as session:
            image = look(session, 1)
            await session.save()
        await sessions.fork("ada", "fork")
        await sessions.copy("ada", "copy")
        await sessions.rename("ada", "eve")
        for name in ("fork", "copy", "eve"):
            async with sessions.open(name) as session:
                assert shown(session.context("anthropic").messages) == [image], name
                results = [one.value for one in await session.history() if one.value.tool_result]
                assert shown(results[0].tool_result.result) == [image]
        assert await store_below(sessions).blob_names("") != []
    async with again() as sessions:
        for name in ("fork", "eve"):
            await sessions.forget(name)
        async with sessions.open("copy") as session:
            assert shown(session.context("anthropic").messages) == [image]
        await sessions.forget("copy")
        assert await store_below(sessions).blob_names("") == []


async def test_media_come_back_out_of_bundles_backups_and_other_stores(tmp_path: Path) -> None:
    ours = FileStore(tmp_path / "ours")
    async with perdure.connect(ours) as sessions, sessions.open("ada") as session:
        image = look(session, 1)
    for number, bring in enumerate((_bundle, _migrated, _backed_up)):
        target = FileStore(tmp_path / f"target-{number}")
        source = FileStore(tmp_path / "ours")
        await source.open()
        await target.open()
        await bring(source, target, tmp_path)
        await source.aclose()
        await target.aclose()
        target = FileStore(tmp_path / f"target-{number}")
        async with perdure.connect(target) as sessions, sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == [image], bring
            assert name_of(image) in await target.blob_names("")


async def _bundle(source: Store, target: Store, folder: Path) -> None:
    await write_bundle(source, KEY, folder / "ada.jsonl")
    await read_bundle(target, folder / "ada.jsonl")


async def _migrated(source: Store, target: Store, folder: Path) -> None:
    await migrate(source, target)


async def _backed_up(source: Store, target: Store, folder: Path) -> None:
    kept = FileStore(folder / "kept")
    await kept.open()
    await backup(source, kept)
    assert (await verify_backup(kept)).problems == {}
    await restore_backup(kept, target)
    await kept.aclose()


async def test_an_exported_state_has_its_media_in_place(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path / "ours") as sessions, sessions.open("ada") as session:
        image = look(session, 1)
        await session.save()
        state = await perdure.export_state(sessions, "ada")
        assert state is not None
    async with perdure.connect(tmp_path / "theirs") as sessions:
        await perdure.import_state(sessions, state)
        async with sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == [image]
            assert await store_below(sessions).blob_names("") == [name_of(image)]


async def test_media_come_back_through_encryption_and_compression(tmp_path: Path) -> None:
    def made() -> Store:
        return EncryptedStore(FileStore(tmp_path), b"k" * 32, compression="zstd")

    async with perdure.connect(made()) as sessions, sessions.open("ada") as session:
        image = look(session, 1)
    async with perdure.connect(made()) as sessions, sessions.open("ada") as session:
        assert shown(session.context("anthropic").messages) == [image]
        await sessions.forget("ada")
    assert not any(
        image[100:200] in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )


async def test_media_stay_in_the_log_where_a_store_keeps_no_blobs() -> None:
    limits = Limits(context_media_tokens=400, media_tokens=100)
    storage = WholeState()
    async with perdure.connect(StateStore(storage), limits=limits) as sessions:
        async with sessions.open("ada") as session:
            session.append(Message.user("My code word is herring."))
            images = [look(session, number, 200 * KB) for number in range(6)]
            request = session.context("anthropic").messages
            assert shown(request) == images[2:]
            assert "herring" in words(request)
    async with perdure.connect(StateStore(storage), limits=limits) as sessions:
        async with sessions.open("ada") as session:
            assert session.context("anthropic").messages == request


async def test_a_retracted_image_is_gone_from_the_context_and_an_older_one_comes_back(
    again: Connect,
) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        first = look(session, 1)
        version = session.version
        second = look(session, 2)
        await session.retract(after=version)
        assert shown(session.context("anthropic").messages) == [first]
        await session.retract(after=version + 4)
        assert shown(session.context("anthropic").messages) == [first, second]
    async with again() as sessions, sessions.open("ada") as session:
        assert shown(session.context("anthropic").messages) == [first, second]


async def test_older_media_are_shown_again_when_newer_ones_are_retracted(again: Connect) -> None:
    limits = Limits(context_media_tokens=400, media_tokens=100)
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        images = [look(session, number, 70 * KB) for number in range(4)]
        version = session.version
        for number in range(4, 12):
            look(session, number, 70 * KB)
        await session.save()
        await session.retract(after=version)
        assert shown(session.context("anthropic").messages) == images
        before = session.version
        with pytest.raises(ZeroDivisionError):
            async with session.turn("request"):
                for number in range(4, 12):
                    look(session, number, 70 * KB)
                raise ZeroDivisionError
        assert session.version > before
        async with session.turn("request"):
            assert shown(session.context("anthropic").messages) == images


async def test_older_media_are_shown_again_after_a_rollback(again: Connect) -> None:
    limits = Limits(context_media_tokens=400, media_tokens=100)
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        images = [look(session, number, 70 * KB) for number in range(4)]
        made = await session.checkpoints.create("one")
        for number in range(4, 12):
            look(session, number, 70 * KB)
        await session.save()
        await session.checkpoints.rollback(made.id)
        assert shown(session.context("anthropic").messages) == images


async def test_what_would_not_be_saved_is_spilled_with_its_media(tmp_path: Path) -> None:
    backing = MemoryBacking()
    gone = FaultyStore(MemoryStore(backing=backing), fail_on="append_many", nth=2, times=None)
    spilling = Shutdown(
        deadline=0.2, turn_grace=0, hard_grace=0.2, signals=False, spill=str(tmp_path)
    )
    async with perdure.connect(gone, autosave=None, shutdown=spilling) as sessions:
        session = await sessions.open("ada")
        session.append(Message.user("Hello"))
        await session.save()
        image = look(session, 1)
    async with perdure.connect(MemoryStore(backing=backing), shutdown=spilling) as sessions:
        async with sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == [image]
            assert await store_below(sessions).blob_names("") == [name_of(image)]
    assert list(tmp_path.iterdir()) == []


async def test_a_session_that_was_lost_is_forked_with_its_media() -> None:
    backing = MemoryBacking()
    quiet = Shutdown(signals=False)
    async with perdure.connect(MemoryStore(backing=backing), autosave=None, shutdown=quiet) as ours:
        session = await ours.open("ada")
        first = look(session, 1)
        await session.save()
        second = look(session, 2)
        holder = await store_below(ours).holder(KEY)
        assert holder is not None
        other = MemoryStore(backing=backing)
        await other.open()
        await take_after(other, KEY, after=holder.epoch)
        with pytest.raises(LeaseLostError):
            await session.save()
        await session.fork_unsaved("eve")
        await other.aclose()
        async with ours.open("eve") as fork:
            assert shown(fork.context("anthropic").messages) == [first, second]


async def test_a_plan_keeps_media(again: Connect) -> None:
    async with again() as sessions:
        async with sessions.open("ada") as session:
            image = look(session, 1)
            session.append(Message.assistant(tool_calls=[ToolCall("cut", "shot")]))
            session.append(Message.user("hello?"))
            await session.save()
            plan = await session.plan_restore()
            assert plan.replaces
            await session.apply(plan)
            assert shown(session.context("anthropic").messages) == [image]
        async with sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == [image]


async def test_checkpoints_of_a_log_with_media_are_sound(again: Connect) -> None:
    async with again() as sessions, sessions.open("ada") as session:
        look(session, 1)
        made = await session.checkpoints.create("one")
        look(session, 2)
        await session.checkpoints.create("two")
        assert (await session.checkpoints.verify()).problems == ()
        await session.checkpoints.rollback(made.id)
        assert len(shown(session.context("anthropic").messages)) == 1
    async with again() as sessions:
        view = await sessions.load("ada")
        assert view is not None
        assert (await view.checkpoints.verify()).problems == ()


async def test_only_a_session_with_media_in_blobs_is_of_a_newer_format(again: Connect) -> None:
    async with again() as sessions:
        for name, size in (("ada", 100 * KB), ("bo", 10 * KB)):
            async with sessions.open(name) as session:
                look(session, 1, size)
                await session.save()
                await session.retract(after=0)
                await session.aclose()
        formats = [
            (await store_below(sessions).read_documents(SessionKey(name), ())).manifest.format  # type: ignore[union-attr]
            for name in ("ada", "bo")
        ]
        assert formats == [2, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_media_of_a_session_are_folded_soon_and_those_after_as_text_is(
    backend: str,
) -> None:
    """Earlier releases refuse the session from then on; a fold for each image would cost much."""

    async def main() -> None:
        store = MemoryStore()
        quiet = Shutdown(signals=False)
        async with (
            perdure.connect(store, shutdown=quiet) as sessions,
            sessions.open("ada") as session,
        ):
            folds: list[Any] = []
            sessions.on("folded", folds.append)
            for _ in range(30):
                session.append(Message.user("x" * 100))
            await session.save()
            await anyio.sleep(10)
            assert folds == []
            look(session, 1)
            await session.save()
            await anyio.sleep(1)
            assert len(folds) == 1
            for number in range(2, 6):
                look(session, number, 300 * KB)
                await session.save()
            await anyio.sleep(10)
            assert len(folds) == 1
            documents = await store.read_documents(KEY, ())
            assert documents.manifest is not None
            assert documents.manifest.format == 2

    run(backend, main)


async def test_posted_media_come_back(again: Connect) -> None:
    image = png(100 * KB)
    async with again() as sessions:
        await sessions.post("ada", Message.user([part(image)]))
        async with sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == [image]
            await session.save()
            assert await store_below(sessions).blob_names("") == [name_of(image)]


async def test_an_interrupted_turn_gives_its_media_back(again: Connect) -> None:
    image = png(100 * KB)
    said = Message.user([part(image)])
    async with again() as sessions, sessions.open("ada") as session:
        with pytest.raises(ZeroDivisionError):
            async with session.turn("request"):
                session.append(said)
                raise ZeroDivisionError
    async with again() as sessions, sessions.open("ada") as session:
        async with session.turn("request", resume=True) as turn:
            assert [one.content for one in turn.messages] == [said.content]


async def test_what_only_looks_like_a_reference_stays_as_it_is(again: Connect) -> None:
    text = f"perdure:media:data:image/png:5:1x1:{'a' * 64}"
    said = Message.user([{"type": "text", "text": text}])
    async with again() as sessions, sessions.open("ada") as session:
        session.append(Message.user(text), said)
        await session.save()
        assert [one.content for one in session.context()] == [text, said.content]
        assert [one.value.content for one in await session.history()] == [text, said.content]


class InlineStore(DelegatingStore):
    """A store as earlier releases wrote it: with media in the log."""

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, blobs=False)


async def inline_log(backing: MemoryBacking) -> tuple[bytes, int]:
    """Write a session with a checkpoint of an image; return that, and the checkpoint."""
    store = InlineStore(MemoryStore(backing=backing))
    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        image = look(session, 1)
        made = await session.checkpoints.create("inline")
        look(session, 2)
        await session.save()
        assert max(len(record.payload) for record in await records(store)) > 100 * KB
        # Earlier releases digested all records so, and those are what is compared.
        digest = hashlib.sha256()
        for record in (await records(store))[1 : made.event_seq]:
            digest.update(b"%d %b %d\n" % (record.seq, record.kind.encode(), len(record.payload)))
            digest.update(record.payload)
        assert isinstance(made.state, CapturedState)
        assert made.state.log == f"sha256:{digest.hexdigest()}"
        return image, made.id


async def test_checkpoints_of_a_log_with_media_inline_are_sound_and_what_follows_is_lifted() -> (
    None
):
    backing = MemoryBacking()
    image, made = await inline_log(backing)
    store = MemoryStore(backing=backing)
    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        assert (await session.checkpoints.verify()).problems == ()
        size = sum(len(record.payload) for record in await records(store))
        third = look(session, 3)
        assert len(shown(session.context("anthropic").messages)) == 3
        await session.checkpoints.create("partly")
        look(session, 4)
        await session.checkpoints.create("lifted")
        assert (await session.checkpoints.verify()).problems == ()
        assert name_of(third) in await store.blob_names("")
        assert sum(len(record.payload) for record in await records(store)) < size + 20 * KB
        await session.checkpoints.rollback(made)
        assert shown(session.context("anthropic").messages) == [image]
    store = MemoryStore(backing=backing)
    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        assert (await session.checkpoints.verify()).problems == ()
        assert shown(session.context("anthropic").messages) == [image]
        await session.checkpoints.create("after")
        assert (await session.checkpoints.verify()).problems == ()


@pytest.mark.parametrize("keeps", ["blobs", "none"])
@pytest.mark.parametrize("source", ["inline", "lifted"])
async def test_checkpoints_are_sound_wherever_the_media_of_an_imported_log_lie(
    source: str, keeps: str
) -> None:
    backing = MemoryBacking()
    if source == "inline":
        await inline_log(backing)
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        if source == "lifted":
            async with sessions.open("ada") as session:
                look(session, 1)
                await session.checkpoints.create("one")
        state = await perdure.export_state(sessions, "ada")
        assert state is not None
    target = MemoryStore()
    store = target if keeps == "blobs" else InlineStore(target)
    async with perdure.connect(store) as sessions:
        await perdure.import_state(sessions, state)
        async with sessions.open("ada") as session:
            [found] = await session.checkpoints.states()
            assert (await session.checkpoints.verify()).problems == ()
            await session.checkpoints.rollback(found.id)
            assert len(shown(session.context("anthropic").messages)) == 1


async def test_a_changed_record_with_media_is_found(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path) as sessions, sessions.open("ada") as session:
        look(session, 1)
        await session.checkpoints.create("one")
    state = None
    async with perdure.connect(tmp_path) as sessions:
        state = await perdure.export_state(sessions, "ada")
        assert state is not None
        written = write_state(state).replace(encoded(png(100 * KB, 1))[:1000].encode(), b"A" * 1000)
        fields = read_state(written).state
        await perdure.import_state(sessions, fields, id="bo")
        async with sessions.open("bo") as session:
            assert len((await session.checkpoints.verify()).problems) == 1


async def test_a_context_that_is_written_again_is_spilled_and_brought_back(tmp_path: Path) -> None:
    backing = MemoryBacking()
    gone = FaultyStore(MemoryStore(backing=backing), fail_on="append_many", nth=2, times=None)
    spilling = Shutdown(
        deadline=0.2, turn_grace=0, hard_grace=0.2, signals=False, spill=str(tmp_path)
    )
    options: Any = {"shutdown": spilling, "limits": Limits(context_bytes=2000)}
    async with perdure.connect(gone, autosave=None, **options) as sessions:
        session = await sessions.open("ada")
        image, version = look(session, 1), session.version
        session.append(*(Message.user("x" * 500) for _ in range(8)))
        await session.save()
        await session.retract(after=version)
        assert shown(session.context("anthropic").messages) == [image]
        other = look(session, 2)
    async with perdure.connect(MemoryStore(backing=backing), **options) as sessions:
        async with sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == [image, other]
    assert list(tmp_path.iterdir()) == []


async def test_media_that_are_left_out_anywhere_leave_a_note(again: Connect) -> None:
    image = png(100_000)
    said = [
        Message.assistant(url(image), reasoning=url(image)),
        Message.user([url(image), {"type": "x", "urls": [url(image)]}]),
        Message.assistant(tool_calls=[ToolCall("a", "b", {"urls": [url(image)]})]),
        Message.tool("a", [[url(image)], {"shots": [url(image)]}], name="b"),
        Message.user("look", image_urls=[url(png(100_000, 1))]),
    ]
    limits = Limits(context_media_tokens=1, media_tokens=1)
    for live in (True, False):
        async with again(limits=limits) as sessions, sessions.open("ada") as session:
            if live:
                session.append(*said)
            context = session.context()
            assert "perdure:media:" not in str(context)
            assert encoded(image)[:100] not in str(context[1:])
            assert context[1].content[0].startswith("[image/png, ")
            assert context[4].image_urls == said[4].image_urls


def _raise(_: Medium) -> int:
    raise KeyError("a bug")


@pytest.mark.parametrize("answer", [None, -1, 1.5, "1", True], ids=repr)
async def test_a_function_of_tokens_that_fails_costs_no_more_than_its_answer(
    again: Connect, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    calls = 0

    def count(medium: Medium) -> int:
        nonlocal calls
        calls += 1
        return _raise(medium) if answer is None else answer

    limits = Limits(media_tokens=count, context_media_tokens=4000)
    images = [png(100_000, number) for number in range(6)]
    for live in (True, False):
        async with again(limits=limits) as sessions, sessions.open("ada") as session:
            if live:
                for number, image in enumerate(images):
                    session.append(Message.user(f"n{number}", image_urls=[url(image)]))
                    await session.save()
            assert len(await session.history()) == 6
            assert shown(session.context("openai"))[-1] == images[-1]
            assert "lost" not in str(session.context())
    async with again(limits=limits) as sessions:
        assert await sessions.load("ada") is not None
    assert calls == 1
    warnings = [one for one in caplog.records if "media_tokens" in one.getMessage() and one.levelno]
    assert len([one for one in warnings if "estimate" in one.getMessage()]) == 1


def test_a_budget_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="context_media_tokens"):
        Limits(context_media_tokens=True)


@pytest.mark.parametrize("fails_at", range(1, 9))
async def test_a_function_of_tokens_that_fails_once_takes_no_message(
    again: Connect, caplog: pytest.LogCaptureFixture, fails_at: int
) -> None:
    calls = 0

    def count(medium: Medium) -> int:
        nonlocal calls
        calls += 1
        return _raise(medium) if calls == fails_at else 1000

    limits = Limits(media_tokens=count, context_media_tokens=2000)
    images = [png(100_000, number, width=64, height=64) for number in range(4)]
    said = [f"n{number}" for number in range(4)]
    async with again() as sessions, sessions.open("ada") as session:
        for text, image in zip(said, images, strict=True):
            session.append(Message.user(text, image_urls=[url(image)]))
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        for _ in range(4):
            assert [one.text.partition("\n")[0] for one in session.context()] == said
            assert shown(session.context("openai"))[-1] == images[-1]
            await session.save()
        if calls == fails_at:  # an image takes about 250 tokens, by the estimate
            assert shown(session.context("openai")) == images
    told = [one for one in caplog.records if "estimate counts" in one.getMessage()]
    assert len(told) == (calls == fails_at)


@pytest.mark.parametrize("tokens", [10**400, lambda _: 10**400], ids=["number", "function"])
async def test_more_tokens_than_any_window_has_leave_the_newest_media(
    again: Connect, tokens: Any
) -> None:
    async with again(limits=Limits(media_tokens=tokens)) as sessions, sessions.open("ada") as ada:
        look(ada, 1)
        newest = look(ada, 2)
        assert shown(ada.context("anthropic").messages) == [newest]


async def test_what_is_left_out_and_what_is_lost_are_told_once_each(again: Connect) -> None:
    told: list[tuple[int, int]] = []
    limits = Limits(context_media_tokens=300, media_tokens=100)
    async with again(limits=limits) as sessions, sessions.open("ada") as session:
        sessions.on("media_left_out", lambda facts: told.append((facts.count, facts.lost)))
        first, version = look(session, 1), session.version
        for number in range(2, 7):
            look(session, number)
        await session.save()
        session.context()
        await store_below(sessions).remove_blobs("", [name_of(first)])
        await session.retract(after=version)
        session.context()
        await session.save()
        look(session, 7)
        session.context()
    assert told == [(3, 0), (0, 1)]


async def test_media_that_a_store_refuses_for_good_are_reported_as_records_are() -> None:
    store = FaultyStore(MemoryStore(), fail_on="put_blobs", how="permanent", times=None)
    sessions = await perdure.connect(store, shutdown=Shutdown(signals=False))
    session = await sessions.open("ada")
    look(session, 1)
    with pytest.raises(SessionQuarantinedError, match="put_blobs"):
        await session.save()
    assert sessions.health().unsaved["quarantined"] == 1
    with pytest.raises(UnsavedChangesError, match="1 quarantined: ada"):
        await sessions.__aexit__(None, None, None)
    assert store.calls["put_blobs"] == 1


@dataclass
class Shot:
    """A screenshot that takes nothing but an image, whole."""

    url: str
    raw: bytes

    def __post_init__(self) -> None:
        if not self.url.startswith("data:image/png;base64,"):
            raise ValueError(self.url[:40])


class Page(msgspec.Struct):
    shots: list[Shot]
    at: date


async def test_media_in_objects_of_registered_types_come_back_to_the_letter(
    again: Connect,
) -> None:
    image = png(100_000)
    page = Page([Shot(url(image), image)], date(2026, 1, 2))
    said = [
        Message.tool("a", page, name="shoot"),
        Message.tool(
            "b", {"page": page, "data": image, "part": part(png(100_000, 1))}, name="shoot"
        ),
        Message.assistant(tool_calls=[ToolCall("c", "compare", {"pages": (page, page)})]),
    ]
    types = [register(Shot, tag="shot"), register(Page, tag="page")]
    options: Any = {"types": types, "limits": Limits(context_bytes=10**7)}
    for live in (True, False):
        async with again(**options) as sessions, sessions.open("ada") as session:
            if live:
                session.append(*said)
            for back in (session.context(), [one.value for one in await session.history()]):
                assert [one.tool_result for one in back] == [one.tool_result for one in said]
                assert [one.tool_calls for one in back] == [one.tool_calls for one in said]
            await session.save()
            stored = [one.payload for one in await records(store_below(sessions))]
            assert [one.count(b'"\\u0070erdure:media:') for one in stored[1:4]] == [0, 1, 0]


async def test_a_context_that_was_cut_short_before_is_filled_by_a_rebuild() -> None:
    backing = MemoryBacking()
    store, small = InlineStore(MemoryStore(backing=backing)), Limits(context_bytes=1000)
    async with perdure.connect(store, limits=small) as sessions, sessions.open("ada") as session:
        images = [look(session, number) for number in range(4)]
        session.append(Message.user("x" * 900))
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        async with sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == []
    async with perdure.connect(MemoryStore(backing=backing)) as sessions:
        await sessions.rebuild_working_context("ada")
        async with sessions.open("ada") as session:
            assert shown(session.context("anthropic").messages) == images
            assert len(session.context()) == 17
