"""Whatever a file of others holds, what comes out is a session or an error of perdure's."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.transfer.hostile import TARGETS, Samples, attempt


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return Samples.made(tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_hostile_file_is_read_or_refused(
    target: str, samples: Samples, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A short version of ``python -m tests.transfer.fuzz``, which measures time and memory, too."""

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32))
    def read(number: int) -> None:
        folder = tmp_path_factory.mktemp("one")
        attempt(target, samples, Random(number), folder)  # noqa: S311

    read()


def test_the_sound_files_are_read(samples: Samples, tmp_path: Path) -> None:
    """Else all would be refused, and nothing tried."""
    from tests.transfer.hostile import ran

    for number, bundle in enumerate(samples.bundles[:2]):
        path = tmp_path / f"{number}.bundle"
        path.write_bytes(bundle)
        ran("import", path, "--store", "memory:")
    (tmp_path / "x.json").write_bytes(samples.state)
    ran("import", tmp_path / "x.json", "--store", "memory:")
    ran("import", samples.folder / "files", "--store", "memory:")
    for sdk, database in samples.databases.items():
        assert "0 not imported" in ran("import", sdk, database, "--store", "memory:")
