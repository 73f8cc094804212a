"""Bundles and migrations on the command line, and the blobs that nothing reaches."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import perdure
from tests.cli.conftest import Command
from tests.golden.reader import HERE
from tests.transfer.sessions import fill


@pytest.fixture
def full(tmp_path: Path) -> Path:
    anyio.run(fill, tmp_path / "full")
    return tmp_path / "full"


def test_a_store_is_migrated_and_verified(command: Command, full: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.db"
    ran = command("migrate", str(full), f"sqlite:///{target}")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"13 of 13 sessions copied to {target} and verified, 0 of them")
    again = command("migrate", str(full), f"sqlite:///{target}", "--json").json
    assert (again["copied"], again["there"], again["failed"]) == (0, 13, {})
    back = command("migrate", f"sqlite:///{target}", str(tmp_path / "back"), "--tenant", "acme")
    assert back.out.startswith("1 of 1 sessions copied")
    assert ": no problems\n" in command("check", "--store", str(tmp_path / "back")).out


def test_a_store_that_is_not_there_is_not_migrated(command: Command, tmp_path: Path) -> None:
    ran = command("migrate", str(tmp_path / "none"), str(tmp_path / "target"))
    assert ran.status == 1
    assert "there is no store at" in ran.err
    assert not (tmp_path / "target").exists()


def test_what_is_in_the_way_is_told(command: Command, full: Path, tmp_path: Path) -> None:
    async def other() -> None:
        async with perdure.connect(tmp_path / "target") as sessions:
            async with sessions.open("agent-0") as session:
                session.append(perdure.Message.user("another"))

    anyio.run(other)
    ran = command("migrate", str(full), str(tmp_path / "target"))
    assert ran.status == 1
    assert "agent-0: NOT COPIED: " in ran.out
    assert "12 of 13 sessions copied" in ran.out


def test_a_bundle_goes_out_and_comes_in(command: Command, full: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.jsonl"
    store = ("--store", str(full))
    refused = command("export", "agent-1", "--layout", "bundle", *store)
    assert (refused.status, "--out" in refused.err) == (2, True)
    ran = command("export", "agent-1", "--layout", "bundle", "--out", str(out), *store, "--json")
    assert ran.json["bytes"] == out.stat().st_size
    into = ("--store", str(tmp_path / "into"))
    assert "agent-1: 17 records" in command("import", str(out), *into).out
    assert "other: 17 records" in command("import", str(out), "--id", "other", *into).out
    again = command("import", str(out), *into)
    assert (again.status, "has a session agent-1" in again.err) == (2, True)
    assert command("check", *into).out.endswith(": no problems\n")
    second = tmp_path / "two.jsonl"
    command("export", "agent-1", "--layout", "bundle", "--out", str(second), *into)
    assert second.read_bytes() == out.read_bytes()


def test_blobs_that_nothing_reaches_are_told_and_removed(command: Command, full: Path) -> None:
    import hashlib

    stray = b"nobody names this"
    name = hashlib.sha256(stray).hexdigest()

    async def put() -> None:
        store = perdure.store_for(full)
        await store.open()
        await store.put_blobs("", {name: stray})
        await store.aclose()

    async def there() -> set[str]:
        store = perdure.store_for(full)
        await store.open()
        names = set(await store.blob_names(""))
        await store.aclose()
        return names

    before = anyio.run(there)
    anyio.run(put)
    store = ("--store", str(full))
    assert "no session references 1 of" in command("check", *store).out
    kept = command("check", "--gc", *store, "--json").json
    assert kept["blobs"][0]["swept"] == {"quarantined": 0, "removed": 0, "bytes": 0}
    first = command("check", "--gc", "--grace", "0", *store, "--json").json
    assert first["blobs"][0]["swept"]["quarantined"] == 1
    second = command("check", "--gc", "--grace", "0", *store, "--json").json
    assert second["blobs"][0]["swept"] == {"quarantined": 0, "removed": 1, "bytes": len(stray)}
    assert anyio.run(there) == before
    assert command("check", *store).out.endswith(": no problems\n")
    refused = command("check", "agent-1", "--gc", *store)
    assert (refused.status, "leave the id out" in refused.err) == (2, True)


def test_a_session_that_cannot_be_read_keeps_every_blob(command: Command, full: Path) -> None:
    (log,) = full.joinpath("agents", "agent-0", "log").glob("*.jsonl")
    data = log.read_bytes()
    log.write_bytes(data[:100] + b"\x00" + data[101:])
    ran = command("check", "--gc", "--grace", "0", "--store", str(full), "--json")
    assert ran.status == 1
    assert ran.json["blobs"][0]["swept"] is None
    assert "agent-0 cannot be read" in ran.json["blobs"][0]["unknown"]


@pytest.mark.deep
def test_check_knows_what_migrations_leave_for_the_next_run(
    command: Command, full: Path, tmp_path: Path
) -> None:
    target = str(tmp_path / "target")
    assert command("migrate", str(full), target).status == 0
    seen = command("check", "--store", target)
    assert (seen.status, "would set them aside" in seen.out) == (0, False)
    assert "are receipts of `perdure migrate`" in seen.out
    for _ in range(2):
        command("check", "--gc", "--grace", "0", "--store", target)
    again = command("migrate", str(full), target, "--json").json
    assert (again["copied"], again["there"]) == (0, 13)

    async def open_all() -> None:
        async with perdure.connect(target) as sessions:
            for tenant in ("", "acme"):
                for info in await sessions.list(tenant=tenant):
                    session = await sessions.open(info.key.agent, tenant=tenant)
                    session.append(perdure.Message.user("here"))

    anyio.run(open_all)  # the program runs here now: they are of no use any more
    found = command("check", "--store", target, "--json").json["blobs"]
    assert [(one["receipts"], one["unreachable"] > 0) for one in found] == [(0, True)] * 2
    for _ in range(2):
        command("check", "--gc", "--grace", "0", "--store", target)
    found = command("check", "--store", target, "--json").json["blobs"]
    assert all(one["unreachable"] == 0 for one in found)


def test_a_fork_of_before_is_imported_behind_its_parent(command: Command, tmp_path: Path) -> None:
    files, store = HERE / "bundles" / "files", str(tmp_path / "store")
    assert (
        command("import", str(files / "plain.jsonl"), "--id", "ada", "--store", store).status == 0
    )
    fork = ("import", str(files / "fork.jsonl"), "--store", store)
    refused = command(*fork)
    assert refused.status == 2
    assert "--parent plain" in refused.err
    assert command(*fork, "--parent", "ada").status == 0
    shown = command("show", "fork", "--store", store).out
    assert "one" in shown
    assert "mine two" in shown
    other = command("import", str(tmp_path), "--parent", "ada", "--store", store)
    assert (other.status, "--parent is for a bundle" in other.err) == (2, True)
