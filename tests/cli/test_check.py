from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Limits, Message, Retention, Shutdown
from perdure.cli.check import log_problems
from perdure.errors import CorruptRecordError
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.manifest import Origin
from perdure.records.records import BASE, ENDING, EPOCH, MESSAGE, Entry, Record
from perdure.store import Draft, take_after
from perdure.stores.file import FileStore
from perdure.testing.conformance._kit import append_ok, group, take
from tests.cli.conftest import Command

SNAPSHOT = "working_context_snapshot.json"


def ada(store: Path) -> Path:
    return store / "agents" / "ada"


def tree(root: Path) -> dict[str, bytes]:
    """Return all files of the sessions, by path."""
    files = (path for path in (root / "agents").rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_a_sound_store_has_no_problems(command: Command, store: Path) -> None:
    ran = command("check", "--store", str(store))
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.splitlines()[-1].startswith("4 sessions with ")
    assert ran.out.endswith(": no problems\n")


def test_check_changes_nothing(command: Command, store: Path) -> None:
    (ada(store) / "session.json").write_text("{}")
    before = tree(store)
    assert command("check", "--store", str(store)).status == 1
    assert tree(store) == before


def test_check_as_json_tells_what_it_saw(command: Command, store: Path) -> None:
    report = command("check", "ada", "--store", str(store), "--json").json
    assert (report["checked"], report["problems"], report["repairable"]) == (1, 0, 0)
    (session,) = report["sessions"]
    assert session["agent"] == "ada"
    assert session["documents"] == 4
    assert session["findings"] == []


@pytest.mark.parametrize("name", ["session.json", "memory.json", SNAPSHOT, "state/mood.json"])
def test_a_damaged_document_is_found_and_repaired(name: str, command: Command, store: Path) -> None:
    document = ada(store) / name
    whole = document.read_bytes()
    document.write_bytes(whole.replace(b"5", b"6").replace(b"good", b"bad!")[:-1])
    ran = command("check", "--store", str(store))
    assert ran.status == 1
    assert f"ada: PROBLEM: document: {name} is lost, or not what its manifest says" in ran.out
    assert "`perdure check --repair` would repair 1 session\n" in ran.out
    ran = command("check", "--repair", "--store", str(store))
    assert ran.status == 0, ran
    assert "ada: repaired" in ran.out
    assert command("check", "--store", str(store)).status == 0
    assert name == "session.json" or name == SNAPSHOT or document.read_bytes() == whole


def test_a_lost_document_is_found_and_repaired(command: Command, store: Path) -> None:
    (ada(store) / "memory.json").unlink()
    assert command("check", "ada", "--store", str(store)).status == 1
    report = command("check", "ada", "--repair", "--store", str(store), "--json").json
    assert (report["problems"], report["repaired"]) == (0, 1)
    assert (ada(store) / "memory.json").exists()


def test_a_document_that_its_manifest_vouches_for_and_the_log_does_not_is_found(
    command: Command, store: Path
) -> None:
    anyio.run(_fold_a_lie, store)
    ran = command("check", "ada", "--store", str(store))
    assert ran.status == 1
    assert "memory.json differs from a fresh fold of the log up to record" in ran.out
    assert "state/mood.json is missing from the manifest" in ran.out
    assert command("check", "ada", "--repair", "--store", str(store)).status == 0
    assert command("check", "ada", "--store", str(store)).status == 0


async def _fold_a_lie(root: Path) -> None:
    """Write, as a broken release might, documents that the log does not fold to."""
    import hashlib

    import msgspec

    from perdure.records.manifest import FoldedDocument

    store = perdure.store_for(root)
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        session = await sessions.open("ada")
        old = await store.read_documents(session.key, None)
        lie = old.found["memory.json"].data.replace(b"favorite", b"despised")
        assert old.manifest is not None
        told = FoldedDocument(old.manifest.as_of_seq, hashlib.sha256(lie).hexdigest(), len(lie))
        documents = {**old.manifest.documents, "memory.json": told}
        del documents["state/mood.json"]
        manifest = msgspec.structs.replace(old.manifest, epoch=session.epoch, documents=documents)
        await store.write_documents(session.key, {"memory.json": lie}, manifest)


@pytest.mark.parametrize("limits", [Limits(), Limits(context_bytes=4000)])
def test_a_context_that_was_cut_or_taken_back_is_sound(
    limits: Limits, command: Command, tmp_path: Path
) -> None:
    root = tmp_path / "store"

    async def write() -> None:
        silent = Shutdown(signals=False)
        async with perdure.connect(root, limits=limits, shutdown=silent) as sessions:
            session = await sessions.open("ada")
            for number in range(40):
                version = session.append(Message.user(f"{number} {'x' * 200}"))
                session.append(Message.assistant("yes"))
                if number % 10 == 9:
                    await session.aclose()  # folds
                    session = await sessions.open("ada")
                    session.append(Message.user("never mind"))
                    await session.retract(after=version)

    anyio.run(write)
    ran = command("check", "--store", str(root))
    assert ran.status == 0, ran.out


def test_damage_in_the_log_is_a_problem_that_nothing_mends(command: Command, store: Path) -> None:
    log = ada(store) / "log" / "1-0.jsonl"
    log.write_bytes(log.read_bytes().replace(b"2 + 3", b"2 + 4"))
    before = tree(store)
    for tokens in (["check"], ["check", "--repair"]):
        ran = command(*tokens, "--store", str(store))
        assert ran.status == 1
        assert "ada: PROBLEM: log: " in ran.out
        assert "is damaged at byte" in ran.out
        assert "--repair` would repair" not in ran.out
    assert {name: data for name, data in tree(store).items() if "/log/" in name} == {
        name: data for name, data in before.items() if "/log/" in name
    }
    assert command("rebuild", "ada", "--store", str(store)).status == 1


def test_a_log_that_is_shorter_than_its_documents_is_a_problem(
    command: Command, store: Path
) -> None:
    log = ada(store) / "log" / "1-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-3]))
    ran = command("check", "ada", "--store", str(store))
    assert ran.status == 1
    assert "PROBLEM: log: " in ran.out
    assert command("check", "ada", "--repair", "--store", str(store)).status == 1


def test_no_repair_is_advised_for_the_end_of_a_log_that_nothing_repairs(
    command: Command, store: Path
) -> None:
    log = ada(store) / "log" / "1-0.jsonl"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    for options in ((), ("--repair",)):
        ran = command("check", "ada", *options, "--store", str(store))
        assert ran.status == 1
        assert "that are no whole records" in ran.out
        assert "check --repair" not in ran.out


def _enter(store: str) -> str:
    """Open ada and leave her again; return the restore report."""

    async def enter() -> str:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as session:
                return str(session.restore_report)

    return anyio.run(enter)


def test_a_write_that_was_cut_is_a_problem_until_it_is_accepted(
    command: Command, store: Path
) -> None:
    path = ada(store) / "log" / "1-0.jsonl"
    with path.open("ab") as log:
        log.write(b'{"n":99,"e":1,"k":"mess')
    ran = command("check", "ada", "--store", str(store))
    assert ran.status == 1
    assert f"ada: PROBLEM: log: 23 bytes that are no whole records, at the end of {path}" in ran.out
    for tokens in (["show"], ["export", "--out", str(store / "out"), "--layout", "bundle"]):
        told = command(*tokens[:1], "ada", *tokens[1:], "--store", str(store))
        assert told.status == 0
        assert "23 bytes that are no whole records" in told.out + told.err

    for _ in range(2):
        assert "cut 23 bytes that are no whole records, kept in" in _enter(str(store))
        ran = command("check", "ada", "--store", str(store))
        assert ran.status == 1
        assert "kept in" in ran.out

    ran = command("check", "ada", "--repair", "--store", str(store))
    assert ran.status == 0, ran.out
    ran = command("check", "ada", "--store", str(store))
    assert ran.status == 0
    assert "note: leftover: 1 files (23 B) in" in ran.out
    assert "cut" not in _enter(str(store))


def test_the_end_of_a_log_is_accepted_before_anybody_opens_it(
    command: Command, store: Path
) -> None:
    with (ada(store) / "log" / "1-0.jsonl").open("ab") as log:
        log.write(bytes(500))
    assert command("check", "--store", str(store)).status == 1
    assert command("check", "--repair", "--store", str(store)).status == 0
    assert command("check", "--store", str(store)).status == 0


def test_what_was_cut_from_an_encrypted_log_is_a_problem_as_well(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_KEY", "00" * 32)
    url = f"encrypted+file:{tmp_path}/store"
    _enter(url)
    with (ada(tmp_path / "store") / "log" / "1-0.jsonl").open("ab") as log:
        log.write(bytes(500))
    assert command("check", "--store", url).status == 1
    assert "cut 500 bytes" in _enter(url)
    ran = command("check", "--store", url)
    assert ran.status == 1
    assert "500 bytes that are no whole records, kept in" in ran.out
    assert command("check", "--repair", "--store", url).status == 0
    assert command("check", "--store", url).status == 0


@pytest.mark.parametrize("scheme", ["file:", "encrypted+file:"])
def test_a_store_whose_line_ends_were_converted_is_refused_with_the_cause_and_salvaged(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("PERDURE_KEY", "00" * 32)
    url, root = f"{scheme}{tmp_path}/store", tmp_path / "store"

    async def turns(count: int) -> list[str]:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as session:
                for number in range(count):
                    async with session.turn():
                        session.append(Message.user(f"{number}?"), Message.assistant(f"{number}!"))
                return [message.text for message in session.context()]

    async def load() -> None:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            await sessions.load("ada")

    whole = anyio.run(turns, 20)
    files = [path for path in (root / "agents").rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    logs = {path: path.read_bytes() for path in root.rglob("*.jsonl")}
    for attempt in (lambda: anyio.run(turns, 1), lambda: anyio.run(load)):
        with pytest.raises(CorruptRecordError, match="autocrlf.* CR LF. Convert all files of the"):
            attempt()
    out = str(tmp_path / "out")
    for tokens in (["check"], ["check", "--repair"], ["show", "ada"]):
        ran = command(*tokens, "--store", url)
        assert ran.status == 1
        assert "CR LF" in ran.out + ran.err
    assert command("export", "ada", "--out", out, "--store", url).status == 1
    assert {path: path.read_bytes() for path in root.rglob("*.jsonl")} == logs

    ran = command("export", "ada", "--salvage", "--out", out, "--store", url)
    assert ran.status == 0
    assert "ada: 80 records, " in ran.out
    assert "MISSING: record" not in ran.out
    for path in files:
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))
    assert anyio.run(turns, 0) == whole
    assert command("check", "--store", url).status == 0


def test_what_kills_leave_behind_is_noted(command: Command, store: Path) -> None:
    folder = ada(store)
    shutil.copy(folder / "manifest-1.json", folder / "manifest-1.next")
    (folder / "quarantine").mkdir()
    (folder / "quarantine" / "memory.json.1").write_text("evidence")
    ran = command("check", "ada", "--store", str(store))
    assert ran.status == 0
    assert "note: leftover: a fold that did not end left manifest-1.next" in ran.out
    assert "note: leftover: 1 files (8 B) in" in ran.out


def test_a_session_in_use_is_checked_and_not_repaired(command: Command, store: Path) -> None:
    (ada(store) / "memory.json").unlink()

    async def held() -> None:
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as session:
                session.append(Message.user("More"))
                await session.save()
                ran = await anyio.to_thread.run_sync(
                    lambda: command("check", "ada", "--repair", "--store", str(store))
                )
                assert ran.status == 1
                assert "note: lease: process" in ran.out
                assert "not repaired: session ada is held by process" in ran.out

    anyio.run(held)


def test_a_session_of_which_nothing_can_be_read_is_a_problem(command: Command, store: Path) -> None:
    """A listing has it, and nobody can open it: its log says that more was removed than it has."""

    async def write() -> None:
        made = perdure.store_for(store)
        await made.open()
        grant = await take(made, SessionKey("cut"))
        base = Entry(BASE, encode(Origin(at=1, cut=10**15)), end=True)
        await append_ok(made, grant, 2, base, *group("x"))
        await made.release(grant.key, grant.epoch)
        await made.aclose()

    anyio.run(write)
    done = command("check", "--store", store)
    assert done.status == 1
    assert "cut: PROBLEM: log: none of its records can be read" in done.out


def test_check_of_an_unknown_id_says_so(command: Command, store: Path) -> None:
    ran = command("check", "nobody", "--store", str(store))
    assert ran.status == 1
    assert "there is no session nobody" in ran.err


def record(seq: int, epoch: int, kind: str = MESSAGE, *, end: bool = True) -> Record:
    payload = b'{"role":"user","content":"x"}' if kind == MESSAGE else b"{}"
    return Record(seq, epoch, kind, payload, end)


SOUND = [record(1, 1, EPOCH), record(2, 1), record(3, 2, EPOCH), record(4, 2)]


def test_a_sound_log_has_no_problems() -> None:
    assert log_problems(SOUND) == []
    assert log_problems([]) == []


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([SOUND[0], SOUND[3]], "record 4 is where record 2 belongs"),
        ([*SOUND, record(5, 1)], "record 5 is of epoch 1, after one of epoch 2"),
        ([SOUND[0], record(2, 2)], "epoch 2 begins at record 2 without an epoch record"),
        ([SOUND[0], record(2, 1, end=False)], "the last group, at record 2, has no end"),
        (
            [SOUND[0], Record(2, 1, MESSAGE, b'{"role":"pope"}', True)],
            "record 2, of kind message, cannot be decoded",
        ),
        ([SOUND[0], Record(2, 1, "future", b"{", True)], "record 2, of kind future, cannot be"),
    ],
)
def test_a_log_out_of_order_is_a_problem(records: list[Record], said: str) -> None:
    (finding,) = log_problems(records)
    assert finding.detail.startswith(said)
    assert (finding.problem, finding.repairable) == (True, False)


def test_gc_removes_a_copy_that_a_process_was_killed_in(command: Command, store: Path) -> None:
    async def killed() -> None:
        dying = FileStore(store)
        await dying.open()
        draft = Draft(source=SessionKey("ada"), generation=1, up_to=5, purpose="fork")
        await take_after(dying, SessionKey("ada-2"), after=0, draft=draft)
        await dying.aclose()

    def listed() -> list[str]:
        async def read() -> list[str]:
            reading = FileStore(store)
            await reading.open()
            found = [one.key.agent for one in await reading.drafts("")]
            await reading.aclose()
            return found

        return anyio.run(read)

    anyio.run(killed)
    assert "ada-2" not in command("check", "--store", str(store)).out
    assert listed() == ["ada-2"]
    ran = command("check", "--gc", "--store", str(store))
    assert (ran.status, ran.err) == (0, "")
    assert "ada-2: an unfinished copy of ada was removed" in ran.out
    assert listed() == []


def test_a_session_whose_forgetting_was_cut_off_is_no_damage_and_is_forgotten_again(
    command: Command, tmp_path: Path
) -> None:
    """The blobs have gone already, the session has not; while it is held, it may still go."""
    url = f"sqlite:///{tmp_path / 'data.db'}"

    async def cut(*, released: bool) -> None:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            async with sessions.open("ada") as session:
                session.memory.set("large", "a value " * 9000)
        store = perdure.store_for(url)
        await store.open()
        grant = await take(store, SessionKey("ada"))
        await append_ok(store, grant, await store.head(grant.key) + 1, Entry(ENDING, b"{}"))
        for _ in range(2):
            await store.sweep("", set(), older_than=0.0)
        if released:
            await store.release(grant.key, grant.epoch)
            await store.aclose()
            return
        ran = await anyio.to_thread.run_sync(lambda: command("check", "--store", url))
        assert (ran.status, ran.err) == (0, "")
        assert "ada: note: forget: it is being forgotten" in ran.out
        await store.aclose()

    anyio.run(partial(cut, released=False))
    anyio.run(partial(cut, released=True))
    ran = command("check", "--store", url)
    assert ran.status == 1
    (said,) = [line for line in ran.out.splitlines() if "PROBLEM" in line]
    assert said.startswith("ada: PROBLEM: forget: its forgetting was cut off: forget it again")
    assert command("forget", "ada", "--yes", "--store", url).status == 0
    assert command("check", "--store", url).status == 0


def test_damage_to_what_nothing_references_stops_no_check_and_is_collected(
    command: Command, store: Path
) -> None:
    async def fill() -> None:
        for value in ("one", "two"):
            async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
                async with sessions.open("ada") as session:
                    session.memory.set("large", value * 9000)

    def blobs() -> list[Path]:
        return [path for path in (store / "blobs").rglob("*") if path.is_file()]

    anyio.run(fill)
    (garbage,) = [path for path in blobs() if b"one" in path.read_bytes()]
    garbage.write_bytes(garbage.read_bytes()[:100])
    ran = command("check", "--store", str(store))
    assert (ran.status, ran.err) == (0, "")
    assert "no session references 1 of 2" in ran.out
    for _ in range(2):
        assert command("check", "--gc", "--grace", "0", "--store", str(store)).status == 0
    assert garbage not in blobs()


def test_a_receipt_of_a_migration_counts_by_its_name_even_if_it_is_damaged(
    command: Command, store: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    assert command("migrate", str(store), str(target)).status == 0
    for path in (target / "blobs").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    ran = command("migrate", str(store), str(target))
    assert (ran.status, ran.err) == (0, "")
    assert "0 of 4 sessions copied" in ran.out
    assert command("check", "--store", str(target)).status == 0


def test_gc_tells_the_blobs_of_encrypted_sessions_apart(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions have equal values, each under its own key; what one left behind goes."""
    monkeypatch.setenv("PERDURE_KEY", "5a" * 32)
    url = f"encrypted+sqlite:///{tmp_path / 'data.db'}"

    async def begin() -> None:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            for agent in ("ada", "eve"):
                async with sessions.open(agent) as session:
                    session.memory.set("large", "a value " * 9000)
        store = perdure.store_for(url)
        await store.open()
        grant = await take_after(store, SessionKey("eve"), after=1)
        await store.delete(grant.key, grant.epoch)  # as a kill leaves it: its blobs are there
        await store.aclose()

    async def left() -> tuple[int, str]:
        store = perdure.store_for(url)
        async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
            view = await sessions.load("ada")
            assert view is not None
            return len(await store.blob_names("")), await view.memory.get("large")

    anyio.run(begin)
    assert anyio.run(left) == (2, "a value " * 9000)
    assert "no session references 1 of 2" in command("check", "--store", url).out
    for _ in range(2):
        assert command("check", "--gc", "--grace", "0", "--store", url).status == 0
    assert anyio.run(left) == (1, "a value " * 9000)


def test_gc_without_grace_removes_at_once_what_was_pruned_before_it_was_forgotten(
    command: Command, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'data.db'}"

    async def prune_and_forget() -> None:
        async with perdure.connect(url, shutdown=Shutdown(signals=False)) as sessions:
            for text in ("one", "two", "three", "four", "five"):
                async with sessions.open("eve") as session:
                    async with session.turn():
                        session.append(Message.user(text))
                        session.memory.set("large", text * 50_000)
                await sessions.prune(Retention(keep_turns=1), id="eve")
            await sessions.forget("eve")

    async def left() -> list[str]:
        store = perdure.store_for(url)
        await store.open()
        names = await store.blob_names("")
        await store.aclose()
        return names

    anyio.run(prune_and_forget)
    assert anyio.run(left)
    for _ in range(2):
        assert command("check", "--gc", "--grace", "0", "--store", url).status == 0
    assert not anyio.run(left)
