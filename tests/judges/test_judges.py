"""The commands that judge a store find what is wrong, and nothing else: some of `tests.judges`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.judges.__main__ import judged
from tests.judges.damages import BACKUPS, KINDS, STORE, Damage, Sound, found, make, missed

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module", params=KINDS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A sound store and its backup."""
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("damage", STORE, ids=lambda damage: damage.what)
def test_damage_to_a_store_is_found_by_all_that_look(
    damage: Damage, sound: Sound, tmp_path: Path
) -> None:
    ran = found(sound, damage, tmp_path, in_backup=False)
    assert {name: ran[name].text for name in missed(damage, ran)} == {}


@pytest.mark.parametrize("damage", BACKUPS, ids=lambda damage: damage.what)
def test_damage_to_a_backup_is_found_by_all_that_look(
    damage: Damage, sound: Sound, tmp_path: Path
) -> None:
    ran = found(sound, damage, tmp_path, in_backup=True)
    assert {name: ran[name].text for name in missed(damage, ran)} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_program_that_writes_no_problem_is_reported(kind: str) -> None:
    seen = judged(kind, 4, seed=1)
    assert (seen["false"], seen["real"]) == ([], [])
