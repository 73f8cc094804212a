"""``perdure tune``: a recommendation with its reasons, and nothing changed."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message
from tests.cli.conftest import Command

QUICK = ("--seconds", "0")


async def talk(store: Path) -> None:
    async with perdure.connect(store) as sessions, sessions.open("talker") as session:
        for n in range(10):
            async with session.turn():
                session.append(Message.user(f"{n}"), Message.assistant("yes"))


def test_it_recommends_a_setting_that_fits(command: Command, store: Path, tmp_path: Path) -> None:
    """It takes what the store's sessions did, where they did enough."""
    anyio.run(talk, store)
    before = command("ls", "--store", str(store), "--json").json
    picture = tmp_path / "settings.svg"
    limits = ("--max-loss", "10")
    ran = command("tune", "--store", str(store), "--plot", str(picture), *limits, *QUICK)
    assert ran.status == 0, ran.err
    assert f"sessions in {store}" in ran.out
    assert ran.out.count("recommended") == 1
    assert "Autosave(debounce=" in ran.out
    assert "PERDURE_AUTOSAVE_MAX_DELAY=" in ran.out
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert command("ls", "--store", str(store), "--json").json == before


def test_where_the_choice_does_not_matter_nothing_needs_to_be_set(
    command: Command, store: Path
) -> None:
    ran = command("tune", "--store", str(store), "--sessions", "1", "--imagine", *QUICK)
    assert ran.status == 0, ran.err
    assert "default         30" in ran.out
    assert "Autosave(), which is the default: nothing needs to be set" in ran.out
    assert "PERDURE_AUTOSAVE" not in ran.out


def test_it_answers_in_json(command: Command, store: Path) -> None:
    limits = ("--max-loss", "5", "--imagine")
    answer = command("tune", "--store", str(store), *limits, "--json", *QUICK).json
    assert answer["recommended"] in answer["settings"]
    assert all(one["max_delay"] < 5 for one in answer["settings"])
    assert [one["sessions"] for one in answer["measured"]] == [1, 8, 64]
    assert "made-up" in answer["workload"]["source"]


def test_where_nothing_fits_it_says_why_and_exits_with_1(command: Command, store: Path) -> None:
    ran = command(
        "tune", "--store", str(store), "--price", "5", "--budget", "0", "--imagine", *QUICK
    )
    assert ran.status == 1
    assert "a month" in ran.out
    assert "no setting fits" in ran.out
    assert "Autosave(" not in ran.out


def test_a_store_where_little_happens_is_nothing_to_measure(
    command: Command, store: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "settings.svg"
    ran = command("tune", "--store", str(store), "--plot", str(picture), *QUICK)
    assert ran.status == 1
    assert "nothing to measure" in ran.err
    assert "--imagine" in ran.err
    assert ran.out == ""
    assert not picture.exists()
    assert command("tune", "--store", str(store), "--imagine", *QUICK).status == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--sessions", "0"), ("--max-loss", "-1"), ("--budget", "nan"), ("--seconds", "inf")],
)
def test_numbers_that_do_not_fit_are_named(
    option: str, value: str, command: Command, store: Path
) -> None:
    ran = command("tune", "--store", str(store), option, value)
    assert (ran.status, ran.out) == (2, "")
    assert option in ran.err
