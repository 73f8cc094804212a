"""One cell of the matrix with every run of the tests: what most people's programs are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runners.matrix import STORES, Cell, cells, lowest_anyio, run_cell


@pytest.mark.parametrize("store", STORES)
def test_a_program_of_plain_asyncio_with_sniffio_installed(store: str, tmp_path: Path) -> None:
    import sniffio

    assert sniffio
    result = run_cell(Cell("asyncio", True, "newest", store), tmp_path)
    assert result.problems == []
    assert {"overlapping_saves", "folds", "hooks", "sigterm", "stubborn"} <= set(result.passed)


def test_the_matrix_has_every_runner_on_every_store() -> None:
    every = cells(("newest", lowest_anyio()))
    runners = {"asyncio", "anyio", "anyio-trio", "trio", "uvloop", "notebook"}
    runners |= {"uvicorn", "uvicorn-uvloop"}
    assert {(cell.runner, cell.store) for cell in every} == {
        (runner, store) for runner in runners for store in STORES
    }
    bare = {cell.runner for cell in every if not cell.sniffio}
    assert bare == runners - {"trio", "anyio-trio"}
