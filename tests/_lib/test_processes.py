"""Who has ended is known for certain, or not at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from perdure._lib.locks import has_ended, this_process

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux alone tells of processes in /proc"
)

CHILD = "from perdure._lib.locks import this_process; print(this_process(), flush=True); input()"


def test_this_process_has_not_ended() -> None:
    name = this_process()
    assert name == this_process()
    assert not has_ended(name)


@linux
def test_a_process_that_was_killed_has_ended() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().rstrip("\n")
        assert name.split(" ")[2] == str(child.pid)
        assert not has_ended(name)
        child.kill()
    assert has_ended(name)


@linux
def test_an_id_that_is_used_again_is_another_process() -> None:
    boot, space, pid, _ = this_process().split(" ")
    assert has_ended(f"{boot} {space} {pid} 1")


@pytest.mark.parametrize("name", ["", "x", "a b c d", "a b 1 2 3"])
def test_of_what_is_not_known_nothing_is_claimed(name: str) -> None:
    assert not has_ended(name)


@linux
def test_of_another_machine_or_container_nothing_is_claimed() -> None:
    boot, space, _, began = this_process().split(" ")
    assert not has_ended(f"other {space} 999999999 {began}")
    assert not has_ended(f"{boot} pid:[1] 999999999 {began}")
    assert has_ended(f"{boot} {space} 999999999 {began}")
