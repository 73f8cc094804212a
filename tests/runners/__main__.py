"""perdure under every runner that people use, in processes of their own.

    python -m tests.runners --json FILE           # every cell
    python -m tests.runners --sample              # a few, plain asyncio.run with sniffio among them
    python -m tests.runners --only asyncio/sniffio

A cell is a runner, with or without sniffio, the lowest or the newest anyio that the project
allows, on files or SQLite. Exits with 1 if anything does not hold in one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.runners.matrix import Cell, cells, installed, lowest_anyio, run_cell

AT_ONCE = 2


def sample() -> list[Cell]:
    """Return the cells that every check runs."""
    low = lowest_anyio()
    return [
        Cell("asyncio", True, "newest", "file"),
        Cell("asyncio", True, "newest", "sqlite"),
        Cell("asyncio", False, "newest", "file"),
        Cell("asyncio", True, low, "file"),
        Cell("uvicorn", True, "newest", "sqlite"),
        Cell("uvloop", True, "newest", "file"),
        Cell("trio", True, "newest", "sqlite"),
        Cell("notebook", True, "newest", "file"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runners", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--only", default="", help="a part of a cell's name")
    given = parser.parse_args()
    chosen = sample() if given.sample else cells(("newest", lowest_anyio()))
    chosen = [cell for cell in chosen if given.only in str(cell)]
    with tempfile.TemporaryDirectory(prefix="runners-") as folder:
        for version in sorted({cell.anyio for cell in chosen}):
            installed(version, Path(folder))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = []
            for result in pool.map(lambda cell: run_cell(cell, Path(folder)), chosen):
                print("FAILED" if result.problems else "passed", result.cell, flush=True)
                for problem in result.problems:
                    print("   ", problem, flush=True)
                results.append(result)
    failed = sum(bool(result.problems) for result in results)
    if given.json:
        whole = {"passed": len(results) - failed, "failed": failed}
        whole["cells"] = [{**asdict(one), "cell": str(one.cell)} for one in results]
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
