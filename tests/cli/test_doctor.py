"""The doctor: each judgment, and the whole examination of stores that are well and that are not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import perdure
from perdure.autosave.options import MIB, Shutdown
from perdure.cli import doctor
from perdure.store import Capabilities
from perdure.stores import MasterKeys
from perdure.stores.memory import MemoryStore
from perdure.testing.faulty import FaultyStore
from tests.cli.conftest import Command, Ran

NOW = 1_800_000_000.0


def levels(ran: Ran) -> dict[str, str]:
    return {one["what"]: one["level"] for one in ran.json["checks"]}


def said(ran: Ran, what: str) -> str:
    (one,) = [one for one in ran.json["checks"] if one["what"] == what]
    return f"{one['detail']}: {one['cure']}"


def test_a_sound_store_has_no_problems(command: Command, store: Path) -> None:
    ran = command("doctor", "--store", str(store), "--grace", "30", "--json")
    assert (ran.status, ran.json["problems"]) == (0, 0)
    assert set(levels(ran)) >= {
        "versions",
        "settings",
        "store",
        "durability",
        "probe",
        "permissions",
        "file system",
        "space",
        "clock",
        "locks",
        "syncs",
        "grace",
    }
    assert levels(ran)["probe"] == levels(ran)["permissions"] == "ok"
    assert perdure.__version__ in said(ran, "versions")
    assert "synced" in said(ran, "durability")
    assert "files by fdatasync, and their folders too" in said(ran, "syncs")


def test_each_line_says_how_it_is(command: Command, store: Path) -> None:
    lines = command("doctor", "--store", str(store)).out.splitlines()
    assert {line.split(": ")[0] for line in lines} <= {"ok", "warning", "PROBLEM"}
    assert len(lines) >= 10


def test_the_probe_leaves_no_session(command: Command, store: Path) -> None:
    before = command("ls", "--store", str(store), "--json").json["sessions"]
    for _ in range(3):
        assert command("doctor", "--store", str(store)).status == 0
    assert command("ls", "--store", str(store), "--json").json["sessions"] == before
    assert command("check", "--store", str(store)).status == 0
    probe = store / "agents" / "perdure-doctor"
    assert len(list(probe.rglob("*"))) <= 3  # what keeps its epochs from starting again


def test_the_probe_leaves_no_session_under_a_wrong_key(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key = f"encrypted+file:{tmp_path / 'store'}", MasterKeys.new()
    monkeypatch.setenv("PERDURE_KEY", key)
    assert command("doctor", "--store", url).status == 0
    monkeypatch.setenv("PERDURE_KEY", MasterKeys.new())
    ran = command("doctor", "--store", url, "--json")
    assert (ran.status, levels(ran)["probe"]) == (1, "problem")
    assert "master key" in said(ran, "probe")
    monkeypatch.setenv("PERDURE_KEY", key)
    assert command("ls", "--store", url, "--json").json["sessions"] == []


def test_a_store_that_nobody_has_made_is_not_made(command: Command, tmp_path: Path) -> None:
    ran = command("doctor", "--store", str(tmp_path / "new"), "--json")
    assert ran.status == 0
    assert levels(ran)["store"] == "warning"
    assert levels(ran)["probe"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_made_is_a_problem(command: Command, tmp_path: Path) -> None:
    ran = command("doctor", "--store", str(tmp_path / "no" / "such"), "--json")
    assert ran.status == 1
    assert levels(ran)["store"] == "problem"
    assert "mkdir -p" in said(ran, "store")


def test_a_url_that_names_no_store_is_a_problem(command: Command) -> None:
    ran = command("doctor", "--store", "nosuch:x", "--json")
    assert ran.status == 1
    assert "no store is known by 'nosuch'" in said(ran, "store")


@pytest.mark.skipif(os.name != "posix", reason="Windows keeps no modes")
def test_a_store_that_others_can_write_is_a_problem(command: Command, store: Path) -> None:
    store.chmod(0o777)
    ran = command("doctor", "--store", str(store), "--json")
    assert ran.status == 1
    assert "chmod go-w" in said(ran, "store")


@pytest.mark.skipif(os.name != "posix", reason="Windows keeps no modes")
def test_a_folder_that_others_can_look_into_is_named(command: Command, store: Path) -> None:
    (store / "agents").chmod(0o755)
    ran = command("doctor", "--store", str(store), "--json")
    assert (ran.status, levels(ran)["permissions"]) == (0, "warning")
    assert f"chmod go-rwx {store / 'agents'}" in said(ran, "permissions")


def test_a_memory_store_is_warned_about(command: Command) -> None:
    ran = command("doctor", "--store", "memory:", "--json")
    assert (ran.status, levels(ran)["durability"]) == (0, "warning")


@pytest.mark.parametrize(
    ("how", "detail"), [("transient", "nothing was saved"), ("permanent", "refuses record 2")]
)
def test_a_store_that_takes_nothing_is_a_problem(
    how: str, detail: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick = FaultyStore(MemoryStore(), fail_on="append_many", how=how, times=None)  # type: ignore[arg-type]
    monkeypatch.setattr(perdure, "store_for", lambda url: sick)
    monkeypatch.setattr(doctor_module(), "PATIENCE", 0.05)
    ran = command("doctor", "--json")
    assert (ran.status, levels(ran)["probe"]) == (1, "problem")
    assert detail in said(ran, "probe")


def doctor_module() -> object:
    import sys

    return sys.modules["perdure.cli.doctor"]


@pytest.mark.parametrize(("grace", "status"), [("30", 0), ("21", 1), ("10", 1)])
def test_the_grace_period_is_compared_with_stopping(
    grace: str, status: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("doctor", "--store", "memory:", "--grace", grace).status == status
    monkeypatch.setenv("PERDURE_GRACE_PERIOD", grace)
    assert command("doctor", "--store", "memory:").status == status
    assert command("doctor", "--store", "memory:", "--deadline", "2").status == 0


def test_a_grace_period_that_is_no_number_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_GRACE_PERIOD", "30s")
    ran = command("doctor", "--store", "memory:")
    assert (ran.status, "PERDURE_GRACE_PERIOD='30s'" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("environment", "level", "part"),
    [
        ({}, "ok", "debounce=None"),
        ({"PERDURE_AUTOSAVE_DEBOUNCE": "3"}, "ok", "debounce=3.0"),
        ({"PERDURE_AUTOSAVE": "off"}, "ok", "autosave off"),
        ({"PERDURE_AUTOSAVE_DEBOUNCE": "fast"}, "problem", "PERDURE_AUTOSAVE_DEBOUNCE='fast'"),
        ({"PERDURE_AUTOSAVE_DEBOUNCED": "1"}, "warning", "PERDURE_AUTOSAVE_DEBOUNCED"),
    ],
)
def test_settings_of_the_environment(environment: dict[str, str], level: str, part: str) -> None:
    found = doctor.of_settings(environment)
    assert (found.level, part in found.detail) == (level, True)


@pytest.mark.parametrize(
    ("mode", "mine", "level"),
    [
        (0o700, True, "ok"),
        (0o750, True, "warning"),
        (0o700, False, "warning"),
        (0o770, True, "problem"),
        (0o702, False, "problem"),
    ],
)
def test_permissions(mode: int, mine: bool, level: str) -> None:
    assert doctor.of_mode("/x", stat.S_IFDIR | mode, mine=mine).level == level


@pytest.mark.parametrize(
    ("free", "files", "level"),
    [
        (2048 * MIB, 9, "ok"),
        (2048 * MIB, None, "ok"),
        (512 * MIB, 9, "warning"),
        (MIB, 9, "problem"),
        (2048 * MIB, 0, "problem"),
    ],
)
def test_space(free: int, files: int | None, level: str) -> None:
    assert doctor.of_space(free, 4096 * MIB, files).level == level


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [
        (62 * MIB, 64 * MIB, "ok"),
        (10 * MIB, 64 * MIB, "warning"),
        (2 * MIB, 64 * MIB, "problem"),
        (MIB // 2, MIB, "problem"),
        (50 * MIB, 2_000_000 * MIB, "problem"),
    ],
)
def test_space_is_judged_by_the_size_of_the_disk(free: int, total: int, level: str) -> None:
    assert doctor.of_space(free, total, None).level == level


@pytest.mark.parametrize(
    ("now", "stamped", "newest", "level"),
    [
        (NOW, NOW, NOW, "ok"),
        (NOW, NOW - 1.9, NOW, "ok"),
        (NOW, NOW + 30, NOW, "warning"),
        (NOW, NOW, NOW + 3600, "warning"),
        (100.0, 100.0, 100.0, "problem"),
    ],
)
def test_clock(now: float, stamped: float, newest: float, level: str) -> None:
    assert doctor.of_clock(now, stamped, newest).level == level


def test_network_locks_durability_and_grace() -> None:
    assert doctor.of_network("nfs4").level == "warning"
    assert doctor.of_network(None).level == "ok"
    assert [doctor.of_locks(taken).level for taken in (True, False, None)] == [
        "ok",
        "warning",
        "warning",
    ]
    assert doctor.of_syncs("F_FULLFSYNC", folders=True).level == "ok"
    on_windows = doctor.of_syncs("fsync", folders=False)
    assert (on_windows.level, "power cut" in on_windows.cure) == ("warning", True)
    durability = Capabilities(durability="appendfsync everysec").durability
    assert doctor.of_durability(durability).detail == durability
    assert doctor.of_grace(None, Shutdown()).cure
    below = doctor.of_grace(5, Shutdown())
    assert "are less than 5 together" in below.cure
