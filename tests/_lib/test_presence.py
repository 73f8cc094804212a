"""Presence: the living are told from the dead at once, and can be notified."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure._lib.files import Folder
from perdure._lib.locks import Presence


def present(path: Path, name: str) -> Presence:
    path.mkdir(0o700, exist_ok=True)
    return Presence(Folder.root(str(path)), name)


def test_somebody_is_present_until_it_leaves(tmp_path: Path) -> None:
    one, other = present(tmp_path / "p", "one"), present(tmp_path / "p", "a/b ..")
    assert one.is_present("a/b ..") is True
    assert other.is_present("one") is True
    assert one.is_present("one") is True
    assert one.is_present("nobody") is False
    with pytest.raises(BlockingIOError):
        present(tmp_path / "p", "one")
    other.close()
    other.close()
    assert one.is_present("a/b ..") is False
    one.close()
    assert list((tmp_path / "p").iterdir()) == []


_DIES = """
import os, sys
from perdure._lib.files import Folder
from perdure._lib.locks import Presence
one = Presence(Folder.root(sys.argv[1]), "dead")
one.notify("dead")
os._exit(0)
"""


def test_who_was_killed_is_gone_at_once_and_is_swept(tmp_path: Path) -> None:
    one = present(tmp_path / "p", "one")
    subprocess.run([sys.executable, "-c", _DIES, str(tmp_path / "p")], check=True)
    assert len(list((tmp_path / "p").iterdir())) == 3
    assert one.is_present("dead") is False
    one.sweep()
    one.sweep()
    assert len(list((tmp_path / "p").iterdir())) == 1
    assert one.is_present("one") is True
    one.close()


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="Windows has no fork")
def test_a_forked_child_does_not_keep_its_parent_present(tmp_path: Path) -> None:
    one, other = present(tmp_path / "p", "one"), present(tmp_path / "p", "other")
    one._held.let_go()  # what runs in the child: it closes its copy of the lock
    assert other.is_present("one") is False
    other.close()
    one.close()


def test_a_ring_is_heard_once_by_whom_it_is_for(tmp_path: Path) -> None:
    one, other = present(tmp_path / "p", "one"), present(tmp_path / "p", "other")
    before = one.notified(), other.notified()
    other.notify("one")
    other.notify("nobody")
    assert one.notified() != before[0]
    assert other.notified() == before[1]
    one.close()
    other.close()
