"""What an earlier release has written is read by this one, and gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import perdure
from perdure import Message, Retention, Shutdown
from perdure.cli.check import audit
from perdure.errors import SessionError
from perdure.records import records
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.session.stored import followed
from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.transfer import migrate
from tests.golden.reader import GOLDEN, HERE, copy_of, seen
from tests.golden.write import SESSIONS, write

VERSIONS = sorted(path for path in HERE.iterdir() if re.fullmatch(r"v\d+", path.name))


@pytest.mark.parametrize("golden", VERSIONS, ids=lambda path: path.name)
async def test_a_golden_store_says_what_it_said_when_it_was_written(
    golden: Path, tmp_path: Path
) -> None:
    expected = json.loads((golden / "expected.json").read_text("utf-8"))
    found = await seen(copy_of(golden, tmp_path), list(SESSIONS))
    assert json.loads(json.dumps(found)) == expected


@pytest.mark.parametrize("golden", VERSIONS, ids=lambda path: path.name)
async def test_reading_a_golden_store_changes_no_byte_of_it(golden: Path, tmp_path: Path) -> None:
    root = copy_of(golden, tmp_path)
    before = contents(root)
    await seen(root, list(SESSIONS))
    assert contents(root) == before


@pytest.mark.parametrize("golden", VERSIONS, ids=lambda path: path.name)
async def test_every_session_of_a_golden_store_goes_on(golden: Path, tmp_path: Path) -> None:
    root = copy_of(golden, tmp_path)
    expected = json.loads((golden / "expected.json").read_text("utf-8"))
    keys = [key for key in SESSIONS if expected[str(key)]["there"]]
    store = FileStore(root)
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        based = [key for key in keys if (await followed(store).base_of(key) or Origin()).at]
        assert based  # forks, copies and renames of before
        for key in based:
            with pytest.raises(SessionError, match="perdure migrate"):
                await sessions.open(key.agent, session=key.session, tenant=key.tenant)
        keys = [key for key in keys if key not in based]
        for key in keys:
            place = {"session": key.session, "tenant": key.tenant}
            async with sessions.open(key.agent, **place) as session, session.turn():
                session.append(Message.user("I am back"))
    store = FileStore(root)
    await store.open()
    for key in keys:
        before = expected[str(key)]["records"]
        log = [one async for chunk in store.read_log(key) for one in chunk.records]
        after = [[one.seq, one.epoch, one.kind, one.end] for one in log]
        assert after[: len(before)] == [one[:4] for one in before]
        assert (await audit(store, key)).problems == []
    holder = await store.holder(SessionKey("deleted"))
    assert holder is not None
    assert holder.deleted
    await store.aclose()


async def test_what_is_numbered_after_a_base_is_made_plain_by_a_migration(tmp_path: Path) -> None:
    source, target = FileStore(copy_of(GOLDEN, tmp_path)), MemoryStore()
    expected = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
    keys = [key for key in SESSIONS if expected[str(key)]["there"]]
    await source.open()
    await target.open()
    done = await migrate(source, target)
    await source.aclose()
    quiet = Shutdown(signals=False)
    async with perdure.connect(tmp_path / "store", shutdown=quiet) as sessions:
        async with perdure.connect(target, shutdown=quiet) as moved:
            for key in keys:
                if str(key) in done.failed:
                    continue
                place = {"session": key.session, "tenant": key.tenant}
                before = await sessions.load(key.agent, **place)
                after = await moved.load(key.agent, **place)
                assert before is not None, key
                assert after is not None, key
                assert after.context() == before.context()
                async with moved.open(key.agent, **place) as session, session.turn():
                    session.append(Message.user("I am back"))


async def test_what_would_change_what_is_numbered_after_a_base_is_refused_before_it_writes(
    tmp_path: Path,
) -> None:
    root = copy_of(GOLDEN, tmp_path)
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        keys = [key for key in SESSIONS if (await sessions._store.base_of(key) or Origin()).at]
        before = {key: await sessions._store.holder(key) for key in keys}
        folders = {key: contents(Path(sessions._store.inner.folder_of(key))) for key in keys}
        assert all(folders.values())
        for key in keys:
            place = {"session": key.session, "tenant": key.tenant}
            for refused in (
                sessions.rebuild_working_context(key.agent, **place),
                sessions.prune(Retention(keep_turns=0), id=key.agent, **place),
            ):
                with pytest.raises(SessionError, match="perdure migrate"):
                    await refused
            assert await sessions._store.holder(key) == before[key]
            assert contents(Path(sessions._store.inner.folder_of(key))) == folders[key]


async def test_forks_of_before_go_first_or_with_what_they_read(tmp_path: Path) -> None:
    root = copy_of(GOLDEN, tmp_path)
    store = FileStore(root)
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        for key in SESSIONS:
            base = await followed(store).base_of(key)
            if base is None or base.parent is None:
                continue
            parent = base.parent
            place = {"session": parent.session, "tenant": parent.tenant}
            for refused in (
                sessions.delete(parent.agent, **place),
                sessions.rename(parent.agent, "other", **place),
                sessions.forget(id=parent.agent, **place),
                sessions.prune(Retention(keep_turns=0), id=parent.agent, **place),
            ):
                with pytest.raises(SessionError, match=f"read by {key}"):
                    await refused
            return
    raise AssertionError("there is no fork")


async def test_what_may_not_be_pruned_keeps_no_other_from_it_and_is_named(tmp_path: Path) -> None:
    root = copy_of(GOLDEN, tmp_path)
    async with perdure.connect(root, shutdown=Shutdown(signals=False)) as sessions:
        report = await sessions.prune(Retention(keep_turns=0))
        based = [key for key in SESSIONS if (await sessions._store.base_of(key) or Origin()).at]
    refused = {refusal.key: refusal.why for refusal in report.refused}
    assert report.pruned
    assert refused.keys() >= {key for key in based if not key.tenant}
    assert not refused.keys() & {pruned.key for pruned in report.pruned}
    assert all("perdure migrate" in why for why in refused.values())


def test_every_kind_of_record_stands_in_a_golden_store() -> None:
    """A release that adds a kind adds a session that holds it: `python -m tests.golden.write`."""
    known = {
        value for name, value in vars(records).items() if name.isupper() and isinstance(value, str)
    }
    stored = set()
    for golden in VERSIONS:
        for session in json.loads((golden / "expected.json").read_text("utf-8")).values():
            stored |= {record[2] for record in session["records"]}
    # A copy holds the first, a salvaged bundle the second, a thread of LangGraph the third.
    assert known - stored == {"gap", "missing", "foreign"}
    assert stored - known == {"app:rating"}  # a kind of the application's own


def test_every_kind_of_document_stands_in_a_golden_store() -> None:
    stored = set()
    for session in json.loads((GOLDEN / "expected.json").read_text("utf-8")).values():
        stored |= {name.split("/")[0] for name in session.get("documents", ())}
    assert stored >= {
        "session.json", "memory.json", "episodic.jsonl", "semantic.jsonl",
        "working_context_snapshot.json", "state", "typed", "plugins", "checkpoints.jsonl",
    }  # fmt: skip


async def test_what_is_there_is_never_written_anew(tmp_path: Path) -> None:
    copy_of(GOLDEN, tmp_path)
    (tmp_path / "expected.json").write_bytes((GOLDEN / "expected.json").read_bytes())
    before = contents(tmp_path)
    assert await write(tmp_path) == []
    assert contents(tmp_path) == before


async def test_the_generator_writes_the_same_again(tmp_path: Path) -> None:
    """Times, ids and names are its own, so that a new session does not change by itself."""
    for part in ("one", "other"):
        assert await write(tmp_path / part) == [str(key) for key in SESSIONS]
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
